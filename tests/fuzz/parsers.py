"""Every parser of the package as a function of bytes, which raises where a hostile file would do harm.

What a parser may do with any bytes at all: return something sound, or raise a ReshardError. Anything else that it
raises, and whatever it returns that is not sound, is a defect.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from unittest import mock

from reshard_mpi import formats
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats import dcp, hdf5
from reshard_mpi.formats.dcp import file_layout
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import native_shard
from reshard_mpi.formats.locations import ByteRanges, LibraryRead, StridedView
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.formats.nest import flatten_tree, nodes, rebuild_tree
from reshard_mpi.formats.safetensors import huggingface as safetensors_index
from reshard_mpi.formats.safetensors import mindformers_index, torch_dcp
from reshard_mpi.formats.structure import opened
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorType
from reshard_mpi.formats.torch import pickle_hooks, pickler, unpickler
from reshard_mpi.formats.torch.file_content import Storages
from reshard_mpi.formats.torch.tensors import is_tensor
from reshard_mpi.journal.commit import commit
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, record_path, run_path
from reshard_mpi.journal.run_records import CommitRecord, RunIdentity
from reshard_mpi.journal.run_status import as_lines, state_of
from reshard_mpi.journal.target_records import TargetRecord
from reshard_mpi.mapping import apply_rules
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.sharding import strategy_files, strategy_table
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import replicated
from reshard_mpi.sharding.state_names import is_named_as_state
from reshard_mpi.sharding.strategy import Strategy, named_after
from reshard_mpi.text import one_line

CORPUS = Path(__file__).parent / "corpus"
DCP_FILE = Path(__file__).parent.parent / "formats" / "golden" / "dcp" / "four_ranks" / "__0_0.distcp"
# Elements of what must be decoded that are looked at: enough for the files of a corpus.
_MAX_DECODED = 1 << 12


def shard(format_name: str, data: bytes) -> None:
    """Locate a shard, and read what must be decoded."""
    module = formats.by_name(format_name)
    with _file(data, formats.info(format_name).suffixes[0]) as path, suppress(ReshardError):
        manifest = module.locate(str(path))
        _require_sound(manifest, len(data))
        for entry in manifest.tensors.values():
            if isinstance(entry.source, LibraryRead) and entry.size_bytes <= _MAX_DECODED:
                with suppress(ReshardError):
                    assert entry.source.read(Box.whole(entry.shape)).nbytes == entry.size_bytes


def dcp_without_checksums(data: bytes) -> None:
    """Read what a file of a distributed checkpoint says of itself as if its checksum were right."""
    with mock.patch.object(file_layout, "crc32", lambda *_: _Any()):
        shard("dcp", data)


def dcp_metadata(data: bytes) -> None:
    """Read the metadata of a folder, with one of its files, and what lies in its pieces."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".metadata").write_bytes(data)
        (folder / "__0_0.distcp").write_bytes(DCP_FILE.read_bytes())
        with suppress(ReshardError):
            dcp.files_of(name)
            manifest = dcp.open_folder(name)[0]
            assert isinstance(manifest.tensors, ChunkedTensors)
            for tensors in manifest.tensors.files:
                for number, kind in enumerate(tensors.kind_ids):
                    place = tensors.source(number)
                    if tensors.kinds[kind].size_bytes and isinstance(place, ByteRanges):
                        ends = {part.path: part.offset_bytes + part.length_bytes for part in place.ranges}
                        assert all(end <= Path(path).stat().st_size for path, end in ends.items())


def torch_pickle(data: bytes) -> None:
    """Read the pickle of a file of torch, and write what it is a pickle of."""
    try:
        root, _ = unpickler.load(data, hooks=Storages().hooks)
        flattened = flatten_tree.flatten(root, is_tensor)
    except (pickle_hooks.PickleError, nodes.NestError):
        return
    again = rebuild_tree.rebuild(dict(flattened.tensors), flattened.strings)
    flattened_again = flatten_tree.flatten(again, is_tensor)
    assert flattened_again.tensors == flattened.tensors
    assert flattened_again.strings == flattened.strings or flattened.left_out


def nest_text(data: bytes) -> None:
    """Make a tree of the text of a nest and some tensors, and a pickle of the tree."""
    kind = TensorType(BY_NAME["float32"], (2,))
    leaves = {name: pickler.WrittenTensor(str(at), kind) for at, name in enumerate(("w", "a.w", "a.0.step", "list.0"))}
    with suppress(nodes.NestError):
        root = rebuild_tree.rebuild(leaves, {NEST: data.decode(errors="replace"), "note": "text"})
        again, _ = unpickler.load(pickler.dumps(root), hooks=Storages().hooks)
        names = {name for name, _ in flatten_tree.flatten(again, is_tensor).tensors}
        assert names <= leaves.keys()


class _Any(int):
    """A checksum that is right, whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _: object) -> bool:
        return True


def native_without_checksums(data: bytes) -> None:
    """Read the index of a native shard as if all checksums were right: who makes a file can make them so."""
    with _file(data, ".h5") as path, suppress(ReshardError), opened(str(path)) as file:
        end = hdf5.end_of_file(file)
        with mock.patch.object(native_shard, "crc32", lambda *_: _Any()):
            manifest = native_shard.locate(file, end)
            native_shard.stored_sums(file, end)
        if manifest is not None:
            _require_sound(manifest, end)


def strategy_file(suffix: str, data: bytes) -> None:
    """Load a strategy, and write it down as native shards do."""
    with _file(data, suffix) as path, suppress(ReshardError):
        loaded = strategy_files.load(str(path))
        assert strategy_table.loads(strategy_table.dumps(loaded), "again") == loaded


def patterns(data: bytes) -> None:
    """Match the first line with the others as patterns, and what it may be named after."""
    name, *globs = data.decode("utf-8", "surrogateescape").split("\n")
    globs = [glob for glob in globs if glob]
    strategy = Strategy(1, 1, {}, tuple((glob, replicated(1)) for glob in globs))
    assert strategy.rule_of(name) == next(
        (number for number, glob in enumerate(globs) if fnmatchcase(name, glob)), None
    )
    firsts = {
        base: next((glob for glob in globs if fnmatchcase(base, glob)), "*") for base in (name, *named_after(name))
    }
    bases = [base for base in named_after(name) if firsts[base] != "*"]
    if firsts[name] == "*":
        bases = [base for base in bases if not base.endswith((".step", ".state_step"))]
        bases = bases if any(is_named_as_state(name, base) for base in bases) else []
    assert list(strategy.followed(name)) == bases


def placement_table(data: bytes) -> None:
    """Read the table of a native shard as `source` does."""
    with suppress(ReshardError):
        loaded = strategy_table.loads(data.decode(errors="replace"), "a shard")
        assert strategy_table.loads(strategy_table.dumps(loaded), "again") == loaded


def records(data: bytes) -> None:
    """Read the records that a run keeps in its target folder, and tell of them as `inspect` and `commit` do."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / STATE).mkdir()
        for path in (run_path(folder / STATE), record_path(folder / STATE, 0), folder / COMMIT_RECORD):
            path.write_bytes(data)
        record = TargetRecord.read(folder / STATE, 0)
        if record is not None:
            again = json.loads(record.as_text())
            assert again.items() <= {**json.loads(data), "check": again["check"]}.items()  # earlier versions had none
        committed = CommitRecord.read(folder)
        if committed is not None:
            assert list(committed.files) and set(committed.files) == set(range(len(committed.files)))
        run = RunIdentity.recorded(folder / STATE)
        if run is not None:
            assert json.loads(run.as_text()) == json.loads(data)
            with suppress(ReshardError):
                commit(folder)
        for line in as_lines(state_of(folder)):
            assert one_line(line).isprintable()


def hugging_face_index(data: bytes) -> None:
    """Read the index of a Hugging Face folder; what is read must be what Python's own parser reads."""
    with _file(data, ".json") as path, suppress(ReshardError):
        found = safetensors_index.read(str(path))
        facts = json.loads(data)
        assert found == facts["weight_map"]
        assert all(
            name and not Path(file).is_absolute() and ".." not in Path(file).parts for name, file in found.items()
        )


def mindformers_index_of(data: bytes) -> None:
    """Read the index of a MindFormers checkpoint; what is read must be what Python's own parser reads."""
    with _file(data, ".json") as path, suppress(ReshardError), opened(str(path)) as file:
        found = mindformers_index.read(file)
        facts = json.loads(data)
        assert found.keys() == facts["state_dict_metadata"].keys()
        assert sum(len(tensor.holders) for tensor in found.values()) == len(facts["storage_data"])
        for name, (cut, holders) in found.items():
            said = facts["state_dict_metadata"][name]
            assert (list(cut.shape), list(cut.counts)) == (said["global_shape"], said["axis_fragmentations"])
            assert len(said["chunk"]) == len(holders) == math.prod(cut.counts)
            assert all(part["local_shape"] == list(cut.slice_shape) for part in said["chunk"])
            for number, (box, files) in enumerate(zip(cut.boxes(), holders)):
                assert box.shape == cut.slice_shape and Box.whole(cut.shape).contains(box)
                places = facts["storage_data"][str((name, (number,)))]
                assert {*files} == {place["file_name"] for place in places}
                assert all(Path(file).name == file and file != ".." for file in files)


def sharding_text_of(data: bytes) -> None:
    """Read what a file of torch's says of its pieces; it must be what Python's own parser reads."""
    text = data.decode(errors="replace")
    with suppress(ReshardError):
        found = torch_dcp.saved_offsets(text, "a file")
        assert {name: {"saved_offsets": list(numbers)} for name, numbers in found.items()} == json.loads(text)


# A parser's corpus is the folder of its name, without `_unchecked`.
def map_file(data: bytes) -> None:
    """Read a map, and take some tensors through it in both directions; every element is made exactly once."""
    try:
        rules = parse_rules(data.decode(errors="replace"), "map.toml", {"heads": 4, "deep": {"size": 2}})
    except ReshardError:
        return
    shapes = {"a.0.q": (8, 4), "a.1.q": (8, 4), "a.0.k": (4, 4), "a.1.k": (4, 4), "b": (16,), "c.norm.w": (4,), "s": ()}
    shapes |= {f"e.{number}.w": (2, 3) for number in range(4)} | {"moments.a.0.q": (8, 4)}
    inventory = {name: TensorType(BY_NAME["float32"], shape) for name, shape in shapes.items()}
    for forward in (True, False):
        with suppress(ReshardError):
            for made in apply_rules.applied(rules, apply_rules.Selection(), inventory, forward).made:
                whole = Box.whole(made.assembly.shape)
                boxes = [*(pair.to for pair in made.assembly.pairs), *made.assembly.zeros]
                assert sum(box.size for box in boxes) == whole.size and all(map(whole.contains, boxes))
                for pair in made.assembly.pairs:
                    assert Box.whole(shapes[made.sources[pair.source]]).contains(pair.region)
                    assert pair.region.size == pair.to.size


PARSERS: dict[str, Callable[[bytes], None]] = {
    "ckpt": partial(shard, "ckpt"),
    "safetensors": partial(shard, "safetensors"),
    "dcp": partial(shard, "dcp"),
    "dcp_unchecked": dcp_without_checksums,
    "dcp_metadata": dcp_metadata,
    "torch": partial(shard, "torch"),
    "torch_pickle": torch_pickle,
    "nest": nest_text,
    "hugging_face_index": hugging_face_index,
    "mindformers_index": mindformers_index_of,
    "sharding_text": sharding_text_of,
    "hdf5_native": partial(shard, "hdf5"),
    "hdf5_native_unchecked": native_without_checksums,
    "hdf5_foreign": partial(shard, "hdf5"),
    "strategy_protobuf": partial(strategy_file, ".ckpt"),
    "strategy_json": partial(strategy_file, ".json"),
    "strategy_toml": partial(strategy_file, ".toml"),
    "placement_table": placement_table,
    "patterns": patterns,
    "records": records,
    "map": map_file,
}


def corpus(parser: str) -> list[Path]:
    """Return the files of a parser's corpus."""
    return sorted(path for path in (CORPUS / parser.removesuffix("_unchecked")).iterdir() if path.is_file())


class _file:  # noqa: N801
    """A temporary file; quicker than a temporary folder, which counts where it is made a million times."""

    def __init__(self, data: bytes, suffix: str) -> None:
        self._data = data
        self._opened = tempfile.NamedTemporaryFile(suffix=suffix)  # noqa: SIM115

    def __enter__(self) -> Path:
        self._opened.write(self._data)
        self._opened.flush()
        return Path(self._opened.name)

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _require_sound(manifest: Manifest, size_bytes: int) -> None:
    """Assert that what is said to lie in a file can lie there."""
    for name, entry in manifest.tensors.items():
        assert entry.name == name and name
        assert all(length >= 0 for length in entry.shape)
        if isinstance(entry.source, LibraryRead):
            assert len(entry.source.chunk) == len(entry.shape)
            continue
        ranges = entry.stored.ranges if entry.stored is not None else ()
        if isinstance(entry.source, StridedView):
            assert len(entry.source.strides_bytes) == len(entry.shape)
            assert all(step >= 0 and step % entry.dtype.itemsize_bytes == 0 for step in entry.source.strides_bytes)
        else:
            assert sum(part.length_bytes for part in ranges) == entry.size_bytes
        for part in ranges:
            assert part.path == manifest.path
            assert part.offset_bytes >= 0 and part.offset_bytes + part.length_bytes <= size_bytes

"""Checkpoints of torch.distributed.checkpoint: what torch 2.13 has written, and what a peer of this program does.

`golden/dcp/four_ranks` is of a mesh of 2 x 2 ranks: boxes of rows, columns and both, uneven and empty chunks, a
replicated tensor, a transposed one, objects, lists, a key with dots.
"""

from __future__ import annotations

import io
import json
import sys
import types
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import dcp_peer, torch_peer
from support.dcp_peer import MetadataIndex, Size, arrays_of, listed
from support.examples import few_cases
from support.torch_runs import transformed, tree_of

from reshard_mpi import formats, transform
from reshard_mpi.errors import CoverageError
from reshard_mpi.formats import dcp
from reshard_mpi.formats.dcp import metadata
from reshard_mpi.formats.dcp.bulk_metadata import States
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import decoded, parsed
from reshard_mpi.formats.torch.pickle_hooks import PLAIN_CALLS, PickleHooks, no_persistent_ids
from reshard_mpi.formats.torch.tensors import SIZE, numbers
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import ArraysByName, CheckpointConformance

GOLDEN = Path(__file__).parent / "golden" / "dcp"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def test_what_torch_has_written() -> None:
    found = arrays_of(GOLDEN / "four_ranks")
    assert {name: (zlib.crc32(array.tobytes()), list(array.shape)) for name, array in found.items()} == {
        name: (facts["crc32"], facts["shape"]) for name, facts in EXPECTED.items()
    }
    manifest = dcp.open_folder(str(GOLDEN / "four_ranks"))[0]
    assert manifest.left_out == ()
    assert {name: entry.dtype.name for name, entry in manifest.tensors.items()} == {
        name: facts["dtype"] for name, facts in EXPECTED.items()
    }
    root, order = parsed(manifest.strings[NEST])
    in_order = [name for name in decoded(order or ()) if name.startswith(("model.", "optim."))]  # as they were saved
    assert in_order == [
        *(f"model.{name}" for name in ["row", "col", "uneven", "tiny", "both", "zero2", "rep", "plain", "scalar"]),
        *(f"optim.state.row.{name}" for name in ("step", "exp_avg")),
    ]
    assert root["dict"] == [
        ["model", {"dict": []}],
        [
            "optim",
            {
                "dict": [
                    ["state", {"dict": [["row", {"dict": []}]]}],
                    ["param_groups", [{"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.95]}], ["params", ["row"]]]}]],
                ]
            },
        ],
        ["step", 12],
        ["name", "run"],
        ["list", [{"tensor": None}, {"dict": []}]],
        ["plainlist", [1, 2, 3]],
        ["none", None],
        ["keys.with.dots", {"dict": []}],
    ]


def test_its_files() -> None:
    names = [Path(path).name for path in dcp.files_of(str(GOLDEN / "four_ranks"))]
    assert names == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]


@pytest.mark.slow
class TestPieces(CheckpointConformance):
    """Random chunks in random files, some of which overlap."""

    info = formats.info("dcp")

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> None:
        files = data.draw(st.integers(1, 3))
        tensors = {}
        for name, array in arrays.items():
            boxes = {box.start: box for box in reversed(boxes_of(array.shape, data))}
            pieces = [(f"__{data.draw(st.integers(0, files - 1))}_0.distcp", box) for box in boxes.values()]
            tensors[name] = listed(array, pieces)
        dcp_peer.write(folder, tensors, {"epoch": ("__0_0.distcp", 3)})


def boxes_of(shape: tuple[int, ...], data: st.DataObject) -> list[Box]:
    """Draw boxes that cover a tensor together, and some that overlap these."""
    whole = Box.whole(shape)
    if not whole.size or not shape:
        return [whole]
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dimension], data.draw(st.integers(0, shape[dimension]))})
    found = [
        Box(
            tuple(low if at == dimension else 0 for at in range(len(shape))),
            tuple(high if at == dimension else length for at, length in enumerate(shape)),
        )
        for low, high in pairwise(cuts)
    ]
    if data.draw(st.booleans()):
        start = tuple(data.draw(st.integers(0, length)) for length in shape)
        found.append(Box(start, tuple(data.draw(st.integers(low, high)) for low, high in zip(start, shape))))
    return found


def test_a_transposed_item(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    tensor = listed(array, [("a", Box.whole(array.shape))])
    dcp_peer.write(tmp_path, {"w": tensor}, made=dcp_peer.transposed)
    assert arrays_of(tmp_path)["w"].tolist() == array.tolist()


def test_paths_become_a_nest(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    tensors = {name: listed(one, [("a", Box((0,), (2,)))]) for name in ("a.b.c", "l.1")}
    objects = {"l.0": ("a", [1, 2]), "a.b.lr": ("b", 0.5), "n": ("b", (1, None))}
    paths = {"a.b.c": ("a.b", "c"), "l.1": ("l", 1), "l.0": ("l", 0), "a.b.lr": ("a.b", "lr"), "n": ("n",)}
    dcp_peer.write(tmp_path, tensors, objects, paths=paths)
    root, order = parsed(dcp.open_folder(str(tmp_path))[0].strings[NEST])
    assert root == {
        "dict": [
            ["a.b", {"dict": [["c"], ["lr", 0.5]]}],
            ["l", [[1, 2], {"tensor": None}]],
            ["n", {"tuple": [1, None]}],
        ]
    }
    assert order is not None and [*decoded(order)] == ["a.b.c", "l.1"]


@few_cases(1, ("members", "keys"), [([[0], [1]], [0, 1]), ([["0"], ["1"]], ["0", "1"]), ([[0], [2]], [0, "1"])])
def test_state_by_number_has_numbers_again(tmp_path: Path, members: list[list[Any]], keys: list[Any]) -> None:
    """torch's `load_state_dict` passes over state under texts, as its planner makes them, without an error."""
    one = np.ones(2, np.float32)
    names = [("optim", "state", key, "exp_avg") for key in ("0", "1")]
    tensors = {".".join(path): listed(one, [("a", Box((0,), (2,)))]) for path in names}
    objects = {f"optim.param_groups.{at}.params": ("b", own) for at, own in enumerate(members)}
    paths: dict[str, Any] = {".".join(path): path for path in names}
    paths |= {f"optim.param_groups.{at}.params": ("optim", "param_groups", at, "params") for at in range(2)}
    (tmp_path / "src").mkdir()
    dcp_peer.write(tmp_path / "src", tensors, objects, paths=paths)
    optimizer = transformed(tmp_path / "src", tmp_path / "dst", to="torch")["optim"]
    assert [*optimizer["state"]] == keys
    assert all([*state] == ["exp_avg"] for state in optimizer["state"].values())


def test_tensors_in_objects_are_carried(tmp_path: Path) -> None:
    """torch takes a tuple of tensors, and a tensor in an object, for something to be pickled as it is."""
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int64)
    of_first, of_second = dcp_peer.sample(first), dcp_peer.sample(second)
    objects = {
        "pair": ("a", (torch_peer.tensor(of_first, "0"), torch_peer.tensor(of_second, "1"), 3)),
        "again": ("b", (torch_peer.tensor(of_second, "1"), {"turned": dcp_peer.transposed(of_first)})),
        "equal": ("b", (torch_peer.tensor(of_second, "1"), {"turned": dcp_peer.transposed(of_first)})),
    }
    src = tmp_path / "src"
    src.mkdir()
    dcp_peer.write(src, {"w": listed(first, [("a", Box.whole(first.shape))])}, objects)
    manifest = dcp.open_folder(str(src))[0]
    assert manifest.left_out == ()
    assert json.loads(manifest.strings[NEST])["dict"] == [
        ["pair", {"tuple": [{"tensor": None}, {"tensor": None}, 3]}],
        ["again", {"tuple": [{"tensor": None}, {"dict": []}]}],
        ["equal", {"tuple": [{"tensor": None}, {"dict": []}]}],
    ]
    expected = {"w": first, "pair.0": first, "pair.1": second}
    expected |= {f"{name}.0": second for name in ("again", "equal")}
    expected |= {f"{name}.1.turned": first for name in ("again", "equal")}
    for kind in ("dcp", "torch"):
        transform(src, tmp_path / kind, to=kind, verify=True)
    made = tree_of(tmp_path / "torch")
    assert isinstance(made["pair"], tuple) and made["pair"][2] == 3
    for found in (arrays_of(src), arrays_of(tmp_path / "dcp")):
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in expected.items()
        }


@st.composite
def listings(draw: st.DrawFn) -> dcp_peer.Metadata:
    """Draw metadata of tensors that are alike or not, in few or many pieces; what it says need not be sound."""
    small = st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 70000), st.integers(0, 1 << 40))
    sizes = st.lists(small, max_size=5).map(Size)
    shared = draw(st.lists(sizes, min_size=1, max_size=4))
    some = st.one_of(sizes, st.sampled_from(shared))
    torch = dcp_peer.MODULES["torch"]
    names = draw(st.lists(st.text(max_size=8), max_size=8, unique=True))
    entries: dict[str, Any] = {}
    places = {}
    files = draw(st.lists(st.text("ab_0.\u00e9", min_size=1, max_size=5), min_size=1, max_size=2))
    for name in names:
        copy = draw(st.sampled_from([name, (name + "x")[:-1]]))
        if draw(st.booleans()) and entries:
            entries[name] = draw(st.sampled_from([*entries.values(), dcp_peer.BytesStorageMetadata()]))
        else:
            chunks = draw(st.lists(st.builds(dcp_peer.ChunkStorageMetadata, some, some), max_size=4))
            dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16"])))
            entries[name] = dcp_peer.TensorStorageMetadata(dcp_peer.TensorProperties(dtype), draw(some), chunks)
        for _ in range(draw(st.integers(0, 3))):
            key = MetadataIndex(copy, draw(st.one_of(st.none(), small)), draw(st.one_of(st.none(), some)))
            places[key] = dcp_peer._StorageInfo(draw(st.sampled_from(files)), draw(small), draw(small))
    return dcp_peer.Metadata(entries, {name: (name, 1) for name in names}, places)


def said(content: bytes, hooks: PickleHooks) -> Any:
    """Return what metadata says, or what is wrong with it."""
    root, end = load(content, hooks=hooks)
    try:
        return metadata._metadata(root, end)
    except metadata._Unsound as error:
        return error.args[0]


@pytest.mark.slow
@given(listings(), st.sampled_from([2, 4, 5]), st.booleans())
def test_many_at_once_are_read_as_one_by_one(listing: dcp_peer.Metadata, protocol: int, in_c: bool) -> None:
    content = dcp_peer.dumps(listing, protocol, in_c=in_c)
    calls = {**PLAIN_CALLS, SIZE: numbers}
    one_by_one = said(content, PickleHooks(no_persistent_ids, calls))
    assert said(content, PickleHooks(no_persistent_ids, calls, States().readers)) == one_by_one


def test_many_are_read_at_once() -> None:
    """Nearly nothing of large metadata is read opcode by opcode, so it takes little time."""
    size, chunk = Size((4, 4)), [dcp_peer.ChunkStorageMetadata(Size((2 * at, 0)), Size((2, 4))) for at in range(2)]
    dtype = dcp_peer.MODULES["torch"].float32
    names = [f"layers.{number}.weight" for number in range(400)]
    entries = {
        name: dcp_peer.TensorStorageMetadata(dcp_peer.TensorProperties(dtype), size, list(chunk)) for name in names
    }
    places = {
        MetadataIndex(name, at, Size((2 * at, 0))): dcp_peer._StorageInfo("file", 10 * at, 10)
        for at in range(2)
        for name in names
    }
    content = dcp_peer.dumps(dcp_peer.Metadata(entries, None, places))
    states = States()
    calls = 0

    def counting(reader: Any) -> Any:
        def read(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return reader(*args)

        return read

    objects = {name: counting(reader) for name, reader in states.readers.items()}
    found = said(content, PickleHooks(no_persistent_ids, {**PLAIN_CALLS, SIZE: numbers}, objects))
    assert len(found.items) == 800 and len(found.entries) == 400
    assert calls < 450


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_protocols(tmp_path: Path, protocol: int) -> None:
    array = np.arange(6, dtype=np.float64)
    dcp_peer.write(tmp_path, {"w": listed(array, [("a", Box((0,), (4,))), ("b", Box((4,), (6,)))])}, protocol=protocol)
    assert arrays_of(tmp_path)["w"].tolist() == array.tolist()


def test_what_older_releases_wrote(tmp_path: Path) -> None:
    """Before torch 2.3 properties were those of sharded tensors, and the metadata had three attributes."""
    array = np.arange(6, dtype=np.float32)
    older = type("TensorProperties", (dcp_peer.TensorProperties,), {})
    older.__module__ = "torch.distributed._shard.sharded_tensor.metadata"

    def spoil(made: dcp_peer.Metadata) -> None:
        del made.storage_meta, made.version
        tensor = made.state_dict_metadata["w"]
        tensor.properties = older(tensor.properties.dtype)

    module = types.ModuleType(older.__module__)
    module.TensorProperties = older  # type: ignore[attr-defined]
    with mock.patch.dict(dcp_peer.MODULES, {older.__module__: module}):
        pieces = [("a", Box((0,), (4,))), ("b", Box((4,), (6,)))]
        dcp_peer.write(tmp_path, {"w": listed(array, pieces)}, spoil=spoil)
    assert arrays_of(tmp_path)["w"].tolist() == array.tolist()


def test_a_type_that_is_not_known_is_refused(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8)

    def spoil(made: dcp_peer.Metadata) -> None:
        made.state_dict_metadata["q"].properties.dtype = dcp_peer.quantized

    pieces = [("a", Box((0,), (6,)))]
    dcp_peer.write(tmp_path, {"q": listed(array, pieces), "w": listed(array, pieces)}, spoil=spoil)
    with pytest.raises(CoverageError, match=r"'q' of the checkpoint(.|\n)*not known here, torch.quint4x2"):
        arrays_of(tmp_path)


@pytest.mark.slow
def test_many_pieces_of_one_tensor(tmp_path: Path) -> None:
    """More than one pickler's batch, and more than a frame of its bytes."""
    array = np.arange(3000, dtype=np.int32)
    pieces = [(f"__{at % 3}_0.distcp", Box((at,), (at + 1,))) for at in range(3000)]
    dcp_peer.write(tmp_path, {"w": listed(array, pieces)})
    assert arrays_of(tmp_path)["w"].tobytes() == array.tobytes()


def test_items_of_the_other_byte_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "big" if sys.byteorder == "little" else "little"

    def item(value: Any) -> bytes:
        stream = io.BytesIO()
        torch_peer.save(stream, value, byteorder=other.encode())  # type: ignore[arg-type]
        return stream.getvalue()

    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    swapped = listed(array.byteswap(), [("a", Box((0, 0), (2, 4))), ("b", Box((2, 0), (3, 4)))])
    monkeypatch.setattr(dcp_peer, "item", item)
    dcp_peer.write(tmp_path, {"w": swapped})
    assert arrays_of(tmp_path)["w"].tolist() == array.tolist()

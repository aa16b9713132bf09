"""Folders that nobody's torch has saved whole: each is refused by name, though torch itself loads some in silence."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support import dcp_peer
from support.command_line import run_here
from support.dcp_peer import ChunkStorageMetadata, Metadata, MetadataIndex, Size, arrays_of, listed

from reshard_mpi import formats
from reshard_mpi.errors import CoverageError, DisagreementError, ReshardError, ShardError, SourceError
from reshard_mpi.formats import dcp
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import ArraysByName
from reshard_mpi.testing.folders import FolderConformance, Spoil, cut_short, lost, written

GOLDEN = Path(__file__).parent / "golden" / "dcp"
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)
UPPER, LOWER = Box((0, 0), (3, 4)), Box((3, 0), (6, 4))
SECOND = "__1_0.distcp"
PIECES = [("__0_0.distcp", UPPER), (SECOND, LOWER)]


def write(folder: Path, spoil: Callable[[Metadata], object] = lambda _: None, **options: Any) -> None:
    """Write a tensor in two pieces, and an object."""
    tensors = options.pop("tensors", {"w": listed(ARRAY, PIECES)})
    dcp_peer.write(folder, tensors, {"lr": ("__0_0.distcp", 0.5)}, spoil=spoil, **options)


def refused(folder: Path, problem: str) -> str:
    with pytest.raises(ReshardError) as caught:
        arrays_of(folder)
    assert problem in str(caught.value)
    return str(caught.value)


def places(metadata: Metadata) -> list[Any]:
    """Return where the object, the upper and the lower piece lie."""
    return list(metadata.storage_data.values())


def chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
    found: list[ChunkStorageMetadata] = metadata.state_dict_metadata["w"].chunks
    return found


def keys(metadata: Metadata) -> list[MetadataIndex]:
    return list(metadata.storage_data)


def without_chunk(metadata: Metadata) -> None:
    del chunks(metadata)[1]
    del metadata.storage_data[keys(metadata)[2]]


def again(metadata: Metadata) -> None:
    """Have both pieces in the bytes of the first."""
    places(metadata)[2].__dict__.update(places(metadata)[1].__dict__)


SPOILED: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a chunk is missing": (without_chunk, "no chunk of 'w'"),
    "a chunk is missing in one table": (lambda m: chunks(m).pop(), "a chunk that state_dict_metadata does not list"),
    "a chunk has no place": (lambda m: m.storage_data.pop(keys(m)[2]), "does not say where a chunk"),
    "a chunk is smaller than its item": (
        lambda m: setattr(chunks(m)[1], "sizes", Size((2, 4))),
        "is not what the metadata says",
    ),
    "a chunk is larger than its item": (
        lambda m: setattr(chunks(m)[0], "sizes", Size((4, 4))),
        "is not what the metadata says",
    ),
    "a chunk of two sizes": (
        lambda m: chunks(m).append(ChunkStorageMetadata(Size((0, 0)), Size((1, 4)))),
        "two chunks of different sizes",
    ),
    "a chunk outside of its tensor": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", Size((5, 4))),
        "does not lie in its tensor",
    ),
    "a chunk of other dimensions": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", Size((6, 4, 1))),
        "other dimensions than its tensor",
    ),
    "a larger tensor": (lambda m: setattr(m.state_dict_metadata["w"], "size", Size((7, 4))), "no chunk of 'w'"),
    "an impossible size": (
        lambda m: setattr(m.state_dict_metadata["w"], "size", Size((1 << 63, 4))),
        "impossibly large",
    ),
    "a negative size": (lambda m: setattr(chunks(m)[0], "sizes", Size((-1, 4))), "less than 0"),
    "another type": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", dcp_peer.MODULES["torch"].int32),
        "is not what the metadata says",
    ),
    "an object where a tensor should be": (lambda m: m.storage_data.update(swapped(m)), "is no tensor"),
    "a tensor that is listed as an object": (
        lambda m: m.state_dict_metadata.update(w=dcp_peer.BytesStorageMetadata()),
        "does not say where a chunk or object lies",
    ),
    "a name is missing": (lambda m: m.state_dict_metadata.pop("w"), "does not list"),
    "two pieces in the same bytes": (again, "lie over each other"),
    "pieces that overlap by a byte": (
        lambda m: setattr(places(m)[1], "offset", places(m)[1].offset - 1),
        "lie over each other",
    ),
    "an item that begins elsewhere": (lambda m: setattr(places(m)[2], "offset", 1), "no chunk of 'w'"),
    "an item that ends earlier": (lambda m: setattr(places(m)[2], "length", places(m)[2].length - 1), "__1_0.distcp"),
    "an item behind the end": (lambda m: setattr(places(m)[2], "offset", 1 << 40), "ends before"),
    "an item at a negative byte": (lambda m: setattr(places(m)[2], "offset", -1), "has no place in its file"),
    "an item where no file is": (lambda m: setattr(places(m)[2], "offset", 1 << 62), "where no file can have it"),
    "an item of no length": (lambda m: setattr(places(m)[2], "length", None), "has no place in its file"),
    "a file whose name is no text": (lambda m: setattr(places(m)[2], "relative_path", 7), "not beside"),
    "an item in the metadata": (
        lambda m: setattr(places(m)[2], "relative_path", ".metadata"),
        "in the metadata itself",
    ),
    "compressed items": (
        lambda m: setattr(places(m)[2], "transform_descriptors", ["zstd"]),
        "compressed or otherwise transformed",
    ),
    "no storage_data": (lambda m: setattr(m, "storage_data", None), "no dictionary storage_data"),
    "no state_dict_metadata": (lambda m: setattr(m, "state_dict_metadata", [1]), "no dictionary state_dict_metadata"),
    "a key that is no index": (lambda m: m.storage_data.update({"w": places(m)[0]}), "no MetadataIndex"),
    "a name that is no text": (lambda m: m.state_dict_metadata.update({7: None}), "a key that is no name"),
    "an entry of no kind": (lambda m: m.state_dict_metadata.update(w=3), "no TensorStorageMetadata"),
}


def swapped(metadata: Metadata) -> dict[Any, Any]:
    """Have the tensor's first piece where the object is."""
    of_object, of_piece, _ = keys(metadata)
    return {of_object: places(metadata)[1], of_piece: places(metadata)[0]}


def test_a_missing_file_of_copies(tmp_path: Path) -> None:
    """Pieces that others have too are taken from those."""
    write(tmp_path, tensors={"w": listed(ARRAY, [*PIECES, ("__2_0.distcp", Box((1, 0), (6, 4)))])})
    (tmp_path / "__1_0.distcp").unlink()
    assert arrays_of(tmp_path)["w"].tolist() == ARRAY.tolist()
    said = run_here("transform", str(tmp_path), str(tmp_path / "out"), "--to", "safetensors", "--jobs", "1")
    assert said.code == 0 and "__1_0.distcp" in said.err and "was taken from others" in said.err


def test_a_file_by_itself(tmp_path: Path) -> None:
    write(tmp_path)
    assert len(dcp.locate(str(tmp_path / "__0_0.distcp")).tensors) == 1
    (tmp_path / ".metadata").unlink()
    with pytest.raises(ShardError, match="does not say what it holds"):
        dcp.locate(str(tmp_path / "__0_0.distcp"))
    with pytest.raises(SourceError, match="no index of them"):
        arrays_of(tmp_path / "__0_0.distcp")


def test_flattened_ranges_of_megatron() -> None:
    refused(GOLDEN / "flattened", "a range of flattened elements a rank, as the optimizer of Megatron-Core up to 0.15")


class Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


def test_metadata_that_would_run_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Shell()))
    with pytest.raises(ShardError, match="would run code"):
        dcp.open_folder(str(tmp_path))
    assert not (tmp_path / "pwned").exists()


def test_metadata_that_ends_early(tmp_path: Path) -> None:
    write(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for length in range(1, len(whole), 7):
        (tmp_path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(ShardError):
            dcp.open_folder(str(tmp_path))


PATHS: dict[str, tuple[dict[str, tuple[str | int, ...]], str]] = {
    "a list with a gap of a billion": ({"w": ("w",), "a.1000000000": ("a", 1_000_000_000)}, "lack most of their items"),
    "lists with gaps": ({f"a{at}.60000": (f"a{at}", 60_000) for at in range(3)}, "lack most of their items"),
    "a place before the first": ({"a.-1": ("a", -1)}, "lack most of their items"),
    "an entry in an entry": ({"a": ("a",), "a.b": ("a", "b")}, "are to lie at one place"),
    "a list that is a dictionary": ({"a.0": ("a", 0), "a.b": ("a", "b")}, "are to lie at one place"),
}


def of_another_save(folder: Path) -> None:
    """Torch overwrites files first, and the metadata last; so a crash leaves the metadata of the save before."""
    old = (folder / ".metadata").read_bytes()
    pieces = [("__0_0.distcp", Box((0, 0), (4, 3))), ("__1_0.distcp", Box((4, 0), (8, 3)))]
    write(folder, tensors={"w": listed(ARRAY.reshape(8, 3), pieces)})
    (folder / ".metadata").write_bytes(old)


def overlapping(folder: Path) -> None:
    """Write a third piece that overlaps with both, with other bytes."""
    other = ARRAY.copy()
    other[3] += 1
    tensor = listed(ARRAY, PIECES)
    extra = listed(other, [("__2_0.distcp", Box((1, 0), (5, 4)))]).pieces
    write(folder, tensors={"w": tensor._replace(pieces=[*tensor.pieces, *extra])})


def link_outside(folder: Path) -> None:
    shutil.move(folder / SECOND, folder.parent / "elsewhere")
    (folder / SECOND).symlink_to(folder.parent / "elsewhere")


def replaced(make: Callable[[Path], object]) -> Spoil:
    """Return a function that removes the second file, and makes something else in its place."""
    return lambda folder: ((folder / SECOND).unlink(), make(folder / SECOND))


def item_elsewhere(folder: Path) -> None:
    """The structure of each item is looked at, also where one looks like an item that was met before."""
    tensors = {name: listed(ARRAY, [("a", Box.whole(ARRAY.shape))]) for name in ("v", "w", "x")}
    dcp_peer.write(folder, tensors)
    content = bytearray((folder / "a").read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at + 42 : at + 46] = (1).to_bytes(4, "little")
    (folder / "a").write_bytes(content)


def with_paths(folder: Path, paths: dict[str, tuple[str | int, ...]]) -> None:
    objects = {name: ("a", None) for name in paths if name != "w"}
    dcp_peer.write(folder, {"w": listed(ARRAY, PIECES)}, objects, paths=paths)


PICKLES = {
    "nothing": (b"", "empty"),
    "no pickle": (b"metadata", "cannot be read"),
    "another object": (pickle.dumps({"a": 1}), "no Metadata"),
    "a far memo": (b"\x80\x04Nr\xff\xff\xff\xff.", "no Metadata"),
    "nested tuples": (b"\x80\x04)" + b"\x85" * 3_000_000 + b".", "take too much memory"),
    "many lists": (b"\x80\x04" + b"]" * 4_000_000 + b".", "take too much memory"),
}


class TestTwoFiles(FolderConformance):
    """A tensor in two pieces, and an object; and everything that may be wrong with them."""

    info, uses_prefix = formats.info("dcp"), False
    wrong: ClassVar = {
        **{
            f"says: {what}": (partial(write, spoil=spoil), says, ReshardError)
            for what, (spoil, says) in SPOILED.items()
        },
        **{
            f"paths: {what}": (partial(with_paths, paths=paths), says, ReshardError)
            for what, (paths, says) in PATHS.items()
        },
        **{
            f"metadata: {what}": pytest.param(
                (written(".metadata", content), says), marks=pytest.mark.slow if len(content) > 1 << 20 else ()
            )
            for what, (content, says) in PICKLES.items()
        },
        "metadata of another save": (of_another_save, "is not what the metadata says", ReshardError),
        "a missing file": (lost(SECOND), ("no chunk of 'w'", SECOND), CoverageError),
        "a missing file with an object": (lost("__0_0.distcp"), ("'lr' cannot be read", "__0_0.distcp")),
        "a file cut short": (cut_short(SECOND), ("no chunk of 'w'", "ends before"), CoverageError),
        "a file of zeros": (written(SECOND, bytes(5000)), ("no chunk of 'w'", "no archive of torch"), CoverageError),
        "a pipe": (replaced(os.mkfifo), "no chunk of 'w'", CoverageError),
        "a folder": (replaced(Path.mkdir), "no chunk of 'w'", CoverageError),
        "a link out of the folder": (link_outside, "a link that leads out of its folder"),
        "pieces that overlap with other bytes": (overlapping, "'w'", DisagreementError),
        "an item whose archive leads elsewhere": (item_elsewhere, "no chunk of", CoverageError),
        "no metadata": (lost(".metadata"), "no index of them", SourceError),
    }

    def save(self, folder: Path) -> ArraysByName:
        write(folder)
        return {"w": ARRAY}

    def lead_outside(self, folder: Path, file: str) -> str:
        write(folder, lambda metadata: setattr(places(metadata)[2], "relative_path", file))
        return "not beside"


def test_objects_that_take_too_much_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself is small enough to be read."""
    monkeypatch.setattr(dcp.items, "BUDGET_BYTES", 100_000)
    objects = {f"o{at}": ("a", [at] * 300) for at in range(8)}
    dcp_peer.write(tmp_path, {"w": listed(ARRAY, PIECES)}, objects)
    assert "take too much memory" in refused(tmp_path, "cannot be read")

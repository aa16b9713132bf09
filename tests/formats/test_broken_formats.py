"""The conformance suites find what is wrong with a format: each module here is a sound one with one fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_conformance
from toy_package import test_toy, toy_folder, toy_format

from reshard_mpi import formats
from reshard_mpi.formats import hdf5
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.folders import FolderConformance

# How a suite finds something: by what it asserts, or by an error of the module that is none of a checkpoint.
FOUND = (Exception, pytest.fail.Exception)
CRC = "test_a_checksum_of_the_file_is_made_or_refused"
IMPOSSIBLE = "test_what_cannot_be_is_refused"
PLACES = "test_rank_strategy_and_places_are_kept"
READ_BACK = "test_what_is_not_as_written_is_not_read_back"
SUMS = "test_sums_are_kept_where_they_are_given"

# What the toy format has, what it has instead, and the test that finds it.
TOY_FAULTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "a checksum is not refused": ("    if crc:\n", "    if not fd:\n", CRC, ()),
    "nothing is read back": ("if locate(meant.path) != meant:", "if not meant:", READ_BACK, ()),
    "only the length is read back": (
        "if locate(meant.path) != meant:",
        "if len(locate(meant.path).tensors) != len(meant.tensors):",
        READ_BACK,
        (),
    ),
    "lengths of any type": ("type(length) is int and length >= 0", "length >= 0", IMPOSSIBLE, ("a broken length",)),
    "truth as a length": (
        "type(length) is int and length >= 0",
        "isinstance(length, int) and length >= 0",
        IMPOSSIBLE,
        ("a length that is no number",),
    ),
    "negative lengths": (
        "type(length) is int and length >= 0",
        "type(length) is int",
        IMPOSSIBLE,
        ("negative lengths",),
    ),
    "any dimensions": ("len(kind.shape) <= structure.MAX_DIMENSIONS and ", "", IMPOSSIBLE, ("33 dimensions",)),
    "payloads outside": (
        "if end != file.size_bytes:",
        "if end < 0:",
        IMPOSSIBLE,
        ("too many elements for the payload",),
    ),
    "no name": ("if not all(0 < length <=", "if not all(0 <= length <=", IMPOSSIBLE, ("no name",)),
    "names of any length": (
        "0 < length <= structure.MAX_NAME_BYTES",
        "0 < length",
        IMPOSSIBLE,
        ("a name that is too long",),
    ),
    "invented sums": ("stored_sums, check_crc = no_sums, no_crc", "stored_sums, check_crc = len_of, no_crc", SUMS, ()),
}


@pytest.mark.parametrize("fault", TOY_FAULTS)
def test_a_fault_of_the_toy_format_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    source = Path(toy_format.__file__).read_text()
    old, new, test, args = TOY_FAULTS[fault]
    assert source.count(old) == 1
    module = ModuleType("broken_toy")
    module.__dict__["len_of"] = lambda path: {"step": len(path)}
    exec(compile(source.replace(old, new), "broken_toy", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "broken_toy", module)
    suite = type("TestBroken", (test_toy.TestToy,), {"info": module.INFO})()
    run(test_toy.TestToy(), test, made(tmp_path / "sound"), args)
    with pytest.raises(FOUND):
        run(suite, test, made(tmp_path / "broken"), args)


def run(suite: Any, test: str, folder: Path, args: tuple[str, ...]) -> None:
    """Run a test of a suite; that of sums as where they are given."""
    getattr(suite, test)(folder, *args, **({"with_sums": True} if test == SUMS else {}))


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def without_places(manifest: Manifest) -> Manifest:
    entries = manifest.tensors.values()
    at_zero = [entry._replace(box=Box.whole(entry.shape)) for entry in entries]
    return manifest._replace(tensors=TensorTable(manifest.path, at_zero))


def off_by_one(path: str) -> dict[str, int]:
    return {name: value ^ 1 for name, value in hdf5.stored_sums(path).items()}


# Functions of the HDF5 format that are others, and the test that finds it.
HDF5_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "other sums": ("stored_sums", off_by_one, SUMS),
    "sums that are not stored": ("seal", lambda fd, path, sums=None, *, crc=False: hdf5.seal(fd, path), SUMS),
    "sums that are not read": ("stored_sums", lambda path: {}, SUMS),
    "no identity": ("locate", lambda path, like=None: hdf5.locate(path)._replace(identity=None), PLACES),
    "boxes that begin at 0": ("locate", lambda path, like=None: without_places(hdf5.locate(path)), PLACES),
    "an identity of its own": (
        "reserve",
        lambda fd, path, spec: hdf5.reserve(
            fd, path, spec._replace(identity=spec.identity._replace(strategy=spec.identity.strategy[:1000]))
        ),
        PLACES,
    ),
    "a checksum is not refused": (
        "seal",
        lambda fd, path, sums=None, *, crc=False: hdf5.seal(fd, path, sums or {}),
        CRC,
    ),
    "nothing is read back": ("read_back", lambda meant: None, READ_BACK),
}


@pytest.mark.parametrize("fault", HDF5_FAULTS)
def test_a_fault_of_what_describes_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, function, test = HDF5_FAULTS[fault]
    hdf5_info = test_conformance.TestHDF5.info
    monkeypatch.setitem(sys.modules, "broken_hdf5", SimpleNamespace(**vars(hdf5) | {name: function}))
    suite = type("TestBroken", (test_conformance.TestHDF5,), {"info": hdf5_info._replace(module="broken_hdf5")})()
    run(test_conformance.TestHDF5(), test, made(tmp_path / "sound"), ())
    with pytest.raises(FOUND):
        run(suite, test, made(tmp_path / "broken"), ())


# Functions of the format of folders that are others, and the test that finds it.
FOLDER_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "texts are lost": (
        "index_contents",
        lambda held: toy_folder.index_contents([file._replace(strings={}) for file in held]),
        "test_texts_are_written",
    ),
    "texts are lost in files": (
        "reserve",
        lambda fd, path, spec: toy_folder.reserve(fd, path, spec._replace(strings={})),
        "test_texts_are_written",
    ),
    "no prefix": ("file_name", lambda *args: toy_folder.file_name(*args[:2], ""), "test_names_of_written_files"),
    "one name for all": (
        "file_name",
        lambda rank, targets, prefix: toy_folder.file_name(0, targets, prefix),
        "test_names_of_written_files",
    ),
}


@pytest.mark.parametrize("fault", [None, *FOLDER_FAULTS])
def test_a_fault_of_the_format_of_folders_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    functions = dict(vars(toy_folder))
    tests = ["test_texts_are_written", "test_names_of_written_files"]
    if fault is not None:
        name, function, test = FOLDER_FAULTS[fault]
        functions, tests = functions | {name: function}, [test]
    monkeypatch.setitem(sys.modules, "broken_folder", SimpleNamespace(**functions))
    info = toy_folder.INFO._replace(module="broken_folder")
    suite = type("TestBroken", (FolderConformance,), {"info": info})()
    formats.register(info)
    try:
        for test in tests:
            args = (tmp_path,) if test == "test_texts_are_written" else ()
            if fault is None:
                getattr(suite, test)(*args)
            else:
                with pytest.raises(FOUND):
                    getattr(suite, test)(*args)
    finally:
        formats.unregister("toys")

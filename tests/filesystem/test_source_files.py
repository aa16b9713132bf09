"""Files and folders as formats and checkpoints see them: `filesystem.source_files`."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.source_files import FileCutShortError, IrregularFileError, SourceFile, open_file, version_of
from reshard_mpi.formats import structure

CONTENT = bytes(range(100))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


def test_fewer_bytes_are_read_only_where_the_file_ends(path: Path) -> None:
    with open_file(str(path)) as file:
        assert (file.path, file.size_bytes) == (str(path), 100)
        assert file.read(10, 5) == file.read_exactly(10, 5) == CONTENT[10:15]
        assert file.read(95, 10) == CONTENT[95:] and file.read(200, 10) == file.read(100, 1) == b""
        with pytest.raises(FileCutShortError, match=f"became shorter(.|\n)*where: {path}"):
            file.read_exactly(95, 10)


@pytest.mark.parametrize("most_bytes", [1, 3, 99])
def test_a_system_that_reads_less_than_it_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: real(fd, min(length, most_bytes), offset))
    with open_file(str(path)) as file:
        assert file.read_exactly(0, 100) == file.read(0, 1000) == CONTENT
        assert file.read(90, 20) == CONTENT[90:]


def test_a_file_that_shrinks_while_it_is_read(path: Path) -> None:
    with open_file(str(path)) as file:
        os.truncate(path, 50)
        assert file.read(40, 60) == CONTENT[40:50] and file.read(60, 10) == b""
        for read in (lambda: file.read_exactly(40, 60), lambda: list(structure.contents(file, [(0, 10), (45, 55)]))):
            with pytest.raises(FileCutShortError):
                read()
        with pytest.raises(FileCutShortError):
            structure.digest_besides(file, [(10, 90)])
        with pytest.raises(FileCutShortError):
            structure.crc32_of(file, (0, 100))
        assert version_of(path).is_later_than(file.version)


@pytest.mark.parametrize("fail", ["the first call", "a later call"])
def test_a_file_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, fail: str) -> None:
    real = os.pread

    def failing(fd: int, length: int, offset: int) -> bytes:
        if offset == 7 and fail == "a later call":
            return real(fd, 1, offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with open_file(str(path)) as file, pytest.raises(ShardError) as caught:
        file.read(7, 10)
    assert (caught.value.problem, caught.value.where) == ("a shard cannot be read", f"{path}, byte 7")
    assert "Input/output error" in caught.value.got


def test_a_place_that_no_file_has(path: Path) -> None:
    with open_file(str(path)) as file:
        for offset, length in ((1 << 70, 1), (-1, 1)):
            with pytest.raises(ShardError, match="cannot be read"):
                file.read(offset, length)


def of_pipe(path: Path) -> None:
    os.mkfifo(path)


def of_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(("make", "says"), [(of_pipe, "regular"), (Path.mkdir, "regular"), (of_socket, "opened")])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    """A pipe would make us wait for somebody who writes to it."""
    path = tmp_path / "a.ckpt"
    make(path)
    with pytest.raises(ShardError, match=f"{says}(.|\n)*where: {path}"), structure.opened(str(path)):
        raise AssertionError("it was opened")
    with pytest.raises(OSError, match="Errno"):
        source_files.first_bytes(path, 4)
    assert source_files.first_bytes(path, 4, b"none") == b"none"
    assert source_files.exists(path) and not source_files.is_file(path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="Errno"):
        open_file(str(path))
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"  # noqa: PTH208


def test_a_descriptor_of_somebody_else_is_read_and_left_open(path: Path) -> None:
    with path.open("rb") as stream:
        assert SourceFile("called so", stream.fileno()).read(0, 3) == CONTENT[:3]
        assert stream.read() == CONTENT
    folder = os.open(path.parent, os.O_RDONLY)
    with pytest.raises(IrregularFileError):
        SourceFile("a folder", folder)
    os.close(folder)


def rewrite(path: Path) -> None:
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(CONTENT)
    os.utime(path.with_name("other"), ns=(1, 1))
    path.with_name("other").replace(path)


@pytest.mark.parametrize("change", [rewrite, replace, lambda path: os.truncate(path, 9)])
def test_a_change_makes_another_version(path: Path, change: Callable[[Path], None]) -> None:
    """Even if the time of modification is set back."""
    os.utime(path, ns=(1, 1))
    was = version_of(path)
    assert not version_of(path).is_later_than(was)
    change(path)
    assert version_of(path).is_later_than(was)


def test_another_name_makes_no_other_version(path: Path) -> None:
    was = version_of(path)
    path.with_name("link").hardlink_to(path)
    assert version_of(path) != was and not version_of(path).is_later_than(was)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one of each."""
    folder = tmp_path / "folder"
    (folder / "inner" / "deep").mkdir(parents=True)
    (folder / "file").write_bytes(b"content")
    (folder / "inner" / "a").touch()
    for name, leads_to in {
        "to_file": "file",
        "to_inner": "inner",
        "to_nothing": "missing",
        "to_itself": "to_itself",
    }.items():
        (folder / name).symlink_to(leads_to)
    os.mkfifo(folder / "pipe")
    return folder


def test_links_count_as_what_they_lead_to(folder: Path) -> None:
    listed = {entry.name: entry for entry in source_files.entries(folder)}
    assert list(listed) == sorted(source_files.names(folder)) == sorted(path.name for path in folder.iterdir())
    are_files, are_folders = {"file", "to_file"}, {"inner", "to_inner"}
    for name, entry in listed.items():
        path = folder / name
        assert entry.is_file == source_files.is_file(path) == source_files.is_file(str(path)) == (name in are_files), (
            name
        )
        assert entry.is_folder == source_files.is_folder(path) == (name in are_folders), name
        assert source_files.exists(path) == (name not in ("to_nothing", "to_itself")) and source_files.is_taken(path)
    assert listed["file"].size_bytes == listed["to_file"].size_bytes == 7
    for name in ("missing", "file/inner", "\0"):
        assert not (source_files.exists(folder / name) or source_files.is_taken(folder / name)), name


def test_folders_are_walked_into_but_links_are_not(folder: Path) -> None:
    found = []
    for folders, names in source_files.walk(str(folder)):
        found.append((sorted(folders), sorted(names)))
        folders[:] = [name for name in folders if name != "deep"]
    assert found == [(["inner", "to_inner"], ["file", "pipe", "to_file", "to_itself", "to_nothing"]), (["deep"], ["a"])]


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert source_files.names(missing, ("a",)) == ("a",) and list(source_files.walk(str(missing))) == []
    for look in (source_files.names, source_files.entries):
        with pytest.raises(FileNotFoundError):
            look(missing)


def test_what_the_file_system_does_not_tell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither there nor not: whoever asks must say so."""
    entry = next(entry for entry in source_files.entries(folder) if entry.name == "to_file")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "stat", refuse)
    for look in (source_files.exists, source_files.is_file, source_files.is_folder):
        with pytest.raises(PermissionError):
            look(folder / "file")
    for ask in (lambda: entry.is_file, lambda: entry.is_folder):
        with pytest.raises(PermissionError):
            ask()

"""Check paths that a user gives, and recognize kinds of files (`require_file_or_nothing`, `kind_of_start`).

Only a regular file is ever replaced by one of ours. A symbolic link counts as what it leads to.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import SourceError, TargetError

_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


# How addresses in an object store begin; a path that is made of one has lost a slash.
OBJECTS = "s3:/"


def is_object_path(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is an address in an object store, `s3://...`, or was made of one."""
    return os.fspath(path).startswith(OBJECTS)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Tell whether a path looks like a URL, as `s3://bucket/x`, which names nothing on a file system."""
    return _URL.match(path) is not None


_RANK_FOLDER = re.compile(r"rank_(\d+)")


def rank_of_folder(name: str) -> int | None:
    """Return the rank of a folder by its name; None if that is no name of a rank folder."""
    match = _RANK_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def real_path(path: Path | str) -> Path:
    """Return the path without symbolic links; links that lead to themselves are kept."""
    return Path(path) if is_object_path(path) else Path(os.path.realpath(path))


def absolute_path(path: Path | str) -> Path:
    """Return the path from the root on, links as they are; an address in an object store is one.

    But a link before `..` is followed: the folder above is that of where it leads to.
    """
    if is_object_path(path):
        return Path(path)
    parts = Path(path).absolute().parts
    behind = len(parts) - parts[::-1].index("..") if ".." in parts else 1
    return Path(real_path(Path(*parts[:behind])) if behind > 1 else parts[0], *parts[behind:])


def described(path: Path) -> str:
    """Say what lies at `path`, or why that cannot be seen."""
    if is_object_path(path):
        return _described_object(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a symbolic link that leads nowhere" if path.is_symlink() else "nothing"
    except OSError as error:
        return _in_words(error)
    return words_of_mode(mode)


def _described_object(path: Path) -> str:
    from reshard_mpi.filesystem import source_files

    if source_files.is_folder(path):
        return "a folder"
    return "an object" if source_files.exists(path) else "no object of this name"


def _in_words(error: OSError) -> str:
    return "a symbolic link that leads to itself" if error.errno == errno.ELOOP else str(error.strerror)


def words_of_mode(mode: int) -> str:
    """Name the kind of a file of mode `mode`, such as `a folder`."""
    return next(name for is_kind, name in _KINDS if is_kind(mode))


def is_file_or_nothing(path: Path) -> bool:
    """Tell whether a file may take the name `path`: a regular file is there, or nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def require_file_or_nothing(path: Path, purpose: str) -> None:
    """Raise TargetError if no file may take the name `path`. purpose: the use of the path, for the error."""
    if not is_file_or_nothing(path):
        raise TargetError(
            f"{described(path)} is in the place of {purpose}",
            expected="a file, or nothing",
            got=described(path),
            where=str(path),
            remedy="remove it, or choose another target",
        )


def require_reachable(source: str) -> None:
    """Raise SourceError if the file system refuses to say whether anything lies at the path `source`."""
    if is_object_path(source):
        return  # the store says by its answers what is wrong
    try:
        Path(source).stat()
    except (FileNotFoundError, NotADirectoryError):
        return  # the search for a checkpoint there says what is wrong
    except OSError as error:
        raise SourceError(
            "the source cannot be looked at",
            expected="a folder or a checkpoint file",
            got=_in_words(error),
            where=source,
            remedy="check the path, and the permissions of the folders it leads through",
        ) from None


# The mark of a tar archive lies behind the name and numbers of its first member.
START_BYTES = 512
_TAR_MARK = slice(257, 262)
_ZIP = b"PK\x03\x04"
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
_MAX_QUOTED = 40
# Of MindSpore's protobuf: a value, in it the length of a name, which a tensor follows.
_NAME = re.compile(rb"\n[\x80-\xff]{0,9}[\x00-\x7f]\n([\x01-\x7f])")
_DOWNLOAD = "download it again, and look at the address and at what the server says"


class FileKind(NamedTuple):
    """A kind of file in words, and what to do about it."""

    what: str
    remedy: str


def _ending(what: str, ending: str) -> FileKind:
    return FileKind(what, f"give it the ending {ending}")


def _compressed(by: str, program: str) -> FileKind:
    return FileKind(f"a file that is compressed by {by}", f"decompress it: {program}")


_TORCH = _ending("a file that torch.save made", ".pt")
_PICKLE = FileKind(
    "a bare pickle", "load it with the program that made it, if you trust it, and save the tensors with torch.save"
)
_NUMPY = FileKind("an array of numpy", "load it with numpy, and save it as safetensors")
_BY_START = (
    (b"version https://git-lfs", FileKind("a pointer of Git LFS in the place of the file", "fetch it: git lfs pull")),
    (b"\x89HDF\r\n\x1a\n", _ending("an HDF5 file", ".h5")),
    (b"\x93NUMPY", _NUMPY),
    (_LEGACY_TORCH, _TORCH),
    *((bytes([0x80, version]), _PICKLE) for version in range(2, 6)),
    (b"\x1f\x8b\x08", _compressed("gzip", "gunzip")),
    (b"BZh", _compressed("bzip2", "bunzip2")),
    (b"\xfd7zXZ\x00", _compressed("xz", "unxz")),
    (b"\x28\xb5\x2f\xfd", _compressed("zstd", "unzstd")),
    (b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", "unpack it")),
    (b"GGUF", FileKind("a GGUF file", "give the checkpoint that it was made from")),
    (
        b'{\n "version": 1,\n "source": ',
        FileKind("the report of a run", "give the target folder that it names, or read it as JSON"),
    ),
)


def kind_of_start(start: bytes) -> FileKind | None:
    """Return the kind of a file by its first `START_BYTES` bytes (all, if it is shorter); None if they do not tell."""
    return kind_of_mark(start) or _mindspore_kind(start) or _kind_of_text(_text(start))


def kind_at(path: Path) -> FileKind | None:
    """Return the kind of the file at `path`, as `kind_of_start` does but for text; None also if it cannot be read."""
    from reshard_mpi.filesystem.source_files import first_bytes  # not before a file is looked at

    start = first_bytes(path, START_BYTES, b"")
    return kind_of_mark(start) or _mindspore_kind(start)


def kind_of_mark(start: bytes) -> FileKind | None:
    """Return the kind of a file, as `kind_of_start` does, if it begins with a mark that begins no strategy file."""
    for mark, kind in _BY_START:
        if start.startswith(mark):
            return kind
    if start.startswith(_ZIP):
        return _kind_of_zip(start)
    if start[_TAR_MARK] == b"ustar":
        return FileKind("a tar archive", "unpack it: tar xf")
    if len(start) == START_BYTES and not any(start):
        return FileKind("a file that begins with zeros, as one that nobody has written yet", "save or copy it again")
    length_bytes = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and 1 < length_bytes <= _MAX_SAFETENSORS_HEADER_BYTES:
        return _ending("a safetensors file", ".safetensors")
    text = _text(start)
    if text[:9].lower().startswith(("<!doctype", "<html")):
        return FileKind("a web page", _DOWNLOAD)
    if text.startswith("<?xml"):
        return FileKind("an XML text, such as the answer of a server", _DOWNLOAD)
    return None


def _mindspore_kind(start: bytes) -> FileKind | None:
    """Return the kind of a file that begins as MindSpore's checkpoints do, with a name and a tensor."""
    name = _NAME.match(start)
    is_one = name is not None and start[name.end() + name[1][0] :].startswith(b"\x12")
    return _ending("a MindSpore checkpoint", ".ckpt") if is_one else None


def _kind_of_zip(start: bytes) -> FileKind:
    """Return the kind of a zip archive by the name of its first member."""
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
    if name.endswith(b"/data.pkl"):
        return _TORCH
    return _NUMPY if name.endswith(b".npy") else FileKind("a zip archive", "unpack it, and give what is in it")


def _text(start: bytes) -> str:
    """Return the text that a file begins with; empty if it is no text."""
    text = start.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")
    is_text = all(char.isprintable() or char in "\t\r\n" for char in text) and len(text.encode()) > len(start) // 2
    return text if is_text else ""


def _kind_of_text(text: str) -> FileKind | None:
    if not text:
        return None
    if text[0] in "{[":
        return FileKind("a JSON text, such as the answer of a server", _DOWNLOAD)
    return FileKind(f"a text that begins with {text.splitlines()[0][:_MAX_QUOTED]!r}", "see what it says")

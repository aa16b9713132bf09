"""Which files are strategies, and of which kind: told by their contents, as MindSpore's end in .ckpt like shards."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.strategy.limits import MAX_FILE_BYTES, MAX_SPEC_BYTES
from reshard_mpi.sharding.strategy.mindspore import REMEDY, StageFile, decode_json
from reshard_mpi.text import natural_key
from reshard_mpi.units import format_bytes

_HEAD_BYTES = 4096

# In a folder, files of these endings must be strategies unless their contents are well known to be something else;
# files of any other ending are taken for one only where they look like it, and those of _OTHER never.
_STRATEGY = {".ckpt", ".json", ".pb", ".strategy", ".toml"}
_OTHER = {".bin", ".h5", ".hdf5", ".log", ".md", ".meta", ".npz", ".py", ".rst", ".safetensors", ".sh", ".txt", ".yaml"}

_BLOCK_BYTES = 1 << 20
_LAYOUTS = b'"parallel_layout_item"'
_BOM = b"\xef\xbb\xbf"
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TOML_MESH = re.compile(rb"^[ \t]*(\[[ \t]*)?[\"']?mesh\b", re.MULTILINE)

_RANK_FOLDER = re.compile(r"rank_\d+")
_CHECKPOINT = "a MindSpore checkpoint"
_ENCRYPTED = {magic.to_bytes(4, order) for magic in (0x7F3A5ED8, 0x7F3A5ED9, 0x7F3A5EDA) for order in ("big", "little")}


class Kind(Enum):
    """What a strategy file is written in."""

    PROTOBUF = "protobuf"
    JSON = "JSON"
    TOML = "TOML"


class StrategyFile(NamedTuple):
    """One strategy file, and what it is written in. It is read when that is asked for, in parts where it can be."""

    path: Path
    kind: Kind

    def read(self) -> bytes:
        """Return all of it. Raises StrategyError."""
        return _read_bytes(self.path)

    def blocks(self) -> Iterator[bytes]:
        """Yield all of it, block by block. Raises StrategyError."""
        try:
            with self.path.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    yield block
        except OSError as error:
            raise _unreadable(self.path, error) from None


def look(path: str) -> StrategyFile:
    """Look into one file. Raises StrategyError if it is not there, is empty, or is well known as something else."""
    file = Path(path)
    _check_size(file)
    head = _head(file)
    other = _something_else(head)
    if other:
        raise StrategyError(
            "this is not a strategy file",
            expected="a MindSpore strategy (protobuf or JSON) or a TOML spec",
            got=other,
            where=path,
            remedy=REMEDY,
        )
    return StrategyFile(file, _kind(head, file))


def look_all(path: str) -> Iterator[StrategyFile]:
    """Yield the strategy files of a folder in the order of their names, or the one file that `path` is.

    Other files of the folder (checkpoint shards, configurations, notes, hidden files) are passed over. Raises
    StrategyError where nothing is left.
    """
    folder = Path(path)
    if not _is_dir(folder):
        yield look(path)
        return
    passed: list[str] = []
    count = 0
    for file in sorted(_entries(folder), key=lambda entry: natural_key(entry.name)):
        reason = _passed_over(file)
        if reason:
            passed.append(f"{file.name} ({reason})")
            continue
        count += 1
        yield look(str(file))
    if not count:
        listed = ", ".join(passed[:5]) + (", ..." if len(passed) > 5 else "")
        raise StrategyError(
            "the folder holds no strategy file",
            expected="the strategy files of all stages (.ckpt or .json), or one merged file",
            got=listed or _only_folders(folder) or "an empty folder",
            where=path,
            remedy=REMEDY,
        )


def decode(file: StrategyFile) -> StageFile:
    """Read a MindSpore strategy file of either kind. Raises StrategyError for what is none."""
    path = str(file.path)
    if file.kind is Kind.PROTOBUF:
        from reshard_mpi.sharding.strategy.protobuf import decode_protobuf

        try:
            with file.path.open("rb") as opened:
                return decode_protobuf(opened, path)
        except OSError as error:
            raise _unreadable(file.path, error) from None
    return decode_json(text_of(file), path)


def text_of(file: StrategyFile) -> str:
    """Return the text of a JSON or TOML file. Raises StrategyError if it is not UTF-8, or too long for its kind."""
    path = str(file.path)
    if file.kind is Kind.TOML and _size_bytes(file.path) > MAX_SPEC_BYTES:
        raise StrategyError("the spec is too large", expected=f"at most {format_bytes(MAX_SPEC_BYTES)}", where=path)
    try:
        return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StrategyError("the file is text, but not in UTF-8", got=str(error), where=path) from None


def distinct(files: Iterable[StrategyFile]) -> Iterator[StrategyFile]:
    """Leave out files that repeat another byte for byte, as the ranks of a stage write them."""
    seen = set()
    for file in files:
        found = hashlib.sha256()
        for block in file.blocks():
            found.update(block)
        key = found.digest()
        if key not in seen:
            seen.add(key)
            yield file


def _read_bytes(file: Path) -> bytes:
    _check_size(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None


def _check_size(file: Path) -> None:
    size_bytes = _size_bytes(file)
    if size_bytes == 0:
        raise StrategyError("the strategy file is empty", expected="1 byte or more", got="0 bytes", where=str(file))
    if size_bytes > MAX_FILE_BYTES:
        raise StrategyError(
            "the file is too large to be a strategy",
            expected=f"at most {format_bytes(MAX_FILE_BYTES)}",
            got=f"{format_bytes(size_bytes)}: {_something_else(_head(file)) or 'of an unknown kind'}",
            where=str(file),
            remedy=REMEDY,
        )


def _size_bytes(file: Path) -> int:
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise StrategyError("the strategy is no regular file", where=str(file), remedy=REMEDY)
    return status.st_size


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(_HEAD_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from None


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from None


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_file()]
    except OSError as error:
        raise _unreadable(folder, error) from None


def _only_folders(folder: Path) -> str:
    """Return what a folder is that holds folders but no files: a checkpoint, most likely; nothing if it is empty."""
    try:
        folders = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda at: natural_key(at.name))
    except OSError as error:
        raise _unreadable(folder, error) from None
    shown = [entry.name for entry in folders if not entry.name.startswith(".")]
    if not shown:
        return ""
    ranks = [entry for entry in folders if _RANK_FOLDER.fullmatch(entry.name)]
    first = next((file for rank in ranks for file in sorted(_entries(rank))), None)
    if first is not None and (kind := _something_else(_head(first))):
        return f"a checkpoint: shards in {len(ranks)} rank folders, such as {first.parent.name}/{first.name} ({kind})"
    return f"no files, but folders: {', '.join(shown[:5])}{', ...' * (len(shown) > 5)}"


def _unreadable(file: Path, error: Exception) -> StrategyError:
    reason = getattr(error, "strerror", None) or str(error)
    return StrategyError("the strategy cannot be read", got=reason, where=str(file), remedy="check the path")


def _passed_over(file: Path) -> str:
    """Return why a file of a folder is not taken for a strategy; empty if it is."""
    suffix = file.suffix.lower()
    if suffix in _OTHER:
        return "not a strategy's ending"
    head = _head(file)
    other = _something_else(head)
    if other:
        return other
    begin = head.removeprefix(_BOM).lstrip()
    if begin.startswith(b"{"):
        return "" if _names_layouts(file) else "JSON of something else"
    if begin.startswith(b"[") and suffix == ".json":
        return "JSON of something else"
    if suffix == ".toml":
        is_spec = _size_bytes(file) <= MAX_SPEC_BYTES and _TOML_MESH.search(_read_bytes(file))
        return "" if is_spec else "TOML of something else"
    # A ParallelStrategyMap begins with its current_stage, field 1, a number.
    return "" if suffix in _STRATEGY or head.startswith(b"\x08") else "of an unknown kind"


def _names_layouts(file: Path) -> bool:
    """Tell whether a file of JSON has the key that all strategies have."""
    _check_size(file)
    before = b""
    for block in StrategyFile(file, Kind.JSON).blocks():
        if _LAYOUTS in before + block:
            return True
        before = block[-len(_LAYOUTS) :]
    return False


def _kind(data: bytes, file: Path) -> Kind:
    if data.removeprefix(_BOM).lstrip().startswith(b"{") or file.suffix.lower() == ".json":
        return Kind.JSON
    # No strategy in protobuf is text: its first byte is a control character.
    if file.suffix.lower() == ".toml" or not _CONTROL.search(data):
        return Kind.TOML
    return Kind.PROTOBUF


def _something_else(head: bytes) -> str:
    """Return what a file is that is given for a strategy by mistake, told by its first bytes; empty if unknown."""
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "an HDF5 file"
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return "a safetensors file"
    if head[:4] in _ENCRYPTED:
        return "an encrypted MindSpore file"
    return _protobuf_of_names(head)


def _protobuf_of_names(head: bytes) -> str:
    """Tell MindSpore's two files that begin with a named record: a checkpoint, and a group map (group_info.pb)."""
    try:
        _, at = _length(head, 0, 0x0A)
        name_bytes, at = _length(head, at, 0x0A)
        at += name_bytes
        if head[at] == 0x1A:
            return _CHECKPOINT
        payload_bytes, at = _length(head, at, 0x12)
        end = min(at + payload_bytes, len(head))
        # Numbers: the ranks of a group, or the dimensions of a tensor, which its type follows.
        while at < end and head[at] == 0x08:
            _, at = _varint(head, at + 1)
        if at >= end:
            return "a MindSpore group map (group_info.pb)"
        return _CHECKPOINT if head[at] == 0x12 else ""
    except (IndexError, ValueError):
        return ""


def _length(head: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return the length and the place of the contents of the field that must start at `at` with `tag`."""
    if head[at] != tag:
        raise ValueError(tag)
    return _varint(head, at + 1)


def _varint(head: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = head[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7

"""Read strategies: MindSpore's files or a TOML spec (`load`), told by their contents (`look`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.errors import ReshardError, StrategyError
from reshard_mpi.filesystem import source_files
from reshard_mpi.filesystem.paths import START_BYTES, described, kind_of_mark
from reshard_mpi.protobuf_wire import WireError, varint
from reshard_mpi.sharding.mindspore_json import REMEDY, StageFile, decode_json
from reshard_mpi.sharding.value_checks import MAX_FILE_BYTES, MAX_SPEC_BYTES
from reshard_mpi.text import format_bytes, natural_key

if TYPE_CHECKING:
    from reshard_mpi.sharding.strategy import Strategy

_HEAD_BYTES = 4096

# In a folder, files of these endings must be strategies unless their contents are well known to be something else;
# files of any other ending are taken for one only where they look like it, and files of _OTHER never.
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


class StrategyForm(Enum):
    """The form of a strategy file."""

    PROTOBUF = "protobuf"
    JSON = "JSON"
    TOML = "TOML"


class StrategyFile(NamedTuple):
    """One strategy file and its kind. It is read only on request, block by block where the reader can do with that."""

    path: Path
    kind: StrategyForm

    def read(self) -> bytes:
        """Return all of it. Raises StrategyError if it cannot be read, is empty or too large."""
        _check_size(self.path)
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes]:
        """Yield all of it, block by block. Raises StrategyError if it cannot be read."""
        with _readable(self.path), source_files.open_stream(self.path) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block


def load(path: str) -> Strategy:
    """Read a strategy: a file (MindSpore's protobuf or JSON, a TOML spec), or a folder of them, which are merged.

    Files are told apart by their contents. In a folder, files of one stage must agree, the stages run from 0 without a
    gap, and files that are no strategies are passed over. Raises StrategyError, or LayoutError for a layout that
    cannot be; both name the file and the parameter.
    """
    from reshard_mpi.sharding.mindspore_layouts import to_strategy

    files = distinct(look_all(path))
    first = next(files)
    if first.kind is StrategyForm.TOML:
        from reshard_mpi.sharding.toml_spec import parse

        if next(files, None) is not None:
            raise _not_alone(first, path)
        return parse(text_of(first), str(first.path))

    def stage_files() -> Iterator[StageFile]:
        yield decode(first)
        for file in files:
            if file.kind is StrategyForm.TOML:
                raise _not_alone(file, path)
            yield decode(file)

    return to_strategy(stage_files(), path)


def _not_alone(spec: StrategyFile, path: str) -> StrategyError:
    return StrategyError(
        "a TOML spec is the whole strategy, but it is not alone",
        expected="one TOML spec, or MindSpore strategy files",
        got=f"{spec.path.name} among others",
        where=path,
        remedy="give the file itself instead of the folder",
    )


def digest(path: str) -> str:
    """Return the SHA-256 (hexadecimal) of a strategy file's bytes; of a folder, of its strategy files' names and bytes.

    Raises StrategyError where `load` finds no strategy file.
    """
    sha256 = hashlib.sha256()
    in_folder = source_files.is_folder(path)
    for file in look_all(path):
        if in_folder:
            name = file.path.name.encode("utf-8", "surrogateescape")
            sha256.update(b"%d %s %d " % (len(name), name, source_files.version_of(file.path).size_bytes))
        for block in file.blocks():
            sha256.update(block)
    return sha256.hexdigest()


def look(path: str) -> StrategyFile:
    """Return one file with its kind. Raises StrategyError if it cannot be read, is empty, or is of a known other kind.

    Those are checkpoints, HDF5 and safetensors files, and the like, which end in what strategies may end in too.
    """
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
    """Yield the strategy files of the folder `path` in the order of their names; if it is a file, that one.

    Other files of the folder (checkpoint shards, configurations, notes, hidden files) are passed over. Raises
    StrategyError if the folder holds no strategy.
    """
    folder = Path(path)
    with _readable(folder):
        is_folder = source_files.is_folder(folder)
    if not is_folder:
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
    """Read a MindSpore strategy file, protobuf or JSON. Raises StrategyError if it is neither."""
    path = str(file.path)
    if file.kind is StrategyForm.PROTOBUF:
        from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf

        with _readable(file.path):
            stream = source_files.open_stream(file.path)
        with stream:
            return decode_protobuf(stream, path)
    return decode_json(text_of(file), path)


def text_of(file: StrategyFile) -> str:
    """Return the text of a JSON or TOML file. Raises StrategyError if it is not UTF-8, or too long for its kind."""
    path = str(file.path)
    if file.kind is StrategyForm.TOML and _size_bytes(file.path) > MAX_SPEC_BYTES:
        raise StrategyError("the spec is too large", expected=f"at most {format_bytes(MAX_SPEC_BYTES)}", where=path)
    try:
        return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StrategyError("the file is text, but not in UTF-8", got=str(error), where=path) from None


def distinct(files: Iterable[StrategyFile]) -> Iterator[StrategyFile]:
    """Yield the files that differ; of those with the same bytes, as the ranks of a stage write them, the first."""
    first: StrategyFile | None = None
    seen: set[bytes] = set()
    for file in files:
        if first is None:
            yield (first := file)
            continue
        if not seen:  # a file that is alone is not summed
            seen.add(_digest(first))
        digest = _digest(file)
        if digest not in seen:
            seen.add(digest)
            yield file


def _digest(file: StrategyFile) -> bytes:
    digest = hashlib.sha256()
    for block in file.blocks():
        digest.update(block)
    return digest.digest()


def _check_size(file: Path) -> None:
    size_bytes = _size_bytes(file)
    if size_bytes == 0:
        raise StrategyError(
            "the strategy file is empty", expected="1 byte or more", got="0 bytes", where=str(file), remedy=REMEDY
        )
    if size_bytes > MAX_FILE_BYTES:
        raise StrategyError(
            "the file is too large to be a strategy",
            expected=f"at most {format_bytes(MAX_FILE_BYTES)}",
            got=f"{format_bytes(size_bytes)}: {_something_else(_head(file)) or 'of an unknown kind'}",
            where=str(file),
            remedy=REMEDY,
        )


def _size_bytes(file: Path) -> int:
    with _readable(file):
        size_bytes = source_files.version_of(file).size_bytes
        is_file = source_files.is_file(file)
    if not is_file:
        raise StrategyError(
            "the strategy is no regular file", expected="a file", got=described(file), where=str(file), remedy=REMEDY
        )
    return size_bytes


def _head(file: Path) -> bytes:
    with _readable(file), source_files.open_stream(file) as stream:
        return stream.read(_HEAD_BYTES)


def _entries(folder: Path) -> list[Path]:
    with _readable(folder):
        return [
            folder / entry.name
            for entry in source_files.entries(folder)
            if not entry.name.startswith(".") and entry.is_file
        ]


def _only_folders(folder: Path) -> str:
    """Describe a folder that holds folders but no files, most likely a checkpoint; "" if it holds no folders."""
    with _readable(folder):
        names = sorted((entry.name for entry in source_files.entries(folder) if entry.is_folder), key=natural_key)
    shown = [name for name in names if not name.startswith(".")]
    if not shown:
        return ""
    rank_folders = [folder / name for name in names if _RANK_FOLDER.fullmatch(name)]
    first = next((file for rank_folder in rank_folders for file in sorted(_entries(rank_folder))), None)
    if first is not None and (kind := _something_else(_head(first))):
        example = f"{first.parent.name}/{first.name} ({kind})"
        return f"a checkpoint: shards in {len(rank_folders)} rank folders, such as {example}"
    return f"no files, but folders: {', '.join(shown[:5])}{', ...' * (len(shown) > 5)}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise StrategyError if the file system refuses an operation on `path`, or if it is no path."""
    try:
        yield
    except ReshardError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StrategyError(
            "the strategy cannot be read", got=reason, where=str(path), remedy="check the path"
        ) from None


def _passed_over(file: Path) -> str:
    """Return why a file of a folder is not taken for a strategy; "" if it is."""
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
        is_spec = _size_bytes(file) <= MAX_SPEC_BYTES and _TOML_MESH.search(
            StrategyFile(file, StrategyForm.TOML).read()
        )
        return "" if is_spec else "TOML of something else"
    # A ParallelStrategyMap begins with its current_stage, field 1, a number.
    return "" if suffix in _STRATEGY or head.startswith(b"\x08") else "of an unknown kind"


def _names_layouts(file: Path) -> bool:
    """Tell whether a file of JSON has the key that all strategies have."""
    _check_size(file)
    before = b""
    for block in StrategyFile(file, StrategyForm.JSON).blocks():
        if _LAYOUTS in before + block:
            return True
        before = block[-len(_LAYOUTS) :]
    return False


def _kind(data: bytes, file: Path) -> StrategyForm:
    if data.removeprefix(_BOM).lstrip().startswith(b"{") or file.suffix.lower() == ".json":
        return StrategyForm.JSON
    # No strategy in protobuf is text: its first byte is a control character.
    if file.suffix.lower() == ".toml" or not _CONTROL.search(data):
        return StrategyForm.TOML
    return StrategyForm.PROTOBUF


def _something_else(head: bytes) -> str:
    """Return what kind of file, other than a strategy, begins with the bytes `head`; "" if that is not known."""
    kind = kind_of_mark(head[:START_BYTES])
    if kind is not None:
        return kind.what
    if head[:4] in _ENCRYPTED:
        return "an encrypted MindSpore file"
    return _protobuf_of_names(head)


def _protobuf_of_names(head: bytes) -> str:
    """Return "" or which MindSpore file that begins with a named record `head` is of: a checkpoint or a group map."""
    try:
        _, offset = _length(head, 0, 0x0A)
        name_bytes, offset = _length(head, offset, 0x0A)
        offset += name_bytes
        if head[offset] == 0x1A:
            return _CHECKPOINT
        payload_bytes, offset = _length(head, offset, 0x12)
        end = min(offset + payload_bytes, len(head))
        # Numbers: the ranks of a group, or the dimensions of a tensor, which its type follows.
        while offset < end and head[offset] == 0x08:
            _, offset = varint(head, offset + 1)
        if offset >= end:
            return "a MindSpore group map (group_info.pb)"
        return _CHECKPOINT if head[offset] == 0x12 else ""
    except (IndexError, WireError):
        return ""


def _length(head: bytes, offset: int, key: int) -> tuple[int, int]:
    """Return the length of the field that must begin at byte `offset` with the byte `key`, and where its content is."""
    if head[offset] != key:
        raise WireError
    return varint(head, offset + 1)

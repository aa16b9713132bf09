"""Name the files of records and locks, read the JSON of records and check its values (`record_path`, `read_json`)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar
from zlib import crc32

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import FileVersion, names, open_file, stream_of
from reshard_mpi.text import format_bytes

STATE = ".reshard_mpi"
COMMIT_RECORD = "reshard.json"
_RECORD = re.compile(r"rank_(0|[1-9][0-9]{0,7})\.json")
UPLOAD_ENDING = ".upload"


def run_path(state: Path) -> Path:
    return state / "run.json"


def record_path(state: Path, target_rank: int) -> Path:
    return state / f"rank_{target_rank}.json"


def upload_path(state: Path, target_rank: int) -> Path:
    """Return the path of the record of the upload of a target that is under way."""
    return state / f"rank_{target_rank}{UPLOAD_ENDING}"


def lock_name(target_rank: int) -> str:
    return f"rank_{target_rank}.lock"


def recorded_ranks(state: Path) -> list[int]:
    """Return the target ranks that have records, ascending."""
    try:
        listed = names(state)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in map(_RECORD.fullmatch, listed) if match)


T = TypeVar("T")

# Memory of the Python objects that each mark of JSON stands for.
_MARK_BYTES = {b"{": 200, b"[": 72, b",": 24}
# As in file systems.
_MAX_PATH_BYTES = 4095
_MAX_PART_BYTES = 255
MAX_NUMBER = (1 << 63) - 1
MAX_TEXT_LENGTH = 1 << 20
_HEXADECIMAL = frozenset("0123456789abcdef")


def check_of(facts: Any) -> str:
    """Return a CRC-32 of plain values, by which a record is known in which a bit has turned over."""
    return f"{crc32(json.dumps(facts).encode()):08x}"


class RecordLimits(NamedTuple):
    """The limits of a record: the size of its file, and the memory of its values."""

    file_bytes: int
    parsed_bytes: int


def parse(stream: BinaryIO, size_bytes: int, room: RecordLimits) -> dict[str, Any]:
    """Return the JSON object in a file of this size.

    Raises OSError if it cannot be read, ValueError or RecursionError for anything else, for a name that comes twice,
    and for what exceeds `room`. A file that is too large is not read, and one that would take too much memory is not
    parsed.
    """
    data = stream.read(room.file_bytes + 1) if size_bytes <= room.file_bytes else b""
    if data is None:  # EAGAIN: the file was opened so that a pipe in its place is not waited for
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), stream.name)
    if not 0 < len(data) <= room.file_bytes or parsed_bytes(data) > room.parsed_bytes:
        raise ValueError("too large, or empty")
    # We write nothing but ASCII; other characters would take up to four times as much room.
    return table(json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse))


def parsed_bytes(data: bytes) -> int:
    """Return an estimate of the memory that the values of a JSON text take, by its marks."""
    return sum(size_bytes * data.count(mark) for mark, size_bytes in _MARK_BYTES.items())


def number(value: Any, low: int = 0, high: int = MAX_NUMBER) -> int:
    """Return a whole number from `low` to `high`; True and 1.0 are none."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError("no such number")
    return value


def text(value: Any, longest: int = MAX_TEXT_LENGTH) -> str:
    """Return a string that is not longer than `longest`."""
    if type(value) is not str or len(value) > longest:
        raise ValueError("no such text")
    return value


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def one_of(value: Any, names: Collection[str]) -> str:
    """Return one of `names`."""
    if text(value) not in names:
        raise ValueError("no such name")
    return str(value)


def digest(value: Any) -> str:
    """Return a string of hexadecimal digits."""
    if not _HEXADECIMAL.issuperset(text(value, 128)):
        raise ValueError("no digest")
    return str(value)


def sha256(value: Any) -> str:
    """Return the 64 hexadecimal digits of a digest of 32 bytes."""
    if len(digest(value)) != 64:
        raise ValueError("a digest of another length")
    return str(value)


def path(value: Any) -> str:
    """Return a path that can be looked up."""
    parts = os.fsencode(text(value)).split(b"/")  # UnicodeEncodeError, a ValueError: half of a pair of surrogates
    if not value or "\0" in value or max(map(len, parts)) > _MAX_PART_BYTES or len(value) > _MAX_PATH_BYTES:
        raise ValueError("no path")
    return str(value)


def path_below(value: Any) -> str:
    """Return a relative path that does not lead out of its folder."""
    below = PurePosixPath(path(value))
    if below.is_absolute() or ".." in below.parts:
        raise ValueError("a path that leads elsewhere")
    return str(value)


def each(value: Any, check: Callable[[Any], T]) -> tuple[T, ...]:
    """Return the values of a list, each as `check` returns it."""
    if type(value) is not list:
        raise ValueError("no list")
    return tuple(map(check, value))


def table(value: Any) -> dict[str, Any]:
    """Return names with values."""
    if type(value) is not dict:
        raise ValueError("no names with values")
    return value


def optional(check: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """Return a check like `check` that also accepts None."""
    return lambda value: None if value is None else check(value)


def settings(values: Mapping[str, Any], checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return `values`, each checked as `checks` says by its name; others must be single values."""
    return {text(name): checks[name](value) if name in checks else single(value) for name, value in values.items()}


def single(value: Any) -> str | int | bool | None:
    """Return the value of a setting that this version does not know: None, true, false, a number or a text."""
    if value is None or type(value) is bool:
        return value
    return number(value, -MAX_NUMBER) if type(value) is int else text(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name that is there twice")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


# The record of a run has a dozen settings.
RUN_ROOM = RecordLimits(1 << 20, 16 << 20)

# Raised on reading a record that this program has not written.
DAMAGE = (LookupError, TypeError, ValueError, OverflowError)


@contextlib.contextmanager
def opened_record(path: Path, *, follow_link: bool = False) -> Iterator[tuple[BinaryIO, FileVersion | None]]:
    """Open a record for reading; yield it with its version, None if it is no regular file. Raises OSError.

    Args:
        follow_link: for checkpoints that are folders of links; without it a link is refused.
    """

    def opened(path: str, flags: int) -> int:
        # Of a pipe in its place, do not wait for a writer.
        return os.open(path, flags | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW))

    if is_object_path(path):
        with open_file(str(path)) as file, stream_of(file) as stream:
            yield stream, file.version
        return
    with open(path, "rb", opener=opened) as stream:
        status = os.fstat(stream.fileno())
        yield stream, FileVersion.of(status) if stat.S_ISREG(status.st_mode) else None


def read_json(path: Path, room: RecordLimits = RUN_ROOM, *, follow_link: bool = False) -> dict[str, Any] | None:
    """Return the JSON object in a file: None if there is no such file, an empty one if it holds anything else.

    Args:
        room: a file that exceeds it counts as damaged.
        follow_link: for checkpoints that are folders of links; without it a link counts as damaged.
    """

    try:
        with opened_record(path, follow_link=follow_link) as (stream, version):
            return {} if version is None else parse(stream, version.size_bytes, room)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        return {}
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return {}


def written(text: str, room: RecordLimits, what: str) -> str:
    """Return `text`, the text of a record. Raises TargetError if it is too large to be read again."""
    if parsed_bytes(text.encode()) > room.parsed_bytes or len(text) > room.file_bytes:
        raise TargetError(
            f"the record of {what} would be too large",
            expected=f"at most {format_bytes(room.file_bytes)}",
            got=format_bytes(len(text)),
            remedy="leave tensors out of the checkpoint, or --verify",
        )
    return text

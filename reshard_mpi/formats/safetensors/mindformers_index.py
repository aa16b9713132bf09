"""Read MindFormers' `metadata.json`: tensors, slices, files (`read`).

    {"state_dict_metadata": {NAME: {"properties": {"dtype": TYPE, ...}, "global_shape": [8, 4],
                                    "axis_fragmentations": [2, 1], "layout": {"interleaved_parallel": false, ...},
                                    "chunk": [{"global_offset": [0], "local_shape": [4, 4]}, ...]}, ...},
     "storage_data": {"('NAME', (0,))": [{"file_name": FILE, ...}, ...], ...}}

`axis_fragmentations` says into how many equal slices each dimension is cut. `global_offset` is, whatever its name, the
number of a slice among them, in row-major order (facts of MindFormers, master of January 2026). Other keys are passed
over.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import files
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, BY_NAME, DType
from reshard_mpi.formats.safetensors.json_text import JsonText
from reshard_mpi.sharding.box import Box

INDEX = "metadata.json"
_CALLED = "the index of a checkpoint"
_TENSORS, _STORAGE = "state_dict_metadata", "storage_data"
_PROPERTIES, _DTYPE, _LAYOUT, _INTERLEAVED = "properties", "dtype", "layout", "interleaved_parallel"
_SHAPE, _COUNTS, _CHUNKS, _NUMBER, _SLICE = (
    "global_shape",
    "axis_fragmentations",
    "chunk",
    "global_offset",
    "local_shape",
)
_FILE = "file_name"
_ENDING = ".safetensors"
# As many bytes as a character can be written with, for each byte of a name.
_ESCAPED = 6
_MAX_FIELD_BYTES = 64
_MAX_FILE_BYTES = 1024
# What stands around a name in a key of `storage_data`.
_KEY_BYTES = 64
_MAX_LENGTH = 1 << 62
# The memory kept of each slice of a tensor, of the box of each slice of equally cut tensors, of a list of files, and of
# each file in one.
_SLICE_BYTES, _BOX_BYTES, _HOLDERS_BYTES, _HOLDER_BYTES = 64, 320, 160, 16
_MAX_SLICES = 1 << 17


def _spaced(*parts: bytes) -> re.Pattern[bytes]:
    """Return the pattern of these parts with any white space between them."""
    return re.compile(rb"[ \t\n\r]*+".join(parts))


_WHOLE = rb"(?:0|[1-9][0-9]{0,17}+)"
_WHOLES = rb"(%b(?:[ \t\n\r]*+,[ \t\n\r]*+%b){0,7}+)" % (_WHOLE, _WHOLE)
# A slice and a place as MindFormers writes them; others are read as well.
_USUAL_SLICE = _spaced(
    *(rb"\{", b'"%b"' % _NUMBER.encode(), b":", rb"\[", b"(%b)" % _WHOLE, rb"\]", b","),
    *(b'"%b"' % _SLICE.encode(), b":", rb"\[", _WHOLES, rb"\]", rb"\}"),
)
_USUAL_PLACE = _spaced(
    *(rb"\{", b'"%b"' % _FILE.encode(), b":", rb'"([ !#-\[\]-~]{1,256}+)"', b","),
    *(rb'"storage_rank"', b":", _WHOLE, rb"\}"),
)
_USUAL_BYTES = 4 << 10
# A name in which Python escapes nothing, where it is printable.
_USUAL_KEY = re.compile(r"\('([^'\\]+)', \((0|[1-9][0-9]{0,8}),\)\)")
_REMEDY = "restore index and files of one and the same save"


class EqualCut(NamedTuple):
    """The type and shape of a tensor, and the number of equal slices of each dimension."""

    dtype: DType
    shape: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return tuple(length // count for length, count in zip(self.shape, self.counts))

    def boxes(self) -> Iterator[Box]:
        """Yield the box of each slice, in the order of their numbers."""
        lengths = self.slice_shape
        for place in itertools.product(*map(range, self.counts)):
            start = tuple(coordinate * length for coordinate, length in zip(place, lengths))
            yield Box(start, tuple(low + length for low, length in zip(start, lengths)))


class SlicedTensor(NamedTuple):
    """A tensor of the index. holders: for each slice, the names of the files that hold it."""

    cut: EqualCut
    holders: Sequence[tuple[str, ...]]


def read(path: str) -> dict[str, SlicedTensor]:
    """Return the tensors that the index at `path` lists, by name.

    Raises ShardError if it is damaged or contradicts itself, does not say where a slice lies, or names a file that is
    not in its folder.
    """
    with files.opened(path) as (fd, size_bytes):
        return _IndexReading(JsonText(fd, path, 0, size_bytes, _CALLED)).tensors()


class _IndexReading:
    """An index while it is read."""

    def __init__(self, text: JsonText) -> None:
        self._text = text
        self._cuts: dict[str, EqualCut] = {}
        self._alike: dict[EqualCut, EqualCut] = {}
        # By tensor and slice; and by key, if tensor and slice are not told from that at once.
        self._holders: dict[str, list[tuple[str, ...]]] = {}
        self._other_holders: dict[str, tuple[str, ...]] = {}
        self._alike_holders: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._files: dict[str, str] = {}
        self._kept_bytes = 0

    def tensors(self) -> dict[str, SlicedTensor]:
        """Read all of it."""
        text, parts = self._text, {_TENSORS: self._take_tensors, _STORAGE: self._take_storage}
        for offset, key in text.members(_MAX_FIELD_BYTES):
            if key not in (_TENSORS, _STORAGE):
                text.pass_over()
            elif key not in parts:
                raise text.damage(f"{_CALLED} has {key!r} twice", offset, expected="it once")
            else:
                parts.pop(key)()
        text.require_end()
        if parts:
            raise text.damage(f"{_CALLED} has no {next(iter(parts))!r}", 0, expected=f"{_TENSORS!r} and {_STORAGE!r}")
        if not self._cuts:
            raise text.damage(f"{_CALLED} lists no tensors", 0, expected="what the checkpoint holds")
        listed = {
            name: SlicedTensor(cut, [self._holders_of(name, number) for number in range(math.prod(cut.counts))])
            for name, cut in self._cuts.items()
        }
        for key in self._other_holders:
            raise self._contradiction(f"{_CALLED} says where {key} lies, which it does not list", "no such slice", key)
        return listed

    def _holders_of(self, name: str, number: int) -> tuple[str, ...]:
        """Return the files of a slice of a tensor. Raises ShardError if they are not told."""
        of_box = self._holders[name][number]
        if of_box:
            return of_box
        key = str((name, (number,)))
        holders = self._other_holders.pop(key, ())
        if not holders:
            raise self._contradiction(
                f"{_CALLED} does not say where slice {number} of {name!r} lies", f"{key} in {_STORAGE!r}", "nothing"
            )
        return holders

    def _take_tensors(self) -> None:
        text = self._text
        for offset, name in text.members(_ESCAPED * files.MAX_NAME_BYTES):
            if not name or len(name.encode(errors="replace")) > files.MAX_NAME_BYTES or name in self._cuts:
                problem = f"{_CALLED} lists {name!r} twice" if name else "a tensor's name is too long, or empty"
                raise text.damage(problem, offset, expected=f"each tensor once, by 1 to {files.MAX_NAME_BYTES} bytes")
            if len(self._cuts) == files.MAX_TENSORS:
                raise text.damage(f"{_CALLED} lists too many tensors", offset, expected=f"{files.MAX_TENSORS} at most")
            cut = self._cut(offset, name)
            count = math.prod(cut.counts)
            if cut not in self._alike:
                self._keep(offset, files.kept_kind_bytes(2 * len(cut.shape)) + _BOX_BYTES * count)
            self._keep(offset, files.kept_bytes(name) + _SLICE_BYTES * count)
            self._cuts[name] = self._alike.setdefault(cut, cut)
            self._holders[name] = [()] * count

    def _cut(self, offset: int, name: str) -> EqualCut:
        """Take the description of a tensor."""
        text = self._text
        dtype: DType | None = None
        sizes: dict[str, tuple[int, ...]] = {}
        slices: dict[int, tuple[int, ...]] | None = None
        for field_at, field in self._fields(name, (_PROPERTIES, _SHAPE, _COUNTS, _CHUNKS, _LAYOUT)):
            if field == _PROPERTIES:
                dtype = self._dtype(name)
            elif field in (_SHAPE, _COUNTS):
                sizes[field] = text.numbers(files.MAX_DIMENSIONS)
            elif field == _CHUNKS:
                slices = self._slices(field_at, name)
            elif text.next_is(b"{"):
                self._require_plain_layout(name)
            else:
                text.pass_over()
        if dtype is None or len(sizes) < len((_SHAPE, _COUNTS)) or slices is None:
            needed = ", ".join((_DTYPE, _SHAPE, _COUNTS, _CHUNKS))
            raise text.damage(f"{_CALLED} does not say what {name!r} is", offset, expected=needed)
        cut = EqualCut(dtype, sizes[_SHAPE], sizes[_COUNTS])
        self._require_slices(offset, name, cut, slices)
        return cut

    def _require_slices(self, offset: int, name: str, cut: EqualCut, slices: dict[int, tuple[int, ...]]) -> None:
        """Raise ShardError unless the slices are those into which the tensor is cut, each of them once."""
        text, shape, counts = self._text, cut.shape, cut.counts
        if max(shape, default=0) > _MAX_LENGTH or math.prod(filter(None, shape)) > _MAX_LENGTH:
            raise text.damage(f"the shape of {name!r} is impossibly large", offset, got=str(list(shape)))
        if len(counts) != len(shape) or 0 in counts or any(length % count for length, count in zip(shape, counts)):
            raise text.damage(
                f"{name!r} cannot be cut as the index says",
                offset,
                expected=f"a number of equal slices for each dimension of {list(shape)}",
                got=f"{_COUNTS} {list(counts)}",
            )
        wrong = next((number for number, own in slices.items() if own != cut.slice_shape), None)
        if wrong is not None:
            raise text.damage(
                f"slice {wrong} of {name!r} has not the shape of one",
                offset,
                expected=f"{list(cut.slice_shape)}, of {list(shape)} cut as {list(counts)}",
                got=str(list(slices[wrong])),
            )
        count = math.prod(counts)
        outside = next((number for number in slices if number >= count), None)
        if outside is not None:
            raise text.damage(
                f"slice {outside} of {name!r} lies outside of the tensor",
                offset,
                expected=f"the number of a slice below {count}, of {list(shape)} cut as {list(counts)}",
                got=f"{_NUMBER} {outside}",
            )
        if len(slices) != count:
            lacking = next(number for number in range(count) if number not in slices)
            raise text.damage(
                f"{_CALLED} lacks slice {lacking} of {name!r}", offset, expected=f"{count} slices", got=str(len(slices))
            )

    def _fields(self, what: str, fields: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Take an object: yield the byte and the key of each field that is known, and pass over the others."""
        met: set[str] = set()
        for offset, field in self._text.members(_MAX_FIELD_BYTES):
            if field not in fields:
                self._text.pass_over()
                continue
            if field in met:
                raise self._text.damage(f"{_CALLED} says {field!r} of {what!r} twice", offset, expected="it once")
            met.add(field)
            yield offset, field

    def _dtype(self, name: str) -> DType | None:
        dtype: DType | None = None
        for offset, _ in self._fields(name, (_DTYPE,)):
            called = self._text.text(_MAX_FIELD_BYTES)
            dtype = BY_MINDSPORE_NAME.get(called or "") or BY_NAME.get(called or "")
            if dtype is None:
                dtype_names = ", ".join(BY_MINDSPORE_NAME)
                raise self._text.damage(
                    f"{name!r} is of a type that is not known", offset, expected=dtype_names, got=repr(called)
                )
        return dtype

    def _require_plain_layout(self, name: str) -> None:
        for offset, _ in self._fields(name, (_INTERLEAVED,)):
            if not self._text.next_is(b"f"):
                raise self._text.damage(
                    f"{name!r} is cut in an interleaved way, which is not known here",
                    offset,
                    expected=f"{_INTERLEAVED} false",
                )
            self._text.pass_over()

    def _slices(self, offset: int, name: str) -> dict[int, tuple[int, ...]]:
        """Take the slices of a tensor: the shape of each, by number."""
        text = self._text
        slices: dict[int, tuple[int, ...]] = {}
        alike: dict[tuple[int, ...], tuple[int, ...]] = {}
        for slice_at in text.items():
            usual = text.usual(_USUAL_SLICE, _USUAL_BYTES)
            if usual is None:
                number, shape = self._slice(slice_at, name)
            else:
                number, shape = int(usual[1]), tuple(map(int, usual[2].split(b",")))
            if number in slices:
                raise text.damage(f"{_CALLED} lists slice {number} of {name!r} twice", slice_at, expected="it once")
            slices[number] = alike.setdefault(shape, shape)
            if len(slices) > _MAX_SLICES:
                raise text.damage(f"{name!r} is cut into too many slices", offset, expected=f"{_MAX_SLICES} at most")
        return slices

    def _slice(self, offset: int, name: str) -> tuple[int, tuple[int, ...]]:
        """Take a slice in whatever form: its number and its shape."""
        facts = {field: self._text.numbers(files.MAX_DIMENSIONS) for _, field in self._fields(name, (_NUMBER, _SLICE))}
        if len(facts) < len((_NUMBER, _SLICE)) or len(facts[_NUMBER]) != 1:
            raise self._text.damage(
                f"a slice of {name!r} has no number",
                offset,
                expected=f"one number as {_NUMBER}, and {_SLICE}",
                got=str({field: list(numbers) for field, numbers in facts.items()}),
            )
        return facts[_NUMBER][0], facts[_SLICE]

    def _take_storage(self) -> None:
        text = self._text
        for offset, key in text.members(_ESCAPED * (files.MAX_NAME_BYTES + _KEY_BYTES)):
            place = self._place(key or "")
            holder = self._other_holders.get(key or "") if place is None else self._holders[place[0]][place[1]]
            if key is None or holder:
                problem = f"{_CALLED} says twice where {key} lies" if key else "a tensor's name is too long"
                raise text.damage(problem, offset, expected="each slice once")
            holders = tuple(dict.fromkeys(self._file(item_at, key) for item_at in text.items()))
            if not holders:
                raise text.damage(
                    f"{_CALLED} does not say where {key} lies", offset, expected="a file or more", got="none"
                )
            if holders not in self._alike_holders:
                self._keep(offset, _HOLDERS_BYTES + _HOLDER_BYTES * len(holders))
            holders = self._alike_holders.setdefault(holders, holders)
            if place is None:
                self._keep(offset, files.kept_bytes(key))
                self._other_holders[key] = holders
            else:
                self._holders[place[0]][place[1]] = holders

    def _place(self, key: str) -> tuple[str, int] | None:
        """Return the tensor and the number of the slice that a key is about, if these are known and plainly written."""
        usual = _USUAL_KEY.fullmatch(key)
        if usual is None or not usual[1].isprintable():
            return None
        name, number = usual[1], int(usual[2])
        return (name, number) if number < len(self._holders.get(name, ())) else None

    def _file(self, offset: int, key: str) -> str:
        """Take one place in which a slice lies."""
        usual = self._text.usual(_USUAL_PLACE, _USUAL_BYTES)
        file = usual[1].decode() if usual is not None else None
        for _ in self._fields(key, (_FILE,)) if usual is None else ():
            file = self._text.text(_ESCAPED * _MAX_FILE_BYTES)
        if file is None or (file not in self._files and not _is_beside(file)):
            raise self._text.damage(
                f"{_CALLED} says that {key} lies outside of its folder, or in no file of it",
                offset,
                expected=f"the name of a file beside it, which ends in {_ENDING}",
                got=repr(file),
            )
        if file not in self._files:
            self._keep(offset, files.kept_bytes(file))
        return self._files.setdefault(file, file)

    def _keep(self, offset: int, size_bytes: int) -> None:
        self._kept_bytes += size_bytes
        if self._kept_bytes > files.MAX_KEPT_BYTES:
            raise self._text.damage(
                f"{_CALLED} lists too much", offset, expected=f"{files.MAX_KEPT_BYTES} bytes of memory at most"
            )

    def _contradiction(self, problem: str, expected: str, got: str) -> ShardError:
        return ShardError(problem, expected=expected, got=got, where=self._text.path, remedy=_REMEDY)


def _is_beside(file: str) -> bool:
    """Tell whether a text is the name of a file in the folder of the index."""
    is_short = len(file.encode(errors="replace")) <= _MAX_FILE_BYTES
    return is_short and "/" not in file and "\0" not in file and file.endswith(_ENDING)

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
from operator import mul
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, BY_NAME, DType
from reshard_mpi.formats.safetensors.json_reader import Json, JsonReader, as_numbers, as_object, shown
from reshard_mpi.sharding.box import Box

INDEX = "metadata.json"
_CALLED = "the index of a checkpoint"
_TENSORS, _STORAGE = "state_dict_metadata", "storage_data"
_PROPERTIES, _DTYPE, _LAYOUT, _INTERLEAVED = "properties", "dtype", "layout", "interleaved_parallel"
_SHAPE, _COUNTS, _CHUNKS = "global_shape", "axis_fragmentations", "chunk"
_NUMBER, _SLICE = "global_offset", "local_shape"
_FILE = "file_name"
_ENDING = ".safetensors"
_MAX_FILE_BYTES = 1024
_MAX_LENGTH = 1 << 62
# The memory kept of each slice of a tensor, of the box of each slice of equally cut tensors, of a list of files, and of
# each file in one.
_SLICE_BYTES, _BOX_BYTES, _HOLDERS_BYTES, _HOLDER_BYTES = 64, 320, 160, 16
_MAX_SLICES = 1 << 17
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
            yield Box.at(tuple(map(mul, place, lengths)), lengths)


class SlicedTensor(NamedTuple):
    """A tensor of the index. holders: for each slice, the names of the files that hold it."""

    cut: EqualCut
    holders: Sequence[tuple[str, ...]]


def read(file: SourceFile) -> dict[str, SlicedTensor]:
    """Return the tensors that an index lists, by name.

    Raises ShardError if it is damaged or contradicts itself, does not say where a slice lies, or names a file that is
    not in its folder.
    """
    return _IndexReading(JsonReader(file.read_exactly, file.path, 0, file.size_bytes, _CALLED)).tensors()


class _IndexReading:
    """An index while it is read."""

    def __init__(self, text: JsonReader) -> None:
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
        for key in text.members():
            if key not in (_TENSORS, _STORAGE):
                text.value()
            elif key not in parts:
                raise text.damage(f"{_CALLED} has {key!r} twice", expected="it once")
            else:
                parts.pop(key)()
        text.require_end()
        if parts:
            raise text.damage(f"{_CALLED} has no {next(iter(parts))!r}", expected=f"{_TENSORS!r} and {_STORAGE!r}")
        if not self._cuts:
            raise text.damage(f"{_CALLED} lists no tensors", expected="what the checkpoint holds")
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
        for name in text.members():
            text.require_new(name, self._cuts, f"{_CALLED} lists {shown(name)} twice")
            if len(self._cuts) == structure.MAX_TENSORS:
                raise text.damage(f"{_CALLED} lists too many tensors", expected=f"{structure.MAX_TENSORS} at most")
            cut = self._cut(name)
            count = math.prod(cut.counts)
            if cut not in self._alike:
                self._keep(structure.kept_kind_bytes(2 * len(cut.shape)) + _BOX_BYTES * count)
            self._keep(structure.kept_bytes(name) + _SLICE_BYTES * count)
            self._cuts[name] = self._alike.setdefault(cut, cut)
            self._holders[name] = [()] * count

    def _cut(self, name: str) -> EqualCut:
        """Take the description of a tensor."""
        text = self._text
        facts: dict[str, Json] = {}
        slices: dict[int, tuple[int, ...]] | None = None
        for field in text.members():
            if field in facts or (field == _CHUNKS and slices is not None):
                raise text.damage(f"{_CALLED} says {shown(field)} of {name!r} twice", expected="it once")
            if field == _CHUNKS:
                slices = self._slices(name)
            elif field in (_PROPERTIES, _SHAPE, _COUNTS, _LAYOUT):
                facts[field] = text.value()
            else:
                text.value()
        properties, layout = as_object(facts.get(_PROPERTIES)), as_object(facts.get(_LAYOUT))
        shape, counts = as_numbers(facts.get(_SHAPE)), as_numbers(facts.get(_COUNTS))
        if properties is None or _DTYPE not in properties or shape is None or counts is None or slices is None:
            raise text.damage(
                f"{_CALLED} does not say what {name!r} is",
                expected=f"{_DTYPE} in {_PROPERTIES}; {_SHAPE} and {_COUNTS}, of whole numbers; {_CHUNKS}",
                got=shown(tuple(facts.items())),
            )
        if layout is not None and layout.get(_INTERLEAVED, False) is not False:
            raise text.damage(
                f"{name!r} is cut in an interleaved way, which is not known here", expected=f"{_INTERLEAVED} false"
            )
        cut = EqualCut(self._dtype(name, properties[_DTYPE]), shape, counts)
        self._require_slices(name, cut, slices)
        return cut

    def _require_slices(self, name: str, cut: EqualCut, slices: dict[int, tuple[int, ...]]) -> None:
        """Raise ShardError unless the slices are those into which the tensor is cut, each of them once."""
        text, shape, counts = self._text, cut.shape, cut.counts
        if max(shape, default=0) > _MAX_LENGTH or math.prod(filter(None, shape)) > _MAX_LENGTH:
            raise text.damage(f"the shape of {name!r} is impossibly large", got=str(list(shape)))
        if len(counts) != len(shape) or 0 in counts or any(length % count for length, count in zip(shape, counts)):
            raise text.damage(
                f"{name!r} cannot be cut as the index says",
                expected=f"a number of equal slices for each dimension of {list(shape)}",
                got=f"{_COUNTS} {list(counts)}",
            )
        wrong = next((number for number, own in slices.items() if own != cut.slice_shape), None)
        if wrong is not None:
            raise text.damage(
                f"slice {wrong} of {name!r} has not the shape of one",
                expected=f"{list(cut.slice_shape)}, of {list(shape)} cut as {list(counts)}",
                got=str(list(slices[wrong])),
            )
        count = math.prod(counts)
        outside = next((number for number in slices if number >= count), None)
        if outside is not None:
            raise text.damage(
                f"slice {outside} of {name!r} lies outside of the tensor",
                expected=f"the number of a slice below {count}, of {list(shape)} cut as {list(counts)}",
                got=f"{_NUMBER} {outside}",
            )
        if len(slices) != count:
            lacking = next(number for number in range(count) if number not in slices)
            raise text.damage(
                f"{_CALLED} lacks slice {lacking} of {name!r}", expected=f"{count} slices", got=str(len(slices))
            )

    def _dtype(self, name: str, called: Json) -> DType:
        dtype = BY_MINDSPORE_NAME.get(called) or BY_NAME.get(called) if isinstance(called, str) else None
        if dtype is None:
            raise self._text.damage(
                f"{name!r} is of a type that is not known", expected=", ".join(BY_MINDSPORE_NAME), got=shown(called)
            )
        return dtype

    def _slices(self, name: str) -> dict[int, tuple[int, ...]]:
        """Take the slices of a tensor: the shape of each, by number."""
        text = self._text
        slices: dict[int, tuple[int, ...]] = {}
        alike: dict[tuple[int, ...], tuple[int, ...]] = {}
        for _ in text.items():
            listed = text.value()
            facts = as_object(listed) or {}
            numbers, shape = as_numbers(facts.get(_NUMBER)), as_numbers(facts.get(_SLICE))
            if numbers is None or len(numbers) != 1 or shape is None:
                raise text.damage(
                    f"a slice of {name!r} has no number",
                    expected=f"a whole number as {_NUMBER}, and {_SLICE}",
                    got=shown(listed),
                )
            if numbers[0] in slices:
                raise text.damage(f"{_CALLED} lists slice {numbers[0]} of {name!r} twice", expected="it once")
            slices[numbers[0]] = alike.setdefault(shape, shape)
            if len(slices) > _MAX_SLICES:
                raise text.damage(f"{name!r} is cut into too many slices", expected=f"{_MAX_SLICES} at most")
        return slices

    def _take_storage(self) -> None:
        text = self._text
        for key in text.members():
            place = self._place(key)
            if self._other_holders.get(key) if place is None else self._holders[place[0]][place[1]]:
                raise text.damage(f"{_CALLED} says twice where {shown(key)} lies", expected="each slice once")
            holders = tuple(dict.fromkeys(self._file(key, text.value()) for _ in text.items()))
            if not holders:
                raise text.damage(f"{_CALLED} does not say where {key} lies", expected="a file or more", got="none")
            if holders not in self._alike_holders:
                self._keep(_HOLDERS_BYTES + _HOLDER_BYTES * len(holders))
            holders = self._alike_holders.setdefault(holders, holders)
            if place is None:
                self._keep(structure.kept_bytes(key))
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

    def _file(self, key: str, place: Json) -> str:
        """Return the file of a place in which a slice lies."""
        file = (as_object(place) or {}).get(_FILE)
        if type(file) is not str or (file not in self._files and not _is_beside(file)):
            raise self._text.damage(
                f"{_CALLED} says that {key} lies outside of its folder, or in no file of it",
                expected=f"the name of a file beside it, which ends in {_ENDING}",
                got=shown(file),
            )
        if file not in self._files:
            self._keep(structure.kept_bytes(file))
        return self._files.setdefault(file, file)

    def _keep(self, size_bytes: int) -> None:
        self._kept_bytes += size_bytes
        if self._kept_bytes > structure.MAX_KEPT_BYTES:
            raise self._text.damage(
                f"{_CALLED} lists too much", expected=f"{structure.MAX_KEPT_BYTES} bytes of memory at most"
            )

    def _contradiction(self, problem: str, expected: str, got: str) -> ShardError:
        return ShardError(problem, expected=expected, got=got, where=self._text.path, remedy=_REMEDY)


def _is_beside(file: str) -> bool:
    """Tell whether a text is the name of a file in the folder of the index."""
    return len(file.encode()) <= _MAX_FILE_BYTES and structure.is_file_name(file) and file.endswith(_ENDING)

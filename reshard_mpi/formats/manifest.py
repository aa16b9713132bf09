"""Where the bytes of a shard live: the one description that formats give, planning matches and the engine follows."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from reshard_mpi.formats.dtypes import DType
from reshard_mpi.sharding.box import Box

if TYPE_CHECKING:
    import numpy as np


class ByteRange(NamedTuple):
    """`length_bytes` bytes of the file `path` from `offset_bytes` on."""

    path: str
    offset_bytes: int
    length_bytes: int


class Segments(NamedTuple):
    """A tensor's row-major bytes as one stream of byte ranges, which may be cut at any byte.

    swapped: the file has the byte order this machine has not.
    """

    ranges: tuple[ByteRange, ...]
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Decoded:
    """A tensor that must be read through its library (compressed or chunked storage).

    read: returns a box of the tensor, in the tensor's own coordinates, as a C-contiguous array of raw elements
    (unsigned integers or void of the element's size, in this machine's byte order). chunk: the shape in which the
    library decodes. decoding_bytes: what one chunk takes of memory besides the box that is read. kept_bytes: what the
    library keeps of it while it decodes the next.
    """

    path: str
    read: Callable[[Box], np.ndarray[Any, Any]] = field(compare=False, repr=False)
    chunk: tuple[int, ...]
    decoding_bytes: int
    kept_bytes: int


class TensorEntry(NamedTuple):
    """One tensor of one shard: its type, the shape held here, and where the elements are.

    box: the part of the whole tensor this is, and global_shape that tensor's shape, where the file itself says so;
    None in formats that leave it to the strategy.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Segments | Decoded
    box: Box | None = None
    global_shape: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        size = self.dtype.itemsize_bytes
        for length in self.shape:
            size *= length
        return size


class Kind(NamedTuple):
    """What many tensors of a shard have alike: all but name and place. See `TensorEntry`."""

    dtype: DType
    shape: tuple[int, ...]
    box: Box | None = None
    global_shape: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize_bytes * math.prod(self.shape)


# Measured: the name of a tensor with its number, the columns of its kind and its place, and a place of another sort.
_NAME_BYTES, _PLACE_BYTES, _ELSEWHERE_BYTES = 400, 16, 600
KEPT_TENSOR_BYTES, KEPT_PLACE_BYTES = _NAME_BYTES + _PLACE_BYTES, _PLACE_BYTES

# In the place of where a tensor begins: it is not one run of its shard's file, or not as this machine has it.
ELSEWHERE = -1


class Tensors(Mapping[str, TensorEntry]):
    """The tensors of one shard in the file's order, by column, since it may hold a hundred thousand of a few kinds.

    kinds: in the order in which they are met. kind_of: the number of each tensor's kind. starts: the byte of the file
    `path` at which its elements begin, where they are one run there (any byte, if there are none). Else it is
    `ELSEWHERE`, and `elsewhere` says where, by the number of the tensor.
    """

    __slots__ = ("_number_of_kind", "elsewhere", "kind_of", "kinds", "number_of", "path", "starts")

    def __init__(self, path: str, entries: Iterable[TensorEntry] = ()) -> None:
        self.path = path
        self.number_of: dict[str, int] = {}
        self.kinds: list[Kind] = []
        self.kind_of = array("I")
        self.starts = array("q")
        self.elsewhere: dict[int, Segments | Decoded] = {}
        self._number_of_kind: dict[Kind, int] = {}
        for entry in entries:
            self.add_entry(entry)

    def kind(self, kind: Kind) -> int:
        """Return the number of a kind, which is new if it has not been met before."""
        number = self._number_of_kind.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def add(self, name: str, kind: int, start: int) -> None:
        """Add a tensor that is one run of the file, of a kind with this number. The caller knows that it is new."""
        self.number_of[name] = len(self.starts)
        self.kind_of.append(kind)
        self.starts.append(start)

    def add_entry(self, entry: TensorEntry) -> None:
        """Add a tensor. Raises ValueError if there is one of its name."""
        if entry.name in self.number_of:
            raise ValueError(f"two tensors called {entry.name!r}")
        kind, source = self.kind(Kind(entry.dtype, entry.shape, entry.box, entry.global_shape)), entry.source
        start = ELSEWHERE
        if isinstance(source, Segments) and not source.swapped:
            if not source.ranges and not entry.size_bytes:
                start = 0
            elif len(source.ranges) == 1 and source.ranges[0].path == self.path:
                start = source.ranges[0].offset_bytes
        if start == ELSEWHERE:
            self.elsewhere[len(self.starts)] = source
        self.add(entry.name, kind, start)

    def share_names(self, other: Tensors) -> None:
        """Keep the names together with another shard that has the same ones in the same order."""
        if self.number_of is not other.number_of and list(self.number_of) == list(other.number_of):
            self.number_of = other.number_of

    def at(self, path: str) -> Tensors:
        """Return the tensors of a file that has the same ones at the same places."""
        other = Tensors(path)
        other.number_of, other.kinds, other._number_of_kind = self.number_of, self.kinds, self._number_of_kind
        other.kind_of, other.starts = self.kind_of, self.starts
        for number, source in self.elsewhere.items():
            if not isinstance(source, Segments):
                raise TypeError("a tensor that is read through a library")
            ranges = tuple(ByteRange(path, part.offset_bytes, part.length_bytes) for part in source.ranges)
            other.elsewhere[number] = Segments(ranges, source.swapped)
        return other

    def source(self, number: int) -> Segments | Decoded:
        """Return where the elements of a tensor are."""
        start = self.starts[number]
        if start == ELSEWHERE:
            return self.elsewhere[number]
        size_bytes = self.kinds[self.kind_of[number]].size_bytes
        return Segments((ByteRange(self.path, start, size_bytes),) if size_bytes else ())

    def __getitem__(self, name: str) -> TensorEntry:
        number = self.number_of[name]
        dtype, shape, box, global_shape = self.kinds[self.kind_of[number]]
        return TensorEntry(name, dtype, shape, self.source(number), box, global_shape)

    def kind_named(self, name: str) -> Kind:
        """Return what kind of tensor is called so. Raises KeyError if none is."""
        return self.kinds[self.kind_of[self.number_of[name]]]

    def keys(self) -> KeysView[str]:
        return self.number_of.keys()

    def __contains__(self, name: object) -> bool:
        return name in self.number_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.number_of)

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        """Tell whether the same tensors lie at the same places, in the same order."""
        return isinstance(other, Tensors) and self._columns() == other._columns()

    def __hash__(self) -> int:
        return hash((self.path, len(self)))

    def _columns(self) -> tuple[object, ...]:
        places = self.starts, self.elsewhere, self.path
        return self.kinds, self.kind_of, list(self.number_of), *places

    @staticmethod
    def kept_bytes(shards: Iterable[Tensors]) -> int:
        """Return how much memory shards take together; names that several share count once."""
        names: dict[int, int] = {}
        places = 0
        for tensors in shards:
            names[id(tensors.number_of)] = len(tensors)
            places += _PLACE_BYTES * len(tensors) + _ELSEWHERE_BYTES * len(tensors.elsewhere)
        return places + _NAME_BYTES * sum(names.values())


class Piece(NamedTuple):
    """A part of a tensor as a checkpoint lists it: `box` of the whole tensor is the tensor `number` of a file."""

    box: Box
    tensors: Tensors
    number: int


# What many tensors of a list have alike: the box of each piece, and the file that it lies in.
PieceList = tuple[tuple[Box, Tensors], ...]


class ListedTensors(Tensors):
    """The whole tensors of a checkpoint whose pieces are listed one by one: their places are those of the pieces.

    Pieces may lie in any files, several of a tensor in one of them, and may overlap if they hold the same there.
    lists: the different lists of pieces. list_of: the number of each tensor's. numbers: its pieces' numbers in their
    files. missing: what is wrong with files of which no piece is listed, in words.
    """

    __slots__ = ("_number_of_list", "list_of", "lists", "missing", "numbers")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lists: list[PieceList] = []
        self.list_of = array("I")
        self.numbers: list[tuple[int, ...]] = []
        self.missing: tuple[str, ...] = ()
        self._number_of_list: dict[tuple[tuple[Box, int], ...], int] = {}

    def add_listed(self, name: str, dtype: DType, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """Add a tensor. Raises ValueError if there is one of its name, or a piece does not fit it."""
        if name in self.number_of:
            raise ValueError(f"two tensors called {name!r}")
        whole = Box.whole(shape)
        for box, tensors, number in pieces:
            kind = tensors.kinds[tensors.kind_of[number]]
            if (kind.dtype, kind.shape) != (dtype, box.shape) or not (box.ndim == whole.ndim and whole.contains(box)):
                raise ValueError(f"a piece of {name!r} is {kind.dtype} {list(kind.shape)}, listed as {dtype} at {box}")
        key = tuple((piece.box, id(piece.tensors)) for piece in pieces)
        listed = self._number_of_list.setdefault(key, len(self.lists))
        if listed == len(self.lists):
            self.lists.append(tuple((piece.box, piece.tensors) for piece in pieces))
        self.elsewhere[len(self.starts)] = _NOWHERE
        self.add(name, self.kind(Kind(dtype, shape)), ELSEWHERE)
        self.list_of.append(listed)
        self.numbers.append(tuple(piece.number for piece in pieces))

    @property
    def files(self) -> tuple[Tensors, ...]:
        """The files that pieces lie in."""
        every = {id(tensors): tensors for pieces in self.lists for _, tensors in pieces}
        return tuple(every.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ListedTensors) or list(self) != list(other):
            return False
        return (
            self.kinds == other.kinds
            and self.kind_of == other.kind_of
            and list(self._pieces()) == list(other._pieces())
        )

    def __hash__(self) -> int:
        return super().__hash__()

    def _pieces(self) -> Iterator[object]:
        for listed, numbers in zip(self.list_of, self.numbers):
            pieces = zip(self.lists[listed], numbers)
            yield [(box, tensors.source(number)) for (box, tensors), number in pieces]


# In the place of where a tensor's elements are, if only its pieces have a place.
_NOWHERE = Segments(())


class ShardIdentity(NamedTuple):
    """What a self-describing shard says of its place in its checkpoint.

    strategy: the placement table of the whole checkpoint (text made by `strategy.table`).
    """

    rank: int
    world_size: int
    strategy: str


class Structure(NamedTuple):
    """What makes two files of a format the same but for payloads: their length, and a digest of all else."""

    size_bytes: int
    digest: bytes


class Manifest(NamedTuple):
    """One shard file: its tensors in the file's order, its strings, and its identity where it carries one.

    structure: where a format can tell by it that another file has the same tensors at the same places.
    """

    path: str
    format: str
    tensors: Tensors
    strings: Mapping[str, str] = {}
    identity: ShardIdentity | None = None
    structure: Structure | None = None

    def at(self, path: str) -> Manifest:
        """Return what a file of the same structure holds."""
        return self._replace(path=path, tensors=self.tensors.at(path))

    @property
    def is_as_stored(self) -> bool:
        """Whether all elements lie in the file as they are on this machine."""
        return all(isinstance(source, Segments) and not source.swapped for source in self._otherwise_stored())

    @property
    def decoding_bytes(self) -> int:
        """The most memory that decoding one of the tensors takes."""
        sources = self._otherwise_stored()
        return max((source.decoding_bytes for source in sources if isinstance(source, Decoded)), default=0)

    def _otherwise_stored(self) -> Iterator[Segments | Decoded]:
        files = self.tensors.files if isinstance(self.tensors, ListedTensors) else (self.tensors,)
        return (source for tensors in files for source in tensors.elsewhere.values())


class TensorSpec(NamedTuple):
    """A tensor of a shard that is to be written: `box` of a tensor of shape `global_shape`."""

    name: str
    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class SpecKind(NamedTuple):
    """What many tensors of a shard that is to be written have alike. See `TensorSpec`."""

    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class Specs(Sequence[TensorSpec]):
    """The tensors of a shard that is to be written, in file order, by column.

    kind_of: the number of each one's kind.
    """

    __slots__ = ("kind_of", "kinds", "names")

    def __init__(self, names: Sequence[str], kinds: Sequence[SpecKind], kind_of: Sequence[int]) -> None:
        self.names = names
        self.kinds = kinds
        self.kind_of = kind_of

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> Specs:
        """Return the same tensors by column."""
        if isinstance(tensors, cls):
            return tensors
        numbers: dict[SpecKind, int] = {}
        kind_of = array("I", (numbers.setdefault(SpecKind(*tensor[1:]), len(numbers)) for tensor in tensors))
        return cls([tensor.name for tensor in tensors], list(numbers), kind_of)

    @overload
    def __getitem__(self, at: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, at: slice) -> Specs: ...
    def __getitem__(self, at: int | slice) -> TensorSpec | Specs:
        if isinstance(at, slice):
            return Specs(self.names[at], self.kinds, self.kind_of[at])
        return TensorSpec(self.names[at], *self.kinds[self.kind_of[at]])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """How many bytes all elements take."""
        sizes = [kind.size_bytes for kind in self.kinds]
        return sum(sizes[kind] for kind in self.kind_of)


class ShardSpec(NamedTuple):
    """A shard that is to be written, tensors in file order. with_sums: it is to keep a sum of each of them."""

    identity: ShardIdentity
    tensors: Sequence[TensorSpec]
    strings: Mapping[str, str]
    with_sums: bool = False

    @property
    def specs(self) -> Specs:
        """The tensors by column."""
        return Specs.of(self.tensors)

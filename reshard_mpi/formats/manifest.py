"""Describe a shard file, read or to be written (`Manifest`, `ShardSpec`), and compare files' nests (`common_nest`)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

from reshard_mpi.errors import DisagreementError, TargetError
from reshard_mpi.formats.dtypes import DType, numbers
from reshard_mpi.formats.locations import ByteRanges, LibraryRead, Location
from reshard_mpi.formats.nest import joined, settings_of
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorTable, TensorType
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import GIB

# The string of a shard that holds what is neither tensor nor text, and how all of it is nested (see `nest`).
NEST = "__reshard_mpi_nest__"
# With these words end the ones on what a training leaves out when it goes on in another layout itself.
OF_RANKS_ALONE = "states of the ranks that saved them, which no other layout has"


def shown_string(name: str) -> str:
    """Return what people are told that a string of a shard is."""
    return "settings beside the tensors, and how all is nested" if name == NEST else repr(name)


def same_nest(texts: Iterable[str]) -> str | None:
    """Return the text of nests that are the same but for the order of their tensors; None if they are not.

    It has no order if theirs differ.
    """
    different = list(dict.fromkeys(texts))
    if len(different) == 1:
        return different[0]
    try:
        without_order = list(dict.fromkeys(map(nest_without_order, different)))
    except (ValueError, RecursionError):
        return None
    return without_order[0] if len(without_order) == 1 else None


class CommonNest(NamedTuple):
    """One text for nests that stages of a pipeline have saved."""

    text: str
    is_whole: bool  # they differ in nothing but what stages have of their own
    # By their texts, what names of the state of optimizers begin with that are not in this one, and why.
    apart: Mapping[str, Mapping[str, str]] = {}


def common_nest(texts: Iterable[str]) -> CommonNest | None:
    """Join the nests of shards; where these differ in more than stages of a pipeline do, the first one's is taken.

    Stages that others have saved have tensors of their own, so no order is that of all; and optimizers of their own
    parameters, which are joined if they go by names. Ranks of the same tensors in one order keep it. The same text if
    all are the same; None if one is no nest.
    """
    different = list(dict.fromkeys(texts))
    same = same_nest(different)
    if same is not None or not different:
        return None if same is None else CommonNest(same, is_whole=True)
    try:
        roots, orders = zip(*map(_nest_and_order, different))
        root, is_whole, apart = joined(roots)
    except (ValueError, RecursionError):
        return None
    has_order = orders[0] is not None and all(order == orders[0] for order in orders)
    text = json.dumps({"nest": root, "order": orders[0]} if has_order else root, separators=(",", ":"))
    return CommonNest(text, is_whole, {own: lost for own, lost in zip(different, apart) if lost})


def apart_error(name: str, path: str, kept: str, apart: Mapping[str, str]) -> DisagreementError:
    """Return the error for state of an optimizer that cannot be joined with other stages' optimizers.

    Args:
        name: of the tensor.
        path: its file; kept: the file whose settings are kept.
        apart: what such names begin with, and why, as of `CommonNest`.
    """
    begin = next(begin for begin in apart if name.startswith(begin))
    return DisagreementError(
        "optimizers of stages cannot be joined",
        expected=f"optimizers by names of parameters, as many in each stage, or the state of {kept} alone, whose"
        " settings are kept",
        got=f"{name} of {path}: {apart[begin]}",
        remedy=f"leave the state out (--exclude '{begin.removesuffix('state.')}*'), or save it by names of parameters"
        " (torch.distributed.checkpoint.state_dict.get_state_dict), with the same settings in all stages",
    )


def nest_root(text: str) -> Any:
    """Return the value of a nest's text, without the order. Raises ValueError or RecursionError for another text."""
    return _nest_and_order(text)[0]


def _nest_and_order(text: str) -> tuple[Any, Any]:
    """Return the value of a nest's text, and the order of its tensors; None for one without. Raises as `nest_root`."""
    content = json.loads(text)
    has_order = type(content) is dict and content.keys() == {"nest", "order"}
    return (content["nest"], content["order"]) if has_order else (content, None)


def nest_without_order(text: str) -> str:
    """Return a nest's text without the order of its tensors. Raises ValueError or RecursionError for another text."""
    return json.dumps(nest_root(text), separators=(",", ":"))


def nest_settings(text: str) -> str:
    """Return what nests of all stages have in common: no tensors, no entries of optimizers. Raises as the above."""
    return json.dumps(settings_of(nest_root(text)))


class ShardIdentity(NamedTuple):
    """The place of a self-describing shard in its checkpoint."""

    rank: int
    world_size: int
    strategy: str  # how the whole checkpoint is sharded, as text (see `strategy.table`)


class HeaderDigest(NamedTuple):
    """Equal for two files of a format that differ only in payloads: their length, and a digest of all other bytes."""

    size_bytes: int
    digest: bytes


class Manifest(NamedTuple):
    """One shard file: its tensors in the file's order, its strings, and its identity if it has one.

    Example, of a `.ckpt` file with one tensor whose 64 bytes begin at byte 24:

        table = TensorTable("rank_0/net.ckpt", [TensorEntry("fc.w", FLOAT32, (4, 4), ByteRanges(...))])
        Manifest("rank_0/net.ckpt", "ckpt", table, {"note": "epoch 3"})
    """

    path: str
    format: str  # name of the format, as in `--from`
    tensors: TensorTable  # where the bytes of each tensor lie
    strings: Mapping[str, str] = {}  # texts by name, the nest's under `NEST`
    identity: ShardIdentity | None = None  # rank and strategy, where the file says them
    header_digest: HeaderDigest | None = None  # equal ones have the same tensors at the same places
    left_out: tuple[str, ...] = ()  # in words, contents that cannot be converted
    notes: tuple[str, ...] = ()  # in words, what else is not carried over, since it is about these files alone
    warnings: tuple[str, ...] = ()  # in words, what makes one doubt that a folder's files are of one save
    lacks_others: bool = False  # it says that it was saved without what other ranks hold as well
    part_of: str = ""  # in words, the checkpoint that it says it is only a part of; empty: it says nothing
    to_have_all: str = ""  # what the user can do then, besides giving the folder

    def payload(self, name: str) -> ByteRanges:
        """Return where the bytes of a tensor lie in a file that has been reserved."""
        source = self.tensors[name].source
        assert isinstance(source, ByteRanges)
        return source

    def at(self, path: str) -> Manifest:
        """Return the manifest of the file `path`, which must have the same structure."""
        return self._replace(path=path, tensors=self.tensors.at(path))

    @property
    def is_as_stored(self) -> bool:
        """Whether all tensors are stored row-major and in this machine's byte order."""
        return all(isinstance(source, ByteRanges) and not source.swapped for source in self._otherwise_stored())

    @property
    def decoding_bytes(self) -> int:
        """The most memory that decoding one of the tensors takes."""
        sources = self._otherwise_stored()
        return max((source.decoding_bytes for source in sources if isinstance(source, LibraryRead)), default=0)

    def _otherwise_stored(self) -> Iterator[Location]:
        """Yield the places of tensors, or of their pieces, that are not one run of a file in this byte order."""
        files = self.tensors.files if isinstance(self.tensors, ChunkedTensors) else (self.tensors,)
        return (source for tensors in files for source in tensors.locations.values())


class TensorSpec(NamedTuple):
    """A tensor of a shard to be written: part `box` of a tensor of shape `global_shape`."""

    name: str
    dtype: DType
    global_shape: tuple[int, ...]
    box: Box

    @classmethod
    def of(cls, name: str, kind: TensorType) -> TensorSpec:
        """Return the tensor `name` of a type whose box is known."""
        return cls(name, kind.dtype, kind.whole_shape, kind.own_box)

    @property
    def size_bytes(self) -> int:
        return self.box.size * self.dtype.itemsize_bytes


class Specs(Sequence[TensorSpec]):
    """The tensors of a shard to be written, in file order, in columns.

    Attributes:
        kinds: the different kinds, whose boxes are known.
        kind_ids: for each tensor, the number of its kind.
    """

    __slots__ = ("kind_ids", "kinds", "names")

    def __init__(self, names: Sequence[str], kinds: Sequence[TensorType], kind_ids: Sequence[int]) -> None:
        self.names = names
        self.kinds = kinds
        self.kind_ids = kind_ids

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec]) -> Specs:
        """Return the same tensors in columns."""
        if isinstance(tensors, cls):
            return tensors
        numbers: dict[TensorType, int] = {}
        kinds = (TensorType.of_box(tensor.dtype, tensor.box, tensor.global_shape) for tensor in tensors)
        kind_ids = array("I", (numbers.setdefault(kind, len(numbers)) for kind in kinds))
        return cls([tensor.name for tensor in tensors], list(numbers), kind_ids)

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Specs: ...
    def __getitem__(self, index: int | slice) -> TensorSpec | Specs:
        if isinstance(index, slice):
            return Specs(self.names[index], self.kinds, self.kind_ids[index])
        return TensorSpec.of(self.names[index], self.kinds[self.kind_ids[index]])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def size_bytes(self) -> int:
        """How many bytes all elements take."""
        sizes = [kind.size_bytes for kind in self.kinds]
        return sum(sizes[kind] for kind in self.kind_ids)


class ShardSpec(NamedTuple):
    """A shard to be written, its tensors in file order."""

    identity: ShardIdentity
    tensors: Sequence[TensorSpec]
    strings: Mapping[str, str]
    with_sums: bool = False  # whether it gets room for a sum of each tensor
    # names of tensors that its rank holds as well, and that another file of the same checkpoint has
    written_by_others: Sequence[str] = ()

    @property
    def specs(self) -> Specs:
        """The tensors in columns."""
        return Specs.of(self.tensors)


# MindSpore takes as much memory as the number says.
_MOST = 4 * GIB


class NotChecksummableError(Exception):
    """A whole number outside of 0 to 2^32, which cannot enter MindSpore's checksum as a number of bytes."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def refusal(self, where: str) -> TargetError:
        """Return the message to the user if a file with this tensor is to have a checksum."""
        return TargetError(
            f"{self.name!r} has no place in the checksum that MindSpore checks",
            expected="a whole number from 0 to 2^32, since it counts as so many bytes",
            got=str(self.value),
            where=where,
            remedy="leave out --crc, write it as ckpt (--to), or leave the tensor out (--exclude)",
        )


def is_in_crc(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor enters MindSpore's checksum as a number of bytes; others are summed as they are.

    A whole number v without dimensions counts as v bytes of 0, since that is what Python's `bytes(v)` makes of it; so
    one that is negative, or larger than memory, leaves the file without a checksum.
    """
    return not shape and dtype.name.startswith(("int", "uint"))


def counted_bytes(name: str, content: bytes, dtype: DType) -> int:
    """Return the value of a tensor that is counted. Raises NotChecksummableError if it is none that can be."""
    value: int = numbers(content, dtype)[0]
    if not 0 <= value <= _MOST:
        raise NotChecksummableError(name, value)
    return value

"""Define what pictures show, as plain values (`Figures`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.sharding.box import Box
from reshard_mpi.text import number_ranges


class Feed(NamedTuple):
    """What one target takes from one source shard. size_bytes: read of the shard's files. tensors: that need them."""

    source: int
    target: int
    tensors: int
    size_bytes: int


class Shards(NamedTuple):
    """The shards of one side."""

    total: int  # how many there are
    word: str  # what a number of one counts, "rank" or "file"
    files: Mapping[int, str]  # paths by number, at least of the shards that are in a picture
    # names, short_names: what those are called that have no rank, their files' names, and the parts in which these
    # differ
    names: Mapping[int, str] = {}
    short_names: Mapping[int, str] = {}

    def called(self, numbers: Sequence[int]) -> str:
        """Return some shards by name, such as `rank 3`, `ranks 0, 4` or `model.safetensors`."""
        if self.names:
            return ", ".join(self.names.get(number, f"{self.word} {number}") for number in numbers)
        return f"{self.word}{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"

    def briefly(self, numbers: Sequence[int]) -> str:
        """Return the same in fewer letters: numbers of ranks, or what names of files differ in."""
        if self.names:
            return ", ".join(self.short_names.get(number, str(number)) for number in numbers)
        return number_ranges(numbers)

    def span(self, first: int, last: int) -> str:
        """Return the shards from `first` to `last` in words: `rank 3`, `ranks 4-7`, or names of files."""
        if first == last:
            return self.called([first])
        return f"{self.called([first])} to {self.called([last])}" if self.names else f"{self.word}s {first}-{last}"


class Flow(NamedTuple):
    """Who feeds whom. planned: the targets that feeds are known of, ascending; all of them, or a sample."""

    sources: Shards
    targets: Shards
    planned: tuple[int, ...]
    feeds: tuple[Feed, ...]

    @property
    def is_sample(self) -> bool:
        return len(self.planned) < self.targets.total

    @property
    def size_bytes(self) -> int:
        return sum(feed.size_bytes for feed in self.feeds)


class DrawnBlock(NamedTuple):
    """Neighbouring pieces of a tensor that are drawn as one rectangle."""

    box: Box  # of all of them
    piece: Box  # the box of the first
    pieces: int  # how many they are
    holders: tuple[int, ...]  # the first shards that hold the first piece, ascending; copies: how many hold it
    copies: int
    planned: int | None = None  # of a target, one that holds it and has been planned


class Panel(NamedTuple):
    """A tensor as one side cuts it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shown: tuple[int, ...]  # the dimensions that are drawn, at most two, ascending
    cuts: tuple[int, ...]  # into how many parts each dimension is cut
    blocks: tuple[DrawnBlock, ...]
    pieces: int  # how many there are in all


class DrawnMove(NamedTuple):
    """A region of a target's tensor and its source."""

    target: int
    region: Box  # in the target tensor
    source: int | None  # the source shard; None: it is made up
    panel: int | None  # the number of the source tensor in the picture; None: it is not in it
    source_region: Box  # in that tensor
    file: str
    size_bytes: int
    tensor: str = ""  # the source tensor's name, or ""


class TensorCut(NamedTuple):
    """How both sides cut tensors that are alike; the first of them is drawn."""

    names: tuple[str, ...]  # the first of them
    total: int  # how many they are
    size_bytes: int  # of all of them
    sources: tuple[Panel, ...]  # what the first is made of
    further: int  # how many more tensors it is made of
    target: Panel
    moves: tuple[DrawnMove, ...]  # what targets that have been planned take
    further_moves: int = 0  # how many more there are
    by: str = ""  # what says that it is made so: the place of an equation in a map, or ""


class Figures(NamedTuple):
    """All figures of one plan. source, target: what both sides are, in words. further: how many cuts are left out."""

    source: str
    target: str
    flow: Flow
    cuts: tuple[TensorCut, ...]
    further: int = 0
    further_tensors: int = 0

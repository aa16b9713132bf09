"""The description of a shard file: a format gives it, planning compares it, and the engine reads and writes by it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.formats.columns import Tensors
from reshard_mpi.formats.listed import ListedTensors
from reshard_mpi.formats.places import Decoded, Place, Segments

# The string of a shard that holds what is neither tensor nor text, and how all of it is nested (see `nest`).
NEST = "__reshard_mpi_nest__"


def shown_string(name: str) -> str:
    """Return what people are told that a string of a shard is."""
    return "settings beside the tensors, and how all is nested" if name == NEST else repr(name)


def common_nest(texts: Iterable[str]) -> str | None:
    """Return one text for shards whose nests differ in nothing but the order of their tensors, without an order then.

    Stages of a pipeline that others have saved have tensors of their own, so no order is that of all. The same text if
    all are the same; None if nests differ otherwise.
    """
    different = list(dict.fromkeys(texts))
    if len(different) == 1:
        return different[0]
    values = set()
    for text in different:
        try:
            content = json.loads(text)
            has_order = type(content) is dict and content.keys() == {"nest", "order"}
            values.add(json.dumps(content["nest"] if has_order else content, separators=(",", ":")))
        except (ValueError, RecursionError):
            return None
    return values.pop() if len(values) == 1 else None


class ShardIdentity(NamedTuple):
    """What a self-describing shard says about its place in its checkpoint.

    strategy: how the whole checkpoint is sharded, as text (see `strategy.table`).
    """

    rank: int
    world_size: int
    strategy: str


class Structure(NamedTuple):
    """Equal for two files of a format that differ only in payloads: their length, and a digest of all other bytes."""

    size_bytes: int
    digest: bytes


class Manifest(NamedTuple):
    """One shard file: its tensors in the file's order, its strings, and its identity if it has one.

    structure: if the format has it, another file with an equal one has the same tensors at the same places. left_out:
    in words, what else is in the file and cannot be converted. lacks_others: whether it states
    that it was saved without what other ranks hold as well. part_of: in words, of what checkpoint the file says that it
    is one part, so that it is none by itself; empty if it says nothing. to_have_all: what to do then, if it is not to
    give the folder.
    """

    path: str
    format: str
    tensors: Tensors
    strings: Mapping[str, str] = {}
    identity: ShardIdentity | None = None
    structure: Structure | None = None
    left_out: tuple[str, ...] = ()
    lacks_others: bool = False
    part_of: str = ""
    to_have_all: str = ""

    def at(self, path: str) -> Manifest:
        """Return the manifest of the file `path`, which must have the same structure."""
        return self._replace(path=path, tensors=self.tensors.at(path))

    @property
    def is_as_stored(self) -> bool:
        """Whether all tensors are stored row-major and in this machine's byte order."""
        return all(isinstance(source, Segments) and not source.swapped for source in self._otherwise_stored())

    @property
    def decoding_bytes(self) -> int:
        """The most memory that decoding one of the tensors takes."""
        sources = self._otherwise_stored()
        return max((source.decoding_bytes for source in sources if isinstance(source, Decoded)), default=0)

    def _otherwise_stored(self) -> Iterator[Place]:
        """Yield the places of tensors, or of their pieces, that are not one run of a file in this byte order."""
        files = self.tensors.files if isinstance(self.tensors, ListedTensors) else (self.tensors,)
        return (source for tensors in files for source in tensors.elsewhere.values())

"""Reads runs that follow one another in a source, each straight to its place in a buffer."""

from __future__ import annotations

from collections import OrderedDict

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Copy
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs

# Blocks of a tensor, and tensors of one shape, have the same places for their runs, so the last few are kept.
_KEPT_PLACES = 8


class Scatter:
    """Fills blocks of target tensors from copies whose elements are in the same order in source and target."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._places: OrderedDict[tuple[int, int, Runs], list[memoryview]] = OrderedDict()

    def fill(self, copy: Copy, block: Box, buffer: memoryview) -> None:
        """Read the source of a copy into its target region of `buffer`, which holds the elements of `block`, row-major.

        The copy must be one run in its source. Raises ShardError if the source cannot be read.
        """
        stored = copy.source.stored
        assert stored is not None
        stream, itemsize = Stream(stored), copy.source.dtype.itemsize_bytes
        for runs in copy.strides(block).runs():
            offset = runs.source_offset * itemsize
            length = runs.length * itemsize
            part = stream.one_part(offset, runs.repeats * length)
            places = self._places_of(runs, itemsize, buffer)
            if part is not None:
                self._files.read_scattered(part, places)
                continue
            for place in places:
                done = 0
                for piece in stream.parts(offset, length):
                    self._files.read_into(piece, place[done : done + piece.length_bytes])
                    done += piece.length_bytes
                offset += length

    def _places_of(self, runs: Runs, itemsize: int, buffer: memoryview) -> list[memoryview]:
        """Return the places of the runs in a buffer."""
        key = (id(buffer.obj), itemsize, runs._replace(source_offset=0))
        places = self._places.get(key)
        if places is None:
            starts = range(runs.target_offset, runs.target_offset + runs.repeats * runs.target_step, runs.target_step)
            places = [buffer[start * itemsize : (start + runs.length) * itemsize] for start in starts]
            self._places[key] = places
            while len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)
        return places

"""Reading runs that follow one another in a source straight to where each belongs in a buffer."""

from __future__ import annotations

from collections import OrderedDict

from reshard_mpi.engine.files import Files
from reshard_mpi.engine.stream import Stream
from reshard_mpi.planning.model import Copy
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strides import Runs

# The blocks of a tensor, and tensors of one shape, have their runs at the same places: the last few are kept.
_KEPT_PLACES = 8


class Scatter:
    """Fills blocks from the sources of copies that have their elements in the order of the target."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._places: OrderedDict[tuple[int, int, Runs], list[memoryview]] = OrderedDict()

    def fill(self, copy: Copy, block: Box, buffer: memoryview) -> None:
        """Fill what `buffer`, which holds the elements of `block`, has of the copy, one run in its source."""
        stored = copy.source.stored
        assert stored is not None
        stream, itemsize = Stream(stored), copy.source.dtype.itemsize_bytes
        for runs in copy.strides(block).runs():
            at = runs.source_offset * itemsize
            length = runs.length * itemsize
            part = stream.one_part(at, runs.repeats * length)
            places = self._places_of(runs, itemsize, buffer)
            if part is not None:
                self._files.read_scattered(part, places)
                continue
            for place in places:
                done = 0
                for piece in stream.parts(at, length):
                    self._files.read_into(piece, place[done : done + piece.length_bytes])
                    done += piece.length_bytes
                at += length

    def _places_of(self, runs: Runs, itemsize: int, buffer: memoryview) -> list[memoryview]:
        key = (id(buffer.obj), itemsize, runs._replace(source_offset=0))
        places = self._places.get(key)
        if places is None:
            starts = range(runs.target_offset, runs.target_offset + runs.repeats * runs.target_step, runs.target_step)
            places = [buffer[start * itemsize : (start + runs.length) * itemsize] for start in starts]
            self._places[key] = places
            while len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)
        return places

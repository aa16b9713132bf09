"""Read regions of planned tensors into a caller's arrays, for `api/checkpoint` (`RegionReader`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from reshard_mpi.engine.elements import Array, raw_dtype
from reshard_mpi.engine.gather import gather
from reshard_mpi.engine.open_files import Files, populate, unreadable
from reshard_mpi.errors import DisagreementError
from reshard_mpi.filesystem.source_files import FileVersion, version_of
from reshard_mpi.formats.locations import ByteRange, paths_of
from reshard_mpi.formats.tensor_table import NOT_CONTIGUOUS
from reshard_mpi.planning.rank_plan import Group, Limits, ReadGroup, TensorPlan, meeting
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, MIB

# Elements that are not asked for are read along with others if the ones asked for come closer than this.
_NEAR_BYTES = 4096
# Memory of this size is new more often than not.
_POPULATED_BYTES = 128 * KIB
# The memory for bytes on their way to places that they cannot be read into.
_MOST_ASIDE_BYTES = 4 * MIB
# The same for elements whose axes change places, or that are decoded.
_MOST_DECODED_BYTES = 64 * MIB


class RegionReader:
    """Reads regions of tensors; threads may do so at the same time, and a child that was forked.

    Args:
        limits: memory for one read at a time.
        versions: of all files that were there when the plan was made, by path: others are refused. None: any are read.
    """

    def __init__(self, limits: Limits, versions: Mapping[str, FileVersion] | None) -> None:
        self._limits = limits
        self._versions = versions
        self._idle: deque[Files] = deque()  # appended to and taken from without a lock, which a child might inherit
        self._is_closed = False
        # The last group that was read, and its tensors if each is one run of bytes: the next is mostly of it as well.
        self._last: tuple[Group | None, ReadGroup | None] = None, None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; other threads close theirs as soon as they have read."""
        self._is_closed = True
        while self._idle:
            with self._idle.pop():
                pass

    def read(self, group: Group, place: int, indices: Sequence[range], out: Array) -> int:
        """Read the elements at `indices` of each dimension into `out`; return how many are too large for its type.

        Args:
            group, place: the tensor, by its place in a group.
            indices: counted from the start of the tensor's box, ascending, within it.
            out: of their shape, writable, of the tensor's type or of unsigned integers that are as wide; of any
                strides, but no element may lie where another does.

        Raises ShardError if a source file cannot be read, DisagreementError if one is not the one that was planned.
        """
        if not out.size:
            return 0
        if out.nbytes >= _POPULATED_BYTES and out.flags.c_contiguous:
            populate(out.ctypes.data, out.nbytes)
        try:
            files = self._idle.pop()
        except IndexError:
            files = Files(is_sparing=True)
        try:
            run = self._run(group, place, indices, out)
            if run is not None:
                files.read_into(run, out.reshape(-1).view(np.uint8).data)
                self._require_unchanged(files, (run.path,))
                return 0
            paths: set[str] = set()
            too_large = files.traffic.too_large
            self._read(files, group.tensor(place), indices, out.view(raw_dtype(group.kind.dtype)), paths)
            self._require_unchanged(files, paths)
            return files.traffic.too_large - too_large
        finally:
            self._idle.append(files)
            if self._is_closed:
                self.close()

    def _run(self, group: Group, place: int, indices: Sequence[range], out: Array) -> ByteRange | None:
        """Return the bytes to read if elements are one run in one file, and in `out`; None if they are not."""
        last, route = self._last
        if last is not group:
            route = _one_run_each(group)
            self._last = group, route
        if route is None or not out.flags.c_contiguous:
            return None
        start = route.tensors.offsets[route.numbers[place]]
        if start == NOT_CONTIGUOUS:
            return None
        offset, step, is_part = 0, 1, False
        for chosen, length in zip(reversed(indices), reversed(group.kind.shape)):
            count = len(chosen)
            if count > 1 and (is_part or chosen.step != 1):
                return None
            offset += chosen[0] * step
            step *= length
            is_part = is_part or count != length
        return ByteRange(route.tensors.path, start + offset * out.itemsize, out.nbytes)

    def _read(self, files: Files, tensor: TensorPlan, indices: Sequence[range], out: Array, paths: set[str]) -> None:
        stepped = next((dim for dim, chosen in enumerate(indices) if chosen.step > 1 and len(chosen) > 1), None)
        if stepped is None:
            self._read_box(files, tensor, indices, out, paths)
            return
        chosen, before, behind = indices[stepped], (slice(None),) * stepped, indices[stepped + 1 :]
        apart_bytes = math.prod(tensor.spec.box.shape[stepped + 1 :]) * out.itemsize * (chosen.step - 1)
        wide_bytes = math.prod(len(_dense(each)) for each in (*indices[:stepped], *behind)) * out.itemsize
        if any(item.order is not None or item.source.stored is None for item in tensor.reads):
            # An index by itself would be many short runs of the source, or chunks that are decoded for each anew.
            together = max(1, _MOST_DECODED_BYTES // (wide_bytes * chosen.step))
        else:
            together = 1 if apart_bytes >= _NEAR_BYTES else max(1, _MOST_ASIDE_BYTES // (wide_bytes * chosen.step))
        for first in range(0, len(chosen), together):
            portion = chosen[first : first + together]
            inner = [*indices[:stepped], _dense(portion), *behind]
            place = out[(*before, slice(first, first + together))]
            if len(portion) == 1:
                self._read(files, tensor, inner, place, paths)
                continue
            aside = np.empty([len(each) for each in inner], out.dtype)
            self._read(files, tensor, inner, aside, paths)
            place[...] = aside[(*before, slice(None, None, chosen.step))]

    def _read_box(
        self, files: Files, tensor: TensorPlan, indices: Sequence[range], out: Array, paths: set[str]
    ) -> None:
        """Read consecutive indices: straight into `out`, if its elements lie as a part of a row-major array does."""
        first = tensor.spec.box.start
        box = Box(
            tuple(low + chosen[0] for low, chosen in zip(first, indices)),
            tuple(low + chosen[-1] + 1 for low, chosen in zip(first, indices)),
        )
        reads = meeting(tensor.reads, box)
        paths.update(path for item in reads for path in paths_of(item.source.source))
        whole = _enclosing(out)
        if whole is not None:
            outer = Box.at(box.start, whole.shape)
            for item in reads:
                gather(files, item, whole, outer, self._limits)
            return
        for block in box.blocks(max(1, _MOST_ASIDE_BYTES // out.itemsize)):
            aside = np.empty(block.shape, out.dtype)
            for item in meeting(reads, block):
                gather(files, item, aside, block, self._limits)
            local = block.relative_to(box)
            out[tuple(map(slice, local.start, local.stop))] = aside

    def _require_unchanged(self, files: Files, paths: Iterable[str]) -> None:
        if self._versions is None:
            return
        for path in paths:
            was = self._versions.get(path)
            if was is not None and files.is_open_as(path, was):
                continue  # a file that takes its place takes its name from it
            now = _version_of(path)
            if was is None or now.is_later_than(was):
                raise DisagreementError(
                    "a source file was written or replaced after the checkpoint was opened",
                    expected="no file" if was is None else f"the file of {was.size_bytes} bytes that was opened",
                    got=f"one of {now.size_bytes} bytes, changed since",
                    where=path,
                    remedy="make sure that nothing writes to the source, and open it again",
                )


def _one_run_each(group: Group) -> ReadGroup | None:
    """Return the source tensors of a group if each lies in a file as it is in the target; None if they do not."""
    if len(group.routes) != 1:
        return None
    (route,), whole = group.routes, group.kind.box
    return route if route.to is None and route.region == whole and route.source_box == whole else None


def _version_of(path: str) -> FileVersion:
    try:
        return version_of(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _dense(chosen: range) -> range:
    """Return all indices from the first to the last."""
    return range(chosen[0], chosen[-1] + 1)


def _enclosing(out: Array) -> Array | None:
    """Return a row-major array that begins with `out` in each dimension; None if `out` is no such part.

    The array may reach beyond the memory of `out`: only the part may be written to.
    """
    if out.flags.c_contiguous:
        return out
    dims = [dim for dim, length in enumerate(out.shape) if length > 1]
    strides = [out.strides[dim] for dim in dims]
    if not dims or strides[-1] != out.itemsize:
        return None
    lengths = [1] * out.ndim
    lengths[dims[0]] = out.shape[dims[0]]
    for dim, outer, inner in zip(dims[1:], strides, strides[1:]):
        if outer % inner or outer // inner < out.shape[dim]:
            return None
        lengths[dim] = outer // inner
    steps = [math.prod(lengths[dim + 1 :]) * out.itemsize for dim in range(out.ndim)]
    return np.lib.stride_tricks.as_strided(out, lengths, steps)

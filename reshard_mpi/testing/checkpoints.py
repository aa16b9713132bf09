"""Test a checkpoint form: its tensors are read whole and in part (`CheckpointConformance`).

The author of a form of checkpoint subclasses `CheckpointConformance`, with a function that writes random tensors in
that form. The shards planned from it are compared with those that numpy cuts out of the tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_mpi import formats
from reshard_mpi.checkpoints import discovery, shard_files
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.engine.regions import RegionReader
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import to_numpy
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.planning.rank_plan import Limits, RankPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

ArraysByName = Mapping[str, "np.ndarray[Any, Any]"]
_DTYPES = ("float32", "int16", "float64", "uint8", "complex64")
# Into how many parts targets cut tensors along one dimension.
_CUTS = (1, 2, 3, 4)

_inherited = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Draw tensors with dimensions that targets can cut evenly; some have no dimension, or no elements."""
    arrays = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.sampled_from([12, 24, 1, 0, 5]), max_size=3)))
        count = int(np.prod(shape, dtype=int))
        dtype = draw(st.sampled_from(_DTYPES))
        whole = (np.arange(count) + 1000 * number).astype(dtype).reshape(shape)
        for name in (f"layer.{number}.w", *([f"layer.{number}.again"] if draw(st.booleans()) else [])):
            arrays[name] = np.asarray(whole + np.array(len(name), dtype))
    return arrays


def load_shard(plan: RankPlan, *, limits: Limits) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor of a plan by name, as a C-contiguous array. Raises ShardError if a file cannot be read."""
    reader, loaded = RegionReader(limits, None), {}
    for group in plan.tensors.groups:
        for place, name in enumerate(group.names):
            array = loaded[name] = np.empty(group.kind.shape, to_numpy(group.kind.dtype))
            reader.read(group, place, [range(length) for length in array.shape], array)
    reader.close()
    return loaded


class FormatUnderTest:
    """A format whose tests run, registered meanwhile unless an entry point has registered it."""

    info: FormatInfo

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _registered(cls) -> Iterator[None]:
        is_known = cls.info.name in formats.names()
        if not is_known:
            formats.register(cls.info)
        yield
        if not is_known:
            formats.unregister(cls.info.name)


class CheckpointConformance(FormatUnderTest):
    """The tests of a form of checkpoint. Subclasses define `info` and `write`, and `found` if its files are not simply
    found.
    """

    def write(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> Strategy | None:
        """Write the tensors, cut in a way that is drawn from `data`; return the strategy, if the form needs one."""
        raise NotImplementedError

    def found(self, folder: Path) -> shard_files.ShardFiles:
        """Return the files of the checkpoint in a folder."""
        return discovery.find_shards(str(folder))

    @_inherited
    @given(arrays=tensors(), data=st.data())
    def test_what_targets_hold_is_what_numpy_cuts(self, arrays: ArraysByName, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            planner = self._opened(Path(folder), arrays, data)
            for rank in range(planner.target.world_size):
                loaded = load_shard(planner.plan(rank), limits=planner.limits)
                assert loaded.keys() == arrays.keys()
                for name, array in loaded.items():
                    expected = _cut(arrays[name], _box(planner.target, name, arrays[name].shape, rank))
                    assert array.dtype == expected.dtype and array.shape == expected.shape
                    assert array.tobytes() == expected.tobytes(), name

    @_inherited
    @given(arrays=tensors(), data=st.data())
    def test_slices_are_those_of_numpy(self, arrays: ArraysByName, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            planner = self._opened(Path(folder), arrays, data)
            rank = data.draw(st.integers(0, planner.target.world_size - 1))
            reader = RegionReader(planner.limits, None)
            for group in planner.plan(rank).tensors.groups:
                for place, name in enumerate(group.names):
                    whole = _cut(arrays[name], _box(planner.target, name, arrays[name].shape, rank))
                    indices = [_indices(length, data) for length in whole.shape]
                    expected = whole[np.ix_(*indices)] if indices else whole
                    out = np.empty(expected.shape[::-1], whole.dtype).T
                    if data.draw(st.booleans()):
                        out = np.empty_like(out, order="C")
                    reader.read(group, place, indices, out)
                    assert out.tobytes() == expected.tobytes(), (name, indices)
            reader.close()

    @_inherited
    @given(arrays=tensors(), data=st.data())
    def test_a_lost_file_is_replaced_or_refused(self, arrays: ArraysByName, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            planner = self._opened(Path(folder), arrays, data)
            files = [path for paths in planner.source.files.by_rank.values() for path in paths]
            lost = Path(data.draw(st.sampled_from(files)))
            if data.draw(st.booleans()):
                lost.unlink()
            else:
                lost.write_bytes(lost.read_bytes()[: data.draw(st.integers(0, lost.stat().st_size - 1))])
            try:
                left = self.found(Path(planner.source.files.path))
                strategy = None if left.is_folder else planner.source.strategy
                again = Planner(open_source(left, strategy), planner.target)
                for rank in range(again.target.world_size):
                    for name, array in load_shard(again.plan(rank), limits=again.limits).items():
                        expected = _cut(arrays[name], _box(again.target, name, arrays[name].shape, rank))
                        assert array.tobytes() == expected.tobytes(), name
            except ReshardError:
                return

    @_inherited
    @given(arrays=tensors(), data=st.data())
    def test_the_structure_is_read_again_where_it_was_let_go_of(
        self, arrays: ArraysByName, data: st.DataObject
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            planner = self._opened(Path(folder), arrays, data)
            before = planner.plan(0)
            planner.forget()
            after = planner.plan(0)
            assert after.tensors == before.tensors and after.read_ranks == before.read_ranks

    def _opened(self, folder: Path, arrays: ArraysByName, data: st.DataObject) -> Planner:
        strategy = self.write(folder, arrays, data)
        source = open_source(self.found(folder), strategy)
        return Planner(source, _target(arrays, data), Policy(replicas=Replicas.CHECK))


def _indices(length: int, data: st.DataObject) -> range:
    """Draw indices of a dimension, ascending."""
    first = data.draw(st.integers(0, max(0, length - 1)))
    return range(first, data.draw(st.integers(first, length)), data.draw(st.sampled_from([1, 1, 2, 5])))


def _target(arrays: ArraysByName, data: st.DataObject) -> Strategy:
    """Draw a target strategy that cuts each tensor along one dimension of suitable length, or not at all."""
    ranks = data.draw(st.sampled_from(_CUTS))
    parameters = {}
    for name, array in arrays.items():
        suitable = [dim for dim, length in enumerate(array.shape) if length % ranks == 0]
        cut = data.draw(st.sampled_from([None, *suitable]))
        split = tuple((0,) if dim == cut else () for dim in range(array.ndim)) if cut is not None else ()
        parameters[name] = (Placement((ranks,), split),)
    return Strategy(ranks, 1, parameters)


def _box(target: Strategy, name: str, shape: tuple[int, ...], rank: int) -> Box:
    return Layout(target.find(name)[0], shape).box(rank)


def _cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    index: tuple[Any, ...] = (..., *(slice(low, high) for low, high in zip(box.start, box.stop)))
    return np.array(array[index], order="C")

"""Random strategies with randomly spoiled shards: targets are right, or refused by name; nothing in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cases import REPLICATED_NAMES, Case, Side, cases, same
from support.checkpoints import Arrays, expected_rank
from support.in_memory import Described, part, strategy_of
from support.oracle import rank_holds, slice_for_rank

from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.elements import raw_dtype
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.planning.rank_choice import Replicas
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.transform import plan_alone
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.checkpoints import load_shard

pytestmark = pytest.mark.slow

# What changes the structure of a shard, so that what others say of the tensor contradicts it.
STRUCTURE = ("shape", "longer", "type", "rank", "dropped", "renamed", "added", "string")
# What changes values only: another copy contradicts them, if copies are compared.
VALUES = ("swapped", "another step")


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A checkpoint some of whose shards are not what they should be.

    ranks: of these shards. names: the tensors that are changed in them.
    """

    case: Case
    shards: dict[int, Arrays]
    texts: dict[int, dict[str, str]]
    ranks: frozenset[int]
    names: frozenset[str]

    def source(self) -> SourceCheckpoint:
        manifests = {rank: in_memory(rank, arrays, self.texts.get(rank, {})) for rank, arrays in self.shards.items()}
        files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in manifests})
        return Described(files, strategy_of(self.case.src), manifests=manifests)


def in_memory(rank: int, arrays: Arrays, texts: Mapping[str, str]) -> Manifest:
    """Return a shard whose tensors are read from arrays."""
    return Manifest(
        f"rank_{rank}", "none", TensorTable("", (in_array(name, array) for name, array in arrays.items())), texts
    )


def in_array(name: str, array: np.ndarray) -> TensorEntry:
    dtype = BY_NAME[array.dtype.name]

    def read(box: Box) -> np.ndarray:
        return np.ascontiguousarray(part(array, box)).reshape(box.shape).view(raw_dtype(dtype))

    return TensorEntry(name, dtype, array.shape, LibraryRead("nowhere", read, array.shape, 0, 0))


@st.composite
def spoiled_checkpoints(draw: st.DrawFn, kinds: Collection[str]) -> Spoiled:
    """Draw a checkpoint with one or two spoiled shards."""
    case = draw(cases(max_ranks=8))
    shards = {rank: expected_rank(case.src, case.tensors, rank) for rank in range(case.src.world_size)}
    texts: dict[int, dict[str, str]] = {}
    ranks, names = set(), set()
    for rank in draw(st.lists(st.sampled_from(sorted(shards)), min_size=1, max_size=2, unique=True)):
        kind = draw(st.sampled_from(sorted(kinds)))
        ranks.add(rank)
        if kind == "swapped":
            other = draw(st.sampled_from(sorted(shards)))
            ranks.add(other)
            names.update(shards[rank], shards[other])
            shards[rank], shards[other] = shards[other], shards[rank]
        elif kind == "another step":
            names.update(shards[rank])
            shards[rank] = {name: array_of_another_step(array) for name, array in shards[rank].items()}
            if draw(st.booleans()):
                for holder, arrays in shards.items():
                    arrays.setdefault("step_num", np.array(1 + (holder == rank), np.int64))
        elif shards[rank]:
            name = draw(st.sampled_from(sorted(shards[rank])))
            names.add(name)
            other_name = draw(st.sampled_from(["extra", f"moments.{name}", *case.tensors]))
            names.add(other_name)
            shards[rank] = with_another_structure(kind, shards[rank], name, other_name)
            if kind == "string":
                texts.setdefault(rank, {})[name] = "a text"
    # State that no strategy lists is placed as its parameter is, so it goes with it.
    unlisted = case.src.unlisted | case.dst.unlisted
    names.update(name for name in unlisted for spoiled in tuple(names) if name.endswith(f".{spoiled}"))
    return Spoiled(case, shards, texts, frozenset(ranks), frozenset(names))


def array_of_another_step(array: np.ndarray) -> np.ndarray:
    raw = np.frombuffer(array.tobytes(), np.uint8)
    changed = raw ^ 1 if array.dtype == np.bool_ else raw + 1
    return changed.view(array.dtype).reshape(array.shape)


def with_another_structure(kind: str, arrays: Arrays, name: str, other_name: str) -> Arrays:
    """Return a shard with one tensor changed, or under another name, or without it."""
    array = arrays[name]
    without = {other: array for other, array in arrays.items() if other != name}
    if kind in ("dropped", "string"):
        return without
    if kind == "renamed":
        return {**without, "extra" if other_name in arrays else other_name: array}
    if kind == "added":
        return {**arrays, other_name: arrays.get(other_name, array)}
    if kind == "type":
        kinds = [np.dtype(np.float64), np.dtype(np.int32), np.dtype(ml_dtypes.bfloat16)]
        other = next(kind for kind in kinds if kind != array.dtype)
        return {**arrays, name: np.ones(array.shape, other)}
    if kind == "rank" or not array.ndim:
        return {**arrays, name: array[np.newaxis]}
    shape = list(array.shape)
    shape[-1 if kind == "shape" else 0] += 1 if kind == "longer" or not shape[-1] else -1
    return {**arrays, name: np.resize(array, shape)}


def outcome(spoiled: Spoiled, replicas: Replicas) -> tuple[list[RankPlan], list[Arrays]] | None:
    """Return the plans and contents of all targets, or None if they are refused. Any other error is a fault."""
    planner = Planner(spoiled.source(), strategy_of(spoiled.case.dst), Policy(replicas=replicas))
    try:
        plans, _ = plan_alone(planner, range(spoiled.case.dst.world_size))
    except ReshardError as error:
        assert error.exit_code == 3
        assert error.problem and error.got and error.remedy, error
        return None
    return plans, [load_shard(plan, limits=planner.limits) for plan in plans]


def wrong_tensors(spoiled: Spoiled, made: list[Arrays]) -> set[str]:
    """Return the tensors that a target holds otherwise than the oracle says, or lacks."""
    case = spoiled.case
    expected = [expected_rank(case.dst, case.tensors, rank) for rank in range(case.dst.world_size)]
    return {
        name
        for target, arrays in zip(expected, made)
        for name, array in target.items()
        if name not in arrays or not same(arrays[name], array)
    }


def is_told_absent(spoiled: Spoiled, name: str, plans: list[RankPlan], made: list[Arrays]) -> bool:
    """Tell whether no target has a tensor, and each says so; check that no shard that should hold it does."""
    if any(name in arrays for arrays in made):
        return False
    targets = [plan for plan in plans if rank_holds(spoiled.case.dst.layouts[name], plan.target_rank)]
    # State that no strategy lists goes with its parameter.
    if not all(any(name in (lacked, f"{name.partition('.')[0]}.{lacked}") for lacked in p.absent) for p in targets):
        return False
    layout = spoiled.case.src.layouts[name]
    assert not any(name in arrays and rank_holds(layout, rank) for rank, arrays in spoiled.shards.items())
    return True


def is_own(name: str) -> bool:
    """Tell whether no strategy places a tensor: each rank may have its own."""
    return name in REPLICATED_NAMES


def check_structure(spoiled: Spoiled, replicas: Replicas) -> None:
    """Check that nothing that was opened for a tensor contradicts it where it is not right."""
    result = outcome(spoiled, replicas)
    if result is None:
        return
    plans, made = result
    layouts = spoiled.case.src.layouts, spoiled.case.dst.layouts
    for name in wrong_tensors(spoiled, made):
        assert name in spoiled.names, f"{name} is wrong, but no shard with it is spoiled"
        if is_own(name):
            continue
        source, target = (side[name] for side in layouts)
        opened = {rank for plan in plans if rank_holds(target, plan.target_rank) for rank in plan.source_ranks}
        sound = [rank for rank in opened - spoiled.ranks if rank_holds(source, rank)]
        if is_told_absent(spoiled, name, plans, made):
            continue
        assert not sound, f"{name} is wrong though the shards of {sound} were opened"


def check_values(spoiled: Spoiled) -> None:
    """Check that all wrong elements are such as only the spoiled shards hold: nothing could contradict them."""
    result = outcome(spoiled, Replicas.CHECK)
    if result is None:
        return
    plans, made = result
    wrong = {name for name in wrong_tensors(spoiled, made) if not is_own(name)}
    for name in wrong:
        assert name in spoiled.names
        if is_told_absent(spoiled, name, plans, made):
            continue
        alone = only_these_hold(spoiled.case.src, name, spoiled.case.tensors[name], spoiled.ranks)
        for rank, arrays in enumerate(made):
            layout = spoiled.case.dst.layouts[name]
            if rank_holds(layout, rank):
                whole = spoiled.case.tensors[name]
                expected, got = slice_for_rank(whole, layout, rank), arrays[name]
                assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
                differs = raw(expected) != raw(got)
                assert not (differs & ~slice_for_rank(alone, layout, rank)).any(), f"{name} of target {rank}"


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")


def only_these_hold(side: Side, name: str, whole: np.ndarray, ranks: Collection[int]) -> np.ndarray:
    """Return for each element of a tensor whether all ranks that hold it are among `ranks`."""
    alone = np.ones(whole.size, bool)
    numbers = np.arange(whole.size).reshape(whole.shape)
    for rank in set(range(side.world_size)) - set(ranks):
        if rank_holds(side.layouts[name], rank):
            alone[slice_for_rank(numbers, side.layouts[name], rank).ravel()] = False
    return alone.reshape(whole.shape)


@given(spoiled_checkpoints(STRUCTURE), st.sampled_from(list(Replicas)))
def test_another_structure(spoiled: Spoiled, replicas: Replicas) -> None:
    check_structure(spoiled, replicas)


@given(spoiled_checkpoints(VALUES))
def test_other_values(spoiled: Spoiled) -> None:
    assume(spoiled.names)
    check_values(spoiled)

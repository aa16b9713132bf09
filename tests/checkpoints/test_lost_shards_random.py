"""Random strategies with random missing and damaged shards: right, or refused exactly when no sound holder is left."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import Case, cases
from support.checkpoints import ENDINGS, as_read, expected_rank, read_shard, write_shards, write_strategy
from support.examples import many
from support.in_memory import Described, check_every_element, entry, manifest, manifests_of, needed_holders, strategy_of

import reshard_mpi
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.errors import CoverageError, ReshardError
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.planning.rank_plan import RankPlan
from reshard_mpi.planning.source_flaws import UnusableShard
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

pytestmark = pytest.mark.slow

# What of each shard becomes: mostly nothing, since a piece has few holders.
FATES = st.sampled_from(["sound", "sound", "missing", "damaged"])


def described(case: Case, sound: Collection[int], present: Collection[int]) -> Described:
    every = manifests_of(case.src, case.tensors)
    files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in sorted(present)})
    return Described(files, strategy_of(case.src), manifests={rank: every[rank] for rank in sound})


def is_left(case: Case, target: int, sound: Collection[int]) -> bool:
    """Tell, by brute force, whether every element that a target needs is on a sound rank."""
    layouts = {name: (case.src.layouts[name], case.dst.layouts[name]) for name in case.tensors}
    shapes = {name: whole.shape for name, whole in case.tensors.items()}
    return not any(ranks.isdisjoint(sound) for ranks in needed_holders(layouts, shapes, case.src.world_size, target))


def planned(planner: Planner, rank: int) -> RankPlan | str:
    """Return the plan of a target, or what it is refused for."""
    try:
        return planner.plan(rank, checked=False)
    except CoverageError as error:
        return str(error)


@many(18)
@given(cases(empty=False), st.data())
def test_every_target_is_planned_if_and_only_if_all_it_needs_is_left(case: Case, data: st.DataObject) -> None:
    fates = data.draw(st.lists(FATES, min_size=case.src.world_size, max_size=case.src.world_size))
    present = {rank for rank, fate in enumerate(fates) if fate != "missing"}
    sound = {rank for rank, fate in enumerate(fates) if fate == "sound"}
    if not sound:
        return
    target = strategy_of(case.dst)
    planner = Planner(described(case, sound, present), target)
    some = sorted(data.draw(st.sets(st.sampled_from(range(target.world_size)), min_size=1, max_size=4)))
    plans = {}
    for rank in some:
        plan = plans[rank] = planned(planner, rank)
        if not is_left(case, rank, sound):
            assert isinstance(plan, str)
            continue
        assert not isinstance(plan, str), plan
        check_every_element(case, plan)
        assert sound.issuperset(plan.source_ranks)
        for lost in plan.lost:
            assert lost.rank not in sound and bool(lost.problem) == (lost.rank in present)
            assert set(lost.taken_from) <= set(plan.read_ranks)
    # Whatever has been met before, for whichever other targets, each target is taken from the same shards.
    again = Planner(described(case, sound, present), target)
    for rank in reversed(some):
        assert planned(again, rank) == plans[rank]
    assert planned(Planner(described(case, sound, present), target), some[-1]) == plans[some[-1]]


def test_nothing_is_opened_only_to_see_whether_it_can_be_read() -> None:
    """Either stage has the tied parameter, only one has the other, and is enough: rank 0 is not looked into."""
    tied = Placement((2,), ((0,),), stages=(0, 1))
    strategy = Strategy(4, 2, {"tied": (tied,), "other": (Placement((2,), stages=(1,)),)})
    both = (entry("tied", (2,)), entry("other", (3,)))
    manifests = {rank: manifest(rank, *both[: 1 + rank // 2]) for rank in range(4)}
    files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in manifests})
    target = Strategy(2, 1, {"tied": (Placement((2,), ((0,),)),), "other": (Placement((2,)),)})
    source = Described(files, strategy, manifests=manifests)
    assert Planner(source, target).plan(0, checked=False).read_ranks == (2,)
    assert list(source._manifests) == [2]
    del manifests[2]
    assert Planner(Described(files, strategy, manifests=manifests), target).plan(0, checked=False).read_ranks == (0, 3)


def test_what_is_damaged_is_met_by_each_target_that_looks_for_what_was_never_saved() -> None:
    columns = Placement((2, 2), ((), (1,)))
    strategy = Strategy(4, 1, {"w": (columns,), "accu.w": (columns,)})
    manifests = {rank: manifest(rank, entry("w", (8, 2))) for rank in (0, 1, 3)}
    files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in range(4)})
    whole = Placement((8,))
    target = Strategy(8, 1, {"w": (whole,), "accu.w": (whole,)})
    planner = Planner(Described(files, strategy, manifests=manifests), target)
    plans = [planner.plan(rank, checked=False) for rank in range(2)]
    assert [[lost.rank for lost in plan.lost] for plan in plans] == [[2], [2]]
    assert {plan.absent for plan in plans} == {("accu.w",)}


def test_what_the_file_system_says_of_a_shard_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = {rank: manifest(rank, entry("w", (3,))) for rank in range(2)}
    located = Described._located

    def refusing(self: Described, rank: int) -> Manifest:
        if rank == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return located(self, rank)

    monkeypatch.setattr(Described, "_located", refusing)
    files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in manifests})
    same = Strategy(2, 1, {"w": (Placement((2,)),)})
    plan = Planner(Described(files, same, manifests=manifests), same).plan(0, checked=False)
    assert plan.lost == (UnusableShard(0, "rank_0", f"the file system refused, got {os.strerror(errno.ESTALE)}", (1,)),)


def spoil(path: Path, fate: str) -> None:
    if fate == "missing":
        path.unlink()
    elif fate == "empty":
        path.write_bytes(b"")
    elif fate == "cut":
        path.write_bytes(path.read_bytes()[:-1])  # never where a value ends
    elif fate == "noise":
        path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


@pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
@settings(max_examples=12)
@given(case=cases(empty=False, max_ranks=8), data=st.data())
def test_files_are_right_or_refused(kind: str, case: Case, data: st.DataObject) -> None:
    """With real files: all targets are written, or, if one of them cannot be, none."""
    fate = st.sampled_from(["sound", "sound", "sound", "missing", "empty", "cut", "noise"])
    fates = data.draw(st.lists(fate, min_size=case.src.world_size, max_size=case.src.world_size))
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        src = write_strategy(case.src, base / "src_strategy")
        dst = write_strategy(case.dst, base / "dst_strategy")
        write_shards(case.src, case.tensors, base / "src", kind)
        for rank, spoiled in enumerate(fates):
            spoil(base / "src" / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[kind]}", spoiled)
        sound = {rank for rank, spoiled in enumerate(fates) if spoiled == "sound"}
        if sound and all(is_left(case, rank, sound) for rank in range(case.dst.world_size)):
            reshard_mpi.transform_checkpoints(base / "src", base / "dst", "c_", src, dst, 1, kind)
            for rank in range(case.dst.world_size):
                written = read_shard(base / "dst" / f"rank_{rank}" / f"c_{rank}.{ENDINGS[kind]}")
                assert written == as_read(expected_rank(case.dst, case.tensors, rank))
        else:
            with pytest.raises(ReshardError) as refused:
                reshard_mpi.transform_checkpoints(base / "src", base / "dst", "c_", src, dst, 1, kind)
            assert refused.value.exit_code == 3
            assert not (base / "dst").exists()

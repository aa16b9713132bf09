"""Random strategies with random missing and damaged shards: right, or refused exactly when no sound holder is left."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cases import Case, cases
from checkpoints import ENDINGS, as_read, expected_rank, read_shard, write_shards, write_strategy
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import manifests_of, needed_holders, strategy_of
from test_planning import check_every_element

import reshard_mpi
from reshard_mpi.conversion import Conversion
from reshard_mpi.discovery import ShardFiles
from reshard_mpi.errors import CoverageError, ReshardError, ShardError
from reshard_mpi.manifest import Manifest
from reshard_mpi.planning.model import RankPlan
from reshard_mpi.source import SourceCheckpoint

# What of each shard becomes: mostly nothing, since a piece has few holders.
FATES = st.sampled_from(["sound", "sound", "missing", "damaged"])


@dataclass(slots=True)
class Described(SourceCheckpoint):
    """A checkpoint of shards that are in no file, some of them damaged."""

    held: dict[int, Manifest] = field(default_factory=dict)

    def _located(self, rank: int) -> Manifest:
        if rank not in self.held:
            raise ShardError("a shard is damaged", got="nothing", where=f"rank_{rank}", remedy="restore it")
        return self.held[rank]


def described(case: Case, sound: Collection[int], there: Collection[int]) -> Described:
    every = manifests_of(case.src, case.tensors)
    files = ShardFiles("nowhere", "ckpt", {rank: (f"rank_{rank}",) for rank in sorted(there)})
    return Described(files, strategy_of(case.src), held={rank: every[rank] for rank in sound})


def is_left(case: Case, target: int, sound: Collection[int]) -> bool:
    """Tell, by brute force, whether every element that a target needs is on a sound rank."""
    layouts = {name: (case.src.layouts[name], case.dst.layouts[name]) for name in case.tensors}
    shapes = {name: whole.shape for name, whole in case.tensors.items()}
    return not any(ranks.isdisjoint(sound) for ranks in needed_holders(layouts, shapes, case.src.world_size, target))


def planned(conversion: Conversion, rank: int) -> RankPlan | str:
    """Return the plan of a target, or what it is refused for."""
    try:
        return conversion.plan(rank, checked=False)
    except CoverageError as error:
        return str(error)


@settings(max_examples=60)
@given(cases(empty=False), st.data())
def test_every_target_is_planned_if_and_only_if_all_it_needs_is_left(case: Case, data: st.DataObject) -> None:
    fates = data.draw(st.lists(FATES, min_size=case.src.world_size, max_size=case.src.world_size))
    there = {rank for rank, fate in enumerate(fates) if fate != "missing"}
    sound = {rank for rank, fate in enumerate(fates) if fate == "sound"}
    if not sound:
        return
    target = strategy_of(case.dst)
    conversion = Conversion(described(case, sound, there), target)
    found = {}
    for rank in range(target.world_size):
        plan = found[rank] = planned(conversion, rank)
        if not is_left(case, rank, sound):
            assert isinstance(plan, str)
            continue
        assert not isinstance(plan, str), plan
        check_every_element(case, plan)
        assert sound.issuperset(plan.source_ranks)
        for lost in plan.lost:
            assert lost.rank not in sound and bool(lost.problem) == (lost.rank in there)
            assert set(lost.taken_from) <= set(plan.read_ranks)
    # Whatever has been met before, for whichever other targets, each target is taken from the same shards.
    again = Conversion(described(case, sound, there), target)
    for rank in reversed(range(target.world_size)):
        assert planned(again, rank) == found[rank]
    alone = data.draw(st.sampled_from(range(target.world_size)))
    assert planned(Conversion(described(case, sound, there), target), alone) == found[alone]


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
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=fast) as name:
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

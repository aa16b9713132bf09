"""`--replicas check`: all ranks that hold the same are compared, each copy once a run, before anything is written."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import read_shard
from support.conversions import Conversion, listing, make, shards, side, transform_apart
from support.examples import few
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout
from support.processes import run_command

import reshard_mpi
from reshard_mpi.checkpoints import compare_replicas
from reshard_mpi.engine import first_difference
from reshard_mpi.errors import DisagreementError, UsageError
from reshard_mpi.planning.rank_plan import ReadItem
from reshard_mpi.sharding.box import Box

CHECK = ("--replicas", "check")


def differing(c: Conversion, rank: int = 3) -> None:
    """Have one element of the second half of `w` be another on a rank."""
    w = c.arrays(rank)["w"].copy()
    w[5, 1] += 1
    c.rewrite(rank, {"w": w})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int, Box]]:
    """Counts what is read to be compared: tensor, rank, and region."""
    regions_read: Counter[tuple[str, int, Box]] = Counter()
    read_region = first_difference.read_region

    def counting(files: object, item: ReadItem, region: Box, *rest: object) -> None:
        regions_read[item.source.name, item.source_rank, region] += 1
        read_region(files, item, region, *rest)

    monkeypatch.setattr(first_difference, "read_region", counting)
    return regions_read


@pytest.mark.parametrize("way", few(1, ["plan", "alone", "jobs"]))
def test_a_difference_is_refused_by_name(c: Conversion, tmp_path: Path, way: str) -> None:
    differing(c)
    before = listing(tmp_path)
    options = {"plan": ["plan"], "alone": ["transform"], "jobs": ["transform", "--jobs", "3"]}[way]
    finished = c.run(*options, *CHECK)
    assert finished.code == 3 and finished.out == "", finished
    assert "copies of 'w' differ\n  expected: the same bytes on ranks 1 and 3\n" in finished.err
    assert "got: a difference at element [5, 3]: these ranks should hold the same\n" in finished.err
    assert f"where: {c.shard(1)} and {c.shard(3)}\n  what to do: " in finished.err
    assert listing(tmp_path) == before
    c.done("transform", "--replicas", "any")


def test_copies_that_agree(c: Conversion, tmp_path: Path) -> None:
    c.done()
    checked = c.but(dst=tmp_path / "checked")
    checked.done("transform", *CHECK)
    assert shards(checked.dst) == shards(c.dst)
    # It is no other run, since the same bytes are written.
    assert "2 were complete already" in c.done("transform", "--resume", *CHECK).out


@pytest.mark.slow
def test_functions(c: Conversion, tmp_path: Path) -> None:
    differing(c)
    paths = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    files = {rank: c.shard(rank) for rank in range(4)}
    before = listing(tmp_path)
    for call in (
        lambda **chosen: reshard_mpi.transform_checkpoints(*paths, **chosen),
        lambda **chosen: reshard_mpi.transform_checkpoints(*paths, 2, **chosen),
        lambda **chosen: reshard_mpi.transform_checkpoint_by_rank(1, files, tmp_path / "o.ckpt", *paths[3:], **chosen),
        lambda **chosen: reshard_mpi.plan(paths[0], *paths[3:], **chosen),
    ):
        with pytest.raises(DisagreementError, match=r"copies of 'w' differ(.|\n)*element \[5, 3\]"):
            call(replicas="check")
        with pytest.raises(
            UsageError, match=r"unknown value of replicas\n  expected: any, sample, check\n  got: 'some'"
        ):
            call(replicas="some")
        assert listing(tmp_path) == before
    for call in (
        lambda: reshard_mpi.plan(paths[0], *paths[3:]),
        lambda: reshard_mpi.transform_checkpoint_by_rank(1, files, tmp_path / "o.ckpt", *paths[3:]),
        lambda: reshard_mpi.transform_checkpoints(*paths),
    ):
        call()


def test_only_what_is_needed_is_compared(c: Conversion) -> None:
    """A difference in what only target 1 needs: rows 4 to 7."""
    differing(c)
    c.done("transform", *CHECK, "--rank", "0")
    assert c.run("transform", *CHECK, "--rank", "1").code == 3


@pytest.mark.parametrize("name", ["accu_grads.w", "grad_sum.w"])
def test_partial_sums_are_compared_whatever_is_asked(c: Conversion, name: str) -> None:
    for rank in range(4):
        c.rewrite(rank, {name: c.arrays(rank)["w"] + (rank == 2)})
    for options in ((), CHECK):
        said = c.refused("transform", *options)
        assert f"copies of '{name}' differ" in said and "partial sums" in said


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((8, 2), np.float64), "got: float64 of shape [8, 2]"),
        (np.zeros((8, 3), np.float32), "got: float32 of shape [8, 3]"),
    ],
    ids=["type", "shape"],
)
def test_a_copy_of_another_kind_is_refused(c: Conversion, array: np.ndarray, says: str) -> None:
    """Rank 2 is read by nobody here, so only comparing can see it."""
    c.rewrite(2, {"w": array})
    c.done("plan", "--rank", "0")
    said = c.refused("plan", *CHECK, "--rank", "0")
    assert "copies of 'w' differ in shape or type" in said and says in said
    assert f"where: {c.shard(2)}\n" in said


def test_shards_that_cannot_be_compared_are_told(c: Conversion) -> None:
    c.shard(2).write_bytes(b"")
    c.rewrite(3, {"w": None})  # saved without redundancy: nothing to be told
    finished = c.done("transform", *CHECK, "--rank", "0")
    assert finished.err.count("warning: ") == 1
    assert f"warning: the shard of rank 2 cannot be used, {c.shard(2)}: a shard is empty" in finished.err
    assert read_shard(c.written(0)) == c.expected(0)


# Cost


def copies_of(c: Conversion) -> set[tuple[str, int]]:
    return {(name, rank) for name in ("w", "b", "moments.w") for rank in range(4)}


# 8 targets in 2 groups that hold the same: columns for every second rank.
EIGHT = side(8, {"w": RawLayout((4, 2), (-1, 0)), "b": RawLayout((4, 2), (-1,))})


def test_targets_that_share_pieces_have_them_compared_once(tmp_path: Path, read: Counter[tuple[str, int, Box]]) -> None:
    c = make(tmp_path).to(EIGHT)
    c.done("plan", *CHECK)
    compared = {key: count for key, count in read.items() if key[0] != "global_step"}
    assert {(name, rank) for name, rank, _ in compared} == copies_of(c)
    assert set(compared.values()) == {1}


@pytest.mark.slow
def test_processes_share_what_is_to_be_compared(tmp_path: Path) -> None:
    """What each of 3 workers reads to compare goes to a file of its own."""
    c = make(tmp_path).to(EIGHT)
    patch = (
        "import os, sys; from reshard_mpi.cli import commands as cli\n"
        "from reshard_mpi.engine import first_difference as comparing\n"
        "read = comparing.read_region\n"
        "def told(files, copy, region, *rest):\n"
        f"    with open({str(tmp_path)!r} + f'/read.{{os.getpid()}}', 'a') as log:\n"
        "        print(copy.source.name, copy.source_rank, file=log)\n"
        "    read(files, copy, region, *rest)\n"
        "comparing.read_region = told\n"
    )
    script = tmp_path / "patched.py"
    script.write_text(patch + "cli.main(sys.argv[1:])\n")
    finished = run_command([sys.executable, str(script), *c.arguments("transform", "--jobs", "3", *CHECK)])
    assert finished.code == 0, finished
    logs = [Counter(log.read_text().splitlines()) for log in tmp_path.glob("read.*")]
    reads = sum(logs, Counter[str]())
    compared = {line: count for line, count in reads.items() if not line.startswith("global_step")}
    assert compared == {f"{name} {rank}": 1 for name, rank in copies_of(c)}
    busy = [log for log in logs if any(line in compared for line in log)]
    assert len(busy) > 1


@by_one_mpi
def test_ranks_of_an_mpi_run_refuse_alike(tmp_path: Path, mpi: MPI) -> None:
    c = make(tmp_path).to(EIGHT)
    differing(c)
    before = listing(tmp_path)
    finished = transform_apart(c, "--jobs", "1", *CHECK, mpi=mpi, ranks=3)
    assert finished.code == 3, finished
    assert finished.err.count("copies of 'w' differ") == 1 and "element [5, 3]" in finished.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("most", [1, 8, 10_000])
@pytest.mark.parametrize("differs", [False, True])
def test_many_holders_are_compared_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Counter[tuple[str, int, Box]], most: int, differs: bool
) -> None:
    """As many shards as may be in memory; the first holder is read again for each batch, the others never."""
    monkeypatch.setattr(compare_replicas, "_MAX_TENSORS_AT_ONCE", most)
    held: list[int] = []
    batches = compare_replicas._Comparison._batches

    def counting(*arguments: object) -> Iterator[list[object]]:
        for batch in batches(*arguments):  # type: ignore[arg-type]
            held.append(len(batch))
            yield batch

    monkeypatch.setattr(compare_replicas._Comparison, "_batches", counting)
    c = make(tmp_path)
    if differs:
        c.rewrite(3, {"b": np.append(c.arrays(3)["b"][:-1], 99)})
        with pytest.raises(DisagreementError, match=r"'b' differ(.|\n)*ranks 0 and 3(.|\n)*element \[7\]"):
            reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy, replicas="check")
        return
    reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy, replicas="check")
    assert max(held) == {1: 1, 8: 2, 10_000: 4}[most]
    times = Counter({(name, rank): count for (name, rank, _), count in read.items() if name == "b"})
    assert times == {("b", 0): {1: 3, 8: 2, 10_000: 1}[most], ("b", 1): 1, ("b", 2): 1, ("b", 3): 1}

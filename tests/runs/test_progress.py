"""Python says what the command line says: its notes and warnings are logged, each once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ckpt_peer import write as write_ckpt
from support.command_line import done, run_in_fork
from support.conversions import DST_LAYOUTS, Conversion, make, side, transform_by_function
from support.examples import few
from support.launch import MPI, by_one_mpi, run_ranks
from support.oracle import RawLayout
from support.processes import Finished
from support.rank_calls import logged_while_transforming

import reshard_mpi
from reshard_mpi.formats import ckpt
from reshard_mpi.processes import governor
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

Told = list[tuple[str, str]]
FOUR = {"w": RawLayout((4,), (0, -1)), "b": RawLayout((4,), (-1,))}
MANY = 99_999_999_999


def printed(finished: Finished) -> Told:
    """What the command line says after `note: ` and `warning: `, with the level that it is logged at."""
    lines = (line.partition(": ") for line in finished.err.splitlines())
    levels = {"note": "INFO", "warning": "WARNING"}
    return sorted((levels[label], text) for label, _, text in lines if label in levels)


class Logged:
    """What a function logs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def by(self, call: Callable[[], object]) -> Told:
        self._caplog.clear()
        with self._caplog.at_level(logging.INFO, "reshard_mpi"):
            call()
        records = [record for record in self._caplog.records if record.name == "reshard_mpi"]
        return sorted((record.levelname, record.getMessage()) for record in records)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


# Ways to have a conversion say something, and a part of it.

SAYS: dict[str, tuple[Callable[[Conversion], Conversion | None], str, str]] = {}


def says(level: str, part: str) -> Callable[[Any], Any]:
    def add(spoil: Any) -> Any:
        SAYS[spoil.__name__] = (spoil, level, part)
        return spoil

    return add


@says("INFO", "several checkpoints in")
def several_checkpoints(c: Conversion) -> None:
    for rank in range(4):
        c.shard(rank).rename(c.shard(rank).with_name(f"net-9_5{c.shard(rank).suffix}"))
        c.rewrite(rank, {})
        c.shard(rank).rename(c.shard(rank).with_name(f"net-10_5{c.shard(rank).suffix}"))


@says("INFO", "the string 'net' of")
def strings_that_differ(c: Conversion) -> None:
    for rank in range(4):
        manifest = ckpt.locate(str(c.shard(rank)))
        arrays = c.arrays(rank)
        samples = (
            SampleTensor(name, entry.dtype, entry.shape, arrays[name].tobytes())
            for name, entry in manifest.tensors.items()
        )
        write_ckpt(c.shard(rank), ShardContents.of(samples, {"net": f"that of {rank}"}))


@says("INFO", "'seed' differs between ranks 0, 1, 2, 3: each rank has its own")
def values_of_one_target_that_differ(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"seed": np.array(rank % 2)})


@says("INFO", "'seed' differs between ranks 0, 1, 2, 3")
def values_of_two_targets_that_differ(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"seed": np.array(rank // 2)})  # target 0 opens the first two, target 1 the others


@says("WARNING", "no shard of rank 0 in")
def a_missing_shard(c: Conversion) -> None:
    c.remove(0)


@says("WARNING", "the shard of rank 0 cannot be used")
def a_damaged_shard(c: Conversion) -> None:
    c.shard(0).write_bytes(b"")


@says("WARNING", "target rank 0")
def a_missing_shard_with_values_of_its_own(c: Conversion) -> Conversion:
    for rank in range(4):
        c.rewrite(rank, {"seed": np.array(rank)})
    c.remove(0)
    return c.to(side(4, FOUR))


@says("WARNING", "1 listed parameters are in no source shard: never.saved")
def a_parameter_that_was_never_saved(c: Conversion) -> Conversion:
    return c.but(dst_strategy=c.strategy("more", {**DST_LAYOUTS, "never.saved": RawLayout((2,), (0,))}))


@says("WARNING", "cannot be told, so it is left out")
def a_loose_shard_that_cannot_be_read(c: Conversion) -> Conversion:
    loose = c.folder / "loose"
    reshard_mpi.transform_checkpoints(c.src, c.folder / "native", "n", c.src_strategy, c.src_strategy, 1, "hdf5")
    loose.mkdir()
    for rank in range(4):
        (c.folder / "native" / f"rank_{rank}" / f"n{rank}.h5").rename(loose / f"n{rank}.h5")
    (loose / "noise.h5").write_bytes(b"noise")
    return c.but(src=loose, kind="hdf5", src_strategy=None)


@says("INFO", "memory is shared only with processes that see")
def a_place_that_others_do_not_see(c: Conversion) -> None:
    """See `private_place`."""


@pytest.fixture(params=few(4, SAYS))
def spoiled(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Conversion:
    spoil, *_ = SAYS[request.param]
    c = make(tmp_path)
    c = spoil(c) or c
    if spoil is a_place_that_others_do_not_see:
        find = governor.find_place
        monkeypatch.setattr(governor, "find_place", lambda env: find(env)._replace(private="a mount of its own"))
    return c


def expected(told: Told, request: pytest.FixtureRequest) -> bool:
    _, level, part = SAYS[request.node.callspec.params["spoiled"]]
    return any(one_level == level and part in text for one_level, text in told)


def transform(c: Conversion, process_num: int = 1) -> Callable[[], None]:
    return lambda: transform_by_function(c, process_num)


def test_transform(spoiled: Conversion, logged: Logged, request: pytest.FixtureRequest) -> None:
    c = spoiled
    finished = c.done()
    assert expected(printed(finished), request), finished
    assert logged.by(transform(c)) == printed(finished)


def test_plan(spoiled: Conversion, logged: Logged, request: pytest.FixtureRequest) -> None:
    c = spoiled
    finished = c.done("plan")
    assert expected(printed(finished), request), finished
    told = logged.by(lambda: reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy))
    assert told == printed(finished)


def test_one_target(spoiled: Conversion, logged: Logged) -> None:
    c = spoiled
    finished = c.done("transform", "--rank", "0")
    names = ("rank_{}/net-10_5.ckpt", "rank_{}/checkpoint_{}.ckpt", "n{}.h5")
    paths = {rank: [c.src / name.format(rank, rank) for name in names] for rank in range(4)}
    files = {rank: path for rank, of_rank in paths.items() for path in of_rank if path.exists()}
    told = logged.by(
        lambda: reshard_mpi.transform_checkpoint_by_rank(0, files, c.written(0), c.src_strategy, c.dst_strategy)
    )
    # A map names its files: nothing is chosen, left out or missed.
    found = ("several checkpoints in", "is left out", "no shard of rank 0", "its own shard cannot be used")
    assert told == [one for one in printed(finished) if not any(part in one[1] for part in found)]
    loaded = logged.by(lambda: reshard_mpi.load_rank(0, c.src, c.src_strategy, c.dst_strategy))
    # It asks nobody for memory.
    assert loaded == [one for one in printed(finished) if "memory is shared only" not in one[1]]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [a_damaged_shard, values_of_two_targets_that_differ])
def test_worker_processes_leave_it_to_their_parent(
    c: Conversion, capfd: pytest.CaptureFixture[str], logged: Logged, spoil: Callable[[Conversion], None]
) -> None:
    spoil(c)
    finished = run_in_fork(*c.arguments("transform", "--jobs", "2"))
    assert finished.code == 0 and len(printed(finished)) == 1
    assert logged.by(transform(c, 2)) == printed(finished)
    assert capfd.readouterr().err.count("rank 0") <= 1  # what pytest itself may show of the log


@pytest.mark.slow
def test_more_processes_than_there_is_work_for(c: Conversion, logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MPI_MEMORY", "unlimited")  # so many may have to wait for memory, and say so
    finished = c.done("transform", "--jobs", str(MANY))
    ((level, text),) = printed(finished)
    assert level == "INFO" and text.startswith(f"{MANY} processes were asked for, 16 started: there are 2 targets")
    assert logged.by(transform(c, MANY)) == printed(finished)
    finished = done("verify", c.src, c.dst, *c.arguments()[3:7], "--jobs", str(MANY))
    assert "2 started: there are 2 shards" in printed(finished)[0][1]
    pair = (c.src, c.dst, c.src_strategy, c.dst_strategy)
    assert logged.by(lambda: reshard_mpi.verify(*pair, jobs=MANY)) == printed(finished)


def test_verify(c: Conversion, logged: Logged) -> None:
    c.done("transform", "--verify", "--rank", "0")
    c.done("transform", "--resume")
    finished = done("verify", c.dst, "--jobs", "1")
    assert "keep no sums" in printed(finished)[0][1]
    assert logged.by(lambda: reshard_mpi.verify(c.dst)) == printed(finished)
    a_damaged_shard(c)
    finished = done("verify", c.src, c.dst, *c.arguments()[3:7], "--jobs", "1")
    assert "rank 0 cannot be used" in printed(finished)[0][1]
    assert logged.by(lambda: reshard_mpi.verify(c.src, c.dst, c.src_strategy, c.dst_strategy)) == printed(finished)


def test_verify_says_which_checkpoint_it_has_chosen(c: Conversion, logged: Logged) -> None:
    several_checkpoints(c)
    transform(c)()
    finished = done("verify", c.src, c.dst, *c.arguments()[3:7], "--jobs", "1")
    assert "net-10_5.ckpt chosen" in printed(finished)[0][1]
    assert logged.by(lambda: reshard_mpi.verify(c.src, c.dst, c.src_strategy, c.dst_strategy)) == printed(finished)


@by_one_mpi
def test_one_of_the_ranks_of_an_mpi_run_logs(c: Conversion, mpi: MPI) -> None:
    values_of_two_targets_that_differ(c)
    a_damaged_shard(c)
    finished = c.done()
    assert len(printed(finished)) == 2
    results = run_ranks(mpi, 3, logged_while_transforming, c.paths).results
    assert [sorted(results[rank]) for rank in range(3)] == [printed(finished), [], []]


def test_nothing_is_logged_of_a_call_that_is_refused(c: Conversion, logged: Logged) -> None:
    a_damaged_shard(c)
    c.dst.write_text("mine")
    finished = c.run()
    assert finished.code == 3 and not printed(finished)

    def refused() -> None:
        with pytest.raises(reshard_mpi.TargetError):
            transform(c)()
        files = {rank: c.shard(rank) for rank in range(4)}
        with pytest.raises(reshard_mpi.TargetError):
            reshard_mpi.transform_checkpoint_by_rank(0, files, c.written(0), c.src_strategy, c.dst_strategy)

    assert not logged.by(refused)

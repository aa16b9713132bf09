"""Runs over two hosts: who writes what, and what everybody is told when a process of one of them fails or dies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.command_line import COMMAND
from support.conversions import Conversion, assert_right, four_targets, make, resume, shards, side
from support.examples import one_at_a_time
from support.harm import wait_for_the_killed
from support.hosts import Hosts, make_hosts
from support.launch import MPI, PYTEST, RANKS, by_one_mpi
from support.oracle import RawLayout
from support.processes import Finished, run_command
from support.stand_ins import doing

import reshard_mpi
from reshard_mpi.processes import host as host_names
from reshard_mpi.processes.comm import SerialComm
from reshard_mpi.processes.host import HOST_VARIABLE, HostIdentity, distinct_names

pytestmark = pytest.mark.slow

# The hosts of the ranks, by rank.
NAMES = ["node-a", "node-a", "node-b", "node-b"]

# Has every rank note what it ends with before MPI lets go of it: then launchers end the others once one has failed.
NOTE_CODES = """
import os, sys

def noted(code, leave=sys.exit):
    with open(f"{folder}/{{os.getpid()}}", "w") as file:
        file.write(str(code))
    leave(code)

sys.exit = noted
"""


@pytest.fixture
def hosts(mpi: MPI, tmp_path: Path) -> Hosts:
    return make_hosts(mpi, tmp_path, "node-a", "node-b")


def run(hosts: Hosts, c: Conversion, *options: str, env: dict[str, str]) -> Finished:
    """Convert with two ranks of every host. env: what `doing` returned. The exit codes of the ranks are noted."""
    (c.folder / "codes").mkdir()
    with (c.folder / "stand_in" / "sitecustomize.py").open("a") as file:
        file.write(NOTE_CODES.format(folder=c.folder / "codes"))
    return run_command(hosts.command(2, [*COMMAND, *c.arguments("transform", *options)]), env=env)


def exit_codes(c: Conversion) -> list[int]:
    """Return what the ranks that have ended by themselves ended with."""
    return [int(file.read_text()) for file in (c.folder / "codes").iterdir()]


def reporting(c: Conversion) -> Sequence[str]:
    return "--report", str(c.folder / "report.json")


def report_of(c: Conversion) -> dict[str, list[dict[str, object]]]:
    report: dict[str, list[dict[str, object]]] = json.loads((c.folder / "report.json").read_text())
    return report


def some_targets(folder: Path, kind: str, count: int) -> Conversion:
    """Make a conversion to so many targets that all hold everything."""
    return make(folder, kind).to(side(count, {"w": RawLayout((count,), (-1, -1)), "b": RawLayout((count,), (-1,))}))


# The same bytes, and no file by processes of two hosts


# Either kind by either MPI, and one host or both.
@pytest.mark.parametrize(
    ("mpi", "kind", "targets", "processes"),
    [
        ("mpich", "hdf5", 1, [2]),
        ("openmpi", "ckpt", 2, [2, 2]),
        ("openmpi", "hdf5", 3, [1, 1, 2]),
        ("mpich", "ckpt", 4, [1, 1, 1, 1]),
    ],
    indirect=["mpi"],
)
def test_the_same_files_as_alone(tmp_path: Path, hosts: Hosts, kind: str, targets: int, processes: list[int]) -> None:
    c = some_targets(tmp_path, kind, targets)
    (tmp_path / "filled").mkdir()
    note = f"open(f'{tmp_path}/filled/{{plan.target_rank}} {{os.uname().nodename}} {{os.getpid()}}', 'x')"
    finished = run(hosts, c, *reporting(c), env=doing(tmp_path, note, "True"))
    assert finished.code == 0 and exit_codes(c) == [0] * 4, finished
    assert f"wrote {targets} shard" in finished.out
    alone = c.but(dst=tmp_path / "alone")
    assert c.src_strategy is not None and c.dst_strategy is not None
    reshard_mpi.transform_checkpoints(c.src, alone.dst, "checkpoint_", c.src_strategy, c.dst_strategy, 1, kind)
    assert shards(c.dst) == shards(alone.dst)
    assert_right(c)
    reported = {target["rank"]: target["processes"] for target in report_of(c)["targets"]}
    assert sorted(map(str, reported.values())) == sorted(map(str, processes))
    filled = [file.name.split() for file in (tmp_path / "filled").iterdir()]
    assert Counter(int(rank) for rank, _, _ in filled) == reported
    assert len({(rank, host) for rank, host, _ in filled}) == targets  # all that fill a target are on one host
    assert {host for _, host, _ in filled} == ({"node-a", "node-b"} if targets > 1 else {"node-a"})


# A process that fails


@pytest.mark.parametrize(
    ("mpi", "target", "process"),
    [("openmpi", 1, 2), ("mpich", 2, 1)],
    indirect=["mpi"],
    ids=["on the other host", "on the first host"],
)
def test_a_rank_that_fails(tmp_path: Path, hosts: Hosts, target: int, process: int) -> None:
    c = four_targets(tmp_path)
    when = f"plan.target_rank == {target}"
    finished = run(hosts, c, *reporting(c), env=doing(tmp_path, "raise OSError(5, 'the disk is gone')", when))
    assert finished.code == 4 and exit_codes(c) == [4] * 4, finished
    named = f"target rank {target} (process {process} on host {NAMES[process]}): the file system refused"
    assert finished.err.count(f"1 of 4 targets failed; the first: {named}") == 1, finished
    assert f"got: target rank {target} failed; 3 others are complete" in finished.err and "--resume" in finished.err
    (failure,) = report_of(c)["failures"]
    assert "the disk is gone" in str(failure.pop("error"))
    assert failure == {"rank": target, "process": process, "host": NAMES[process], "kind": "ReshardError"}
    others = [rank for rank in range(4) if rank != target]
    assert [reported["rank"] for reported in report_of(c)["targets"]] == others
    assert_right(c, others)
    assert "3 were complete" in resume(c)
    assert_right(c)


@by_one_mpi
def test_a_rank_that_helps_and_fails_is_named_not_the_one_that_leads(tmp_path: Path, hosts: Hosts) -> None:
    c = some_targets(tmp_path, "ckpt", 2)
    helps = "plan.target_rank == 1 and span[0] > 0"
    finished = run(hosts, c, *reporting(c), env=doing(tmp_path, "raise OSError(5, 'the disk is gone')", helps))
    assert finished.code == 4 and exit_codes(c) == [4] * 4, finished
    assert "the first: target rank 1 (process 3 on host node-b): the file system refused" in finished.err
    (failure,) = report_of(c)["failures"]
    assert (failure["rank"], failure["process"], failure["host"]) == (1, 3, "node-b")
    assert_right(c, (0,))


def test_a_bug_on_one_rank_ends_the_job(tmp_path: Path, hosts: Hosts) -> None:
    c = four_targets(tmp_path)
    finished = run(hosts, c, env=doing(tmp_path, "raise ValueError('a bug')"))
    assert finished.code != 0 and "ValueError: a bug" in finished.err, finished
    assert "process 2 on host node-b ends the job" in finished.err
    assert not list(c.dst.glob("rank_1/*"))


@by_one_mpi
def test_what_is_wrong_on_one_host_only_is_refused_with_its_name(tmp_path: Path, hosts: Hosts) -> None:
    c = four_targets(tmp_path)
    missing = (
        "import os\nfrom reshard_mpi.checkpoints import discovery\n\nfind = discovery.find_shards\n\n"
        "def stand_in(source, *given, **named):\n"
        "    return find(source + '/missing'[: 8 * (os.uname().nodename == 'node-b')], *given, **named)\n\n"
        "discovery.find_shards = stand_in\n"
    )
    env = doing(tmp_path, "pass")
    (tmp_path / "stand_in" / "sitecustomize.py").write_text(missing)
    finished = run(hosts, c, env=env)
    assert finished.code == 3 and exit_codes(c) == [3] * 4, finished
    assert finished.err.count("error: process 2 on host node-b: ") == 1, finished
    assert not c.dst.exists()


# A process that dies


@pytest.mark.parametrize(("count", "names"), one_at_a_time([2, 4], [("node-a",), ("node-a", "node-b")]))
def test_a_rank_that_is_killed(tmp_path: Path, mpi: MPI, names: tuple[str, ...], count: int) -> None:
    if mpi.name == "openmpi" and len(names) > 1:
        pytest.skip("Open MPI 5's launcher and daemons may stay, idle, when no rank is left")
    c = some_targets(tmp_path, "ckpt", count)
    hosts = make_hosts(mpi, tmp_path, *names)
    assert run(hosts, c, env=doing(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")).code != 0
    assert not c.written(1).exists()
    wait_for_the_killed(c)  # the launcher may end before its ranks on the other host do
    resume(c)
    assert_right(c)
    assert not list(c.dst.rglob("*.partial")), "nothing of the dead ones is left"


# What hosts are called


def test_hosts_as_ranks_see_them(hosts: Hosts) -> None:
    finished = run_command(hosts.command(2, [*PYTEST, RANKS]), check=True)
    assert finished.out.count(" passed") >= 3, finished  # one closing line a rank; two may have run into each other
    assert "skipped" not in finished.out, finished


def test_a_process_alone_has_the_name_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    (name,) = SerialComm().hosts
    assert name and name == host_names.host_name({})
    monkeypatch.setenv(HOST_VARIABLE, "elsewhere")
    assert SerialComm().hosts == ("elsewhere",)


def test_hosts_of_one_name_are_told_apart_by_what_their_kernels_drew() -> None:
    seen = [("a", "11112222"), ("b", "33334444"), ("b", "55556666"), ("a", "11112222"), ("b", "")]
    assert distinct_names([HostIdentity(*one) for one in seen]) == ["a", "b#33334444", "b#55556666", "a", "b#unknown"]


def test_names_that_are_distinct_stay_as_they_are() -> None:
    # Containers of one machine share its kernel.
    a, b = HostIdentity("a", "1111"), HostIdentity("b", "1111")
    assert distinct_names([a, b, a]) == ["a", "b", "a"]


def test_a_kernel_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "_BOOT_ID", tmp_path / "none")
    assert HostIdentity.local({HOST_VARIABLE: "a"}) == HostIdentity("a", "")

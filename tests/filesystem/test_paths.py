"""Paths that cannot be: each is refused by name before work begins, and only files are ever replaced."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import done, refused, run_here
from support.conversions import Conversion, listing, make
from support.examples import few, few_cases, one_at_a_time
from support.processes import Finished

import reshard_mpi
from reshard_mpi.errors import ReshardError, SourceError, StrategyError, TargetError


def bind(path: Path) -> None:
    where = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(where)


def device(path: Path) -> None:
    """Make a device where that is allowed, else a link to one."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    except PermissionError:
        path.symlink_to("/dev/full")


OBSTACLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "socket": (bind, "a socket"),
    "device": (device, "a device"),
    "link to a device": (lambda path: path.symlink_to("/dev/full"), "a device"),
    "folder": (Path.mkdir, "a folder"),
    "link to a folder": (lambda path: path.symlink_to(path.parent, target_is_directory=True), "a folder"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a symbolic link that leads to itself"),
}


def refused_by(error: type[ReshardError], call: Callable[[], object]) -> Finished:
    with pytest.raises(error) as caught:
        call()
    return Finished((), error.exit_code, "", str(caught.value))


def a_target(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    return c.written(1), lambda: c.run("transform", "--overwrite")


def a_target_of_the_function(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    paths = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    return c.written(1), lambda: refused_by(TargetError, lambda: reshard_mpi.transform_checkpoints(*paths))


def a_target_by_rank(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    files = {rank: c.shard(rank) for rank in range(4)}
    path = c.dst / "out.ckpt"
    call = reshard_mpi.transform_checkpoint_by_rank
    return path, lambda: refused_by(TargetError, lambda: call(0, files, path, c.src_strategy, c.dst_strategy))


def a_report(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    path = c.dst / "report.json"
    return path, lambda: c.run("transform", "--report", str(path))


def a_commit_record(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    return c.dst / "reshard.json", lambda: c.run("transform", "--jobs", "2")


def a_lock(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    return c.dst / ".reshard_mpi" / "rank_0.lock", c.run


def a_merged_strategy(c: Conversion) -> tuple[Path, Callable[[], Finished]]:
    assert c.src_strategy is not None
    path = c.dst / "merged"
    return path, lambda: run_here("merge-strategies", c.src_strategy, path)


OUTPUTS = [a_target, a_target_of_the_function, a_target_by_rank, a_report, a_commit_record, a_lock, a_merged_strategy]


@few_cases(
    4, ("output", "obstacle"), [*one_at_a_time(OUTPUTS, OBSTACLES), *((a_lock, name) for name in [*OBSTACLES][1:])]
)
def test_only_files_are_replaced(
    c: Conversion, tmp_path: Path, output: Callable[[Conversion], tuple[Path, Callable[[], Finished]]], obstacle: str
) -> None:
    path, run = output(c)
    path.parent.mkdir(parents=True)
    put, name = OBSTACLES[obstacle]
    put(path)
    if output is a_lock and path.is_symlink():
        name = "a symbolic link"  # wherever it leads to
    before, put_there = sorted(tmp_path.rglob("*")), path.lstat()
    finished = run()
    assert finished.code == (2 if output is a_report else 3) and finished.out == "", finished
    assert name in finished.err and str(path) in finished.err and "Traceback" not in finished.err, finished
    assert sorted(tmp_path.rglob("*")) == before
    assert (path.lstat().st_mode, path.lstat().st_ino) == (put_there.st_mode, put_there.st_ino)


def test_a_commit_record_is_written_over_a_file_only(c: Conversion) -> None:
    """Also by the command that does nothing else."""
    c.done()
    (c.dst / "reshard.json").unlink()
    os.mkfifo(c.dst / "reshard.json")
    assert "a pipe is in the place of the commit record" in refused("commit", c.dst)
    assert stat.S_ISFIFO((c.dst / "reshard.json").stat().st_mode)


def test_a_link_in_the_place_of_a_merged_strategy_stays(c: Conversion, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("merged")
    for _ in range(2):
        done("merge-strategies", c.src_strategy, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "merged").is_file()
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("name", ["reshard.json", ".reshard_mpi/report.json"])
def test_a_report_in_the_place_of_what_the_run_keeps(c: Conversion, tmp_path: Path, name: str) -> None:
    (c.dst / ".reshard_mpi").mkdir(parents=True)
    before = listing(tmp_path)
    said = c.refused("transform", "--report", str(c.dst / name), code=2)
    assert "the report cannot be written" in said and name in said
    assert listing(tmp_path) == before


LONG = "n" * 300


@pytest.mark.parametrize("name", few(1, ["loop", LONG, "loop/more", "file/more"]))
def test_paths_that_lead_nowhere(c: Conversion, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    path = tmp_path / name
    arguments = {
        "source": c.but(src=path).arguments(),
        "source strategy": c.but(src_strategy=path).arguments(),
        "target strategy": c.but(dst_strategy=path).arguments("plan"),
        "target": c.but(dst=path).arguments("transform", "--jobs", "2"),
        "plan of a target": c.but(dst=path).arguments("plan"),
        "verified": ["verify", str(path), "--jobs", "1"],
        "verified target": ["verify", str(c.src), str(path), "--src-strategy", str(c.src_strategy), "--jobs", "1"],
        "report": c.arguments("transform", "--report", str(path)),
        "strategies to merge": ["merge-strategies", str(path), str(tmp_path / "out")],
        "merged strategy": ["merge-strategies", str(c.src_strategy), str(path)],
        "committed": ["commit", str(path)],
        "inspected": ["inspect", str(path)],
    }
    for what, given in arguments.items():
        finished = run_here(*given)
        assert finished.code == (2 if what == "report" else 3) and finished.out == "", (what, finished)
        assert (
            finished.err.startswith("reshard-mpi: error: ") and name.split("/", maxsplit=1)[0][:80] in finished.err
        ), (what, finished)
    strategies = (c.src_strategy, c.dst_strategy)
    files = {rank: c.shard(rank) for rank in range(4)}
    by_rank = reshard_mpi.transform_checkpoint_by_rank
    calls: list[tuple[type[ReshardError], Callable[[], object]]] = [
        (SourceError, lambda: reshard_mpi.plan(path, *strategies)),
        (SourceError, lambda: reshard_mpi.load_rank(0, path, *strategies)),
        (SourceError, lambda: reshard_mpi.load_rank(0, {0: path}, *strategies)),
        (SourceError, lambda: reshard_mpi.verify(path)),
        (SourceError, lambda: by_rank(0, {**files, 1: path}, tmp_path / "out.ckpt", *strategies)),
        (TargetError, lambda: by_rank(0, files, path / "out.ckpt", *strategies)),
        (TargetError, lambda: by_rank(0, files, path.with_name(path.name + ".ckpt") / "a.ckpt", *strategies)),
        (StrategyError, lambda: reshard_mpi.rank_list_for_transform(0, path)),
    ]
    for error, call in calls[: 6 if name != LONG else None]:
        with pytest.raises(error, match="where: "):
            call()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--src-strategy", "--dst-strategy", "--report", "DST", "SRC"])
def test_an_empty_path_is_none(c: Conversion, option: str) -> None:
    """As of a variable of the shell that is not set: without a target strategy one full checkpoint would be made."""
    given = c.arguments("transform")
    if option in ("SRC", "DST"):
        given[1 + (option == "DST")] = ""
    else:
        given += [option, ""]
    assert f"{option}: expected a path, got ''" in refused(*given, code=2) and not c.dst.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_report_that_may_not_be_written(c: Conversion, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    said = c.refused("transform", "--report", str(tmp_path / "closed" / "report.json"), code=2)
    assert "the report cannot be written" in said and not c.dst.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("form", few(1, ["ckpt", "hdf5", "safetensors", "torch", "dcp"]))
def test_modes_follow_the_umask(c: Conversion, form: str, umask: int) -> None:
    """Of targets, indexes and records alike, whatever the format."""
    before = os.umask(umask)
    try:
        finished = c.run("transform", "--to", form)
    finally:
        os.umask(before)
    assert finished.code == 0, finished
    modes = {str(path): path.stat().st_mode & 0o777 for path in c.dst.rglob("*") if path.is_file()}
    assert len(modes) > 3 and set(modes.values()) == {0o666 & ~umask}, modes


@pytest.mark.parametrize("call", range(1, 5))
def test_a_source_that_the_file_system_cannot_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Whichever look at it fails, it is said in the same form, and in words that the ranks of a run exchange."""
    c, calls, real = make(tmp_path), [], os.stat

    def stat_of(path: str | Path | int, **options: Any) -> os.stat_result:
        if path in (c.src, str(c.src)):
            calls.append(path)
            if len(calls) == call:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat_of)
    finished = c.run()
    assert len(calls) >= call and finished.code == 3, finished
    assert f"got: {os.strerror(errno.ENOSYS)}\n  where: {c.src}" in finished.err, finished
    assert not list(c.dst.glob("rank_*/*"))

"""What a run refuses before it creates anything: no room on the file system, names that are too long."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import TARGETS, write_shard
from support.command_line import COMMAND
from support.conversions import Conversion, four_targets, listing, make, transform_apart, transform_by_function
from support.examples import few
from support.launch import MPI, by_one_mpi
from support.processes import run_command

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.formats import ckpt
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.journal.publication import dead_partial_bytes
from reshard_mpi.runs import check_places, target_plans
from reshard_mpi.runs.check_places import SpaceEstimate, SpaceNeed, require_room
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, spec_of

# Stands in for what file systems say is free.
STAND_IN = """
import os

status_of = os.statvfs

def statvfs(path):
    status = list(status_of(path))
    free = int(os.environ["FREE"])
    status[1:5] = 1, 1 << 40, free, free  # blocks of one byte
    return os.statvfs_result(status)
os.statvfs = statvfs
"""


def say_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(check_places, "_free_bytes", lambda mount: free_bytes)


def free(folder: Path, free_bytes: int) -> dict[str, str]:
    """Return the environment in which every file system has so much room."""
    (folder / "stand_in").mkdir(exist_ok=True)
    (folder / "stand_in" / "sitecustomize.py").write_text(STAND_IN)
    path = os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return {"PYTHONPATH": path, "FREE": str(free_bytes)}


def planned(c: Conversion) -> list[int]:
    plan = reshard_mpi.plan(c.src, c.src_strategy, c.dst_strategy)
    return [target.written_bytes for target in plan.targets]


def needed_of(refusal: str) -> int:
    """Return how much room a refused run says it needs."""
    needed = re.search(r"\((\d+) bytes\) free for what this run is to write", refusal)
    assert needed is not None, refusal
    return int(needed[1])


# Room


@pytest.mark.parametrize("command", few(1, ["transform", "plan"]))
def test_no_room(c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    say_free(monkeypatch, sum(planned(c)))  # the payloads alone
    needed = needed_of(c.run(command).err)
    say_free(monkeypatch, needed - 1)
    before = listing(tmp_path)
    said = c.refused(command)
    assert "there is no room for the targets" in said
    assert f"({needed} bytes)" in said and f"({needed - 1} bytes)" in said
    assert "where: the file system at /" in said
    assert listing(tmp_path) == before
    say_free(monkeypatch, needed)
    c.done(command)


def test_no_room_for_the_function(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    say_free(monkeypatch, sum(planned(c)) - 1)
    with pytest.raises(reshard_mpi.errors.TargetError, match="no room"):
        transform_by_function(c)
    assert not c.dst.exists()


def test_no_room_for_one_target(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, (needed, _) = {rank: c.shard(rank) for rank in range(4)}, planned(c)

    def transform(name: str) -> None:
        path = c.dst / "rank_0" / name
        reshard_mpi.transform_checkpoint_by_rank(0, shards, path, c.src_strategy, c.dst_strategy)

    say_free(monkeypatch, needed)  # the payloads alone
    with pytest.raises(reshard_mpi.errors.TargetError, match="no room") as refused:
        transform("net.ckpt")
    needed = needed_of(str(refused.value))
    say_free(monkeypatch, needed - 1)
    with pytest.raises(reshard_mpi.errors.TargetError, match="no room"):
        transform("net.ckpt")
    say_free(monkeypatch, needed)
    with pytest.raises(reshard_mpi.errors.TargetError, match="too long"):
        transform(f"{'n' * 240}.ckpt")
    assert not c.dst.exists()
    transform("net.ckpt")


def test_only_what_is_still_to_be_made_needs_room(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    say_free(monkeypatch, 0)
    both = needed_of(c.run().err)
    first = needed_of(c.run("transform", "--rank", "0").err)
    say_free(monkeypatch, first)
    c.done("transform", "--rank", "0")
    say_free(monkeypatch, 0)
    second = needed_of(c.run("transform", "--resume").err)
    assert sum(planned(c)) < both < first + second  # each of them counts the commit record, and what is written twice
    say_free(monkeypatch, second - 1)
    assert c.run("transform", "--resume").code == 3
    say_free(monkeypatch, second)
    c.done("transform", "--resume")
    say_free(monkeypatch, 0)
    c.done("transform", "--resume")


@pytest.mark.parametrize("jobs", ["2", "3"])
def test_processes_of_a_run_need_what_they_need_together(tmp_path: Path, jobs: str) -> None:
    c = four_targets(tmp_path)
    arguments = [*COMMAND, *c.arguments("transform", "--jobs", jobs)]
    needed = needed_of(run_command(arguments, env=free(tmp_path, sum(planned(c)))).err)
    finished = run_command(arguments, env=free(tmp_path, needed - 1))
    assert finished.code == 3 and f"({needed} bytes)" in finished.err and not c.dst.exists(), finished
    assert run_command(arguments, env=free(tmp_path, needed)).code == 0


@by_one_mpi
def test_ranks_of_a_job_need_what_they_need_together(tmp_path: Path, mpi: MPI) -> None:
    c = four_targets(tmp_path)
    needed = sum(planned(c))
    finished = transform_apart(c, mpi=mpi, ranks=3, env=free(tmp_path, needed - 1))
    assert finished.code == 3 and finished.err.count("there is no room") == 1, finished
    assert not c.dst.exists()


def test_room_of_files_that_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free when they are, and what the dead left is when its target is begun."""
    say_free(monkeypatch, 0)
    shard = spec_of(ShardContents({"w": SampleTensor("w", BY_NAME["float32"], (1 << 20,), bytes(4 << 20))}, {}))
    size_bytes = ckpt.size_at_most_bytes(shard) + 8192
    file_bytes = 3 << 20
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(file_bytes))

    def needed_bytes(*names: str) -> int:
        space = SpaceEstimate()
        with Folder.open(tmp_path) as folder:
            for name in names:
                space.add(tmp_path / name, "ckpt", shard, left_bytes=dead_partial_bytes(folder, name))
        (need,) = space.needs(1, bool)
        return need.needed_bytes

    assert needed_bytes("a") == size_bytes
    assert needed_bytes("a", "b") == 2 * size_bytes - file_bytes
    assert needed_bytes("a", "b", "c") == 3 * size_bytes - 2 * file_bytes
    (tmp_path / ".d.0123.partial").write_bytes(bytes(file_bytes))
    assert needed_bytes("c", "d") == 2 * size_bytes - file_bytes
    os.link(tmp_path / "b", tmp_path / "other")  # so it keeps its room
    assert needed_bytes("b", "c") == 2 * size_bytes


def test_file_systems_are_looked_at_one_by_one() -> None:
    spare = 1 << 20  # for what a run keeps besides
    require_room([(SpaceNeed("/a", 3, spare + 5), SpaceNeed("/b", 5, spare + 5)), (SpaceNeed("/a", 2, spare + 6),)])
    with pytest.raises(reshard_mpi.errors.TargetError, match=r"1048581 bytes(.|\n)*1048580 bytes(.|\n)*/a"):
        require_room([(SpaceNeed("/a", 3, spare + 5), SpaceNeed("/b", 5, spare + 5)), (SpaceNeed("/a", 2, spare + 4),)])


def test_a_file_system_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 255)))
    make(tmp_path).done()


@pytest.mark.parametrize(("kind", "shares", "code"), few(1, [("hdf5", True, 0), ("hdf5", False, 3), ("ckpt", True, 3)]))
def test_blocks_that_may_be_shared_need_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shares: bool, code: int
) -> None:
    c = make(tmp_path, kind)
    say_free(monkeypatch, 0)
    monkeypatch.setattr(check_places, "_can_share", lambda source, target: shares)
    assert c.run().code == code
    one = partial(
        reshard_mpi.transform_checkpoint_by_rank,
        0,
        {rank: c.shard(rank) for rank in range(4)},
        c.folder / f"0{c.shard(0).suffix}",
        c.src_strategy,
        c.dst_strategy,
    )
    if code:
        with pytest.raises(reshard_mpi.errors.TargetError):
            one()
    else:
        one()


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Path]:
    """A file system that shares blocks."""
    image, folder = tmp_path / "image", tmp_path / "xfs"
    folder.mkdir()
    image.touch()
    os.truncate(image, 320 << 20)
    for command in (["mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, folder]):
        try:
            finished = run_command(command)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not there")
        if finished.code:
            pytest.skip(f"{command[0]} does not work here: {finished.err}")
    try:
        yield folder
    finally:
        run_command(["umount", folder], check=True)


def test_whether_blocks_may_be_shared(sharing: Path, tmp_path: Path) -> None:
    for folder in (sharing, tmp_path):
        (folder / "file").write_bytes(bytes(8192))
    assert check_places._can_share(sharing / "file", sharing / "new" / "rank_0" / "file")
    assert not check_places._can_share(tmp_path / "file", sharing / "new")
    assert not check_places._can_share(sharing / "file", Path("/proc/new"))
    assert set(listing(sharing)) == {"file"}


# Names


def test_a_prefix_that_is_too_long(c: Conversion, tmp_path: Path) -> None:
    """The partial file has the longest name: that it does not fit must not come out in the middle."""
    most = os.pathconf(tmp_path, "PC_NAME_MAX") - len(".1.ckpt.0123456789ab.partial")
    for command in ("transform", "plan"):
        before = listing(tmp_path)
        said = c.refused(command, "--prefix", "p" * (most + 1))
        assert "a file name of the target would be too long" in said
        assert "at most 255 bytes" in said and "256 bytes: .ppp" in said and "--prefix" in said
        assert listing(tmp_path) == before
    c.done("transform", "--prefix", "p" * most)
    assert c.run("transform", "--prefix", "\u00e4" * most, "--overwrite").code == 3


def test_a_target_folder_with_a_name_that_is_too_long(c: Conversion, tmp_path: Path) -> None:
    said = c.but(dst=tmp_path / ("d" * 256)).refused()
    assert "a file name of the target would be too long" in said
    assert "shorter name" in said


def test_a_path_that_is_too_long(c: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files of a target, the partial one of its record may have the longest path."""
    monkeypatch.chdir(tmp_path)
    longest = len("/.reshard_mpi/.rank_1.json.0123456789ab.partial")
    for spare, code in ((0, 3), (1, 0)):
        folder = folder_of(os.pathconf(tmp_path, "PC_PATH_MAX") - longest - spare)
        finished = c.but(dst=folder).run("transform", "--prefix", "p")
        assert finished.code == code, finished
        if code:
            assert "a path in the target would be too long" in finished.err and "4096 bytes" in finished.err
            assert not (tmp_path / folder.parts[0]).exists()


def folder_of(length: int) -> Path:
    """Return a relative path of so many characters."""
    names = ["n" * 99] * (length // 100 - 1)
    rest = length - len(names) * 100
    return Path(*names, "n" * (rest // 2), "n" * (rest - rest // 2 - 1))


# Left-overs


def test_shards_of_another_name_are_removed_or_refuse_the_run(c: Conversion) -> None:
    assert c.run().err.count("note:") == 0
    assert c.run("transform", "--overwrite", "--prefix", "net_").ended == (0, "")
    assert not c.written(0).exists()  # they were this program's own
    strange = c.dst / "rank_1" / "other.ckpt"
    strange.write_bytes(b"precious")
    for options in (["--overwrite"], ["--overwrite", "--prefix", "more_"]):
        said = c.refused("transform", *options)
        assert "got: rank_1/other.ckpt\n" in said and "another folder" in said
    assert strange.read_bytes() == b"precious"


@pytest.mark.parametrize("options", [("--to", "dcp"), ("--to", "hdf5", "--overwrite")])
def test_a_folder_whose_latest_checkpoint_is_named_is_no_target(c: Conversion, options: tuple[str, ...]) -> None:
    """A save folder of Megatron or MindFormers: readers would follow the name, and not see the targets."""
    (c.dst / "iter_0000005").mkdir(parents=True)
    (c.dst / "latest_checkpointed_iteration.txt").write_text("5")
    assert "latest_checkpointed_iteration.txt" in c.refused("transform", *options)
    assert not list(c.dst.glob("rank_*"))


@pytest.mark.parametrize("to", few(1, [name for name in TARGETS if not formats.info(name).split_by_size]))
def test_a_rank_that_holds_nothing(tmp_path: Path, to: str) -> None:
    """MindSpore loads no file without a parameter; all other formats have files of nothing that are read again."""
    model = {"w": np.arange(4, dtype=np.float32)}
    write_shard(model, tmp_path / "model.safetensors")
    (tmp_path / "two.toml").write_text('mesh = { n = 1 }\nstages = 2\n[[parameter]]\nmatch = "w"\nstage = 0\n')

    def transform() -> None:
        reshard_mpi.transform(tmp_path / "model.safetensors", tmp_path / "dst", None, tmp_path / "two.toml", to=to)

    if to == "ckpt":
        with pytest.raises(TargetError, match="a target would hold nothing") as refused:
            transform()
        assert "rank 1" in str(refused.value) and not (tmp_path / "dst").exists()
        return
    transform()
    with_strategy = {} if formats.info(to).is_folder or to == "hdf5" else {"src_strategy": tmp_path / "two.toml"}
    assert list(reshard_mpi.load_rank(0, tmp_path / "dst", **with_strategy)) == ["w"]


def test_texts_count_as_what_a_shard_is_read_with(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(ShardContents({}, {f"note {number}": "text" for number in range(20)}))
    target_plans.require_readable_structure(spec, "safetensors")
    monkeypatch.setattr(target_plans, "MAX_TENSORS", 19)
    with pytest.raises(TargetError, match="more than it could be read with again"):
        target_plans.require_readable_structure(spec, "safetensors")


@pytest.mark.parametrize("lying", ["rank_9/checkpoint_9.ckpt", "model.safetensors", "rank_1/other.ckpt"])
def test_functions_point_out_other_checkpoints(c: Conversion, caplog: pytest.LogCaptureFixture, lying: str) -> None:
    """Such as the last ranks of an earlier one of more ranks, beside which the new one is not read any more.

    And shards of another name.
    """
    strange = c.dst / lying
    strange.parent.mkdir(parents=True)
    strange.write_bytes(b"precious")
    with caplog.at_level("INFO", "reshard_mpi"):
        transform_by_function(c)
    assert f"{strange} will lie beside the new targets" in caplog.text and strange.read_bytes() == b"precious"

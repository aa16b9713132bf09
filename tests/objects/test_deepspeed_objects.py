"""Checkpoints of DeepSpeed in an object store: what is written there is what a folder has, and a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import deepspeed_peer
from support.command_line import COMMAND, done
from support.deepspeed_peer import Form
from support.examples import few
from support.fault_proxy import FaultProxy, Operation, kill_at
from support.object_servers import Bucket, forget, names, objects, upload, uploads

MIB = 1 << 20
# Of each vector two ranks hold 8 MiB.
SHAPES = {"a.weight": (2, MIB), "b.weight": (2, MIB)}


def saved(folder: Path, *, is_universal: bool = False) -> Path:
    """Write a checkpoint of two ranks; return the folder of the save."""
    training = deepspeed_peer.training(SHAPES, {"c.weight": (11,)}, dtype="float32")
    write = deepspeed_peer.write_universal if is_universal else deepspeed_peer.write
    write(folder / "save", training, Form(1 if is_universal else 2, 2))
    return folder / "save"


def arguments(source: str | Path, target: str | Path, stage: int, ranks: int, *options: str) -> list[str]:
    cut = ["--to", "deepspeed", "--dp", str(ranks), "--zero-stage", str(stage)]
    return ["transform", str(source), str(target), *cut, *options, "--jobs", "1", "--progress", "none"]


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint, without what says how the run is kept."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not _is_of_run(name)}


def _is_of_run(name: str) -> bool:
    return name.startswith((".reshard_mpi/", "reshard.json"))


def found_in(url: str) -> dict[str, bytes]:
    return {name: content for name, content in objects(url).items() if not _is_of_run(name)}


def assert_as_local(url: str, folder: Path) -> None:
    """Check that a store has what a folder has, and says that all of it is there."""
    assert found_in(url) == content_of(folder)
    assert {"reshard.json", "latest"} <= set(names(url))


# Stage, ranks, whether the source is a universal checkpoint, and options.
CASES = [(2, 1, False, "--verify"), (3, 1, True, "--verify"), (1, 3, False, "")]


@pytest.mark.parametrize(("stage", "ranks", "is_universal", "option"), few(0, CASES))
def test_objects_are_the_files_of_a_local_run(
    bucket: Bucket, tmp_path: Path, stage: int, ranks: int, is_universal: bool, option: str
) -> None:
    source, options = saved(tmp_path, is_universal=is_universal), option.split()
    done(*arguments(source, tmp_path / "out", stage, ranks, *options))
    upload(source, bucket / "save")
    report = tmp_path / "report.json"
    done(*arguments(bucket / "save", bucket / "out", stage, ranks, *options, "--report", str(report)))
    assert_as_local(bucket / "out", tmp_path / "out")
    assert not uploads(bucket)
    assert sum(target["store_copied_bytes"] for target in json.loads(report.read_text())["targets"]) > 2 * MIB
    done("verify", bucket / "out")


@pytest.mark.slow
@pytest.mark.parametrize("operation", [Operation.COPY_PART, Operation.PUT_PART, Operation.COMPLETE, Operation.PUT])
def test_a_run_that_is_killed_is_resumed(moto: Bucket, proxy: FaultProxy, tmp_path: Path, operation: Operation) -> None:
    source = saved(tmp_path)
    done(*arguments(source, tmp_path / "out", 2, 2, "--verify"))
    upload(source, moto / "save")
    command = arguments(moto / "save", moto / "out", 2, 2, "--verify")
    kill_at(proxy, operation, [*COMMAND, *command], skip=2)
    forget()
    local = content_of(tmp_path / "out")
    there = found_in(moto / "out")
    assert "latest" not in there and there.items() < local.items()
    done(*command, "--resume")
    assert_as_local(moto / "out", tmp_path / "out")
    assert not uploads(moto)

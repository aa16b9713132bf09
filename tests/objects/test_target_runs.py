"""Runs of several processes, and one after another, whose targets go to an object store, and commands on these."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import COMMAND, done, refused, run_apart, run_here
from support.conversions import Conversion, listing
from support.examples import few, few_cases
from support.launch import MPI
from support.object_servers import Bucket, delete, download, forget, names, objects, put, uploads

from reshard_mpi.errors import TargetError
from reshard_mpi.journal.object_journal import ObjectJournal
from reshard_mpi.journal.run_records import RunIdentity, strategy_of_run

TARGETS = ["rank_0/checkpoint_0.ckpt", "rank_1/checkpoint_1.ckpt"]
STATE = [f".reshard_mpi/{name}.json" for name in ("committed", "rank_0", "rank_1", "run", "strategy")]


_TIMES = re.compile(r" in [0-9.]+ [a-z]+ \([^)]*\)")


def at(c: Conversion, address: str) -> Conversion:
    """Return the same conversion with targets at an address."""
    return c.but(dst=address)  # type: ignore[arg-type]


def assert_as_local(c: Conversion, bucket: Bucket, *besides: str) -> None:
    """Check that the targets are those of a local run, and what else lies there."""
    if not c.dst.exists():
        c.done("transform")
    found = objects(bucket / "out")
    assert sorted(found) == sorted([*STATE, *TARGETS, "reshard.json", *besides])
    assert {name: found[name] for name in TARGETS} == {name: (c.dst / name).read_bytes() for name in TARGETS}
    assert not uploads(bucket)


@pytest.mark.slow
def test_local_processes(bucket: Bucket, c: Conversion) -> None:
    run_apart(*at(c, bucket / "out").arguments("transform", "--jobs", "2", "--progress", "none"), check=True)
    assert_as_local(c, bucket)


def test_ranks(moto: Bucket, c: Conversion, mpi: MPI) -> None:
    run_apart(*at(c, moto / "out").arguments("transform", "--jobs", "1"), mpi=mpi, check=True)
    assert_as_local(c, moto)


@pytest.mark.slow
def test_parts_one_after_another(moto: Bucket, c: Conversion) -> None:
    for part in ("0/2", "1/2"):
        assert "reshard.json" not in names(moto / "out")
        at(c, moto / "out").done("transform", "--part", part)
    assert_as_local(c, moto)


@pytest.mark.slow
def test_parts_at_the_same_time(bucket: Bucket, c: Conversion) -> None:
    for verify in ([], ["--verify"]):
        delete(bucket / "out")
        started = [
            subprocess.Popen([*COMMAND, *at(c, bucket / "out").arguments("transform", "--part", part, *verify)])
            for part in ("0/2", "1/2")
        ]
        assert [process.wait() for process in started] == [0, 0]
        done("commit", bucket / "out")
        assert_as_local(c, bucket)


@pytest.mark.slow
def test_the_same_run_twice_at_the_same_time(bucket: Bucket, c: Conversion) -> None:
    """One may be told that the other was quicker; what lies there is right."""
    for options in ([], ["--overwrite"], ["--resume"]):
        started = [
            subprocess.Popen(
                [*COMMAND, *at(c, bucket / "out").arguments("transform", *options)], stderr=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        ended = [(process.communicate()[1], process.returncode) for process in started]
        assert all(code == 0 or (code in (3, 4) and "Traceback" not in said) for said, code in ended), ended
        at(c, bucket / "out").done("transform", "--resume")
        assert_as_local(c, bucket)
        if options != ["--overwrite"]:
            delete(bucket / "out")


def test_what_is_complete_is_left(moto: Bucket, c: Conversion) -> None:
    at(c, moto / "out").done("transform", "--rank", "0")
    written = moto.server.client.head_object(Bucket=moto.name, Key=f"out/{TARGETS[0]}")["LastModified"]
    at(c, moto / "out").done("transform", "--resume")
    assert moto.server.client.head_object(Bucket=moto.name, Key=f"out/{TARGETS[0]}")["LastModified"] == written
    assert_as_local(c, moto)
    put(moto / f"out/{TARGETS[1]}", b"x" * len(objects(moto / f"out/{TARGETS[1]}")[""]))
    forget()
    assert "rank 1" in refused("verify", moto / "out", code=4)
    delete(moto / f"out/{TARGETS[1]}")
    at(c, moto / "out").done("transform", "--resume")
    assert_as_local(c, moto)


@pytest.mark.slow
def test_another_run_in_the_same_place(moto: Bucket, c: Conversion) -> None:
    """As in a folder: refused, or with --overwrite in its place; what is nobody's stays."""
    c.done("transform", "--to", "hdf5")
    at(c, moto / "out").done("transform", "--to", "hdf5")
    for place in (c, at(c, moto / "out")):
        place.refused("transform")
    assert names(moto / "out") == [
        name for name, content in listing(c.dst).items() if content is not None and ".lock" not in name
    ]
    (c.dst / "notes.txt").write_bytes(b"mine")
    put(moto / "out/notes.txt", b"mine")
    for place in (c, at(c, moto / "out")):
        place.done("transform", "--overwrite")
    assert_as_local(c, moto, "notes.txt")


def test_a_run_that_is_refused_leaves_the_strategy_of_the_other(moto: Bucket) -> None:
    """Another run begins between its look at the prefix, where nothing lies, and its own beginning."""
    first, other = (
        ObjectJournal(
            Path(moto / "out"),
            RunIdentity({"format": "ckpt", "dst_strategy": digest}),
            resume=True,
            overwrite=False,
            strategy=lambda: "ours",
        )
        for digest in ("0a", "0b")
    )
    other.check()
    first.begin()
    forget()
    with pytest.raises(TargetError, match="another run"):
        other.begin()
    forget()
    assert strategy_of_run(first.folder, first.identity.digest) is not None


@few_cases(2, "name", [TARGETS[1], "reshard.json", ".reshard_mpi/run.json", ".reshard_mpi/rank_1.json"])
@pytest.mark.parametrize("content", few(1, [b"of somebody else", b"{}"]))
def test_a_foreign_object_in_the_place_of_one_of_ours(moto: Bucket, c: Conversion, name: str, content: bytes) -> None:
    put(moto / f"out/{name}", content)
    (c.dst / name).parent.mkdir(parents=True)
    (c.dst / name).write_bytes(content)
    local, remote = c.run("transform"), at(c, moto / "out").run("transform")
    assert remote.code == local.code, (local, remote)
    lines = [said.replace(str(c.dst), "OUT").replace(moto / "out", "OUT") for said in (local.err, remote.err)]
    assert lines[0].splitlines()[:1] == lines[1].splitlines()[:1]
    if local.code:
        assert objects(moto / f"out/{name}")[""] == content
    done(*c.arguments("transform", "--overwrite"))
    at(c, moto / "out").done("transform", "--overwrite")
    assert_as_local(c, moto)


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "torch", "hdf5", "dcp"]))
def test_an_object_of_another_save_that_differs_in_few_places(moto: Bucket, form: str, tmp_path: Path) -> None:
    """Most weights are frozen, so that 32 pages of it are those of ours. In a copied prefix they tell enough."""
    frozen = np.random.default_rng(0).random((256, 1024), np.float32)
    (tmp_path / "rows.toml").write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\n')

    commands = {}
    for name, value in (("ours", 1), ("others", 2)):
        write_ranks({0: {"a": frozen, "m": np.full((2, 8), value), "z": frozen}}, tmp_path / name, "safetensors")
        commands[name] = ["transform", tmp_path / name, moto / name, "--to", form]
        commands[name] += ["--dst-strategy", tmp_path / "rows.toml"]
        done(*commands[name])
    shard = next(name for name in names(moto / "ours") if "rank_1/" in name or name == "__1_0.distcp")
    for name, content in objects(moto / "ours").items():  # not in parts, so that tags are others
        put(moto / f"copied/{name}", content)
    forget()
    done("transform", moto / "copied", tmp_path / "of_copy", "--strict")
    put(moto / f"ours/{shard}", objects(moto / f"others/{shard}")[""])
    forget()
    cut = () if form in ("hdf5", "dcp") else ("--src-strategy", tmp_path / "rows.toml")
    assert "was modified after" in done("transform", moto / "ours", tmp_path / "read", *cut).err
    refused("transform", moto / "ours", tmp_path / "strictly", *cut, "--strict")
    refused(*commands["ours"], "--resume")
    refused("commit", moto / "ours", code=4)


def test_a_folder_in_the_place_of_a_target(moto: Bucket, c: Conversion) -> None:
    put(moto / f"out/{TARGETS[1]}/inside", b"x")
    assert TARGETS[1] in at(c, moto / "out").refused("transform")
    put(moto / "one", b"x")
    assert "not a folder" in at(c, moto / "one").refused("transform")


@pytest.mark.slow
def test_commands_on_targets(moto: Bucket, c: Conversion, tmp_path: Path) -> None:
    c.done("transform", "--verify")
    at(c, moto / "out").done("transform", "--verify")
    for command, *words in (
        ("verify",),
        ("verify", "--deep"),
        ("inspect",),
        ("inspect", "w"),
        ("commit",),
        ("diff", str(c.src), "--dst-strategy", str(c.src_strategy)),
    ):
        local, remote = run_here(command, c.dst, *words), run_here(command, moto / "out", *words)
        assert remote.code == local.code, (local, remote)
        told = [_TIMES.sub("", said.replace(moto / "out", str(c.dst))) for said in (local.out, remote.out)]
        assert told[0] == told[1]
    delete(moto / "out/reshard.json")
    done("commit", moto / "out")
    assert_as_local(c, moto)
    delete(moto / f"out/{TARGETS[0]}")
    refused("commit", moto / "out", code=4)
    refused("commit", moto / "nothing")
    copy = download(moto / "out", tmp_path / "copy")
    assert json.loads((copy / ".reshard_mpi/run.json").read_text())["target_ranks"] == 2

"""Verification: while a target is written, against its source later, and against the sums a checkpoint keeps."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import ckpt_peer
from support.checkpoints import (
    KINDS,
    Arrays,
    expected_rank,
    flip_bits,
    write_ranks,
    write_shard,
    write_shards,
    write_strategy,
)
from support.command_line import done, refused, run_apart, run_here
from support.conversions import (
    TENSORS,
    Conversion,
    assert_right,
    four_targets,
    listing,
    make,
    of_every_kind,
    shards,
    side,
    transform_apart,
)
from support.examples import few, few_cases
from support.launch import MPI, by_one_mpi, of_every_kind_and_mpi
from support.oracle import RawLayout
from support.processes import Finished
from support.stand_ins import doing

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.errors import DamageError, ShardError, SourceError, UsageError
from reshard_mpi.formats import structure
from reshard_mpi.runs import target_writer
from reshard_mpi.runs import verify_command as verifying
from reshard_mpi.text import format_bytes

WHOLE = {name: zlib.crc32(array.tobytes()) for name, array in TENSORS.items()}


def verify(c: Conversion, *options: str, target: bool = True) -> Finished:
    arguments = c.arguments("verify", *options)
    if not target:
        arguments = ["verify", str(c.dst), "--jobs", "1", *options]
    return run_here(*arguments)


def flip(path: Path, name: str, element: int = 0) -> int:
    """Flip a bit of a tensor in a shard; return at which byte of the file."""
    module = formats.by_name(formats.name_of(path.name) or "")
    entry = module.locate(str(path)).tensors[name]
    offset = entry.source.ranges[0].offset_bytes + element * entry.dtype.itemsize_bytes
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 8]))
    path.chmod(mode)
    return offset


@pytest.fixture(params=KINDS)
def c(request: pytest.FixtureRequest, tmp_path: Path) -> Conversion:
    return four_targets(tmp_path, request.param)


def sums(c: Conversion) -> dict[str, int]:
    record = json.loads((c.dst / "reshard.json").read_text())
    return {name: int(value, 16) for name, value in record["sums"].items()}


# While targets are written


@pytest.mark.parametrize("form", few(1, ["dcp", "safetensors", "hdf5"]))
def test_targets_without_tensors_are_verified_too(tmp_path: Path, form: str) -> None:
    """In DCP each copy is written once; a stage may have no parameter."""
    write_shards(side(1, {"w": RawLayout((1,), ())}), {"w": TENSORS["w"]}, tmp_path / "src", "safetensors")
    rule = "" if form == "dcp" else 'stage = 0\nsplit = { 0 = ["a"] }\n'
    spec = tmp_path / "spec.toml"
    spec.write_text(f'{"" if form == "dcp" else "stages = 2"}\nmesh = {{ a = 2 }}\n[[parameter]]\nmatch = "*"\n{rule}')
    given = ("transform", tmp_path / "src", tmp_path / "dst", "--dst-strategy", spec, "--to", form, "--verify")
    done(*given)
    assert json.loads((tmp_path / "dst/reshard.json").read_text())["sums"].keys() == {"w"}
    assert "not verified" not in done(*given, "--resume").err
    assert "keep no sums" not in done("verify", tmp_path / "dst").err


def test_the_record_has_the_sums_of_whole_tensors(c: Conversion) -> None:
    c.done("transform", "--verify")
    assert sums(c) == WHOLE


@pytest.mark.slow
def test_local_processes_give_the_same(c: Conversion, tmp_path: Path) -> None:
    divided(c, tmp_path, "--jobs", "3")


@of_every_kind_and_mpi
def test_ranks_give_the_same(tmp_path: Path, kind: str, mpi: MPI) -> None:
    divided(four_targets(tmp_path, kind), tmp_path, mpi=mpi)


def divided(c: Conversion, tmp_path: Path, *options: str, mpi: MPI | None = None) -> None:
    """Transform and verify with three processes, and compare what they make with what one does."""
    c.done("transform", "--verify")
    env = doing(tmp_path, "pass")  # which cuts targets at every 16 bytes
    several = c.but(dst=tmp_path / "several")
    transform_apart(several, "--verify", *options, mpi=mpi, ranks=3, env=env, check=True)
    assert listing(several.dst / "rank_3") == listing(c.dst / "rank_3")
    assert shards(several.dst) == shards(c.dst)
    assert sums(several) == WHOLE


@of_every_kind
def test_tensors_without_elements(tmp_path: Path, kind: str) -> None:
    """They begin at no byte of a target that several processes fill, and have a sum all the same."""
    c = four_targets(tmp_path, kind)
    for rank in range(4):
        c.rewrite(rank, {"a_none": np.zeros((0, 4), np.float32), "x_none": np.zeros((3, 0), np.int64)})
    c.done("transform", "--verify")
    assert sums(c) == WHOLE | {"a_none": 0, "x_none": 0}
    several = c.but(dst=tmp_path / "several")
    options = ["--verify", "--jobs", "3"]
    transform_apart(several, *options, env=doing(tmp_path, "pass"), check=True)
    assert shards(several.dst) == shards(c.dst) and sums(several) == sums(c)
    for written in (c, several):
        assert verify(written).code == verify(written, target=False).code == 0


def test_sums_are_in_native_shards(tmp_path: Path) -> None:
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    total = {name: zlib.crc32(bytes(TENSORS[name].nbytes)) for name in TENSORS}
    for name in ("w", "moments.w"):
        zeros = total[name]
        for rank in range(4):
            with h5py.File(c.written(rank)) as file:
                contents = json.loads(bytes(file["__reshard_mpi__/contents"][...]))["tensors"]
                value = int(file["__reshard_mpi__/sums"][contents.index(name)])
                alone = np.zeros_like(TENSORS[name])
                start = file["__reshard_mpi__/boxes"][contents.index(name)]["offset"]
                held = file[name][...]
                alone[tuple(slice(a, a + n) for a, n in zip(start, held.shape))] = held
            assert value == zlib.crc32(alone.tobytes())
            total[name] ^= value ^ zeros
        assert total[name] == WHOLE[name]
    assert set(formats.by_name("hdf5").locate(str(c.written(0))).tensors) == set(TENSORS)


def test_a_target_that_is_not_what_was_read_is_not_published(c: Conversion, tmp_path: Path) -> None:
    """As if the disk had written something else than it was given."""
    spoil = (
        "f = open(manifest.path, 'r+b'); at = manifest.tensors['w'].source.ranges[0].offset_bytes + 5; f.seek(at);"
        " b = f.read(1); f.seek(at); f.write(bytes([b[0] ^ 1])); f.close()"
    )
    options = ["--verify", "--report", str(tmp_path / "r.json")]
    finished = transform_apart(c, *options, env=doing(tmp_path, spoil))
    assert finished.code == 4, finished
    assert "target rank 1: 'w' differs from its source at element [2, 1]" in finished.err
    assert not c.written(1).exists() and c.written(0).exists() and not list(c.dst.rglob("*.partial"))
    without = transform_apart(c.but(dst=tmp_path / "without"), env=doing(tmp_path, spoil))
    assert without.code == 0  # which is why there is --verify


SPOIL_OWN = """
        own = [r for e in manifest.tensors.values() for r in e.source.ranges if span[0] <= r.offset_bytes < span[1]]
        with open(manifest.path, "r+b") as stream:
            stream.seek(own[-1].offset_bytes)
            byte = stream.read(1)[0]
            stream.seek(own[-1].offset_bytes)
            stream.write(bytes([byte ^ 1]))
"""


def test_one_of_several_that_fill_a_target_finds_the_damage(c: Conversion, tmp_path: Path) -> None:
    when = "plan.target_rank == 3 and span is not None and span[1] >= os.stat(manifest.path).st_size"
    finished = transform_apart(c, "--verify", "--jobs", "3", env=doing(tmp_path, SPOIL_OWN, when))
    assert finished.code == 4, finished
    assert "target rank 3" in finished.err and "differs from its source" in finished.err
    assert not c.written(3).exists() and c.written(0).exists()


def test_a_source_that_was_committed_with_other_sums(tmp_path: Path) -> None:
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    flip(c.written(2), "w")
    again = ["transform", str(c.dst), str(tmp_path / "again"), "--verify", "--jobs", "1"]
    assert "'w' is damaged, expected the sum" in refused(*again)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("loss", few(1, ["gone", "cut short", "empty"]))
def test_loose_shards_that_state_their_ranks_are_verified_as_a_whole(tmp_path: Path, loss: str) -> None:
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    loose = tmp_path / "loose"
    loose.mkdir()
    for rank in range(4):
        shutil.copy2(c.written(rank), loose)
    assert "verified 4 shards" in run_here("verify", loose).out
    one = loose / c.written(2).name
    content = one.read_bytes()
    one.unlink()
    if loss != "gone":
        one.write_bytes(content[:3000] if loss == "cut short" else b"")
    said = refused("verify", loose, code=4)
    assert "a shard is missing" in said and "got: all but that of rank 2" in said
    assert (f"whose shard {one} is cannot be told" in said) == (loss != "gone")
    assert "verified 1 shard" in run_here("verify", loose / c.written(1).name).out


@pytest.mark.parametrize("what", ["another target strategy", "another source strategy", "a later source"])
@pytest.mark.parametrize("jobs", few(1, ["1", "2"]))
def test_nobody_is_told_to_overwrite_what_was_made_otherwise(tmp_path: Path, what: str, jobs: str) -> None:
    def spec(name: str, axes: str) -> Path:
        text = 'mesh = { a = 2, b = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = [%s] }\n'
        (tmp_path / f"{name}.toml").write_text(text % axes)
        return tmp_path / f"{name}.toml"

    def write_source(seed: int) -> None:
        random = np.random.default_rng(seed)
        parts = {rank: {"w": random.standard_normal((4, 6), np.float32)} for rank in range(4)}
        write_ranks(parts, tmp_path / "src", "safetensors")

    own, other, dst = spec("own", '"a", "b"'), spec("other", '"b", "a"'), tmp_path / "dst"
    write_source(1)
    reshard_mpi.transform(tmp_path / "src", dst, own, own, verify=True)
    before, given = {path: path.read_bytes() for path in dst.rglob("*.safetensors")}, {"src": own, "dst": own}
    if what == "a later source":
        shutil.rmtree(tmp_path / "src")
        write_source(2)
        expected, code = "the source has changed since the target was made of it", 4  # it holds something else
    else:
        given["dst" if "target" in what else "src"] = other
        expected, code = "made with another strategy than this", 2
    strategies = ("--src-strategy", given["src"], "--dst-strategy", given["dst"])
    finished = run_here("verify", tmp_path / "src", dst, *strategies, "--jobs", jobs)
    assert finished.code == code and expected in finished.err, finished
    assert ("damage:" in finished.err) == (what == "a later source")
    assert "verify DST alone" in finished.err and "--overwrite" not in finished.err, finished
    assert run_here("verify", dst).code == 0
    assert before == {path: path.read_bytes() for path in before}


def test_a_target_that_a_record_alone_knows_of_is_missing(tmp_path: Path) -> None:
    c = four_targets(tmp_path, "ckpt")
    c.done("transform", "--verify")
    for path in (c.written(3), c.dst / "reshard.json", *(c.dst / ".reshard_mpi").glob("[!rc]*.json")):
        path.unlink()
    (c.dst / ".reshard_mpi" / "run.json").unlink()
    said = refused("verify", c.dst, code=4)
    assert "a shard is missing" in said and "all but that of rank 3" in said


@pytest.mark.parametrize("step", ["check_together", "modified_shards"])
def test_records_that_nobody_may_read_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Of another user, for instance: root may read all."""
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(c.dst / ".reshard_mpi"))

    monkeypatch.setattr(verifying, step, denied)
    for jobs in "12":
        finished = run_here("verify", c.dst, "--jobs", jobs)
        assert finished.code == 3 and "Permission denied" in finished.err, finished
        assert "Traceback" not in finished.err and "damage" not in finished.err, finished


@pytest.mark.parametrize("form", few(1, ["hdf5", "ckpt", "torch"]))
def test_a_source_without_records_one_shard_of_which_is_of_another_save(tmp_path: Path, form: str) -> None:
    """A copy of what can be seen in a folder, as by `cp -r DST/* COPY`; each shard is sound by itself."""
    (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["x"] }\n')
    for value in (1, 2):
        write_ranks({0: {"w": np.full((4, 3), value, np.float32)}}, tmp_path / f"src{value}", "safetensors")
        asked: dict[str, Any] = {"dst_strategy": tmp_path / "two.toml", "to": form, "verify": True}
        reshard_mpi.transform(tmp_path / f"src{value}", tmp_path / f"out{value}", **asked)
        shutil.rmtree(tmp_path / f"out{value}/.reshard_mpi")
    (shard,) = (tmp_path / "out1/rank_1").iterdir()
    shutil.copy2(shard, tmp_path / "out2/rank_1")
    strategy = () if form == "hdf5" else ("--src-strategy", tmp_path / "two.toml")
    again = ("transform", tmp_path / "out2", tmp_path / "again", "--verify", "--jobs", "1", *strategy)
    assert "'w' is not what the source was committed with" in refused(*again)
    assert not (tmp_path / "again").exists()
    if form == "torch":  # each file has a checksum, which fits
        finished = run_here("verify", tmp_path / "out2", "--jobs", "1")
        assert finished.code == 0 and "sums of 1 whole tensor that are not looked at here" in finished.err
    if form == "ckpt":
        said = refused("verify", tmp_path / "out2")
        assert "no shard keeps sums" in said and "sums of 1 whole tensor that are not looked at here" in said
    if form == "hdf5":
        assert "'w' is not what was committed" in refused("verify", tmp_path / "out2", code=4)


def test_a_copy_of_another_save_among_native_shards_without_records(tmp_path: Path) -> None:
    """All ranks hold the same, by a rule for all names; the commit has sums of what was the same everywhere alone."""
    (tmp_path / "two.toml").write_text('mesh = { y = 2 }\n[[parameter]]\nmatch = "*"\n')
    for value in (1, 2):
        write_ranks({0: {"w": np.full((4, 3), value, np.float32)}}, tmp_path / f"src{value}", "safetensors")
        asked: dict[str, Any] = {"dst_strategy": tmp_path / "two.toml", "to": "hdf5", "verify": True}
        reshard_mpi.transform(tmp_path / f"src{value}", tmp_path / f"out{value}", **asked)
        shutil.rmtree(tmp_path / f"out{value}/.reshard_mpi")
    assert run_here("verify", tmp_path / "out2", "--jobs", "1").code == 0
    (shard,) = (tmp_path / "out1/rank_1").iterdir()
    shutil.copy2(shard, tmp_path / "out2/rank_1")
    assert "copies of 'w' differ" in refused("verify", tmp_path / "out2", code=4)


@pytest.mark.parametrize("replicas", few(1, ["any", "sample"]))
@pytest.mark.parametrize("form", few(1, ["hdf5", "ckpt"]))
def test_a_source_without_records_one_copy_in_which_is_of_another_save(
    tmp_path: Path, form: str, replicas: str
) -> None:
    """Every rank holds all of it, and each target takes its part from another one; the sample does not meet `w77`."""
    (tmp_path / "copies.toml").write_text('mesh = { x = 4 }\n[[parameter]]\nmatch = "*"\n')
    (tmp_path / "cut.toml").write_text('mesh = { x = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["x"] }\n')
    for value in (1, 2):
        arrays = {f"w{number:02}": np.full((4, 3), value * (number == 77), np.float32) for number in range(100)}
        write_ranks({0: arrays}, tmp_path / f"src{value}", "safetensors")
        asked: dict[str, Any] = {"dst_strategy": tmp_path / "copies.toml", "to": form, "verify": True}
        reshard_mpi.transform(tmp_path / f"src{value}", tmp_path / f"out{value}", **asked)
        shutil.rmtree(tmp_path / f"out{value}/.reshard_mpi")
    (shard,) = (tmp_path / "out1/rank_3").iterdir()
    shutil.copy2(shard, tmp_path / "out2/rank_3")
    again = ["transform", tmp_path / "out2", tmp_path / "again", "--dst-strategy", tmp_path / "cut.toml", "--verify"]
    again += [] if form == "hdf5" else ["--src-strategy", tmp_path / "copies.toml"]
    assert "copies of 'w77' differ" in refused(*again, "--replicas", replicas)
    assert not (tmp_path / "again").exists()


def test_a_source_that_was_saved_beside_what_was_committed(tmp_path: Path) -> None:
    """Training goes on in the folder of a checkpoint that was resharded for it."""
    c = make(tmp_path)
    c.done("transform", "--verify")
    trained = {name: array + 1 for name, array in TENSORS.items()}
    for rank in range(2):
        write_shard(expected_rank(c.target, trained, rank), c.written(rank).with_name("net-10_5.ckpt"))
    again = ["transform", str(c.dst), str(tmp_path / "again"), "--verify", "--jobs", "1"]
    assert "--select 'net-*_*.ckpt'" in refused(*again, "--src-strategy", c.dst_strategy)
    done(*again, "--src-strategy", c.dst_strategy, "--select", "net-*_*.ckpt")
    assert sums(c.but(dst=tmp_path / "again")) == {name: zlib.crc32(array.tobytes()) for name, array in trained.items()}
    assert "no shard keeps sums" in refused("verify", c.dst, "--select", "net-10*")
    assert verify(c, "--select", "checkpoint*", target=False).code == 0


def to_the_same(folder: Path, kind: str) -> Conversion:
    """Write the small conversion with targets that are cut as the source is."""
    c = make(folder, kind)
    return c.but(target=c.source, dst_strategy=c.src_strategy)


@of_every_kind
def test_values_that_each_rank_has_for_itself(tmp_path: Path, kind: str) -> None:
    c = to_the_same(tmp_path, kind)
    for rank in range(4):
        c.rewrite(rank, {"rng": np.array([rank, 7], np.uint32)})
    c.done("transform", "--verify")
    assert sums(c) == WHOLE
    assert verify(c, target=False).code == 0
    if kind == "hdf5":  # which knows of itself what it is, without the records
        (c.dst / "reshard.json").unlink()
        shutil.rmtree(c.dst / ".reshard_mpi")
        assert verify(c, target=False).code == 0
    flip(c.written(2), "rng")
    finished = verify(c, target=False)
    assert finished.code == 4 and "rank 2: 'rng' is damaged" in finished.err


@of_every_kind
def test_values_that_only_some_ranks_have(tmp_path: Path, kind: str) -> None:
    """They are no parts of one tensor, though their elements are together as many as those of the first."""
    c = to_the_same(tmp_path, kind)
    for rank in range(4):
        c.rewrite(rank, {"rng": np.arange(0 if rank else 3, dtype=np.uint32)})
    c.done("transform", "--verify")
    assert sums(c) == WHOLE
    assert verify(c, target=False).code == 0


@of_every_kind
def test_copies_of_a_parameter_that_differ(tmp_path: Path, kind: str) -> None:
    """Each target was made right, from sources that contradict each other."""
    c = to_the_same(tmp_path, kind)
    for rank in range(4):
        c.rewrite(rank, {"b": TENSORS["b"] + rank})
    assert "copies of 'b' differ" in c.refused("transform", "--verify", "--replicas", "any", code=4)
    assert not (c.dst / "reshard.json").exists()
    finished = verify(c, target=False)
    assert finished.code == 4 and "copies of 'b' differ" in finished.err


def test_targets_that_were_made_without_are_pointed_out(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--rank", "1", "--rank", "2")
    finished = c.done("transform", "--verify", "--resume")
    assert finished.err.count("note: targets that were complete already were not verified") == 1
    assert "sums" not in json.loads((c.dst / "reshard.json").read_text())
    c = c.but(dst=tmp_path / "verified")
    for _ in range(2):
        assert "not verified" not in c.done("transform", "--verify", "--resume").err


# MindSpore's checksum


def test_crc_is_written_and_checked(tmp_path: Path) -> None:
    c = make(tmp_path)
    c.done("transform", "--crc")
    for rank in range(2):
        data = c.written(rank).read_bytes()
        assert data[-17:] == b"crc_num" + zlib.crc32(data[:-17]).to_bytes(10, "big")
    again = ["transform", str(c.dst), str(tmp_path / "again"), "--jobs", "1", "--src-strategy", str(c.dst_strategy)]
    done(*again, "--verify")
    flip(c.written(1), "w")
    done(*again, "--overwrite")  # which is why there is --verify
    said = refused(*again, "--overwrite", "--verify")
    assert "does not fit its own checksum" in said and str(c.written(1)) in said


def of_four_alike(folder: Path) -> Conversion:
    """Every source rank holds everything, and its file has a checksum."""
    source = side(4, {"w": RawLayout((4,), (-1, -1)), "b": RawLayout((4,), (-1,))})
    c = four_targets(folder).but(
        source=source, src=folder / "alike", src_strategy=write_strategy(source, folder / "alike_strategy")
    )
    write_shards(source, TENSORS, c.src, c.kind)
    for rank in range(4):
        with_checksum(c.shard(rank))
    return c


def with_checksum(path: Path) -> None:
    """Put behind a checkpoint what MindSpore does."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"crc_num" + zlib.crc32(data).to_bytes(10, "big"))


def assert_replaced(c: Conversion, runs: Sequence[Finished]) -> None:
    """Check that `runs` took rank 2's shard instead of the damaged ones of ranks 0 and 1, said so, and are right."""
    warned: dict[str, None] = {}
    for finished in runs:
        assert finished.code == 0, finished
        warned |= dict.fromkeys(line for line in finished.err.splitlines() if line.startswith("warning: "))
    assert len(warned) == 2
    for rank, line in enumerate(warned):
        assert line.startswith(f"warning: the shard of rank {rank} cannot be used, {c.shard(rank)}: a checkpoint does")
        assert line.endswith("; taken from rank 2 instead")
    assert_right(c)
    planned = c.but(dst=c.folder / "other").done("plan", "--verify")
    assert [line for line in planned.err.splitlines() if line in warned] == list(warned)


@pytest.mark.parametrize("way", ["alone", "jobs", "tasks"])
def test_a_source_that_does_not_fit_its_checksum_is_replaced(tmp_path: Path, way: str) -> None:
    """Those that stand in are checked as well."""
    c = of_four_alike(tmp_path)
    for rank in (0, 1):
        flip(c.shard(rank), "w")
    divided = {"alone": [[]], "jobs": [["--jobs", "3"]], "tasks": [["--part", f"{number}/4"] for number in range(4)]}[
        way
    ]
    assert_replaced(c, [transform_apart(c, "--verify", *options) for options in divided])


@by_one_mpi
def test_and_by_all_ranks(tmp_path: Path, mpi: MPI) -> None:
    c = of_four_alike(tmp_path)
    for rank in (0, 1):
        flip(c.shard(rank), "w")
    assert_replaced(c, [transform_apart(c, "--verify", mpi=mpi, ranks=3)])


@pytest.mark.parametrize(("kind", "crc"), few(1, [("torch", False), ("ckpt", True), ("safetensors", True)]))
def test_what_is_checked_by_checksums_alone_is_counted(tmp_path: Path, kind: str, crc: bool) -> None:
    c = make(tmp_path, "ckpt")
    c.done("transform", "--to", kind, *(["--crc"] if crc else []))
    shards = list(c.dst.glob("rank_*/*"))
    tensors = sum(len(formats.by_name(kind).locate(str(shard)).tensors) for shard in shards)
    size = format_bytes(sum(shard.stat().st_size for shard in shards))
    out = verify(c, target=False).out
    assert out.startswith(f"verified {len(shards)} shards, {tensors} tensors, {size} in ") and tensors
    assert out.endswith("by its checksum: sound\n")


def test_sources_none_of_which_fits_its_checksum(tmp_path: Path) -> None:
    c = of_four_alike(tmp_path)
    for rank in range(4):
        flip(c.shard(rank), "w")
    for command in ("transform", "plan"):
        said = c.refused(command, "--verify")
        assert "does not fit its own checksum" in said
        assert str(c.shard(0)) in said
    assert not c.dst.exists()


@pytest.mark.parametrize(
    ("kind", "option", "says"),
    [("ckpt", "--crc", "got: a run with no --crc\n"), ("hdf5", "--verify", "got: a run with no --verify\n")],
)
def test_what_changes_the_bytes_makes_another_run(tmp_path: Path, kind: str, option: str, says: str) -> None:
    c = make(tmp_path, kind)
    c.done("transform", "--rank", "0")
    said = c.refused("transform", "--resume", option)
    assert "holds another run" in said and says in said


def test_a_file_that_shrinks_while_its_checksum_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(bytes(10))
    with structure.opened(str(path)) as file, pytest.raises(ShardError, match="became shorter"):
        structure.crc32_of(file, (0, 11))


def test_targets_are_read_back_from_the_disk(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be had: what the memory has of them is given up before."""
    forgotten: list[str] = []

    def forget(descriptor: int) -> None:
        forgotten.append(Path(f"/proc/self/fd/{descriptor}").readlink().parent.name)

    monkeypatch.setattr(target_writer, "sync_and_drop_cache", forget)
    c.done("transform", "--verify")
    assert sorted(forgotten) == [f"rank_{rank}" for rank in range(4) for _ in ("payload", "structure")]


def test_crc_is_for_ckpt(tmp_path: Path) -> None:
    c = make(tmp_path, "hdf5")
    assert c.run("transform", "--crc").code == 2
    assert not c.dst.exists()


# Against the source


@pytest.mark.parametrize("kinds", [("ckpt", "ckpt"), ("ckpt", "safetensors"), ("hdf5", "ckpt")])
def test_pair(tmp_path: Path, kinds: tuple[str, str]) -> None:
    c = four_targets(tmp_path, kinds[0])
    c.done("transform", "--to", kinds[1])
    finished = verify(c)
    assert finished.code == 0 and "verified 4 shards" in finished.out and "by the source: sound" in finished.out
    (path,) = (c.dst / "rank_2").iterdir()
    offset = flip(path, "w", 3)
    finished = verify(c)
    assert finished.code == 4 and finished.out == ""
    assert "damage: target rank 2: 'w' differs from its source at element [4, 3]" in finished.err
    assert f"at byte {offset} of {path}" in finished.err
    assert finished.err.count("damage: ") == 1


@of_every_kind
def test_pair_with_texts(tmp_path: Path, kind: str) -> None:
    c = make(tmp_path)
    for rank in range(4):
        with c.shard(rank).open("ab") as stream:
            stream.write(ckpt_peer.value("note", (0,), "str", "kept".encode("utf-32-le")))
    c = c.but(kind=kind)
    c.done("transform", "--verify", "--to", kind)
    assert verify(c).code == 0
    data = c.written(1).read_bytes()
    before, after = (text.encode("utf-32-le" if kind == "ckpt" else "utf-8") for text in ("kept", "lept"))
    assert data.count(before) == 1
    c.written(1).unlink()
    c.written(1).write_bytes(data.replace(before, after))
    finished = verify(c)
    assert finished.code == 4 and "rank 1: 'note' is not the text that the source holds" in finished.err
    assert "expected: 'kept'" in finished.err and "got: 'lept'" in finished.err
    finished = verify(c, target=False)
    assert finished.code == 4 and "rank 1: the texts of a shard are not what was written" in finished.err


@pytest.mark.slow
def test_pair_whose_source_does_not_fit_its_checksum(tmp_path: Path) -> None:
    """The target was made from what others hold, or before the damage: it is the source that is told of."""
    c = of_four_alike(tmp_path)
    c.done()
    flip(c.written(1), "b")
    for rank in range(2):
        flip(c.shard(rank), "w")
    finished = verify(c)
    assert finished.code == 4 and finished.err.count("damage: ") == 1
    assert "rank 1: 'b' differs from its source" in finished.err
    assert finished.err.count("warning: ") == 2
    assert f"{c.shard(1)}: a checkpoint does not fit its own checksum" in finished.err
    for rank in range(2, 4):
        flip(c.shard(rank), "w")
    finished = verify(c)
    assert finished.code == 4 and "does not fit its own checksum" in finished.err and "differs" not in finished.err


def test_pair_of_all_kinds_of_damage(c: Conversion) -> None:
    c.done()
    held = {name: np.zeros((2, 4), np.float32) for name in ("w", "moments.w")}
    c.written(0).unlink()
    write_shard({**held, "b": np.zeros(4, np.int64)}, c.written(0))  # lacks one, another has another shape
    c.written(1).chmod(0o600)
    c.written(1).write_bytes(b"")
    c.written(2).unlink()
    finished = verify(c)
    assert finished.code == 4 and finished.err.count("damage: ") == 3, finished.err
    assert "a shard is missing" in finished.err and "a shard is empty" in finished.err
    assert "is not what the source holds" in finished.err


def test_pair_of_much_damage(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some is located, and that there is more is said."""
    monkeypatch.setattr(verifying, "_MAX_LOCATED", 1)
    c.done()
    for name in ("w", "b", "moments.w"):
        flip(c.written(2), name)
    finished = verify(c)
    assert finished.code == 4 and finished.err.count("damage: ") == 2
    assert finished.err.count("differs from its source") == finished.err.count("more tensors of this shard differ") == 1


def test_pair_whose_source_has_lost_a_shard(c: Conversion) -> None:
    c.done()
    c.remove(0)
    finished = verify(c)
    assert finished.code == 0 and "sound" in finished.out
    assert f"warning: no shard of rank 0 in {c.src}; what should be there was taken from" in finished.err


@pytest.mark.slow
def test_pair_by_local_processes(c: Conversion) -> None:
    pair_is_told_once(c, "--jobs", "3")


@of_every_kind_and_mpi
def test_pair_by_ranks(tmp_path: Path, kind: str, mpi: MPI) -> None:
    pair_is_told_once(four_targets(tmp_path, kind), mpi=mpi)


def pair_is_told_once(c: Conversion, *options: str, mpi: MPI | None = None) -> None:
    """Verify a damaged target beside its source with three processes."""
    c.done()
    flip(c.written(3), "moments.w", 2)
    finished = run_apart(*c.arguments("verify", *options), mpi=mpi, ranks=3)
    assert finished.code == 4, finished
    assert finished.err.count("damage: ") == 1
    assert "target rank 3: 'moments.w' differs from its source at element [6, 2]" in finished.err


@pytest.mark.slow
def test_pair_whose_target_describes_itself(tmp_path: Path) -> None:
    c = make(tmp_path).but(kind="hdf5")
    c.done("transform", "--to", "hdf5")
    assert verify(c.but(dst_strategy=None)).code == 0
    finished = verify(c.but(dst_strategy=c.src_strategy))
    assert finished.code == 3 and "contradicts what the shards say" in finished.err
    assert str(c.written(0)) in finished.err
    flip(c.written(1), "w")
    finished = verify(c.but(dst_strategy=None))
    assert finished.code == 4 and "target rank 1: 'w'" in finished.err
    c = c.but(kind="ckpt", dst=tmp_path / "silent")
    c.done()
    assert verify(c.but(dst_strategy=None)).code == 0  # by the run's record
    (c.dst / ".reshard_mpi" / "strategy.json").unlink()
    finished = verify(c.but(dst_strategy=None))
    assert finished.code == 3 and str(c.dst) in finished.err and "--dst-strategy" in finished.err


def test_pair_that_cannot_be_compared(c: Conversion) -> None:
    finished = verify(c)
    assert finished.code == 3 and f"got: nothing\n  where: {c.dst}\n" in finished.err
    assert "got: 'none'\n  where: --memory\n" in refused("verify", c.src, "--memory", "none", code=2)


# Against its own sums


def test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    assert "by its own sums, the record of its run: sound" in verify(c, target=False).out
    with contextlib.chdir(c.dst / "rank_1"):
        assert "verified 1 shard" in done("verify", ".", "--jobs", "1").out
    (copied := tmp_path / "copied").mkdir()
    for rank in range(4):
        (copied / f"rank_{rank}").mkdir()
        (copied / f"rank_{rank}" / "shard.h5").write_bytes(c.written(rank).read_bytes())
    alone = ["verify", str(copied), "--jobs", "1"]
    assert "by its own sums: sound" in run_here(*alone).out
    monkeypatch.chdir(copied / "rank_1")
    assert "verified 1 shard, " in run_here("verify", ".", "--jobs", "1").out
    flip(copied / "rank_1" / "shard.h5", "b")
    said = refused(*alone, code=4)
    assert "rank 1: 'b' is damaged" in said and "shard.h5, bytes " in said
    assert said.count("damage: ") == 1  # and not that it differs from its copies as well


def test_alone_ckpt_by_its_record(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--verify", "--crc")
    assert "by its checksum, the record of its run: sound" in verify(c, target=False).out
    flip(c.written(0), "w")
    finished = verify(c, target=False)
    assert finished.code == 4 and "rank 0" in finished.err and "does not fit its own checksum" in finished.err


@few_cases(
    1,
    ("changes", "says"),
    [({"b": None}, "'b' is not what was written"), ({"b": TENSORS["b"][:1]}, "'b'"), ({"x": TENSORS["b"]}, "'x'")],
)
def test_alone_a_shard_of_other_tensors(tmp_path: Path, changes: Arrays, says: str) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--verify")
    arrays = {**expected_rank(c.target, TENSORS, 1), **changes}
    c.written(1).unlink()
    write_shard({name: array for name, array in arrays.items() if array is not None}, c.written(1))
    finished = verify(c, target=False)
    assert finished.code == 4 and finished.err.count("is not what was written") == 1
    assert f"rank 1: {says}" in finished.err
    assert finished.err.count("damage: ") == 2 and "another size" in finished.err


def test_alone_without_sums(c: Conversion) -> None:
    c.done()
    finished = verify(c, target=False)
    assert finished.code == 3 and "no shard keeps sums" in finished.err and "verify SRC DST" in finished.err


def test_alone_where_some_shards_keep_no_sums(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    c.done("transform", "--verify", "--rank", "2")
    c.done("transform", "--resume")
    finished = verify(c, target=False)
    assert finished.code == 0 and "verified 1 shard," in finished.out
    assert "note: 3 of 4 shards keep no sums, that of rank 0 the first" in finished.err


def test_a_checkpoint_that_does_not_fit_its_commit_record(tmp_path: Path) -> None:
    """Sums in the shards that fit, but are those of other bytes."""
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    record = json.loads((c.dst / "reshard.json").read_text())
    record["sums"]["w"] = "00000000"
    (c.dst / "reshard.json").write_text(json.dumps(record))
    finished = verify(c, target=False)
    assert finished.code == 4 and "'w' is not what was committed" in finished.err


def swap(c: Conversion) -> None:
    first, second = c.written(0).read_bytes(), c.written(1).read_bytes()
    for rank, data in enumerate((second, first)):
        c.written(rank).unlink()
        c.written(rank).write_bytes(data)


def reshape(c: Conversion) -> None:
    arrays = expected_rank(c.target, TENSORS, 1)
    c.written(1).unlink()
    write_shard({**arrays, "w": arrays["w"].reshape(2, 8)}, c.written(1))


def change(path: Path, do: Callable[[dict[str, Any]], object]) -> None:
    """Have a record say something else."""
    facts = json.loads(path.read_text())
    do(facts)
    path.write_text(json.dumps(facts))


def record(c: Conversion) -> Path:
    return c.dst / ".reshard_mpi" / "rank_1.json"


def with_sum(c: Conversion, number: int, value: object) -> None:
    change(record(c), lambda facts: facts["sums"][0].__setitem__(number, value))


def with_sums(c: Conversion, value: object) -> None:
    change(c.dst / "reshard.json", lambda facts: facts.update(sums=value))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILS: dict[str, tuple[Callable[[Conversion], object], str]] = {
    "a shard is gone": (lambda c: c.written(1).unlink(), "a shard is missing"),
    "two shards swapped": (swap, "rank 1: 'w' is damaged"),
    "another shape of as many bytes": (reshape, "rank 1: 'w' is not what was written"),
    "something behind it": (lambda c: with_checksum(c.written(1)), "rank 1: a shard has another size"),
    "record cut short": (lambda c: os.truncate(record(c), 99), "rank 1: the record of a shard is damaged"),
    "record is a pipe": (lambda c: pipe(record(c)), "rank 1: the record of a shard is damaged"),
    "no such type": (lambda c: with_sum(c, 1, "float3"), "the record of a shard is damaged"),
    "no number": (lambda c: with_sum(c, 3, ["0", "0"]), "the record of a shard is damaged"),
    "below nothing": (lambda c: with_sum(c, 2, [-4, 4]), "the record of a shard is damaged"),
    "beyond the tensor": (lambda c: with_sum(c, 3, [1000, 0]), "the record of a shard is damaged"),
    "larger than any": (lambda c: with_sum(c, 2, [1 << 80, 4]), "the record of a shard is damaged"),
    "commit record cut short": (lambda c: os.truncate(c.dst / "reshard.json", 99), "the commit record is damaged"),
    "commit record is a pipe": (lambda c: pipe(c.dst / "reshard.json"), "the commit record is damaged"),
    "list of sums": (lambda c: with_sums(c, ["w"]), "the commit record is damaged"),
    "no list of sums": (lambda c: with_sums(c, None), "the commit record is damaged"),
}


@pytest.mark.parametrize("what", few(1, SPOILS))
def test_alone_finds_what_is_not_as_it_was_written(tmp_path: Path, what: str) -> None:
    c = make(tmp_path)
    c.done("transform", "--verify")
    spoil, expected = SPOILS[what]
    spoil(c)
    finished = verify(c, target=False)
    assert finished.code == 4 and expected in finished.err
    if what == "commit record is a pipe":  # only a file is ever replaced
        assert "a pipe is in the place of the commit record" in c.refused("transform", "--verify", "--resume")
        (c.dst / "reshard.json").unlink()
    if "record" in expected:  # which keeps nobody from going on
        c.done("transform", "--verify", "--resume")
        assert verify(c, target=False).code == 0 and sums(c) == WHOLE


def test_alone_in_the_place_of_another_rank(tmp_path: Path) -> None:
    """What a native shard says of itself is known without any record."""
    c = make(tmp_path, "hdf5")
    c.done("transform", "--verify")
    shutil.rmtree(c.dst / ".reshard_mpi")
    (c.dst / "reshard.json").unlink()
    assert verify(c, target=False).code == 0
    swap(c)
    finished = verify(c, target=False)
    assert finished.code == 4 and "rank 1: a shard says it belongs elsewhere" in finished.err


def test_alone_one_of_native_shards_is_missing(tmp_path: Path) -> None:
    """They say how many there are; a file, or the folder of a rank, is asked for by itself."""
    c = four_targets(tmp_path, "hdf5")
    c.done("transform", "--verify")
    shutil.rmtree(c.dst / ".reshard_mpi")
    (c.dst / "reshard.json").unlink()
    for rank in (3, 1):
        shutil.rmtree(c.written(rank).parent)
    finished = verify(c, target=False)
    assert finished.code == 4 and "2 shards are missing, that of rank 1 the first" in finished.err
    for place in (c.written(2), c.written(2).parent):
        assert verify(c.but(dst=place), target=False).code == 0


def test_alone_whose_own_sums_are_damaged(tmp_path: Path) -> None:
    """The record of the run would do, but who has the shard alone would take it for damaged."""
    c = make(tmp_path, "hdf5")
    c.done("transform", "--verify")
    c.written(1).chmod(0o600)
    with h5py.File(c.written(1)) as file:
        at = file["__reshard_mpi__/sums"].id.get_offset()
    flip_bits(c.written(1), at)
    finished = verify(c, target=False)
    assert finished.code == 4 and "rank 1: " in finished.err and "is damaged" in finished.err
    assert finished.err.count("damage: ") == 1


def test_alone_while_another_is_about_to_take_its_place(tmp_path: Path) -> None:
    """A run that is killed before its target has its name has already said what that will hold."""
    c = make(tmp_path)
    c.done("transform", "--verify")
    with_sum(c, 5, "00000000")
    facts = json.loads(record(c).read_text())
    record(c).write_text(json.dumps({"announced": [1, 1], **facts}))
    (c.dst / "reshard.json").unlink()
    finished = verify(c, target=False)
    assert finished.code == 4 and f"{c.written(1)}, of which no run has a record" in finished.err


# The functions


def test_functions(tmp_path: Path) -> None:
    c = four_targets(tmp_path)
    strategies = (c.src_strategy, c.dst_strategy)
    with pytest.raises(SourceError):
        reshard_mpi.verify(c.src, c.dst, *strategies)
    with pytest.raises(UsageError, match="jobs"):
        reshard_mpi.verify(c.src, jobs=0)
    reshard_mpi.transform_checkpoints(c.src, c.dst, "p", *strategies, verify=True, crc=True)
    reshard_mpi.verify(c.src, c.dst, *strategies)
    reshard_mpi.verify(c.dst)
    for rank in (1, 2):
        flip(c.dst / f"rank_{rank}" / f"p{rank}.ckpt", "w")
    for jobs in (1, 2):
        with pytest.raises(DamageError, match=r"target rank 1: 'w' differs .* \(and 1 more found\)"):
            reshard_mpi.verify(c.src, c.dst, *strategies, jobs=jobs)
    with pytest.raises(ShardError, match="its own checksum"):
        reshard_mpi.verify(c.dst)


@pytest.mark.parametrize(
    ("name", "says"), [("nosuch", "the target is not there"), ("empty", "no checkpoint found in the target")]
)
def test_a_target_that_is_not_there_is_called_one(tmp_path: Path, name: str, says: str) -> None:
    c = make(tmp_path)
    (tmp_path / "empty").mkdir()
    for strategies in (["--src-strategy", str(c.src_strategy)], []):
        said = refused("verify", c.src, tmp_path / name, *strategies)
        assert says in said and f"where: {tmp_path / name}" in said
    assert "the source is not there" in refused("verify", tmp_path / "nosuch", c.dst)

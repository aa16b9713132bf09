"""Sources that were made with --verify, and keep sums: held against them before anything is made, whatever is made."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import safetensors_peer
from support.checkpoints import sample
from support.command_line import done, refused
from support.conversions import FOUR_LAYOUTS, Conversion, make, side, transform_by_function
from support.examples import few, few_cases, one_at_a_time
from support.oracle import RawLayout
from support.processes import Finished

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.testing.sample_tensors import ShardContents

FORMS = ("ckpt", "hdf5", "safetensors", "torch", "dcp", "hf")


def verified(folder: Path, form: str) -> Conversion:
    """Make a checkpoint of two shards with --verify, and return the conversion of it to four."""
    c = make(folder)
    options = ["--to", form, "--verify", *(["--max-shard-size", "140"] if form == "hf" else [])]
    made = c.but(dst=folder / "made", dst_strategy=None if form == "hf" else c.dst_strategy)
    made.done("transform", *options)
    states_itself = form in ("hf", "dcp", "hdf5")
    strategy = None if states_itself else c.dst_strategy
    return c.to(side(4, FOUR_LAYOUTS)).but(src=made.dst, src_strategy=strategy, dst=folder / "dst")


def spoil(folder: Path, name: str = "w", rank: int = -1) -> Path:
    """Turn over a bit of a tensor in one of the files that hold it, the last unless another is asked for; return it."""
    found = find_shards(str(folder))
    module = formats.by_name(found.format)
    holders = [path for path in found.shards if name in module.locate(path).tensors]
    entry = module.locate(holders[rank]).tensors[name]
    path = Path(holders[rank])
    place = entry.source.ranges[0] if hasattr(entry.source, "ranges") else entry.source.pieces[0]
    content = bytearray(path.read_bytes())
    content[place.offset_bytes] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    return path


def again(c: Conversion, form: str, *options: str) -> Finished:
    c = c.but(dst_strategy=None) if form == "hf" else c
    return c.run("transform", "--verify", "--to", form, *options)


@pytest.mark.parametrize(("lost", "form"), few(1, itertools.product([".reshard_mpi", "reshard.json", None], FORMS)))
def test_a_damaged_one_is_refused_before_anything_is_written(tmp_path: Path, form: str, lost: str | None) -> None:
    """By the sums that are left, where the records or the commit record are lost. Without --verify it is as it is."""
    c = verified(tmp_path, form)
    spoil(c.src)
    if lost == ".reshard_mpi":
        shutil.rmtree(c.src / lost)
    elif lost is not None:
        (c.src / lost).unlink()
    for to, options in one_at_a_time(("ckpt", "hf", "dcp"), ([], ["--dtype", "fp32"], ["--exclude", "b"])):
        finished = again(c, to, *options)
        assert finished.code == 3 and "'w'" in finished.err, finished
        assert not c.dst.exists()
    if lost == ".reshard_mpi" and form not in ("hdf5", "torch"):  # files have no sums: other tensors are sound
        assert again(c, "ckpt", "--exclude", "*w").code == 0


@pytest.mark.parametrize("form", few(1, FORMS))
def test_tasks_of_an_array(tmp_path: Path, form: str) -> None:
    c = verified(tmp_path, form)
    shutil.rmtree(c.src / ".reshard_mpi")
    spoil(c.src)
    for task in range(4):
        finished = again(c, "torch", "--rank", str(task), "--resume")
        assert finished.code == 3 and "'w'" in finished.err, finished
        assert not list(c.dst.glob(f"rank_{task}/*")), finished


@pytest.mark.parametrize("form", few(1, ["ckpt", "hdf5", "safetensors", "torch"]))
def test_a_damaged_one_is_replaced_by_another_that_holds_the_same(tmp_path: Path, form: str) -> None:
    """Ranks 0 and 1, and ranks 2 and 3, hold the same."""
    made = make(tmp_path).to(side(4, {"w": RawLayout((2, 2), (1, -1)), "b": RawLayout((2, 2), (1,))}))
    made = made.but(dst=tmp_path / "replicated")
    made.done("transform", "--to", form, "--verify")
    path = spoil(made.dst, rank=2)
    back = made.but(src=made.dst, src_strategy=None if form == "hdf5" else made.dst_strategy, dst_strategy=None)
    back = back.but(dst=tmp_path / "whole")
    finished = again(back, form)
    assert finished.code == 0 and f"{path.parent.name}" in finished.err and "cannot be used" in finished.err, finished
    done("verify", back.dst)


HALVES = 'mesh = { d = 2, t = 2 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["t"] }\n'
QUARTERS = 'mesh = { t = 4 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["t"] }\n'


def halves_with_a_text(folder: Path, *options: str) -> Path:
    """Make four shards by these options, two for each half of `w`, all with a text; return their folder."""
    tensor = sample("w", np.arange(16, dtype=np.float32).reshape(4, 4))
    safetensors_peer.write(folder / "m.safetensors", ShardContents.of([tensor], {"rate": "0.125"}))
    (folder / "halves.toml").write_text(HALVES)
    (folder / "quarters.toml").write_text(QUARTERS)
    done("transform", folder / "m.safetensors", folder / "src", "--dst-strategy", folder / "halves.toml", *options)
    return folder / "src"


def turn_over(src: Path, rank: int, old: bytes, new: bytes) -> None:
    path = src / f"rank_{rank}/checkpoint_{rank}.safetensors"
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(("rank", "options"), few(1, one_at_a_time(range(4), [["--verify"], ["--crc"], []])), ids=str)
def test_the_text_of_a_damaged_shard_is_not_taken(tmp_path: Path, rank: int, options: list[str]) -> None:
    """Whichever shards the tensors come from, texts come from shards that are held against their records."""
    src, dst = halves_with_a_text(tmp_path, *options), tmp_path / "dst"
    status = (src / f"rank_{rank}/checkpoint_{rank}.safetensors").stat()
    turn_over(src, rank, b"0.125", b"0.525")
    os.utime(src / f"rank_{rank}/checkpoint_{rank}.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    strategies = ["--src-strategy", tmp_path / "halves.toml", "--dst-strategy", tmp_path / "quarters.toml"]
    done("transform", src, dst, *strategies, "--to", "safetensors", "--verify")
    texts = {safetensors_peer.read(path).strings["rate"] for path in dst.glob("rank_*/*")}
    assert texts == {"0.125"}


def test_a_rank_whose_text_is_taken_is_one_that_is_read(tmp_path: Path) -> None:
    """Its shard is held against its sums, and recorded as a source of the target, as those of the tensors are."""
    src = halves_with_a_text(tmp_path, "--verify")
    for rank in (0, 1, 2):
        turn_over(src, rank, b"rate", b"late")
    planned = reshard_mpi.plan(src, tmp_path / "halves.toml", tmp_path / "quarters.toml").targets
    assert [target.read_ranks for target in planned] == [(0,), (0,), (2, 3), (3,)]


# What is made of one is converted


RENAMED = "[[map]]\neq = 'w [a b] <=> kernel [a b]'\n"
TURNED = "[[map]]\neq = 'w [a b] <=> w [b a]'\n"
WAYS = {
    "another type": ("--dtype", "w=bf16"),
    "another name": ("--map", RENAMED, "--forward"),
    "turned": ("--map", TURNED, "--forward"),
    "chosen": ("--include", "w", "--include", "moments.*"),
}


def options_of(folder: Path, way: str) -> list[str]:
    """Return the options of a way to convert, whose map is written."""
    (folder / "map.toml").write_text(next((text for text in WAYS[way] if "[[map]]" in text), ""))
    return [str(folder / "map.toml") if "[[map]]" in text else text for text in WAYS[way]]


@pytest.mark.parametrize(("form", "way"), few(1, one_at_a_time(FORMS, WAYS)))
def test_what_is_converted_is_no_change_of_the_source(tmp_path: Path, form: str, way: str) -> None:
    c = verified(tmp_path, form)
    finished = again(c, form, *options_of(tmp_path, way))
    assert finished.code == 0 and (c.dst / "reshard.json").exists(), finished
    assert again(c, form, "--resume", *options_of(tmp_path, way)).code == 0
    done("verify", c.dst)


def verify(c: Conversion, *options: str) -> Finished:
    return c.run("verify", *options)


@pytest.mark.parametrize(("kept", "way"), few(1, itertools.product([".reshard_mpi", "reshard.json"], WAYS)))
def test_verify_takes_what_is_recorded(tmp_path: Path, way: str, kept: str) -> None:
    c, options = verified(tmp_path, "ckpt"), options_of(tmp_path, way)
    assert again(c, "safetensors", *options).code == 0
    lost = c.dst / ("reshard.json" if kept == ".reshard_mpi" else ".reshard_mpi")
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    finished = verify(c)
    assert finished.code == 0 and "note: compared with " in finished.err and options[1] in finished.err, finished
    assert verify(c, *options).ended == (0, finished.err.partition("\n")[2])
    for wrong in (["--dtype", "fp16"], ["--exclude", "b"]):
        finished = verify(c, *wrong)
        assert finished.code == 2 and "was made with other options" in finished.err, finished
        assert options[1] in finished.err and "damage" not in finished.err
    if "--map" in options:
        (tmp_path / "map.toml").rename(tmp_path / "moved.toml")
        finished = verify(c)
        assert finished.code == 2 and "whose file is not there" in finished.err, finished
        moved = [text.replace("map.toml", "moved.toml") for text in options]
        assert verify(c, *moved).code == 0
        (tmp_path / "map.toml").write_text(RENAMED.replace("kernel", "other"))
        finished = verify(c)
        assert finished.code == 2 and "was made with other options" in finished.err, finished


@pytest.mark.parametrize(("made", "other"), few(1, [("drop", "replicate"), ("replicate", "drop")]))
def test_verify_takes_what_became_of_unlisted_parameters(c: Conversion, made: str, other: str) -> None:
    c = c.to(side(2, {"w": RawLayout((2,), (0, -1))}))
    c.done("transform", "--unlisted", made)
    finished = verify(c)
    assert finished.code == 0 and f"note: compared with --unlisted {made}" in finished.err, finished
    finished = verify(c, "--unlisted", other)
    assert finished.code == 2 and "was made with other options" in finished.err, finished
    assert f"--unlisted {made}" in finished.err and "damage" not in finished.err


@pytest.mark.parametrize("form", few(1, ["safetensors", "dcp"]))
def test_verify_knows_what_a_strategy_has_left_out(c: Conversion, form: str) -> None:
    """A folder that lists its own pieces does not say which tensors were to be left out: the run's strategy does."""
    c = c.to(side(2, {"w": RawLayout((2,), (0, -1))}))
    c.done("transform", "--to", form, "--unlisted", "drop")
    without = c.but(dst_strategy=None)
    for finished in (verify(c), verify(without), verify(c, "--unlisted", "drop")):
        assert finished.code == 0 and finished.out.startswith("verified "), finished
    shutil.rmtree(c.dst / ".reshard_mpi")
    (c.dst / "reshard.json").unlink()
    finished = verify(c, "--unlisted", "drop")
    assert finished.code == 0, finished
    spoil(c.dst)
    finished = verify(c, "--unlisted", "drop")
    assert finished.code == 4 and "differs from its source" in finished.err, finished


def test_verify_asks_for_the_strategy_that_has_left_tensors_out(c: Conversion) -> None:
    c = c.to(side(2, {"w": RawLayout((2,), (0, -1))}))
    c.done("transform", "--to", "dcp", "--unlisted", "drop")
    assert c.dst_strategy is not None
    c.dst_strategy.rename(c.folder / "moved.ckpt")
    finished = verify(c.but(dst_strategy=None))
    assert finished.code == 2 and "no --dst-strategy, and its file is not there" in finished.err, finished
    assert verify(c.but(dst_strategy=c.folder / "moved.ckpt")).code == 0


def test_verify_finds_the_options_of_a_file_or_a_rank_folder(tmp_path: Path) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    c.done("transform", "--dtype", "w=bf16")
    for named in (c.written(0), c.written(0).parent):
        finished = verify(c.but(dst=named))
        assert finished.code == 0 and "compared with --dtype w=bf16" in finished.err, finished


def test_options_of_a_run_whose_targets_were_replaced_are_not_taken(c: Conversion) -> None:
    """The functions with MindSpore's names keep no record, and remove those of what they replace."""
    c.done("transform", "--dtype", "w=bf16")
    transform_by_function(c)
    finished = verify(c)
    assert finished.code == 0 and "bf16" not in finished.err, finished


def test_damage_of_a_source_is_not_that_of_its_target(tmp_path: Path) -> None:
    c = verified(tmp_path, "ckpt")
    assert again(c, "safetensors").code == 0
    path = spoil(c.src)
    finished = verify(c)
    assert finished.code == 4 and f"in {path}" in finished.err and "no source holds" in finished.err, finished
    assert "differs from its source" not in finished.err


@few_cases(
    1, ("form", "named"), one_at_a_time(["ckpt", "hdf5", "safetensors", "torch"], ["folder", "rank folder", "file"])
)
def test_sums_are_found_whatever_part_of_the_target_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, named: str
) -> None:
    c = make(tmp_path).but(dst=tmp_path / "made", dst_strategy=None)
    c.done("transform", "--to", form, "--verify")
    path = {"folder": c.dst, "rank folder": c.dst / "rank_0", "file": next((c.dst / "rank_0").iterdir())}[named]
    whole = c.but(src=path, src_strategy=None, dst=tmp_path / "dst")
    done("verify", path)
    assert again(whole, "ckpt").code == 0
    shutil.rmtree(whole.dst)
    spoil(c.dst)
    what = "does not fit its own checksum" if form == "torch" else "'w'"
    assert what in refused("verify", path, code=4)
    finished = again(whole, "ckpt")
    assert finished.code == 3 and what in finished.err and not whole.dst.exists(), finished
    if named == "rank folder":
        monkeypatch.chdir(path)
        assert what in refused("verify", ".", code=4)


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "torch"]))
def test_a_run_that_is_not_complete_is_not_sound(tmp_path: Path, form: str) -> None:
    c = make(tmp_path).but(dst=tmp_path / "made")
    c.done("transform", "--to", form, "--verify", "--rank", "0")
    said = refused("verify", c.dst, code=4)
    assert "a shard is missing" in said and "run.json says" in said
    done("verify", c.dst, "--rank", "0")
    begun = (c.dst / ".reshard_mpi" / "run.json").read_bytes()
    (c.dst / ".reshard_mpi" / "run.json").unlink()
    said = refused("verify", c.dst, code=4)
    assert "a shard is missing" in said and "strategy.json says" in said
    (c.dst / ".reshard_mpi" / "run.json").write_bytes(begun)
    c.done("transform", "--to", form, "--verify", "--rank", "1", "--resume")
    done("verify", c.dst)


@pytest.mark.slow
@pytest.mark.parametrize("form", few(1, ["ckpt", "hdf5", "safetensors", "torch"]))
def test_shards_of_two_runs_are_not_sound(tmp_path: Path, form: str) -> None:
    c = make(tmp_path).but(dst=tmp_path / "made")
    options = ("--to", form, "--verify")
    c.done("transform", *options)
    copy = shutil.copytree(c.src, tmp_path / "copy")
    other = c.but(src=copy)
    other.done("transform", *options, "--overwrite", "--rank", "0")
    said = refused("verify", c.dst, code=4)
    assert "rank_1" in said and "of another run" in said

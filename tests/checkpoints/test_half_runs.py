"""Some of a run's targets as a source: what the run has recorded tells that others are missing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.examples import few, few_cases, one_at_a_time

import reshard_mpi
from reshard_mpi.errors import (
    CoverageError,
    DamageError,
    DisagreementError,
    ReshardError,
    SourceError,
    TargetError,
    TransformError,
)
from reshard_mpi.journal.commit import commit
from reshard_mpi.journal.run_status import as_lines, state_of
from reshard_mpi.journal.target_records import TargetRecord

TENSORS = {"w": np.arange(16, dtype=np.float32).reshape(8, 2), "b": np.arange(3, dtype=np.float32)}


def cut(folder: Path, ways: str) -> Path:
    rules = 'split = { 0 = ["a"] }\n' if ways == "cut" else ""
    (folder / "two.toml").write_text(f'mesh = {{ a = 2 }}\n[[parameter]]\nmatch = "w"\n{rules}')
    return folder / "two.toml"


def source(folder: Path) -> Path:
    write_ranks({0: TENSORS}, folder / "src", "safetensors")
    return folder / "src"


@few_cases(
    3,
    ("given", "lost", "form"),
    one_at_a_time(
        ["folder", "rank folder", "file"], ["not made", "lost", "lost, uncommitted"], ["ckpt", "safetensors", "torch"]
    ),
)
def test_one_of_two_slices_is_no_checkpoint(tmp_path: Path, given: str, lost: str, form: str) -> None:
    out = tmp_path / "out"
    ranks = [0] if lost == "not made" else None
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to=form, rank=ranks)
    if ranks is None:
        shutil.rmtree(out / "rank_1")
    if lost == "lost, uncommitted":
        (out / "reshard.json").unlink()
    shard = next(path for path in (out / "rank_0").iterdir() if path.is_file())
    path = {"folder": out, "rank folder": out / "rank_0", "file": shard}[given]
    with pytest.raises((CoverageError, SourceError), match=r"one of the 2 targets|part of 'w' that target rank 0"):
        reshard_mpi.transform(path, tmp_path / "again")
    assert not list((tmp_path / "again").glob("rank_*/*"))


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "torch"]))
def test_one_of_two_replicas_is_a_checkpoint(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "replicas"), to=form)
    reshard_mpi.transform(out / "rank_0", tmp_path / "again", to="safetensors")
    loaded = reshard_mpi.load_rank(0, tmp_path / "again")
    assert all(np.array_equal(loaded[name], array) for name, array in TENSORS.items())


def test_one_of_several_files_of_whole_tensors_is_read_by_itself(tmp_path: Path) -> None:
    reshard_mpi.transform(source(tmp_path), tmp_path / "out", to="hf", max_shard_size=16)
    held: dict[str, np.ndarray] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        reshard_mpi.transform(path, tmp_path / "again" / path.stem, to="safetensors")
        held |= reshard_mpi.load_rank(0, tmp_path / "again" / path.stem)
    assert held.keys() == TENSORS.keys()
    assert all(np.array_equal(held[name], array) for name, array in TENSORS.items())


# One run has begun to replace the targets of another one, or of another state of the source


def full(path: Path, factor: float) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    values = factor * np.arange(64, dtype=np.float32).reshape(8, 8)
    write_ranks({0: dict.fromkeys(("a", "w0", "w1", "w2"), values)}, path, "safetensors")
    return path


def spec(folder: Path) -> Path:
    (folder / "rows.toml").write_text('mesh = { a = 3 }\n[[parameter]]\nmatch = "*"\n')
    return folder / "rows.toml"


@few_cases(
    1,
    ("form", "first", "verify"),
    one_at_a_time(["hf", "hdf5", "dcp", "safetensors"], ["ours", "of others"], [True, False]),
)
def test_half_replaced_targets_are_no_checkpoint(tmp_path: Path, form: str, first: str, verify: bool) -> None:
    out = tmp_path / "out"
    cut: dict[str, Any] = {"max_shard_size": 260} if form == "hf" else {"dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(full(tmp_path / "one", 1), out, to=form, verify=verify, **cut)
    if first == "of others":
        shutil.rmtree(out / ".reshard_mpi")
        (out / "reshard.json").unlink()
    reshard_mpi.transform(full(tmp_path / "two", 2), out, to=form, verify=verify, overwrite=True, rank=[0], **cut)
    strategy = None if form in ("hf", "hdf5", "dcp") else spec(tmp_path)
    with pytest.raises((DisagreementError, SourceError), match=r"several runs|no index"):
        reshard_mpi.transform(out, tmp_path / "again", strategy, verify=verify)
    assert not (tmp_path / "again").exists()
    with pytest.raises((DamageError, SourceError), match=r"several runs|no index|copies of 'a' differ"):
        reshard_mpi.verify(out)
    how = {"resume" if first == "ours" else "overwrite": True}
    reshard_mpi.transform(tmp_path / "two", out, to=form, verify=verify, **how, **cut)
    reshard_mpi.transform(out, tmp_path / "again", strategy, verify=verify, to="safetensors")
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 2 * 63


@pytest.mark.parametrize("form", few(1, ["hf", "hdf5", "safetensors"]))
def test_targets_of_two_states_of_the_source_are_no_checkpoint(tmp_path: Path, form: str) -> None:
    """What `commit` refuses is neither read nor called sound."""
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    cut: dict[str, Any] = {"max_shard_size": 260} if form == "hf" else {"dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(src, out, to=form, verify=True, **cut)
    full(src, 2)
    with contextlib.suppress(ReshardError):
        reshard_mpi.transform(src, out, to=form, verify=True, overwrite=True, rank=[0], **cut)
    with pytest.raises(DisagreementError, match="targets of ranks 0 and 1"):
        commit(out)
    with pytest.raises(DamageError, match=r"targets of ranks 0 and 1|copies of 'a' differ"):
        reshard_mpi.verify(out)
    strategy = spec(tmp_path) if form == "safetensors" else None
    with pytest.raises(DisagreementError, match="targets of ranks 0 and 1"):
        reshard_mpi.transform(out, tmp_path / "again", strategy)


FORMS = ("hf", "hdf5", "dcp", "ckpt", "safetensors", "torch")


def of(form: str, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the options that make three files of a form, and the strategy that reads them."""
    cut: dict[str, Any] = {"max_shard_size": 260} if form == "hf" else {"dst_strategy": spec(folder)}
    return {"to": form, **cut}, None if form in ("hf", "hdf5", "dcp") else spec(folder)


def copy_over(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


# Targets of two runs, or of two states of the source.
MIXED = "files of several runs|targets of ranks 0 and 1"


def refuses(out: Path, strategy: Path | None) -> None:
    """Every way to read the folder is refused, by its own name and by links to its files."""
    links = out.with_name("links")
    links.mkdir()
    for path in out.iterdir():
        if path.name != ".reshard_mpi":
            (links / path.name).symlink_to(path)
    for folder in (out, links):
        with pytest.raises(DisagreementError, match=MIXED):
            reshard_mpi.transform(folder, out.with_name("again"), strategy)
        with pytest.raises(DamageError, match=f"{MIXED}|copies of 'a' differ"):
            reshard_mpi.verify(folder)
        with pytest.raises(DisagreementError, match=MIXED):
            reshard_mpi.load_rank(0, folder, strategy)
        with pytest.raises(DisagreementError, match=MIXED):
            reshard_mpi.diff(folder, folder, strategy, strategy)
    assert not out.with_name("again").exists()


STATES = ("of another run", "of another state of the source")
HALF_RUNS = [
    *((form, STATES[0], "neither") for form in FORMS),
    *itertools.product(("ckpt",), STATES, ("older, newer", "older", "newer")),
    *(("hf", STATES[1], verify) for verify in ("neither", "older, newer", "older", "newer")),
]


@pytest.mark.parametrize(("form", "state", "verify"), few(1, HALF_RUNS))
def test_a_half_finished_run_copied_over_a_committed_one(tmp_path: Path, form: str, state: str, verify: str) -> None:
    """The commit record of the older one stays there."""
    out, new, options, strategy = tmp_path / "out", tmp_path / "new", *of(form, tmp_path)
    names = ("one", "two") if state == "of another run" else ("src", "src")
    reshard_mpi.transform(full(tmp_path / names[0], 1), out, verify="older" in verify, **options)
    reshard_mpi.transform(full(tmp_path / names[1], 2), new, verify="newer" in verify, rank=[0], **options)
    copy_over(new, out)
    facts = state_of(out)
    assert any("targets complete, not committed" in line for line in as_lines(facts))
    assert facts["commit"]["targets"][0]["problem"] and "problem" not in facts["commit"]["targets"][1]
    refuses(out, strategy)


@pytest.mark.parametrize("form", few(1, ["hdf5", "ckpt", "safetensors", "torch"]))
def test_a_run_of_fewer_ranks_copied_over_one_of_more(tmp_path: Path, form: str) -> None:
    for folder, ranks in (("out", 4), ("new", 2)):
        strategy = tmp_path / f"{ranks}.toml"
        strategy.write_text(f'mesh = {{ a = {ranks} }}\n[[parameter]]\nmatch = "*"\nsplit = {{ 0 = ["a"] }}\n')
        source = full(tmp_path / f"src{ranks}", ranks)
        reshard_mpi.transform(source, tmp_path / folder, None, strategy, to=form, verify=True)
    copy_over(tmp_path / "new", tmp_path / "out")
    with pytest.raises(DamageError, match="rank_2"):
        reshard_mpi.verify(tmp_path / "out")


@pytest.mark.parametrize("form", few(1, ["hdf5", "ckpt", "safetensors", "torch"]))
def test_half_replaced_targets_by_a_map_of_files(tmp_path: Path, form: str) -> None:
    out, options, strategy = tmp_path / "out", *of(form, tmp_path)
    reshard_mpi.transform(full(tmp_path / "one", 1), out, **options)
    reshard_mpi.transform(full(tmp_path / "two", 2), out, overwrite=True, rank=[0], **options)
    files = {rank: next(path for path in (out / f"rank_{rank}").iterdir()) for rank in range(3)}
    with pytest.raises(DisagreementError, match="several runs"):
        reshard_mpi.load_rank(0, files, strategy)
    with pytest.raises(DisagreementError, match="several runs"):
        reshard_mpi.transform_checkpoint_by_rank(0, files, str(tmp_path / f"one{files[0].suffix}"), strategy, None)


@pytest.mark.parametrize(("form", "first"), few(1, one_at_a_time(FORMS, ["records", "shards"])))
def test_a_copy_that_stops_half_way_is_not_committed(tmp_path: Path, form: str, first: str) -> None:
    """It keeps the times of files, as `cp -a` and `rsync -a` do."""
    out, new, options, _ = tmp_path / "out", tmp_path / "new", *of(form, tmp_path)
    for folder, source in ((out, full(tmp_path / "one", 1)), (new, full(tmp_path / "two", 2))):
        reshard_mpi.transform(source, folder, **options)
    (out / "reshard.json").unlink()
    if first == "records":
        copy_over(new / ".reshard_mpi", out / ".reshard_mpi")
    else:
        target = json.loads((new / ".reshard_mpi" / "rank_0.json").read_text())["file"]
        shutil.copy2(new / target, out / target)
    with pytest.raises(TransformError, match="targets are not complete: 0"):
        commit(out)
    lies_there = "the target folder has an index" if form in ("hf", "dcp") else "where target rank 0 goes"
    with pytest.raises(TargetError, match=lies_there):
        reshard_mpi.transform(tmp_path / ("two" if first == "records" else "one"), out, resume=True, **options)
    assert not (out / "reshard.json").exists()


def test_targets_of_another_run_without_its_name_are_not_replaced(tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"to": "safetensors", "dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(full(tmp_path / "one", 1), out, rank=[0], **options)
    (out / ".reshard_mpi" / "run.json").unlink()
    before = (out / "rank_0" / "checkpoint_0.safetensors").read_bytes()
    with pytest.raises(TargetError, match="targets of another run"):
        reshard_mpi.transform(full(tmp_path / "two", 2), out, resume=True, **options)
    assert (out / "rank_0" / "checkpoint_0.safetensors").read_bytes() == before
    reshard_mpi.transform(tmp_path / "one", out, resume=True, **options)


def test_a_folder_that_has_lost_its_index_is_not_sound(tmp_path: Path) -> None:
    source, out = full(tmp_path / "one", 1), tmp_path / "out"
    reshard_mpi.transform(source, out, to="hf", max_shard_size=260, verify=True)
    (out / "model.safetensors.index.json").unlink()
    with pytest.raises(DamageError, match="index"):
        reshard_mpi.verify(source, out)
    with pytest.raises(DamageError, match="index"):
        reshard_mpi.verify(out)


@pytest.mark.parametrize("given", few(1, ["folder", "rank folder", "file"]))
@pytest.mark.parametrize("record", ["none", "of an earlier run"])
def test_a_slice_that_is_about_to_be_replaced_is_no_checkpoint(tmp_path: Path, record: str, given: str) -> None:
    """A run that is killed while it replaces the only target there has removed its record, or has left it."""
    out = tmp_path / "out"
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to="safetensors", rank=0)
    if record == "none":
        (out / ".reshard_mpi" / "rank_0.json").unlink()
    else:
        (tmp_path / "other").mkdir()
        write_ranks({0: {**TENSORS, "more": TENSORS["b"]}}, tmp_path / "other" / "src", "safetensors")
        other = tmp_path / "other" / "out"
        strategy = cut(tmp_path, "cut")
        reshard_mpi.transform(tmp_path / "other" / "src", other, None, strategy, to="safetensors", rank=0)
        shutil.copy(other / ".reshard_mpi" / "run.json", out / ".reshard_mpi" / "run.json")
    path = {"folder": out, "rank folder": out / "rank_0", "file": out / "rank_0" / "checkpoint_0.safetensors"}[given]
    refusals = {"none": (SourceError, "one of the 2 targets"), "of an earlier run": (DisagreementError, "several runs")}
    refusal, says = refusals[record]
    with pytest.raises(refusal, match=says):
        reshard_mpi.transform(path, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("run", ["lost", "empty"])
@pytest.mark.parametrize("form", few(1, ["ckpt", "hdf5", "safetensors", "torch"]))
def test_one_slice_whose_run_is_not_recorded_any_more(tmp_path: Path, form: str, run: str) -> None:
    out = tmp_path / "out"
    reshard_mpi.transform(source(tmp_path), out, None, cut(tmp_path, "cut"), to=form, rank=0)
    record = out / ".reshard_mpi" / "run.json"
    record.unlink() if run == "lost" else record.write_bytes(b"")
    if form == "hdf5":  # says itself that it is one of two
        with pytest.raises(CoverageError, match="part of 'w'"):
            reshard_mpi.transform(out, tmp_path / "again")
        return
    with pytest.raises(SourceError, match="the record of its run is lost"):
        reshard_mpi.transform(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    shard = next(path for path in (out / "rank_0").iterdir() if path.is_file())
    shutil.copy2(shard, tmp_path / shard.name)
    reshard_mpi.transform(tmp_path / shard.name, tmp_path / "again")


def test_an_unfinished_run_by_a_strategy_of_fewer_ranks(tmp_path: Path) -> None:
    """As where the strategy file of the last stage is lost, too."""
    out, options, _ = tmp_path / "out", *of("safetensors", tmp_path)
    reshard_mpi.transform(full(tmp_path / "one", 1), out, rank=[0, 1], **options)
    (tmp_path / "two.toml").write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "*"\n')
    with pytest.raises(SourceError, match="another number of targets"):
        reshard_mpi.transform(out, tmp_path / "again", tmp_path / "two.toml")


def test_shards_of_others_where_a_run_of_more_targets_was_given_up(tmp_path: Path) -> None:
    """The functions with MindSpore's names keep no records, and the run has none of these files."""
    out, src, four = tmp_path / "out", full(tmp_path / "one", 1), tmp_path / "four.toml"
    four.write_text('mesh = { a = 4 }\n[[parameter]]\nmatch = "*"\n')
    reshard_mpi.transform(src, out, None, four, rank=[3], to="safetensors")
    shutil.rmtree(out / "rank_3")
    (out / ".reshard_mpi" / "rank_3.json").unlink()
    reshard_mpi.transform_checkpoints(src, out, "checkpoint_", None, spec(tmp_path), output_format="safetensors")
    reshard_mpi.transform(out, tmp_path / "again", spec(tmp_path), to="safetensors")
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 63


@pytest.mark.parametrize(("form", "times"), few(1, one_at_a_time(FORMS, ["kept", "lost"])))
def test_a_target_and_its_record_from_a_backup_of_an_earlier_state(tmp_path: Path, form: str, times: str) -> None:
    """All records are of one run, and the commit is later than all of them.

    times: of the targets that were committed, which earlier versions did not keep.
    """
    options, strategy = of(form, tmp_path)
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    reshard_mpi.transform(src, out, **options)
    backup = Path(shutil.copytree(out, tmp_path / "backup"))
    full(src, 2)
    reshard_mpi.transform(src, out, overwrite=True, **options)
    record = json.loads((out / ".reshard_mpi" / "rank_1.json").read_text())
    for name in (record["file"], ".reshard_mpi/rank_1.json"):
        shutil.copy2(backup / name, out / name)
    if times == "lost":
        (out / ".reshard_mpi" / "committed.json").unlink()
    with pytest.raises(DisagreementError, match="targets of ranks 0 and 1"):
        reshard_mpi.transform(out, tmp_path / "again", strategy)
    with pytest.raises(DamageError, match="targets of ranks 0 and 1"):
        reshard_mpi.verify(out)
    assert times == "lost" or any("earlier one" in line for line in as_lines(state_of(out)))
    shutil.copytree(backup, out, dirs_exist_ok=True)
    reshard_mpi.transform(out, tmp_path / "again", strategy, to="safetensors")
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 63


@few_cases(
    4,
    ("copied", "way", "form"),
    [*itertools.product(["all but the record", "the record"], ["resume", "commit"], FORMS[:1])]
    + [("all but the record", "resume", form) for form in FORMS[1:]],
)
def test_a_copy_over_an_older_folder_that_stopped_at_the_commit_record(
    tmp_path: Path, copied: str, way: str, form: str
) -> None:
    """The commit record is the last of its files, or the first: it is made anew, of the targets that are there.

    Until then none of the two is taken for verified.
    """
    options, strategy = of(form, tmp_path)
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    reshard_mpi.transform(src, out, verify=True, **options)
    older = Path(shutil.copytree(out, tmp_path / "older"))
    older_source = Path(shutil.copytree(src, tmp_path / "older source"))
    full(src, 2)
    reshard_mpi.transform(src, out, verify=True, overwrite=True, **options)
    if copied == "the record":
        shutil.copytree(older_source, src, dirs_exist_ok=True)
    for path in (each for each in out.rglob("*") if each.is_file()):
        if (path.name == "reshard.json") == (copied == "the record"):
            shutil.copy2(path, older / path.relative_to(out))
    with pytest.raises(ReshardError, match="committed with"):
        reshard_mpi.transform(older, tmp_path / "again", strategy, to="safetensors", verify=True)
    if way == "commit":
        commit(older)
    else:
        reshard_mpi.transform(src, older, verify=True, resume=True, **options)
    reshard_mpi.verify(older)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_targets_of_a_later_run_over_an_older_commit_are_committed_anew(tmp_path: Path, form: str) -> None:
    """As in a backup that keeps what is gone: a run with --overwrite was killed when all targets were there."""
    options, strategy = of(form, tmp_path)
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    reshard_mpi.transform(src, out, verify=True, **options)
    backup = Path(shutil.copytree(out, tmp_path / "backup"))
    full(src, 2)
    reshard_mpi.transform(src, out, verify=True, overwrite=True, **options)
    for record in (out / ".reshard_mpi").glob("rank_*.json"):
        for name in (json.loads(record.read_text())["file"], f".reshard_mpi/{record.name}"):
            shutil.copy2(out / name, backup / name)
    reshard_mpi.transform(src, backup, verify=True, resume=True, **options)
    reshard_mpi.transform(backup, tmp_path / "again", strategy, to="safetensors", verify=True)
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 126
    reshard_mpi.verify(backup)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_shard_that_is_older_than_its_record_is_of_another_run(tmp_path: Path, form: str) -> None:
    """A copy of a later state over this one has brought the record, and stopped before the shard. Times are kept."""
    options, strategy = of(form, tmp_path)
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    reshard_mpi.transform(src, out, **options)
    older = Path(shutil.copytree(out, tmp_path / "older"))
    full(src, 2)
    reshard_mpi.transform(src, out, overwrite=True, **options)
    file = json.loads((out / ".reshard_mpi" / "rank_0.json").read_text())["file"]
    shutil.copy2(older / file, out / file)
    an_hour_ago = (out / file).stat().st_mtime_ns - 3600 * 10**9
    os.utime(out / file, ns=(an_hour_ago, an_hour_ago))
    with pytest.raises(DisagreementError, match="older than its record"):
        reshard_mpi.transform(out, tmp_path / "again", strategy, to="safetensors")
    assert any("is older than its record" in line for line in as_lines(state_of(out)))


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_target_that_a_killed_run_was_putting_in_place_over_an_older_commit(tmp_path: Path, form: str) -> None:
    """As above, and killed before the record said that the file is in place: a copy of that says nothing of the file.

    The index of a DCP folder is of the older file, in which other tensors lie at its places.
    """
    out, src = tmp_path / "out", full(tmp_path / "src", 1)
    reshard_mpi.transform(src, out, to=form, verify=True)
    backup = Path(shutil.copytree(out, tmp_path / "backup"))
    shutil.rmtree(src)
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_ranks({0: {name: values + number for number, name in enumerate(("w2", "w1", "w0", "a"))}}, src, "safetensors")
    reshard_mpi.transform(src, out, to=form, verify=True, overwrite=True)
    state = out / ".reshard_mpi"
    record = TargetRecord.read(state, 0)
    assert record is not None
    version = (out / record.file).stat()
    head = record.head._replace(announced=(version.st_ino, version.st_mtime_ns))
    (state / "rank_0.json").write_text(record._replace(head=head).as_text())
    for name in (record.file, ".reshard_mpi/rank_0.json"):
        shutil.copy2(out / name, backup / name)
    with pytest.raises(DisagreementError, match=r"a run that was killed as it replaced them(.|\n)*--overwrite"):
        reshard_mpi.transform(backup, tmp_path / "again", to="safetensors")
    with pytest.raises(TargetError, match="a file that this run has not written"):
        reshard_mpi.transform(src, backup, to=form, verify=True, resume=True)
    reshard_mpi.transform(src, backup, to=form, verify=True, overwrite=True)
    reshard_mpi.transform(backup, tmp_path / "again", to="safetensors", verify=True)
    assert reshard_mpi.load_rank(0, tmp_path / "again")["a"][7, 7] == 66


@pytest.mark.parametrize("form", few(1, ["ckpt", "hdf5", "safetensors", "torch"]))
def test_half_replaced_targets_through_links_to_all_files(tmp_path: Path, form: str) -> None:
    """`cp -rs` makes links to the records too."""
    options, strategy = of(form, tmp_path)
    out, links = tmp_path / "out", tmp_path / "links"
    reshard_mpi.transform(full(tmp_path / "one", 1), out, **options)
    reshard_mpi.transform(full(tmp_path / "two", 2), out, overwrite=True, rank=[0], **options)
    for path in out.rglob("*"):
        link = links / path.relative_to(out)
        if path.is_file():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    with pytest.raises(DisagreementError, match="several runs"):
        reshard_mpi.transform(links, tmp_path / "again", strategy)


@pytest.mark.parametrize("by", few(1, ["commit", "resume"]))
@few_cases(
    1,
    ("state", "refusal"),
    [(1, "committed by another run"), (2, "another file in the place|has not written lies where")],
)
def test_records_of_an_older_run_over_a_newer_one_are_not_committed(
    tmp_path: Path, by: str, state: int, refusal: str
) -> None:
    """A copy without times has begun with the records, and stopped: the files of the newer run have later times.

    Their bytes tell of which run they are, if it was made from another state.
    """
    options, _ = of("safetensors", tmp_path)
    old, new = tmp_path / "old", tmp_path / "new"
    older = full(tmp_path / "one", 1)
    reshard_mpi.transform(older, old, **options)
    reshard_mpi.transform(full(tmp_path / "two", state), new, **options)
    for name in (".reshard_mpi", "rank_0"):
        shutil.copytree(old / name, new / name, dirs_exist_ok=True, copy_function=shutil.copyfile)
    with pytest.raises(ReshardError, match=refusal):
        if by == "commit":
            commit(new)
        else:
            reshard_mpi.transform(older, new, resume=True, **options)

"""Shards that were copied over those of a run without their records: read, with a warning that names them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import as_torch_writes, copied_in_order, flip_bits, sample, write_ranks
from support.command_line import run_here
from support.examples import few, few_cases, one_at_a_time
from support.torch_runs import tree_of

import reshard_mpi
from reshard_mpi.checkpoints import opening
from reshard_mpi.checkpoints.discovery import ShardFiles
from reshard_mpi.errors import DamageError, ReshardError, SourceError, StrategyError, TransformError
from reshard_mpi.journal.record_finder import RunOfFiles

FORMS = ["safetensors", "hdf5", "ckpt", "torch", "dcp", "hf"]
SELF_DESCRIBING = ("hdf5", "dcp", "hf")
# Seconds by which a file is newer than the one in whose place it is put. An older one is refused: test_half_runs.py.
TIMES = {"cp": 60, "cp -p of a later run": 5}


def spec(folder: Path) -> Path:
    (folder / "rows.toml").write_text('mesh = { a = 3 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\n')
    return folder / "rows.toml"


def made(folder: Path, name: str, form: str, factor: float, *, verify: bool = False) -> Path:
    """Make three targets of a form; runs differ in the values of their source alone."""
    values = factor * np.arange(72, dtype=np.float32).reshape(9, 8)
    write_ranks({0: dict.fromkeys(("a", "w0", "w1", "w2"), values)}, folder / f"{name}_src", "safetensors")
    cut: dict[str, Any] = {"max_shard_size": 300} if form == "hf" else {"dst_strategy": spec(folder)}
    reshard_mpi.transform(folder / f"{name}_src", folder / name, to=form, verify=verify, **cut)
    return folder / name


def shards(folder: Path) -> list[Path]:
    """Return the shard files of a target folder, in the order of their ranks."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".reshard_mpi" not in path.parts)
    return sorted(path for path in paths if path.suffix != ".json" and path.name != ".metadata")


def copied_over(tmp_path: Path, form: str, ranks: list[int], how: str = "cp", *, verify: bool = False) -> Path:
    """Return a target folder whose shards of some ranks are those of another run."""
    ours, others = made(tmp_path, "ours", form, 1, verify=verify), made(tmp_path, "others", form, 2, verify=verify)
    for rank in ranks:
        own, other = shards(ours)[rank], shards(others)[rank]
        modified_ns = own.stat().st_mtime_ns + TIMES[how] * 10**9
        shutil.copyfile(other, own)
        os.utime(own, ns=(modified_ns, modified_ns))
    return ours


def strategy_of(form: str, folder: Path) -> Path | None:
    return None if form in SELF_DESCRIBING else spec(folder)


def said(warnings: tuple[str, ...] | list[str], *parts: str) -> bool:
    return any(all(part in warning for part in ("modified after", *parts)) for warning in warnings)


@pytest.mark.parametrize(("form", "how"), few(1, one_at_a_time(FORMS, [*TIMES])))
def test_a_copied_shard_is_named_by_a_warning(tmp_path: Path, form: str, how: str) -> None:
    out = copied_over(tmp_path, form, [1], how)
    strategy = strategy_of(form, tmp_path)
    copied = str(shards(out)[1])
    report = reshard_mpi.transform(out, tmp_path / "again", strategy, to="safetensors")
    assert said(report.warnings, copied)
    assert said(reshard_mpi.diff(out, tmp_path / "again", strategy).warnings, copied)
    with pytest.raises(ReshardError) as refusal:
        reshard_mpi.transform(out, tmp_path / "strictly", strategy, strict=True)
    assert copied in str(refusal.value)
    assert not (tmp_path / "strictly").exists()
    assert "was modified after" in run_here("inspect", str(out)).out


def test_several_copied_shards_are_one_warning(tmp_path: Path) -> None:
    out = copied_over(tmp_path, "hdf5", [0, 2])
    (warning,) = reshard_mpi.transform(out, tmp_path / "again").warnings
    assert said([warning], str(shards(out)[0]), "0, 2")


@pytest.mark.parametrize("form", few(1, ["safetensors", "hf"]))
def test_against_its_source_a_restored_target_is_sound(tmp_path: Path, form: str) -> None:
    out, strategy = made(tmp_path, "ours", form, 1), strategy_of(form, tmp_path)
    shutil.copyfile(shards(made(tmp_path, "same", form, 1))[1], shards(out)[1])
    assert not reshard_mpi.verify(tmp_path / "ours_src", out, None, strategy).warnings
    assert said(reshard_mpi.verify(out, out, strategy, strategy).warnings)


@pytest.mark.parametrize("form", few(1, [form for form in FORMS if form != "dcp"]))  # which reads no links
def test_links_lead_to_a_copied_shard(tmp_path: Path, form: str) -> None:
    out, links = copied_over(tmp_path, form, [1]), tmp_path / "links"
    links.mkdir()
    for path in out.iterdir():
        if path.name != ".reshard_mpi":
            (links / path.name).symlink_to(path)
    assert said(reshard_mpi.transform(links, tmp_path / "again", strategy_of(form, tmp_path)).warnings)


def test_a_shard_that_is_sound_by_its_own_checksum_is_told_to_be_another_one(tmp_path: Path) -> None:
    out = copied_over(tmp_path, "torch", [1])
    for ranks in (None, [1]):
        assert said(reshard_mpi.verify(out, rank=ranks).warnings, str(shards(out)[1]))
    assert not reshard_mpi.verify(out, rank=[0]).warnings


@pytest.mark.parametrize("form", few(1, FORMS))
def test_sums_in_the_record_tell_whether_it_is_another_one(tmp_path: Path, form: str) -> None:
    out = copied_over(tmp_path, form, [1], verify=True)
    with pytest.raises(DamageError, match="is damaged"):
        reshard_mpi.verify(out)
    # The same bytes with another time: a file that was damaged, and restored by a copy.
    shutil.copyfile(shards(made(tmp_path, "same", form, 1, verify=True))[1], shards(out)[1])
    assert not reshard_mpi.verify(out).warnings


@pytest.mark.parametrize(("form", "most_bytes"), few(1, [("dcp", None), ("hf", 300), ("hf", 600)]))
def test_a_checkpoint_in_the_place_of_a_run_is_no_damage_of_it(
    tmp_path: Path, form: str, most_bytes: int | None
) -> None:
    """As when a model that was trained on is saved into its folder; it is damage while a target of the run is left."""
    out, others = made(tmp_path, "ours", form, 1, verify=True), tmp_path / "others"
    values = np.full((9, 8), 7, np.float32)
    write_ranks({0: dict.fromkeys(("a", "w0", "w1", "w2", "x"), values)}, tmp_path / "others_src", "safetensors")
    cut: dict[str, Any] = {"max_shard_size": most_bytes} if form == "hf" else {"dst_strategy": spec(tmp_path)}
    reshard_mpi.transform(tmp_path / "others_src", others, to=form, **cut)
    kept = {path: tmp_path / "kept" / path.relative_to(out) for path in shards(out)}
    for path, elsewhere in kept.items():
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        path.rename(elsewhere)
    for path in others.iterdir():
        if path.is_file() and path.name != "reshard.json":
            shutil.copyfile(path, out / path.name)
    if form == "dcp":
        as_torch_writes(out / ".metadata")
    reshard_mpi.transform(out, tmp_path / "again", to="safetensors", verify=True)
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 7
    with pytest.raises(SourceError, match="no shard keeps sums"):
        reshard_mpi.verify(out)
    place = next(iter(kept))
    kept[place].replace(place)
    with pytest.raises(ReshardError, match=r"not what was committed|is damaged|another size|left from another save"):
        reshard_mpi.verify(out)


def test_a_checkpoint_of_fewer_files_in_the_place_of_a_run_is_no_damage_of_it(tmp_path: Path) -> None:
    """As when one process saves into a DCP folder of several, whose files its index does not name."""
    out, others = made(tmp_path, "ours", "dcp", 1, verify=True), tmp_path / "others"
    values = np.full((9, 8), 7, np.float32)
    write_ranks({0: dict.fromkeys(("a", "w0", "w1", "w2"), values)}, tmp_path / "others_src", "safetensors")
    reshard_mpi.transform(tmp_path / "others_src", others, to="dcp")
    index = (out / ".metadata").read_bytes()
    for path in (others / ".metadata", *shards(others)):
        (out / path.name).unlink()
        shutil.copyfile(path, out / path.name)
    as_torch_writes(out / ".metadata")
    assert len(shards(out)) > len(shards(others)) == 1
    reshard_mpi.transform(out, tmp_path / "again", to="safetensors", verify=True)
    assert reshard_mpi.load_rank(0, tmp_path / "again")["w2"][7, 7] == 7
    with pytest.raises(SourceError, match="no shard keeps sums"):
        reshard_mpi.verify(out)
    (out / ".metadata").write_bytes(index.replace(b"__1_0.distcp", b"__8_0.distcp"))  # damage: no such file is there
    with pytest.raises(DamageError, match="a shard has another size"):
        reshard_mpi.verify(out)


@pytest.mark.parametrize(("form", "first"), few(1, one_at_a_time(FORMS, ["records", "shards", "with times"])))
def test_a_copy_of_the_whole_folder_is_no_doubt(tmp_path: Path, form: str, first: str) -> None:
    out = made(tmp_path, "ours", form, 1)
    if first == "with times":
        shutil.copytree(out, tmp_path / "copy")
    else:
        copied_in_order(out, tmp_path / "copy", first)
    report = reshard_mpi.transform(tmp_path / "copy", tmp_path / "again", strategy_of(form, tmp_path), strict=True)
    assert not report.warnings


def is_refused_by_commit_and_resume(out: Path, src: Path, form: str) -> bool:
    """Tell whether both refuse a folder that `made` has made; a commit that refuses it comes last."""
    cut = ["--max-shard-size", "300"] if form == "hf" else ["--dst-strategy", str(spec(src.parent))]
    resumed = run_here("transform", str(src), str(out), "--to", form, *cut, "--resume", "--jobs", "1")
    return [resumed.code, run_here("commit", str(out)).code] == [3, 4]


@pytest.mark.parametrize(("form", "first"), few(1, one_at_a_time(FORMS, ["records", "shards"])))
def test_a_shard_that_is_put_into_a_copy_without_times(tmp_path: Path, form: str, first: str) -> None:
    ours, others, copy = made(tmp_path, "ours", form, 1), made(tmp_path, "others", form, 2), tmp_path / "copy"
    copied_in_order(ours, copy, first)
    modified_ns = shards(copy)[1].stat().st_mtime_ns + 3600 * 10**9
    shutil.copyfile(shards(others)[1], shards(copy)[1])
    os.utime(shards(copy)[1], ns=(modified_ns, modified_ns))
    report = reshard_mpi.transform(copy, tmp_path / "again", strategy_of(form, tmp_path), to="safetensors")
    assert said(report.warnings, str(shards(copy)[1]))
    assert is_refused_by_commit_and_resume(copy, tmp_path / "ours_src", form)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_copy_without_times_over_a_later_run_that_stops_half_way(tmp_path: Path, form: str) -> None:
    """Both are of one run: the source was saved again in between."""
    old = made(tmp_path, "ours", form, 1).rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "ours_src")
    new = made(tmp_path, "ours", form, 2)
    shutil.copytree(old / ".reshard_mpi", new / ".reshard_mpi", dirs_exist_ok=True, copy_function=shutil.copyfile)
    for path in [shards(old)[0], *(path for path in old.iterdir() if path.is_file() and path not in shards(old))]:
        shutil.copyfile(path, new / path.relative_to(old))
    report = reshard_mpi.transform(new, tmp_path / "again", strategy_of(form, tmp_path), to="safetensors")
    assert said(report.warnings, str(shards(new)[1]), "1, 2")
    assert "was modified after" in run_here("inspect", str(new)).out
    assert is_refused_by_commit_and_resume(new, tmp_path / "ours_src", form)


@few_cases(
    4,
    ("order", "option", "has_times"),
    [(order, "", False) for order in ("by name", "index first", "records and index first", "targets first")]
    + [(order, "--verify", True) for order in ("by name", "index first", "records and index first", "targets first")]
    + [("index first", "--strict", False), ("index first", "", True)],
)
def test_settings_of_one_save_are_not_read_with_tensors_of_another(
    tmp_path: Path, order: str, option: str, has_times: bool
) -> None:
    """A copy over an older one of the same run may stop at any file; DCP has settings in its index alone."""

    def saved(name: str, number: int) -> Path:
        values = np.full((6, 4), number, np.float32)
        tensors = {key: torch_peer.tensor(sample(key, values), key) for key in "ab"}
        torch_peer.save(tmp_path / "x.pt", {"model": tensors, "epoch": number})
        cut = {"dst_strategy": spec(tmp_path), "verify": bool(option)}
        reshard_mpi.transform(tmp_path / "x.pt", tmp_path / name, to="dcp", **cut)
        return tmp_path / name

    older, newer = saved("older", 1), saved("newer", 2)
    first = {"by name": "", "index first": ".metadata", "records and index first": "."}.get(order)
    copied = (path for path in newer.rglob("*") if path.is_file() and path.suffix != ".lock")

    def place(path: Path) -> tuple[bool, Path]:
        if first is None:  # targets and their records: all that a run with --overwrite has written when it is killed
            return not path.name.startswith(("_", "rank_")), path
        return not path.relative_to(newer).parts[0].startswith(first), path

    for path in sorted(copied, key=place):
        mixed, again = tmp_path / "mixed", tmp_path / "again"
        shutil.copytree(older, mixed, copy_function=shutil.copy2 if has_times else shutil.copyfile)
        finished = run_here("transform", mixed, again, "--to", "torch", "--jobs", "1", *option.split())
        if finished.code == 0 and not (said([finished.err], "modified after") and not option):
            values = {float(value) for array in reshard_mpi.load_rank(0, again).values() for value in array.flat}
            assert values == {tree_of(again)["epoch"]}, path
        assert finished.code in (0, 3, 4), finished
        shutil.rmtree(again, ignore_errors=True)
        shutil.rmtree(mixed)
        (shutil.copy2 if has_times else shutil.copyfile)(path, older / path.relative_to(newer))


@pytest.mark.parametrize(("form", "seconds"), few(1, one_at_a_time(FORMS, [-3600, 3600])))
def test_the_same_bytes_with_any_time_are_no_doubt_in_a_copy(tmp_path: Path, form: str, seconds: int) -> None:
    """Neither its files nor their records have the times that they were written with."""
    out = made(tmp_path, "ours", form, 1)
    for path in out.rglob("*"):
        modified_ns = path.stat().st_mtime_ns + seconds * 10**9
        os.utime(path, ns=(modified_ns, modified_ns))
    report = reshard_mpi.transform(out, tmp_path / "again", strategy_of(form, tmp_path), strict=True)
    assert not report.warnings
    said_of_it = run_here("inspect", str(out)).out
    assert ", committed\n" in said_of_it and "modified after" not in said_of_it
    assert run_here("commit", str(out)).code == 0


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_state_that_has_the_same_sample_is_not_taken_for_the_recorded_one(tmp_path: Path, form: str) -> None:
    """Most of it is frozen. The folder is no copy: the record has its time, and the file of the other state has not."""
    out = made(tmp_path, "ours", form, 1)
    os.utime(shards(out)[1], (0, 0))
    report = reshard_mpi.transform(out, tmp_path / "again", strategy_of(form, tmp_path), to="safetensors")
    assert said(report.warnings, str(shards(out)[1]))
    assert is_refused_by_commit_and_resume(out, tmp_path / "ours_src", form)


@pytest.mark.parametrize("form", few(2, ["hf", "dcp"]))
def test_shards_that_are_damaged_together_are_no_other_checkpoint(tmp_path: Path, form: str) -> None:
    """The index is the one that was committed."""
    out = made(tmp_path, "ours", form, 1, verify=True)
    for path in shards(out):
        flip_bits(path, -9)
    with pytest.raises(ReshardError, match="damage"):
        reshard_mpi.verify(out)


@pytest.mark.parametrize(("form", "commit_seconds"), few(2, one_at_a_time(FORMS, [-3600, 0])))
def test_a_committed_archive_is_inspected_as_the_folder_itself(tmp_path: Path, form: str, commit_seconds: int) -> None:
    """Archives have whole seconds; the clock of the host that commits may be slow."""
    out = made(tmp_path, "ours", form, 1)
    for path in out.rglob("*"):
        seconds = path.stat().st_mtime_ns // 10**9 + (commit_seconds if path.name == "reshard.json" else 0)
        os.utime(path, (0, seconds))
    said_of_it = run_here("inspect", str(out)).out
    assert ", committed\n" in said_of_it and "not committed" not in said_of_it and "after the commit" not in said_of_it


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_shard_that_is_replaced_when_records_have_been_looked_at(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes minutes where there are thousands of ranks, and the first look at a shard comes only then."""
    out, others = made(tmp_path, "ours", form, 1), made(tmp_path, "others", form, 2)
    check = opening._run_of

    def then_replaced(files: ShardFiles) -> RunOfFiles | None:
        run = check(files)
        shards(others)[1].replace(shards(out)[1])
        return run

    monkeypatch.setattr(opening, "_run_of", then_replaced)
    with pytest.raises(TransformError, match="sources of target rank 0 were changed"):
        reshard_mpi.transform(out, tmp_path / "again", strategy_of(form, tmp_path), to="safetensors", jobs=1)
    assert not list((tmp_path / "again").glob("rank_*/*"))


def to_cut(folder: Path, rule: str = "*") -> np.ndarray:
    """Write a source, and strategies that cut by a rule along dimension 0 or 1; return the values of `a.w`."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_ranks({0: {"a.w": values, "b.w": -values}}, folder / "src", "safetensors")
    for dim in (0, 1):
        text = f'mesh = {{ t = 2 }}\n[[parameter]]\nmatch = "{rule}"\nsplit = {{ {dim} = ["t"] }}\n'
        (folder / f"{dim}.toml").write_text(text)
    return values


@pytest.mark.parametrize(("kind", "rule"), few(1, one_at_a_time(["safetensors", "torch", "ckpt"], ["*.w", "*"])))
def test_a_strategy_that_the_records_contradict_is_refused(tmp_path: Path, kind: str, rule: str) -> None:
    """Both fit the shards, and no sample can tell."""
    values = to_cut(tmp_path, rule)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "cut", dst_strategy=tmp_path / "0.toml", to=kind)
    with pytest.raises(
        StrategyError, match=r"cuts a tensor otherwise(?s:.*)dimension 0 in 2 parts(?s:.*)got: dimension 1"
    ):
        reshard_mpi.transform(tmp_path / "cut", tmp_path / "out", tmp_path / "1.toml")
    for name, given in (("out", tmp_path / "0.toml"), ("out2", None)):
        reshard_mpi.transform(tmp_path / "cut", tmp_path / name, given, to="safetensors")
        assert np.array_equal(reshard_mpi.load_rank(0, tmp_path / name)["a.w"], values)


def rules(mesh: str, *lines: str) -> str:
    """Return a spec with a rule of each line, which says its names and what is said of them."""
    parts = (line.split(" ", 1) for line in lines)
    return mesh + "".join(f'\n[[parameter]]\nmatch = "{name}"\n{said}\n' for name, said in parts)


TWO, FOUR, STAGES = "mesh = { t = 2 }", "mesh = { d = 2, t = 2 }", "mesh = { t = 2 }\nstages = 2"
COLUMNS, ROWS = 'split = { 1 = ["t"] }', 'split = { 0 = ["t"] }'
IN_STAGES = rules(STAGES, f"a.w {COLUMNS}\nstage = 0", f"b.w {COLUMNS}\nstage = 1")
# By what a run has cut, and what is given; both fit the shards.
OTHERWISE = {
    "sizes of the given": (rules(TWO, f"* {COLUMNS}"), rules(TWO, f'* {ROWS}\nsizes = "ceil"')),
    "sizes of the recorded": (rules(TWO, f'* {COLUMNS}\nsizes = "ceil"'), rules(TWO, f"* {ROWS}")),
    "listed sizes": (rules(TWO, f"* {COLUMNS}"), rules(TWO, f"*.w {ROWS}\nsizes = {{ 0 = [8, 8] }}")),
    "all for one": (rules(TWO, f"a.w {COLUMNS}", f"b.w {COLUMNS}"), rules(TWO, f"* {ROWS}")),
    "one for all": (rules(TWO, f"* {COLUMNS}"), rules(TWO, f"a.w {ROWS}", f"b.w {ROWS}")),
    "order of axes": (rules(FOUR, '*.* split = { 0 = ["d", "t"] }'), rules(FOUR, '* split = { 0 = ["t", "d"] }')),
    "stages for all": (IN_STAGES, rules(STAGES, f"* {ROWS}")),
    "stages as an axis": (IN_STAGES, rules("mesh = { p = 2, t = 2 }", f"* {ROWS}")),
    "not cut": (rules(TWO, f"a.w {ROWS}", "* optimizer = []"), rules(TWO, f"a.w {COLUMNS}")),
    "an optimizer's": (rules(TWO, '*.w optimizer = ["t"]'), rules(TWO, f"* {COLUMNS}")),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_any_strategy_that_cuts_otherwise_than_the_record_is_refused(tmp_path: Path, what: str) -> None:
    values = to_cut(tmp_path)
    for name, text in zip(("recorded", "given"), OTHERWISE[what]):
        (tmp_path / f"{name}.toml").write_text(text)
    reshard_mpi.transform(tmp_path / "src", tmp_path / "cut", dst_strategy=tmp_path / "recorded.toml", verify=True)
    with pytest.raises(StrategyError, match="cuts a tensor otherwise"):
        reshard_mpi.transform(tmp_path / "cut", tmp_path / "out", tmp_path / "given.toml", jobs=1)
    with pytest.raises(StrategyError, match="cuts a tensor otherwise"):
        reshard_mpi.open(tmp_path / "cut", src_strategy=tmp_path / "given.toml")
    assert np.array_equal(reshard_mpi.load_rank(0, tmp_path / "cut", tmp_path / "recorded.toml")["a.w"], values)


@pytest.mark.parametrize("form", few(1, ["safetensors", "ckpt", "torch"]))
def test_files_in_the_places_of_other_ranks_are_refused(tmp_path: Path, form: str) -> None:
    to_cut(tmp_path)
    cut, strategy = tmp_path / "cut", tmp_path / "0.toml"
    reshard_mpi.transform(tmp_path / "src", cut, dst_strategy=strategy, to=form, verify=True)
    files = {int(path.parent.name.removeprefix("rank_")): path for path in sorted(cut.glob("rank_*/*"))}
    for rank, place in files.items():
        link = tmp_path / "links" / place.relative_to(cut)
        link.parent.mkdir(parents=True)
        link.symlink_to(files[1 - rank])
    with pytest.raises(SourceError, match="of another rank than the run"):
        reshard_mpi.transform(tmp_path / "links", tmp_path / "out", strategy)
    out = tmp_path / "by rank" / "rank_0" / files[0].name
    for given in ({0: files[1], 1: files[0]}, {0: files[0], 1: files[0]}):
        with pytest.raises(SourceError, match="of another rank than the run"):
            reshard_mpi.transform_checkpoint_by_rank(0, given, out, strategy, None)
    reshard_mpi.transform_checkpoint_by_rank(0, files, out, strategy, None)


@pytest.mark.parametrize("what", ["not committed", "links to folders", "links to files", "by rank", "one touched"])
def test_a_strategy_is_held_against_the_records_wherever_they_are(tmp_path: Path, what: str) -> None:
    to_cut(tmp_path)
    cut, given = tmp_path / "cut", tmp_path / "given"
    reshard_mpi.transform(tmp_path / "src", cut, dst_strategy=tmp_path / "0.toml")
    files = {int(path.parent.name.removeprefix("rank_")): path for path in sorted(cut.glob("rank_*/*"))}
    if what == "not committed":
        (cut / "reshard.json").unlink()
    if what == "one touched":
        os.utime(files[1])
    for rank, path in files.items():
        if what == "links to files":
            (given / f"rank_{rank}").mkdir(parents=True)
            (given / f"rank_{rank}" / path.name).symlink_to(path)
        elif what == "links to folders":
            given.mkdir(exist_ok=True)
            (given / f"rank_{rank}").symlink_to(path.parent)
    with pytest.raises(StrategyError, match="cuts a tensor otherwise"):
        if what == "by rank":
            out = tmp_path / "out" / "rank_0" / "x0.safetensors"
            reshard_mpi.transform_checkpoint_by_rank(0, files, out, tmp_path / "1.toml", None)
        else:
            reshard_mpi.transform(given if "links" in what else cut, tmp_path / "out", tmp_path / "1.toml", jobs=1)

"""Indexes that a training, or another program, has saved in a target folder: no run takes them for its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import done, refused, run_here
from support.conversions import Conversion, listing, make
from support.examples import few, few_cases

from reshard_mpi import formats
from reshard_mpi.journal import commit
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.runs import transform

SAVED = b"saved later"
# What others save over targets of a form: a file of theirs, which has a target's name or not, and then the index.
SAVES = {
    "dcp": ("__0_0.distcp", ".metadata"),
    "dcp of more ranks": ("__7_0.distcp", ".metadata"),
    "hf": ("model-00001-of-00003.safetensors", "model.safetensors.index.json"),
    "hf of other files": ("model-00001-of-00009.safetensors", "model.safetensors.index.json"),
}
of_all_saves = pytest.mark.parametrize("saved", few(2, SAVES))


def command(c: Conversion, form: str, *options: str) -> list[str]:
    """Return the command that makes targets of a form."""
    if form == "hf":
        return c.but(dst_strategy=None).arguments("transform", "--to", form, "--max-shard-size", "140", *options)
    return c.arguments("transform", "--to", form, *options)


def save(folder: Path, saved: str) -> dict[str, bytes]:
    """Save a checkpoint as somebody else does; return its files, by name."""
    for name in SAVES[saved]:
        (folder / name).write_bytes(SAVED)
    return dict.fromkeys(SAVES[saved], SAVED)


def files(folder: Path) -> dict[str, bytes | None]:
    """Return all files but records and locks."""
    return {name: content for name, content in listing(folder).items() if ".reshard_mpi" not in name}


@of_all_saves
@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors"]))
@pytest.mark.parametrize("is_committed", few(1, [True, False]))
def test_overwriting_in_another_format_leaves_it(c: Conversion, saved: str, form: str, is_committed: bool) -> None:
    done(*command(c, saved.split(maxsplit=1)[0]))
    if not is_committed:
        (c.dst / "reshard.json").unlink()
    save(c.dst, saved)
    before = listing(c.dst)
    said = refused(*command(c, form, "--overwrite"))
    assert SAVES[saved][1] in said and "remove them if nobody needs them" in said
    assert listing(c.dst) == before


@of_all_saves
@pytest.mark.parametrize("way", few(1, ["commit", "resume"]))
@pytest.mark.parametrize("is_committed", few(1, [True, False]))
def test_it_is_not_replaced_by_the_index_of_the_targets(
    tmp_path: Path, saved: str, way: str, is_committed: bool
) -> None:
    c = make(tmp_path)
    form = saved.split(maxsplit=1)[0]
    done(*command(c, form))
    if not is_committed:
        (c.dst / "reshard.json").unlink()
    theirs = save(c.dst, saved)
    finished = run_here(*(("commit", c.dst) if way == "commit" else command(c, form, "--resume")))
    assert finished.code in (3, 4), finished
    assert files(c.dst).items() >= theirs.items()


def after(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, do: Callable[[], object]) -> None:
    """Have something done each time that a function has been called."""
    call = getattr(place, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            do()

    monkeypatch.setattr(place, name, called)


@of_all_saves
@few_cases(
    1,
    ("mode", "moment"),
    [("--resume", "before it is written"), ("--resume", "before the commit"), ("--overwrite", "before the commit")],
)
def test_it_is_saved_while_a_run_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, mode: str, moment: str
) -> None:
    c = make(tmp_path)
    form = saved.split(maxsplit=1)[0]
    if mode == "--resume":
        done(*command(c, form, "--rank", "0"))
    if moment == "before the commit":
        after(monkeypatch, transform, "write_targets", lambda: save(c.dst, saved))
    else:
        after(monkeypatch, Journal, "begin", lambda: save(c.dst, saved))
    finished = run_here(*command(c, form, mode))
    assert finished.code in (3, 4), finished
    assert files(c.dst).items() >= dict.fromkeys(SAVES[saved], SAVED).items()


@pytest.mark.parametrize("form", few(1, ["ckpt", "dcp", "hf"]))
def test_a_target_that_is_replaced_while_a_run_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    c = make(tmp_path)
    done(*command(c.but(dst=tmp_path / "other"), form, "--verify"))  # an earlier save, in a folder of its own
    c.rewrite(0, {"w": c.arrays(0)["w"] + 1})
    target = {"ckpt": "rank_0/checkpoint_0.ckpt", "dcp": "__0_0.distcp", "hf": "model-00001-of-00003.safetensors"}[form]

    def replace() -> None:
        (c.dst / target).unlink()
        shutil.copyfile(tmp_path / "other" / target, c.dst / target)

    after(monkeypatch, commit, "_require_alike", replace)
    assert "target rank 0 as this run has made it" in refused(*command(c, form, "--replicas", "any"), code=4)
    assert not (c.dst / "reshard.json").exists()
    assert (c.dst / target).read_bytes() == (tmp_path / "other" / target).read_bytes()


@pytest.mark.parametrize("form", few(1, ["dcp", "hf"]))
def test_an_index_without_its_commit_record_is_the_runs_own(c: Conversion, form: str) -> None:
    """A process that commits may be killed in between."""
    done(*command(c, form))
    made = files(c.dst)
    for way in (("commit", str(c.dst)), command(c, form, "--resume")):
        (c.dst / "reshard.json").unlink()
        done(*way)
        assert files(c.dst) == made
    (c.dst / "reshard.json").unlink()
    done(*command(c, "ckpt", "--overwrite"))
    assert not (c.dst / str(formats.index_of(form))).exists()


def test_a_file_that_needs_no_index_is_committed_once(tmp_path: Path) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    c.done("transform", "--to", "hf")
    record = c.dst / "reshard.json"
    made = record.stat().st_mtime_ns
    done("commit", c.dst)
    c.done("transform", "--to", "hf", "--resume")
    assert record.stat().st_mtime_ns == made

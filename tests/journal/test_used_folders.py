"""Target folders in which something lies already: what others have put there changes only where --overwrite names it.

States of a folder are drawn: what runs have left in it, what of that was lost or copied, and what others have saved
there. After a run that ends well, there is one checkpoint, the one that was asked for, and no other.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.command_line import done, run_here
from support.conversions import Conversion, listing, make
from support.examples import few
from support.kills import instants, killed_before

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.journal.record_files import STATE, recorded_ranks

FORMS = ("ckpt", "hdf5", "safetensors", "torch", "dcp", "hf")
FOREIGN = b"nobody's but their own: "
# Names that others may have given to their files, besides those of targets.
STRANGE = (
    "rank_0/other.pt",
    "rank_1/net-3_9.ckpt",
    "rank_7/checkpoint_7.safetensors",
    ".metadata",
    "__9_0.distcp",
    "model.safetensors.index.json",
    "model.safetensors",
    "model-00009-of-00009.safetensors",
    "param_name_map.json",
    "reshard.json",
)
HARMLESS = ("README.md", "config.json", "rank_0/train.log", "logs/rank_0.txt")


def test_an_index_that_somebody_has_saved_in_the_place_of_ours_stays(tmp_path: Path) -> None:
    c = make(tmp_path)
    c.but(dst_strategy=None).done("transform", "--to", "dcp")
    index = c.dst / ".metadata"
    index.write_bytes(FOREIGN)
    said = c.but(dst_strategy=None).refused("transform", "--to", "torch", "--overwrite")
    assert ".metadata" in said and index.read_bytes() == FOREIGN
    assert not (c.dst / "rank_0").exists()


@dataclass(frozen=True)
class Folder:
    """A target folder, with the files that others have put there."""

    path: Path
    foreign: dict[str, bytes]

    def put(self, name: str, draw: random.Random) -> None:
        """Have somebody else write a file, in place of whatever is there."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.foreign[name] = FOREIGN + draw.randbytes(draw.randint(0, 40))
        path.write_bytes(self.foreign[name])


def command(c: Conversion, form: str, dst: Path, *options: str) -> list[str]:
    """Return the command that makes targets of a form."""
    cut = {"hf": ["--max-shard-size", "140"]}.get(form, [])
    there = c.but(dst=dst, dst_strategy=None) if form == "hf" else c.but(dst=dst)
    return there.arguments("transform", "--to", form, *cut, *options)


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion with what undisturbed runs make of it, by the name of the form."""
    c = make(tmp_path_factory.mktemp("used"))
    for form in FORMS:
        done(*command(c, form, c.folder / form))
    return c


def made_by(c: Conversion, form: str) -> dict[str, bytes | None]:
    """Return the files that an undisturbed run makes, besides its records."""
    return {
        name: content for name, content in listing(c.folder / form).items() if content and ".reshard_mpi" not in name
    }


def drawn_folder(c: Conversion, form: str, path: Path, draw: random.Random) -> tuple[Folder, bool, bool]:
    """Return a folder in a drawn state, whether its records are of the run itself, and whether they are of another."""
    folder, state = Folder(path, {}), path / ".reshard_mpi"
    base = draw.choice(("nothing", "empty", "own", "own", "part", "part", "failed overwrite", "other", "other prefix"))
    if base == "empty":
        path.mkdir()
    elif base in ("own", "failed overwrite"):
        shutil.copytree(c.folder / form, path, copy_function=draw.choice((shutil.copy, shutil.copy2)))
    elif base == "part":
        done(*command(c, form, path, "--rank", "1"))
    elif base == "other":
        shutil.copytree(c.folder / draw.choice([other for other in FORMS if other != form]), path)
    elif base == "other prefix" and form not in ("hf", "dcp"):
        done(*command(c, form, path, "--prefix", "net_"))
    if base == "failed overwrite":  # killed between the record's removal and the name
        for lost in ("reshard.json", formats.index_of(form)):
            if lost is not None:
                (path / lost).unlink(missing_ok=True)
        target = min(name for name in made_by(c, form) if formats.name_of(name))
        status = (path / target).lstat()
        (state / "rank_0.json").unlink()
        (state / "rank_0.lock").write_text(f"replaces {status.st_size} bytes of {status.st_mtime_ns}\n")
    loses_records = state.exists() and draw.random() < 0.2
    if loses_records:
        shutil.rmtree(state)
        folder.foreign.update({name: text for name, text in listing(path).items() if text is not None})
    elif draw.random() < 0.3 and base in ("own", "part"):  # a target is lost
        lost = [name for name in made_by(c, form) if formats.name_of(name) and (path / name).exists()]
        (path / draw.choice(lost)).unlink()
    is_own = base in ("own", "part", "failed overwrite") and not loses_records
    return folder, is_own, state.exists() and not is_own


# Those whose files lie in rank folders differ in names alone; an index makes further states.
DRAWS = [(form, number) for number in range(40) for form in FORMS if number < 10 or formats.index_of(form) is not None]


@pytest.mark.parametrize(("form", "number"), few(len(FORMS), DRAWS))
def test_drawn_folders(conversion: Conversion, tmp_path: Path, form: str, number: int) -> None:
    c, draw = conversion, random.Random(f"{form}/{number}")
    folder, is_own, is_others = drawn_folder(c, form, tmp_path / "dst", draw)
    made = made_by(c, form)
    for name in draw.sample([*STRANGE, *made, *made], draw.choice((0, 0, 1, 1, 2))):
        folder.put(name, draw)
    for name in draw.sample(HARMLESS, draw.randint(0, 2)):
        folder.put(name, draw)
    mode = draw.choice(((), ("--resume",), ("--resume",), ("--overwrite",)))
    before = listing(folder.path)
    finished = run_here(*command(c, form, folder.path, *mode))
    after = listing(folder.path)
    assert finished.code in (0, 3), finished
    if finished.code == 3:
        assert after == before
        assert "--overwrite" in mode or "--overwrite" not in finished.err or is_own or is_others
    named = {*made, "reshard.json"} if "--overwrite" in mode else set()
    named |= {formats.index_of(form)} if "--overwrite" in mode else set()
    if is_own:  # what says what lies in the folder is written anew, an index where all targets are in place
        named |= {"reshard.json"}
        targets = [name for name in made if formats.name_of(name)]
        are_in_place = all(before.get(name) == made[name] for name in targets)
        is_recorded = len(recorded_ranks(folder.path / STATE)) == len(targets)
        named |= {formats.index_of(form)} if are_in_place and is_recorded else set()
    for name, content in folder.foreign.items():
        assert name in named or after.get(name) == content, (name, mode)
    if finished.code == 0:
        assert {name: after.get(name) for name in made} == made
        found = find_shards(str(folder.path))
        read = {os.path.relpath(path, folder.path) for paths in found.by_rank.values() for path in paths}
        assert read == {name for name in made if name != "reshard.json"} and not found.notes
        done("inspect", folder.path)
    if set(folder.foreign) <= set(HARMLESS):
        goes_on = mode == ("--resume",) if is_own else not is_others
        assert finished.code == 0 or not (goes_on or mode == ("--overwrite",)), finished


@pytest.mark.parametrize("form", few(1, FORMS))
def test_array_tasks_one_after_another(conversion: Conversion, tmp_path: Path, form: str) -> None:
    c, dst = conversion, tmp_path / "dst"
    dst.mkdir()
    tasks = 3 if form == "hf" else 2
    for _ in range(2):
        for task in range(tasks):
            done(*command(c, form, dst, "--part", f"{task}/{tasks}", "--resume"))
    assert {name: listing(dst)[name] for name in made_by(c, form)} == made_by(c, form)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "before", "step"),  # all states that the folder is in, or every so many of them
    [
        ("ckpt", "another", 1),
        ("hf", "another", 3),
        ("dcp", "another", 3),
        ("ckpt", "nothing", 3),
        ("hf", "the same", 3),
    ],
)
def test_a_kill_at_any_instant(conversion: Conversion, tmp_path: Path, form: str, before: str, step: int) -> None:
    """What was there is overwritten. A run that had begun is resumed; one that had not leaves the folder to another."""
    c = conversion

    def folder(name: str) -> Path:
        dst = tmp_path / name
        if before != "nothing":
            earlier = form if before == "the same" else {"hf": "ckpt"}.get(form, "hf")
            shutil.copytree(c.folder / earlier, dst, copy_function=shutil.copy2)
        return dst

    dst = folder("undisturbed")
    numbers = instants(command(c, form, dst, "--overwrite"), dst)
    assert len(numbers) > 30
    for number in [*numbers[::step], 0]:
        dst = folder(f"dst{number}")
        assert killed_before(command(c, form, dst, "--overwrite"), dst, number) == (number > 0)
        finished = run_here(*command(c, form, dst, "--resume"))
        if finished.code == 3 and before == "another":
            assert "another run" in finished.err or "earlier" in finished.err, (number, finished)
            finished = run_here(*command(c, form, dst, "--overwrite"))
        assert finished.code == 0, (number, finished)
        lying = {name: text for name, text in listing(dst).items() if text is not None and STATE not in name}
        assert lying == made_by(c, form), number
        shutil.rmtree(dst)


@pytest.mark.parametrize("earlier", few(2, ["dcp", "hf", "ckpt", "torch"]))
@pytest.mark.parametrize("which", few(1, ["one", "all"]))
@pytest.mark.parametrize("times", few(1, [True, False]))
def test_overwriting_in_another_format_leaves_shards_that_were_saved_since_and_their_index(
    conversion: Conversion, tmp_path: Path, earlier: str, which: str, times: bool
) -> None:
    """They are told by their times alone: all pages of them that are looked at are as they were written."""
    dst, copy = tmp_path / "dst", shutil.copy2 if times else shutil.copyfile
    shutil.copytree(conversion.folder / earlier, dst, copy_function=copy)
    shards = [dst / name for name in sorted(made_by(conversion, earlier)) if formats.name_of(name)]
    for shard in shards if which == "all" else shards[1:2]:
        shard.write_bytes(shard.read_bytes())
    before = listing(dst)
    finished = run_here(*command(conversion, "safetensors", dst, "--overwrite"))
    assert finished.code == 3 and "files that are no part of the checkpoint" in finished.err, finished
    assert listing(dst) == before


@pytest.mark.parametrize("earlier", few(1, FORMS))
@pytest.mark.parametrize("form", few(2, FORMS))
def test_overwriting_leaves_one_checkpoint(conversion: Conversion, tmp_path: Path, form: str, earlier: str) -> None:
    dst = tmp_path / "dst"
    shutil.copytree(conversion.folder / earlier, dst, copy_function=shutil.copy2)
    done(*command(conversion, form, dst, "--overwrite"))
    lying = {name for name, content in listing(dst).items() if content is not None and ".reshard_mpi" not in name}
    assert lying == made_by(conversion, form).keys()
    assert find_shards(str(dst)).format == form


@pytest.mark.slow
@pytest.mark.parametrize("option", few(1, ["", "--verify"]))
def test_a_slice_that_a_killed_run_left_is_no_checkpoint(tmp_path: Path, option: str) -> None:
    """One target takes the place of the first of two; until then that lies there, the second is gone."""
    options = option.split()
    olds, news = (np.full((8, 4), value, np.float32) for value in (1, 2))
    (tmp_path / "rows.toml").write_text('mesh = { t = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["t"] }\n')
    for name, values in (("old", olds), ("new", news)):
        write_ranks({0: {"w": values}}, tmp_path / name, "safetensors")
    done("transform", tmp_path / "old", tmp_path / "of two", "--dst-strategy", tmp_path / "rows.toml", *options)
    dst = tmp_path / "undisturbed"
    arguments = lambda: ("transform", str(tmp_path / "new"), str(dst), "--overwrite", "--jobs", "1", *options)  # noqa: E731
    shutil.copytree(tmp_path / "of two", dst, copy_function=shutil.copy2)
    numbers = instants(arguments(), dst)
    assert len(numbers) > 10
    read = []
    for number in numbers:
        dst = tmp_path / f"dst{number}"
        shutil.copytree(tmp_path / "of two", dst, copy_function=shutil.copy2)
        assert killed_before(arguments(), dst, number)
        if run_here("transform", dst, tmp_path / f"read{number}", "--verify").code == 0:
            read.append(reshard_mpi.load_rank(0, tmp_path / f"read{number}")["w"])
        # A copy without times, in which the shard is newer than the record of the run.
        copy = tmp_path / f"copy{number}"
        shutil.copytree(dst, copy, copy_function=shutil.copyfile)
        for path in copy.rglob("*.json"):
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9,) * 2)
        partials = [*copy.glob("rank_0/.*.partial")]
        if run_here("transform", copy, tmp_path / f"reread{number}", "--verify").code == 0 and partials:
            read.append(reshard_mpi.load_rank(0, tmp_path / f"reread{number}")["w"])
    assert all(np.array_equal(values, olds) or np.array_equal(values, news) for values in read)
    assert len(read) < len(numbers)

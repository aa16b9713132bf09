"""The stories of launch/tutorial: what each says it has proved, that it can fail, and the script that runs them all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import Finished, run_command

TUTORIAL = Path(__file__).parents[2] / "launch" / "tutorial"
STORIES = sorted(path.parent for path in TUTORIAL.glob("[0-9]*_*/run.sh"))
SCRIPTS = sorted(TUTORIAL.rglob("*.sh"))

# All stories run one after another, which takes minutes.
TIMEOUT_SECONDS = 1500


def needed_by(story: Path) -> list[str]:
    """Return the frameworks that a story says it needs; none, if it says nothing."""
    lines = (story / "run.sh").read_text().splitlines()
    return [name for line in lines if line.startswith("# needs: ") for name in line.removeprefix("# needs: ").split()]


def marked(value: Any, frameworks: list[str]) -> Any:
    """Return a parameter whose tests need these frameworks."""
    return pytest.param(value, marks=[getattr(pytest.mark, name) for name in frameworks])


def environment() -> dict[str, str]:
    """Return the environment in which scripts find `python` and `reshard-mpi` of these tests' environment."""
    return {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}


class Run(NamedTuple):
    """What run_all.sh printed, and the folder of what the stories wrote."""

    finished: Finished
    folder: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stories")
    command = ["bash", str(TUTORIAL / "run_all.sh"), str(folder)]
    return Run(run_command(command, env=environment(), timeout_seconds=TIMEOUT_SECONDS), folder)


@pytest.mark.xdist_group("stories")
@pytest.mark.parametrize("story", [marked(path, needed_by(path)) for path in STORIES], ids=lambda path: path.name)
def test_a_story_is_proved(run: Run, story: Path) -> None:
    log = run.folder / f"{story.name}.log"
    assert log.exists(), run.finished
    closing = [line for line in log.read_text().splitlines() if line.startswith("proved: ")]
    assert len(closing) == 1 and closing[0] in run.finished.out.splitlines(), run.finished


# A file of losses that a story compares, and what its prove.py is told.
LOSSES = {
    "4_precision": ("mixed/losses_resumed.json", ["fp16", "fp32", "mixed"]),
    "5_migration": ("notes/mindspore_1.json", []),
    "6_fsdp": ("losses_2.json", []),
}


@pytest.mark.xdist_group("stories")
@pytest.mark.parametrize("name", [marked(name, needed_by(TUTORIAL / name)) for name in LOSSES])
def test_a_story_with_another_loss_is_not_proved(run: Run, tmp_path: Path, name: str) -> None:
    path, arguments = LOSSES[name]
    work = tmp_path / name
    shutil.copytree(run.folder / name, work)
    losses = json.loads((work / path).read_text())
    losses[-1] += 0.01
    (work / path).write_text(json.dumps(losses))
    import_path = os.pathsep.join(filter(None, [str(TUTORIAL), os.environ.get("PYTHONPATH")]))
    finished = run_command(
        [sys.executable, str(TUTORIAL / name / "prove.py"), *arguments], env={"PYTHONPATH": import_path}, cwd=work
    )
    assert finished.code == 1 and "proved" not in finished.out, finished
    assert "Traceback" not in finished.err, finished


def made_up_stories(folder: Path, scripts: dict[str, str]) -> Path:
    """Write stories with these scripts, and run_all.sh beside them; return its path."""
    for name, script in scripts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "run.sh").write_text(f"#!/bin/bash\n{script}\n")
    return Path(shutil.copy(TUTORIAL / "run_all.sh", folder))


def test_what_is_proved_is_printed_and_frameworks_that_are_missing_are_named(tmp_path: Path) -> None:
    scripts = {
        "1_plain": "echo noise >&2\necho 'proved: it' ; mkdir $1",
        "2_elsewhere": "# needs: json no_such_framework\necho 'proved: nothing'",
        "3_both": "# needs: json\necho 'proved: that'; echo a warning at the end",
    }
    run_all = made_up_stories(tmp_path / "stories", scripts)
    finished = run_command(["bash", str(run_all), str(tmp_path / "work")], env=environment())
    expected = "proved: it\nskipped: 2_elsewhere needs no_such_framework\nproved: that\n"
    assert (finished.code, finished.out, finished.err) == (0, expected, "")
    assert (tmp_path / "work" / "1_plain").is_dir()
    assert (tmp_path / "work" / "1_plain.log").read_text() == "noise\nproved: it\n"


@pytest.mark.parametrize("script", ["echo 'proved: it'; exit 3", "echo it is proved: so", "exit 1"])
def test_a_story_that_proves_nothing_fails(tmp_path: Path, script: str) -> None:
    scripts = {"1_wrong": f"echo something\n{script}", "2_right": "echo 'proved: it'"}
    finished = run_command(["bash", str(made_up_stories(tmp_path / "stories", scripts))], env=environment())
    assert finished.code == 1 and "something" in finished.err, finished
    assert finished.out.splitlines()[0].startswith("not proved: 1_wrong"), finished
    assert finished.out.splitlines()[1:] == ["proved: it"], finished


@pytest.mark.parametrize("name", [path.name for path in STORIES])
def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("kept")
    finished = run_command(["bash", str(TUTORIAL / name / "run.sh"), str(tmp_path)], env=environment())
    assert finished.code == 2 and "is not empty" in finished.err, finished
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_there_is_a_page_for_each_story() -> None:
    assert STORIES
    for story in STORIES:
        assert f"launch/tutorial/{story.name}/run.sh" in (story / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(TUTORIAL)))
def test_scripts_are_sound(script: Path) -> None:
    run_command(["bash", "-n", str(script)], check=True)
    assert max(len(line) for line in script.read_text().splitlines()) <= 120
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    run_command(["shellcheck", "--external-sources", str(script)], check=True)

"""The stories of launch/tutorial: what each says it has proved, that it can fail, and the script that runs them all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_command

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "launch" / "tutorial"
STORIES = sorted(path.parent for path in TUTORIAL.glob("[0-9]*_*/run.sh"))
# The first tells a part without MindSpore as well, in test_stories.py.
NEEDED = {"1_eight_to_four": ["mindspore"]}
SCRIPTS = sorted(TUTORIAL.rglob("*.sh"))

# A minute or so, on a machine that does nothing else.
TIMEOUT_SECONDS = 600

# What a story says besides.
SAYS = {
    "3_accumulation": (
        "with one rank's sums for all: losses ",
        "the 18 later losses are those of the unbroken run, to the bit",
        "note: accumulated gradients grad_sum.*: the mean of 4 replicas",
        "note: accumulated gradients accu_grads.*: the sum of 4 replicas",
    ),
}

# A file of losses that a story compares, and what its prove.py is told.
LOSSES = {
    "3_accumulation": ("adding_2.json", []),
    "4_precision": ("mixed/losses_resumed.json", ["fp16", "fp32", "mixed"]),
    "5_migration": ("notes/mindspore_1.json", []),
    "6_fsdp": ("losses_2.json", []),
    "7_load_through": ("losses_through.json", []),
    "8_deepspeed": ("losses_torch.json", []),
    "9_megatron": ("losses_one.json", []),
}


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


@pytest.mark.parametrize("story", [marked(path.name, NEEDED.get(path.name) or needed_by(path)) for path in STORIES])
def test_a_story_is_proved_unless_a_loss_is_another(tmp_path: Path, story: str) -> None:
    command = ["bash", str(TUTORIAL / "run_all.sh"), str(tmp_path), story]
    finished = run_command(command, env=environment(), timeout_seconds=TIMEOUT_SECONDS)
    assert finished.code == 0, finished
    assert len(finished.out.splitlines()) == 1 and finished.out.startswith("proved: "), finished
    log = (tmp_path / f"{story}.log").read_text()
    assert [text for text in SAYS.get(story, ()) if text not in log] == []
    if story not in LOSSES:
        return
    path, arguments = LOSSES[story]
    work = tmp_path / story
    losses = json.loads((work / path).read_text())
    losses[-1] += 0.01
    (work / path).write_text(json.dumps(losses))
    import_path = os.pathsep.join(filter(None, [str(TUTORIAL), os.environ.get("PYTHONPATH")]))
    prove = [sys.executable, str(TUTORIAL / story / "prove.py"), *arguments]
    finished = run_command(prove, env={"PYTHONPATH": import_path}, cwd=work)
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


def test_stories_that_are_named_are_run(tmp_path: Path) -> None:
    stories = made_up_stories(tmp_path / "stories", {f"{number}_it": f"echo proved: {number}" for number in (1, 2, 3)})
    command = ["bash", str(stories), str(tmp_path / "work")]
    assert run_command([*command, "3_it", "1_it"], env=environment(), check=True).out == "proved: 3\nproved: 1\n"
    refused = run_command([*command, "4_it"], env=environment())
    assert refused.ended == (2, "run_all.sh: there is no story 4_it\n")


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

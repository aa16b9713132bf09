"""The scripts in launch/: sound as text, and doing what they say where no cluster is."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from support.conversions import Conversion, make, shards
from support.launch import MPI
from support.processes import Finished, run_command
from support.slurm_jobs import LAUNCH, operands
from support.stand_ins import refusing

pytestmark = pytest.mark.slow

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
NAMES = [script.name for script in SCRIPTS]


def with_programs(folder: Path | None = None) -> dict[str, str]:
    """Return the environment in which scripts find the programs of `folder`, and those of these tests' environment."""
    folders = [str(folder)] if folder is not None else []
    return {"PATH": os.pathsep.join([*folders, sysconfig.get_path("scripts"), os.environ["PATH"]])}


def make_program(folder: Path, name: str, text: str) -> None:
    """Put a shell script called `name` into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def recording(folder: Path, name: str, answer: str = "", then: str = "") -> Callable[[], list[str]]:
    """Put a program into `folder` that only notes its arguments; return a function that reads them.

    answer: what it says when asked for its version. then: what else it does.
    """
    note = folder / f"{name}.arguments"
    version = f'if [ "$1" = --version ]; then echo "{answer}"; exit; fi\n' if answer else ""
    make_program(folder, name, f"{version}printf '%s\\n' \"$@\" >'{note}'\n{then}")
    return lambda: note.read_text().splitlines()


def launch(script: str, *arguments: str, env: dict[str, str], cwd: Path) -> Finished:
    return run_command(["bash", str(LAUNCH / script), *arguments], env=env, cwd=cwd)


def slowed(folder: Path, variable: str, when: str) -> Path:
    """Write what a script reads first: unless all is to be `at once`, it waits before it sets a variable to `$!`."""
    slow = folder / "slow"
    waits = f"trap 'case $BASH_COMMAND in {variable}=*!) sleep 0.3 ;; esac' DEBUG\n"
    slow.write_text("" if when == "at once" else waits)
    return slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion and, as its target, what one process alone makes of it."""
    c = make(tmp_path_factory.mktemp("reference"))
    finished = run_command(["reshard-mpi", *c.arguments()], env=with_programs(), check=True)
    assert "wrote 2 shards" in finished.out
    return c


def test_there_are_scripts() -> None:
    assert NAMES == ["local.sh", "mpirun.sh", "slurm_array.sbatch", "slurm_mpi.sbatch"]


@pytest.mark.parametrize("name", NAMES)
def test_syntax(name: str) -> None:
    run_command(["bash", "-n", str(LAUNCH / name)], check=True)
    text = (LAUNCH / name).read_text()
    assert text.startswith("#!/bin/bash\n") and "\t" not in text
    assert max(len(line) for line in text.splitlines()) <= 120
    if name.endswith(".sh"):
        assert os.access(LAUNCH / name, os.X_OK)


@pytest.mark.parametrize("name", NAMES)
def test_shellcheck(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    run_command(["shellcheck", str(LAUNCH / name)], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_usage(name: str, tmp_path: Path) -> None:
    record = recording(tmp_path, "reshard-mpi")
    finished = launch(name, "SRC", env=with_programs(tmp_path), cwd=tmp_path)
    assert finished.code == 2 and finished.err.startswith("usage: "), finished
    with pytest.raises(FileNotFoundError):
        record()


# Batch scripts, without a cluster


@pytest.mark.parametrize("name", ["slurm_array.sbatch", "slurm_mpi.sbatch"])
def test_directives_come_before_commands(name: str) -> None:
    lines = (LAUNCH / name).read_text().splitlines()
    directives = [at for at, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert [lines[at] for at in directives] == [
        "#SBATCH --job-name=reshard",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    first_command = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives[-1] < first_command  # sbatch reads no further


def test_an_array_task(tmp_path: Path) -> None:
    record = recording(tmp_path, "reshard-mpi")
    env = {**with_programs(tmp_path), "SLURM_ARRAY_TASK_ID": "3"}
    options = ["--dst-strategy", "with blank", "--unlisted", "drop"]
    assert launch("slurm_array.sbatch", "8", "SRC", "DST", *options, env=env, cwd=tmp_path).code == 0
    assert record() == ["transform", "--part", "3/8", "--resume", "--jobs", "1", "SRC", "DST", *options]
    env["SLURM_CPUS_PER_TASK"] = "2"
    assert launch("slurm_array.sbatch", "8", "SRC", "DST", env=env, cwd=tmp_path).code == 0
    assert record() == ["transform", "--part", "3/8", "--resume", "--jobs", "2", "SRC", "DST"]


def test_a_script_that_is_no_array_task(tmp_path: Path) -> None:
    recording(tmp_path, "reshard-mpi")
    finished = launch("slurm_array.sbatch", "8", "SRC", "DST", env=with_programs(tmp_path), cwd=tmp_path)
    assert finished.code == 2 and "--array=0-N" in finished.err, finished


def test_array_tasks_write_what_one_process_writes(reference: Conversion, tmp_path: Path) -> None:
    c = reference.but(dst=tmp_path)
    for task in ("1", "0", "1"):  # again: it is complete, and stays
        env = {**with_programs(), "SLURM_ARRAY_TASK_ID": task}
        finished = launch("slurm_array.sbatch", "2", *operands(c), env=env, cwd=tmp_path)
        assert finished.code == 0, finished
    assert shards(tmp_path) == shards(reference.dst)


def test_an_array_task_that_is_not_one_of_the_parts(reference: Conversion, tmp_path: Path) -> None:
    env = {**with_programs(), "SLURM_ARRAY_TASK_ID": "2"}
    finished = launch("slurm_array.sbatch", "2", *operands(reference.but(dst=tmp_path)), env=env, cwd=tmp_path)
    assert finished.code == 2 and "I from 0 to N-1, or auto/N, got '2/2'" in finished.err, finished
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plugin", ["", "pmi2"])
def test_ranks_under_srun(tmp_path: Path, plugin: str) -> None:
    record = recording(tmp_path, "srun")
    env = with_programs(tmp_path) | ({"SLURM_MPI_TYPE": plugin} if plugin else {})
    assert launch("slurm_mpi.sbatch", "SRC", "DST", "--to", "hdf5", env=env, cwd=tmp_path).code == 0
    expected = ["-K", "reshard-mpi", "transform", "--resume", "SRC", "DST", "--to", "hdf5"]
    assert record() == [f"--mpi={plugin or 'pmix'}", *expected]


def test_the_end_of_srun_is_that_of_the_script(tmp_path: Path) -> None:
    make_program(tmp_path, "srun", "sleep 0.1; exit 4")
    assert launch("slurm_mpi.sbatch", "SRC", "DST", env=with_programs(tmp_path), cwd=tmp_path).code == 4


@pytest.mark.parametrize("when", ["at once", "before the step is known"])
def test_what_the_batch_script_alone_is_sent_reaches_the_ranks(tmp_path: Path, when: str) -> None:
    told = tmp_path / "scancel.arguments"
    recording(tmp_path, "scancel", then="while :; do sleep 0.05; done")  # it may try again and again
    # Until the ranks are told; should they never be, it ends like one that has done its work.
    wait = f"for _ in {{1..600}}; do if [ -e '{told}' ]; then exit 143; fi; sleep 0.05; done"
    make_program(tmp_path, "srun", f'kill -TERM "$PPID"\n{wait}')
    env = {**with_programs(tmp_path), "SLURM_JOB_ID": "17", "BASH_ENV": str(slowed(tmp_path, "step", when))}
    finished = launch("slurm_mpi.sbatch", "SRC", "DST", env=env, cwd=tmp_path)
    assert finished.code == 143, finished
    assert told.read_text().splitlines() == ["--signal=TERM", "17"]


# Without a cluster


def test_local_processes(reference: Conversion, tmp_path: Path) -> None:
    c = reference.but(dst=tmp_path / "dst")
    finished = launch("local.sh", *operands(c), "--jobs", "2", env=with_programs(), cwd=tmp_path)
    assert finished.code == 0 and "wrote 2 shards" in finished.out, finished
    finished = launch("local.sh", *operands(c), env=with_programs(), cwd=tmp_path)
    assert finished.code == 0 and "2 were complete" in finished.out, finished
    assert shards(c.dst) == shards(reference.dst)


def mpirun_of(mpi: MPI, folder: Path) -> dict[str, str]:
    """Return the environment in which `mpirun` is that of `mpi`, as a user has it who has no other."""
    folder.mkdir()
    make_program(folder, "mpirun", f'exec "{mpi.launcher}" "$@"')
    # Whether root may start ranks, and how many, is the script's business.
    kept = {name: value for name, value in mpi.environment.items() if not name.startswith("OMPI_ALLOW_")}
    return {**with_programs(folder), **kept}


def test_mpirun(reference: Conversion, tmp_path: Path, mpi: MPI) -> None:
    c = reference.but(dst=tmp_path / "dst")
    env = mpirun_of(mpi, tmp_path / "bin")
    ranks = 2 * (os.cpu_count() or 1) + 1
    finished = launch("mpirun.sh", str(ranks), *operands(c), env=env, cwd=tmp_path)
    assert finished.code == 0, finished
    assert "wrote 2 shards" in finished.out and f"is under {tmp_path}/log_output/" in finished.err, finished
    assert shards(c.dst) == shards(reference.dst)
    logs = logs_by_rank(tmp_path)
    assert "wrote 2 shards" in logs["rank.0"]
    assert sum(text.count("target ") for text in logs.values()) == 2
    assert len(logs) > 1  # each target's rank says in its own file that it made it


def test_mpirun_that_fails(reference: Conversion, tmp_path: Path, mpi: MPI) -> None:
    c = reference.but(dst=tmp_path / "dst")
    env = mpirun_of(mpi, tmp_path / "bin")
    finished = launch("mpirun.sh", "2", *operands(c), env={**env, **refusing(tmp_path)}, cwd=tmp_path)
    assert finished.code == 4, finished
    assert f"mpirun.sh: exit code 4; what every rank said is under {tmp_path}/log_output/" in finished.err
    assert "1 of 2 targets failed" in finished.out and "1 of 2 targets failed" in logs_by_rank(tmp_path)["rank.0"]
    finished = launch("mpirun.sh", "2", *operands(c), env=env, cwd=tmp_path)
    assert finished.code == 0 and "1 was complete" in finished.out, finished
    assert shards(c.dst) == shards(reference.dst)
    assert len(list((tmp_path / "log_output").iterdir())) == 2  # of either run


def logs_by_rank(folder: Path) -> dict[str, str]:
    """Return what is in the logs of every rank that said something, by the name of its file or folder."""
    logs: dict[str, str] = {}
    for file in (folder / "log_output").rglob("*"):
        if file.is_file():
            name = file.parent.name if file.name.startswith("std") else file.stem
            logs[name] = logs.get(name, "") + file.read_text()
    return logs


@pytest.mark.parametrize("when", ["at once", "before the job is known"])
def test_a_signal_reaches_mpirun(tmp_path: Path, when: str) -> None:
    """The script stays until mpirun has ended, however long that takes."""
    make_program(
        tmp_path,
        "mpirun",
        'if [ "$1" = --version ]; then echo HYDRA; exit; fi\n'
        "trap 'sleep 0.3; echo cleaned up; exit 143' TERM\nkill -TERM \"$PPID\"\nwhile :; do sleep 0.05; done",
    )
    env = {**with_programs(tmp_path), "BASH_ENV": str(slowed(tmp_path, "job", when))}
    finished = launch("mpirun.sh", "2", "SRC", "DST", env=env, cwd=tmp_path)
    assert finished.code == 143 and "cleaned up" in finished.out, finished


OPTIONS = {
    "mpirun (Open MPI) 4.1.4": ["--output-filename", "{logs}", "--merge-stderr-to-stdout"],
    "mpirun (Open MPI) 5.0.7": ["--output", "dir={logs},merge"],
}


@pytest.mark.parametrize("version", OPTIONS)
def test_options_of_open_mpi(tmp_path: Path, version: str) -> None:
    record = recording(tmp_path, "mpirun", version)
    env = {**with_programs(tmp_path), "RESHARD_MPI_MEMORY": "1G", "MPIRUN": "mpirun --hostfile hosts"}
    finished = launch("mpirun.sh", "7", "SRC", "DST", "--to", "hdf5", env=env, cwd=tmp_path)
    assert finished.code == 0, finished
    (logs,) = (tmp_path / "log_output").iterdir()
    output = [option.format(logs=logs) for option in OPTIONS[version]]
    arguments = record()
    assert "RESHARD_MPI_MEMORY" in arguments  # ranks on other hosts see it too
    at = arguments.index("-n")
    assert arguments[:4] == ["--hostfile", "hosts", "--oversubscribe", "--bind-to"]
    assert arguments[5 : 5 + len(output)] == output
    assert arguments[at:] == [
        "-n",
        "7",
        "reshard-mpi",
        "transform",
        "--resume",
        "--verbose",
        "SRC",
        "DST",
        "--to",
        "hdf5",
    ]


def test_an_mpirun_that_nobody_knows(tmp_path: Path) -> None:
    recording(tmp_path, "mpirun", "Some Other MPI 1.0")
    finished = launch("mpirun.sh", "2", "SRC", "DST", env=with_programs(tmp_path), cwd=tmp_path)
    assert finished.code == 2 and "neither Open MPI nor MPICH" in finished.err, finished
    assert not (tmp_path / "log_output").exists()


def test_no_mpirun(tmp_path: Path) -> None:
    env = {**with_programs(), "MPIRUN": str(tmp_path / "absent")}
    finished = launch("mpirun.sh", "2", "SRC", "DST", env=env, cwd=tmp_path)
    assert finished.code == 2 and "neither Open MPI nor MPICH" in finished.err, finished

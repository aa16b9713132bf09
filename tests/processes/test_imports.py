"""Nothing is ever imported from the working folder, where a checkpoint of anybody's may lie.

The folder of a checkpoint is filled with decoys: a file for every module that any code here could ask for. Each leaves
its name behind when it is run. Commands and functions are started there.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import h5py
import pytest
from support.conversions import Conversion, make, of_every_kind
from support.launch import MPI, mpirun_command
from support.processes import Finished, run_command

import reshard_mpi
from reshard_mpi.processes import imports

SCRIPT = Path(sys.executable).with_name("reshard-mpi")
_IMPORTED = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
# What is run from a folder of decoys is this package, by its name.
OURS = "reshard_mpi"
NAMES = ("src", "dst", "src_strategy", "dst_strategy")
_TAKEN_BY_PYTHON: set[str] = set()  # from the working folder, as the first folder of decoys has shown


@functools.cache
def decoy_names() -> list[str]:
    """Return the names of all modules that this package, or what it needs, might ask for."""
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}
    for package in (OURS, "h5py", "ml_dtypes", "mpi4py", "numpy", "psutil", "zlib_ng", "google"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            for file in Path(folder).rglob("*.py"):
                names.update(_IMPORTED.findall(file.read_text(errors="replace")))
    return sorted(names - {OURS})


class Decoys:
    """A folder with decoys, and the names of those that were run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marks = folder.with_name(f"{folder.name}.marks")
        for name in (name for name in decoy_names() if name not in _TAKEN_BY_PYTHON):
            text = f"with open({str(self._marks)!r}, 'a') as marks:\n    marks.write({name!r} + '\\n')\n"
            (folder / f"{name}.py").write_text(text)
        # What Python itself takes from there, for `python -m` or (since 3.13) `python -c`, no module could prevent. It
        # is found one by one, so it is kept for the next folder.
        (folder / "empty_program.py").write_text("")
        for program in (["-m", "empty_program"], ["-c", "pass"]):
            while run_command([sys.executable, *program], cwd=folder).code or self.run_names():
                for name in self.run_names():
                    (folder / f"{name}.py").unlink()
                    _TAKEN_BY_PYTHON.add(name)
                self._marks.unlink()

    def run_names(self) -> list[str]:
        return sorted(set(self._marks.read_text().split())) if self._marks.exists() else []

    def run(self, *argv: str | Path, code: int = 0, env: dict[str, str] | None = None) -> Finished:
        """Run a command in the folder: it ends with `code`, and no decoy has been run."""
        finished = run_command(argv, cwd=self.folder, env=env)
        assert finished.code == code and "Traceback" not in finished.err, finished
        assert self.run_names() == [], finished
        return finished


def conversion_here(folder: Path, kind: str) -> tuple[Conversion, Decoys]:
    """Make a conversion in a folder of decoys; its HDF5 shards are of another program, compressed."""
    folder.mkdir(parents=True)
    conversion = make(folder, kind)
    for path in conversion.src.rglob("*.h5"):
        with h5py.File(path, "r+") as file:
            whole = file["w"][()]
            del file["w"]
            file.create_dataset("w", data=whole, compression="gzip")
    return conversion, Decoys(folder)


def arguments(command: str, conversion: Conversion, *options: str) -> list[str]:
    """Return a command line with relative paths, from the folder of the conversion."""
    folder = f"{conversion.folder}{os.sep}"
    return [argument.replace(folder, "") for argument in conversion.arguments(command, *options)]


@pytest.mark.slow
def test_the_decoys_are_run_by_python_itself(tmp_path: Path) -> None:
    """Otherwise nothing here would prove anything."""
    decoys = Decoys(tmp_path)
    assert {"psutil", "resource", "numpy", "json", "h5py", "google", "__future__"} < set(decoy_names())
    program = "import psutil, resource, google, logging, __future__"
    run_command([sys.executable, "-c", program], cwd=tmp_path)
    assert decoys.run_names() == ["__future__", "google", "logging", "psutil", "resource"]


@pytest.mark.slow
def test_inspecting_a_foreign_shard(tmp_path: Path) -> None:
    conversion, decoys = conversion_here(tmp_path / "here", "hdf5")
    shard = str(conversion.shard(0).relative_to(conversion.folder))
    for command in ([sys.executable, "-m", OURS], [SCRIPT]):
        assert "hdf5 shard" in decoys.run(*command, "inspect", shard).out
    program = f"import reshard_mpi; print(reshard_mpi.inspect({shard!r})['kind'])"
    assert decoys.run(sys.executable, "-c", program).out == "shard\n"


@pytest.mark.slow
def test_every_command(tmp_path: Path) -> None:
    """Of HDF5, for which all is loaded that any other format needs."""
    conversion, decoys = conversion_here(tmp_path / "here", "hdf5")
    strategies = ["--src-strategy", "src_strategy/strategy_0.ckpt", "--dst-strategy", "dst_strategy/strategy_0.ckpt"]
    command = [sys.executable, "-m", OURS]
    for number, options in enumerate((["--jobs", "1"], ["--jobs", "2", "--verify"], ["--jobs", "3", "--to", "ckpt"])):
        again = conversion.but(dst=conversion.folder / f"dst_{number}")
        decoys.run(*command, *arguments("transform", again, *options, "--report", f"report_{number}"))
    done = ["src", "dst_0", *strategies]
    for ended in (
        arguments("plan", conversion, "--replicas", "check"),
        arguments("plan", conversion, "--sbatch"),
        ["verify", *done],
        ["verify", *done, "--jobs", "2"],
        ["verify", "dst_1"],
        ["commit", "dst_0"],
        ["ranks", "0", *strategies],
        ["merge-strategies", "src_strategy", "merged.ckpt"],
        ["governor"],
        ["inspect", "src"],
        ["inspect", "dst_1"],
        ["inspect", "src_strategy/strategy_0.ckpt"],
        ["demo", "demo"],
    ):
        decoys.run(*command, *ended)
    decoys.run(*command, "inspect", "nothing", code=3)
    decoys.run(*command, "transform", code=2)


FUNCTIONS = """
import reshard_mpi, sys
strategies = "src_strategy/strategy_0.ckpt", "dst_strategy/strategy_0.ckpt"
ending = sys.argv[1]
reshard_mpi.merge_pipeline_strategys("src_strategy", "merged.ckpt")
assert reshard_mpi.rank_list_for_transform(0, *strategies) == [0, 1]
for number, jobs in enumerate((1, 2, 2)):
    reshard_mpi.transform_checkpoints(
        "src", f"dst_{number}", "checkpoint_", *strategies, process_num=jobs, output_format=("ckpt", "hdf5")[number % 2]
    )
    if number == 0:
        # A thread, so that local processes must be started from a fresh interpreter.
        import _thread
        locked = _thread.allocate_lock()
        locked.acquire()
        _thread.start_new_thread(locked.acquire, ())
        assert "psutil" not in sys.modules or "site-packages" in sys.modules["psutil"].__file__
files = {rank: f"src/rank_{rank}/checkpoint_{rank}.{ending}" for rank in range(4)}
reshard_mpi.transform_checkpoint_by_rank(0, files, f"alone.{ending}", *strategies)
assert len(reshard_mpi.plan("src", *strategies).targets) == 2
reshard_mpi.verify("src", "dst_0", *strategies, jobs=2)
assert reshard_mpi.load_rank(1, "src", *strategies)["b"].shape == (8,)
assert reshard_mpi.inspect("src")["ranks"] == 4
try:
    reshard_mpi.plan("nothing")
except reshard_mpi.ReshardError as error:
    print("refused", type(error).__name__)
"""


@pytest.mark.slow
@of_every_kind
def test_every_function(tmp_path: Path, kind: str) -> None:
    conversion, decoys = conversion_here(tmp_path / "here", kind)
    ending = conversion.shard(0).suffix[1:]
    assert decoys.run(sys.executable, "-c", FUNCTIONS, ending).out == "refused SourceError\n"


@pytest.mark.slow
def test_ranks_of_a_job(tmp_path: Path, mpi: MPI) -> None:
    conversion, decoys = conversion_here(tmp_path / "here", "hdf5")
    decoys.run(*mpirun_command(mpi, 2, [str(SCRIPT), *arguments("transform", conversion)]))


# What a caller imports itself


def program_in(folder: Path, name: str, text: str) -> Finished:
    (folder / name).write_text(text)
    return run_command([sys.executable, name], cwd=folder)


def test_callers_import_their_own_modules(tmp_path: Path) -> None:
    """Also those called like modules of the library, before and after, and in what is called back."""
    (tmp_path / "statistics.py").write_text("whose = 'mine'\n")
    (tmp_path / "profile.py").write_text("whose = 'mine'\n")
    (tmp_path / "my_handler.py").write_text(
        "import logging\n"
        "class Handler(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        import profile\n"
        "        print(profile.whose)\n"
    )
    program = (
        "import logging, reshard_mpi\n"
        "from reshard_mpi.runs.progress import log\n"
        "from my_handler import Handler\n"
        "logging.getLogger('reshard_mpi').addHandler(Handler())\n"
        "log((), ['something'])\n"
        "import statistics\n"
        "print(statistics.whose)\n"
    )
    finished = program_in(tmp_path, "program.py", program)
    assert (finished.code, finished.out) == (0, "mine\nmine\n"), finished


def test_a_module_that_only_the_working_folder_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_somebody.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    ours = {"__name__": "reshard_mpi.somewhere"}
    with pytest.raises(ModuleNotFoundError, match="working folder"):
        exec("import module_of_somebody", ours)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'module_of_nobody'$"):
        exec("import module_of_nobody", ours)
    exec("import module_of_somebody", {"__name__": "__main__"})
    del sys.modules["module_of_somebody"]


def test_which_folders_are_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    entries = ["", ".", "sub", str(here), str(tmp_path / "link"), str(there), str(tmp_path / "nothing")]
    monkeypatch.setattr(sys, "path", entries)
    assert imports.import_environment() == {"PYTHONPATH": f"{there}:{tmp_path / 'nothing'}"}
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path / 'link'}")  # the user's word; what is left empty is none
    assert imports.import_environment() == {"PYTHONPATH": f"{tmp_path / 'link'}:{there}:{tmp_path / 'nothing'}"}
    monkeypatch.chdir(there)
    assert str(there) not in imports.import_environment()["PYTHONPATH"].split(":")


def test_an_installation_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target` puts what this package needs beside it; a checkout holds nothing that it needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(imports, "_HOME", str(tmp_path))
    monkeypatch.setattr(imports, "_divided", (None, ([], [])))
    assert imports.import_environment() == {"PYTHONPATH": ""}
    (tmp_path / f"reshard_mpi-{reshard_mpi.__version__}.dist-info").mkdir()
    monkeypatch.setattr(imports, "_divided", (None, ([], [])))
    assert imports.import_environment() == {"PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    program = "import os; os.rmdir(os.getcwd()); import reshard_mpi.api; from reshard_mpi.processes import imports; "
    program += "print(imports.import_environment()['PYTHONPATH'] != '')"
    (tmp_path / "gone").mkdir()
    finished = run_command([sys.executable, "-c", program], cwd=tmp_path / "gone")
    assert (finished.code, finished.out) == (0, "True\n"), finished


@pytest.mark.slow
def test_a_checkout_as_the_working_folder(tmp_path: Path) -> None:
    """A fresh interpreter has this package from there, and nothing else."""
    (tmp_path / OURS).symlink_to(Path(reshard_mpi.__file__).parent)
    decoys = Decoys(tmp_path)
    start = (
        "import sys\n"
        "sys.path.insert(0, '')\n"
        "from reshard_mpi import api\nfrom reshard_mpi.processes import imports\n"
        "program = 'from reshard_mpi import api; import psutil; print(api.__file__, psutil.__file__)'\n"
        "del sys.path[0]\n"
        "import os, subprocess\n"
        "sys.path.insert(0, '')\n"
        "environment = {**os.environ, **imports.import_environment()}\n"
        "subprocess.run(imports.fresh_interpreter(program), env=environment, check=True)\n"
    )
    ours, theirs = decoys.run(sys.executable, "-P", "-c", start).out.split()
    assert ours == str(tmp_path / OURS / "api" / "__init__.py") and not theirs.startswith(str(tmp_path))

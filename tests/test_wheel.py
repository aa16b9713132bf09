"""What users install: the wheel that is built from the source archive, alone, under every Python that is there."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import run_command

import reshard_mpi

pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[1]
# Interpreters besides the one that runs the tests, as a path list.
PYTHONS = [sys.executable, *filter(None, os.environ.get("RESHARD_MPI_TEST_PYTHONS", "").split(os.pathsep))]


class Built(NamedTuple):
    archive: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source archive, and the wheel that is made of what is in it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    run_command(command, timeout_seconds=300, check=True, env=NETWORK)
    return Built(next(folder.glob("*.tar.gz")), next(folder.glob("*.whl")))


# How the tests' own environment reaches its package index; tests otherwise run in a clean one.
NETWORK = {
    name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower().endswith("_proxy")
}


@pytest.mark.slow
def test_what_is_in_them(built: Built) -> None:
    with tarfile.open(built.archive) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "setup.cfg"} <= packed
    assert {"tests/test_wheel.py", "benchmarks/RESULTS.md", "launch/tutorial/run_all.sh"} <= packed
    assert not any("__pycache__" in name or name.startswith((".venv", ".git/", "dist")) for name in packed)
    with zipfile.ZipFile(built.wheel) as wheel:
        installed = {name for name in wheel.namelist() if name.startswith("reshard_mpi/")}
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    lying = {str(path.relative_to(ROOT)) for path in (ROOT / "reshard_mpi").rglob("*") if path.is_file()}
    assert installed == {name for name in lying if "__pycache__" not in name}
    assert {
        "reshard_mpi/guide/maps.md",
        "reshard_mpi/mapping/maps/torch-mindspore.toml",
        "reshard_mpi/py.typed",
    } < lying
    assert f"\nVersion: {reshard_mpi.__version__}\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_installed_alone_it_works(built: Built, tmp_path: Path, python: str) -> None:
    # Without a pip of its own, which takes longer to be installed than the wheel with all that it needs.
    run_command([python, "-m", "venv", "--without-pip", str(tmp_path / "venv")], timeout_seconds=120, check=True)
    programs = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python")]
    install = [*pip, "install", "--quiet", "--no-compile", str(built.wheel)]
    run_command(install, timeout_seconds=600, check=True, env=NETWORK)
    command = str(programs / "reshard-mpi")

    def said(*arguments: str) -> str:
        return run_command([command, *arguments], cwd=tmp_path, check=True, timeout_seconds=120).out

    assert said("--version") == f"reshard-mpi {reshard_mpi.__version__}\n"
    assert "slices are bit-exact" in said("demo", "demo")
    assert "torch-mindspore" in said("help", "maps") and "maps" in said("help")
    assert "8 ranks" in said("inspect", "demo/src") and "[mesh]" in said("inspect", "demo/src_strategy.ckpt", "--toml")
    for form in ("hdf5", "torch"):  # what is installed is all that lies in the folder, by the test above
        said("transform", "demo/src", form, "--to", form, "--src-strategy", "demo/src_strategy.ckpt", "--verify")
    assert ": the same" in said("diff", "hdf5", "torch")


def test_version_and_notes_agree() -> None:
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [
        reshard_mpi.__version__
    ]
    headings = re.findall(r"^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == reshard_mpi.__version__ and len(set(headings)) == len(headings)

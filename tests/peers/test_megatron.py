"""Checkpoints exchanged with Megatron-Core: it saves what we read, loads what we write in any layout, and trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard_mpi

# One process has all of them, since Megatron-Core is imported once.
pytestmark = [pytest.mark.megatron, pytest.mark.xdist_group("megatron")]

SCRIPT = Path(__file__).parent.parent / "support" / "megatron_ranks.py"
STEPS = 3
FOLDER = f"iter_{STEPS:07d}"
# The layout in which a training was saved, and others in which it goes on.
SOURCES: dict[str, dict[str, int]] = {
    "dense": {"tp": 2, "pp": 2},
    "experts": {"ep": 2, "experts": 4},
    "all experts": {"experts": 4},
    "dense apart": {"tp": 2, "pp": 2, "apart": True},
    "experts apart": {"ep": 2, "experts": 4, "apart": True},
}
CASES = [
    ("dense", {"tp": 1, "pp": 1}),
    ("dense", {"tp": 4, "pp": 1}),
    ("dense", {"tp": 1, "pp": 4}),
    ("experts", {"ep": 2, "pp": 2, "experts": 4}),
    ("experts", {"ep": 4, "experts": 4}),
    ("experts", {"experts": 4, "pp": 2}),
    ("all experts", {"ep": 2, "experts": 4}),
    ("dense apart", {"tp": 1, "pp": 1}),
    ("experts apart", {"ep": 2, "experts": 4}),
]


class Megatron:
    """The process that has Megatron-Core, and the folder for what comes of its tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = folder / "errors.txt"
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout

    def do(self, name: str, **task: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Do a task; return the whole tensors at its end."""
        whole = self.folder / f"{name}.npz"
        self._asked.write(json.dumps({**task, "whole": str(whole)}) + "\n")
        self._asked.flush()
        answer = self._answers.readline()
        assert answer == '""\n', f"{answer}\n{self.errors.read_text()[-3000:]}"
        with np.load(whole) as found:
            return {key: found[key] for key in found.files}

    def facts(self, name: str) -> Any:
        """Return what a checkpoint had besides tensors when a task loaded it."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    peer = Megatron(tmp_path_factory.mktemp("megatron"))
    yield peer
    peer.end()


@pytest.fixture(scope="module")
def trained(megatron: Megatron) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Train and save both models; return their tensors one step later, by name."""
    return {
        name: megatron.do(name, **layout, steps=STEPS, more_steps=1, save=str(megatron.folder / name / FOLDER))
        for name, layout in SOURCES.items()
    }


def release() -> str:
    """Return the release of Megatron-Core that is installed here."""
    from megatron.core.package_info import __version__

    return ".".join(__version__.split(".")[:2])


def bits(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {key: tensor.tobytes() for key, tensor in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_training_goes_on_in_another_layout(
    megatron: Megatron, trained: dict[str, Any], tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    """dp_reshardable, its own default, which no layout but the one that saved it can load."""
    source = megatron.folder / name / FOLDER
    # Experts have an optimizer of their own if ranks share them out.
    ep = layout.get("ep", 1) if (layout.get("ep", 1) > 1) != (SOURCES[name].get("ep", 1) > 1) else None
    reshard_mpi.transform(source, tmp_path, to="megatron", core_version=release(), ep=ep, verify=True)
    task = f"{name} in {'-'.join(map(str, layout.values()))}"
    assert bits(megatron.do(task, **layout, load=str(tmp_path / FOLDER), more_steps=1)) == bits(trained[name])
    facts = megatron.facts(task)
    assert facts["iteration"] == STEPS and facts["opt_param_scheduler"]["num_steps"] == 8 * STEPS
    assert facts["args"]["attention_backend"] == "AttnBackend.auto"
    assert facts["args"]["params_dtype"] == "torch.bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_weights_alone(megatron: Megatron, trained: dict[str, Any], tmp_path: Path, name: str) -> None:
    """From a folder that has nothing else: what Megatron's modules expect besides is made."""
    source, layout = megatron.folder / name / FOLDER, SOURCES[name]
    reshard_mpi.transform(source, tmp_path / "hf", to="hf")
    reshard_mpi.transform(
        tmp_path / "hf", tmp_path / "out", to="megatron", core_version=release(), max_shard_size=10**4
    )
    assert len([*(tmp_path / "out" / "iter_0000000").glob("*.distcp")]) > 1
    found = megatron.do(
        f"{name} alone", **layout, load=str(tmp_path / "out" / "iter_0000000"), only_model=True, steps=0
    )
    saved = megatron.do(f"{name} as saved", **layout, load=str(source), only_model=True)
    weights = {key: tensor for key, tensor in found.items() if "|" not in key}
    assert bits(weights) == bits({key: saved[key] for key in weights})
    assert megatron.facts(f"{name} alone") == {"iteration": 0}

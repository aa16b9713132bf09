"""What the guide shows of reading without converting, with dask, torch, transformers and MindSpore themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.command_line import done
from support.pages import GUIDE, block_run_by

import reshard_mpi

PAGE = (GUIDE / "reading.md").read_text()


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The folder that the page begins in."""
    done("demo", tmp_path / "try")
    return tmp_path / "try"


# A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
WITHOUT_TAKING_APART = "\nimport os\nimport sys\n\nsys.stdout.flush()\nos._exit(0)\n"


def run(test: str, folder: Path, *launcher: str) -> str:
    """Run the page's block for a test as a program in a folder; return what it prints."""
    program = folder / "program.py"
    program.write_text(block_run_by(PAGE, test) + (WITHOUT_TAKING_APART if launcher else ""))
    command = [*(launcher or (sys.executable,)), str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.torch
def test_dask(demo: Path) -> None:
    pytest.importorskip("dask.array")
    with reshard_mpi.open(demo / "src", src_strategy=demo / "src_strategy.ckpt") as checkpoint:
        norm = np.linalg.norm(checkpoint["layer1.weight"][...])
    assert float(run("test_dask", demo)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.torch
def test_fsdp(demo: Path) -> None:
    pytest.importorskip("torch")
    with reshard_mpi.open(demo / "src", src_strategy=demo / "src_strategy.ckpt") as checkpoint:
        norm = np.linalg.norm(checkpoint["layer1.weight"][...])
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    assert float(run("test_fsdp", demo, *launcher)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("source", ["dcp", "8 ranks of MindFormers"])
def test_hugging_face(tmp_path: Path, source: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    if source == "dcp":
        reshard_mpi.transform(tmp_path / "llama", tmp_path / "trained", to="dcp")
        assert run("test_hugging_face", tmp_path) == f"torch.bfloat16 {model.num_parameters()}\n"
        return
    (tmp_path / "ranks.toml").write_text('mesh = { tp = 8 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["tp"] }\n')
    options = {"map": "hf-llama-mindformers", "config": tmp_path / "llama" / "config.json"}
    ranks = {"to": "ckpt", "dst_strategy": tmp_path / "ranks.toml", "forward": True}
    reshard_mpi.transform(tmp_path / "llama", tmp_path / "trained", **ranks, **options)
    from reshard_mpi.torch import load

    tensors = load(tmp_path / "trained", src_strategy=tmp_path / "ranks.toml", reverse=True, **options)
    loaded = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor), name


@pytest.mark.mindspore
def test_mindspore(demo: Path) -> None:
    pytest.importorskip("mindspore")
    with reshard_mpi.open(demo / "src", src_strategy=demo / "src_strategy.ckpt") as checkpoint:
        expected = checkpoint["layer1.weight"][0, :2]
    assert run("test_mindspore", demo).splitlines()[-1] == f"[] [] {expected}"

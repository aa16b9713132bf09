"""Commands on pages that need files nobody has: run word for word on files that are made for them here."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from support import safetensors_peer, sliced_peer
from support.pages import GUIDE, README, block_run_by, blocks
from support.processes import Finished, run_command
from support.sliced_peer import At, Sliced, torch_file

from reshard_mpi import load_rank

MESH_OF_TWO = """
mesh = { tensor = 2 }

[[parameter]]
match = "*weight"
split = { 0 = ["tensor"] }

[[parameter]]
match = "*"
"""
LLAMA_CONFIG = '{"num_attention_heads": 8, "num_key_value_heads": 4}'


def run_block(page: Path, test: str, folder: Path) -> Finished:
    """Run the block that a page says this test runs; it must succeed."""
    environment = {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
    commands = block_run_by(page.read_text(), test)
    return run_command(["bash", "-e", "-c", commands], env=environment, cwd=folder, check=True)


@pytest.mark.slow
def test_queries_keys_and_values(tmp_path: Path) -> None:
    """README's map and command: in the target, a group's queries are followed by its keys and its values."""
    random = np.random.default_rng(1)
    hidden, head, groups, repeats = 16, 2, 4, 2
    rows = {"q_proj": groups * repeats * head, "k_proj": groups * head, "v_proj": groups * head}
    parts = {name: random.standard_normal((length, hidden), np.float32) for name, length in rows.items()}
    llama = tmp_path / "llama"
    llama.mkdir()
    named = {f"model.layers.0.self_attn.{name}.weight": part for name, part in parts.items()}
    (llama / "model.safetensors").write_bytes(sliced_peer.file_of(named, {"format": "pt"}))
    (llama / "config.json").write_text(LLAMA_CONFIG)
    (tmp_path / "tp4.toml").write_text(MESH_OF_TWO.replace("tensor = 2", "tensor = 4"))
    (equations,) = (block.text for block in blocks(README.read_text()) if block.language == "toml")
    (tmp_path / "qkv.toml").write_text(equations)

    run_block(README, "test_queries_keys_and_values", tmp_path)
    by_group = [part.reshape(groups, -1, hidden) for part in parts.values()]
    made = load_rank(0, tmp_path / "megatron")
    assert set(made) == {"decoder.layers.0.self_attention.linear_qkv.weight"}
    (linear_qkv,) = made.values()
    assert np.array_equal(linear_qkv, np.concatenate(by_group, axis=1).reshape(-1, hidden))
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 4


@pytest.mark.slow
def test_forms_that_are_only_read(tmp_path: Path) -> None:
    whole = np.arange(48, dtype=np.float32).reshape(16, 3)
    latest = tmp_path / "checkpoint" / "iteration_00000020"
    sliced_peer.write_mindformers(latest, {"net.weight": Sliced(whole, (4, 1), [[0], [1], [2], [3]])}, 4)
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / "two_ranks.toml").write_text(MESH_OF_TWO)
    pieces = {torch_file(rank + 1): {"weight": At((2 * rank, 0), whole[2 * rank : 2 * rank + 2])} for rank in range(8)}
    sliced_peer.write_torch(tmp_path / "sharded", pieces)

    run_block(GUIDE / "formats.md", "test_forms_that_are_only_read", tmp_path)
    halves = [tmp_path / "ranks" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors" for rank in range(2)]
    read = [safetensors_peer.read(path).tensors["net.weight"].content for path in halves]
    assert b"".join(read) == whole.tobytes()
    assert safetensors_peer.read(tmp_path / "llama" / "model.safetensors").tensors["weight"].content == whole.tobytes()

"""Find checkpoints that DeepSpeed itself has written, with the whole tensors that they must give (`SAMPLES`)."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from reshard_mpi.testing.sample_tensors import SampleTensor
from support import safetensors_peer

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "deepspeed"
NEEDS_DATA = pytest.mark.skipif(
    not DATA.is_dir(), reason="no deepspeed under RESHARD_MPI_SHARED_DATA or ../shared/data"
)
# What the engine gave of each, if it gave it; others are of a pipeline and of experts.
SAMPLES = {
    "zero1_4_fp32": "zero1_4_fp32",
    "zero1_2_bf16_groups_tied": "zero1_2_bf16_groups_tied",
    "zero1_2_bf16_optimizer": "bf16",
    "zero1_4_bf16_pipeline2": "",
    "zero2_2_bf16_frozen": "bf16",
    "zero2_4_fp32_groups": "zero2_4_fp32_groups",
    "zero2_4_bf16_round_robin": "bf16",
    "zero2_4_bf16_aligned": "bf16",
    "zero2_2_bf16_moe": "",
    "zero3_2_bf16": "zero3_2_bf16",
    "zero3_4_fp32_frozen_tied": "zero3_4_fp32_frozen_tied",
    "zero3_4_bf16_subgroups": "zero3_4_bf16_subgroups",
    "zero1_2_bf16_groups_tied_universal": "zero1_2_bf16_groups_tied",
    "zero2_2_bf16_frozen_universal": "bf16",
    "zero3_2_bf16_universal": "zero3_2_bf16",
}
_STATE = {"exp_avg", "exp_avg_sq"}


class Sample(NamedTuple):
    """A checkpoint: the folder with its `latest`, that of its tag, and the tensors that the engine gave."""

    save: Path
    tag: Path
    expected: dict[str, SampleTensor]


def unpacked(name: str, folder: Path) -> Sample:
    """Unpack a sample into a folder. Expected tensors have the names of a whole training state."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (tag,) = folder.glob("*/*/")
    of_engine = SAMPLES[name] and safetensors_peer.read(DATA / "expected" / f"{SAMPLES[name]}.safetensors").tensors
    return Sample(
        tag.parent, tag, _named(of_engine, "frozen_table" if "_frozen" not in name else "") if of_engine else {}
    )


def _named(of_engine: dict[str, SampleTensor], lacking: str) -> dict[str, SampleTensor]:
    named = {}
    for key, tensor in of_engine.items():
        kind, _, parameter = key.partition(".")
        weights = of_engine[f"module.{parameter}"]
        if parameter == lacking or (kind == "fp32" and weights.dtype == tensor.dtype):
            continue  # where the model has it in float32 itself, that is the optimizer's
        if kind in _STATE:
            named[f"optimizer.state.{parameter}.{kind}"] = tensor
        else:
            named[{"module": f"model.{parameter}"}.get(kind, f"optimizer.state.{parameter}.fp32_param")] = tensor
    return named

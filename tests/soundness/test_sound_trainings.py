"""Sound training states of DeepSpeed and Megatron have no error, however they are cut, and spoiled ones have theirs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support import deepspeed_peer, megatron_legacy_peer, megatron_peer
from support.deepspeed_samples import NEEDS_DATA, SAMPLES, unpacked
from support.examples import few, many

import reshard_mpi
from reshard_mpi.soundness.findings import AuditReport, FindingKind


def audited(folder: Path) -> AuditReport:
    return reshard_mpi.audit(folder)


def errors(folder: Path) -> list[str]:
    return [each.as_line() for each in audited(folder).errors]


@many(10)
@given(drawn=deepspeed_peer.trainings())
def test_deepspeed(drawn: tuple[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "ckpt")
        deepspeed_peer.write(folder, *drawn)
        assert errors(folder) == []


@pytest.mark.slow
@many(10)  # whose weights are any numbers of their type
@given(drawn=megatron_legacy_peer.trainings())
def test_megatrons_older_form(drawn: tuple[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "ckpt")
        megatron_legacy_peer.write(folder, *drawn)
        assert [each for each in audited(folder).errors if each.kind is not FindingKind.BEYOND] == []


@pytest.mark.parametrize("state", few(1, megatron_peer.FORMS))
def test_megatron(state: str, tmp_path: Path) -> None:
    form = megatron_peer.Form(state=state, tensor=2, data=2)
    megatron_peer.write(tmp_path / "ckpt", megatron_peer.gpt(), form)
    report = audited(tmp_path / "ckpt")
    assert report.errors == () and "training state" in report.checked


def test_weights_of_another_step_than_their_copies(tmp_path: Path) -> None:
    """Weights and state of two saves in one folder, as a save that failed in its middle leaves them."""
    shapes = {f"layers.{layer}.w": (6, 4) for layer in range(3)}
    made = deepspeed_peer.training(shapes, dtype="bfloat16")
    form = deepspeed_peer.Form(stage=2, data_ranks=2)
    folder = deepspeed_peer.write(tmp_path / "ckpt", made, form)
    assert errors(folder) == []
    other = deepspeed_peer.write(tmp_path / "other", deepspeed_peer.training(shapes, dtype="bfloat16", seed=3), form)
    for path in other.glob("*model_states.pt"):
        (folder / path.name).write_bytes(path.read_bytes())
    (found,) = audited(folder).errors
    assert found.kind is FindingKind.STRUCTURE and "copies of 'model.layers.0.w' differ" in found.detail


@NEEDS_DATA
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_what_deepspeed_itself_has_saved(name: str, tmp_path: Path) -> None:
    assert errors(unpacked(name, tmp_path).save) == []


def test_values_of_a_training_may_be_large_and_small() -> None:
    """Second moments of large gradients are below the bound of values that fit no training."""
    from reshard_mpi.soundness.content import bound_of

    assert np.square(np.float32(1e5)) < bound_of("float32") < np.finfo(np.float32).max

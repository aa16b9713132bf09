"""DeepSpeed's checkpoints of all forms: what is read equals the whole tensors that were laid over ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from support import deepspeed_peer, safetensors_peer
from support.command_line import done
from support.deepspeed_peer import Form, Training, require_read
from support.examples import few, many


@many(75)
@given(deepspeed_peer.trainings())
def test_whole_tensors(drawn: tuple[Training, Form]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deepspeed_peer.write(Path(folder, "save"), *drawn)
        require_read(Path(folder, "save"), *drawn)


@many(30)
@given(deepspeed_peer.trainings(kinds=["plain"]))
def test_whole_tensors_of_a_universal_folder(drawn: tuple[Training, Form]) -> None:
    training, form = drawn
    assume(not form.is_elastic and form.stage)
    with tempfile.TemporaryDirectory() as folder:
        deepspeed_peer.write_universal(Path(folder, "save"), training, form)
        require_read(Path(folder, "save"), training, form)


FORMS = {
    "stage 1": Form(1, 3),
    "stage 2 with gaps": Form(2, 3, gaps=8),
    "elastic": Form(2, 4, is_elastic=True),
    "BF16_Optimizer": Form(1, 3, is_bf16_optimizer=True),
    "BF16_Optimizer without ZeRO": Form(0, 3, is_bf16_optimizer=True),
    "stage 3": Form(3, 5, sub_group=4),
    "more ranks than elements": Form(3, 40),
}


@pytest.mark.parametrize("what", few(2, FORMS))
def test_each_form(tmp_path: Path, what: str) -> None:
    shapes = {"a.weight": (5, 3), "a.bias": (1,), "b.weight": (7, 2)}
    frozen = deepspeed_peer.arrays({"table": (3, 3)}, 9)
    made = deepspeed_peer.training(
        shapes, {"c.weight": (11,)}, frozen=frozen, shared={"tied": "a.weight"}, buffers={"count": np.arange(3)}
    )
    deepspeed_peer.write(tmp_path, made, FORMS[what])
    require_read(tmp_path, made, FORMS[what])


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_in_fp32_are_the_optimizers_copies(tmp_path: Path, stage: int) -> None:
    """Of a second name too; and nothing of the 16-bit weights is taken, which are these rounded."""
    made = deepspeed_peer.training({"a.weight": (5, 3)}, {"c.weight": (11,)}, shared={"tied": "a.weight"})
    deepspeed_peer.write(tmp_path / "save", made, Form(stage, 3))
    done("transform", tmp_path / "save", tmp_path / "out", "--to", "hf", "--dtype", "fp32")
    found = safetensors_peer.read(tmp_path / "out" / "model.safetensors").tensors
    expected = {**made.trained, "tied": made.trained["a.weight"]}
    assert {name: tensor.content for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }

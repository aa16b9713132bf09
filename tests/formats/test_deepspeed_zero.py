"""DeepSpeed's checkpoints of all forms: what is read equals the whole tensors that were laid over ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from support import deepspeed_peer
from support.deepspeed_peer import Form, Training
from support.examples import many

import reshard_mpi


def require_equal(folder: Path, training: Training, form: Form) -> None:
    expected = deepspeed_peer.expected(training, form)
    with reshard_mpi.open(folder) as opened:
        assert set(opened) == set(expected)
        for name, sample in expected.items():
            tensor = opened[name]
            assert tensor.shape == sample.shape and tensor.dtype.name == sample.dtype.name, name
            assert tensor[...].tobytes() == sample.content, name


@many(300)
@given(deepspeed_peer.trainings())
def test_whole_tensors(drawn: tuple[Training, Form]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deepspeed_peer.write(Path(folder, "save"), *drawn)
        require_equal(Path(folder, "save"), *drawn)

"""Every form of a checkpoint becomes every other, and comes back as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from support.cases import Case, cases
from support.checkpoints import TARGETS, as_read, expected_rank, read_shard, write_shards, write_strategy
from support.examples import few

import reshard_mpi


class Form(NamedTuple):
    """A format in one of its forms: shards of ranks or one full checkpoint. describes_itself: without a strategy."""

    format: str
    sharded: bool
    describes_itself: bool = False

    def __str__(self) -> str:
        return f"{self.format} {'ranks' if self.sharded else 'full'}"


FORMS = (
    Form("ckpt", sharded=True),
    Form("hdf5", sharded=True, describes_itself=True),
    Form("safetensors", sharded=True),
    Form("safetensors", sharded=False),
    Form("hf", sharded=False),
    Form("torch", sharded=True),
    Form("torch", sharded=False),
    Form("dcp", sharded=True, describes_itself=True),
)
# What all of them can hold.
DTYPES = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.int8, np.bool_, np.float16, np.int64, np.float64)))


def convert(source: Path, held: tuple[Form, Path], target: Path, wanted: tuple[Form, Path]) -> None:
    """Convert a checkpoint of one form to another, each with its strategy."""
    to, dst_strategy = wanted
    most_bytes = 1000 if to.format == "hf" else None  # so that there are several files
    dst_strategy = dst_strategy if to.sharded else None
    reshard_mpi.transform(source, target, given(held), dst_strategy, to=to.format, max_shard_size=most_bytes)


def given(held: tuple[Form, Path]) -> Path | None:
    """Return the strategy that says how a source is sharded, if it does not say so itself."""
    form, strategy = held
    return strategy if form.sharded and not form.describes_itself else None


def test_every_target_is_in_the_matrix() -> None:
    """A format that packs a whole training has a matrix of its own (`test_deepspeed_targets`)."""
    assert {form.format for form in FORMS} == set(TARGETS)


# Each form is read and written in a pair with the one before and with the one behind: reading knows nothing of writing.
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [*zip(FORMS, [*FORMS[1:], FORMS[0]], strict=True)], ids=str)
@settings(max_examples=4)
@drawn(case=cases(max_ranks=5, dtypes=DTYPES))
def test_there_and_back(first: Form, second: Form, case: Case) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, other = (write_strategy(side, folder / name) for side, name in ((case.src, "one"), (case.dst, "other")))
        write_shards(case.src, case.tensors, folder / "start", "ckpt")
        convert(folder / "start", (FORMS[0], one), folder / "first", (first, one))
        convert(folder / "first", (first, one), folder / "second", (second, other))
        convert(folder / "second", (second, other), folder / "back", (first, one))
        reshard_mpi.diff(folder / "first", folder / "back", *[given((first, one))] * 2)
        convert(folder / "second", (second, other), folder / "end", (FORMS[0], other))
        for rank in range(case.dst.world_size):
            written = read_shard(folder / "end" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
            assert written == as_read(expected_rank(case.dst, case.tensors, rank))


@pytest.mark.parametrize("form", few(1, FORMS), ids=str)
@settings(max_examples=3)
@drawn(case=cases(max_ranks=4, dtypes=DTYPES), data=st.data())
def test_loaded_into_a_rank(form: Form, case: Case, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, other = (write_strategy(side, folder / name) for side, name in ((case.src, "one"), (case.dst, "other")))
        write_shards(case.src, case.tensors, folder / "start", "ckpt")
        convert(folder / "start", (FORMS[0], one), folder / "held", (form, one))
        rank = data.draw(st.integers(0, case.dst.world_size - 1))
        loaded = reshard_mpi.load_rank(rank, folder / "held", given((form, one)), other)
        assert {name: array.tobytes() for name, array in loaded.items()} == {
            name: array.tobytes() for name, array in expected_rank(case.dst, case.tensors, rank).items()
        }

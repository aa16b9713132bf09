"""DeepSpeed's own checkpoints as torch loads them: equal to what a reader with torch makes of the files one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import done
from support.deepspeed_samples import NEEDS_DATA, SAMPLES, unpacked

torch = pytest.importorskip("torch")

from support.deepspeed_by_torch import by_name  # noqa: E402 - which imports torch

pytestmark = [pytest.mark.torch, NEEDS_DATA]


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.endswith("_universal")])
def test_as_torch_loads_it(tmp_path: Path, name: str) -> None:
    sample = unpacked(name, tmp_path / "unpacked")
    done("transform", sample.save, tmp_path / "out")
    loaded = torch.load(tmp_path / "out" / "rank_0" / "checkpoint_0.pt", weights_only=True)
    expected = by_name(sample.tag)
    of_state = {"exp_avg", "exp_avg_sq"}
    for key, whole in expected.items():
        kind, _, parameter = key.partition(".")
        state = loaded["optimizer"]["state"].get(parameter, {})
        made = loaded["model"][parameter]
        if kind != "model":
            made = state[kind] if kind in of_state else state.get("fp32_param", made)
        assert made.dtype == whole.dtype and torch.equal(made, whole), key
    assert {key.partition(".")[2] for key in expected if key.startswith("fp32.")} == set(loaded["optimizer"]["state"])
    named = [own for group in loaded["optimizer"]["param_groups"] for own in group["params"]]
    assert sorted(named) == sorted(loaded["optimizer"]["state"]) and len(named) > 20


def _targets() -> Iterator[tuple[str, int, int]]:
    """Yield all samples, each with stages of ZeRO and numbers of ranks in turn. Some models are not for all stages."""
    stages = {"pipeline2": (1,), "moe": (1, 2)}
    ranks = itertools.cycle((3, 5, 1, 2, 4))
    for name in SAMPLES:
        of_form = next((own for form, own in stages.items() if name.endswith(form)), (1, 2, 3))
        yield from ((name, stage, next(ranks)) for stage in of_form if not name.endswith("_universal"))


@pytest.mark.parametrize(("name", "stage", "ranks"), [*_targets()])
def test_back_into_files_of_deepspeed(tmp_path: Path, name: str, stage: int, ranks: int) -> None:
    sample = unpacked(name, tmp_path / "unpacked")
    done(
        "transform", sample.save, tmp_path / "out", "--to", "deepspeed", "--dp", str(ranks), "--zero-stage", str(stage)
    )
    made, expected = by_name(tmp_path / "out" / sample.tag.name), by_name(sample.tag)
    assert len([*(tmp_path / "out" / sample.tag.name).glob("*optim_states.pt")]) == ranks * (1 + ("pipeline2" in name))
    for own, other in ((made, expected), (expected, made)):  # at stage 3 weights are in fp32 alone
        assert {key for key in own if not key.startswith("model.")} <= other.keys()
    for key in made.keys() & expected.keys():
        assert made[key].dtype == expected[key].dtype and torch.equal(made[key], expected[key]), key

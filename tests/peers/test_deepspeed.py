"""Checkpoints exchanged with DeepSpeed: its engine saves what we read, loads what we write, and trains on."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_apart

torch = pytest.importorskip("torch")

from support.deepspeed_by_torch import by_name  # noqa: E402 - which imports torch
from support.deepspeed_ranks import batch, new_model  # noqa: E402

# One process has all of them, since DeepSpeed is imported once.
pytestmark = [pytest.mark.deepspeed, pytest.mark.xdist_group("deepspeed")]

SCRIPT = Path(__file__).parent.parent / "support" / "deepspeed_ranks.py"
# How trainings are begun: the stage of ZeRO, the ranks, and whether the model is in bfloat16.
SOURCES = {"zero2": (2, 4, True), "zero3": (3, 2, True), "fp32": (1, 2, False)}
STEPS = 3
# Every stage on one to five ranks, from each source in turn.
CASES = [
    (sorted(SOURCES)[(stage + ranks) % len(SOURCES)], stage, ranks) for stage in (1, 2, 3) for ranks in range(1, 6)
]
# How far a step may be from the same step of the training that went on. Ranks whose number is no power of two round
# gradients when they average them, and stage 3 averages in another order than stages 1 and 2.
APART = {True: 1e-4, False: 1e-7}


class DeepSpeed:
    """The process that has DeepSpeed, and the folder for what comes of its tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self.errors = folder / "errors.txt"
        # What a machine's own folder of compiled operators has, is not there: nothing may be compiled.
        self.compiled = folder / "compiled"
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(self.compiled)},
            text=True,
        )

    def begin(self, stage: int, ranks: int, **others: Any) -> Path:
        """Train some steps on so many ranks; return the folder of what came of it."""
        return self._do({"stage": stage, "ranks": ranks, "steps": STEPS, **others})

    def load(self, folder: Path, stage: int, ranks: int, **others: Any) -> Path:
        """Load a checkpoint into so many ranks; return the folder of what came of it."""
        return self._do({"stage": stage, "ranks": ranks, "load": str(folder), **others})

    def _do(self, asked: dict[str, Any]) -> Path:
        out = self.folder / f"task_{next(self._numbers)}"
        usual = {"load": None, "steps": 0, "earlier_steps": 0, "has_scheduler": True, "accumulates_fp32": False}
        usual |= {"kind": "plain", "ep_size": 1}
        task = {**usual, **asked, "out": str(out)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == '""\n', f"{answer}\n{self.errors.read_text()[-3000:]}"
        return out

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepSpeed]:
    peer = DeepSpeed(tmp_path_factory.mktemp("deepspeed"))
    yield peer
    peer.end()


@pytest.fixture(scope="module")
def sources(deepspeed: DeepSpeed) -> dict[str, Path]:
    """What became of a training from each source: saved after some steps, and after one more."""
    return {name: deepspeed.begin(stage, ranks, is_bf16=is_bf16) for name, (stage, ranks, is_bf16) in SOURCES.items()}


def convert(source: Path, target: Path, stage: int, ranks: int, *more: str) -> None:
    options = ("--to", "deepspeed", "--dp", str(ranks), "--zero-stage", str(stage), *more)
    run_apart("transform", source, target, *options, "--jobs", "1", check=True)


def tensors(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path)
    return found


def differing(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of tensors that are not the same bit by bit."""
    assert got.keys() == expected.keys()
    return [
        name
        for name in expected
        if got[name].dtype != expected[name].dtype or not torch.equal(got[name], expected[name])
    ]


def apart(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return how far the elements of tensors are apart at most."""
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@pytest.mark.parametrize(("name", "stage", "ranks"), CASES)
def test_a_training_goes_on_with_other_ranks_and_stages(
    tmp_path: Path, deepspeed: DeepSpeed, sources: dict[str, Path], name: str, stage: int, ranks: int
) -> None:
    before, is_bf16 = sources[name], SOURCES[name][2]
    convert(before / "saved", tmp_path / "made", stage, ranks)
    after = deepspeed.load(tmp_path / "made", stage, ranks, is_bf16=is_bf16)
    assert differing(tensors(after / "saved.pt"), tensors(before / "saved.pt")) == []
    expected, got = (tensors(folder / "stepped.pt") for folder in (before, after))
    facts, own_facts = (json.loads((folder / "facts.json").read_text()) for folder in (before, after))
    loss, own_loss = facts.pop("loss"), own_facts.pop("loss")
    assert own_facts == facts
    if is_power_of_two(ranks) and (stage == 3) == (SOURCES[name][0] == 3):
        assert differing(got, expected) == [] and own_loss == loss
    else:
        assert apart(got, expected) < APART[is_bf16] and own_loss == pytest.approx(loss, abs=APART[is_bf16])


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_weights_in_full_precision_are_those_of_zero_to_fp32(
    tmp_path: Path, sources: dict[str, Path], name: str
) -> None:
    from safetensors.torch import load_file

    saved = sources[name] / "saved"
    run_apart("transform", saved, tmp_path / "made", "--to", "hf", "--dtype", "fp32", "--jobs", "1", check=True)
    script = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(saved), str(tmp_path / "theirs")]
    subprocess.run(script, check=True, capture_output=True, timeout=240)
    theirs = torch.load(tmp_path / "theirs" / "pytorch_model.bin")
    assert differing(load_file(tmp_path / "made" / "model.safetensors"), theirs) == []


def test_a_training_of_torch_goes_on_in_deepspeed(tmp_path: Path, deepspeed: DeepSpeed) -> None:
    """By names of parameters, from one file to two ranks of stage 2, and from these to three of stage 3.

    The rate is that of the file, not that of DeepSpeed's settings.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = new_model(is_loaded=False)
    optimizer = torch.optim.AdamW(model.groups(), lr=0.004, betas=(0.8, 0.9), foreach=False)

    def step(number: int) -> dict[str, Any]:
        """Take a step; return what is saved after it."""
        optimizer.zero_grad()
        model(batch(number)).backward()
        optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def named(state: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of what is saved as those of DeepSpeed are named."""
        of_model = {f"model.{name}": tensor.clone() for name, tensor in state["model"].items()}
        states = state["optimizer"]["state"]
        masters = {f"fp32.{name}": of_model[f"model.{name}"] for name in states}
        return (
            of_model | masters | {f"{kind}.{name}": own[kind].clone() for name, own in states.items() for kind in own}
        )

    for number in range(STEPS):
        state = step(number)
    torch.save(state, tmp_path / "saved.pt")
    saved, stepped = named(state), named(step(STEPS))
    convert(tmp_path / "saved.pt", tmp_path / "two", 2, 2)
    others = {"is_bf16": False, "has_scheduler": False, "earlier_steps": STEPS}
    two = deepspeed.load(tmp_path / "two", 2, 2, **others)
    convert(two / "saved", tmp_path / "three", 3, 3)
    three = deepspeed.load(tmp_path / "three", 3, 3, **others)
    for after in (two, three):
        assert differing(tensors(after / "saved.pt"), saved) == []
        assert apart(tensors(after / "stepped.pt"), stepped) < APART[False]
        assert json.loads((after / "facts.json").read_text())["rates"] == [0.004, 0.004]


# Models that are no plain ones: how they begin, over how many ranks each part of them is divided, and how they go on.
DIVIDED: dict[str, tuple[dict[str, Any], int]] = {
    "pipeline": ({"stage": 1, "ranks": 4, "is_bf16": True}, 2),
    "pipeline with BF16_Optimizer": ({"stage": 1, "ranks": 4, "is_bf16": True, "accumulates_fp32": True}, 2),
    "experts": ({"stage": 2, "ranks": 2, "is_bf16": True, "ep_size": 2}, 1),
    "experts in fp32": ({"stage": 1, "ranks": 2, "is_bf16": False, "ep_size": 2}, 1),
}
GOING_ON = [
    ("pipeline", 2, {}),
    ("pipeline", 1, {}),
    ("pipeline", 3, {}),
    ("pipeline with BF16_Optimizer", 2, {}),
    ("pipeline with BF16_Optimizer", 1, {}),
    ("experts", 2, {"ep_size": 2}),
    ("experts", 4, {"ep_size": 2}),
    ("experts in fp32", 3, {}),
    ("experts in fp32", 2, {"ep_size": 2}),
    ("experts in fp32", 1, {"stage": 2}),
    ("experts in fp32", 4, {"ep_size": 1}),
]


@pytest.fixture(scope="module")
def divided(deepspeed: DeepSpeed) -> dict[str, Path]:
    return {name: deepspeed.begin(**own, kind=name.partition(" ")[0]) for name, (own, _) in DIVIDED.items()}


@pytest.mark.parametrize(("name", "ranks", "others"), GOING_ON)
def test_pipelines_and_experts_go_on_with_other_ranks(
    tmp_path: Path, deepspeed: DeepSpeed, divided: dict[str, Path], name: str, ranks: int, others: dict[str, Any]
) -> None:
    """At equal sizes bit by bit as the training that went on. Experts are divided over ranks as far as these allow."""
    before, (begun, stages) = divided[name], DIVIDED[name]
    task = {**begun, "ep_size": 1, **others}
    is_usual = task["ep_size"] == math.gcd(begun.get("ep_size", 1), ranks)
    more = () if is_usual else ("--ep", str(task["ep_size"]))
    convert(before / "saved", tmp_path / "made", task["stage"], ranks, *more)
    after = deepspeed.load(tmp_path / "made", **{**task, "ranks": ranks * stages}, kind=name.partition(" ")[0])
    assert differing(by_name(after / "saved/now"), by_name(before / "saved/now")) == []
    expected, got = (by_name(folder / "stepped/now") for folder in (before, after))
    facts, own_facts = (json.loads((folder / "facts.json").read_text()) for folder in (before, after))
    loss, own_loss = facts.pop("loss"), own_facts.pop("loss")
    assert own_facts == facts
    if ranks * stages == begun["ranks"] and task["stage"] == begun["stage"]:
        assert differing(got, expected) == [] and own_loss == loss
    else:
        close = APART[begun["is_bf16"]]
        exact = {key: own for key, own in expected.items() if not key.startswith("model.")}  # those are rounded
        assert apart(got, exact) < close and own_loss == pytest.approx(loss, abs=close)


def test_nothing_is_compiled(deepspeed: DeepSpeed, sources: dict[str, Path]) -> None:
    assert not deepspeed.compiled.exists()

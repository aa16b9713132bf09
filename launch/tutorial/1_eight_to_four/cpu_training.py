"""An experiment: MindSpore 2.10's CPU build trains the guide's network, cut over several processes.

It is not made for that: its parallel compiler asks for a GPU, and names the group of all ranks as GPUs do. Here two
words in the memory of the process are others, so that it goes with CPUs and their collectives. Nothing of MindSpore's
files is changed. What CPUs cannot do remains: optimizer sharding and pipelines compile (`compile_only.py`), and do not
run.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import mindspore as ms
import numpy as np
from digits import batches, digits
from mindspore import nn, ops, train
from network import Network, shard_for_cpu

STEPS = 16
_WORDS = {b"\0GPU\0": b"\0CPU\0", b"\0nccl_world_group\0": b"\0mccl_world_group\0"}
# Of the optimizer: constant here, so a checkpoint may have them or not.
_SETTINGS = {"global_step", "learning_rate", "momentum"}
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4


def train_and_save(strategy_file: str, checkpoints: str) -> None:
    """Train two epochs on 8 cards and save after the first; the losses of the second are what others must come to."""
    rank, cards = _start(strategy_file)
    model, _ = _model(cards)
    first = _train(model)
    shard = _shard(checkpoints, rank)
    shard.parent.mkdir(parents=True, exist_ok=True)
    ms.save_checkpoint(model.train_network, str(shard), integrated_save=False)
    second = _train(model)
    if rank == 0:
        _keep(cards, second)
        print(f"cards: {cards}: loss {first[0]:.4f} to {first[-1]:.4f}, saved, and on to {second[-1]:.4f}", flush=True)


def go_on(strategy_file: str, converted_for: Path, checkpoints: str, *, cut: bool = True) -> None:
    """Load a converted checkpoint on so many cards as there are processes, and train the second epoch.

    converted_for: the strategy that the compiler must write now. cut: whether operators are cut.
    """
    rank, cards = _start(strategy_file)
    model, network = _model(cards, cut=cut)
    if cards > 1:
        _compile(model)  # so that parameters are the slices of this rank
        if rank == 0 and Path(strategy_file).read_bytes() != converted_for.read_bytes():
            raise SystemExit(f"the network is compiled for another strategy than that of {converted_for}")
    saved = ms.load_checkpoint(str(_shard(checkpoints, rank)))
    _load(network, saved)
    _load(model._optimizer, saved)
    losses = _train(model)
    if rank == 0:
        _keep(cards, losses)
        print(f"cards: {cards}, from the converted checkpoint on: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)


def predict(checkpoints: str) -> None:
    """Load a checkpoint on so many cards as there are processes, and tell digits that were not trained.

    What they are told to be goes to predicted_<cards>.json.
    """
    rank, cards = _start("predict_strategy.ckpt")
    network = Network()
    images, labels = digits(500, seed=6)
    pictures = ms.Tensor(_flat(images))
    model = ms.Model(network)
    if cards > 1:
        shard_for_cpu(network, cards, predicts=True)
        # Model.infer_predict_layout refuses CPUs; after this, parameters are the slices of this rank.
        model._predict_network.set_train(False)
        model._predict_network.compile(pictures)
    _load(network, ms.load_checkpoint(str(_shard(checkpoints, rank))))
    scores = model.predict(pictures).asnumpy()
    right = float((scores.argmax(1) == labels).mean())
    if rank == 0:
        Path(f"predicted_{cards}.json").write_text(json.dumps(scores.argmax(1).tolist()))
        print(scores[0].round(4))
        print(f"cards: {cards}: {right:.1%} of 500 digits that were not trained are told right", flush=True)
    if right < 0.7:
        raise SystemExit("a network that has trained an epoch tells more than 7 of 10")


def _start(strategy_file: str) -> tuple[int, int]:
    """Set MindSpore up for the processes that its launcher has started, or for this one; return rank and number."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ms.set_seed(1)
    cards = int(os.environ.get("MS_WORKER_NUM", "1"))
    if cards == 1:
        return 0, 1
    _let_cpus_in()
    ms.communication.init()
    rank = ms.communication.get_rank()
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,
        device_num=cards,
        global_rank=rank,
        full_batch=True,
        # Of one rank alone: others would write the same file while this one reads it.
        strategy_ckpt_config={"save_file": strategy_file if rank == 0 else ""},
    )
    _make_groups(rank, cards)
    return rank, cards


def _let_cpus_in() -> None:
    """Exchange the words in the read-only data of MindSpore's libraries, in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) (r-[x-])\S .*/libmindspore_(frontend|common)\.so$", line)
        if mapping is None:
            continue
        start, stop = int(mapping[1], 16), int(mapping[2], 16)
        data = ctypes.string_at(start, stop - start)
        protection = _PROT_READ | (_PROT_EXEC if "x" in mapping[3] else 0)
        for old, new in _WORDS.items():
            for place in re.finditer(re.escape(old), data):
                _protect(libc, start, stop, protection | _PROT_WRITE)
                ctypes.memmove(start + place.start(), new, len(new))
                _protect(libc, start, stop, protection)


def _protect(libc: ctypes.CDLL, start: int, stop: int, protection: int) -> None:
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def _make_groups(rank: int, cards: int) -> None:
    """Make the groups that the compiler will ask for: ranks that differ in some of their bits, and in no other."""
    from mindspore.parallel._auto_parallel_context import auto_parallel_context

    auto_parallel_context()._context_handle.set_hccl_test_avaible(True)
    for bits in range(1, cards - 1):
        group = [other for other in range(cards) if (other ^ rank) & ~bits == 0]
        ms.communication.create_group("-".join(map(str, group)), group)


class Loss(nn.Cell):
    """Cross entropy of operators that the CPU build can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax, self.onehot, self.mean = ops.SoftmaxCrossEntropyWithLogits(), ops.OneHot(), ops.ReduceMean()
        self.on, self.off = ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)
        # A gradient that begins with a constant is folded wrongly through AllReduce: a parameter is none.
        self.one = ms.Parameter(ms.Tensor(1.0, ms.float32), name="one", requires_grad=False)

    def construct(self, logits, labels):
        losses, _ = self.softmax(logits, self.onehot(labels, 10, self.on, self.off))
        return self.mean(losses) * self.one


def _model(cards: int, *, cut: bool = True) -> tuple[ms.Model, Network]:
    network = Network()
    if cards > 1 and cut:
        shard_for_cpu(network, cards)
    optimizer = nn.Momentum(network.trainable_params(), 0.02, 0.9)
    return ms.Model(nn.WithLossCell(network, Loss()), optimizer=optimizer), network


def _data() -> ms.dataset.GeneratorDataset:
    """Return the batches of an epoch, the same in every epoch and on every card."""
    rows = [(_flat(images), labels) for images, labels in batches(STEPS, 32, seed=5)]
    return ms.dataset.GeneratorDataset(rows, ["image", "label"], shuffle=False)


def _flat(images: np.ndarray) -> np.ndarray:
    return ((images - 0.13) / 0.3).reshape(-1, 28 * 28).astype(np.float32)


class _Losses(train.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_step_end(self, run_context) -> None:
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))


def _train(model: ms.Model) -> list[float]:
    """Train an epoch; return the loss of each step."""
    callback = _Losses()
    model.train(1, _data(), callbacks=[callback], dataset_sink_mode=False)
    return callback.losses


def _compile(model: ms.Model) -> None:
    """Do what Model.infer_train_layout does, which on CPUs refuses either value of dataset_sink_mode."""
    batches_of_data, step = model._exec_preprocess(is_train=True, dataset=_data(), dataset_sink_mode=False)
    step.compile(*next(iter(batches_of_data)))


def _load(cell: nn.Cell, saved: dict[str, ms.Parameter]) -> None:
    missing, _ = ms.load_param_into_net(cell, saved)
    if set(missing) - _SETTINGS:
        raise SystemExit(f"the checkpoint has no {missing}")


def _keep(cards: int, losses: Iterable[float]) -> None:
    Path(f"losses_{cards}.json").write_text(json.dumps(list(losses)))


def _shard(checkpoints: str, rank: int) -> Path:
    return Path(checkpoints, f"rank_{rank}", f"checkpoint_{rank}.ckpt").absolute()

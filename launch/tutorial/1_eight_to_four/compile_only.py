"""MindSpore's own parallel compiler, on a machine without devices: strategy files and slices, and nothing is run.

Bound to MindSpore 2.10. Its parallel compiler is part of the CPU build, but goes only where the device is an Ascend or
a GPU. Here a device called Ascend is registered behind which there is nothing, MindSpore's own stand-in for
communication (`hccl_test`) answers who is who, and MindSpore is asked to stop when the graph is compiled. What the
compiler writes and says is what it would for real cards. A process that has called `compile_network` can do nothing
else with MindSpore.
"""

from __future__ import annotations

import ctypes
import logging
import os
import types
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GLOG_v", "4")
os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"

import mindspore as ms
import numpy as np
from known_tensors import Arrays
from mindspore import nn
from mindspore.communication import _comm_helper
from mindspore.parallel._tensor import _load_tensor_by_layout
from network import Network, set_stages, shard_like_the_guide

BATCH = 32


class Compiled(NamedTuple):
    """What the compiler has said: every parameter's layout, for one rank of so many, in stages."""

    cards: int
    rank: int
    stages: int
    layouts: Mapping[str, Any]


def compile_network(
    cards: int,
    rank: int,
    strategy_file: Path,
    *,
    optimizer_sharding: bool,
    stages: int = 1,
    cut: bool = True,
    training: bool = True,
) -> Compiled:
    """Compile the guide's network for rank `rank` of `cards`; the compiler writes `strategy_file`.

    cut: whether operators are cut as in the guide; a pipeline's never are.
    """
    _register_device()
    _answer_for_communication(cards, rank)
    logging.disable(logging.CRITICAL)  # that the software of a real Ascend is missing
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    logging.disable(logging.NOTSET)
    ms.set_auto_parallel_context(
        device_num=cards,
        global_rank=rank,
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,
        full_batch=True,
        pipeline_stages=stages,
        enable_parallel_optimizer=optimizer_sharding,
        # The tensors of this network are small: without a threshold of 0 they would be left whole.
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
        strategy_ckpt_config={"save_file": str(strategy_file)},
    )
    network = Network()
    if stages > 1:
        set_stages(network)
    elif cut:
        shard_like_the_guide(network, cards)
    images, labels = np.zeros((BATCH, 28 * 28), np.float32), np.zeros(BATCH, np.int32)
    if not training:
        model = ms.Model(network)
        layouts = model.infer_predict_layout(ms.Tensor(images))
    else:
        step = _training_step(network, stages, images, labels)
        step.compile(ms.Tensor(images), ms.Tensor(labels))
        layouts = step.parameter_layout_dict
    return Compiled(cards, rank, stages, layouts)


def _training_step(network: Network, stages: int, images: np.ndarray, labels: np.ndarray) -> nn.Cell:
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    loss = nn.WithLossCell(network, nn.CrossEntropyLoss())
    if stages == 1:
        return nn.TrainOneStepCell(loss, optimizer).set_train()
    model = ms.Model(nn.PipelineCell(loss, 4), optimizer=optimizer)
    data = ms.dataset.GeneratorDataset([(images, labels)], ["image", "label"])
    _, step = model._exec_preprocess(is_train=True, dataset=data, dataset_sink_mode=False)
    return step


def slices_of(compiled: Compiled, tensors: Arrays) -> dict[str, np.ndarray]:
    """Cut whole tensors as MindSpore does when it loads them into the compiled network."""
    _comm_helper.hccl.get_rank_id = lambda group: _place_in_group(compiled, group)
    local_rank = compiled.rank % (compiled.cards // compiled.stages)
    return {
        name: _load_tensor_by_layout(ms.Tensor(tensors[name]), layout, local_rank).asnumpy()
        for name, layout in compiled.layouts.items()
        if name in tensors
    }


def _register_device() -> None:
    """Register a device type "Ascend" without a device, by the hook that MindSpore's device plugins use."""
    core = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libmindspore_core.so"))
    register = core._ZN9mindspore9MsContext16RegisterInitFuncERKSsPFvPS0_E
    # A std::string of GCC's old ABI: a pointer to the characters, behind a record of size, capacity and users.
    name = b"Ascend"
    record = ctypes.create_string_buffer(24 + len(name) + 1)
    ctypes.c_size_t.from_buffer(record, 0).value = len(name)
    ctypes.c_size_t.from_buffer(record, 8).value = len(name)
    ctypes.c_int.from_buffer(record, 16).value = 1 << 20  # so many users that it is never freed
    ctypes.memmove(ctypes.addressof(record) + 24, name, len(name))
    _KEPT.append(record)
    string = ctypes.c_void_p(ctypes.addressof(record) + 24)
    # The function that would set up the device: any that lies in a library and does no harm.
    register(ctypes.byref(string), ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p))


_KEPT: list[Any] = []


def _answer_for_communication(cards: int, rank: int) -> None:
    def size(group: str) -> int:
        return _group_size(group, cards)

    _comm_helper._HCCL_TEST_AVAILABLE = True
    _comm_helper.hccl = types.SimpleNamespace(
        get_rank_id=lambda group: rank % size(group),
        get_local_rank_id=lambda group: rank,
        get_rank_size=size,
        create_group=lambda *group: None,
    )
    _comm_helper.GlobalComm.INITED = True


def _group_size(group: str, cards: int) -> int:
    """Return how many ranks a group has. Groups are called SIZE-HASH, but for that of all."""
    head = group.split("-", maxsplit=1)[0]
    return int(head) if head.isdigit() else cards


def _place_in_group(compiled: Compiled, group: str) -> int:
    """Return which of a group's ranks this one is: the ranks of the group are told by the hash in its name."""
    rank, stage_size = compiled.rank, compiled.cards // compiled.stages
    size = _group_size(group, compiled.cards)
    if size == compiled.cards:
        return rank
    stage = range(rank // stage_size * stage_size, (rank // stage_size + 1) * stage_size)
    for ranks in combinations(stage, size):
        if rank in ranks and group == f"{size}-{_std_hash('-'.join(map(str, ranks)))}":
            return ranks.index(rank)
    raise ValueError(f"which ranks are group {group}?")


def _std_hash(text: str) -> int:
    """Return std::hash of a string, by the C++ library."""
    hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    hash_bytes.restype = ctypes.c_size_t
    hash_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return hash_bytes(text.encode(), len(text), 0xC70F6907)

"""Writes a checkpoint of DeepSpeed's ZeRO-2 in bf16, of noise, with the keys and classes of its engine's files.

`deepspeed_files.py FOLDER TAG SHAPES.json RANKS`. The noise is always the same.
"""

import json
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

_VERSION = "0.19.8"
_SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def main(folder: Path, tag: str, shapes: dict[str, torch.Size], ranks: int) -> None:
    """Write all files."""
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    common = {"ds_config": config, "ds_version": _VERSION}
    elements = sum(shape.numel() for shape in shapes.values())
    aligned = 2 * ranks
    partition = -(-elements // aligned) * aligned // ranks
    generator = torch.Generator().manual_seed(1)
    master, first, second = (torch.zeros(partition * ranks) for _ in range(3))
    for vector in (master, first, second):
        vector[:elements].normal_(0, 0.02, generator=generator)
    second.square_()
    (folder / tag).mkdir(parents=True)
    starts, start = {}, 0
    for name, shape in shapes.items():
        starts[name] = start
        start += shape.numel()
    module = {
        name: master[starts[name] : starts[name] + shape.numel()].reshape(shape).bfloat16()
        for name, shape in shapes.items()
    }
    model_states = {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict(shapes)],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 1,
        "global_samples": ranks,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        **common,
    }
    torch.save(model_states, folder / tag / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        begin, end = rank * partition, (rank + 1) * partition
        padding = min(max(end - elements, 0), partition)
        pieces = OrderedDict()
        for name, shape in shapes.items():
            piece_begin, piece_end = max(starts[name], begin), min(starts[name] + shape.numel(), end)
            if piece_begin < piece_end:
                pieces[name] = fragment_address(piece_end - piece_begin, piece_begin - begin)
        moments = {
            "step": torch.tensor(1.0),
            "exp_avg": first[begin:end].clone(),
            "exp_avg_sq": second[begin:end].clone(),
        }
        state = {
            "loss_scaler": LossScaler(1),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": {0: moments}, "param_groups": [{**_SETTINGS, "params": [0]}]},
            "single_partition_of_fp32_groups": [master[begin : end - padding].clone()],
            "zero_stage": ZeroStageEnum.gradients,
            "group_paddings": [padding],
            "param_alignment_paddings": [[0] * len(shapes)],
            "partition_count": [ranks],
            "ds_version": _VERSION,
            "param_slice_mappings": [pieces],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, **common}, folder / tag / name)
    (folder / "latest").write_text(tag)


if __name__ == "__main__":
    where, newest, described, count = sys.argv[1:]
    whole = {name: torch.Size(shape) for name, shape in json.loads(Path(described).read_text()).items()}
    main(Path(where), newest, whole, int(count))

"""Files of DeepSpeed and Megatron that are no full checkpoint by their own words (`require_weights`, `share_of`).

DeepSpeed's files list the shapes of all parameters, whether or not the file has them; Megatron's have the arguments of
the run, which say over how many ranks a model was cut. Facts are of DeepSpeed 0.19 and Megatron-Core 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.nest.trees import Call, Dict, Value
from reshard_mpi.formats.torch.tensors import StoredTensor, numbers

# Entries of a file with one rank's optimizer state, by the stage of ZeRO that writes them.
_FLAT_STATE = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_CONVERTER = "DeepSpeed's zero_to_fp32.py, which lies beside its checkpoints, makes one of the weights"
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_AS_RANKS = "put the files of all ranks into folders rank_0, rank_1 ... (links will do), and say how they are cut"


class RankShare(NamedTuple):
    """Of what checkpoint a file is one rank's share, in words, and what to do to have all of it; empty: of none."""

    part_of: str = ""
    remedy: str = ""


def require_weights(root: Value, path: str) -> None:
    """Raise ShardError for a file of DeepSpeed or Megatron in which the tensors themselves are not, or in pieces."""
    if type(root) is not Dict:
        return
    state = root.get("optimizer_state_dict")
    if type(state) is Dict and any(state.get(name) is not None for name in _FLAT_STATE):
        raise ShardError(
            "a file holds one rank's part of the optimizer of a DeepSpeed ZeRO checkpoint",
            expected="whole tensors, or parts of each",
            got="flat pieces of all parameters in a row",
            where=path,
            remedy=_CONVERTER,
        )
    if root.get("buckets_coalesced") is not None:
        raise ShardError(
            "a file holds the distributed optimizer of a Megatron checkpoint (distrib_optim.pt)",
            expected="whole tensors, or parts of each",
            got="flat buckets, in which many parameters lie in a row",
            where=path,
            remedy="the weights are in model_optim_rng.pt beside it; Megatron can save the optimizer's state as"
            " torch_dist, by --dist-ckpt-optim-fully-reshardable",
        )
    if root.get("ds_version") is not None and root.get("param_shapes") is not None:
        _require_listed_weights(root, path)


def _require_listed_weights(root: Dict, path: str) -> None:
    """Raise ShardError unless a file with DeepSpeed's model states holds all parameters that it lists."""
    held = dict(_pairs(root.get("module")))
    lacking, empty = [], []
    shapes = root.get("param_shapes")
    for name, shape in (pair for group in (shapes if type(shapes) is list else [shapes]) for pair in _pairs(group)):
        tensor = held.get(name)
        if tensor is None:
            lacking.append(name)
        elif type(tensor) is StoredTensor and 0 in tensor.shape and not _is_size(shape, tensor.shape):
            empty.append(name)
    if empty:
        raise ShardError(
            "a file is of a DeepSpeed ZeRO stage 3 checkpoint, and has no weights",
            expected="parameters of the shapes that the file lists",
            got=f"{len(empty)} that are empty, such as {empty[0]!r} of shape {list(held[empty[0]].shape)}",
            where=path,
            remedy="the weights lie in pieces in the files *_optim_states.pt beside it; " + _CONVERTER,
        )
    if lacking:
        others = "layer_*_expert_*_model_states.pt" if held else "layer_*-model_states.pt"
        raise ShardError(
            "a file of a DeepSpeed checkpoint does not hold all weights that it lists",
            expected=f"all parameters, {lacking[0]!r} among them",
            got=f"{len(lacking)} are not in it; "
            + ("experts" if held else "layers of a pipeline")
            + f" lie in {others}",
            where=path,
            remedy="load the checkpoint with DeepSpeed, and save the state_dict() of the model",
        )


def share_of(root: Value) -> RankShare:
    """Return of what checkpoint a file says that it is one rank's share."""
    if type(root) is not Dict:
        return RankShare()
    ranks = root.get("mp_world_size")
    if root.get("ds_version") is not None and type(ranks) is int and ranks > 1:
        return RankShare(f"a DeepSpeed checkpoint of {ranks} model-parallel ranks", _AS_RANKS)
    args = root.get("args")
    if type(args) is Call and type(args.state) is Dict and root.get("checkpoint_version") is not None:
        sizes = [args.state.get(name) for name in _PARALLEL]
        if any(type(size) is int and size > 1 for size in sizes):
            shown = " x ".join(str(size) for size in sizes if type(size) is int)
            what = f"a Megatron checkpoint of {shown} ranks (tensor x pipeline x expert parallel)"
            return RankShare(what, f"{_AS_RANKS}; reshard-mpi help strategies shows it for tensor parallelism")
    return RankShare()


def _pairs(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a dictionary, ordered or not, whose keys are texts; none of anything else."""
    if type(value) is Dict or type(value) is Call:
        yield from ((key, entry) for key, entry in value.pairs() if type(key) is str)


def _is_size(value: Value, shape: tuple[int, ...]) -> bool:
    """Tell whether a size is that of a tensor, or no size at all."""
    try:
        return numbers(value) == shape
    except ValueError:
        return True

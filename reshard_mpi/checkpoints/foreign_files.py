"""Refuse checkpoints of DeepSpeed and Megatron, and name files that are left out (`require_readable`).

Their folders hold torch's files, which would pass for one full checkpoint, or for none. Each is refused by what it is.

A folder that is read as one checkpoint may hold more of the same save: settings, the state of schedulers, tensors in
another form. So every file in it is read, or named, or one of those that are known to be no part of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import SourceError
from reshard_mpi.filesystem import stores
from reshard_mpi.formats.files import is_file_name

# Files that name the folder of the latest save, as DeepSpeed and its converter write them.
_TRACKERS = ("latest", "latest_universal")
_MAX_TAG_BYTES = 255
_STATES = (
    r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_?optim_states\.pt|(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt"
    r"|layer_\d+(?:-model_\d+)?-model_states\.pt|(?:layer_\d+_)?expert_\d+_mp_rank_\d+_(?:model|optim)_states\.pt"
    r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_STAGE_3 = r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt"
_OPTIMIZER = r".*_?optim_states\.pt"
_LAYERS = r"layer_\d+(?:-model_\d+)?-model_states\.pt"
_EXPERTS = r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
_WEIGHTS = "mp_rank_00_model_states.pt"
# The folder of parameters in what ds_to_universal.py makes.
_UNIVERSAL, _OF_PARAMETER = "zero", "fp32.pt"
_MEGATRON_FOLDER = r"mp_rank_\d{2}(?:_\d{3}){0,2}"
_MEGATRON_FILE, _MEGATRON_OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
_MAX_LOOKED_INTO = 64
_SETTINGS, _SETTINGS_BYTES, _ZARR = "metadata.json", 4096, b'"sharded_backend": "zarr"'


class ForeignCheckpointError(SourceError):
    """The checkpoint is of another program, in a form that is known and not read."""


class _ForeignFolder(NamedTuple):
    """A folder of another program: its kind, where its contents are, and advice."""

    what: str
    got: str
    remedy: str


def require_readable(folder: str, role: str) -> None:
    """Raise ForeignCheckpointError if a folder, or a save that a file in it names, is of a form that is not read.

    Args:
        role: what errors call the checkpoint.
    """
    tagged = _tagged(folder)
    for path in (folder, *tagged):
        kind = _deepspeed(path) or _megatron(path)
        if kind is not None:
            raise ForeignCheckpointError(
                f"the {role} is {kind.what}, which is not read",
                expected="whole tensors, or shards with a strategy",
                got=kind.got,
                where=path,
                remedy=kind.remedy,
            )


def _tagged(folder: str) -> list[str]:
    """Return the folders that DeepSpeed's trackers in a folder name."""
    folders = []
    for tracker in _TRACKERS:
        try:
            tag = stores.first_bytes(Path(folder, tracker), _MAX_TAG_BYTES + 1).decode().strip()
            if is_file_name(tag) and stores.is_folder(Path(folder, tag)):
                folders.append(str(Path(folder, tag)))
        except (OSError, UnicodeDecodeError):
            continue
    return folders


def _deepspeed(folder: str) -> _ForeignFolder | None:
    """Return the kind of a DeepSpeed folder; None if the folder is not DeepSpeed's."""
    names = stores.names(folder, ())
    states = [name for name in names if re.fullmatch(_STATES, name)]
    weights = f"; its 16-bit weights alone: give {_WEIGHTS}" if _WEIGHTS in states else ""
    is_parameters = _has_parameters(folder, names)
    if is_parameters or (_UNIVERSAL in names and _has_parameters(str(Path(folder, _UNIVERSAL)))):
        return _ForeignFolder(
            "a universal checkpoint of DeepSpeed",
            f"the weights and the optimizer's state in {'' if is_parameters else 'zero/'}PARAMETER/fp32.pt and so on",
            f"convert the checkpoint that it was made from with DeepSpeed's zero_to_fp32.py{weights}",
        )
    if not states or (len(states) == 1 and _WEIGHTS in states):
        return None  # 16-bit weights alone: a file of one full checkpoint, or one that says that it is none
    parts = sum(1 for name in states if re.fullmatch(_OPTIMIZER, name))
    of_optimizer = f"the optimizer's state in flat pieces in {parts} files *_optim_states.pt"
    if any(re.fullmatch(_LAYERS, name) for name in states) or any(re.fullmatch(_EXPERTS, name) for name in states):
        kind = "pipeline" if any(re.fullmatch(_LAYERS, name) for name in states) else "mixture of experts"
        return _ForeignFolder(
            f"a DeepSpeed checkpoint of a {kind}",
            f"weights in {len(states) - parts} files *_model_states.pt, {of_optimizer}",
            "load it with DeepSpeed, and save the state_dict() of the model",
        )
    if any(re.fullmatch(_STAGE_3, name) for name in states):
        return _ForeignFolder(
            "a DeepSpeed ZeRO stage 3 checkpoint",
            f"its weights and {of_optimizer}",
            "zero_to_fp32.py, which DeepSpeed puts beside it, makes one of the weights",
        )
    return _ForeignFolder(
        "a DeepSpeed ZeRO checkpoint",
        f"weights in *_model_states.pt, {of_optimizer}",
        f"zero_to_fp32.py, which DeepSpeed puts beside it, makes one of the fp32 weights{weights}",
    )


def _has_parameters(folder: str, names: Sequence[str] | None = None) -> bool:
    """Tell whether folders of parameters lie in a folder, as far as it is looked into."""
    listed = stores.names(folder, ()) if names is None else names
    return any(stores.is_file(Path(folder, name, _OF_PARAMETER)) for name in listed[:_MAX_LOOKED_INTO])


def _megatron(folder: str) -> _ForeignFolder | None:
    """Return the kind of a folder in Megatron's old form; None if it is not one. torch_dist counts as torch's."""
    names = stores.names(folder, ())
    of_ranks = (name for name in names if re.fullmatch(_MEGATRON_FOLDER, name))
    ranks = [name for name in of_ranks if stores.is_file(Path(folder, name, _MEGATRON_FILE))]
    if _is_zarr(folder, names):
        return _ForeignFolder(
            "a Megatron checkpoint in zarr", "arrays of zarr", "load it with Megatron, and save it as torch_dist"
        )
    if _MEGATRON_FILE in names and _MEGATRON_OPTIMIZER not in names:
        return None  # one file, which may be a full checkpoint, and says so if it is not
    remedy = (
        f"the weights are in {_MEGATRON_FILE}: of one rank give that file; with tensor parallelism alone put those of"
        " all ranks into folders rank_0, rank_1 ... (links will do) and say how the tensors are cut: reshard-mpi help"
        " strategies; else load it with Megatron, and save it as torch_dist"
    )
    if ranks:
        return _ForeignFolder("a Megatron checkpoint of the old form", f"{len(ranks)} folders mp_rank_*", remedy)
    if _MEGATRON_FILE in names:
        what = f"{_MEGATRON_FILE}, and the optimizer's state in flat buckets in {_MEGATRON_OPTIMIZER}"
        return _ForeignFolder("one rank of a Megatron checkpoint of the old form", what, remedy)
    return None


def _is_zarr(folder: str, names: Sequence[str]) -> bool:
    return _SETTINGS in names and _ZARR in stores.first_bytes(Path(folder, _SETTINGS), _SETTINGS_BYTES, b"")

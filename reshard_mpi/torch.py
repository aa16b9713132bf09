"""Load any checkpoint into torch: a running model of any mesh (`Reader`), or one process (`load`). It imports torch."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from operator import add
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from reshard_mpi import formats
from reshard_mpi.api.calls import PathLike
from reshard_mpi.api.checkpoint import Checkpoint, Tensor, open, require_same_state
from reshard_mpi.errors import UsageError
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

# Loaded now, as torch's own readers are, and not while all processes of a training wait for their checkpoint.
for _name in ("dcp", "safetensors", "hf", "torch"):
    formats.by_name(_name)
importlib.import_module("reshard_mpi.journal.record_finder")

# The memory for elements on their way to another device.
_BUFFER_BYTES = 64 * MIB


class Reader(StorageReader):
    """Reads a checkpoint of any format for torch.distributed.checkpoint, into any mesh and placement.

    Example: `dcp.load(state_dict, storage_reader=Reader("src", src_strategy="src_strategy.ckpt", map="map.toml"))`.

    Each process reads only its own slices, straight into the memory of its tensors, or through a buffer of 64 MiB if
    they are on another device. Values that are no tensors (steps, groups of optimizers, schedulers) have the names that
    torch gives them, and come as plain Python values; a tuple that holds tensors has none.

    Args:
        source, options: as in `reshard_mpi.open`. Only the coordinator takes the sample by which `check` sees that a
            strategy does not fit.

    What is wrong raises CheckpointException on every rank, with the error of each rank that has one: ReshardErrors of
    the source, torch's own errors for names and shapes, UsageError for a tensor of another type than the checkpoint's.
    Tensors may be filled in part then.
    """

    def __init__(self, source: PathLike, **options: Any) -> None:
        inspect.signature(open).bind(source, **options)  # raises TypeError for options that there are not
        self._source, self._options = source, {**options, "check": False}
        self._is_to_be_checked = options.get("check", True)
        self._opened: Checkpoint | None = None

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Close the checkpoint; the next one that is read is `checkpoint_id`, or the same again."""
        if checkpoint_id is not None:
            self._source = checkpoint_id
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Tell whether this may be a checkpoint; only opening it tells."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, which is opened later."""
        self.reset()
        return LazyMetadata(self._checkpoint)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the checkpoint, and on the coordinator check it. Raises as `reshard_mpi.open` does."""
        if is_coordinator and self._is_to_be_checked:
            self.reset()
            self._opened = open(self._source, **{**self._options, "check": self._is_to_be_checked})
        self._checkpoint()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan that torch has made, with the state of the checkpoint that this process has opened."""
        return dataclasses.replace(plan, storage_data=self._checkpoint().state)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all processes. Raises DisagreementError if they have opened different checkpoints."""
        for plan in plans:
            require_same_state(plans[0].storage_data, plan.storage_data)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, and close the checkpoint."""
        try:
            checkpoint = self._checkpoint()
            values: dict[str, Any] | None = None
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    values = _values(checkpoint) if values is None else values
                    stream = io.BytesIO()
                    _require_plain(values[name], name)
                    torch.save(values[name], stream)
                    stream.seek(0)
                    planner.load_bytes(item, stream)
                else:
                    tensor = planner.resolve_tensor(item).detach()
                    _fill(tensor, checkpoint[name], item.storage_offsets, item.lengths)
                    planner.commit_tensor(item, tensor)
        finally:
            self.reset()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            self._opened = open(self._source, **self._options)
        return self._opened


class LazyMetadata(Metadata):
    """The metadata of a checkpoint, for torch. The checkpoint is opened when they are first used.

    Opened in `read_metadata`, a checkpoint that is refused would be an AssertionError: torch turns errors into that.
    """

    def __init__(self, opened: Callable[[], Checkpoint]) -> None:
        self._opened = opened

    @cached_property
    def state_dict_metadata(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        checkpoint = self._opened()
        tensors = {name: _metadata(tensor) for name, tensor in checkpoint.items()}
        return tensors | dict.fromkeys(_values(checkpoint), BytesStorageMetadata())

    @cached_property
    def planner_data(self) -> dict[str, tuple[str]]:
        """The path of each entry in a state_dict that torch makes: its name alone."""
        return {name: (name,) for name in self.state_dict_metadata}


def load(source: PathLike, **options: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of any format, whole, in memory that is theirs alone.

    Args:
        source, options: as in `reshard_mpi.open`.

    Raises as that does.
    """
    with open(source, **options) as checkpoint:
        tensors = {}
        for name, tensor in checkpoint.items():
            tensors[name] = torch.empty(tensor.shape, dtype=_torch_dtype(tensor.dtype))
            _fill(tensors[name], tensor, (0,) * tensor.ndim, tensor.shape)
        return tensors


def _fill(tensor: torch.Tensor, source: Tensor, start: Sequence[int], shape: Sequence[int]) -> None:
    """Read the box of `source` that begins at `start` into a tensor. Raises UsageError if that has another type."""
    dtype = _torch_dtype(source.dtype)
    if tensor.dtype != dtype:
        raise UsageError(
            "a tensor has another type than the checkpoint",
            expected=str(dtype),
            got=str(tensor.dtype),
            where=source.name,
            remedy="load with dtype=, which converts, or make the tensor of this type",
        )
    stop = tuple(map(add, start, shape))
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg()):
        source.read_into(_memory(tensor, source), tuple(map(slice, start, stop)))
        return
    box = Box(tuple(start), stop)
    for block in box.blocks(_BUFFER_BYTES // dtype.itemsize):
        buffer = torch.empty(block.shape, dtype=dtype)
        source.read_into(_memory(buffer, source), _slices(block))
        tensor[_slices(block.relative_to(box))].copy_(buffer)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    same: torch.dtype = getattr(torch, dtype.name)
    return same


def _memory(tensor: torch.Tensor, source: Tensor) -> Any:
    """Return the memory of a tensor as an array of the type that `source` has, which may be none of numpy's own."""
    if source.dtype.isbuiltin == 1:
        return tensor.numpy()
    return tensor.view(getattr(torch, f"int{8 * source.dtype.itemsize}")).numpy().view(source.dtype)


def _metadata(tensor: Tensor) -> TensorStorageMetadata:
    """Describe a tensor as one chunk; torch asks for parts of it."""
    shape = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.ndim), shape)
    return TensorStorageMetadata(TensorProperties(_torch_dtype(tensor.dtype)), shape, [chunk])


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the values beside the tensors, by the names that `flatten_state_dict` of torch gives them."""
    return dict(_named_values(checkpoint.attrs, "", checkpoint))


def _require_plain(value: Any, name: str) -> None:
    """Raise UsageError if a value is, or holds, an object that `Checkpoint.attrs` only describes."""
    if isinstance(value, dict) and value.keys() == {"class", "args", "state"}:
        raise UsageError(
            "a value is an object that is not made of what a file says",
            expected="numbers, texts, lists and dictionaries",
            got=str(value["class"]),
            where=name,
            remedy="leave it out of the state_dict, and load it with torch from the checkpoint itself",
        )
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ():
        _require_plain(part, name)


def _named_values(value: Any, name: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _named_values(inner, f"{name}.{key}" if name else str(key), tensors)
    elif isinstance(value, list) and _is_flattened(value, name, tensors):
        for index, inner in enumerate(value):
            if f"{name}.{index}" not in tensors:
                yield from _named_values(inner, f"{name}.{index}", tensors)
    elif not isinstance(value, (tuple, deque)) or not any(each.startswith(f"{name}.") for each in tensors):
        yield name, value


def _is_flattened(items: list[Any], name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether torch names the items of a list: if a tensor or a dictionary is in it, or in a list in it."""
    return any(
        f"{name}.{index}" in tensors
        or isinstance(item, dict)
        or (isinstance(item, list) and _is_flattened(item, f"{name}.{index}", tensors))
        for index, item in enumerate(items)
    )

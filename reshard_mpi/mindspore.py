"""Load any checkpoint into a network of MindSpore (`load`). It imports mindspore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mindspore
import numpy as np
from mindspore.communication import GlobalComm, get_rank

from reshard_mpi.api.calls import PathLike, public, request_of
from reshard_mpi.api.checkpoint import Tensor, opened
from reshard_mpi.errors import UsageError
from reshard_mpi.formats.dtypes import BY_MINDSPORE_NAME, to_numpy
from reshard_mpi.options import check_flag, check_number
from reshard_mpi.runs.request import Request, Strategies


@public
def load(
    network: mindspore.nn.Cell,
    source: PathLike,
    *,
    src_strategy: PathLike | None = None,
    dst_strategy: PathLike | None = None,
    rank: int | None = None,
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    source_format: str | None = None,
    select: str | None = None,
    src_files: int | None = None,
    unlisted: str = "follow",
    replicas: str = "sample",
    accumulated: str = "refuse",
    check: bool = True,
) -> tuple[list[str], list[str]]:
    """Fill the parameters of a network with one rank's slices of a checkpoint of any format.

    Args:
        source, src_strategy, map to check: as in `reshard_mpi.open`. dst_strategy, unlisted: how the network is cut, as
            in `transform`; None: not at all.
        rank: whose slices; None: those of this process in mindspore.communication, if the network is cut.

    Returns the names of the parameters that the checkpoint lacks, and what of the checkpoint the network lacks, as
    `load_param_into_net` does. Raises a ReshardError; nothing is loaded if a parameter has another shape or type.
    """
    arguments = dict(locals())
    arguments["rank"] = None
    is_checked = check_flag(arguments.pop("check"), "check")
    request = request_of(arguments)
    request.require_list_to_drop_by()
    number = _own_rank(request) if rank is None else check_number(rank, "rank")
    parameters = {parameter.name: parameter for _, parameter in network.parameters_and_names()}
    with opened(request, number, check=is_checked) as checkpoint:
        missing = [
            name for name, each in parameters.items() if name not in checkpoint and not _is_made_in_running(each)
        ]
        both = [(parameter, checkpoint[name]) for name, parameter in parameters.items() if name in checkpoint]
        for parameter, tensor in both:
            _require_same_type(parameter, tensor)
        for parameter, tensor in both:
            parameter.set_data(_read(tensor, parameter.dtype), parameter.sliced)
        return missing, [name for name in (*checkpoint, *checkpoint.texts) if name not in parameters]


def _own_rank(request: Request) -> int:
    """Return the rank of this process. Raises UsageError if MindSpore does not know it."""
    world_size = Strategies.read(request).target.world_size
    if world_size == 1:
        return 0
    if not GlobalComm.INITED:
        raise UsageError(
            "it is not known which rank's slices to load",
            expected=f"rank=, 0 to {world_size - 1}, or mindspore.communication.init() before",
            got="neither",
        )
    return int(get_rank())


def _is_made_in_running(parameter: mindspore.Parameter) -> bool:
    """Tell whether `load_param_into_net` does not miss a parameter: accumulated gradients, and one of another stage."""
    return parameter.name.startswith("accu_grads") or bool(parameter.param_info.is_pipeline_shared_param)


def _require_same_type(parameter: mindspore.Parameter, tensor: Tensor) -> None:
    dtype = BY_MINDSPORE_NAME.get(str(parameter.dtype))
    if dtype is None or to_numpy(dtype) != tensor.dtype or tuple(parameter.shape) != tensor.shape:
        raise UsageError(
            "a parameter is not as the checkpoint has it",
            expected=f"{tensor.dtype.name} {list(tensor.shape)}",
            got=f"{dtype or parameter.dtype} {list(parameter.shape)}",
            where=tensor.name,
            remedy="load with dtype= for another type, with dst_strategy= and rank= for the slices of one rank",
        )


def _read(tensor: Tensor, dtype: Any) -> mindspore.Tensor:
    array: np.ndarray[Any, Any] = tensor[...]
    if tensor.dtype.isbuiltin == 1:
        return mindspore.Tensor.from_numpy(array)  # of the same memory
    return mindspore.Tensor(mindspore.Tensor.convert_bytes_to_tensor(array.tobytes(), array.shape, dtype))

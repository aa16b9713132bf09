"""MindSpore's protobuf strategy files read into the values of `mindspore`, item by item, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, BinaryIO

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.strategy.checks import parsed_size, text
from reshard_mpi.sharding.strategy.items import CURRENT_STAGE, STRATEGY_ITEM, DamageError, items
from reshard_mpi.sharding.strategy.limits import MAX_AXES, MAX_DIMENSIONS, MAX_INPUTS, MAX_SLICES
from reshard_mpi.sharding.strategy.messages import DecodeError, messages
from reshard_mpi.sharding.strategy.mindspore import REMEDY, RawLayout, StageFile, StrategyItem, place

# What is kept of an operator or parameter, and of one input's cuts.
_KEPT_BYTES = 400
_KEPT_CUT_BYTES = 80


def decode_protobuf(data: bytes | BinaryIO, path: str) -> StageFile:
    """Read a protobuf strategy file. Raises StrategyError if it is not one."""
    operators: list[StrategyItem] = []
    layouts: dict[str, RawLayout] = {}
    seen: dict[bytes, RawLayout] = {}
    has_stage, kept_bytes = False, 0
    try:
        for item in items(io.BytesIO(data) if isinstance(data, bytes) else data):
            if item.number == CURRENT_STAGE:
                has_stage = True
                continue
            if item.number == STRATEGY_ITEM:
                operators.append(_operator(item.content, path, len(operators)))
                kept_bytes += _KEPT_BYTES + _KEPT_CUT_BYTES * len(operators[-1].parallel_strategy)
            else:
                name, layout = _parameter(item.content, path, len(layouts), seen)
                kept_bytes += _KEPT_BYTES
                if layouts.setdefault(name, layout) != layout:
                    raise StrategyError(
                        "a parameter is listed twice, with different layouts", got=name, where=path, remedy=REMEDY
                    )
            parsed_size(kept_bytes, item.end_bytes, path)
    except DamageError as error:
        raise _damaged(f"cut off or damaged ({error})", path) from None
    except OSError as error:
        raise StrategyError("the strategy cannot be read", got=str(error), where=path) from None
    if not has_stage:
        raise _damaged("without current_stage", path)
    return StageFile(layouts, tuple(operators), path)


def parse_protobuf(data: bytes, path: str) -> Any:
    """Return the ParallelStrategyMap message that `data`, which has been decoded before, is."""
    return _parsed(messages().strategy_map, data, path, "")


def _parsed(kind: Any, data: bytes, path: str, within: str) -> Any:
    """Return the message of `kind` that `data` is; `within` is what it is called."""
    message = kind()
    try:
        message.ParseFromString(data)
        missing = [] if message.IsInitialized() else message.FindInitializationErrors()
        problem = f"without {', '.join(within + name for name in missing[:3])}" if missing else ""
    except (DecodeError, UnicodeDecodeError) as error:  # the library without compiled code checks names at once
        problem = f"cut off or damaged ({error})"
    if problem:
        raise _damaged(problem, path)
    return message


def _damaged(problem: str, path: str) -> StrategyError:
    return StrategyError(
        "the strategy file is damaged, or no strategy",
        expected="a MindSpore strategy (protobuf or JSON) or a TOML spec",
        got=f"protobuf {problem}",
        where=path,
        remedy=REMEDY,
    )


def _operator(data: bytes, path: str, at: int) -> StrategyItem:
    item = _parsed(messages().strategy_item, data, path, f"parallel_strategy_item[{at}].")
    cuts = item.parallel_strategys.parallel_strategy
    if len(cuts) > MAX_INPUTS or any(len(cut.dim) > MAX_DIMENSIONS for cut in cuts):
        raise _too_long("an operator's strategy", f"{MAX_INPUTS} inputs of {MAX_DIMENSIONS} dimensions", path)
    # proto2 does not check strings while parsing: invalid UTF-8 comes out as bytes.
    name = text(item.node_name, "an operator's name", path)
    return StrategyItem(name, item.parallel_strategys.stage, tuple(tuple(cut.dim) for cut in cuts))


def _parameter(data: bytes, path: str, at: int, seen: dict[bytes, RawLayout]) -> tuple[str, RawLayout]:
    """Return a parameter's name and its layout; equal ones are taken from `seen`, by their bytes."""
    item = _parsed(messages().layout_item, data, path, f"parallel_layout_item[{at}].")
    name = text(item.param_name, "a parameter's name", path)
    key = item.parallel_layouts.SerializeToString()
    layout = seen.get(key)
    if layout is None:
        layout = seen[key] = _layout(item.parallel_layouts, place(path, name))
    return name, layout


def _too_long(what: str, expected: str, where: str) -> StrategyError:
    return StrategyError(f"{what} is too long", expected=f"at most {expected}", where=where, remedy=REMEDY)


def _layout(message: Any, where: str) -> RawLayout:
    # A mesh axis or dimension too many is told when the layout is given a meaning; this is about memory.
    limit = 2 * MAX_DIMENSIONS
    if len(message.tensor_map) > limit or any(len(tensor_map.dim) > limit for tensor_map in message.tensor_map):
        raise _too_long("a tensor map", f"{MAX_DIMENSIONS} dimensions", where)
    maps = [tuple(tensor_map.dim) for tensor_map in message.tensor_map]
    # One message a dimension is a nested map; a nested map of one dimension has an empty second one.
    if len(maps) > 1:
        tensor_map = tuple(axes for axes in maps if axes)
    else:
        tensor_map = tuple((axis,) for axis in maps[0]) if maps else ()
    return RawLayout(
        _only(message.dev_matrix, "dev_matrix", 2 * MAX_AXES, where),
        tensor_map,
        message.opt_weight_shard_size,
        message.opt_weight_shard_step,
        _only(message.param_split_shape, "param_split_shape", MAX_SLICES, where),
        _only(message.indices_offset, "indices_offset", MAX_SLICES, where),
        message.field,
    )


def _only(repeated: Sequence[Any], field: str, limit: int, where: str) -> tuple[int, ...]:
    if len(repeated) > 1:
        raise StrategyError(f"a layout has several of {field}", expected="one", got=str(len(repeated)), where=where)
    if repeated and len(repeated[0].dim) > limit:
        raise _too_long(field, f"{limit} numbers", where)
    return tuple(repeated[0].dim) if repeated else ()

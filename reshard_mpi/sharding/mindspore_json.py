"""Read and write MindSpore's JSON strategies (`parse_json`).

A file is one pipeline stage as one rank saw it, or several merged stages whose names begin with `<stage>-`. Nothing is
interpreted here: `mindspore_layouts` gives the values their meaning. Facts: MindSpore's `node_strategy.proto` and
`mindspore/parallel/_parallel_serialization.py` of 2.10.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.value_checks import (
    MAX_DIMENSIONS,
    MAX_INPUTS,
    array,
    integer,
    integers,
    parsed_size,
    table,
    text,
    wrong,
)

_INT32 = (-(1 << 31), (1 << 31) - 1)
_UINT32 = (0, (1 << 32) - 1)
_INT64 = (-(1 << 63), (1 << 63) - 1)
# What JSON's marks cost when it is parsed.
_JSON_BYTES = {"{": 200, "[": 72, ",": 24}
REMEDY = "give the strategy file that MindSpore wrote while compiling, or a TOML spec"


class RawLayout(NamedTuple):
    """One parameter's layout as the file states it."""

    dev_matrix: tuple[int, ...]
    # for each tensor dimension the mesh axes that cut it, counted from the right, major first; (-1,) where it is not
    # cut, and a -1 beside axes means nothing
    tensor_map: tuple[tuple[int, ...], ...]
    opt_weight_shard_size: int = 0
    opt_weight_shard_step: int = 0
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    tensor_shape: tuple[int, ...] | None = None  # JSON only, the whole tensor in the dimensions of tensor_map

    @property
    def is_nested(self) -> bool:
        """Whether several mesh axes cut one dimension."""
        return any(len(axes) > 1 for axes in self.tensor_map)


class StrategyItem(NamedTuple):
    """How one operator was cut. MindSpore takes the pipeline stage of a file from its first item."""

    node_name: str
    stage: int
    parallel_strategy: tuple[tuple[int, ...], ...] = ()


class StageFile(NamedTuple):
    """The contents of one strategy file. Equal layouts are one object."""

    layouts: Mapping[str, RawLayout]
    items: tuple[StrategyItem, ...] = ()
    path: str = ""

    @property
    def stage(self) -> int | None:
        """The pipeline stage of a file of one stage; None if it has no strategy item to tell it."""
        return self.items[0].stage if self.items else None


def place(path: str, name: str) -> str:
    """Return how errors name parameter `name` of the file `path`."""
    return f"{path}, parameter {name!r}" if path else f"parameter {name!r}"


def decode_json(data: str, path: str) -> StageFile:
    """Read a JSON strategy file, whose text is `data`. Raises StrategyError if it is not one."""
    content = parse_json(data, path)
    try:
        items = tuple(
            _json_item(node_name, item, path)
            for node_name, item in table(content.get("parallel_strategy_item", {}), "strategy items", path).items()
        )
        layouts: dict[str, RawLayout] = {}
        seen: dict[str, RawLayout] = {}
        for name, item in table(content.get("parallel_layout_item"), "parallel_layout_item", path).items():
            key = repr(item)  # tells 1 from True and 1.0, which are equal as dictionary keys
            layout = seen.get(key)
            if layout is None:
                layout = seen[key] = _json_layout(item, place(path, name))
            layouts[text(name, "a parameter's name", path)] = layout
    except RecursionError:
        raise _too_deep(path) from None
    return StageFile(layouts, items, path)


def parse_json(data: str, path: str) -> dict[str, Any]:
    """Return the JSON object `data`. Raises StrategyError for anything else, and if an object has a name twice."""
    parsed_bytes = sum(size_bytes * data.count(mark) for mark, size_bytes in _JSON_BYTES.items())
    parsed_size(parsed_bytes, len(data), path)
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except _DuplicateError as error:
        raise StrategyError(
            "the JSON lists a name twice", expected="each name once", got=str(error)[:200], where=path, remedy=REMEDY
        ) from None
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:  # also a number of thousands of digits
        raise StrategyError("this is damaged JSON", got=str(error)[:200], where=path, remedy=REMEDY) from None
    return table(content, "the JSON", path)


class _DuplicateError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise _DuplicateError(repr(Counter(name for name, _ in pairs).most_common(1)[0][0]))
    return content


def _too_deep(path: str) -> StrategyError:
    return StrategyError("the JSON is nested too deep to be a strategy", where=path, remedy=REMEDY)


def _json_item(node_name: str, item: Any, path: str) -> StrategyItem:
    where = f"{path}, operator {node_name!r}"
    item = table(item, "a strategy item", where)
    cuts = array(item.get("parallel_strategy", []), "parallel_strategy", where, MAX_INPUTS)
    return StrategyItem(
        text(node_name, "an operator's name", path),
        integer(item.get("stage"), "stage", *_UINT32, where),
        tuple(integers(cut, "parallel_strategy", *_UINT32, where) for cut in cuts),
    )


def _json_layout(item: Any, where: str) -> RawLayout:
    item = table(item, "a layout", where)
    entries = array(item.get("tensor_map"), "tensor_map", where, 2 * MAX_DIMENSIONS)
    axes_lists = (entry if isinstance(entry, list) else [entry] for entry in entries)
    shape = item.get("tensor_shape")
    return RawLayout(
        integers(item.get("dev_matrix"), "dev_matrix", *_UINT32, where),
        tuple(integers(entry or [-1], "tensor_map", *_INT32, where) for entry in axes_lists),
        integer(item.get("opt_weight_shard_size", 0), "opt_weight_shard_size", *_INT32, where),
        integer(item.get("opt_weight_shard_step", 0), "opt_weight_shard_step", *_INT32, where),
        integers(item.get("param_split_shape", []), "param_split_shape", *_INT64, where),
        integers(item.get("indices_offset", []), "indices_offset", *_INT64, where),
        integer(item.get("field", 0), "field", *_INT32, where),
        None if shape is None else integers(shape, "tensor_shape", *_INT64, where),
    )


def encode_json(file: StageFile) -> bytes:
    """Return the bytes of a JSON strategy file; nested maps are expanded, as MindSpore does it.

    Raises StrategyError for a nested map without tensor_shape, since its factors are unknown.
    """
    content = {
        "current_stage": 1,
        "parallel_strategy_item": {
            item.node_name: {"stage": item.stage, "parallel_strategy": [list(cut) for cut in item.parallel_strategy]}
            for item in file.items
        },
        "parallel_layout_item": {
            name: _json_of(layout, place(file.path, name)) for name, layout in file.layouts.items()
        },
    }
    return json.dumps(content).encode()


def _json_of(layout: RawLayout, where: str) -> dict[str, Any]:
    # A -1 beside axes cuts nothing; written out it would be a factor of length 1, which could be any dimension's.
    axes_in_use = (tuple(axis for axis in axes if axis != -1) for axes in layout.tensor_map)
    layout = layout._replace(tensor_map=tuple(axes or (-1,) for axes in axes_in_use))
    flat, shape = [axis for axes in layout.tensor_map for axis in axes], layout.tensor_shape
    if layout.is_nested:
        uneven = layout.indices_offset and len(layout.tensor_map[0]) > 1
        if uneven or shape is None or len(shape) != len(layout.tensor_map):
            raise StrategyError(
                "a nested layout cannot be written as JSON without the tensor's shape, nor with uneven sizes",
                got=f"tensor map {[list(axes) for axes in layout.tensor_map]}",
                where=where,
                remedy="write a protobuf file (an output name that does not end in .json)",
            )
        shape = _expanded(layout, shape, where)
    values: dict[str, Any] = {"dev_matrix": list(layout.dev_matrix), "tensor_map": flat}
    if shape is not None:
        values["tensor_shape"] = list(shape)
    values["field"] = layout.field
    values["opt_weight_shard_step"] = layout.opt_weight_shard_step
    values["opt_weight_shard_size"] = layout.opt_weight_shard_size
    if layout.param_split_shape:
        values["param_split_shape"] = list(layout.param_split_shape)
    if layout.indices_offset:
        values["indices_offset"] = list(layout.indices_offset)
    return values


def _expanded(layout: RawLayout, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return `shape` with each dimension as its factors: the cuts of all its mesh axes but the last, and the rest."""
    factors: list[int] = []
    for axes, length in zip(layout.tensor_map, shape):
        for axis in axes[:-1]:
            if not 0 <= axis < len(layout.dev_matrix):
                raise wrong("tensor_map", f"axes of mesh {layout.dev_matrix}", axis, where)
            cut = layout.dev_matrix[-1 - axis]
            factors.append(cut)
            length //= cut or 1
        factors.append(length)
    return tuple(factors)

"""Read and write MindSpore's protobuf strategies, in bounded memory (`decode_protobuf`).

The messages are those of MindSpore's `node_strategy.proto` (proto2, repeated numbers not packed). A strategy is a
ParallelStrategyMap:

    ParallelStrategyMap  { uint32 current_stage = 1; repeated ParallelStrategyItem = 2;
                           repeated ParallelLayoutItem = 3 }
    ParallelStrategyItem { string node_name = 1; ParallelStrategys parallel_strategys = 2 }
    ParallelStrategys    { uint32 stage = 1; repeated ParallelStrategy = 2 }
    ParallelLayoutItem   { string param_name = 1; ParallelLayouts parallel_layouts = 2 }
    ParallelLayouts      { repeated DevMatrix = 1; repeated TensorMap = 2; repeated ParamSplitShape = 3;
                           repeated IndicesOffset = 4; int32 field = 5; int32 opt_weight_shard_step = 6;
                           int32 opt_weight_shard_size = 7 }

All fields that are not repeated are required; the messages that are not spelt out have `repeated dim = 1`: of uint32,
in TensorMap of int32, in ParamSplitShape and IndicesOffset of int64. Other fields are passed over, as protobuf does.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

from reshard_mpi import protobuf_wire
from reshard_mpi.errors import StrategyError
from reshard_mpi.protobuf_wire import LENGTH, VARINT, MessageField, encode_content, encode_number
from reshard_mpi.sharding.mindspore_json import REMEDY, RawLayout, StageFile, StrategyItem, place
from reshard_mpi.sharding.value_checks import (
    MAX_AXES,
    MAX_DIMENSIONS,
    MAX_INPUTS,
    MAX_ITEM_BYTES,
    MAX_SLICES,
    parsed_size,
    text,
)

_STAGE, _OPERATOR, _PARAMETER = (1, VARINT), (2, LENGTH), (3, LENGTH)
# The fields of each item: its name, and the message about it.
_NAME, _CONTENT = (1, LENGTH), (2, LENGTH)
# Memory of an operator or parameter, and of one input's cuts.
_KEPT_BYTES = 400
_KEPT_CUT_BYTES = 80
_READ_BYTES = MAX_ITEM_BYTES + 64

# A parameter with a short name, in which no control character looks like the next field, and a short layout. Groups:
# the length of it all, the length of the name, the name, the length of the layout.
_USUAL_PARAMETER = re.compile(
    rb"\x1a([\x00-\x7f]|[\x80-\xff][\x00-\x7f])\x0a([\x00-\x7f])([\x20-\xff]+)\x12([\x00-\x7f])"
)

Convert = Callable[[int], int]


def decode_protobuf(data: bytes | BinaryIO, path: str) -> StageFile:
    """Read a protobuf strategy file. Raises StrategyError if it is not one."""
    decoder = _Decoder(path)
    try:
        decoder.read(io.BytesIO(data) if isinstance(data, bytes) else data)
    except protobuf_wire.WireError as error:
        raise _damaged(f"cut off or damaged ({error})", path) from None
    except OSError as error:
        raise StrategyError("the strategy cannot be read", got=str(error), where=path) from None
    return decoder.file()


class _Decoder:
    """Takes the items of a file one by one. A message that many operators or parameters share is decoded once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._has_stage = False
        self._operators: list[StrategyItem] = []
        self._layouts: dict[str, RawLayout] = {}
        self._operator_of: dict[bytes, StrategyItem] = {}
        self._layout_of: dict[bytes, RawLayout] = {}
        self._kept_bytes = self._read_bytes = 0

    def read(self, stream: BinaryIO) -> None:
        """Take all items of a file. Raises StrategyError or WireError for files that are too large or no strategy."""
        data, offset = b"", 0
        while True:
            offset = self._take_alike(data, offset)
            try:
                item = protobuf_wire.field(data, offset, MAX_ITEM_BYTES)
            except protobuf_wire.MessageCutShortError:
                more = stream.read(_READ_BYTES)
                if not more and offset == len(data):
                    return
                if not more:
                    raise
                data, offset = data[offset:] + more, 0
                continue
            offset = item.end
            self._take(item)

    def _take_alike(self, data: bytes, offset: int) -> int:
        """Take the parameters from byte `offset` on whose layouts were met before; return the offset after them.

        Nearly all are such, encoded as MindSpore does it, and this takes a third of the time.
        """
        layouts, seen, matches, begin = self._layouts, self._layout_of, _USUAL_PARAMETER.match, offset
        count = 0
        while item := matches(data, offset):
            length, name_length, name, content_length = item.groups()
            start, size = item.end(), length[0] if len(length) == 1 else length[0] & 0x7F | length[1] << 7
            end = start + content_length[0]
            layout = seen.get(data[start:end])
            if layout is None or end != item.end(1) + size or end > len(data) or len(name) != name_length[0]:
                break
            try:
                if layouts.setdefault(sys.intern(name.decode()), layout) is not layout:
                    break
            except UnicodeDecodeError:
                break
            offset, count = end, count + 1
        self._read_bytes += offset - begin
        self._kept_bytes += count * _KEPT_BYTES
        return offset

    def _take(self, item: MessageField) -> None:
        self._read_bytes += item.end - item.start
        if item.kind == _STAGE:
            self._has_stage = True
        elif item.kind == _OPERATOR:
            self._take_operator(item.content)
        elif item.kind == _PARAMETER:
            self._take_parameter(item.content)
        parsed_size(self._kept_bytes, self._read_bytes, self._path)

    def file(self) -> StageFile:
        """Return the contents of the file. Raises StrategyError if it has no current_stage."""
        if not self._has_stage:
            raise _damaged("without current_stage", self._path)
        alike: dict[RawLayout, RawLayout] = {}
        layouts = {name: alike.setdefault(layout, layout) for name, layout in self._layouts.items()}
        return StageFile(layouts, tuple(self._operators), self._path)

    def _take_operator(self, data: bytes) -> None:
        within = f"parallel_strategy_item[{len(self._operators)}]."
        name, content = _named(data, within, _OPERATOR_FIELDS, self._path)
        if content not in self._operator_of:
            self._operator_of[content] = _operator(name, content, within, self._path)
        self._operators.append(self._operator_of[content]._replace(node_name=name))
        self._kept_bytes += _KEPT_BYTES + _KEPT_CUT_BYTES * len(self._operators[-1].parallel_strategy)

    def _take_parameter(self, data: bytes) -> None:
        within = f"parallel_layout_item[{len(self._layouts)}]."
        name, content = _named(data, within, _PARAMETER_FIELDS, self._path)
        if content not in self._layout_of:
            self._layout_of[content] = _layout(content, f"{within}parallel_layouts.", self._path, name)
        layout = self._layout_of[content]
        if self._layouts.setdefault(name, layout) != layout:
            problem = "a parameter is listed twice, with different layouts"
            raise StrategyError(problem, got=name, where=self._path, remedy=REMEDY)
        self._kept_bytes += _KEPT_BYTES


def encode_protobuf(file: StageFile) -> bytes:
    """Return the bytes of a protobuf strategy file."""
    parts = [encode_number(1, 1)]
    for item in file.items:
        cuts = (encode_content(2, _dims(cut)) for cut in item.parallel_strategy)
        content = encode_content(2, encode_number(1, item.stage), *cuts)
        parts.append(encode_content(2, encode_content(1, item.node_name.encode()), content))
    for name, layout in file.layouts.items():
        parts.append(encode_content(3, encode_content(1, name.encode()), encode_content(2, *_layout_fields(layout))))
    return b"".join(parts)


def merge_protobuf(stages: Iterable[bytes]) -> bytes:
    """Return one strategy file with the contents of the files of all stages; parameters are called `<stage>-<name>`.

    The files must have been decoded before, so they are known to be sound. Fields of operators and parameters that this
    program does not know are kept.
    """
    operators: list[bytes] = []
    parameters: list[bytes] = []
    for stage, data in enumerate(stages):
        for item in protobuf_wire.fields(data):
            if item.kind == _OPERATOR:
                operators.append(data[item.start : item.end])
            elif item.kind == _PARAMETER:
                parameters.append(encode_content(3, *_with_stage(stage, item.content)))
    return b"".join((encode_number(1, 1), *operators, *parameters))


def _with_stage(stage: int, parameter: bytes) -> Iterator[bytes]:
    """Yield the encoded fields of a parameter, its name prefixed with the number of its stage."""
    for field in protobuf_wire.fields(parameter):
        if field.kind == _NAME:
            yield encode_content(1, b"%d-" % stage, field.content)
        else:
            yield parameter[field.start : field.end]


_OPERATOR_FIELDS, _PARAMETER_FIELDS = ("node_name", "parallel_strategys"), ("param_name", "parallel_layouts")


def _named(data: bytes, within: str, fields: tuple[str, str], path: str) -> tuple[str, bytes]:
    """Return the name of an item and the message about it; protobuf joins a message that comes twice.

    Args:
        within: how errors call the item.
        fields: how they call the two fields.

    Raises StrategyError if one is missing.
    """
    name: bytes | None = None
    content: bytes | None = None
    for field in protobuf_wire.fields(data):
        if field.kind == _NAME:
            name = field.content
        elif field.kind == _CONTENT:
            content = field.content if content is None else content + field.content
    _require_all(dict(zip(fields, (name, content))), within, path)
    assert name is not None and content is not None
    try:
        decoded: object = name.decode()
    except UnicodeDecodeError:
        decoded = name
    return text(decoded, "an operator's name" if fields is _OPERATOR_FIELDS else "a parameter's name", path), content


def _operator(name: str, content: bytes, within: str, path: str) -> StrategyItem:
    stage: int | None = None
    cuts: list[tuple[int, ...]] = []
    for field in protobuf_wire.fields(content):
        if field.kind == (1, VARINT):
            stage = _uint32(field.value)
        elif field.kind == (2, LENGTH):
            what = "an operator's strategy", f"{MAX_INPUTS} inputs of {MAX_DIMENSIONS} dimensions"
            cuts.append(_numbers(field.content, _uint32, MAX_DIMENSIONS, *what, path))
            if len(cuts) > MAX_INPUTS:
                raise _too_long(*what, path)
    _require_all({"stage": stage}, f"{within}parallel_strategys.", path)
    assert stage is not None
    return StrategyItem(name, stage, tuple(cuts))


def _layout(data: bytes, within: str, path: str, name: str) -> RawLayout:
    where = place(path, name)
    meshes: list[bytes] = []
    maps: list[tuple[int, ...]] = []
    slice_sizes: list[bytes] = []
    offsets: list[bytes] = []
    scalars: dict[str, int | None] = dict.fromkeys(("field", "opt_weight_shard_step", "opt_weight_shard_size"))
    # A mesh axis or dimension too many is told when the layout is given a meaning; this is about memory.
    limit = 2 * MAX_DIMENSIONS
    for field in protobuf_wire.fields(data):
        if field.wire_type == LENGTH and field.number in (1, 3, 4):
            {1: meshes, 3: slice_sizes, 4: offsets}[field.number].append(field.content)
        elif field.kind == (2, LENGTH):
            what = "a tensor map", f"{MAX_DIMENSIONS} dimensions"
            maps.append(_numbers(field.content, _int32, limit, *what, where))
            if len(maps) > limit:
                raise _too_long(*what, where)
        elif field.wire_type == VARINT and field.number in _SCALARS:
            scalars[_SCALARS[field.number]] = _int32(field.value)
    _require_all(scalars, within, path)
    # One message a dimension is a nested map; a nested map of one dimension has an empty second one.
    if len(maps) > 1:
        tensor_map = tuple(axes for axes in maps if axes)
    else:
        tensor_map = tuple((axis,) for axis in maps[0]) if maps else ()
    return RawLayout(
        _only(meshes, "dev_matrix", _uint32, 2 * MAX_AXES, where),
        tensor_map,
        scalars["opt_weight_shard_size"] or 0,
        scalars["opt_weight_shard_step"] or 0,
        _only(slice_sizes, "param_split_shape", _int64, MAX_SLICES, where),
        _only(offsets, "indices_offset", _int64, MAX_SLICES, where),
        scalars["field"] or 0,
    )


_SCALARS = {5: "field", 6: "opt_weight_shard_step", 7: "opt_weight_shard_size"}


def _only(contents: Sequence[bytes], field: str, convert: Convert, limit: int, where: str) -> tuple[int, ...]:
    if len(contents) > 1:
        raise StrategyError(f"a layout has several of {field}", expected="one", got=str(len(contents)), where=where)
    return _numbers(contents[0], convert, limit, field, f"{limit} numbers", where) if contents else ()


def _numbers(data: bytes, convert: Convert, limit: int, what: str, expected: str, where: str) -> tuple[int, ...]:
    """Return the numbers, packed or not, of a message that holds only these. Raises StrategyError for over `limit`."""
    numbers: list[int] = []
    for field in protobuf_wire.fields(data):
        if field.kind == (1, VARINT):
            numbers.append(convert(field.value))
        elif field.kind == (1, LENGTH):
            numbers += map(convert, protobuf_wire.varints(field.content))
        if len(numbers) > limit:
            raise _too_long(what, expected, where)
    return tuple(numbers)


def _uint32(number: int) -> int:
    return number & 0xFFFFFFFF


def _int32(number: int) -> int:
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _int64(number: int) -> int:
    return (number ^ (1 << 63)) - (1 << 63)


def _require_all(required: Mapping[str, object], within: str, path: str) -> None:
    missing = [within + name for name, value in required.items() if value is None]
    if missing:
        raise _damaged(f"without {', '.join(missing)}", path)


def _damaged(problem: str, path: str) -> StrategyError:
    return StrategyError(
        "the strategy file is damaged, or no strategy",
        expected="a MindSpore strategy (protobuf or JSON) or a TOML spec",
        got=f"protobuf {problem}",
        where=path,
        remedy=REMEDY,
    )


def _too_long(what: str, expected: str, where: str) -> StrategyError:
    return StrategyError(f"{what} is too long", expected=f"at most {expected}", where=where, remedy=REMEDY)


def _layout_fields(layout: RawLayout) -> Iterator[bytes]:
    yield encode_content(1, _dims(layout.dev_matrix))
    if layout.is_nested:
        yield from (encode_content(2, _dims(axes)) for axes in layout.tensor_map)
        if len(layout.tensor_map) == 1:
            yield encode_content(2)
    else:
        yield encode_content(2, _dims(axis for axes in layout.tensor_map for axis in axes))
    # MindSpore reads the first of each of these two without asking whether there is one.
    yield encode_content(3, _dims(layout.param_split_shape))
    yield encode_content(4, _dims(layout.indices_offset))
    for number, value in ((5, layout.field), (6, layout.opt_weight_shard_step), (7, layout.opt_weight_shard_size)):
        yield encode_number(number, value)


def _dims(numbers: Iterable[int]) -> bytes:
    return b"".join(encode_number(1, number) for number in numbers)

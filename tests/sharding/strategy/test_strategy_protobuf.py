"""Strategy files against Google's protobuf: the same bytes are written, and the same is read from any encoding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategy_messages import messages

from reshard_mpi import protobuf_wire
from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf, encode_protobuf

INT32 = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 9)
UINT32 = st.integers(0, (1 << 32) - 1) | st.integers(0, 9)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 9)
NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name.strip() != "")


def tuples(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(numbers, max_size=4).map(tuple)


MAPS = st.lists(st.lists(INT32, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
LAYOUTS = st.builds(RawLayout, tuples(UINT32), MAPS, INT32, INT32, tuples(INT64), tuples(INT64), INT32, st.none())
ITEMS = st.builds(StrategyItem, NAMES, UINT32, st.lists(tuples(UINT32), max_size=3).map(tuple))
FILES = st.builds(
    StageFile, st.dictionaries(NAMES, LAYOUTS, max_size=4), st.lists(ITEMS, max_size=3).map(tuple), st.just("")
)


def by_google(file: StageFile) -> Any:
    """Return the message of a strategy file, as MindSpore's own code would fill it."""
    made = messages().strategy_map(current_stage=1)
    for item in file.items:
        operator = made.parallel_strategy_item.add(node_name=item.node_name)
        operator.parallel_strategys.stage = item.stage
        for cut in item.parallel_strategy:
            operator.parallel_strategys.parallel_strategy.add(dim=cut)
    for name, layout in file.layouts.items():
        message = made.parallel_layout_item.add(param_name=name).parallel_layouts
        message.dev_matrix.add(dim=layout.dev_matrix)
        if layout.is_nested:
            for axes in layout.tensor_map:
                message.tensor_map.add(dim=axes)
            if len(layout.tensor_map) == 1:
                message.tensor_map.add()
        else:
            message.tensor_map.add(dim=[axis for axes in layout.tensor_map for axis in axes])
        message.param_split_shape.add(dim=layout.param_split_shape)
        message.indices_offset.add(dim=layout.indices_offset)
        message.field = layout.field
        message.opt_weight_shard_step = layout.opt_weight_shard_step
        message.opt_weight_shard_size = layout.opt_weight_shard_size
    return made


@given(file=FILES)
def test_the_same_bytes_and_back(file: StageFile) -> None:
    data = encode_protobuf(file)
    assert data == by_google(file).SerializeToString()
    assert decode_protobuf(data, "") == file


@given(file=FILES, seed=st.randoms(use_true_random=False))
def test_any_encoding_of_it(file: StageFile, seed: Any) -> None:
    """Fields in any order, repeated numbers packed, messages in pieces, fields that nobody knows."""
    data = encode_protobuf(file)
    other = spelt_otherwise(data, seed, "map")
    theirs = messages().strategy_map.FromString(other)
    theirs.DiscardUnknownFields()
    assert theirs == by_google(file)
    decoded = decode_protobuf(other, "")
    assert (decoded.layouts, decoded.items) == (file.layouts, file.items)


# Message -> field -> the message in it; numbers are in messages called `dims`.
INSIDE = {
    "map": {2: "operator", 3: "parameter"},
    "operator": {2: "cuts"},
    "cuts": {2: "dims"},
    "parameter": {2: "layout"},
    "layout": {1: "dims", 2: "dims", 3: "dims", 4: "dims"},
}
UNKNOWN = protobuf_wire.encode_number(1023, 5) + protobuf_wire.encode_content(77, b"later") + b"\xfd\x01abcd"


def spelt_otherwise(data: bytes, seed: Any, kind: str) -> bytes:
    fields = list(protobuf_wire.fields(data))
    if kind == "dims":
        numbers = b"".join(protobuf_wire.encode_varint(field.value) for field in fields)
        return protobuf_wire.encode_content(1, numbers) if seed.random() < 0.5 else data
    parts = []
    for field in fields:
        inside = INSIDE.get(kind, {}).get(field.number)
        if inside is None or field.wire_type != protobuf_wire.LENGTH:
            parts.append(data[field.start : field.end])
            continue
        content = spelt_otherwise(field.content, seed, inside)
        inner = [content[one.start : one.end] for one in protobuf_wire.fields(content)]
        if inside in ("cuts", "layout") and len(inner) > 1 and seed.random() < 0.5:
            cut = seed.randrange(1, len(inner))
            parts += [protobuf_wire.encode_content(field.number, *inner[:cut])]
            parts += [protobuf_wire.encode_content(field.number, *inner[cut:])]
        else:
            parts.append(protobuf_wire.encode_content(field.number, content))
    if kind in ("map", "layout", "parameter"):
        parts.insert(seed.randrange(len(parts) + 1), UNKNOWN)
    return b"".join(parts)


@given(data=st.binary(max_size=40))
def test_what_is_no_message_of_theirs_is_none_of_ours(data: bytes) -> None:
    try:
        decode_protobuf(data, "")
    except StrategyError:
        return
    messages().strategy_map.FromString(data)  # raises if it is none


@given(number=st.integers(0, (1 << 64) - 1), rest=st.binary(max_size=4))
def test_varints(number: int, rest: bytes) -> None:
    encoded = protobuf_wire.encode_varint(number)
    assert protobuf_wire.varint(encoded + rest, 0) == (number, len(encoded))
    for end in range(len(encoded)):
        with pytest.raises(protobuf_wire.MessageCutShortError):
            protobuf_wire.varint(encoded[:end], 0)
    with pytest.raises(protobuf_wire.WireError, match="64 bits"):
        protobuf_wire.varint(b"\xff" * 9 + b"\x02", 0)


@given(file=FILES)
def test_in_pieces_of_any_size(file: StageFile) -> None:
    data = encode_protobuf(file)

    class Slow:
        """A file that gives a few bytes at a time."""

        def __init__(self) -> None:
            self.at = 0

        def read(self, _: int) -> bytes:
            piece = data[self.at : self.at + 3]
            self.at += 3
            return piece

    assert decode_protobuf(Slow(), "") == file  # type: ignore[arg-type]

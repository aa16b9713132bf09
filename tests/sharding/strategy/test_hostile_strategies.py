"""Files that are no strategies, or say something impossible: each is refused in words, never with a traceback."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategy_examples import one_layout
from support.strategy_messages import messages

from reshard_mpi.errors import LayoutError, ReshardError, StrategyError
from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.mindspore_json import RawLayout, decode_json
from reshard_mpi.sharding.mindspore_layouts import to_strategy
from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf, encode_protobuf
from reshard_mpi.sharding.value_checks import MAX_FILE_BYTES

GOOD = encode_protobuf(one_layout(RawLayout((2,), ((0,), (-1,)))))
GOOD_JSON: dict[str, Any] = {
    "current_stage": 1,
    "parallel_strategy_item": {"MatMul": {"stage": 0, "parallel_strategy": [[1, 2], [2, 1]]}},
    "parallel_layout_item": {
        "w": {
            "dev_matrix": [2, 4],
            "tensor_map": [0, -1],
            "tensor_shape": [12, 2],
            "field": 0,
            "opt_weight_shard_step": 0,
            "opt_weight_shard_size": 0,
        }
    },
}


def load(tmp_path: Path, data: bytes, name: str = "s.ckpt") -> None:
    (tmp_path / name).write_bytes(data)
    strategy_files.load(str(tmp_path / name))


def group_map() -> bytes:
    made = messages().group_map()
    made.parallel_group_item.add(group_name="0-4").parallel_group_ranks.dim.extend(range(1000, 2000))
    made.ckpt_restore_rank_list.dim.extend([0, 1])
    data: bytes = made.SerializeToString()
    return data


# Value { tag, tensor { dims, type Float32, content } } by hand; the second with an empty shape and a long content.
CHECKPOINT = bytes.fromhex("0a1a 0a0177 1215 0802 1207 466c6f61743332 1a08 0000000000000000")
SCALAR = bytes.fromhex("0a9302 0a0177 128d02 1207 466c6f61743332 1a8002") + bytes(256)
HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(500)
SAFETENSORS = struct.pack("<Q", 60) + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      ' + bytes(4)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (CHECKPOINT, "a MindSpore checkpoint"),
        (SCALAR, "a MindSpore checkpoint"),
        (group_map(), r"a MindSpore group map \(group_info.pb\)"),
        (HDF5, "an HDF5 file"),
        (SAFETENSORS, "a safetensors file"),
        (struct.pack("<I", 0x7F3A5ED8) + bytes(40), "an encrypted MindSpore file"),
        (b"hello, this is a note", "neither protobuf nor JSON nor TOML"),
        ("héllo = ".encode("latin-1"), "not in UTF-8"),
        (bytes(range(256)), "expected: a MindSpore strategy"),
        (GOOD[:-1], "cut off or damaged"),
        (GOOD[:2], "lists no parameter"),
        (GOOD[2:], "without current_stage"),
        (b"\x08\x01\x1a\x00", "without parallel_layout_item"),
        (GOOD.replace(b"\x01w", b"\x01\xff"), "(?i)utf-8"),
        (GOOD.replace(b"MatMul", b"\xff" * 6), "(?i)utf-8"),
        (GOOD + GOOD[28:].replace(b"\x08\x02", b"\x08\x04", 1), "listed twice"),
        (b'{"parallel_layout_item": ', "damaged JSON"),
        (b'{"a": ' * 100_000, "nested too deep"),
        (b'{"parallel_layout_item": ' + b"[" * 900 + b"]" * 900 + b"}", "parallel_layout_item"),
        (b'{"parallel_layout_item": {"w": ' + b"[" * 700 + b"]" * 700 + b"}}", "a layout"),
        (b'{"current_stage": ' + b"9" * 5000 + b"}", "damaged JSON"),
        (b"{}", "parallel_layout_item"),
        (b'{"parallel_layout_item": {}}', "lists no parameter"),
        (b'{"parallel_layout_item": {"\\ud800": {}}}', "w"),
        (b'\xff\xfe{\x00"\x00', "expected: a MindSpore strategy"),
    ],
)
def test_files_that_are_no_strategies(tmp_path: Path, data: bytes, named: str) -> None:
    with pytest.raises(StrategyError) as caught:
        load(tmp_path, data)
    assert re.search(named, str(caught.value)), str(caught.value)
    assert str(tmp_path / "s.ckpt") in caught.value.where
    assert len(str(caught.value)) < 1500


def test_a_list_named_json(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="names with values"):
        load(tmp_path, b"[1]", "s.json")


def test_paths(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path / "pipe", Path(os.devnull), tmp_path / "s\0.ckpt"):
        for refused in (strategy_files.load, strategy_files.digest):
            with pytest.raises(StrategyError) as caught:
                refused(str(path))
            assert str(path) in caught.value.where


def test_a_file_too_large_to_be_a_strategy_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "s.ckpt").open("wb") as opened:
        opened.write(CHECKPOINT)
        opened.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(StrategyError, match=r"too large(?s:.*)a MindSpore checkpoint"):
        strategy_files.load(str(tmp_path / "s.ckpt"))


WRONG_LAYOUTS = [
    RawLayout((), ((0,),)),
    RawLayout((0, 2), ((0,),)),
    RawLayout((2,) * 65, ((0,),)),
    RawLayout((2, 2), ((-1,),) * 65),
    RawLayout((2, 2), ((2,),)),
    RawLayout((2, 2), ((-2,),)),
    RawLayout((2, 2), ((-3,),)),
    RawLayout((2, 2), ((0,), (0,))),
    RawLayout((2, 2), ((0, 0),)),
    RawLayout((2, 2), ((0, -1, 0),)),
    RawLayout((2, 2), ((0, -2),)),
    RawLayout((2, 2), ((0,),), 4, 2),
    RawLayout((2, 3), ((1,),), 2, 1),
    RawLayout((2, 2), ((0,),), -2, 2),
    RawLayout((2, 2), ((0,),), -2),
    RawLayout((2, 2), ((0,),), 2),
    RawLayout((2, 2), ((0,),), 2, -2),
    RawLayout((4096, 8192), ((0,),)),
    RawLayout((1 << 31,) * 60, ((0,),)),
    RawLayout((2,), ((0,),), param_split_shape=(3, 9), indices_offset=(0, 4)),
    RawLayout((2,), ((0,),), param_split_shape=(3, 9), indices_offset=(0,)),
    RawLayout((2,), ((0,),), param_split_shape=(3, 9, 1), indices_offset=(0, 3, 12)),
    RawLayout((2,), ((0,),), param_split_shape=(-3, 9), indices_offset=(0, -3)),
    RawLayout((2,), ((0,),), indices_offset=(0, 3)),
    RawLayout((2,), (), param_split_shape=(3, 9), indices_offset=(0, 3)),
]


@pytest.mark.parametrize("layout", WRONG_LAYOUTS, ids=range(len(WRONG_LAYOUTS)))
def test_layouts_that_contradict_themselves(tmp_path: Path, layout: RawLayout) -> None:
    with pytest.raises((StrategyError, LayoutError)) as caught:
        load(tmp_path, encode_protobuf(one_layout(layout, "layer.weight")))
    assert str(tmp_path / "s.ckpt") in caught.value.where
    assert "'layer.weight'" in caught.value.where or layout.dev_matrix in {(4096, 8192), (1 << 31,) * 60}
    assert caught.value.expected
    assert len(str(caught.value)) < 2500


def test_several_meshes_in_one_layout(tmp_path: Path) -> None:
    strategy_map = messages().strategy_map.FromString(GOOD)
    strategy_map.parallel_layout_item[0].parallel_layouts.dev_matrix.add(dim=[4])
    with pytest.raises(StrategyError, match="several of dev_matrix"):
        load(tmp_path, strategy_map.SerializeToString())


VALUES = [
    None,
    True,
    "2",
    2.5,
    float("nan"),
    {},
    {"a": 1},
    [[]],
    ["0"],
    [None],
    [True],
    [1.0],
    [1 << 40],
    1 << 70,
    -(1 << 70),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("key", [*GOOD_JSON["parallel_layout_item"]["w"], "param_split_shape", "indices_offset"])
def test_values_of_the_wrong_type_in_json(tmp_path: Path, key: str, value: object) -> None:
    layout = {**GOOD_JSON["parallel_layout_item"]["w"], key: value}
    data = json.dumps({**GOOD_JSON, "parallel_layout_item": {"w": layout}}).encode()
    if (key, value) in (("tensor_shape", None), ("tensor_map", [[]])):
        load(tmp_path, data)
        return
    if key == "param_split_shape" and value == [1 << 40]:
        load(tmp_path, data)
        return
    if key == "tensor_shape" and value == [1 << 40]:
        load(tmp_path, data)
        return
    with pytest.raises((StrategyError, LayoutError)) as caught:
        load(tmp_path, data)
    assert "'w'" in caught.value.where


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("path", ["parallel_layout_item", "parallel_strategy_item", "layout", "item", "stage", "cuts"])
def test_structure_of_the_wrong_type_in_json(tmp_path: Path, path: str, value: object) -> None:
    content = json.loads(json.dumps(GOOD_JSON))
    item = content["parallel_strategy_item"]["MatMul"]
    if path == "layout":
        content["parallel_layout_item"]["w"] = value
    elif path == "item":
        content["parallel_strategy_item"]["MatMul"] = value
    elif path == "stage":
        item["stage"] = value
    elif path == "cuts":
        item["parallel_strategy"] = value
    else:
        content[path] = value
    if (path, value) in (("parallel_strategy_item", {}), ("cuts", [[]])):
        load(tmp_path, json.dumps(content).encode())
        return
    with pytest.raises(StrategyError):
        load(tmp_path, json.dumps(content).encode())


@pytest.mark.parametrize("text", ['"w": 1, "w": 2', '"w": {"field": 0, "field": 1}'])
def test_names_twice_in_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(StrategyError, match="twice"):
        load(tmp_path, b'{"parallel_layout_item": {%s}}' % text.encode())


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    try:
        to_strategy([decode_protobuf(data, "s")], "s")
    except ReshardError as error:
        assert isinstance(error, (StrategyError, LayoutError))


@given(st.data())
def test_any_damage(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        to_strategy([decode_protobuf(bytes(damaged[: data.draw(st.integers(0, len(GOOD)))]), "s")], "s")
    except ReshardError as error:
        assert isinstance(error, (StrategyError, LayoutError))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["w", "dev_matrix", "x"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*GOOD_JSON]), JSON_VALUES))
def test_any_json(content: dict[str, Any]) -> None:
    try:
        to_strategy([decode_json(json.dumps(content), "s")], "s")
    except ReshardError as error:
        assert isinstance(error, (StrategyError, LayoutError))

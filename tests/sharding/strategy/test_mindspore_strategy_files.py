"""MindSpore's strategy files: bytes to placements and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from strategy_examples import one_layout, whole_strategies
from support.strategy_files import to_merged_file

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem, decode_json, encode_json
from reshard_mpi.sharding.mindspore_layouts import to_layout, to_placement, to_stage_files, to_strategy
from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf, encode_protobuf
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

# current_stage 1; operator MatMul of stage 0, cut ((1, 2), (2, 1)); parameter w over [2], map [0, -1]. By hand.
GOLDEN = bytes.fromhex(
    "0801"
    "1218 0a06 4d61744d756c 120e 0800 1204 0801 0802 1204 0802 0801"
    "1a22 0a01 77 121d 0a02 0802 120d 0800 08ffffffffffffffffff01 1a00 2200 2800 3000 3800"
)
GOLDEN_FILE = one_layout(RawLayout((2,), ((0,), (-1,))))

# The same as MindSpore 2.10 writes it in JSON.
GOLDEN_JSON = (
    '{"current_stage": 1, "parallel_strategy_item": {"MatMul": {"stage": 0, "parallel_strategy": [[1, 2], [2, 1]]}}, '
    '"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [0, -1], "tensor_shape": [12, 2], "field": 0, '
    '"opt_weight_shard_step": 0, "opt_weight_shard_size": 0}}}'
)


def placement(layout: RawLayout) -> Placement:
    return to_placement(layout, "a file, parameter 'w'")


def test_golden_protobuf() -> None:
    assert decode_protobuf(GOLDEN, "") == GOLDEN_FILE
    assert encode_protobuf(GOLDEN_FILE) == GOLDEN


def test_golden_json() -> None:
    file = decode_json(GOLDEN_JSON, "")
    assert file.layouts == {"w": RawLayout((2,), ((0,), (-1,)), tensor_shape=(12, 2))}
    assert file.items == (StrategyItem("MatMul", 0, ((1, 2), (2, 1))),)
    assert encode_json(file).decode() == GOLDEN_JSON


def test_a_file_is_known_by_its_contents(tmp_path: Path) -> None:
    for data in (GOLDEN, GOLDEN_JSON.encode(), b"\xef\xbb\xbf\n " + GOLDEN_JSON.encode()):
        for name in ("s.ckpt", "s.json", "strategy"):
            (tmp_path / name).write_bytes(data)
            if data is GOLDEN and name == "s.json":
                continue
            assert strategy_files.load(str(tmp_path / name)).parameters == {"w": (Placement((2,), ((0,), ())),)}


@pytest.mark.parametrize("tensor_map", [(), ((-1,),), ((-1,), (-1,))])
def test_nothing_is_cut(tensor_map: tuple[tuple[int, ...], ...]) -> None:
    made = placement(RawLayout((2, 4), tensor_map))
    assert not made.is_cut
    assert len(made.split) == len(tensor_map)


def test_a_nested_map_of_one_dimension_has_an_empty_second_message() -> None:
    file = one_layout(RawLayout((4, 2), ((1, 0),)))
    data = encode_protobuf(file)
    assert bytes.fromhex("1204 0801 0800 1200") in data
    assert decode_protobuf(data, "") == file


def test_json_writes_nested_maps_expanded_and_layouts_join_them() -> None:
    nested = RawLayout((4, 2, 2), ((2, 1), (0,)), 2, 1, tensor_shape=(32, 6))
    written = json.loads(encode_json(one_layout(nested)))["parallel_layout_item"]["w"]
    assert (written["tensor_map"], written["tensor_shape"]) == ([2, 1, 0], [4, 8, 6])
    with pytest.raises(LayoutError):
        placement(nested)  # no ranks are left for the optimizer cut
    nested = RawLayout((2, 4, 2, 2), ((2, 1), (0,)), 2, 16, tensor_shape=(32, 6))
    read = decode_json(encode_json(one_layout(nested)).decode(), "").layouts["w"]
    expanded = placement(read)
    assert expanded.expanded_shape == (4, 8, 6)
    for rank in range(32):
        assert Layout(expanded, (32, 6)).box(rank) == Layout(placement(nested), (32, 6)).box(rank)


def test_json_maps_that_cannot_be_expanded_ones_keep_their_dimensions() -> None:
    assert placement(RawLayout((4, 2), ((1,), (0,)), tensor_shape=(8, 2))).expanded_shape is None
    assert placement(RawLayout((4, 2), ((1,), (0,)), tensor_shape=(4, 2))).expanded_shape == (4, 2)
    assert placement(RawLayout((4, 2), ((1,), (0,)), tensor_shape=(8,))).expanded_shape is None


def test_json_may_hold_nested_lists() -> None:
    text = GOLDEN_JSON.replace("[2], ", "[2, 2], ").replace("[0, -1]", "[[1, 0], -1]")
    assert decode_json(text, "").layouts["w"].tensor_map == ((1, 0), (-1,))


NONE_BESIDE_AXES = [((1, -1), (0,)), ((-1, 1), (0,)), ((-1, 1, -1), (0, -1)), ((1,), (-1, 0))]


@pytest.mark.parametrize("tensor_map", NONE_BESIDE_AXES)
def test_none_beside_the_axes_of_a_dimension_cuts_nothing(tensor_map: tuple[tuple[int, ...], ...]) -> None:
    """MindSpore's `layout(("sp", "None"), "mp")` is the map entry [1, -1]."""
    nested, flat = RawLayout((2, 2, 2), tensor_map), RawLayout((2, 2, 2), ((1,), (0,)))
    file = one_layout(nested)
    assert decode_protobuf(encode_protobuf(file), "") == file
    assert to_strategy([file], "") == to_strategy([one_layout(flat)], "")
    nested, flat = (layout._replace(tensor_shape=(8, 6)) for layout in (nested, flat))
    assert decode_json(encode_json(one_layout(nested)).decode(), "") == one_layout(flat)
    assert placement(RawLayout((2, 2, 2), ((-1, -1), (0, -1)))).split == ((), (2,))


def test_json_writes_none_beside_an_axis_as_a_factor() -> None:
    """So MindSpore expands [1, -1] of 8 rows over an axis of 2: to 2 rows that are cut and 4 that are not."""
    text = GOLDEN_JSON.replace('"dev_matrix": [2]', '"dev_matrix": [2, 2, 2]').replace("[0, -1]", "[1, -1, 0]")
    layout = decode_json(text.replace("[12, 2]", "[2, 4, 6]"), "").layouts["w"]
    nested = RawLayout((2, 2, 2), ((1, -1), (0,)))
    for rank in range(8):
        assert Layout(placement(layout), (8, 6)).box(rank) == Layout(placement(nested), (8, 6)).box(rank)


@pytest.mark.parametrize("size", [0, 1, -1])
def test_a_step_of_0_is_no_optimizer_cut(size: int) -> None:
    """MindFormers writes the size -1 with it for what is not cut."""
    layout = RawLayout((2, 2), ((0,),), size, 0)
    assert placement(layout) == placement(RawLayout((2, 2), ((0,),)))
    cut = layout._replace(opt_weight_shard_size=-1, opt_weight_shard_step=2)
    both = to_strategy([StageFile({"w": layout, "moments.w": cut}, (StrategyItem("MatMul", 0),))], "")
    assert [both.parameters[name][0].optimizer for name in ("w", "moments.w")] == [1, 2]


@pytest.mark.parametrize(("size", "step"), [(2, 0), (2, -1), (-1, -1), (0, -1)])
def test_a_step_that_contradicts_the_size_is_refused(size: int, step: int) -> None:
    with pytest.raises(StrategyError, match="contradict each other") as refused:
        placement(RawLayout((2, 2), ((0,),), size, step))
    assert refused.value.got == f"opt_weight_shard_size {size}, opt_weight_shard_step {step}"
    assert refused.value.where == "a file, parameter 'w'" and refused.value.remedy


def test_the_step_written_is_the_distance_of_neighbouring_pieces() -> None:
    assert to_layout(Placement((2, 4, 2), ((2,),), 4), None).opt_weight_shard_step == 2
    assert to_layout(Placement((2, 4, 2), ((2,),), 8), None).opt_weight_shard_step == 2
    assert to_layout(Placement((2, 2, 2), ((2,), (1,)), 2), None).opt_weight_shard_step == 4
    assert to_layout(Placement((2, 2, 2), ((2,), (1,))), None).opt_weight_shard_step == 0


UNEVEN = RawLayout((2,), ((0,), (-1,)), param_split_shape=(3, 9), indices_offset=(0, 3))


def test_state_without_sizes_has_those_of_its_parameter() -> None:
    """MindSpore writes them for the parameter alone, whatever the stage."""
    even = RawLayout((2,), ((0,), (-1,)), param_split_shape=(12, 4))
    files = [
        StageFile({"w": UNEVEN, "moments.w": even, "opt.adam_m.w": even}, (StrategyItem("MatMul", 0),)),
        StageFile({"v": even, "moments.v": even, "moments.w": even}, (StrategyItem("MatMul", 1),)),
    ]
    made = to_strategy(files, "").parameters
    assert [placement.sizes for placement in made["w"]] == [((0, (3, 9)),)]
    assert made["opt.adam_m.w"] == made["w"]
    assert {placement.stages: placement.sizes for placement in made["moments.w"]} == {(0,): ((0, (3, 9)),), (1,): ()}
    assert made["v"] == made["moments.v"] and not made["v"][0].sizes


def test_another_parameter_without_sizes_is_cut_evenly() -> None:
    even = RawLayout((2,), ((0,), (-1,)))
    file = StageFile({"w": UNEVEN, "decoder.w": even, "moments.w": even}, (StrategyItem("MatMul", 0),))
    made = to_strategy([file], "").parameters
    assert made["moments.w"] == made["w"] and not made["decoder.w"][0].sizes


@pytest.mark.parametrize(
    "state",
    [
        RawLayout((2,), ((-1,), (0,))),
        RawLayout((2,), ((0,),)),
        RawLayout((1, 2), ((0,), (-1,))),
        RawLayout((2,), ((0,), (-1,)), tensor_shape=(6, 4)),
        RawLayout((2,), ((0,), (-1,)), param_split_shape=(6, 6), indices_offset=(0, 6)),
    ],
    ids=["other dimension", "other dimensions", "other mesh", "other shape", "own sizes"],
)
def test_state_cut_otherwise_keeps_its_own_layout(state: RawLayout) -> None:
    made = to_strategy([StageFile({"w": UNEVEN, "moments.w": state}, (StrategyItem("MatMul", 0),))], "").parameters
    assert made["moments.w"] == (placement(state),)


def test_split_shape_without_offsets_is_no_uneven_split() -> None:
    """MindFormers puts a tensor's shape there."""
    assert placement(RawLayout((2,), ((0,), (-1,)), param_split_shape=(512, 16))).sizes == ()


def test_equal_placements_are_one_object() -> None:
    layouts = {f"w{number}": RawLayout((2,), ((0,), (-1,)), tensor_shape=(10 + number, 4)) for number in range(50)}
    made = to_strategy([decode_json(encode_json(StageFile(layouts)).decode(), "")], "")
    assert len({id(placement) for found in made.parameters.values() for placement in found}) == 1


@given(whole_strategies())
def test_round_trip_by_stage(made: Strategy) -> None:
    for encode, decode in ((encode_protobuf, decode_protobuf), (lambda f: encode_json(f).decode(), decode_json)):
        files = to_stage_files(made)
        if decode is decode_json and any(layout.is_nested for file in files for layout in file.layouts.values()):
            continue
        if made.stages > 1 or to_merged_file(made) == files[0]:
            assert to_strategy([decode(encode(file), "") for file in files], "") == made


@given(whole_strategies())
def test_round_trip_merged(made: Strategy) -> None:
    assert to_strategy([decode_protobuf(encode_protobuf(to_merged_file(made)), "")], "") == made


def test_rules_are_written_for_the_parameters_given() -> None:
    rules = (("*.w", Placement((2, 4), ((1,),), open_ended=True)), ("*", Placement((2, 4))))
    shapes = {"a.w": (8, 3), "a.b": (8,)}
    (file,) = to_stage_files(Strategy(8, 1, {}, rules), shapes)
    assert file.layouts == {
        "a.w": RawLayout((2, 4), ((0,), (-1,)), tensor_shape=(8, 3)),
        "a.b": RawLayout((2, 4), ((-1,),), tensor_shape=(8,)),
    }
    with pytest.raises(StrategyError, match="names"):
        to_stage_files(Strategy(8, 1, {}, rules))


def test_what_mindspore_cannot_say_is_refused() -> None:
    uneven = Placement((2,), ((), (0,)), sizes=((1, (3, 9)),))
    with pytest.raises(StrategyError, match="uneven sizes of other dimensions"):
        to_layout(uneven, None)
    with pytest.raises(StrategyError, match="without the tensor's shape"):
        encode_json(one_layout(RawLayout((2, 2), ((1, 0),))))
    sizes = {"param_split_shape": (1, 2, 3, 2), "indices_offset": (0, 1, 3, 6)}
    with pytest.raises(StrategyError, match="uneven sizes"):
        encode_json(one_layout(RawLayout((2, 2), ((1, 0),), tensor_shape=(8,), **sizes)))
    with pytest.raises(StrategyError, match="stage 1 holds no parameter"):
        to_stage_files(Strategy(4, 2, {"w": (Placement((2,)),)}))

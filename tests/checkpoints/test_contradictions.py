"""Shards that contradict each other or the strategies: another holder is used, or the shard is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import ckpt_peer
from support.cases import Side
from support.checkpoints import as_read, expected_rank, read_shard, write_shard, write_strategy
from support.conversions import TENSORS, Conversion, assert_right, listing, make, write_conversion
from support.examples import few, few_cases, one_at_a_time
from support.oracle import RawLayout
from support.strategy_files import write_stage_file

import reshard_mpi
from reshard_mpi.errors import CoverageError, StrategyError


def refused(c: Conversion, *options: str) -> str:
    """Check that the plan and the run are refused alike, with nothing written; return what is said."""
    before = listing(c.folder)
    planned, transformed = (c.run(command, *options) for command in ("plan", "transform"))
    assert planned.code == transformed.code == 3, (planned, transformed)
    assert planned.err == transformed.err and "Traceback" not in planned.err
    assert listing(c.folder) == before
    return planned.err


ROWS = {"w": np.arange(144, dtype=np.float32).reshape(12, 12)}


@pytest.mark.parametrize(
    ("spoiled", "got"),
    few(
        1,
        [
            (np.zeros((3, 11), np.float32), "shape [3, 11]"),
            (np.zeros((3, 12), np.float64), "float64"),
            (np.zeros((2, 12), np.float32), "shape [2, 12]"),
            (np.zeros(36, np.float32), "shape [36]"),
        ],
    ),
    ids=["columns", "type", "rows", "dimensions"],
)
def test_the_only_holder_of_a_part_that_the_others_contradict(tmp_path: Path, spoiled: np.ndarray, got: str) -> None:
    sides = (Side(ranks, 1, {"w": RawLayout((ranks,), (0, -1))}) for ranks in (4, 3))
    c = write_conversion(tmp_path, "ckpt", *sides, ROWS)
    write_shard({"w": spoiled}, c.shard(2))
    assert f"got: {got}\n  where: {c.shard(2)}" in refused(c)
    c.shard(2).unlink()  # as the message says; but nobody else has it
    assert "no source holds a part of 'w' that target rank" in refused(c)


@pytest.mark.parametrize("ranks", few(1, [1, 2, 3]))
def test_one_of_two_holders_is_of_another_shape(tmp_path: Path, ranks: int) -> None:
    """Of 2 x 3 ranks that cut the rows in 3, rank 0 is contradicted, and rank 3 holds the same.

    A target of its own that reads nothing else has nothing to doubt it by; then the others refuse the run.
    """
    source = Side(6, 1, {"w": RawLayout((2, 3), (0, -1))})
    c = write_conversion(tmp_path, "ckpt", source, Side(ranks, 1, {"w": RawLayout((ranks,), (0, -1))}), ROWS)
    write_shard({"w": np.zeros((4, 11), np.float32)}, c.shard(0))
    message = refused(c)
    if ranks == 3:
        assert "source shards disagree in the type or shape of 'w'" in message
        assert "float32 [12, 12]" in message and "float32 [12, 11]" in message
    else:
        assert "'w'" in message and str(c.shard(0)) in message
    c.shard(0).unlink()
    c.done()
    assert_right(c)


def test_a_shape_that_the_target_cannot_cut_is_the_shards_fault_if_another_one_differs(tmp_path: Path) -> None:
    """Only rank 2 is opened for target 2, which cuts its columns, 11 of them, in two."""
    source = Side(4, 1, {"w": RawLayout((4,), (-1, -1))})
    target = Side(4, 1, {"w": RawLayout((2, 2), (1, 0))})
    c = write_conversion(tmp_path, "ckpt", source, target, ROWS)
    write_shard({"w": np.zeros((12, 11), np.float32)}, c.shard(2))
    message = refused(c)
    assert str(c.shard(0)) in message and f"got: shape [12, 11]\n  where: {c.shard(2)}" in message
    for rank in (0, 1, 3):
        write_shard({"w": np.zeros((12, 11), np.float32)}, c.shard(rank))
    message = refused(c)
    assert "dimension 1 cannot be cut evenly" in message  # now it is the strategy's
    assert "target strategy" in message and "[12, 11]" in message


@pytest.mark.parametrize("value", [0, 1])
def test_a_tensor_of_another_module_does_not_follow_the_end_of_its_name(tmp_path: Path, value: int) -> None:
    """Norms of ones and biases of zeros are the same on all ranks, whole or cut."""
    source, target = (Side(ranks, 1, {"norm.w": RawLayout((ranks,), (0,))}) for ranks in (2, 1))
    c = write_conversion(tmp_path, "ckpt", source, target, {"norm.w": np.arange(8, dtype=np.float32)})
    for rank in range(2):
        c.rewrite(rank, {"encoder.norm.w": np.full(4, value, np.float32)})
    c.done()
    assert read_shard(c.written(0))["encoder.norm.w"] == read_shard(c.shard(0))["encoder.norm.w"]


def test_stages_of_the_target_that_share_a_tensor_have_it_alike(tmp_path: Path) -> None:
    """Each target stage reads one shard, and each shard has another shape."""
    source, target = (
        Side(2, stages, {"w": RawLayout((2 // stages,), (-1, -1), stages=at)})
        for stages, at in [(1, (0,)), (2, (0, 1))]
    )
    c = write_conversion(tmp_path, "ckpt", source, target, ROWS)
    write_shard({"w": np.zeros((12, 11), np.float32)}, c.shard(0))
    message = refused(c)
    assert "source shards disagree in what targets share: 'w'" in message
    assert str(c.shard(0)) in message and "'w' = float32 [12, 11]" in message
    assert str(c.shard(1)) in message and "'w' = float32 [12, 12]" in message
    for replicas, expected in (("sample", [3, 3]), ("any", [0, 3])):  # whoever commits sees both
        parts = [["--part", f"{at}/2", "--replicas", replicas] for at in range(2)]
        assert [c.run("transform", *part).code for part in parts] == expected


def test_stages_of_the_target_that_share_state_have_it_alike(tmp_path: Path) -> None:
    """What no strategy lists is known from the opened shards only, and each target stage opens another one."""
    tensors = {**ROWS, **{f"moments.s{at}.w": np.zeros((12, 12), np.float32) for at in range(18)}}
    source, target = (
        Side(
            2, stages, {n: RawLayout((2 // stages,), (-1, -1), stages=at) for n in tensors}, frozenset(tensors) - {"w"}
        )
        for stages, at in [(1, (0,)), (2, (0, 1))]
    )
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    some = {name: tensors[name] for name in ("w", "moments.s0.w", "moments.s1.w")}
    write_shard(some, c.shard(0))
    write_shard({**some, "moments.s2.w": tensors["moments.s2.w"]}, c.shard(1))
    message = refused(c)
    assert "source shards disagree in what targets share: 'tensors of stages 0, 1'" in message
    assert "'moments.s1.w', 'w', as in" in message and "'moments.s1.w', 'moments.s2.w', 'w'" in message
    for rank in range(2):
        write_shard(tensors, c.shard(rank))
    c.done("plan")
    write_shard({**tensors, "moments.s2.w": np.zeros((12, 12), np.int8)}, c.shard(1))
    assert "19 tensors, SHA-256" in refused(c)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_listed_tensor_in_some_targets_only(tmp_path: Path, stages: int) -> None:
    """The shards of two stages are swapped: `v` is where no strategy says it is, and only target 1 looks there.

    stages: those of the targets that should both have `v`.
    """
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    source = Side(2, 2, {"w": RawLayout((1,), (-1,), stages=(0, 1)), "v": RawLayout((1,), (-1,))})
    layout = RawLayout((2,), (-1,)) if stages == 1 else RawLayout((1,), (-1,), stages=(0, 1))
    c = write_conversion(tmp_path, "ckpt", source, Side(2, stages, dict.fromkeys(tensors, layout)), tensors)
    write_shard({"w": tensors["w"]}, c.shard(0))
    write_shard(tensors, c.shard(1))
    message = refused(c)
    if stages == 1:
        assert "no shard opened for target rank 0 holds 'v', but those for rank 1 do" in message
    else:
        assert "source shards disagree in what targets share: 'tensors of stages 0, 1'" in message
        assert "= 'w', as in" in message and "= 'v', 'w'" in message


def test_a_tensor_is_taken_from_where_the_strategy_lists_it(tmp_path: Path) -> None:
    """The shards of ranks 0 and 1 are swapped: `w` is on rank 1, too, but only stages 0 and 2 list it."""
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    layouts = {"w": RawLayout((1,), (-1,), stages=(0, 2)), "v": RawLayout((1,), (-1,), stages=(1,))}
    target = Side(1, 1, {name: RawLayout((1,), (-1,)) for name in tensors})
    c = write_conversion(tmp_path, "ckpt", Side(3, 3, layouts), target, tensors)
    write_shard({"v": tensors["v"]}, c.shard(0))
    write_shard({"v": tensors["v"], "w": -tensors["w"]}, c.shard(1))
    c.done()
    assert read_shard(c.written(0)) == as_read(tensors)


# Names that are in other stages, or with other holders


@pytest.mark.parametrize("stages", few(1, [1, 2]))
@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_what_the_target_does_not_place_is_refused_whatever_the_stages(
    tmp_path: Path, stages: int, strict: tuple[str, ...]
) -> None:
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    last = (stages - 1,)
    source = {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (0,), stages=last)}
    target = Side(2, 1, {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (-1,))}, frozenset({"w"}))
    c = write_conversion(tmp_path, "ckpt", Side(2 * stages, stages, source), target, tensors)
    assert "'w' is sharded in the source and the target strategy does not say how to place it" in refused(c, *strict)
    for rank in range(2):
        with pytest.raises(StrategyError, match="'w' is sharded"):
            reshard_mpi.load_rank(rank, c.src, c.src_strategy, c.dst_strategy)
        ranks = reshard_mpi.rank_list_for_transform(rank, c.src_strategy, c.dst_strategy)
        files = {source_rank: c.shard(source_rank) for source_rank in ranks}
        with pytest.raises(StrategyError, match="'w' is sharded"):
            reshard_mpi.transform_checkpoint_by_rank(rank, files, tmp_path / "o.ckpt", c.src_strategy, c.dst_strategy)
    c.done("transform", "--unlisted", "drop")
    assert read_shard(c.written(1)) == as_read({"v": tensors["v"]})


def test_what_was_never_saved_need_not_be_placed_and_a_stage_that_is_gone_may_hold_it(tmp_path: Path) -> None:
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    source = Side(4, 2, {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (0,), stages=(1,))})
    target = Side(2, 1, {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (-1,))}, frozenset({"w"}))
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    for rank in (0, 1):
        write_shard({}, c.shard(rank))
    assert c.done("transform", "--strict").warnings == []
    c = c.but(dst=tmp_path / "other")
    c.remove(0, 1)
    assert "no shard that should hold 'w' is there" in refused(c)


@pytest.mark.parametrize("holder", few(1, [0, 1]))
@few_cases(
    1,
    ("elements", "source", "target"),
    [(4, -1, None), (4, -1, -1), (4, -1, 0), (0, -1, None), (0, -1, -1), (0, 0, 0), (0, 0, -1)],
)
def test_what_one_rank_alone_has_saved(
    tmp_path: Path, holder: int, elements: int, source: int, target: int | None
) -> None:
    """Whether the target lists it or not, and though nothing of a part without elements is needed."""
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(elements, dtype=np.float32)}
    sides = [
        Side(2, 1, {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (-1 if axis is None else axis,))}, unlisted)
        for axis, unlisted in ((source, frozenset()), (target, frozenset({"v"} if target is None else ())))
    ]
    c = write_conversion(tmp_path, "ckpt", *sides, tensors)
    write_shard({"w": c.arrays(1 - holder)["w"]}, c.shard(1 - holder))
    assert c.done("transform", "--strict").warnings == []
    for rank in range(2):
        expected = expected_rank(c.target, tensors, rank)
        assert read_shard(c.written(rank)) == as_read(expected)
        loaded = reshard_mpi.load_rank(rank, c.src, c.src_strategy, c.dst_strategy)
        assert {name: array.tolist() for name, array in loaded.items()} == {
            name: array.tolist() for name, array in expected.items()
        }
        out = tmp_path / f"by_rank_{rank}.{c.written(rank).suffix[1:]}"
        files = {source_rank: c.shard(source_rank) for source_rank in range(2)}
        reshard_mpi.transform_checkpoint_by_rank(rank, files, out, c.src_strategy, c.dst_strategy)
        assert read_shard(out) == as_read(expected)


def test_what_only_the_target_lists_is_found_wherever_it_is(tmp_path: Path) -> None:
    tensors = {"w": np.arange(8, dtype=np.float32), "v": np.arange(4, dtype=np.float32)}
    layouts = {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (-1,))}
    c = write_conversion(tmp_path, "ckpt", Side(2, 1, layouts, frozenset({"v"})), Side(2, 1, layouts), tensors)
    write_shard({"w": c.arrays(1)["w"]}, c.shard(1))
    for rank in range(2):
        assert reshard_mpi.load_rank(rank, c.src, c.src_strategy, c.dst_strategy)["v"].tolist() == [0, 1, 2, 3]


def test_a_part_that_only_its_holder_lacks_is_a_hole_for_one_target_too(tmp_path: Path) -> None:
    layouts = {"w": RawLayout((2,), (0,)), "v": RawLayout((2,), (0,))}
    tensors = {name: np.arange(8, dtype=np.float32) for name in layouts}
    c = write_conversion(tmp_path, "ckpt", Side(2, 1, layouts), Side(2, 1, layouts), tensors)
    write_shard({"w": c.arrays(1)["w"]}, c.shard(1))
    with pytest.raises(CoverageError, match="no source holds a part of 'v' that target rank 1 needs"):
        reshard_mpi.load_rank(1, c.src, c.src_strategy, c.dst_strategy)


# A tensor here, a string there


def with_string(c: Conversion, rank: int, name: str) -> None:
    """Have the shard of a rank hold a string in place of a tensor."""
    c.rewrite(rank, {name: None})
    with c.shard(rank).open("ab") as file:
        file.write(ckpt_peer.value(name, (0,), "str", "text".encode("utf-32-le")))


@pytest.mark.parametrize("odd", few(1, [0, 1]))
def test_a_name_that_is_a_tensor_in_one_shard_and_a_string_in_another(c: Conversion, odd: int) -> None:
    for rank in range(4):
        c.rewrite(rank, {"note": np.arange(3)})
    with_string(c, odd, "note")
    message = refused(c)
    assert "'note' is a tensor in one source shard and a string in another" in message
    assert f"got: a string on rank {odd}\n  where: {c.shard(odd)}" in message
    assert str(c.shard(1 - odd)) in message
    c.done("transform", "--unlisted", "drop")


@pytest.mark.parametrize("name", few(1, ["w", "b", "moments.w"]))
def test_a_string_in_place_of_a_tensor_that_others_hold(c: Conversion, name: str) -> None:
    with_string(c, 1, name)
    message = refused(c)
    assert f"{name!r} is a tensor in one source shard and a string in another" in message
    assert f"got: a string on rank 1\n  where: {c.shard(1)}" in message


# Copies that should be the same, but that only the target cuts


@few_cases(1, ("ranks", "options"), one_at_a_time([2, 4], [(), ("--strict",), ("--replicas", "check")]))
def test_what_only_the_target_cuts_is_not_made_of_copies_that_differ(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    """The shards hold a quarter of `x` each, but the source strategy does not list it: that is what is wrong."""
    w = np.arange(16, dtype=np.float32)
    source = Side(4, 1, {"w": RawLayout((4,), (0,))})
    target = Side(ranks, 1, {name: RawLayout((ranks,), (0,)) for name in ("w", "x")})
    c = write_conversion(tmp_path, "ckpt", source, Side(ranks, 1, {"w": RawLayout((ranks,), (0,))}), {"w": w})
    c = c.but(dst_strategy=write_strategy(target, tmp_path / "with_x"))
    for rank in range(4):
        # They differ in the last element only, which the last target alone needs.
        x = np.array([0, 0, 0, rank == 2], np.float32)
        write_shard({"w": c.arrays(rank)["w"], "x": x}, c.shard(rank))
    message = refused(c, *options)
    assert "the source strategy does not list 'x', whose copies differ, and the target strategy cuts it" in message
    assert "at element [3]: the source strategy does not list it" in message and f"where: {c.src_strategy}, " in message
    with pytest.raises(StrategyError, match="does not list 'x', whose copies differ"):
        reshard_mpi.load_rank(ranks - 1, c.src, c.src_strategy, c.dst_strategy)
    # A task that makes another target cannot know; the one that needs the element refuses.
    assert "does not list 'x', whose copies differ" in c.refused("transform", *options, "--rank", str(ranks - 1))
    for rank in range(4):
        write_shard({"w": c.arrays(rank)["w"], "x": np.arange(4, dtype=np.float32)}, c.shard(rank))
    c.done("transform", *options)
    together = [read_shard(c.written(rank))["x"][2] for rank in range(ranks)]
    assert b"".join(together) == np.arange(4, dtype=np.float32).tobytes()


# Uneven slices of state


@pytest.mark.parametrize("stages", few(1, [1, 2]))
def test_state_without_sizes_of_an_unevenly_cut_parameter(tmp_path: Path, stages: int) -> None:
    """MindSpore lists the state with the parameter's mesh and map, but without its sizes."""
    w = np.arange(48, dtype=np.float32).reshape(12, 4)
    tensors = {"w": w, "moments.w": -w, "v": w[0]}
    uneven = RawLayout((2,), (0, -1), split_sizes=(3, 9))
    held = {"w": uneven, "moments.w": uneven, "v": RawLayout((2,), (0,), stages=(stages - 1,))}
    target = Side(
        3, 1, {"w": RawLayout((3,), (0, -1)), "moments.w": RawLayout((3,), (0, -1)), "v": RawLayout((3,), (-1,))}
    )
    source = Side(2 * stages, stages, held)
    c = write_conversion(tmp_path, "ckpt", source, target, tensors)
    stated = {**held, "moments.w": RawLayout((2,), (0, -1))}
    c = c.but(src_strategy=write_strategy(Side(2 * stages, stages, stated), tmp_path / "stated"))
    c.done()
    assert_right(c)
    back = c.but(
        src=c.dst, dst=tmp_path / "back", src_strategy=c.dst_strategy, dst_strategy=c.src_strategy, target=source
    )
    back.done()
    assert_right(back)


def test_an_optimizer_cut_of_size_all_and_step_0_is_none(tmp_path: Path) -> None:
    """MindFormers writes it so; 2 data parallel x 2 model parallel ranks. `w` is as it was, not twice as high."""
    from reshard_mpi.sharding import mindspore_json

    c = make(tmp_path)
    layouts = {
        "w": mindspore_json.RawLayout((2, 2), ((-1,), (0,)), -1, 0, param_split_shape=(8, 4)),
        "b": mindspore_json.RawLayout((2, 2), ((-1,),), -1, 0, param_split_shape=(8,)),
    }
    file = mindspore_json.StageFile(layouts, (mindspore_json.StrategyItem("w", 0, ((1, 2),)),))
    write_stage_file(tmp_path / "theirs", file)
    c.but(src_strategy=tmp_path / "theirs").done()
    assert_right(c)
    assert TENSORS["w"].shape == (8, 4)

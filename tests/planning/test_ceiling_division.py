"""Slices of uneven lengths by ceiling division, torch's own: `sizes = "ceil"` in a spec."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import Arrays, as_read, read_shard, write_shard
from support.examples import few, many

import reshard_mpi
from reshard_mpi.errors import CoverageError, LayoutError, ReshardError, StrategyError
from reshard_mpi.sharding.layout import Layout, whole_shape, whole_shape_of_parts
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.toml_spec import parse

RULE = '[[parameter]]\nmatch = "*"\nsplit = {{ {} = {} }}\nsizes = "ceil"'


def spec(mesh: str, dim: int, axes: Sequence[str]) -> str:
    return f"mesh = {{ {mesh} }}\n" + RULE.format(dim, str(list(axes)).replace("'", '"'))


def chunks(rows: list[int], cuts: Sequence[int]) -> list[list[int]]:
    """Cut a list into so many pieces, and each of these again: what torch.chunk does, with empty ones at the end."""
    if not cuts:
        return [rows]
    step = 0
    while step * cuts[0] < len(rows):
        step += 1
    pieces = [rows[index * step : (index + 1) * step] for index in range(cuts[0])]
    return list(itertools.chain.from_iterable(chunks(piece, cuts[1:]) for piece in pieces))


@given(st.integers(0, 60), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_slices_are_those_of_torch(length: int, cuts: list[int]) -> None:
    placement = Placement(tuple(cuts), ((), tuple(range(len(cuts)))), open_ended=True, ceil=True)
    layout = Layout(placement, (2, length, 3))
    boxes = [layout.box(rank) for rank in range(placement.stage_size)]
    expected = chunks(list(range(length)), cuts)
    assert [list(range(box.start[1], box.stop[1])) for box in boxes if box.size] == [rows for rows in expected if rows]
    assert [box.shape for box in boxes] == [(2, len(rows), 3) for rows in expected]
    assert whole_shape_of_parts(placement, {rank: box.shape for rank, box in enumerate(boxes)}) == (2, length, 3)


def test_the_example_of_torch() -> None:
    layout = Layout(Placement((4,), ((0,),), ceil=True), (50,))
    assert [layout.box(rank).shape for rank in range(4)] == [(13,), (13,), (13,), (11,)]


def test_a_part_alone_does_not_tell_the_whole() -> None:
    placement = Placement((2, 4), ((), (1,)), ceil=True)
    with pytest.raises(LayoutError, match="dimension 1"):
        whole_shape(placement, 0, (3, 13))
    with pytest.raises(LayoutError, match="dimension 1"):
        whole_shape_of_parts(placement, {0: (3, 13), 1: (3, 13), 4: (3, 13), 5: (3, 13), 7: (3, 11)})
    assert whole_shape_of_parts(placement, {4: (3, 13), 1: (3, 13), 2: (3, 13), 7: (3, 11)}) == (3, 50)


@pytest.mark.slow
@many(25)
@given(
    st.tuples(st.integers(1, 23), st.integers(1, 23)),
    st.integers(1, 5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["ckpt", "hdf5", "safetensors", "torch"]),
)
def test_any_lengths_from_any_number_to_any(shape: tuple[int, int], m: int, n: tuple[int, int], to: str) -> None:
    random = np.random.default_rng(7)
    tensors: Arrays = {
        "w": random.standard_normal(shape, np.float32),
        "moments.w": random.standard_normal(shape, np.float32),
        "b": random.standard_normal(shape, np.float32),
        "step": np.array(9, np.int32),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shard(tensors, folder / "one.ckpt")
        (folder / "m.toml").write_text(spec(f"a = {m}", 0, ["a"]))
        (folder / "n.toml").write_text(spec(f"a = {n[0]}, b = {n[1]}", 1, ["b", "a"]))
        reshard_mpi.transform(folder / "one.ckpt", folder / "m", dst_strategy=folder / "m.toml", verify=True)
        for rank, rows in enumerate(chunks(list(range(shape[0])), [m])):
            expected = {key: array[rows] if array.ndim else array for key, array in tensors.items()}
            assert read_shard(folder / "m" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") == as_read(expected)
        describes_itself = to in ("hdf5",)
        both = {"src_strategy": folder / "m.toml", "dst_strategy": folder / "n.toml"}
        reshard_mpi.transform(folder / "m", folder / "n", to=to, verify=True, **both)
        source = {} if describes_itself else {"src_strategy": folder / "n.toml"}
        reshard_mpi.transform(folder / "n", folder / "back", to="ckpt", replicas="check", **source)
        assert read_shard(folder / "back" / "rank_0" / "checkpoint_0.ckpt") == as_read(tensors)


@pytest.mark.parametrize(("length", "sizes"), few(1, [(5, [2, 3]), (4, [1, 3]), (3, [1, 2]), (9, [4, 5])]))
@pytest.mark.parametrize("axes", [["a"], ["a", "b"]])
def test_empty_slices_are_opened_for_a_target_that_gives_sizes(
    tmp_path: Path, length: int, sizes: list[int], axes: list[str]
) -> None:
    """The sizes of the target say how long it all is, but the source's slices tell it only all together."""
    whole = np.arange(length * 2, dtype=np.float32).reshape(length, 2)
    mesh = "a = 4" if len(axes) == 1 else "a = 3, b = 2"
    (tmp_path / "m.toml").write_text(spec(mesh, 0, axes))
    for rank, rows in enumerate(chunks(list(range(length)), [4] if len(axes) == 1 else [3, 2])):
        path = tmp_path / "m" / f"rank_{rank}" / "w.ckpt"
        path.parent.mkdir(parents=True)
        write_shard({"w": whole[rows]}, path)
    (tmp_path / "n.toml").write_text(
        f'mesh = {{ a = 2 }}\n[[parameter]]\nmatch = "w"\nsplit = {{ 0 = ["a"] }}\nsizes = {{ 0 = {sizes} }}\n'
    )
    reshard_mpi.transform(tmp_path / "m", tmp_path / "n", tmp_path / "m.toml", tmp_path / "n.toml", verify=True)
    for rank, rows in enumerate((whole[: sizes[0]], whole[sizes[0] :])):
        assert read_shard(tmp_path / "n" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") == as_read({"w": rows})


def write_four(folder: Path, lengths: Sequence[int]) -> Path:
    """Write four shards with slices of so many rows, and the spec; return the spec."""
    for rank, length in enumerate(lengths):
        shard = folder / "four" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        shard.parent.mkdir(parents=True)
        write_shard({"w": np.arange(length * 3, dtype=np.float32).reshape(length, 3) + 1000 * rank}, shard)
    path = folder / "four.toml"
    path.write_text(spec("a = 4", 0, ["a"]))
    return path


@pytest.mark.parametrize(
    "lengths", [(13, 12, 13, 12), (13, 13, 11, 13), (12, 13, 13, 13), (13, 13, 13, 14), (1, 1, 0, 1)]
)
def test_slices_of_other_lengths_are_refused(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    path = write_four(tmp_path, lengths)
    with pytest.raises(ReshardError, match="'w'"):
        reshard_mpi.transform(tmp_path / "four", tmp_path / "one", src_strategy=path)
    assert not (tmp_path / "one" / "rank_0").exists()


@pytest.mark.parametrize("lost", [0, 3])
def test_a_missing_shard_is_named(tmp_path: Path, lost: int) -> None:
    path = write_four(tmp_path, (13, 13, 13, 11))
    (tmp_path / "four" / f"rank_{lost}" / f"checkpoint_{lost}.ckpt").unlink()
    with pytest.raises(CoverageError, match="how large 'w' is cannot be known") as error:
        reshard_mpi.transform(tmp_path / "four", tmp_path / "one", src_strategy=path)
    assert error.value.got == f"rank {lost}: no shard"
    assert error.value.where == f"{tmp_path}/four, which has the shards of 3 of 4 ranks"
    assert error.value.remedy.startswith("restore these ranks' shards") and "sizes of all" in error.value.remedy
    assert not (tmp_path / "one" / "rank_0").exists()


@pytest.mark.parametrize("content", [b"junk", b""])
def test_a_damaged_shard_is_named(tmp_path: Path, content: bytes) -> None:
    path = write_four(tmp_path, (13, 13, 13, 11))
    shard = tmp_path / "four" / "rank_2" / "checkpoint_2.ckpt"
    shard.write_bytes(content)
    with pytest.raises(CoverageError, match="how large 'w' is cannot be known") as error:
        reshard_mpi.transform(tmp_path / "four", tmp_path / "one", src_strategy=path)
    assert error.value.got.startswith("rank 2: ") and error.value.where == str(shard)


def test_a_lost_shard_that_another_rank_replaces_is_not_blamed(tmp_path: Path) -> None:
    """Ranks 0 and 4 hold the same; of rank 1's slice both holders are lost, of rank 0's only one."""
    write_four(tmp_path, (13, 13, 13, 11))
    path = tmp_path / "eight.toml"
    path.write_text(spec("copy = 2, a = 4", 0, ["a"]))
    for rank in (2, 3):
        shutil.copytree(tmp_path / "four" / f"rank_{rank}", tmp_path / "four" / f"rank_{rank + 4}")
    shutil.move(tmp_path / "four" / "rank_0", tmp_path / "four" / "rank_4")
    shutil.rmtree(tmp_path / "four" / "rank_1")
    with pytest.raises(CoverageError) as error:
        reshard_mpi.transform(tmp_path / "four", tmp_path / "one", src_strategy=path, select="*.ckpt")
    assert error.value.got == "rank 1: no shard; rank 5: no shard"


def test_more_ranks_in_the_mesh_than_there_are(tmp_path: Path) -> None:
    path = write_four(tmp_path, (13, 13, 13, 11))
    path.write_text(spec("a = 6", 0, ["a"]))
    with pytest.raises(CoverageError) as error:
        reshard_mpi.transform(tmp_path / "four", tmp_path / "one", src_strategy=path)
    assert error.value.where.endswith("which has the shards of 4 of 6 ranks")
    assert "give the mesh that the checkpoint was saved with" in error.value.remedy


@pytest.mark.parametrize("target", [RULE.format(0, '["b"]').replace("ceil", "even"), '[[parameter]]\nmatch = "x"'])
@pytest.mark.parametrize("mesh", ["a = 4", "a = 6"])
def test_a_mistake_in_the_source_is_told_before_one_in_the_target(tmp_path: Path, target: str, mesh: str) -> None:
    """4 slices of 13 rows would be 52, which 7 do not divide; 6 ranks are not there; and no tensor is called x."""
    path = write_four(tmp_path, (13, 13, 13, 11))
    if mesh == "a = 4":
        path.write_text(spec(mesh, 0, ["a"]).replace('sizes = "ceil"', ""))
    else:
        path.write_text(spec(mesh, 0, ["a"]))
    (tmp_path / "dst.toml").write_text(f"mesh = {{ b = 7 }}\n{target}".replace('sizes = "even"', ""))
    both = {"src_strategy": path, "dst_strategy": tmp_path / "dst.toml"}
    for command in (reshard_mpi.plan, partial(reshard_mpi.transform, target=tmp_path / "dst")):
        with pytest.raises(ReshardError) as error:
            command(tmp_path / "four", **both)
        if mesh == "a = 4":
            assert error.value.where == f"{tmp_path}/four/rank_3/checkpoint_3.ckpt"
            assert 'sizes = "ceil"' in error.value.remedy
        else:
            assert error.value.where == f"{tmp_path}/four, which has the shards of 4 of 6 ranks"


def test_a_mesh_of_more_ranks_than_there_are_is_told(tmp_path: Path) -> None:
    """The shards are half of those of 8 ranks, so none of them by itself shows that the mesh is wrong."""
    write_four(tmp_path, (13, 13, 13, 11))
    (tmp_path / "src.toml").write_text(spec("a = 8", 0, ["a"]).replace('sizes = "ceil"', ""))
    (tmp_path / "dst.toml").write_text(spec("b = 7", 0, ["b"]).replace('sizes = "ceil"', ""))
    with pytest.raises(ReshardError) as error:
        reshard_mpi.plan(tmp_path / "four", tmp_path / "src.toml", tmp_path / "dst.toml")
    assert error.value.where.endswith(f"; {tmp_path}/four, which has the shards of 4 of 8 ranks")


@pytest.mark.parametrize("shape", [(4,), (4, 2), ()])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_rule_that_cuts_a_dimension_too_many(tmp_path: Path, shape: tuple[int, ...], side: str) -> None:
    (tmp_path / "src" / "rank_0").mkdir(parents=True)
    write_shard({"w": np.zeros(shape, np.float32)}, tmp_path / "src" / "rank_0" / "checkpoint_0.ckpt")
    (tmp_path / "spec.toml").write_text('mesh = { a = 1 }\n[[parameter]]\nmatch = "w"\nsplit = { 2 = ["a"] }\n')
    with pytest.raises(LayoutError, match="another number of dimensions") as error:
        reshard_mpi.plan(tmp_path / "src", **{f"{side}_strategy": tmp_path / "spec.toml"})
    says = {
        (4,): "the tensor has 1 dimension: cut dimension 0, or",
        (4, 2): "the tensor has 2 dimensions: cut dimensions 0 to 1, or",
        (): "the tensor has no dimensions and cannot be cut:",
    }
    assert error.value.remedy.startswith(says[shape])
    assert error.value.remedy.endswith(" give it a rule of its own before this one")


def test_the_rank_list_has_all_that_may_be_needed(tmp_path: Path) -> None:
    path = write_four(tmp_path, (13, 13, 13, 11))
    (tmp_path / "three.toml").write_text(spec("a = 3", 0, ["a"]))
    needed = reshard_mpi.rank_list_for_transform(0, path, tmp_path / "three.toml")
    assert needed == [0, 1, 2, 3]
    files = {rank: tmp_path / "four" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt" for rank in needed}
    shard = tmp_path / "shard.ckpt"
    reshard_mpi.transform_checkpoint_by_rank(1, files, shard, path, tmp_path / "three.toml")
    whole = np.concatenate(
        [np.frombuffer(read_shard(file)["w"][2], np.float32).reshape(-1, 3) for file in files.values()]
    )
    assert read_shard(shard) == as_read({"w": whole[17:34]})


@pytest.mark.parametrize(
    "rule",
    [
        'split = { 0 = ["a"] }\nsizes = "floor"',
        'split = { 0 = ["a"] }\nsizes = ["ceil"]',
        'split = { 0 = ["a"] }\nsizes = { 0 = "ceil" }',
        'split = { 0 = ["a"] }\nsizes = "ceil"\noptimizer = ["b"]',
        'sizes = "ceil"',
    ],
)
def test_what_it_cannot_mean_is_refused(rule: str) -> None:
    with pytest.raises((StrategyError, LayoutError)):
        parse(f'mesh = {{ a = 2, b = 2 }}\n[[parameter]]\nmatch = "w"\n{rule}', "spec.toml")


@pytest.mark.parametrize("word", ["chunk", "even", "CEIL"])
def test_another_word_than_ceil_is_told_the_one_there_is(word: str) -> None:
    with pytest.raises(StrategyError, match="sizes") as error:
        parse(spec("a = 2", 0, ["a"]).replace("ceil", word), "spec.toml")
    assert '"ceil"' in error.value.expected and "{ 0 = [" in error.value.expected


def test_a_stage_that_has_no_part_of_a_tensor_need_not_know_how_long_it_is(tmp_path: Path) -> None:
    path, whole = tmp_path / "four.toml", np.arange(50 * 3, dtype=np.float32).reshape(50, 3)
    path.write_text(spec("a = 4", 0, ["a"]).replace('"*"', '"w"') + '\n[[parameter]]\nmatch = "b"\n')
    rows, others = chunks(list(range(50)), [4]), np.arange(3)
    for rank in range(4):
        (tmp_path / "four" / f"rank_{rank}").mkdir(parents=True)
        shard = tmp_path / "four" / f"rank_{rank}" / "net.ckpt"
        write_shard({"w": whole[rows[rank]], "b": others}, shard)
    rules = '[[parameter]]\nmatch = "w"\nstage = 0\nsplit = { 0 = ["a"] }\n[[parameter]]\nmatch = "b"\nstage = 1\n'
    (tmp_path / "two.toml").write_text(f"stages = 2\nmesh = {{ a = 2 }}\n{rules}")
    reshard_mpi.transform(tmp_path / "four", tmp_path / "two", path, tmp_path / "two.toml", verify=True)
    for rank, expected in enumerate(({"w": whole[:25]}, {"w": whole[25:]}, {"b": others}, {"b": others})):
        assert read_shard(tmp_path / "two" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") == as_read(expected)


Stages = st.integers(0, 2)
Cuts = st.permutations(["", "a", "b", "a b", "b a"])


@pytest.mark.slow
@many(20)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 11)), min_size=3, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.tuples(Stages, Stages, Stages),
    Cuts,
    Cuts,
    st.sampled_from(["follow", "drop", "replicate"]),
    st.booleans(),
)
def test_stages_get_what_they_hold_whatever_else_lies_in_the_shards_that_they_open(
    shapes: list[tuple[int, int]],
    sizes: tuple[int, int],
    target_sizes: tuple[int, int],
    stages: tuple[int, int, int],
    source_cuts: list[str],
    target_cuts: list[str],
    unlisted: str,
    has_state: bool,
) -> None:
    """Tensors are cut over any axes, and each is in one of three stages of the target; none need know of the others.

    has_state: of a tensor, which no strategy lists: its length must be known to tell whose state it is.
    """
    names = ("w", "v", "u")
    whole = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
        for number, (name, shape) in enumerate(zip(names, shapes))
    }

    def write_spec(path: Path, mesh: tuple[int, int], cuts: list[str], stage_of: Sequence[int] | None) -> Path:
        lines = ["stages = 3"] * (stage_of is not None) + [f"mesh = {{ a = {mesh[0]}, b = {mesh[1]} }}"]
        for number, (name, cut) in enumerate(zip(names, cuts)):
            lines += ["[[parameter]]", f'match = "{name}"']
            lines += [f"stage = {stage_of[number]}"] if stage_of is not None else []
            lines += [f"split = {{ 0 = {cut.split()} }}".replace("'", '"'), 'sizes = "ceil"'] if cut else []
        path.write_text("\n".join(lines))
        return path

    def held(rank: int, mesh: tuple[int, int], cuts: list[str], stage: int | None) -> Arrays:
        place = dict(zip("ab", divmod(rank, mesh[1])))
        arrays = {}
        for number, (name, cut) in enumerate(zip(names, cuts)):
            if stage is None or stages[number] == stage:
                index = 0
                for axis in cut.split():
                    index = index * mesh["ab".index(axis)] + place[axis]
                rows = chunks(list(range(shapes[number][0])), [mesh["ab".index(axis)] for axis in cut.split()])
                arrays[name] = whole[name][rows[index]]
        if has_state and stage is not None and unlisted == "replicate":
            arrays["moments.w"] = -whole["w"]
        elif has_state and "w" in arrays and (stage is None or unlisted == "follow"):
            arrays["moments.w"] = -arrays["w"]
        return arrays

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_spec(folder / "source.toml", sizes, source_cuts, None)
        target = write_spec(folder / "target.toml", target_sizes, target_cuts, stages)
        files = {rank: folder / "src" / f"rank_{rank}" / "net.ckpt" for rank in range(math.prod(sizes))}
        for rank, path in files.items():
            path.parent.mkdir(parents=True)
            write_shard(held(rank, sizes, source_cuts, None), path)
        both = (source, target)
        for rank in range(3 * math.prod(target_sizes)):
            stage, local = divmod(rank, math.prod(target_sizes))
            expected = held(local, target_sizes, target_cuts, stage)
            listed = reshard_mpi.rank_list_for_transform(rank, *both, unlisted=unlisted)
            for shards in (folder / "src", {each: files[each] for each in listed})[: 1 if has_state else 2]:
                loaded = reshard_mpi.load_rank(rank, shards, *both, unlisted=unlisted)
                assert loaded.keys() == expected.keys()
                assert all(np.array_equal(loaded[key], array) for key, array in expected.items())

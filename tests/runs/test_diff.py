"""Two checkpoints are the same, or what differs is named: tensor, element, place; whatever their layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ckpt_peer, torch_peer
from support.checkpoints import sample, write_shard
from support.command_line import done, refused, run_apart, run_here
from support.conversions import TENSORS, Conversion
from support.examples import many
from support.launch import MPI, by_one_mpi
from support.processes import Finished

import reshard_mpi
from reshard_mpi.errors import DifferenceError, MapError
from reshard_mpi.runs.outcome import Checked, Outcome, Report
from reshard_mpi.testing.sample_tensors import ShardContents


def full(folder: Path, kind: str = "ckpt", **changes: np.ndarray) -> Path:
    """Write the whole checkpoint as one file, its names in another order, and other tensors in it."""
    path = folder / f"full.{kind}"
    write_shard(dict(reversed({**TENSORS, **changes}.items())), path)
    return path


def diff(c: Conversion, other: Path, *options: str) -> Finished:
    return run_here("diff", c.src, str(other), "--src-strategy", c.src_strategy, "--jobs", "1", *options)


@pytest.mark.parametrize("kind", ["ckpt", "hdf5"])
def test_the_same_in_another_layout_and_format(c: Conversion, tmp_path: Path, kind: str) -> None:
    said = diff(c, full(tmp_path, "h5" if kind == "hdf5" else kind))
    assert said.code == 0 and said.out.startswith("compared 4 tensors, ") and said.out.endswith(": the same\n"), said


def test_one_element(c: Conversion, tmp_path: Path) -> None:
    changed = TENSORS["w"].copy()
    changed[5, 2] = 0.5
    changed[6, 0] = 0.25
    other = full(tmp_path, w=changed)
    said = diff(c, other)
    assert said.code == 4 and said.out == "", said
    assert "difference: 'w' differs at element [5, 2]\n" in said.err
    assert "expected: 22.0 (0000b041) at byte " in said.err and "rank_1/checkpoint_1.ckpt" in said.err
    assert "got: 0.5 (0000003f) at byte " in said.err and str(other) in said.err
    assert said.err.count("difference: ") == 1


def test_names_types_and_shapes(c: Conversion, tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    arrays = {"w": TENSORS["w"].astype(np.float64), "moments.w": np.zeros((4, 8), np.float32), "extra": np.zeros(3)}
    write_shard({**arrays, "global_step": TENSORS["global_step"]}, other)
    said = diff(c, other)
    assert said.code == 4, said
    assert "1 tensor is in one of them only" in said.err
    assert "not there: 'b'" in said.err and "not there: 'extra'" in said.err
    assert "'w' is of another type or shape\n  expected: float32 of shape [8, 4], as in" in said.err
    assert "got: float64 of shape [8, 4]" in said.err and "got: float32 of shape [4, 8]" in said.err


def test_many_differences_are_counted(tmp_path: Path) -> None:
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    write_shard({f"w{number}": np.full(3, number, np.int32) for number in range(30)}, first)
    write_shard({f"w{number}": np.full(3, -1, np.int32) for number in range(30)}, second)
    said = run_here("diff", str(first), str(second), "--jobs", "1")
    assert said.code == 4 and said.err.count("differs at element [0]") == 20, said
    assert "difference: 10 more tensors differ" in said.err


def test_texts_that_differ_are_noted(tmp_path: Path) -> None:
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    for path, epoch in ((first, "3"), (second, "4")):
        ckpt_peer.write(path, ShardContents.of([], {"epoch": epoch}))
    said = done("diff", str(first), str(second), "--jobs", "1")
    assert "note: texts beside the tensors differ: 'epoch'" in said.err, said


# What is chosen is chosen on both sides


def with_extras(folder: Path, name: str, **extras: np.ndarray) -> Path:
    """Write a full checkpoint with these tensors beside two that all have."""
    path = folder / f"{name}.ckpt"
    write_shard({"w": np.arange(4, dtype=np.float32), "b": np.arange(3), **extras}, path)
    return path


@pytest.mark.parametrize("options", [("--exclude", "*.head"), ("--include", "w", "--include", "b")])
def test_what_either_has_besides_does_not_count(tmp_path: Path, options: tuple[str, ...]) -> None:
    extra = np.ones(2, np.float32)
    plain, other = with_extras(tmp_path, "a"), with_extras(tmp_path, "b", **{"x.head": extra})
    third = with_extras(tmp_path, "c", **{"x.head": extra * 2})
    for first, second in ((plain, other), (other, plain), (other, third)):
        assert "compared 2 tensors" in done("diff", str(first), str(second), "--jobs", "1", *options).out
        assert "'x.head'" in refused("diff", first, second, "--jobs", "1", code=4)


def test_a_difference_in_what_is_chosen_is_found(tmp_path: Path) -> None:
    first, second = with_extras(tmp_path, "a"), with_extras(tmp_path, "b", w=np.ones(4, np.float32), c=np.ones(1))
    said = run_here("diff", str(first), str(second), "--jobs", "1", "--include", "[wc]")
    assert said.code == 4 and said.err.count("difference: ") == 2, said
    assert "'w' differs at element [0]" in said.err and "not there: 'c'" in said.err
    said = run_here("diff", str(first), str(second), "--jobs", "1", "--include", "c")
    assert said.code == 4 and said.err.count("difference: ") == 1 and "not there: 'c'" in said.err, said


def test_a_glob_that_matches_in_neither_is_refused(tmp_path: Path) -> None:
    first, second = with_extras(tmp_path, "a"), with_extras(tmp_path, "b", c=np.ones(1))
    for option in ("--include", "--exclude"):
        said = run_here("diff", str(first), str(second), "--jobs", "1", option, "d*")
        assert said.code == 3 and f"{option} d* matches no tensor\n  got: w, b, c\n" in said.err, said
        with pytest.raises(MapError, match="d\\* matches no tensor"):
            reshard_mpi.diff(first, second, **{option.strip("-"): "d*"})


def test_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    first = with_extras(tmp_path, "a")
    assert "leave no tensor" in refused("diff", str(first), str(first), "--jobs", "1", "--exclude", "*")


def test_a_full_checkpoint_and_what_a_map_makes_of_a_part(tmp_path: Path) -> None:
    """The names are those of the target: the second has them as they are."""
    rules = tmp_path / "map.toml"
    rules.write_text('[[map]]\neq = "w [a] <=> v.w [a]"\n[[map]]\neq = "b [a] <=> v.b [a]"\n')
    second = tmp_path / "c.ckpt"
    write_shard({"v.w": np.arange(4, dtype=np.float32), "v.b": np.arange(3) + 1, "z": np.ones(1)}, second)
    arguments = ["diff", str(with_extras(tmp_path, "a")), str(second), "--jobs", "1", "--map", str(rules)]
    assert "compared 1 tensor," in done(*arguments, "--exclude", "v.b", "--exclude", "z").out
    assert "difference: 'v.b' differs at element [0]" in run_here(*arguments, "--exclude", "z").err


def test_a_hole_is_no_difference_but_refused(c: Conversion, tmp_path: Path) -> None:
    other = full(tmp_path)
    c.remove(1, 3)
    said = diff(c, other)
    assert said.code == 3 and "reshard-mpi: error: " in said.err, said


@by_one_mpi
def test_several_processes_find_the_same(c: Conversion, tmp_path: Path, mpi: MPI) -> None:
    changed = {name: TENSORS[name].copy() for name in ("w", "b")}
    changed["w"][7, 3] += 1
    changed["b"][1] = 9
    other = full(tmp_path, **changed)
    arguments = ["diff", c.src, other, "--src-strategy", c.src_strategy]
    for finished in (run_apart(*arguments, "--jobs", "2"), run_apart(*arguments, mpi=mpi, ranks=3)):
        assert finished.code == 4, finished
        assert "'w' differs at element [7, 3]" in finished.err and "'b' differs at element [1]" in finished.err
        assert finished.err.count("difference: ") == 2


def test_processes_that_compare_as_much_as_each_other_are_added_up() -> None:
    checked = Checked(0, "second", 3, 64, ("the other",))
    outcome = Outcome(processes=2).joined([Outcome(notes=("a note",), checked=(checked,))] * 2)
    report = Report.of(outcome, 1.0)
    assert (report.notes, report.tensors, report.read_bytes, len(report.checked)) == (("a note",), 6, 128, 1)


def test_as_a_function(c: Conversion, tmp_path: Path) -> None:
    assert reshard_mpi.diff(c.src, full(tmp_path), c.src_strategy).tensors == 4
    changed = {name: TENSORS[name] + 1 for name in ("w", "b")}
    with pytest.raises(DifferenceError, match=r"differs at element \[0.*\(and 1 more found\)") as raised:
        reshard_mpi.diff(c.src, full(tmp_path, **changed), c.src_strategy)
    assert raised.value.exit_code == 4


@many(25)
@given(data=st.data())
def test_the_first_difference_is_numpys(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("diff")
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    first = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int64).reshape(shape)
    second = first.copy()
    for _ in range(data.draw(st.integers(0, 3))):
        second[tuple(data.draw(st.integers(0, length - 1)) for length in shape)] += data.draw(st.integers(1, 2**40))
    write_shard({"w": first}, folder / "a.ckpt")
    write_shard({"w": second}, folder / "b.h5")
    differing = np.argwhere(first != second)
    if not len(differing):
        reshard_mpi.diff(folder / "a.ckpt", folder / "b.h5")
        return
    with pytest.raises(DifferenceError) as raised:
        reshard_mpi.diff(folder / "a.ckpt", folder / "b.h5")
    index = tuple(differing[0].tolist())
    assert raised.value.problem == f"'w' differs at element {list(index)}"
    assert raised.value.expected.startswith(f"{first[index]} (") and raised.value.got.startswith(f"{second[index]} (")


UTILS = torch_peer.STAND_INS["torch._utils"]


def saved(path: Path, **values: object) -> Path:
    """Write a file of torch with values beside a tensor."""
    weights = sample("w", np.arange(4, dtype=np.float32))
    torch_peer.save(path, {"w": torch_peer.tensor(weights, "0"), **values})
    return path


def test_values_that_differ_are_named(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.pt", optimizer={"groups": [{"lr": 0.1, "name": "all"}]}, epoch=3)
    second = saved(tmp_path / "b.pt", optimizer={"groups": [{"lr": 0.2, "name": "all"}]}, epoch=3)
    finished = done("diff", str(first), str(second), "--jobs", "1")
    assert "note: values beside the tensors differ: optimizer.groups.0.lr (0.1 and 0.2)\n" in finished.err


def test_what_cannot_be_compared_is_not_called_the_same(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.pt", odd=torch_peer.Tensor(UTILS._rebuild_meta_tensor_no_storage))
    finished = run_here("diff", str(first), str(first), "--jobs", "1")
    assert finished.code == 4 and "difference: not all that is in" in finished.err, finished
    assert "odd" in finished.err and finished.out == ""


def test_attributes_of_a_tensor_are_left_out_by_name(tmp_path: Path) -> None:
    weights = torch_peer.tensor(sample("w", np.arange(4, dtype=np.float32)), "0")
    marked = torch_peer.Tensor(UTILS._rebuild_parameter_with_state, weights, True, {}, {"tag": "x"})
    torch_peer.save(tmp_path / "a.pt", {"w": marked})
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "out")
    assert "w: its attributes tag" in done("transform", source, target, "--jobs", "1").err
    assert "w: its attributes tag" in refused("transform", source, f"{target}2", "--jobs", "1", "--strict")


def test_a_tensor_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.pt", optimizer={"odd": torch_peer.Tensor(UTILS._rebuild_sparse_tensor)})
    for arguments in (["diff", str(first), str(first)], ["transform", str(first), str(tmp_path / "out")]):
        assert "got: optimizer.odd: a sparse tensor" in refused(*arguments, "--jobs", "1")
    assert not (tmp_path / "out").exists()

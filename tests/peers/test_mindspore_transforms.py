"""MindSpore's own transform functions and ours on random cases: wherever MindSpore is right, both agree.

The oracle judges. Ours must always be right. Where MindSpore is not, the case must have a property on which it is known
to fail; where the case has none, MindSpore must be right, or the tests have misunderstood what its strategies mean.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import DTYPES, WORLD_SIZES, Case, Side, cases
from support.checkpoints import as_read, expected_rank, read_shard, write_strategy
from support.oracle import RawLayout

import reshard_mpi
from reshard_mpi.sharding import strategy_files

pytest.importorskip("mindspore")
import mindspore as ms
from support import mindspore_peer as peer

pytestmark = pytest.mark.mindspore

EXAMPLES = 80
SAVABLE = tuple(dtype for dtype in DTYPES if dtype.kind != "c")  # MindSpore's loader refuses complex numbers
NESTING = tuple(sizes for sizes in WORLD_SIZES if not (sizes[0] % sizes[1] and sizes[1] % sizes[0]))

# Why MindSpore may refuse a case or get a tensor wrong.
HYPHEN = "'-' in a name"
NO_MULTIPLE = "stages of M and N ranks without a common multiple"
ONE_RANK_STAGES = "target stages of one rank each"
NO_REFINEMENT = "scalar on meshes without a common refinement"
INSIDE_AXES = "optimizer cut that is not made of whole mesh axes"
UNLISTED = "not in a strategy"
UNEVEN = "uneven slices"
TRANSPOSED = "optimizer cut of a transposed map"
NANS = "NaNs of bfloat16"
ITS_WORDS = (
    ("Convert layout strategy to list failed", HYPHEN),
    ("Cannot transform device_num", NO_MULTIPLE),
    ("is not in the current stage", ONE_RANK_STAGES),
    ("The checkpoint of rank 0 is missing", ONE_RANK_STAGES),
    ("cannot be divided by", INSIDE_AXES),
    ("Infer tensor redistribution failed", NO_REFINEMENT),
    ("Infer tensor redistribution failed", UNEVEN),
    ("is not a valid redistrbution op", UNEVEN),
    ("cannot reshape array", UNEVEN),
)


@st.composite
def peer_cases(draw: st.DrawFn) -> Case:
    """Three of four cases have only what MindSpore can do; the others have everything."""
    feasible = draw(st.integers(1, 4)) > 1
    case = draw(
        cases(
            world_sizes=draw(st.sampled_from(NESTING if feasible else WORLD_SIZES)),
            max_parameters=2,
            dtypes=SAVABLE,
            uneven=not feasible,
            unlisted=not feasible,
            empty=False,
        )
    )
    return _without_hyphens(case) if feasible else case


def test_mindspore_is_right_or_known_to_fail() -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=peer_cases())
    def compare(case: Case) -> None:
        with tempfile.TemporaryDirectory() as name:
            counts.update(_compare(case, Path(name)))

    compare()
    print("\nMindSpore beside the oracle:")
    for outcome, number in counts.most_common():
        print(f"{number:7d} {outcome}")
    assert counts["tensors right"] > EXAMPLES, counts
    assert counts["whole checkpoints right"] > EXAMPLES // 8, counts


def _case_of_one_tensor(
    src: RawLayout, dst: RawLayout, shape: tuple[int, ...], *, name: str = "w", dtype: type = np.float32
) -> Case:
    """A checkpoint of one stage and one tensor."""
    values = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    return Case(Side(src.stage_size, 1, {name: src}), Side(dst.stage_size, 1, {name: dst}), {name: values})


def _follower() -> Case:
    """State that the target strategy leaves out."""
    src, dst = RawLayout((4,), (0, -1)), RawLayout((2,), (-1, 0))
    case = _case_of_one_tensor(src, dst, (8, 4))
    tensors = {**case.tensors, "moments.w": case.tensors["w"] + 100}
    return Case(
        replace(case.src, layouts=dict.fromkeys(tensors, src)),
        replace(case.dst, layouts=dict.fromkeys(tensors, dst), unlisted=frozenset({"moments.w"})),
        tensors,
    )


def _nans() -> Case:
    case = _case_of_one_tensor(RawLayout((4,), (0,)), RawLayout((2,), (0,)), (8,), dtype=ml_dtypes.bfloat16)
    case.tensors["w"].view(np.uint16)[3] = 0x7F81  # signalling, with a payload
    return case


WHOLE = RawLayout((1,), (-1, -1))
KNOWN_FAILURES = {
    NO_MULTIPLE: _case_of_one_tensor(RawLayout((8,), (0, -1)), RawLayout((6,), (0, -1)), (24, 2)),
    NO_REFINEMENT: _case_of_one_tensor(RawLayout((2,), ()), RawLayout((2, 5), ()), ()),
    HYPHEN: _case_of_one_tensor(RawLayout((4,), (0, -1)), WHOLE, (8, 4), name="layer-1.w"),
    UNEVEN: _case_of_one_tensor(WHOLE, RawLayout((2,), (0, -1), split_sizes=(3, 9)), (12, 2)),
    TRANSPOSED: _case_of_one_tensor(RawLayout((2, 2, 2), (0, 1), 2), WHOLE, (8, 4)),
    INSIDE_AXES: _case_of_one_tensor(RawLayout((2, 3, 1), (-1, -1), 2), WHOLE, (6, 2)),
    UNLISTED: _follower(),
    NANS: _nans(),
}


@pytest.mark.parametrize("reason", KNOWN_FAILURES)
def test_what_mindspore_is_known_to_get_wrong(reason: str, tmp_path: Path) -> None:
    """Ours is right; that MindSpore 2.10 still is not shows that the reasons above are no idle excuses."""
    outcomes = list(_compare(KNOWN_FAILURES[reason], tmp_path))
    assert not ms.__version__.startswith("2.10") or any(outcome.endswith(reason) for outcome in outcomes), outcomes


def test_source_ranks_that_are_not_needed(tmp_path: Path) -> None:
    """1024 ranks to 256: the 64 shards of some rows are enough; MindSpore lists all."""
    case = _case_of_one_tensor(RawLayout((2, 64, 8), (0, 1), -1), RawLayout((4, 64), (0, -1)), (2**12, 2**7))
    src, dst = (write_strategy(side, tmp_path / name) for side, name in ((case.src, "src"), (case.dst, "dst")))
    assert len(reshard_mpi.rank_list_for_transform(5, src, dst)) == 64
    assert len(ms.rank_list_for_transform(5, str(src), str(dst))) == 1024 or not ms.__version__.startswith("2.10")


def _compare(case: Case, base: Path) -> Iterator[str]:
    src, dst = _merged(case.src, base / "src_strategy"), _merged(case.dst, base / "dst_strategy")
    shards = {rank: base / "src" / f"rank_{rank}" / "net-9_5.ckpt" for rank in range(case.src.world_size)}
    for rank, path in shards.items():
        peer.save(expected_rank(case.src, case.tensors, rank), path)
    reshard_mpi.transform_checkpoints(base / "src", base / "ours", "c_", src, dst)

    reasons = sorted(_reasons(case))
    all_right = True
    for rank in range(case.dst.world_size):
        expected = as_read(expected_rank(case.dst, case.tensors, rank))
        ours = base / "ours" / f"rank_{rank}" / f"c_{rank}.ckpt"
        assert peer.load(ours) == (expected, {})
        by_rank = base / f"theirs_{rank}.ckpt"
        try:
            listed = ms.rank_list_for_transform(rank, str(src), str(dst))
            _compare_lists(listed, reshard_mpi.rank_list_for_transform(rank, src, dst), case, reasons)
            files = {source: str(shards[source]) for source in listed}
            ms.transform_checkpoint_by_rank(rank, files, str(by_rank), str(src), str(dst))
        except (ValueError, RuntimeError) as error:
            reason = next((why for words, why in ITS_WORDS if words in str(error) and why in reasons), None)
            assert reason, f"MindSpore raises for no known reason ({reasons}): {error}"
            yield f"ranks it refuses: {reason}"
            all_right = False
            continue
        theirs = read_shard(by_rank)
        for name in expected.keys() | theirs.keys():
            if theirs.get(name) == expected.get(name):
                yield "tensors right"
                continue
            all_right = False
            reason = ", ".join(_reasons_for(case, name))
            if not reason and _same_but_for_nans(theirs, expected, name):
                reason = NANS
            assert reason, f"MindSpore's {name!r} of rank {rank} is wrong for no known reason"
            kind = "wrong" if name in theirs and name in expected else "absent" if name in expected else "superfluous"
            yield f"tensors {kind}: {reason}"
    if all_right:
        ms.transform_checkpoints(str(base / "src"), str(base / "theirs"), "c_", str(src), str(dst))
        for rank in range(case.dst.world_size):
            (theirs_whole,) = (base / "theirs" / f"rank_{rank}").iterdir()
            assert read_shard(theirs_whole) == read_shard(base / "ours" / f"rank_{rank}" / f"c_{rank}.ckpt")
            if theirs_whole.name != f"c_{rank}.ckpt":
                assert UNLISTED in reasons, theirs_whole
                yield f"files with another name: {UNLISTED}"
        yield "whole checkpoints right"


def _compare_lists(theirs: list[int], ours: list[int], case: Case, reasons: list[str]) -> None:
    assert ours == sorted(set(ours))
    if not (case.src.unlisted or case.dst.unlisted):  # theirs lacks the ranks of what is not listed
        assert len(ours) <= len(theirs), (ours, theirs, reasons)


def _merged(side: Side, folder: Path) -> Path:
    """Write the strategy of one side as one file. MindSpore's way to merge stages and ours come to the same."""
    stages = write_strategy(side, folder)
    if side.stages == 1:
        return stages
    ours, theirs = folder.with_suffix(".ours.ckpt"), folder.with_suffix(".ckpt")
    reshard_mpi.merge_pipeline_strategys(stages, ours)
    ms.merge_pipeline_strategys(str(stages), str(theirs))
    assert strategy_files.load(str(ours)) == strategy_files.load(str(theirs)) == strategy_files.load(str(stages))
    layouts = [
        {name: str(layout) for name, layout in ms.build_searched_strategy(str(file)).items()} for file in (ours, theirs)
    ]
    assert layouts[0] == layouts[1]
    return theirs


def _reasons(case: Case) -> set[str]:
    """Return why MindSpore may raise on a case."""
    reasons = {reason for name in case.tensors for reason in _reasons_for(case, name)}
    if any("-" in name for name in case.tensors):
        reasons.add(HYPHEN)
    small, large = sorted((case.src.stage_size, case.dst.stage_size))
    if large % small:
        reasons.add(NO_MULTIPLE)
    if case.dst.stages > 1 and case.dst.stage_size == 1:
        reasons.add(ONE_RANK_STAGES)
    for name in case.tensors:
        layouts = case.src.layouts[name], case.dst.layouts[name]
        if case.tensors[name].ndim == 0 and not _have_common_refinement(*layouts):
            reasons.add(NO_REFINEMENT)
        if any(_cuts_inside_axes(layout) for layout in layouts):
            reasons.add(INSIDE_AXES)
    return reasons


def _reasons_for(case: Case, name: str) -> list[str]:
    """Return why MindSpore may give a wrong tensor."""
    reasons = []
    layouts = case.src.layouts[name], case.dst.layouts[name]
    if name in case.src.unlisted | case.dst.unlisted:
        reasons.append(UNLISTED)
    if any(layout.split_sizes for layout in layouts):
        reasons.append(UNEVEN)
    if any(_is_transposed(layout) and layout.opt_size for layout in layouts):
        reasons.append(TRANSPOSED)
    return reasons


def _axes(layout: RawLayout) -> list[int]:
    """Return the mesh axes in use, counted from the left, in the order of the tensor's dimensions."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map]
    return [len(layout.dev_matrix) - 1 - axis for entry in entries for axis in entry if axis != -1]


def _is_transposed(layout: RawLayout) -> bool:
    axes = [axis for axis in _axes(layout) if layout.dev_matrix[axis] > 1]
    return axes != sorted(axes)


def _cuts_inside_axes(layout: RawLayout) -> bool:
    """Tell whether the optimizer cut, taken from the last free mesh axis on, neither fills nor divides one of them."""
    left = layout.opt_size
    for axis in reversed(range(len(layout.dev_matrix))):
        length = layout.dev_matrix[axis]
        if axis in _axes(layout) or length == 1 or left in (-1, 0, 1):
            continue
        if left < length:
            return length % left != 0
        if left % length:
            return True
        left //= length
    return False


def _have_common_refinement(*layouts: RawLayout) -> bool:
    """Tell whether the ranks' numbers fall into nested blocks: MindSpore finds no way from (2,) to (2, 5)."""
    products = {math.prod(layout.dev_matrix[axis:]) for layout in layouts for axis in range(len(layout.dev_matrix))}
    chain = sorted(products)
    return all(larger % smaller == 0 for smaller, larger in itertools.pairwise(chain))


def _same_but_for_nans(theirs: peer.Read, expected: peer.Read, name: str) -> bool:
    if name not in theirs or name not in expected or theirs[name][:2] != expected[name][:2]:
        return False
    if expected[name][0] != "bfloat16":
        return False
    left, right = (np.frombuffer(read[name][2], np.uint16) for read in (theirs, expected))
    left_nan, right_nan = ((bits & 0x7FFF) > 0x7F80 for bits in (left, right))
    return bool(np.array_equal(left_nan, right_nan) and np.array_equal(left[~left_nan], right[~right_nan]))


def _without_hyphens(case: Case) -> Case:
    def renamed(name: str) -> str:
        return name.replace("-", "_")

    def side(old: Side) -> Side:
        layouts = {renamed(name): layout for name, layout in old.layouts.items()}
        return replace(old, layouts=layouts, unlisted=frozenset(map(renamed, old.unlisted)))

    tensors = {renamed(name): tensor for name, tensor in case.tensors.items()}
    return Case(side(case.src), side(case.dst), tensors)

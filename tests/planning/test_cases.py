"""The random cases: that they are what they claim to be, and hold every feature often enough to matter."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.cases import cases, same
from support.oracle import rank_holds, slice_for_rank


@given(cases())
def test_ranks_together_hold_every_tensor(case):
    for side in (case.src, case.dst):
        assert set(side.layouts) == set(case.tensors)
        assert side.unlisted < set(side.layouts)
        assert {stage for layout in side.listed.values() for stage in layout.stages} == set(range(side.stages))
        for name, layout in side.layouts.items():
            assert layout.stage_size == side.stage_size
            whole = np.arange(case.tensors[name].size).reshape(case.tensors[name].shape)
            for stage in layout.stages:
                ranks = range(stage * side.stage_size, (stage + 1) * side.stage_size)
                parts = [slice_for_rank(whole, layout, rank) for rank in ranks]
                assert set(np.concatenate([part.ravel() for part in parts])) == set(whole.ravel())
                copies = Counter(element for part in parts for element in part.ravel())
                assert len(set(copies.values())) <= 1, "every element has as many copies"
            assert sum(rank_holds(layout, rank) for rank in range(side.world_size)) == (
                len(layout.stages) * side.stage_size
            )


@given(cases())
def test_unlisted_tensors_follow_or_are_whole(case):
    for side in (case.src, case.dst):
        for name in side.unlisted:
            layout, base = side.layouts[name], name.partition(".")[2]
            if base in side.listed:
                assert layout == side.layouts[base]
                assert case.tensors[name].shape == case.tensors[base].shape
            else:
                assert same(slice_for_rank(case.tensors[name], layout, side.world_size - 1), case.tensors[name])


@given(cases(stages=False, uneven=False, optimizer=False, nested=False, unlisted=False, empty=False))
def test_features_can_be_left_out(case):
    for side in (case.src, case.dst):
        assert side.stages == 1
        assert not side.unlisted
        for layout in side.layouts.values():
            assert (layout.split_sizes, layout.opt_size, layout.is_nested) == (None, 0, False)
    assert all(tensor.size for tensor in case.tensors.values())


@given(cases(world_sizes=(15, 16)))
def test_world_sizes_can_be_given(case):
    assert (case.src.world_size, case.dst.world_size) == (15, 16)


@pytest.mark.slow
def test_every_feature_is_frequent():
    seen: Counter[str] = Counter()
    sizes = (set(), set())

    @settings(max_examples=500, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def look(case):
        for side, drawn in zip((case.src, case.dst), sizes):
            drawn.add(side.world_size)
        features = {f"{tensor.ndim} dimensions" for tensor in case.tensors.values()}
        features |= {tensor.dtype.name for tensor in case.tensors.values()}
        if math.gcd(case.src.world_size, case.dst.world_size) == 1:
            features.add("no common divisor")
        if any(not tensor.size for tensor in case.tensors.values()):
            features.add("empty")
        for side in (case.src, case.dst):
            if side.unlisted:
                features.add("unlisted")
            for layout in side.layouts.values():
                if not layout.opt_size and np.all(np.hstack([-1, *layout.tensor_map]) == -1):
                    features.add("replicated")
                if layout.is_nested:
                    features.add("nested")
                if layout.split_sizes and len(set(layout.split_sizes)) > 1:
                    features.add("uneven")
                if layout.split_sizes and layout.opt_size:
                    features.add("uneven, optimizer")
                if layout.opt_size:
                    features.add("optimizer, full" if layout.opt_size == -1 else "optimizer, partial")
                if side.stages > 1:
                    features.add("tied stages" if len(layout.stages) > 1 else "one stage of several")
        seen.update(features)

    look()
    assert min(map(len, sizes)) > 10
    expected = {f"{ndim} dimensions" for ndim in range(5)} | {
        "bfloat16", "int8", "bool", "complex64", "no common divisor", "empty", "replicated", "unlisted", "nested",
        "uneven", "uneven, optimizer", "optimizer, full", "optimizer, partial", "tied stages", "one stage of several",
    }  # fmt: skip
    rare = {feature: seen[feature] for feature in expected if seen[feature] < 10}
    assert not rare, seen

"""Dequantizing gives what the scheme says, element by element, of any box, and asks for no more than that box needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few, many
from support.quantized import BFLOAT16, SCALE_TYPES, Sample, awq, fp8, gpt_oss, gptq, int8, mxfp4, nvfp4, packed

from reshard_mpi.engine.dequantize import dequantized, stored_boxes
from reshard_mpi.errors import SourceError
from reshard_mpi.quantization.weights import Companion
from reshard_mpi.sharding.box import Box

FLOAT32 = np.dtype(np.float32)
SIZES, TYPES, FLAGS = st.integers(1, 40), st.sampled_from(SCALE_TYPES), st.booleans()
SEEDS = st.integers(0, 1 << 32).map(np.random.default_rng)


@st.composite
def fp8_samples(draw: st.DrawFn) -> Sample:
    shape = (*draw(st.lists(st.integers(1, 3), max_size=1)), draw(SIZES), draw(SIZES))
    block = draw(st.sampled_from([(0, 0), (1, 0), (1, 7), (7, 0), (4, 6), (128, 128)]))
    return fp8(draw(SEEDS), shape, block, draw(TYPES))


@st.composite
def mxfp8_samples(draw: st.DrawFn) -> Sample:
    return fp8(draw(SEEDS), (draw(SIZES), 32 * draw(st.integers(1, 3))), (1, 32), np.dtype(np.uint8))


@st.composite
def int8_samples(draw: st.DrawFn) -> Sample:
    block = draw(st.sampled_from([(0, 0), (1, 0), (1, 8)]))
    return int8(draw(SEEDS), (draw(SIZES), draw(SIZES)), block, draw(TYPES), draw(FLAGS))


@st.composite
def packed_samples(draw: st.DrawFn) -> Sample:
    group = draw(st.sampled_from([0, 5, 8, 16]))
    act_order = bool(group) and draw(FLAGS)
    shape, bits = (draw(SIZES), draw(st.integers(1, 90))), draw(st.integers(2, 8))
    return packed(draw(SEEDS), shape, bits, group, draw(TYPES), draw(FLAGS), act_order)


@st.composite
def gptq_samples(draw: st.DrawFn) -> Sample:
    group, symmetric = draw(st.sampled_from([0, 16, 32])), draw(FLAGS)
    shape = (32 * draw(st.integers(1, 2)), 32 * draw(st.integers(1, 4)))
    bits, form = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from(["gptq", "gptq_v2"]))
    return gptq(draw(SEEDS), shape, bits, group, draw(TYPES), symmetric, bool(group) and draw(FLAGS), form)


@st.composite
def awq_samples(draw: st.DrawFn) -> Sample:
    shape = (8 * draw(st.integers(1, 5)), 16 * draw(st.integers(1, 4)))
    return awq(draw(SEEDS), shape, draw(st.sampled_from([0, 8, 16])), draw(TYPES))


@st.composite
def gpt_oss_samples(draw: st.DrawFn) -> Sample:
    return gpt_oss(draw(SEEDS), (draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3)), draw(SIZES)))


@st.composite
def mxfp4_samples(draw: st.DrawFn) -> Sample:
    return mxfp4(draw(SEEDS), (draw(SIZES), 32 * draw(st.integers(1, 3))))


@st.composite
def nvfp4_samples(draw: st.DrawFn) -> Sample:
    return nvfp4(draw(SEEDS), (draw(SIZES), 16 * draw(st.integers(1, 5))), draw(FLAGS))


SAMPLES = [
    fp8_samples,
    mxfp8_samples,
    int8_samples,
    packed_samples,
    gptq_samples,
    awq_samples,
    gpt_oss_samples,
    mxfp4_samples,
    nvfp4_samples,
]


def assert_equal(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare bit by bit, but for what a NaN has beside being one."""
    assert got.dtype == np.float32 and got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[got == 0]))


@pytest.mark.parametrize("samples", few(4, SAMPLES))
@many(25)
@given(st.data())
def test_any_box_holds_what_the_scheme_says(
    samples: Callable[[], st.SearchStrategy[Sample]], data: st.DataObject
) -> None:
    sample = data.draw(samples())
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in sample.weight.shape]
    for box in (Box(tuple(low for low, _ in ends), tuple(high for _, high in ends)), Box.whole(sample.weight.shape)):
        got = dequantized(sample.weight, box, sample.kinds, sample.reader())
        assert_equal(got, sample.whole[tuple(map(slice, box.start, box.stop))])


def test_scales_and_zero_points_of_one_element() -> None:
    """They are told apart by their dimensions, however many there are; a zero point of this kind is not packed."""
    sample = packed(np.random.default_rng(4), (12, 40), 4, 0, FLOAT32)
    numbers = np.rint(sample.whole / sample.tensors["w.weight_scale"])  # from -8 to 7
    for ndim in (0, 1, 2):
        scale, zero = np.full((1,) * ndim, 0.5, np.float32), np.array([-3], np.int8)
        weight = sample.weight._replace(
            scheme=sample.weight.scheme._replace(block=(0, 0), symmetric=False),
            companions=(
                Companion("scale", "w.weight_scale", (None,) * ndim),
                Companion("zeros", "w.weight_zero_point", (None,)),
            ),
        )
        tensors = {"w.weight_packed": sample.tensors["w.weight_packed"], "w.weight_scale": scale}
        other = sample._replace(weight=weight, tensors={**tensors, "w.weight_zero_point": zero})
        got = dequantized(weight, Box((3, 5), (7, 33)), other.kinds, other.reader())
        assert_equal(got, (numbers[3:7, 5:33] + 3) * np.float32(0.5))


@pytest.mark.parametrize("symmetric", [True, False])
def test_both_forms_of_gptq_are_told_apart(symmetric: bool) -> None:
    """A symmetric weight's form is seen from its zero points, whatever the configuration calls it."""
    first, second = (
        gptq(np.random.default_rng(4), (32, 32), 4, 16, FLOAT32, symmetric, form=form) for form in ("gptq", "gptq_v2")
    )
    both = [(first, first.weight), (second, second.weight)]
    if symmetric:
        both += [(first, second.weight), (second, first.weight)]
    for sample, weight in both:
        got = dequantized(weight, Box.whole(weight.shape), sample.kinds, sample.reader())
        assert_equal(got, sample.whole)


def test_zero_points_that_contradict_a_symmetric_scheme_are_refused() -> None:
    sample = gptq(np.random.default_rng(4), (32, 32), 4, 16, FLOAT32, symmetric=False)
    weight = sample.weight._replace(scheme=sample.weight.scheme._replace(symmetric=True))
    with pytest.raises(SourceError, match=r"w\.weight") as refused:
        dequantized(weight, Box.whole(weight.shape), sample.kinds, sample.reader())
    assert refused.value.where == "w.qzeros" and refused.value.got == "0 to 15"


# How a sample is made: when its test runs, since the elements of the largest take as long as many modules to load.
NEEDED = [
    pytest.param(
        lambda draw: fp8(draw, (300, 520), (128, 128), FLOAT32),
        Box((100, 256), (130, 384)),
        {"w.weight": Box((100, 256), (130, 384)), "w.weight_scale": Box((0, 2), (2, 3))},
        id="two blocks of rows and one of columns",
    ),
    pytest.param(
        lambda draw: fp8(draw, (4, 6, 8), (1, 0), BFLOAT16),
        Box((1, 2, 0), (3, 3, 8)),
        {"w.weight": Box((1, 2, 0), (3, 3, 8)), "w.weight_scale": Box((1, 2, 0), (3, 3, 1))},
        id="a scale for each row",
    ),
    pytest.param(
        lambda draw: packed(draw, (40, 96), 3, 32, FLOAT32, zero=True),
        Box((21, 10), (22, 33)),  # bits 63 to 65 of the zero points, and 30 to 98 of each row
        {
            "w.weight_packed": Box((21, 0), (22, 4)),
            "w.weight_scale": Box((21, 0), (22, 2)),
            "w.weight_zero_point": Box((1, 0), (3, 2)),
        },
        id="3 bits straddle words",
    ),
    pytest.param(
        lambda draw: packed(draw, (8, 64), 4, 16, FLOAT32, act_order=True),
        Box((2, 8), (3, 16)),
        {
            "w.weight_packed": Box((2, 1), (3, 2)),
            "w.weight_scale": Box((2, 0), (3, 4)),
            "w.weight_g_idx": Box((8,), (16,)),
        },
        id="act-order: the scales of all groups",
    ),
    pytest.param(
        lambda draw: gptq(draw, (32, 64), 4, 32, FLOAT32),
        Box((7, 33), (9, 34)),
        {
            "w.qweight": Box((4, 7), (5, 9)),
            "w.qzeros": Box((1, 0), (2, 2)),
            "w.scales": Box((1, 7), (2, 9)),
            "w.g_idx": Box((33,), (34,)),
        },
        id="gptq",
    ),
    pytest.param(
        lambda draw: awq(draw, (32, 64), 16, FLOAT32),
        Box((7, 33), (9, 34)),
        {"w.qweight": Box((33, 0), (34, 2)), "w.qzeros": Box((2, 0), (3, 2)), "w.scales": Box((2, 7), (3, 9))},
        id="awq",
    ),
    pytest.param(
        lambda draw: gpt_oss(draw, (2, 64, 6)),
        Box((1, 31, 2), (2, 32, 5)),
        {"w_blocks": Box((1, 2, 0, 0), (2, 5, 1, 16)), "w_scales": Box((1, 2, 0), (2, 5, 1))},
        id="gpt-oss",
    ),
    pytest.param(
        lambda draw: nvfp4(draw, (4, 64), True),
        Box((1, 15), (2, 17)),
        {
            "w.weight_packed": Box((1, 7), (2, 9)),
            "w.weight_scale": Box((1, 0), (2, 2)),
            "w.weight_global_scale": Box((0,), (1,)),
        },
        id="nvfp4",
    ),
]


@pytest.mark.parametrize(("make", "box", "expected"), NEEDED)
def test_what_a_box_needs(make: Callable[[np.random.Generator], Sample], box: Box, expected: dict[str, Box]) -> None:
    sample = make(np.random.default_rng(7))
    assert stored_boxes(sample.weight, box, sample.kinds) == expected
    got = dequantized(sample.weight, box, sample.kinds, sample.reader())
    assert_equal(got, sample.whole[tuple(map(slice, box.start, box.stop))])


@pytest.mark.parametrize("number", [-1, 4])
@pytest.mark.parametrize("make", [packed, gptq])
def test_groups_that_are_not_there_are_refused(make: Callable[..., Sample], number: int) -> None:
    sample = make(np.random.default_rng(1), (32, 64), 4, 16, FLOAT32, act_order=True)
    (name,) = (each.name for each in sample.weight.companions if each.role == "group_index")
    sample.tensors[name][5] = number
    with pytest.raises(SourceError, match="groups that it does not have"):
        dequantized(sample.weight, Box.whole(sample.weight.shape), sample.kinds, sample.reader())

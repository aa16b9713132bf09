"""How far apart the numbers of two checkpoints are is what exact arithmetic says, whatever their types and layouts."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import torch_peer
from support.checkpoints import write_shard
from support.command_line import done, refused, run_apart, run_here
from support.conversions import TENSORS, Conversion
from support.examples import many
from support.launch import MPI, by_one_mpi
from test_diff import full, saved

import reshard_mpi
from reshard_mpi import UsageError
from reshard_mpi.engine import value_distance
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import NestError
from reshard_mpi.runs import diff
from reshard_mpi.runs.value_comparison import TensorComparison, ValueComparison

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHERS = ("int64", "uint64", "int8", "uint32", "bool", "complex64", "complex128")
ODD = [0.0, -0.0, 1.0, 5e-324, 1e-310, 1e-200, 1e200, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan, 3.0, -4.0]


class Expected(NamedTuple):
    """What the oracle says: exact numbers, rounded once."""

    differing: int
    outside: int
    largest: float
    relative: float
    norms: tuple[float, float]
    norm_of_difference: float
    cosine: float | None
    not_finite: tuple[int, int]


def parts(value: Any) -> tuple[Fraction, Fraction]:
    number = complex(value) if isinstance(value, complex) else value
    return (
        (Fraction(number.real), Fraction(number.imag))
        if isinstance(number, complex)
        else (Fraction(number), Fraction(0))
    )


def is_nan(value: Any) -> bool:
    return value != value


def is_finite(value: Any) -> bool:
    return isinstance(value, int) or (math.isfinite(value.real) and math.isfinite(value.imag))


def root(number: Fraction) -> Decimal:
    with localcontext(prec=60):
        return (Decimal(number.numerator) / Decimal(number.denominator)).sqrt()


def expected(first: np.ndarray, second: np.ndarray, atol: float, rtol: float) -> Expected:
    pairs = [*zip(first.reshape(-1).tolist(), second.reshape(-1).tolist())]
    if not (first.dtype.kind in "iub" and second.dtype.kind in "iub"):
        wide = [float, complex][first.dtype.kind == "c" or second.dtype.kind == "c"]
        pairs = [(wide(one), wide(other)) for one, other in pairs]
    pairs = [tuple(int(v) if isinstance(v, bool) else v for v in pair) for pair in pairs]
    finite = [(one, other) for one, other in pairs if is_finite(one) and is_finite(other)]
    odd = [pair for pair in pairs if pair not in finite and not (is_finite(pair[0]) and is_finite(pair[1]))]
    apart = [pair for pair in odd if not (pair[0] == pair[1] or (is_nan(pair[0]) and is_nan(pair[1])))]
    gaps, magnitudes, products = [], [], Fraction(0)
    for one, other in finite:
        (a, b), (c, d) = parts(one), parts(other)
        gaps.append((a - c) ** 2 + (b - d) ** 2)
        magnitudes.append((a * a + b * b, c * c + d * d))
        products += a * c + b * d
    differing = sum(gap > 0 for gap in gaps)
    with localcontext(prec=60):
        close = [
            float(root(gap)) <= atol + rtol * float(root(other)) if gap else True
            for gap, (_, other) in zip(gaps, magnitudes)
        ]
        relative = [root(gap / max(pair)) for gap, pair in zip(gaps, magnitudes) if gap]
        squares = [sum((pair[side] for pair in magnitudes), Fraction(0)) for side in (0, 1)]
        cosine = (
            float(Decimal(products.numerator) / Decimal(products.denominator) / (root(squares[0]) * root(squares[1])))
            if all(squares)
            else None
        )
    return Expected(
        differing + len(apart),
        close.count(False) + len(apart),
        math.inf if apart else float(max(map(root, gaps), default=0)),
        math.inf if apart else float(max(relative, default=0)),
        (float(root(squares[0])), float(root(squares[1]))),
        float(root(sum(gaps, Fraction(0)))),
        cosine,
        (sum(not is_finite(one) for one, _ in odd), sum(not is_finite(other) for _, other in odd)),
    )


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@st.composite
def arrays(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits, or odd numbers of many magnitudes."""
    dtype, size = dtype_of(name), math.prod(shape)
    if name == "bool":
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape)
    if dtype.kind in "iu" or draw(st.booleans()):
        content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        return np.frombuffer(content, dtype).reshape(shape).copy()
    numbers = draw(st.lists(st.sampled_from(ODD) | st.floats(-10, 10), min_size=size, max_size=size))
    with np.errstate(all="ignore"):
        return np.array(numbers).reshape(shape).astype(dtype)


def close(got: float, wanted: float) -> bool:
    return got == wanted or math.isclose(got, wanted, rel_tol=1e-12, abs_tol=1e-323)


def check(one: TensorComparison, wanted: Expected) -> None:
    got = one.distance
    assert got is not None
    assert (got.differing, got.outside, got.not_finite) == (wanted.differing, wanted.outside, wanted.not_finite)
    for mine, its in zip(
        (got.largest, got.relative, *got.norms, got.norm_of_difference),
        (wanted.largest, wanted.relative, *wanted.norms, wanted.norm_of_difference),
    ):
        assert close(mine, its), (got, wanted)
    assert (got.cosine is None) == (wanted.cosine is None)
    assert wanted.cosine is None or math.isclose(got.cosine or 0.0, wanted.cosine, abs_tol=1e-12)


def comparison(first: Path, second: Path, **options: Any) -> ValueComparison:
    found = reshard_mpi.diff(first, second, values=True, **options).comparison
    assert found is not None
    return found


@many(50)
@given(data=st.data())
def test_it_is_what_exact_arithmetic_says(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("values")
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=2)))
    kinds = st.sampled_from((*FLOATS, *OTHERS))
    kind = data.draw(kinds)
    first = data.draw(arrays(kind, shape))
    if data.draw(st.booleans()):
        second = data.draw(arrays(data.draw(kinds), shape))
    else:
        second = first.copy()
        for place in data.draw(st.lists(st.integers(0, max(0, first.size - 1)), max_size=2)) if first.size else ():
            second.reshape(-1)[place] = data.draw(arrays(kind, ()))[()]
    atol, rtol = data.draw(st.sampled_from([(0.0, 0.0), (1e-3, 0.0), (0.0, 0.5), (1.0, 1e-9), (1e300, 0.0)]))
    write_shard({"w": first}, folder / "a.ckpt")
    write_shard({"w": second}, folder / "b.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_distance, "_AT_ONCE", data.draw(st.sampled_from([1, 3, 1 << 15])))
        (one,) = comparison(folder / "a.ckpt", folder / "b.ckpt", atol=atol, rtol=rtol).tensors
    check(one, expected(first, second, atol, rtol))


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_what_passes_is_what_numpy_calls_close(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(7)
    first = random.standard_normal(5000).astype(kind)
    second = (first * (1 + random.standard_normal(5000) * 1e-2)).astype(kind)
    first[:4], second[:4] = [np.nan, np.inf, np.inf, 1], [np.nan, np.inf, -np.inf, np.nan]
    write_shard({"w": first}, tmp_path / "a.safetensors")
    write_shard({"w": second}, tmp_path / "b.safetensors")
    (one,) = comparison(tmp_path / "a.safetensors", tmp_path / "b.safetensors", atol=1e-3, rtol=5e-3).tensors
    within = np.isclose(first.astype(float), second.astype(float), rtol=5e-3, atol=1e-3, equal_nan=True)
    assert one.distance is not None and one.distance.outside == 5000 - int(within.sum())
    assert 0 < one.distance.outside < one.distance.differing


@pytest.mark.slow
def test_large_tensors_in_many_blocks(tmp_path: Path) -> None:
    """More than a buffer and a part of one, with sums of which a plain addition would lose most digits."""
    size = 700_001
    first = np.full(size, 1e-8)
    first[0] = 1e4
    second = first.copy()
    second[-1] = 2e-8
    write_shard({"w": first}, tmp_path / "a.safetensors")
    write_shard({"w": second}, tmp_path / "b.safetensors")
    (one,) = comparison(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    norms = [math.sqrt(math.fsum(array * array)) for array in (first, second)]
    product = math.fsum(first * second)
    check(one, Expected(1, 1, 1e-8, 0.5, (norms[0], norms[1]), 1e-8, product / norms[0] / norms[1], (0, 0)))
    assert one.distance is not None and one.distance.elements == size


@pytest.mark.parametrize("pair", [(2**63 - 1, 2**63), (-(2**63), 2**64 - 1), (-1, 2**64 - 1), (2**53, 2**53 + 1)])
def test_whole_numbers_of_64_bits_of_either_sign(tmp_path: Path, pair: tuple[int, int]) -> None:
    first, second = np.array([pair[0], 1], np.int64), np.array([pair[1], 1], np.uint64)
    for one, other in ((first, second), (second, first)):
        write_shard({"w": one}, tmp_path / "a.safetensors")
        write_shard({"w": other}, tmp_path / "b.safetensors")
        (found,) = comparison(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
        check(found, expected(one, other, 0, 0))


# What is compared with what


def two(folder: Path, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> tuple[Path, Path]:
    write_shard(first, folder / "a.safetensors")
    write_shard(second, folder / "b.h5")
    return folder / "a.safetensors", folder / "b.h5"


LAYERS = {f"model.layers.{layer}.w": np.full((4, 3), layer + 1, np.float32) for layer in range(3)}


def test_what_differs_most_comes_first(tmp_path: Path) -> None:
    changed = {name: array + np.float32(0.25) for name, array in LAYERS.items()}
    first = {**LAYERS, "step": np.array(3), "adam_m.w": np.ones(2), "a": np.ones(2), "shape": np.ones(3)}
    second = {**changed, "step": np.array(3), "adam_m.w": np.ones(2), "b": np.ones(2), "shape": np.ones(4)}
    found = comparison(*two(tmp_path, first, second))
    assert not found.passes
    assert [tensor.name for tensor in found.tensors if tensor.differs] == ["a", "shape", "b", *LAYERS]
    assert [tensor.name for tensor in found.tensors if tensor.distance is None] == ["a", "shape", "b"]
    kinds = {summary.kind.value: (summary.tensors, summary.differing_tensors) for summary in found.by_kind()}
    assert kinds == {"model": (6, 6), "moment": (1, 0), "step": (1, 0)}
    model = found.by_kind()[0].distance
    assert model is not None and (model.elements, model.differing, model.largest) == (36, 36, 0.25)
    assert math.isclose(model.norm_of_difference, 1.5) and math.isclose(model.norms[0], math.sqrt(12 * 14))


def test_types_are_no_difference_and_zeros_have_no_sign(tmp_path: Path) -> None:
    first = np.array([0.0, 1.5, np.nan], np.float32)
    narrow = np.array([-0.0, 1.5, np.nan]).astype(ml_dtypes.bfloat16)
    write_shard({"w": first}, tmp_path / "a.safetensors")
    write_shard({"w": narrow}, tmp_path / "b.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert comparison(a, b).passes
    assert "1 tensor" in done("diff", a, b, "--values", "--jobs", "1").out
    assert "another type" in refused_difference("diff", a, b, "--jobs", "1")


def refused_difference(*arguments: Any) -> str:
    said = run_here(*arguments)
    assert said.code == 4, said
    return said.err


@by_one_mpi
def test_layouts_and_processes_do_not_matter(c: Conversion, tmp_path: Path, mpi: MPI) -> None:
    other = full(tmp_path, w=TENSORS["w"] + np.float32(0.5))
    arguments = ["diff", c.src, other, "--src-strategy", c.src_strategy, "--values", "--json"]
    alone = run_apart(*arguments, "--jobs", "1")
    assert alone.code == 4
    facts = json.loads(alone.out)
    assert [tensor["name"] for tensor in facts["tensors"] if not tensor["passes"]] == ["w"]
    assert facts["tensors"][0]["largest"] == 0.5 and facts["tensors"][0]["share"] == 1.0
    for finished in (run_apart(*arguments, "--jobs", "2"), run_apart(*arguments, mpi=mpi, ranks=3)):
        assert finished.code == 4 and json.loads(finished.out)["by_kind"] == facts["by_kind"], finished
        assert sorted(map(str, json.loads(finished.out)["tensors"])) == sorted(map(str, facts["tensors"]))
        assert "asked for" not in finished.err


def test_what_is_printed(tmp_path: Path) -> None:
    names = {f"w\x1b[{number}": np.full(2, number, np.float32) for number in range(25)}
    a, b = two(tmp_path, names, {name: array + np.float32(1) for name, array in names.items()})
    said = run_here("diff", a, b, "--values", "--jobs", "1")
    assert said.code == 4 and "\x1b" not in said.out + said.err, said
    lines = said.out.splitlines()
    assert lines[0].split() == ["differing", "largest", "relative", "norm", "A", "norm", "B", "cosine", "tensor"]
    assert lines[1].split() == ["100", "%", "1", "1", "0", "1.4142", "-", "w\\x1b[0"]
    assert "5 more tensors differ (--top N lists N)" in lines
    assert "model: 25 of 25 tensors differ, in 100 % of their elements, by 1 at most, relative 1; cosine " in said.out
    assert lines[-1].startswith("compared 25 tensors, 200 B in ") and lines[-1].endswith(": 25 differ")
    said = run_here("diff", a, b, "--values", "--jobs", "1", "--top", "2", "--atol", "1")
    assert said.code == 0 and "23 more tensors differ" in said.out and " w\\x1b[0 (tolerated)" in said.out, said
    assert said.out.endswith(": 25 differ, 25 of them as far as is tolerated\n")
    top = json.loads(run_here("diff", a, b, "--values", "--jobs", "1", "--json", "--top", "3").out)
    assert [tensor["name"] for tensor in top["tensors"]] == [*names][:3]


def test_nothing_differs(tmp_path: Path) -> None:
    a, b = two(tmp_path, LAYERS, LAYERS)
    out = done("diff", a, b, "--values", "--jobs", "1").out
    assert out.startswith("model: 0 of 3 tensors differ\ncompared 3 tensors, ") and out.endswith(": the same numbers\n")


def test_values_beside_the_tensors_by_name_each_once(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    first = saved(tmp_path / "a.pt", optimizer={"param_groups": groups, "state": {0: {"step": 7}}}, epoch=3, x=math.nan)
    changed = [{**groups[0], "lr": 0.2, "betas": (0.9, 0.95)}]
    second = saved(
        tmp_path / "b.pt",
        optimizer={"param_groups": changed, "state": {0: {"step": 8}}},
        epoch=3,
        more="\x1b",
        x=math.nan,
    )
    said = done("diff", first, second, "--values", "--jobs", "1")
    for line in (
        "optimizer.param_groups.0.lr: 0.1 and 0.2",
        "optimizer.param_groups.0.betas.1: 0.99 and 0.95",
        "optimizer.state.0.step: 7 and 8",
        'more: not there and "\\u001b"',
    ):
        assert said.out.splitlines().count(line) == 1 and line not in said.err, said
    assert "note: values" not in said.err and said.out.count(" and ") == 4
    found = comparison(first, second, atol=1.5)
    assert [value.name for value in found.values] == ["more"]


def test_what_cannot_be_compared_does_not_pass(tmp_path: Path) -> None:
    odd = torch_peer.Tensor(torch_peer.STAND_INS["torch._utils"]._rebuild_meta_tensor_no_storage)
    first = saved(tmp_path / "a.pt", odd=odd)
    said = run_here("diff", first, first, "--values", "--jobs", "1")
    assert said.code == 4 and said.out.count("odd: a tensor without elements (meta)") == 1, said
    assert said.out.endswith(": the same numbers, but not all can be compared\n")


def refuse(*_: object) -> None:
    raise NestError("damaged")


def test_a_damaged_nest_is_compared_as_its_text(tmp_path: Path) -> None:
    first = saved(tmp_path / "a.pt", epoch=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "values_beside", refuse)
        assert comparison(first, first).values == ()
        (value,) = comparison(first, saved(tmp_path / "b.pt", epoch=4)).values
        assert "epoch" in str(value.first) and value.name == NEST


@pytest.mark.parametrize("given", [["--atol", "1"], ["--rtol", "0.5"], ["--top", "3"], ["--json"]])
def test_options_that_go_with_values(tmp_path: Path, given: list[str]) -> None:
    a, b = two(tmp_path, LAYERS, LAYERS)
    assert f"{given[0]} goes with --values" in refused("diff", a, b, *given, code=2)


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "x"])
def test_tolerances_that_are_none(tmp_path: Path, given: str) -> None:
    a, b = two(tmp_path, LAYERS, LAYERS)
    assert "expected 0 or more, such as 1e-3" in refused("diff", a, b, "--values", f"--atol={given}", code=2)
    with pytest.raises(UsageError, match="atol"):
        reshard_mpi.diff(a, b, values=True, atol=given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="go with values"):
        reshard_mpi.diff(a, b, atol=1)

"""One pass over a tensor's elements tells of their values what numpy tells of the whole array, element by element."""

from __future__ import annotations

import math
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard_mpi.formats.dtypes import BY_NAME, to_numpy
from reshard_mpi.soundness import content
from reshard_mpi.soundness.content import ContentPass, TensorContent

NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "complex64", "complex128"),
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int4", "hifloat8"),
)
SPECIAL = (0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-310, 1e-39, 6e-8, 1.0, -2.0, 3e38, 1e13, 4e4)
Array = np.ndarray[Any, Any]


def naive(name: str, array: Array) -> dict[str, Any]:
    """Return what the elements are like, each looked at by itself as a Python number."""
    flat = array.reshape(-1)
    values = [
        part for each in flat.tolist() for part in ((each.real, each.imag) if isinstance(each, complex) else (each,))
    ]
    numbers = [float(value) if name not in ("int64", "uint64") else value for value in values]
    finite = [value for value in numbers if math.isfinite(value)]
    info = None if name not in content._FORMS and "complex" not in name else _smallest_normal(name)
    tiny = [value for value in finite if info is not None and 0 < abs(value) < info]
    bound = content.bound_of(name)
    bad = [number for number, value in enumerate(numbers) if not math.isfinite(value) or abs(value) > bound]
    per_element = 2 if "complex" in name else 1
    rows = (
        [number for number, row in enumerate(array) if not np.any(row != 0)]
        if array.ndim > 1 and len(array) > 1
        else []
    )
    rows = rows if array.size else []
    return {
        "least": min(finite, default=None),
        "greatest": max(finite, default=None),
        "nan": sum(math.isnan(value) for value in numbers),
        "infinite": sum(math.isinf(value) for value in numbers),
        "zeros": sum(value == 0 for value in numbers),
        "subnormal": len(tiny),
        "parts": len(numbers),
        "digest": zlib.crc32(array.tobytes()),
        "first_bad": bad[0] // per_element if bad else None,
        "zero_rows": (len(rows), rows[0], rows[-1]) if rows else (0, 0, 0),
        "is_constant": len({value.tobytes() for value in flat}) < 2 and (per_element == 1 or _parts_alike(flat)),
    }


def _parts_alike(flat: Array) -> bool:
    return all(each.real.tobytes() == each.imag.tobytes() for each in flat)


def _smallest_normal(name: str) -> float:
    kinds = {"complex64": np.float32, "complex128": np.float64}
    return float(ml_dtypes.finfo(kinds.get(name) or to_numpy(BY_NAME[name])).smallest_normal)


def passed(name: str, array: Array, cut: int) -> TensorContent:
    done = ContentPass("w", BY_NAME[name], array.shape)
    raw = np.frombuffer(array.tobytes(), np.uint8)
    step = max(1, cut) * BY_NAME[name].itemsize_bytes
    for first in range(0, len(raw), step):
        done.add(raw[first : first + step])
    return done.result()


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, Array]:
    name = draw(st.sampled_from(NAMES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    size = math.prod(shape)
    kind = to_numpy(BY_NAME[name])
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    way = draw(st.sampled_from(["bits", "special", "zeros", "small", "constant"]))
    with np.errstate(all="ignore"):
        if way == "bits" and name != "bool":
            flat = np.frombuffer(random.bytes(size * kind.itemsize), kind)
        elif way == "special" and name in content._FORMS:
            flat = np.array([SPECIAL[each] for each in random.integers(0, len(SPECIAL), size)]).astype(kind)
        elif way == "zeros":
            flat = (random.integers(0, 4, size) == 0).astype(kind)
        elif way == "constant":
            flat = np.full(size, draw(st.sampled_from([0, 1]))).astype(kind)
        else:
            flat = (random.standard_normal(size) * (1 if name in content._FORMS or "complex" in name else 9)).astype(
                kind
            )
    return name, flat.reshape(shape)


@example(("float64", np.array([3e38, 6e-8, -1e-310, math.inf])), 4, 4)  # the first bad value is finite
@given(arrays(), st.integers(1, 9), st.integers(1, 7))
def test_a_pass_tells_what_numpy_tells(drawn: tuple[str, Array], cut: int, block: int) -> None:
    name, array = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "_BLOCK", block)
        found, expected = passed(name, array, cut), naive(name, array)
    assert {field: getattr(found, field) for field in expected} == expected
    with np.errstate(all="ignore"):
        wide = np.abs(array.astype(np.complex128 if "complex" in name else np.float64)).reshape(-1)
        wide = wide[np.isfinite(wide)]
        norm = math.sqrt(math.fsum(value * value for value in wide.tolist())) if "complex" not in name else found.norm
    assert found.norm == pytest.approx(norm, rel=1e-12, nan_ok=True)


def test_the_norm_of_complex_numbers_is_that_of_their_parts() -> None:
    array = np.array([3 + 4j, 0], np.complex64)
    assert passed("complex64", array, 1).norm == 5


def test_many_blocks_are_one_tensor() -> None:
    array = np.random.default_rng(0).standard_normal((300, 1000)).astype(ml_dtypes.bfloat16)
    array[17:19] = 0
    found = passed("bfloat16", array, 50_000)
    wide = array.astype(np.float64)
    assert (found.least, found.greatest, found.zero_rows) == (wide.min(), wide.max(), (2, 17, 18))
    assert found.norm == pytest.approx(float(np.linalg.norm(wide)), rel=1e-12)
    assert found.digest == zlib.crc32(array.tobytes())

"""Values of elements without numpy: those that numpy and ml_dtypes show."""

from __future__ import annotations

import numpy as np
import pytest
from support.examples import few

from reshard_mpi.formats.dtypes import BY_NAME, numbers, to_numpy


@pytest.mark.parametrize("name", few(4, BY_NAME))
def test_as_numpy_shows_them(name: str) -> None:
    dtype = BY_NAME[name]
    width = dtype.itemsize_bytes
    content = np.random.default_rng(0).integers(0, 256, 4096 * width, np.uint8)
    if width <= 2:  # every element there is
        content = np.arange(1 << 8 * width, dtype=f"u{width}").view(np.uint8)
    if name == "bool":
        content &= 1
    expected = content.view(to_numpy(dtype)).tolist()
    array = numbers(content.tobytes(), dtype)
    assert list(map(repr, array)) == list(map(repr, expected))

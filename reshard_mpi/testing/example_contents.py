"""Draw contents of shards with hypothesis (`contents`), and list odd and impossible ones (`IMPOSSIBLE`)."""

from __future__ import annotations

from typing import cast

from hypothesis import strategies as st

from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import TensorSpec
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

# Names and parts of names that formats have trouble with.
_TROUBLE = (
    "/",
    "//",
    ".",
    "..",
    "./",
    "%",
    "%2F",
    "-",
    " ",
    "\0",
    "\n",
    '"',
    "\\",
    "é",
    "层",
    "🜁",
    "__reshard_mpi__",
    "a",
)


# Made once: hypothesis takes longer to make a strategy than to draw from it, and to match a regular expression.
_DTYPES = st.sampled_from(sorted(BY_NAME.values(), key=lambda dtype: dtype.name))
_CHARACTERS = st.characters(exclude_categories=["Cs"])
_PARTS = st.one_of(
    st.sampled_from(("layers", "moments", "encoder", "attn", "dense_1", "weight", "w")), st.integers(0, 12).map(str)
)
_NAMES = st.one_of(
    st.lists(_PARTS, min_size=1, max_size=4).map(".".join),
    st.lists(st.sampled_from(_TROUBLE), min_size=1, max_size=5).map("".join),
    st.text(_CHARACTERS, min_size=1, max_size=20),
)
_STRINGS = st.text(_CHARACTERS, max_size=20).map(lambda text: text.rstrip("\0"))


def dtypes() -> st.SearchStrategy[DType]:
    """Any element type."""
    return _DTYPES


def shapes(*, max_dims: int = 4, max_side: int = 5, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes: scalars, and with `min_side` 0 shapes without elements too."""
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


def names() -> st.SearchStrategy[str]:
    """Names as frameworks make them, and odd ones: any Unicode text of up to some hundred bytes."""
    return _NAMES


def string_values() -> st.SearchStrategy[str]:
    """Strings that a shard can carry beside its tensors (NUL at the end is lost by some formats)."""
    return _STRINGS


def contents(*, max_tensors: int = 6) -> st.SearchStrategy[ShardContents]:
    """A shard's tensors, with random bits, and its strings."""
    tensors = st.lists(st.tuples(names(), dtypes(), shapes()), max_size=max_tensors, unique_by=lambda drawn: drawn[0])
    strings = st.dictionaries(names(), string_values(), max_size=2)
    return st.builds(_contents, tensors, strings, st.integers(0, 1000))


def _contents(tensors: list[tuple[str, DType, tuple[int, ...]]], strings: dict[str, str], seed: int) -> ShardContents:
    held = [SampleTensor.random(name, dtype, shape, seed=seed) for name, dtype, shape in tensors]
    names = {tensor.name for tensor in held}
    return ShardContents.of(held, {name: text for name, text in strings.items() if name not in names})


ODD_NAMES = (
    *("layer.0.weight", "0-layer", "-", "%2F", " ", "é", "层/权重", "line\nbreak", "nul\0inside", "nul at end\0"),
    *("a/b/c", "/leading", "trailing/", "double//slash", ".", "..", "./x", "x/./y"),
    *("__reshard_mpi__", "__reshard_mpi__/strategy", "n" * 2000, "/".join("d" * 400)),
)

# Every type once and every number of dimensions once: they do not depend on each other, and random shards mix them.
TYPES_AND_SHAPES = [
    *((dtype, (2, 3, 5)) for dtype in BY_NAME.values()),
    *((BY_NAME["float32"], shape) for shape in ((), (3,), (0,), (4, 0))),
]

# What nobody can hold, as far as the second way to write takes it: lengths, names, and payloads that are too short.
IMPOSSIBLE = {
    "33 dimensions": SampleTensor("w", BY_NAME["int8"], (1,) * 33, b"w"),
    "a broken length": SampleTensor("w", BY_NAME["int8"], cast("tuple[int, ...]", (2.0, 3)), b"123456"),
    "a length that is no number": SampleTensor("w", BY_NAME["int8"], (True, 6), b"123456"),
    "negative lengths": SampleTensor("w", BY_NAME["int8"], (-2, -3), b"123456"),
    "too many elements for the payload": SampleTensor("w", BY_NAME["int8"], (600,), b"123456"),
    "as many elements as two payloads": SampleTensor("w", BY_NAME["int8"], (12,), b"123456"),
    "too many elements to count": SampleTensor("w", BY_NAME["int8"], (1 << 62, 1 << 62), b"123456"),
    "no name": SampleTensor("", BY_NAME["int8"], (6,), b"123456"),
    "a name that is too long": SampleTensor("n" * 5000, BY_NAME["int8"], (6,), b"123456"),
}
# Slices of tensors; a shard that describes itself says where they lie.
SLICES = (
    TensorSpec("matrix", BY_NAME["float32"], (4, 6), Box((2, 3), (4, 6))),
    TensorSpec("vector", BY_NAME["int8"], (9,), Box((3,), (6,))),
    TensorSpec("nothing of it", BY_NAME["int8"], (9,), Box((6,), (6,))),
    TensorSpec("whole", BY_NAME["bfloat16"], (2, 2), Box.whole((2, 2))),
    TensorSpec("number", BY_NAME["float64"], (), Box.whole(())),
)


def some_contents() -> ShardContents:
    tensors = [
        SampleTensor.random("layer.weight", BY_NAME["bfloat16"], (6, 4)),
        SampleTensor.random("layer/bias", BY_NAME["float32"], (4,)),
        SampleTensor.random("step", BY_NAME["int64"], ()),
        SampleTensor.random("none", BY_NAME["float16"], (0, 3)),
        SampleTensor.random("mask", BY_NAME["bool"], (2, 3)),
        SampleTensor.random("phase", BY_NAME["complex64"], (2,)),
    ]
    return ShardContents.of(tensors, {"note": "text"})

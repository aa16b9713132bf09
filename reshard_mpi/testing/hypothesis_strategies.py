"""Draw contents of shards with hypothesis (`contents`)."""

from __future__ import annotations

from hypothesis import strategies as st

from reshard_mpi.formats.dtypes import BY_NAME, DType
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

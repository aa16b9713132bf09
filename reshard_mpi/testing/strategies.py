"""Hypothesis strategies for the contents of shards: types, shapes, names, tensors."""

from __future__ import annotations

from hypothesis import strategies as st

from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.testing.samples import Contents, SampleTensor

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


def dtypes() -> st.SearchStrategy[DType]:
    """Any element type."""
    return st.sampled_from(sorted(BY_NAME.values(), key=lambda dtype: dtype.name))


def shapes(*, max_dims: int = 4, max_side: int = 5, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes: scalars, and with `min_side` 0 shapes without elements too."""
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


def names() -> st.SearchStrategy[str]:
    """Names as frameworks make them, and odd ones: any Unicode text of up to some hundred bytes."""
    usual = st.from_regex(r"[a-z]{1,5}(\.[a-z0-9_]{1,6}){0,3}", fullmatch=True)
    odd = st.lists(st.sampled_from(_TROUBLE), min_size=1, max_size=5).map("".join)
    any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    return st.one_of(usual, odd, any_text)


def string_values() -> st.SearchStrategy[str]:
    """Strings that a shard can carry beside its tensors (NUL at the end is lost by some formats)."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: not text.endswith("\0"))


@st.composite
def contents(draw: st.DrawFn, *, max_tensors: int = 6) -> Contents:
    """A shard's tensors, with random bits, and its strings."""
    drawn = draw(st.lists(names(), max_size=max_tensors + 2, unique=True))
    seed = draw(st.integers(0, 1000))
    tensors = [SampleTensor.random(name, draw(dtypes()), draw(shapes()), seed=seed) for name in drawn[2:]]
    return Contents.of(tensors, {name: draw(string_values()) for name in drawn[:2]})

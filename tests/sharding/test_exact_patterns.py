"""Patterns that match exactly the names they were made of."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.sharding.spec_text import exact_patterns
from reshard_mpi.sharding.strategy import Pattern


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["w"], ["w"]),
        ([f"layers.{n}.w" for n in range(32)], ["layers.[0-9].w", "layers.[12][0-9].w", "layers.3[01].w"]),
        ([f"l.{n}" for n in (1, 2, 5, 6, 7)], ["l.[125-7]"]),
        ([f"l.{n}.e.{e}" for n in (0, 3) for e in (0, 1)], ["l.[03].e.[01]"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.[01]", "l.1.e.0"]),
        (["l.07", "l.7"], ["l.07", "l.7"]),
        (["a*", "a?1", "a[b]", "a!"], ["a!", "a[*]", "a[?]1", "a[[]b]"]),
        ([], []),
    ],
)
def test_patterns_of_names(names: list[str], patterns: list[str]) -> None:
    assert exact_patterns(names) == patterns


@pytest.mark.slow
def test_layers_and_experts_take_a_handful_of_patterns() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(3, 61) for expert in range(256)]
    assert len(exact_patterns(names)) == 15


def test_names_of_very_many_digits() -> None:
    names = ["7" * 4096, "8" * 4096, "8" * 4095 + "7"]
    assert sorted(exact_patterns(names)) == sorted(names)


NAMES = st.text("0123459ab.*[]?!-\n\u0663", min_size=1, max_size=6)


@given(st.sets(NAMES, max_size=12), st.sets(NAMES, max_size=12))
@many(150)
def test_every_name_matches_one_pattern_and_no_other_name_any(names: set[str], others: set[str]) -> None:
    patterns = exact_patterns(names)
    changed = {
        name[:at] + digit + name[at + 1 :] for name in names for at in range(len(name)) for digit in "0123456789"
    }
    for name in names | others | changed:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        assert len(matching) == (name in names), (name, matching)
        assert matching == [pattern for pattern in patterns if Pattern(pattern).matches(name)]

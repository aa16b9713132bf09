"""Patterns of names: what fnmatch says of them, and in no time whatever patterns and names are."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.planning.strategy_check import dead_rules
from reshard_mpi.runs.plan_command import shown_rules
from reshard_mpi.sharding.placement import replicated
from reshard_mpi.sharding.strategy import Pattern, Patterns, Strategy, find_or_follow, named_after

NAMES = st.text("ab.\n[", max_size=12)
GLOBS = st.one_of(
    st.text("ab.*", max_size=8),
    st.text("ab.*?[]!-\n", max_size=10),
    st.lists(st.sampled_from(["*", "a", "b", ".", "?", "[ab]", "[!a]", "ab", "[", "**"]), max_size=7).map("".join),
)


@given(NAMES, GLOBS)
def test_a_pattern_matches_what_fnmatch_says(name: str, glob: str) -> None:
    pattern = Pattern(glob)
    assert pattern.matches(name) == fnmatchcase(name, glob)
    for number in range(len(name) + 1):
        assert pattern.matches(name, number) == fnmatchcase(name[number:], glob)
    if not pattern.begins_with_any:
        assert [name[end:] for end in pattern.ends(name)] == [b for b in named_after(name) if fnmatchcase(b, glob)]


@given(NAMES, st.lists(GLOBS.filter(bool), max_size=5), st.lists(st.one_of(NAMES, GLOBS), max_size=3))
def test_the_first_counts_and_what_a_name_follows(name: str, globs: list[str], listed: list[str]) -> None:
    expected = next((number for number, glob in enumerate(globs) if fnmatchcase(name, glob)), None)
    assert Patterns(globs).first(name) == expected
    parameters = {parameter: (replicated(1),) for parameter in listed}
    strategy = Strategy(1, 1, parameters, tuple((glob, replicated(1)) for glob in globs))
    bases = [
        base
        for base in named_after(name)
        if base in parameters or next((glob for glob in globs if fnmatchcase(base, glob)), "*") != "*"
    ]
    if name not in parameters and (expected is None or globs[expected] == "*"):
        bases = []  # no word in it is one of an optimizer
    assert list(strategy.followed(name)) == bases


@pytest.mark.parametrize("part", ["a", "a.", "ab.", "layers.1."])
@pytest.mark.parametrize(
    "glob", ["*{0}*{0}*{0}*c{1}", "{0}*{0}*{0}*c{1}", "*{2}c{1}*", "{2}*c{1}", "{0}*?c{1}", "c{1}"]
)
def test_many_patterns_and_long_names(monkeypatch: pytest.MonkeyPatch, part: str, glob: str) -> None:
    """100 of one and 3,000 of the other took a minute: every end of a name was tried with each, again and again."""
    globs = [glob.format(part, number, part * 20) for number in range(30)]
    rules = (*((glob, replicated(1)) for glob in globs), ("*", replicated(1)))
    strategy = Strategy(1, 1, {}, rules, required_rules=frozenset(globs))
    names = [part * (600 // len(part)) + str(number) for number in range(100)]
    tried = looked = 0
    matches, ends = Pattern.matches, Pattern.ends

    def count_matches(self: Pattern, name: str, start: int = 0) -> bool:
        nonlocal tried
        tried += 1
        return matches(self, name, start)

    def count_ends(self: Pattern, name: str) -> Iterator[int]:
        nonlocal looked
        looked += 1
        ends_found = list(ends(self, name))
        assert not ends_found
        return iter(ends_found)

    monkeypatch.setattr(Pattern, "matches", count_matches)
    monkeypatch.setattr(Pattern, "ends", count_ends)
    for _ in range(3):
        for name in names:
            assert find_or_follow(strategy, name, lambda _: True) == (replicated(1),)
    assert not list(shown_rules(strategy, dict.fromkeys(names, (0, (1,)))))
    assert looked <= len(names) * len(globs) and tried <= len(names) * len(rules)
    assert len(dead_rules(strategy, names)) == len(globs)
    assert tried <= len(names) * len(rules)  # the names have been placed, and "*" comes after them all

"""Equations against numpy: what a map makes of tensors is what was drawn for the other side, and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from support.equations import Case, assert_same, cases, kinds, made_of

from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.mapping.selection import Selection

Array = np.ndarray[Any, np.dtype[Any]]


def rules_text(equation: str, axes: dict[str, int]) -> str:
    named = [f"{axis} = {length}" for axis, length in axes.items() if axis in equation]
    return "\n".join(["[axes]", *named, "[[map]]", f'eq = "{equation}"'])


@given(cases())
def test_a_map_makes_what_numpy_makes_and_back_again(case: Case) -> None:
    rules = parse_rules(rules_text(case.equation, case.axes), "map.toml")
    assert_same(made_of(applied(rules, Selection(), kinds(case.left), True), case.left), case.right)
    assert_same(made_of(applied(rules, Selection(), kinds(case.right), False), case.right), case.left)


@given(cases(pads=False))
def test_the_direction_is_told_by_the_names(case: Case) -> None:
    rules = parse_rules(rules_text(case.equation, case.axes), "map.toml")
    forward = applied(rules, Selection(), kinds(case.left)).direction
    backward = applied(rules, Selection(), kinds(case.right)).direction
    assert forward is not None and forward.is_forward
    assert backward is not None and not backward.is_forward

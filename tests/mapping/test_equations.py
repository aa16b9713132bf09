"""Equations against numpy: what a map makes of tensors is what was drawn for the other side, and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from support.equations import Case, cases

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.mapping.candidates import Kind
from reshard_mpi.mapping.choice import Choice
from reshard_mpi.mapping.made import Mapped
from reshard_mpi.mapping.mapped import applied
from reshard_mpi.mapping.parsing import parse_rules

Array = np.ndarray[Any, np.dtype[Any]]


def rules_text(equation: str, axes: dict[str, int]) -> str:
    named = [f"{axis} = {length}" for axis, length in axes.items() if axis in equation]
    return "\n".join(["[axes]", *named, "[[map]]", f'eq = "{equation}"'])


def kinds(tensors: dict[str, Array]) -> dict[str, Kind]:
    return {name: Kind(BY_NAME[str(array.dtype)], array.shape) for name, array in tensors.items()}


def made_of(mapped: Mapped, tensors: dict[str, Array]) -> dict[str, Array]:
    """Make every tensor element by element, and see that each element is made once."""
    made = {}
    for tensor in mapped.made:
        array = np.full(tensor.shape.shape, -1, dtype=np.int64)
        for box in tensor.shape.zeros:
            place = tuple(map(slice, box.start, box.stop))
            assert (array[place] == -1).all()
            array[place] = 0
        for pair in tensor.shape.pairs:
            part = tensors[tensor.sources[pair.source]][tuple(map(slice, pair.region.start, pair.region.stop))]
            if pair.order is not None:
                part = part.transpose(pair.order)
            place = tuple(map(slice, pair.to.start, pair.to.stop))
            assert (array[place] == -1).all()
            array[place] = part.reshape(pair.to.shape)
        assert (array != -1).all()
        made[tensor.name] = array
    return made


def assert_same(made: dict[str, Array], expected: dict[str, Array]) -> None:
    assert made.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(made[name], array), name


@given(cases())
def test_a_map_makes_what_numpy_makes_and_back_again(case: Case) -> None:
    rules = parse_rules(rules_text(case.equation, case.axes), "map.toml")
    assert_same(made_of(applied(rules, Choice(), kinds(case.left), True), case.left), case.right)
    assert_same(made_of(applied(rules, Choice(), kinds(case.right), False), case.right), case.left)


@given(cases(pads=False))
def test_the_direction_is_told_by_the_names(case: Case) -> None:
    rules = parse_rules(rules_text(case.equation, case.axes), "map.toml")
    forward = applied(rules, Choice(), kinds(case.left)).direction
    backward = applied(rules, Choice(), kinds(case.right)).direction
    assert forward is not None and forward.is_forward
    assert backward is not None and not backward.is_forward

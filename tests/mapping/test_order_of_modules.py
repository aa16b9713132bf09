"""Parameters of an optimizer that a map has renamed come in the order that the renamed model has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.mapping.optimizers import in_order_of_modules

# A module: its own parameters, and the modules in it, by their names in a model's order.
Module = tuple[list[str], dict[str, "Module"]]
_NAMES = st.sampled_from(["weight", "bias", "q", "k", "v", "h"])


def modules() -> st.SearchStrategy[Module]:
    inside = st.recursive(
        st.tuples(st.lists(_NAMES, min_size=1, max_size=3, unique=True), st.just({})),
        lambda within: st.tuples(
            st.lists(_NAMES, max_size=2, unique=True),
            st.one_of(
                st.dictionaries(st.sampled_from(["attn", "mlp", "norm", "10"]), within, max_size=3),
                st.lists(within, max_size=12).map(lambda each: {str(number): own for number, own in enumerate(each)}),
            ),
        ),
        max_leaves=12,
    )
    return st.tuples(st.lists(_NAMES, max_size=2, unique=True), st.dictionaries(_NAMES.map("m{}".format), inside))


def parameters(module: Module) -> list[str]:
    """Return names as torch's `named_parameters` does: a module's own ones, then each module's."""
    own, inside = module
    return [*own, *(f"{name}.{each}" for name, within in inside.items() for each in parameters(within))]


@given(modules(), st.data())
def test_exchanged_parameters(module: Module, data: st.DataObject) -> None:
    """Whatever names are exchanged for each other: the model is the same, and has them in its order."""
    names = parameters(module)
    made = data.draw(st.permutations(names))
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(names), max_size=len(names)))
    before, after = dict(zip(names, groups)), dict(zip(made, groups))
    ordered = in_order_of_modules(after, before)
    assert ordered == after and [*ordered.values()] == groups
    if not any(groups):
        assert [*ordered] == names


@pytest.mark.parametrize(
    ("before", "made", "ordered"),
    [
        ("x.0.w x.1.w x.2.w", "y.10.w y.9.w y.8.w", "y.8.w y.9.w y.10.w"),
        ("w0 b0 w1 b1", "ws.0 bs.0 ws.1 bs.1", "ws.0 ws.1 bs.0 bs.1"),
        ("a.w b.w", "n.w w", "w n.w"),
        ("a.w b.w", "b.w c.w", "b.w c.w"),
        ("b.w a.w c.w", "b.v a.v d.v", "b.v a.v d.v"),
        # No model's order: as they come.
        ("x.1.w x.0.w", "y.1.w y.0.w", "y.1.w y.0.w"),
        ("a.w b.w a.v", "c.w d.w c.v", "c.w d.w c.v"),
    ],
)
def test_renamed_parameters(before: str, made: str, ordered: str) -> None:
    old, new = (dict.fromkeys(names.split(), 0) for names in (before, made))
    assert [*in_order_of_modules(new, old)] == ordered.split()


def test_names_of_very_many_parts_stay_in_their_order() -> None:
    deep = ".".join("a" * 5000)
    assert [*in_order_of_modules({f"{deep}.1": 0, f"{deep}.0": 0}, {"x.0": 0, "x.1": 0})] == [f"{deep}.1", f"{deep}.0"]

"""Check that an equation is one-to-one, block by block (`check`).

The blocks of a side are its tensors in order, and the summands of each in order. Those of both sides are paired first
with first, and both of a pair must have the same axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.mapping.equations import Axis, Padded, Product, Term, axes_of, pads_of, sums_of


class EquationProblem(ValueError):
    """An equation is not one-to-one, or cannot be read as such."""


class Block(NamedTuple):
    """A block of a side: the number of its term, and which summand of it it is."""

    term: int
    summand: int


def blocks_of(side: Sequence[Term]) -> list[Block]:
    """Return the blocks of a side in order. Raises EquationProblem if a tensor cannot be divided into blocks."""
    for term in side:
        if sum(1 for _ in sums_of(term)) > 1:
            raise EquationProblem(f"{term.name.text} has more than one concatenation")
    return [Block(number, summand) for number, term in enumerate(side) for summand in range(term.blocks)]


def check(left: Sequence[Term], right: Sequence[Term], *, copies: bool = False) -> tuple[str, ...]:
    """Return the captures that all names of an equation share. Raises EquationProblem if it is not one-to-one.

    Args:
        copies: whether the only tensor of one side is each of those on the other.
    """
    for side in (left, right):
        names = [term.name.text for term in side]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EquationProblem(f"not one-to-one: {twice[0]} is twice on a side")
    if copies and len(right) == 1:
        left, right = right, left
    left_blocks, right_blocks = blocks_of(left), blocks_of(right)
    bare = [term.name.text for term in (*left, *right) if term.dims is None]
    if bare and len(bare) < len(left) + len(right):
        raise EquationProblem(f"{bare[0]} has no dimensions in brackets, and other tensors have")
    if copies:
        if any(term.dims != right[0].dims for term in right):
            raise EquationProblem(
                "copy = true is for tensors of one side that are the same, and their dimensions differ"
            )
        if len(left_blocks) != 1 or len(right) < 2:
            raise EquationProblem("copy = true is for one tensor, without '+', on one side, and several on the other")
        left_blocks = left_blocks * len(right_blocks)
    if len(left_blocks) != len(right_blocks):
        raise EquationProblem(
            f"the left side has {len(left_blocks)} blocks, and the right side {len(right_blocks)}: tensors, and the"
            " summands of each, are paired first with first"
        )
    shared: tuple[str, ...] | None = None
    for left_block, right_block in zip(left_blocks, right_blocks):
        one, other = left[left_block.term], right[right_block.term]
        common = _check_block(one, left_block.summand, other, right_block.summand)
        if shared is not None and set(common) != set(shared):
            raise EquationProblem(
                f"{one.name.text} and {other.name.text} share {_listed(common)}, and the blocks before them"
                f" {_listed(shared)}: captures that stay captures must be in all names"
            )
        shared = common if shared is None else shared
    facing = [term.name.text for term in (*left, *right) if len(term.name.captures) > len(shared or ())]
    if copies and facing:
        raise EquationProblem(f"copy = true is for whole tensors, and a capture of {facing[0]} faces a dimension")
    return shared or ()


def _check_block(left: Term, left_summand: int, right: Term, right_summand: int) -> tuple[str, ...]:
    """Return the captures that the names of two paired blocks share. Raises EquationProblem if their axes differ."""
    shared = tuple(capture.name for capture in left.name.captures if capture in right.name.captures)
    if any(any(pads_of(part)) for term in (left, right) for one_sum in sums_of(term) for part in one_sum.summands):
        raise EquationProblem(f"padding within a concatenation, in {left.name.text} or {right.name.text}")
    axes = []
    for term, summand in ((left, left_summand), (right, right_summand)):
        names = [name for dim in term.dims or () for name in _block_axes(dim, summand) if name != "1"]
        for capture in term.name.captures:
            if capture.name in shared:
                if capture.name in names:
                    raise EquationProblem(f"{capture.name!r} is in both names and a dimension of {term.name.text}")
            elif capture.is_text:
                raise EquationProblem(f"{{{capture.name}*}} of {term.name.text} is not in the name of its other side")
            else:
                names.append(capture.name)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EquationProblem(f"{twice[0]!r} is twice in {term.name.text}")
        axes.append(set(names))
    for number, (term, other) in enumerate(((left, right), (right, left))):
        alone = sorted(axes[number] - axes[1 - number])
        if alone:
            raise EquationProblem(
                f"not one-to-one: {_listed(alone)} of {term.name.text} is not on its other side, {other.name.text}"
            )
    return shared


def _block_axes(product: Product, summand: int) -> Iterator[str]:
    """Yield the axes of one block of a dimension."""
    for factor in product:
        if isinstance(factor, Axis):
            yield factor.name
        else:
            yield from _block_axes(factor.product if isinstance(factor, Padded) else factor.summands[summand], summand)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def stacked(name_of: Term, other: Term) -> tuple[str, ...]:
    """Return the captures of a tensor's name that are axes of another one's dimensions."""
    others = {axis for dim in other.dims or () for axis in axes_of(dim)}
    return tuple(capture.name for capture in name_of.name.captures if capture.name in others)

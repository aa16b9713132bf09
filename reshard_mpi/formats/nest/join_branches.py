"""Join the nests of several files as branches of one (`branch_of`, `join_branches`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import LESS, MAX_CHARACTERS, NestError, decoded, parsed, written


class Branch(NamedTuple):
    """The nest of one file as a branch.

    Example, of a file `{"optim": {"state": {...}}}` that becomes the branch `optimizer`:

        Branch("optimizer.", "optim.", {"dict": [["state", {"dict": [...]}]]}, ["optimizer.state.0.exp_avg"])
    """

    prefix: str  # what names of its tensors begin with
    own_prefix: str  # what they begin with in the file, and not as a branch; mostly empty
    root: Any  # the nest below the branch's name
    order: Sequence[str] | None  # names of its tensors in order; None: it is not known

    def name(self, own_name: str) -> str:
        """Return the name that a tensor of the file has as a part of the branch."""
        return self.prefix + own_name.removeprefix(self.own_prefix)


def branch_of(word: str, keys: Collection[str], names: Collection[str], strings: Mapping[str, str]) -> Branch:
    """Make a branch of what one file holds. Raises NestError if the text of its nest is none.

    Args:
        word: the name of the branch.
        keys: a dictionary with one of these as its only key says itself which branch it is.
        names: of the file's tensors, in its order.
    """
    texts = [[key, text] for key, text in strings.items() if key != NEST]
    if NEST not in strings:  # a dictionary of tensors, followed by texts
        root: Any = {"dict": [*([name] for name in names if texts), *texts]}
        return Branch(f"{word}.", "", root, [f"{word}.{name}" for name in names])
    try:
        content = parsed(strings[NEST])
    except (ValueError, RecursionError) as error:
        raise NestError("the text of the nest is no JSON", str(error)[:100]) from None
    match content.root:
        case {"dict": [[str() as key, {} as below]], **rest} if (
            key in keys and not rest and not texts and all(name.startswith(f"{key}.") for name in names)
        ):
            branch = Branch(f"{word}.", f"{key}.", below, None)
        case {"dict": list() as entries, **rest} if texts:
            branch = Branch(f"{word}.", "", {**rest, "dict": [*entries, *texts]}, None)
        case _:
            branch = Branch(f"{word}.", "", content.root, None)
    return branch if content.order is None else branch._replace(order=[*map(branch.name, decoded(content.order))])


class JoinedNest(NamedTuple):
    """The text of several branches. has_order: it has the order of their tensors."""

    text: str
    has_order: bool


def join_branches(branches: Sequence[Branch]) -> JoinedNest:
    """Return one text for branches of different names. Raises NestError if it is too long."""
    root = {"dict": [[branch.prefix[:-1], branch.root] for branch in branches]}
    orders = [branch.order for branch in branches if branch.order is not None]
    if len(orders) == len(branches):
        text = written(root, chain.from_iterable(orders))
        if len(text) <= MAX_CHARACTERS:
            return JoinedNest(text, has_order=True)
    text = written(root, None)
    if len(text) > MAX_CHARACTERS:
        raise NestError("what files hold besides tensors is too much", f"more than {MAX_CHARACTERS} characters", LESS)
    return JoinedNest(text, has_order=False)

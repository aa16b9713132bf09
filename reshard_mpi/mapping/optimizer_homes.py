"""Check that dictionaries of a target have the names that are in its optimizers (`require_homes`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.formats.nest.entries import dictionaries_in
from reshard_mpi.mapping.optimizers import Form, Optimizer
from reshard_mpi.text import shortened

# An optimizer of a target, and the source's that it has come of.
_Pair = tuple[Optimizer, Optimizer]


class NestedTensors(NamedTuple):
    """The tensors of a file by name, and what their names begin with in its dictionaries."""

    names: frozenset[str]
    paths: Collection[str]

    @classmethod
    def of(cls, names: Iterable[str], root: Any) -> NestedTensors:
        return cls(frozenset(names), [path for path, _ in dictionaries_in(root)])

    def homes_of(self, parameters: Collection[str]) -> list[str]:
        """Return what names begin with in the dictionaries that have all parameters of an optimizer, by its names.

        At the root these are whole names, and the tensors do not lie together in an inner dictionary.
        """
        one = next(iter(parameters), "")
        begins = (path for path in self.paths if f"{path}{one}" in self.names)
        homes = [begin for begin in begins if all(f"{begin}{name}" in self.names for name in parameters)]
        return [home for home in homes if home or home_of(parameters, self.paths) == ""]

    def has_whole(self, parameters: Collection[str]) -> bool:
        """Tell whether names in an optimizer are whole names of tensors, wherever these lie."""
        return self.names.issuperset(parameters)


def home_of(names: Collection[str], paths: Iterable[str]) -> str:
    """Return what names begin with in the innermost dictionary that has all of some tensors."""
    return max((path for path in paths if all(name.startswith(path) for name in names)), key=len, default="")


def require_homes(
    pairs: Iterable[_Pair],
    source: NestedTensors,
    target: NestedTensors,
    sources_of: Mapping[str, Collection[str]],
    where: str,
) -> None:
    """Raise MapError if names in a target's optimizers fit no dictionary, though they fit one in the source.

    Models of optimizers that share names become the same. An optimizer without its tensors keeps its names.

    Args:
        pairs: optimizers of the target, each with the source's that it has come of.
        sources_of: as of `check_optimizers.MadeTensors`.
    """
    used = frozenset[str]().union(*sources_of.values())
    groups: list[list[_Pair]] = []
    for own, of_source in pairs:
        tensors = [name for name in source.names if name.startswith(of_source.path)]
        if not own.parameters or (tensors and used.isdisjoint(tensors)):
            continue
        if of_source.form is Form.NUMBERS and target.has_whole(own.parameters):
            continue  # its names may be whole
        shared = [group for group in groups if any(own.parameters.keys() & each.parameters for each, _ in group)]
        groups = [group for group in groups if group not in shared]
        groups.append([*chain.from_iterable(shared), (own, of_source)])
    for group in groups:
        if any(_has_lost_its_model(pair, source, target, sources_of, is_shared=len(group) > 1) for pair in group):
            raise MapError(
                "names in an optimizer go by the dictionary of its model, and would be those of no dictionary",
                expected="a key for each model that nothing else in the file has, or the same equations for all models",
                got=shortened(sorted({name for own, _ in group for name in own.parameters})),
                where=where,
                remedy="give the model another key, or leave the optimizer out (--exclude)",
            )


def _has_lost_its_model(
    pair: _Pair,
    source: NestedTensors,
    target: NestedTensors,
    sources_of: Mapping[str, Collection[str]],
    *,
    is_shared: bool,
) -> bool:
    """Tell whether no dictionary of a target has the names in its optimizer, or only one that is made of others.

    Args:
        is_shared: whether other optimizers have such names. Any dictionary with them in the source may be the model
            then, so what becomes of all of them has to fit.
    """
    own, of_source = pair
    homes, before = target.homes_of(own.parameters), source.homes_of(of_source.parameters)
    # Behind a wrapper (`module.w` in a dictionary, `w` in the optimizer) names go by no dictionary, and are not whole.
    become_whole = target.has_whole(own.parameters) and not source.has_whole(of_source.parameters)
    if not homes and (before or become_whole or of_source.form is Form.NUMBERS):
        return True
    return is_shared and any(
        len(own.parameters) != len(of_source.parameters)
        or not any(_is_made_of(new, own.parameters, old, of_source.parameters, sources_of) for new in homes)
        for old in before
    )


def _is_made_of(
    home: str,
    names: Iterable[str],
    old_home: str,
    old_names: Iterable[str],
    sources_of: Mapping[str, Collection[str]],
) -> bool:
    """Tell whether each parameter in a dictionary of the target is made of the one in a dictionary of the source."""
    return all(f"{old_home}{old}" in sources_of.get(f"{home}{name}", ()) for name, old in zip(names, old_names))

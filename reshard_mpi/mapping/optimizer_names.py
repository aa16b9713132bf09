"""Tell what an optimizer's parameters become, by the names that it has for them (`made_in`).

These may lack the beginning that the names of the model's tensors have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from reshard_mpi.errors import MapError


class MadeParameter(NamedTuple):
    """A parameter that a map has made: its name, and the names of the parameters of the source that are in it."""

    name: str
    sources: frozenset[str]
    whole: str = ""  # its name with what the model's begin with, where `name` lacks it


def made_in(
    path: str,
    source_path: str,
    names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of an optimizer's, all by the names that optimizers have for them, and those left out.

    These are names of tensors; or names as their state has them (`optim.state.fc.weight.exp_avg`); or else the names of
    tensors without what all of the model's begin with (`model.fc.weight`).

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
        names: of the optimizer's parameters in the source.
        tensors: names of the source's tensors, be anything made of them or not.
        parameters: all that is made.

    Raises MapError if names fit several models that become different ones.
    """
    known = frozenset(names)
    if any(name not in tensors for name in known) and len(_begins(known, source_path, tensors)) == 1:
        return made_below(known, known, source_path, tensors, parameters, where)  # whatever else has such a name
    made = [parameter for parameter in parameters if not known.isdisjoint(parameter.sources)]
    left = known.difference(*(parameter.sources for parameter in made))
    by_state = _followed_by_state(path, source_path, left, parameters)
    left = left.difference(*(parameter.sources for parameter in by_state))
    below, gone = made_below(left, known, source_path, tensors, parameters, where)
    return [*made, *by_state, *below], gone.union(name for name in left if name in tensors)


def made_below(
    left: Collection[str],
    names: Collection[str],
    source_path: str,
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
) -> tuple[list[MadeParameter], frozenset[str]]:
    """Return the parameters made of others whose names lack the beginning that the model's tensors have, and the rest.

    Args:
        left: the parameters; names: these and others of the optimizer. The others as in `made_in`.
    """
    if not left:
        return [], frozenset()
    fitting = _begins(names, source_path, tensors) or _begins(left, source_path, tensors)
    made_of = (tuple(_below(begin, left, parameters)) for begin in fitting)
    made_by_model = {frozenset(made): made for made in made_of if made}  # each in the order of the parameters
    if len(made_by_model) > 1:
        raise MapError(
            "which model an optimizer belongs to cannot be told, and its parameters become different ones",
            expected="one model with these parameters",
            got=", ".join(sorted(fitting)),
            where=where,
            remedy="leave all but one of the models out (--exclude), or the optimizer's state",
        )
    made = [parameter for of_model in made_by_model.values() for parameter in of_model]
    return made, frozenset(left if fitting else ()).difference(*(parameter.sources for parameter in made))


def _begins(names: Collection[str], source_path: str, tensors: Collection[str]) -> list[str]:
    """Return what names of tensors outside of an optimizer have before all of its names."""
    one = next(iter(names))
    others = (name for name in tensors if not (source_path and name.startswith(source_path)))
    begins = {name.removesuffix(one) for name in others if name.endswith(f".{one}")}
    fitting = [begin for begin in begins if all(f"{begin}{name}" in tensors for name in names)]
    # `moment.model.` is state of `model.`.
    return [begin for begin in fitting if not any(begin != other and begin.endswith(other) for other in fitting)]


def _below(begin: str, names: Collection[str], parameters: Sequence[MadeParameter]) -> Iterator[MadeParameter]:
    """Yield the parameters made of a model's, all without the beginning of the model's names."""
    for parameter in parameters:
        of_it = frozenset(name.removeprefix(begin) for name in parameter.sources if name.startswith(begin))
        if not of_it.isdisjoint(names):
            yield MadeParameter(parameter.name.removeprefix(begin), of_it, parameter.name)


def _followed_by_state(
    path: str, source_path: str, names: Collection[str], parameters: Sequence[MadeParameter]
) -> list[MadeParameter]:
    """Return parameters that no tensor is named after, as those are called whose state is made of theirs.

    Args:
        path, source_path: what names of tensors in the optimizer begin with, in the target and in the source.
    """
    begin, source_begin = f"{path}state.", f"{source_path}state."
    names_of: dict[str, set[str]] = {}
    for tensor in parameters if names else ():
        if not tensor.name.startswith(begin):
            continue
        for source in tensor.sources:
            name, dot, key = source.removeprefix(source_begin).rpartition(".")
            while dot and name not in names:
                name, dot, last = name.rpartition(".")
                key = f"{last}.{key}"
            if dot and source.startswith(source_begin) and tensor.name.endswith(f".{key}"):
                names_of.setdefault(tensor.name[len(begin) : -len(key) - 1], set()).add(name)
    return [MadeParameter(name, frozenset(sources)) for name, sources in names_of.items()]


def by_both_names(
    path: str,
    own_names: Collection[str],
    source_path: str,
    source_names: Collection[str],
    tensors: Collection[str],
    parameters: Sequence[MadeParameter],
    where: str,
    *,
    are_whole: bool,
) -> dict[str, frozenset[str]]:
    """Return, for parameters as an optimizer of a nest calls them, their sources as the source's optimizer does.

    Args:
        path, source_path: what names of tensors in these optimizers begin with.
        tensors: names of the source's tensors.
        are_whole: whether `own_names` are names of tensors.
    """
    made, _ = made_in(path, source_path, source_names, tensors, parameters, where)
    sources = {(are_whole and each.whole) or each.name: each.sources for each in made}
    left = [name for name in own_names if name not in sources]
    ends = {whole: name for name in left[:1] for whole in sources if whole.endswith(f".{name}")}
    begins = [whole.removesuffix(name) for whole, name in ends.items()]
    of_all = [begin for begin in begins if all(f"{begin}{name}" in sources for name in own_names)]
    for name in left:
        fitting = {sources[f"{begin}{name}"] for begin in of_all}
        fitting = fitting or {own for whole, own in sources.items() if whole.endswith(f".{name}")}
        if len(fitting) > 1:
            raise MapError(
                "which parameter of the source an optimizer has cannot be told, since several end in its name",
                expected="names that begin as the model's tensors do, or one model with these parameters",
                got=f"{name}: {', '.join(sorted(min(own) for own in fitting))}",
                where=where,
                remedy="give --like a checkpoint whose optimizer has the names of the model's tensors, or leave the"
                " optimizer's state out (--exclude)",
            )
        if fitting:
            sources[name] = fitting.pop()
    return sources

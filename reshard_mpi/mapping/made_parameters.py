"""Tell what becomes of the parameters of an optimizer, by the names that it has for them (`made_in`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    if beginning_of(known, source_path, tensors) is not None:
        below, gone = made_below(known, known, source_path, tensors, parameters, where)  # whatever else has such a name
        return _called_as_state(below, _followed_by_state(path, source_path, known, parameters)), gone
    made = [parameter for parameter in parameters if not known.isdisjoint(parameter.sources)]
    left = known.difference(*(parameter.sources for parameter in made))
    by_state = _followed_by_state(path, source_path, left, parameters)
    left = left.difference(*(parameter.sources for parameter in by_state))
    whole = frozenset(name for name in left if name in tensors)  # these are left out
    below, gone = made_below(left - whole, known, source_path, tensors, parameters, where)
    return [*made, *by_state, *below], gone | whole


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


def beginning_of(names: Collection[str], source_path: str, tensors: Collection[str]) -> str | None:
    """Return what names of tensors have before all names of an optimizer; None if several fit, or these are whole."""
    begins = [] if all(name in tensors for name in names) else _begins(names, source_path, tensors)
    return begins[0] if len(begins) == 1 else None


def _begins(names: Collection[str], source_path: str, tensors: Collection[str]) -> list[str]:
    """Return what names of tensors outside of an optimizer have before all of its names."""
    one = next(iter(names))
    others = (name for name in tensors if not (source_path and name.startswith(source_path)))
    begins = {name.removesuffix(one) for name in others if name.endswith(f".{one}")}
    fitting = [begin for begin in begins if all(f"{begin}{name}" in tensors for name in names)]
    # `moment.model.` is state of `model.`.
    return [begin for begin in fitting if not any(begin != other and begin.endswith(other) for other in fitting)]


def _below(begin: str, names: Collection[str], parameters: Sequence[MadeParameter]) -> Iterator[MadeParameter]:
    """Yield the parameters made of a model's, without what its names begin with in the target."""
    of_model = [each for each in parameters if any(name.startswith(begin) for name in each.sources)]
    new_begin = begin_in_target(begin, ((each.name, each.sources) for each in of_model))
    for parameter in of_model:
        of_it = frozenset(name.removeprefix(begin) for name in parameter.sources if name.startswith(begin))
        if not of_it.isdisjoint(names):
            yield MadeParameter(parameter.name.removeprefix(new_begin), of_it, parameter.name)


def is_taken_off(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> bool:
    """Tell whether maps take off what names of a model begin with, as where `model.fc.w` becomes `fc.w`.

    A name that begins so afterwards is then the name of a part that is called so. If all names still begin so, they lie
    in the same dictionary of the file as before.

    Args:
        made: the names of what is made of the model's tensors, tied ones too, each with those of its sources.
    """
    sources_of = dict(made)
    if any(name in sources for name, sources in sources_of.items()):
        return False
    return any(not name.startswith(begin) for name in sources_of)


def begin_in_target(begin: str, made: Iterable[tuple[str, Collection[str]]]) -> str:
    """Return what names of a model begin with in the target: its dictionary is moved with all that is in it, or stays.

    Where maps take off what they begin with, and the names go on otherwise, it is nothing: they lie in no dictionary of
    their own.

    Args:
        begin, made: as of `is_taken_off`.
    """
    made = list(made)
    if not is_taken_off(begin, made):
        return begin
    pairs = [(name, source[len(begin) :]) for name, own in made for source in own if source.startswith(begin)]
    begins = {name.removesuffix(end) if f".{name}".endswith(f".{end}") else "" for name, end in pairs}
    return begins.pop() if len(begins) == 1 else ""


def _called_as_state(made: Sequence[MadeParameter], by_state: Sequence[MadeParameter]) -> list[MadeParameter]:
    """Return parameters by the names that equations give to their state, where these are unambiguous."""
    name_of = {parameter.sources: parameter.name for parameter in by_state}
    counts = Counter(parameter.sources for parameter in (*made, *by_state))
    are_paired = {sources for sources, count in counts.items() if sources in name_of and count == 2}
    return [each._replace(name=name_of[each.sources]) if each.sources in are_paired else each for each in made]


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
    made, gone = made_in(path, source_path, source_names, tensors, parameters, where)
    if are_whole:
        return {each.whole or each.name: each.sources for each in made}
    sources = {each.name: each.sources for each in made}
    left = [name for name in own_names if name not in sources and name not in gone]
    ends = {whole: name for name in left[:1] for whole in sources if whole.endswith(f".{name}")}
    begins = [whole.removesuffix(name) for whole, name in ends.items()]
    of_all = [begin for begin in begins if all(f"{begin}{name}" in sources for name in own_names)]
    own_sources = dict(sources)
    for name in own_names if len(of_all) == 1 else left:  # one may be the whole name of another
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
            own_sources[name] = fitting.pop()
    return own_sources

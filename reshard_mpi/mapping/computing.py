"""Which numbers of an optimizer a map computes, and of what: how many steps were taken, and settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard_mpi.mapping.candidates import Inventory, Kind, Likeness
from reshard_mpi.mapping.directions import Direction
from reshard_mpi.mapping.rules import Rules
from reshard_mpi.mapping.settings import Count, Number, packed, require_power, worth


class Counted(NamedTuple):
    """Tensors of the source that hold numbers of an optimizer, which are computed anew for the target.

    steps: those that hold how many steps were taken, all the same, by `rule`. numbers: those that hold settings.
    """

    rule: Count | None
    steps: tuple[str, ...]
    numbers: tuple[tuple[str, Number], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.steps, *(name for name, _ in self.numbers))


class Computed(NamedTuple):
    """A tensor of one element that is computed.

    steps: the tensor that holds how many steps were taken; None if it is not needed. number: what it is, with `steps`;
    None: the steps themselves.
    """

    name: str
    kind: Kind
    steps: str | None
    number: Number | None
    where: str


def counted(
    rules: Rules, left: Mapping[str, None], inventory: Inventory, direction: Direction, like: Likeness | None
) -> Counted:
    """Return the numbers among the tensors that no equation has taken; the target has none of them as they are."""
    wanted = like or {}
    for count in rules.counts:
        if direction.is_forward:
            values = ((name, count.each.match(name)) for name in left)
            steps = tuple(name for name, value in values if value is not None and value[0] in inventory)
            if steps and (like is None or count.total in like):
                return Counted(count, steps, ())
        elif count.total in left and count.total not in wanted:
            return Counted(count, (count.total,), tuple(_numbers(rules, left, wanted)))
    return Counted(None, (), () if direction.is_forward else tuple(_numbers(rules, left, wanted)))


def _numbers(rules: Rules, left: Mapping[str, None], wanted: Likeness) -> Iterator[tuple[str, Number]]:
    for number in rules.numbers:
        if number.name in left and number.name not in wanted:
            yield number.name, number


def computed(
    rules: Rules,
    known: Counted,
    made: Collection[str],
    settings: Mapping[str, Any],
    direction: Direction,
    like: Likeness | None,
) -> Iterator[Computed]:
    """Yield what is computed: of `known`, and of the settings of the optimizer on the left.

    made: the names of all tensors that are made otherwise.
    """
    steps = known.steps[0] if known.steps else None
    if not direction.is_forward:
        if known.rule is not None:
            count = known.rule
            for name in made:
                value = count.beside.match(name)
                if value is not None:
                    each = count.each.filled({count.each.captures[0].name: value[0]})
                    yield Computed(each, Kind(count.each_type, _shape(each, (), like)), steps, None, count.where)
        return
    if known.rule is not None:
        total, dtype = known.rule.total, known.rule.total_type
        yield Computed(total, Kind(dtype, _shape(total, (1,), like)), steps, None, known.rule.where)
    for number in rules.numbers:
        is_wanted = like is None or number.name in like
        if is_wanted and number.name not in made and worth(number, settings, None if steps is None else 1) is not None:
            kind = Kind(number.dtype, _shape(number.name, (), like))
            yield Computed(number.name, kind, steps if number.is_power else None, number, number.where)


def values_of(
    numbers: Iterable[Computed], known: Counted, settings: Mapping[str, Any], read: Callable[[str], float]
) -> Iterator[tuple[Computed, bytes]]:
    """Yield what is computed with the bytes of its element.

    read: returns the number that a tensor of the source holds. Raises MapError if a type cannot hold a number, or if
    one of `known` does not belong to the settings.
    """
    for name, number in known.numbers:
        if number.is_power and known.steps:
            require_power(number, settings, read(known.steps[0]), read(name), name)
    for wanted in numbers:
        steps = None if wanted.steps is None else read(wanted.steps)
        value = steps if wanted.number is None else worth(wanted.number, settings, steps)
        assert value is not None
        yield wanted, packed(value, wanted.kind.dtype, wanted.name, wanted.where, is_count=wanted.number is None)


def _shape(name: str, usual: tuple[int, ...], like: Likeness | None) -> tuple[int, ...]:
    """Return the shape of a tensor of one element: that of the target, if it is there with one element."""
    shape = usual if like is None else like.get(name, usual)
    return shape if all(length == 1 for length in shape) else usual

"""Define the placements of a checkpoint, by names of tensors or patterns of them (`Strategy`, `find_or_follow`).

Patterns mean what they mean to `fnmatch.fnmatchcase`. But a spec may have a thousand of them, and a checkpoint tens of
thousands of names from anybody, so no name may take long: a pattern is split into its parts once, and a name is
searched once for each part. The first that matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import translate
from functools import cached_property
from operator import itemgetter
from typing import Final

from reshard_mpi.errors import LayoutError, StrategyError
from reshard_mpi.groups import grouped
from reshard_mpi.sharding.placement import Placement, replicated
from reshard_mpi.sharding.state_names import is_named_as_state, is_numbered_state

_WILDCARDS = frozenset("*?[")
# How many names a strategy remembers the answers for.
_MAX_KNOWN = 1 << 16


class Strategy:
    """The placements of a whole checkpoint: what all its strategy files say together.

    Args:
        parameters: for each listed name the placements that hold it; more than one where stages that share a parameter
            cut it differently.
        rules: pairs (glob, placement) for names not listed one by one; the first match wins.
        required_rules: the globs of rules that must place at least one tensor of the checkpoint: those people wrote.
        axes: the names of the mesh axes, where one mesh with names serves all placements.
        alike: names of tensors whose copies are compared before one is taken, whatever a sample of others shows. None
            of these three changes which rank holds what.

    Raises LayoutError unless all stages have the same number of ranks.
    """

    def __init__(
        self,
        world_size: int,
        stages: int,
        parameters: Mapping[str, tuple[Placement, ...]],
        rules: tuple[tuple[str, Placement], ...] = (),
        origin: str = "",
        required_rules: frozenset[str] = frozenset(),
        axes: tuple[str, ...] = (),
        alike: frozenset[str] = frozenset(),
    ) -> None:
        self.world_size: Final = world_size
        self.stages: Final = stages
        self.parameters: Final = parameters
        self.rules: Final = rules
        self.origin: Final = origin
        self.required_rules: Final = required_rules
        self.axes: Final = axes
        self.alike: Final = alike
        # whether the first rule is for every name, as in a full checkpoint: then no pattern is looked at
        self._first_takes_all: Final = bool(rules) and rules[0][0] == "*"
        # the placements of every name, if there is but one rule for all: then nothing is looked up
        self.of_every_name: Final = (rules[0][1],) if self._first_takes_all and not parameters else ()
        # the rules' answers for names asked about before: planning asks about each many times
        self._matched: dict[str, int | None] = {}
        self._followed_by_name: dict[str, tuple[str, ...]] = {}
        self._placed_by_rule: dict[int, tuple[Placement, ...]] = {}
        checked = set()
        for name, placements in (*self.parameters.items(), *((glob, (rule,)) for glob, rule in self.rules)):
            for placement in placements:
                if placement in checked:
                    continue
                checked.add(placement)
                if placement.stage_size * self.stages != self.world_size:
                    raise LayoutError(
                        "the mesh does not fit the number of ranks",
                        expected=f"{self.world_size // self.stages} ranks a stage"
                        f" ({self.world_size} ranks, {self.stages} stages)",
                        got=f"mesh {placement.mesh} for parameter {name!r}",
                        where=self.origin,
                        remedy="give every parameter of one strategy the same device number",
                    )

    def __eq__(self, other: object) -> bool:
        """Tell whether both say the same, wherever it comes from."""
        names = ("world_size", "stages", "parameters", "rules")
        return isinstance(other, Strategy) and all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_spec(self) -> bool:
        """Whether people wrote it themselves, by rules over a mesh with names: no framework vouches for it."""
        return bool(self.axes)

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def of_rank(self, placements: Iterable[Placement], rank: int) -> Placement | None:
        """Return the one of a parameter's placements that a rank has; None if its stage does not hold the parameter."""
        stage = self.stage_of(rank)
        return next((placement for placement in placements if stage in placement.stages), None)

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def find(self, name: str) -> tuple[Placement, ...]:
        """Return the placements of parameter `name`; empty where the strategy does not list it.

        All calls for one name, and for all names that one rule places, return the same object.
        """
        listed = self.of_every_name or self.parameters.get(name)
        if listed is not None:
            return listed
        rule = self.rule_of(name)
        return () if rule is None else self._placed_by_rule.setdefault(rule, (self.rules[rule][1],))

    def rule_of(self, name: str) -> int | None:
        """Return the number of the first rule that matches `name`, listed or not; None if none does."""
        if not self.rules:
            return None
        if self._first_takes_all:
            return 0
        cached = self._matched
        if name not in cached:
            if len(cached) >= _MAX_KNOWN:
                cached.clear()
            cached[name] = self._patterns.first(name)
        return cached[name]

    def followed(self, name: str) -> tuple[str, ...]:
        """Return the names that `name` may be named after (see `named_after`) and that more than a rule `*` lists."""
        cached = self._followed_by_name
        if name not in cached:
            if len(cached) >= _MAX_KNOWN:
                cached.clear()
            cached[name] = tuple(self._followed(name))
        return cached[name]

    def _followed(self, name: str) -> Iterator[str]:
        if self.find(name) and not self.is_only_caught(name):
            yield from (base for base in named_after(name) if self.find(base) and not self.is_only_caught(base))
            return
        ends = set() if self._first_takes_all or not self.rules else set(self._patterns.ends(name))
        if self.parameters:
            ends.update(end for end in ends_of(name) if name[end:] in self.parameters)
        bases = [base for base in (name[end:] for end in sorted(ends)) if self._may_be_parameter(base, name)]
        # `decoder.w` may be whole, or cut in another way: only state goes like `w`.
        if any(is_named_as_state(name, base) for base in bases):
            yield from bases

    def _may_be_parameter(self, base: str, name: str) -> bool:
        """Tell whether the end of a name may be a parameter's, and is no number or count of an optimizer's state."""
        is_count = base.endswith((".step", ".state_step")) and base not in self.parameters
        return not (is_count or is_numbered_state(name, base))

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns([glob for glob, _ in self.rules])

    def listing(self, stages_of: Mapping[str, Collection[int]]) -> Strategy:
        """Return this strategy with the names that its rules place listed one by one, each in the stages that hold it.

        Args:
            stages_of: the stages that hold each name. Names that only a rule `*` places, and that may follow another
                parameter, are left to the rules.
        """
        listed = dict(self.parameters)
        placed: dict[
            tuple[Placement, tuple[int, ...]], tuple[Placement]
        ] = {}  # names placed alike have the same object
        for name, stages in stages_of.items():
            follows = self.is_only_caught(name) and bool(self.followed(name))
            if name in listed or follows:
                continue
            for placement in self.find(name):
                stages_here = tuple(stage for stage in placement.stages if stage in stages) or placement.stages
                listed[name] = placed.setdefault((placement, stages_here), (placement.with_stages(stages_here),))
        return self.listing_also(listed, self.alike)

    def listing_also(self, parameters: Mapping[str, tuple[Placement, ...]], alike: frozenset[str]) -> Strategy:
        """Return the same strategy with other names listed one by one.

        Args:
            alike: names of tensors whose copies are compared before one is taken.
        """
        ways = (self.rules, self.origin, self.required_rules, self.axes)
        return Strategy(self.world_size, self.stages, parameters, *ways, alike)

    def whole(self) -> Strategy:
        """Return the strategy of one rank that holds whole all that this one lists."""
        one = replicated(1)
        return Strategy(1, 1, dict.fromkeys(self.parameters, (one,)), tuple((glob, one) for glob, _ in self.rules))

    def is_only_caught(self, name: str) -> bool:
        """Tell whether only a rule for every name (`*`) lists parameter `name`."""
        if name in self.parameters:
            return False
        rule = self.rule_of(name)
        return rule is not None and self.rules[rule][0] == "*"


def unsharded(origin: str = "") -> Strategy:
    """Return the strategy of one full checkpoint: one rank that holds every tensor whole."""
    return Strategy(1, 1, {}, (("*", replicated(1)),), origin)


def named_after(name: str) -> Iterator[str]:
    """Yield the names that `name` may be named after (`adam.moment1.w` -> `moment1.w`, `w`), the longest first."""
    return (name[end:] for end in ends_of(name))


_SPECIAL = re.compile(r"[?\[]")
_ANY = re.compile(r"[*?]")


class Pattern:
    """One pattern. `text`: as it was written."""

    __slots__ = ("_begin", "_end", "_inner", "_needle", "_regex", "_stars", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._regex = re.compile(translate(text)) if _SPECIAL.search(text) else None
        self._stars = text.count("*")
        # Every name that matches has these at its beginning, at its end, and somewhere.
        parts = _literals(text)
        self._begin, self._end = parts[0], parts[-1] if len(parts) > 1 else ""
        self._inner = [part for part in parts[1:-1] if part]
        self._needle = max(self._inner, key=len, default="")

    @property
    def is_plain(self) -> bool:
        """Whether it has no wildcards: it matches its own text only."""
        return self._regex is None and not self._stars

    @property
    def around(self) -> tuple[str, str]:
        """What every name that it matches begins and ends with."""
        return self._begin, self._end

    @property
    def begins_with_any(self) -> bool:
        """Whether it begins with `*`: then it matches every name whose end it matches."""
        return self.text.startswith("*")

    def matches(self, name: str, start: int = 0) -> bool:
        """Tell whether it matches `name[start:]`."""
        if not name.startswith(self._begin, start) or not name.endswith(self._end) or self._needle not in name:
            return False
        if self._regex is not None:
            return self._regex.match(name, start) is not None
        position = start + len(self._begin)
        if not self._stars:
            return position == len(name)
        end = len(name) - len(self._end)
        if position > end:
            return False
        for part in self._inner:
            position = name.find(part, position, end)
            if position < 0:
                return False
            position += len(part)
        return True

    def ends(self, name: str) -> Iterator[int]:
        """Yield the positions after dots and slashes in `name` from which on it matches, ascending.

        Not for a pattern that begins with `*`.
        """
        last = len(name) - len(self.text) if self.is_plain else self._last(name)
        if self.is_plain:
            if last > 0 and name[last - 1] in "./" and name.endswith(self.text):
                yield last
            return
        start = name.find(self._begin, 1)
        while 0 < start <= last:
            if name[start - 1] in "./" and (self._regex is None or self._regex.match(name, start) is not None):
                yield start
            start = name.find(self._begin, start + 1)

    def _last(self, name: str) -> int:
        """Return a position that no end which it can match begins behind; -1 if it matches no end of `name`."""
        if not name.endswith(self._end):
            return -1
        position = len(name) - len(self._end)
        for part in reversed(self._inner):
            position = name.rfind(part, 0, position)
            if position < 0:
                return -1
        return position - len(self._begin)


def _literals(text: str) -> list[str]:
    """Return the texts between the wildcards of a pattern; one with brackets counts as one wildcard in their place."""
    opening, closing = text.find("["), text.rfind("]")
    if opening < 0:
        return _ANY.split(text)
    after = text[closing + 1 :] if closing > opening else ""
    return [*_ANY.split(text[:opening]), *(_ANY.split(after) if "[" not in after else [""])]


class Patterns:
    """Patterns in order; the first that matches a name counts."""

    def __init__(self, texts: Sequence[str]) -> None:
        patterns = [*enumerate(map(Pattern, texts))]
        wild = (entry for entry in patterns if not entry[1].is_plain)
        # A spec has many patterns that begin and end alike, so a name is held against these texts first.
        self._wild = grouped((pattern.around, (number, pattern)) for number, pattern in wild)
        # Of equal texts the first counts.
        self._plain = {pattern.text: number for number, pattern in reversed(patterns) if pattern.is_plain}
        # No pattern after this one is ever the first.
        self._catching = next((number for number, text in enumerate(texts) if text == "*"), len(patterns))

    def first(self, name: str) -> int | None:
        """Return the number of the first pattern that matches `name`; None if none does."""
        plain_number = self._plain.get(name)
        likely = [
            entry
            for (begin, end), entries in self._wild.items()
            if name.startswith(begin) and name.endswith(end)
            for entry in entries
        ]
        for number, pattern in sorted(likely, key=itemgetter(0)):
            if plain_number is not None and number > plain_number:
                break
            if pattern.matches(name):
                return number
        return plain_number

    def ends(self, name: str) -> Iterator[int]:
        """Yield the positions after dots and slashes from which on a pattern other than `*` matches `name`, ascending.

        The whole name must not be matched so: then no pattern that begins with `*` matches an end of it.
        """
        ends: set[int] = set()
        for (begin, end), entries in self._wild.items():
            if name.endswith(end) and begin in name:
                for number, pattern in entries:
                    if number < self._catching and not pattern.begins_with_any:
                        ends.update(pattern.ends(name))
        if self._plain:
            ends.update(end for end in ends_of(name) if self._plain.get(name[end:], self._catching) < self._catching)
        yield from sorted(ends)


def ends_of(name: str) -> Iterator[int]:
    """Yield the positions after the dots of `name`, and after the slashes of groups."""
    name = name.replace("/", ".")
    dot = name.find(".")
    while dot >= 0:
        yield dot + 1
        dot = name.find(".", dot + 1)


class Unlisted(StrEnum):
    """What becomes of parameters that the target strategy does not list."""

    FOLLOW = "follow"
    REPLICATE = "replicate"
    DROP = "drop"


def find_or_follow(strategy: Strategy, name: str, fits: Callable[[str], bool]) -> tuple[Placement, ...]:
    """Return the placements that `strategy` gives `name`, else those given to the listed name that it follows.

    Args:
        fits: tells whether the parameter has the same whole shape as the one of a given name; it only follows such. A
            rule for every name (`*`) places what is neither listed nor follows another. Empty if nothing places the
            parameter.
    """
    listed = strategy.of_every_name or strategy.parameters.get(name)
    if listed:  # the common case, so it comes first
        return listed
    placing = placing_name(strategy, name, fits)
    return () if placing is None else strategy.find(placing)


def placing_name(strategy: Strategy, name: str, fits: Callable[[str], bool]) -> str | None:
    """Return the name whose placements `find_or_follow` gives a parameter: its own, or one that it is named after."""
    listed = strategy.find(name)
    if listed and not strategy.is_only_caught(name):
        return name
    base = next(filter(fits, strategy.followed(name)), None)
    return base if base is not None or not listed else name


def is_dropped(target: Strategy, name: str, present: Container[str]) -> bool:
    """Tell whether a target leaves out a tensor if it gets nothing but what its strategy lists (`Unlisted.DROP`).

    A tensor that only a rule for every name (`*`) places counts as listed, unless it is the state of a parameter: named
    after one that is listed, or that is `present` in the checkpoint.
    """
    if not target.is_only_caught(name):
        return not target.find(name)
    bases = (base for base in named_after(name) if base in present)
    return bool(target.followed(name)) or any(is_named_as_state(name, base) for base in bases)


def may_be_held(target: Strategy, stage: int, name: str, unlisted: Unlisted, present: Container[str]) -> bool:
    """Tell whether a stage of the target may hold a tensor: False if it does not, whatever the tensor's shape.

    Args:
        present: the tensors that are known to be in the checkpoint. What nothing places may be held.
    """
    if unlisted is Unlisted.DROP and is_dropped(target, name, present):
        return False
    options = [target.find(name)]
    if unlisted is Unlisted.FOLLOW and (not options[0] or target.is_only_caught(name)):
        options += map(target.find, target.followed(name))
    return any(not placements or any(stage in each.stages for each in placements) for placements in options)


def listed_names(strategy: Strategy) -> Iterator[str]:
    """Yield names that a strategy lists one by one, and rules without wildcards."""
    yield from strategy.parameters
    yield from (glob for glob, _ in strategy.rules if not _WILDCARDS.intersection(glob))


def everywhere(strategy: Strategy) -> Placement:
    """Return the placement of a parameter that every rank of every stage holds whole."""
    return Placement((strategy.stage_size,), stages=tuple(range(strategy.stages)))


def require_common_parameters(source: Strategy, target: Strategy) -> None:
    """Raise StrategyError if neither strategy places any parameter that the other lists. Rules are not looked at."""
    if source.rules or target.rules:
        return
    if any(find_or_follow(source, name, lambda _: True) for name in target.parameters):
        return
    if any(find_or_follow(target, name, lambda _: True) for name in source.parameters):
        return
    raise StrategyError(
        "the two strategies have no parameter in common",
        expected=f"parameters of {source.origin or 'the source strategy'}, such as {_example(source)}",
        got=f"{len(target.parameters)} others, such as {_example(target)}",
        where=target.origin,
        remedy="check that both strategies belong to the same network",
    )


def _example(strategy: Strategy) -> str:
    return repr(next(iter(strategy.parameters), ""))

"""Define the placements of a whole checkpoint, by the names of its tensors (`Strategy`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Final

from reshard_mpi.errors import LayoutError
from reshard_mpi.sharding.patterns import Patterns, ends_of
from reshard_mpi.sharding.placement import Placement, replicated

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
        yield from (name[end:] for end in sorted(ends))

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

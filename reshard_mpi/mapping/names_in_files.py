"""Name a file's tensors for maps, and what these make in the target's file (`VisibleNames`, `NamedChain`).

Maps see names as they are, or below the dictionary of the model. Afterwards these go back to where they came from: a
model into its dictionary, what lies beside it beside it, and state into its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import MapError
from reshard_mpi.mapping.chain import chain_in_files, composed
from reshard_mpi.mapping.check_optimizers import owners_by_names
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.follow_parameters import begin_in_target
from reshard_mpi.mapping.numbered_optimizers import begins_of
from reshard_mpi.mapping.numbered_state import Training, named_tensors
from reshard_mpi.mapping.optimizers import Optimizer, optimizers_in_nest
from reshard_mpi.mapping.result import DerivedTensor, MapResult, names_taken
from reshard_mpi.mapping.selection import Selection
from reshard_mpi.mapping.tensor_kinds import parted_anywhere

# Applies maps. Takes a function that names tensors in the target's file, and whether the selection leaves tensors out.
Apply = Callable[[Callable[[str], str], bool], Sequence[MapResult]]


class VisibleNames(NamedTuple):
    """The names by which maps see a source's tensors, and whose state is known to be whose."""

    training: Training
    optimizers: Sequence[Optimizer]
    in_file: Mapping[str, str]  # of each tensor by the name that maps see
    prefix: str  # what maps do not see of the names of the model's tensors
    of_optimizers: tuple[str, ...]  # what names in optimizers begin with
    of_parameters: frozenset[str]  # state beside optimizers that has the whole names of its parameters

    @classmethod
    def of(
        cls,
        training: Training,
        nest: str | None,
        inventory: Inventory,
        where: str,
        *,
        is_stripped: bool,
        is_below: bool,
    ) -> VisibleNames:
        """Name the tensors of a file.

        Args:
            nest: the text that says how they are nested.
            where: the file, for errors.
            is_stripped: whether maps see the names of the model's tensors without what they all begin with.
            is_below: whether they see state with such names of its parameters, too.

        Raises MapError if two tensors get one name.
        """
        shapes = {name: kind.shape for name, kind in inventory.items()}
        in_file = named_tensors(training, shapes, where, is_stripped=is_stripped)
        optimizers = optimizers_in_nest(nest, training)
        of_optimizers = tuple(begin for optimizer in optimizers for begin in begins_of(optimizer.path))
        prefix = training.prefix if is_stripped else ""
        of_parameters = frozenset[str]()
        if is_below:
            whole = in_file
            in_file = {_named_below(name, prefix, shapes, of_optimizers): own for name, own in whole.items()}
            of_parameters = frozenset(in_file[name] for name in in_file.keys() - whole.keys())
        return cls(training, optimizers, in_file, prefix, of_optimizers, of_parameters)

    def chosen(self, choice: Selection, inventory: Inventory) -> Selection:
        """Return a selection that knows whose state is whose, and what lies beside the model, by names for maps."""
        owners = owners_by_names(self.optimizers, inventory).items()
        return choice._replace(
            owners={state.removeprefix(self.prefix): owner.removeprefix(self.prefix) for state, owner in owners},
            beside=frozenset(
                name for name, own in self.in_file.items() if own in choice.beside or own.startswith(self.of_optimizers)
            ),
        )

    def beside(self) -> dict[str, str]:
        """Return the tensors that lie beside the model, with their names in the file; numbered state has others."""
        return {
            name: own
            for name, own in self.in_file.items()
            if name == own or not (own.startswith(self.prefix) or self.is_numbered(name))
        }

    def is_numbered(self, name: str) -> bool:
        """Tell whether a tensor is of an optimizer that numbers its parameters, by the name that maps see."""
        return self.training.optimizer is not None and name.startswith(self.training.state)


class NamedChain(NamedTuple):
    """What maps make, by the names that they give and by those in the files."""

    by_maps: Sequence[MapResult]
    in_files: tuple[MapResult, ...]  # the first takes names of the source's file, the last gives names of the target's
    made: tuple[DerivedTensor, ...]  # what the last makes, as made of the source's tensors
    in_target: Sequence[Callable[[str], str]]  # what the tensors of each map are, or would be, called in the target
    begin: str  # what names of the model of a numbered optimizer begin with in the target


def _chain(
    names: VisibleNames, by_maps: Sequence[MapResult], in_target: Callable[[str], str], begin: str | None = None
) -> NamedChain:
    in_files = chain_in_files(by_maps, names.in_file, in_target)
    return NamedChain(
        by_maps,
        in_files,
        composed(in_files),
        [in_target] * len(in_files),
        names.training.prefix if begin is None else begin,
    )


def chain_like(names: VisibleNames, apply: Apply, named: Mapping[str, str]) -> NamedChain:
    """Return what maps make of a source for a target that is like another checkpoint. named: its tensors' names."""
    in_target = _by_table(named)
    return _chain(names, apply(in_target, True), in_target)


def _by_table(named: Mapping[str, str]) -> Callable[[str], str]:
    return lambda name: named.get(name, name)


def chain_whole(names: VisibleNames, apply: Apply, home: str | None = None) -> NamedChain:
    """Return what maps make of whole names. In the target state goes by the names of parameters.

    Args:
        home: what names of a numbered optimizer's model begin with in the target, if its dictionary is known.
    """
    training = names.training
    begin = training.prefix if home is None else home
    while True:
        in_target = _state_by_names(training, begin)
        chain = _chain(names, apply(in_target, True), in_target, begin)
        moved = _begin_in_target(training, chain.made) if home is None else home
        if moved == begin:
            return chain
        begin = moved


def chain_below(names: VisibleNames, apply: Apply, *, leaves_out: bool) -> NamedChain:
    """Return what maps make of names below the model. The target has the model where the source has it.

    What lies beside the model comes out by and by, since a map may put more there. First all is named, so that
    something is left out by its name in the target.

    Args:
        leaves_out: whether the selection leaves something out.
    """
    beside = names.beside()
    apart, selects = beside, not leaves_out
    while True:
        in_target = _below_prefix(names.training, apart)
        try:
            by_maps = apply(in_target, selects)
        except MapError:
            if selects:
                raise
            selects = True  # what is in the way may be left out
            continue
        chain = _chain(names, by_maps, in_target)
        strangers = _made_apart(names, by_maps, chain.made)
        if not strangers.keys() <= apart.keys():
            apart = strangers | apart
        elif not selects:
            selects = True
        else:
            between = (
                beside | _made_apart(names, by_maps[:number], composed(chain.in_files[:number]))
                for number in range(1, len(by_maps))
            )
            return chain._replace(in_target=[*(_below_prefix(names.training, apart) for apart in between), in_target])


def _named_below(name: str, prefix: str, shapes: Container[str], of_optimizers: tuple[str, ...]) -> str:
    """Return the name that maps see of state with its parameter's whole name (`moment1.model.w`); others as they are.

    States in optimizers have the names below.
    """
    is_whole = f".{prefix}" in name and not name.startswith(of_optimizers)
    parted = parted_anywhere(name, shapes) if is_whole else None
    if parted is None or not parted[0].startswith(prefix):
        return name
    return parted[1].around(parted[0].removeprefix(prefix))


def _begin_in_target(training: Training, made: Sequence[DerivedTensor]) -> str:
    """Return what names of the model of a numbered optimizer begin with in the target, if its dictionary is there."""
    begin, parameters = training.prefix, frozenset(training.parameters.values())
    pairs = ((tensor.name, names_taken(tensor)) for tensor in made)
    of_model = [(name, own) for name, own in pairs if begin and any(source.startswith(begin) for source in own)]
    has_parameters = any(not parameters.isdisjoint(own) for _, own in of_model)
    return begin_in_target(begin, of_model) if has_parameters else begin


def _state_by_names(training: Training, begin: str) -> Callable[[str], str]:
    """Return what tensors are called in the target's file, where state goes by the names of parameters.

    Args:
        begin: what names of the model begin with there; names in the optimizer go by its dictionary.
    """
    optimizer = training.optimizer
    if optimizer is None:
        return str

    def renamed(name: str) -> str:
        if not name.startswith(training.state):
            return name
        return f"{optimizer.path}state.{name.removeprefix(training.state).removeprefix(begin)}"

    return renamed


def _below_prefix(training: Training, apart: Mapping[str, str]) -> Callable[[str], str]:
    """Return what tensors are called in a target that has the model where the source has it.

    Args:
        apart: the names of tensors that are not in the model, and what these are called in the target.
    """
    below, in_optimizer = training.prefix, _state_by_names(training, "")
    return lambda name: apart.get(name) or (in_optimizer(name) if name.startswith(training.state) else f"{below}{name}")


def _made_apart(names: VisibleNames, chain: Sequence[MapResult], made: Sequence[DerivedTensor]) -> dict[str, str]:
    """Return the names of tensors that do not go into the model, and what these are called in the target.

    What lies beside the model stays there, whatever it is called: `ema.w`, `average.w`. State that a map names after
    parameters has their whole names: `moment1.model.w`, `moment1.critic.w`. So has what is made up as state. Numbers
    that are computed, and what is made up beside what lies beside the model, have no other names.

    Args:
        chain: the maps' results, by the names that they give.
        made: what the last of them makes, as made of the source's tensors.
    """
    training, of_optimizers = names.training, names.of_optimizers
    sources_by_name = {own.name: names_taken(tensor) for own, tensor in zip(chain[-1].made, made, strict=True)}
    numbers: set[str] = set()
    made_up: set[str] = set()
    for mapped in chain:
        pairs = [(tensor.name, names_taken(tensor)) for tensor in mapped.made] if numbers or made_up else []
        numbers = {name for name, own in pairs if own and numbers.issuperset(own)} | {n.name for n in mapped.computed}
        numbers |= {constant.name for constant in mapped.constants if constant.name in mapped.beside}
        made_up = {name for name, own in pairs if own and made_up.issuperset(own)} | {c.name for c in mapped.constants}
    states = {
        name for name, own in sources_by_name.items() if own and all(each.startswith(of_optimizers) for each in own)
    }
    parameters = sources_by_name.keys() - states - made_up - numbers
    model = training.prefix.rstrip(".")
    outside = {
        name
        for name, own in sources_by_name.items()
        if own and all(source.partition(".")[0] != model for source in own) and not names.is_numbered(name)
    }
    of_state = states | made_up | {name for name in outside if names.of_parameters.issuperset(sources_by_name[name])}
    named_as_state = {name for name in of_state if not name.startswith((training.state, *of_optimizers))}
    apart = {name: name for name in numbers | outside | (named_as_state & states)}
    for name in named_as_state:
        parted = parted_anywhere(name, parameters)
        if parted is not None:
            owner, affixes = parted
            apart[name] = affixes.around(owner if owner in outside else f"{training.prefix}{owner}")
    return apart

"""Hold an optimizer's state against its parameters (`StateOfParameters`): complete, of one step, the same weights.

Names tell whose state a tensor is, in any framework's form; state by numbers, as torch has it, is told by the groups in
the file. A parameter that no group names is frozen where there are groups; another one without any state is found only
if its kin have some, since torch keeps none of a parameter that has had no gradient yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from reshard_mpi.engine.elements import convert_elements, raw_dtype
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import fill
from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME, numbers
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import UNREADABLE, NestError
from reshard_mpi.formats.nest.rebuild_tree import leaves, values_beside
from reshard_mpi.formats.protocol import OnBytes
from reshard_mpi.groups import grouped
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.numbered_optimizers import WRAPPERS, state_of
from reshard_mpi.mapping.numbered_state import Training, training_in
from reshard_mpi.mapping.optimizers import optimizers_in_nest
from reshard_mpi.mapping.tensor_kinds import TensorKind, ends_of, kin_of, kind_of, parted_anywhere
from reshard_mpi.planning.rank_plan import Limits, TensorPlan, meeting
from reshard_mpi.runs.request_maps import tied_tensors
from reshard_mpi.sharding.state_names import STATE_KEY, parts_of
from reshard_mpi.soundness.audited_checkpoint import AuditedCheckpoint
from reshard_mpi.soundness.content import TensorContent
from reshard_mpi.soundness.findings import Finding, FindingKind
from reshard_mpi.text import shortened

# Words for what has the shape of its parameter; others may be factors of it, or of one element.
_AS_LARGE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "moments", "moment1", "moment2", "adam_m", "adam_v", "momentum"),
        *("momentum_buffer", "fp32_param", "main_param", "master_param", "square_avg"),
    )
)
_HALVES = frozenset(("float16", "bfloat16"))
_FLOAT32 = BY_NAME["float32"]
# Elements of a copy that are converted at once.
_BLOCK = 1 << 18


class StateOfParameters(NamedTuple):
    """Tensors that an optimizer keeps, by the parameter that they belong to.

    Example: `StateOfParameters({"model.w": {"optimizer.state.*.exp_avg": "optimizer.state.w.exp_avg"}}, {})`.
    """

    tensors: Mapping[str, Mapping[str, str]]  # by parameter: names of its state, by the text around the parameter's
    steps: Mapping[str, float]  # counts of steps that are values, by the name that they have in the nest
    frozen: Collection[str] = ()  # the parameters that are in no group of an optimizer, where groups tell that
    notes: tuple[str, ...] = ()  # for people: what could not be told
    counts: Mapping[str, Collection[str]] = {}  # counts of steps that are values: as `tensors`, the texts alone

    @classmethod
    def of(cls, opened: AuditedCheckpoint) -> StateOfParameters:
        """Find the state in a checkpoint."""
        shapes = opened.shapes
        kinds = {name: kind_of(name) for name in shapes}
        states = [name for name, kind in kinds.items() if kind.branch == "optimizer"]
        nest = opened.plan.strings.get(NEST)
        steps = _steps_in(nest, shapes)
        if not states:
            return cls({}, steps)
        training, notes = _training(opened, nest)
        parameters = [name for name, kind in kinds.items() if kind is TensorKind.MODEL]
        owner_of = _owners((*states, *steps), parameters)
        tensors: defaultdict[str, dict[str, str]] = defaultdict(dict)
        counts: defaultdict[str, set[str]] = defaultdict(set)
        for name in (*states, *steps):
            numbered = None if training.optimizer is None else state_of(training.optimizer, name)
            if numbered is not None:
                owner = training.parameters.get(numbered[0])
                around = f"{training.state}*.{numbered[1]}"
            else:
                owner, around = owner_of.get(name, (None, ""))
            if owner is not None and name in steps:
                counts[owner].add(around)
            elif owner is not None:
                tensors[owner][around] = name
        trained = _trained(nest, training, parameters)
        frozen = frozenset(parameters).difference(trained) if trained >= tensors.keys() else ()
        return cls(tensors, steps, frozen, notes, counts)

    def findings(self, opened: AuditedCheckpoint, contents: Mapping[str, TensorContent]) -> Iterator[Finding]:
        """Yield parameters that lack state, state of another shape, and steps that differ.

        Args:
            contents: of the tensors that could be read, by name.
        """
        shapes = opened.shapes
        for parameter, lacking in self._lacking(shapes):
            detail = f"has no {shortened(lacking)}, which others of its kind have"
            yield Finding(FindingKind.MOMENTS, parameter, *opened.place(parameter), detail)
        for parameter, own in self.tensors.items():
            for name in own.values():
                is_as_large = not _AS_LARGE.isdisjoint(parts_of(name)) and kind_of(name) is not TensorKind.STEP
                if is_as_large and shapes[name] != shapes[parameter]:
                    detail = (
                        f"shape {list(shapes[name])}, and its parameter {parameter!r} has {list(shapes[parameter])}"
                    )
                    yield Finding(FindingKind.MOMENTS, name, *opened.place(name), detail)
        yield from self._other_steps(opened, contents)

    def copies(self, opened: AuditedCheckpoint) -> list[tuple[str, str]]:
        """Return the weights in 16 bit that have a copy in float32, each with that."""
        return [
            (parameter, name)
            for parameter, own in self.tensors.items()
            for name in own.values()
            if kind_of(name) is TensorKind.COPY
            and {parameter, name} <= opened.numbers.keys()
            and opened.shapes[parameter] == opened.shapes[name]
            and opened.tensor(parameter).spec.dtype.name in _HALVES
            and opened.tensor(name).spec.dtype == _FLOAT32
        ]

    def _lacking(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, list[str]]]:
        """Yield parameters that lack state, each with the keys of the state that it lacks.

        A parameter with state is held against all parameters of its optimizer: it lacks a moment or a count of steps if
        most of them have it, and a float32 copy if parameters of its own kin have one too. It needs no state of another
        optimizer. A parameter whose moments are none of the usual ones, or which has no state at all, is held against
        its kin alone; without any state it may be frozen, or its kin may have had no gradient yet.
        """
        keys = {name: own.keys() | self.counts.get(name, ()) for name, own in self.tensors.items()}
        usual = Counter(key for own in keys.values() for key in own)
        most = {key for key, count in usual.items() if 2 * count > len(keys)}
        sizes = Counter(of for own in keys.values() for of in set(map(_optimizer_of, own)))
        most_of_one = {key for key, count in usual.items() if 2 * count > sizes[_optimizer_of(key)]}
        kin = grouped((kin_of(name), name) for name in shapes if kind_of(name) is TensorKind.MODEL)
        for members in kin.values():
            having = Counter(key for name in members for key in keys.get(name, ()))
            count = sum(name in keys for name in members)
            of_kin = {key for key in having if 2 * having[key] > count}
            for name in members:
                own = keys.get(name) or frozenset(self.counts.get(name, ()))
                moments = [key for key in own if _kind_of(key) is TensorKind.MOMENT]
                if not own:
                    lacking = of_kin if 2 * count > len(members) and name not in self.frozen else set()
                elif moments and most.isdisjoint(moments):
                    lacking = _of_optimizers(of_kin - own, {*map(_optimizer_of, moments)} - {None})
                else:
                    missing = _of_optimizers(most_of_one - own, {*map(_optimizer_of, own)})
                    lacking = {key for key in missing if having[key]} if count > 1 else set()
                    lacking = lacking or {key for key in missing if _kind_of(key) is not TensorKind.COPY}
                if lacking:
                    yield name, sorted(lacking)

    def as_constructed(self, contents: Mapping[str, TensorContent]) -> frozenset[str]:
        """Return the names of state that is still as torch's Adagrad makes it with itself: step 0, and one `sum`.

        It has no other state, and makes it for parameters that are frozen or never have a gradient as well.

        Args:
            contents: of the tensors that could be read, by name.
        """
        steps, names = self._steps(contents), set[str]()
        for name, content in contents.items():
            if name.endswith(".sum") and f".{STATE_KEY}." in f".{name}" and content.is_constant:
                step = f"{name.removesuffix('.sum')}.step"
                names |= {name, step} if steps.get(step) == 0 else set()
        return frozenset(names)

    def _steps(self, contents: Mapping[str, TensorContent]) -> dict[str, float]:
        """Return the steps of parameters by name."""
        steps = dict(self.steps)
        for own in self.tensors.values():
            for name in own.values():
                content = contents.get(name)
                if kind_of(name) is TensorKind.STEP and content is not None and content.size == 1:
                    steps[name] = float(content.least if content.least is not None else float("nan"))
        return steps

    def _other_steps(self, opened: AuditedCheckpoint, contents: Mapping[str, TensorContent]) -> Iterator[Finding]:
        """Yield the steps of parameters that are not the step of most that their optimizer has."""
        as_constructed = self.as_constructed(contents)
        by_optimizer: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for name, step in self._steps(contents).items():
            if name not in as_constructed:
                by_optimizer[_optimizer_of(name) or ""][name] = step
        for of_one in by_optimizer.values():
            ((usual, _),) = Counter(of_one.values()).most_common(1)
            for name, step in of_one.items():
                if step != usual:
                    detail = f"is {step:g}, and most of the others are {usual:g}"
                    yield Finding(FindingKind.STEP, name, *opened.place(name), detail)


def differing_copies(
    opened: AuditedCheckpoint, pairs: Sequence[tuple[str, str]], limits: Limits, on_bytes: OnBytes
) -> Iterator[Finding]:
    """Yield copies in float32 that, rounded, are not the weight.

    Args:
        pairs: names of weights, each with the name of its copy.
        on_bytes: called with the number of bytes of copies just read.

    Raises ShardError if a tensor cannot be read.
    """
    with Files() as files:
        for weight, copy in pairs:
            element = _first_difference(files, opened.tensor(weight), opened.tensor(copy), limits, on_bytes)
            if element is not None:
                index, values = element
                detail = f"rounded, it is not {weight!r}: {values} at {list(index)}"
                yield Finding(FindingKind.FP32, copy, *opened.place(copy, index), detail)


def _first_difference(
    files: Files, weight: TensorPlan, copy: TensorPlan, limits: Limits, on_bytes: OnBytes
) -> tuple[tuple[int, ...], str] | None:
    """Return the index of the first element that differs, and its values in words."""
    spec = weight.spec
    for block in spec.box.blocks(_BLOCK):
        read = []
        for tensor in (weight, copy):
            raw = np.empty(block.size, raw_dtype(tensor.spec.dtype))
            for part in meeting(tensor.reads, block):
                fill(files, part, block, memoryview(raw.view(np.uint8).data), limits)
            read.append(raw)
        stored, wide = read
        rounded = np.empty_like(stored)
        convert_elements(wide, _FLOAT32, rounded, spec.dtype)
        on_bytes(wide.nbytes)
        if not np.array_equal(stored, rounded):
            first = int(np.argmax(stored != rounded))
            index = tuple(low + int(place) for low, place in zip(block.start, np.unravel_index(first, block.shape)))
            (own,) = numbers(stored[first : first + 1].tobytes(), spec.dtype)
            (copied,) = numbers(wide[first : first + 1].tobytes(), _FLOAT32)
            return index, f"{copied:.9g} for {own:.9g}"
    return None


def _kind_of(key: str) -> TensorKind:
    return kind_of(key.replace("*", "w"))


def _optimizer_of(name: str) -> str | None:
    """Return the text of a name before `state`, by which optimizers are told apart; None of a name without that."""
    before, state, _ = f".{name}".partition(f".{STATE_KEY}.")
    return before if state else None


def _of_optimizers(keys: Iterable[str], optimizers: Container[str | None]) -> set[str]:
    return {key for key in keys if _optimizer_of(key) in optimizers}


def _owners(states: Collection[str], parameters: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return, for tensors of state, the parameter and the text around its name with a star for it.

    The model may be below a key: `model.w` beside `optimizer.state.w.exp_avg`. If all parameters are below one key, and
    all names are parameters there, they are these, though one may be the whole name of another. Where else a name fits
    several, none is it.
    """
    known = frozenset(parameters)
    ends = known | {end for name in parameters for end in ends_of(name) if not end.isdecimal()}
    by_end: dict[str, str | None] = {}
    for name in parameters:
        for end in ends_of(name):
            by_end[end] = None if end in by_end else name
    parted = {name: parts for name in states if (parts := parted_anywhere(name, ends)) is not None}
    bases = {base for base, _ in parted.values()}
    keys = {name.partition(".")[0] for name in parameters}
    key = next(iter(keys)) if len(keys) == 1 else None
    are_below = key is not None and all(f"{key}.{base}" in known for base in bases)
    found = {}
    for name, (base, affixes) in parted.items():
        owner = f"{key}.{base}" if are_below else base if base in known else by_end.get(base)
        if owner is not None:
            found[name] = owner, affixes.around("*")
    return found


def _training(opened: AuditedCheckpoint, nest: str | None) -> tuple[Training, tuple[str, ...]]:
    """Return whose state each number is; if that cannot be told, a training without any, and a note."""
    tensors = {name: group.kind for group in opened.plan.tensors.groups for name in group.names}
    path = opened.source.files.path
    tied = tied_tensors(opened.source, tensors)
    try:
        return training_in(nest, tensors, tied, path), ()
    except MapError as error:
        training = _training_of_other_shapes(nest, tensors, tied, path)
        if training is not None:
            return training, ()
        said = (
            f"whose state the optimizer's numbers are cannot be told, so it is not held against parameters: {error.got}"
        )
        return Training("", None, {}), (said,)


def _training_of_other_shapes(
    nest: str | None, tensors: Inventory, tied: Mapping[str, str], where: str
) -> Training | None:
    """Return whose state each number is where some state has another shape than its parameter; None if it is not told.

    If numbers go by the order of parameters alone, most of the state must have their shapes.
    """
    shapeless = {
        name: kind._replace(shape=()) if kind_of(name).branch == "optimizer" else kind for name, kind in tensors.items()
    }
    try:
        training = training_in(nest, shapeless, tied, where)
    except MapError:
        return None
    optimizer = training.optimizer
    states = {} if optimizer is None else {name: state_of(optimizer, name) for name in tensors}
    fit = [
        tensors[name].shape == tensors[training.parameters[state[0]]].shape
        for name, state in states.items()
        if state is not None and prod(tensors[name].shape) > 1
    ]
    return training if training.are_named or 2 * sum(fit) > len(fit) else None


def _trained(nest: str | None, training: Training, parameters: Collection[str]) -> set[str]:
    """Return those parameters that are in groups of optimizers, by names or numbers; none if these cannot be read.

    The model may be below a key, and a wrapper before all names in groups.
    """
    try:
        optimizers = optimizers_in_nest(nest, training)
    except UNREADABLE:
        return set()
    names = {name for optimizer in optimizers for name in optimizer.parameters}
    for name in [*names]:
        first, _, rest = name.partition(".")
        names |= {rest} if first in WRAPPERS and rest else set()
    return {name for name in parameters if not names.isdisjoint((name, *ends_of(name)))}


def _steps_in(nest: str | None, names: Collection[str]) -> dict[str, float]:
    """Return the steps of parameters that a nest has as values, such as `{"state": {"w": {"step": 3.0}}}`."""
    if nest is None:
        return {}
    try:
        values = values_beside(names, {NEST: nest})
    except NestError:
        return {}
    return {
        name: float(value)
        for name, value in leaves(values)
        if name.endswith(".step") and f".{STATE_KEY}." in f".{name}" and isinstance(value, int | float)
    }

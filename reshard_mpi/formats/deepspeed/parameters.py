"""Find the parameters that a DeepSpeed training optimizes, in the vectors of all ranks (`trained_parameters`).

A group of experts is cut over fewer ranks than others: with ranks 0 to 3 and two parts of the experts, ranks 0 and 2
share the first part, ranks 1 and 3 the second (deepspeed/utils/groups.py). Each part calls its experts by their places
in it, from 0 on.

The shapes of parameters are listed, but for a training in bfloat16 without ZeRO (`with_shapes`): its optimizer
(deepspeed/runtime/bf16_optimizer.py) cuts groups as ZeRO's first stage does, but the engine lists the shapes of
parameters only with ZeRO. Each rank says how many elements of which parameters it has; the model has shapes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.deepspeed.flat_groups import (
    SizeError,
    has_round_robin,
    in_partitions,
    in_slices,
    round_robin,
)
from reshard_mpi.formats.deepspeed.rank_files import ModelStates, OptimizerStates
from reshard_mpi.formats.deepspeed.ranks import RankStates
from reshard_mpi.formats.locations import ByteRanges
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.torch.file_content import FlatVector, HeldTensor, TensorPieces
from reshard_mpi.text import first_few

OF_EXPERT = re.compile(r"(?P<before>.*\bdeepspeed_experts\.)(?P<number>\d+)(?P<after>\..*)")
# In a pipeline, modules that several layers share: their weights lie in the files of these layers.
TIED = "tied_modules."


class TrainedParameter(NamedTuple):
    """A parameter with the optimizer's state of it.

    Attributes:
        weights: as the optimizer holds it.
        state: tensors of its shape, by kind; others: the single numbers and values of its group.
        group: the number of its flat group, among those of its stage.
    """

    shape: tuple[int, ...]
    weights: TensorPieces
    state: Mapping[str, TensorPieces]
    others: Mapping[str, Value]
    group: int


class TrainedParameters(NamedTuple):
    """All parameters that are optimized, by name, in the order of the groups; and the names of each stage's own."""

    by_name: dict[str, TrainedParameter]
    stages: list[list[str]]


def trained_parameters(states: RankStates, model_ranks: Iterable[int]) -> TrainedParameters:
    """Return all parameters that are optimized.

    Args:
        model_ranks: whose. They are the stages of a pipeline; a parameter that several have is listed with its copies.

    Raises ShardError if the vectors are not as long as the parameters' shapes say.
    """
    found = TrainedParameters({}, [])
    for model_rank in model_ranks:
        of_stage = [*_of_stage(states, model_rank)]
        found.stages.append([name for name, _ in of_stage])
        for name, parameter in of_stage:
            other = found.by_name.get(name)
            found.by_name[name] = parameter if other is None else _with_copy(name, other, parameter, states)
    return found


def _with_copy(name: str, first: TrainedParameter, other: TrainedParameter, states: RankStates) -> TrainedParameter:
    """Return a parameter with the copy of it that another stage of a pipeline has."""
    if first.shape != other.shape or first.state.keys() != other.state.keys():
        raise ShardError(
            f"two model-parallel ranks of a DeepSpeed checkpoint have parts of {name!r}, or different ones",
            expected=f"one parameter of shape {list(first.shape)}, which stages of a pipeline share",
            got=f"shape {list(other.shape)}, state {', '.join(other.state) or 'none'}",
            where=states.first.path,
        )
    return first._replace(
        weights=_copied(first.weights, other.weights),
        state={kind: _copied(tensor, other.state[kind]) for kind, tensor in first.state.items()},
    )


def _copied(first: TensorPieces, other: TensorPieces) -> TensorPieces:
    return first._replace(pieces=first.pieces + other.pieces)


def _of_stage(states: RankStates, model_rank: int) -> Iterator[tuple[str, TrainedParameter]]:
    """Yield the parameters of one model-parallel rank."""
    model = next(model for ranks, model in states.models.items() if ranks.model == model_rank)
    shares = states.shares(model_rank)
    shapes = model.shapes or []
    if shares and len(shares[0].groups) != len(shapes):
        raise ShardError(
            "the groups of a DeepSpeed optimizer are not those whose parameters are listed",
            expected=f"{len(shapes)} groups, as param_shapes of {model.path} has",
            got=f"{len(shares[0].groups)}",
            where=shares[0].path,
        )
    for number, of_group in enumerate(shapes):
        parts = len(shares) // shares[0].partitions[number]
        # Of a layer whose experts have many elements DeepSpeed makes several groups.
        experts = _experts_of(name for own in shapes for name in own) if parts > 1 else {}
        for part in range(parts):
            own = shares[part::parts]
            names = [_name_in(name, part, experts, model.path) if parts > 1 else name for name in of_group]
            found = [*zip(names, _of_group([*of_group.values()], number, own, model.path), strict=True)]
            yield from _in_order_of_model(found, own, model)


def _in_order_of_model(
    found: list[tuple[str, TrainedParameter]], shares: Sequence[OptimizerStates], model: ModelStates
) -> list[tuple[str, TrainedParameter]]:
    """Return the parameters of a group in the order of the training, which may not be the order in its vectors."""
    if shares[0].stage is None or not has_round_robin(model.values.get("ds_config"), shares[0].stage):
        return found
    places = round_robin(len(found), len(shares))
    return [parameter for _, parameter in sorted(zip(places, found), key=lambda placed: placed[0])]


def _experts_of(names: Iterable[str]) -> dict[str, int]:
    """Return how many experts each layer has in one part, by what their names begin with."""
    matches = filter(None, map(OF_EXPERT.fullmatch, names))
    numbers: dict[str, set[int]] = {}
    for match in matches:
        numbers.setdefault(match["before"], set()).add(int(match["number"]))
    return {before: len(own) for before, own in numbers.items()}


def _name_in(name: str, part: int, experts: Mapping[str, int], path: str) -> str:
    """Return the name of an expert's parameter over all ranks."""
    match = OF_EXPERT.fullmatch(name)
    if match is None:
        raise ShardError(
            "a group of a DeepSpeed optimizer is cut over fewer ranks than there are, and is not of experts",
            expected="names of experts (deepspeed_experts.0 ...)",
            got=name,
            where=path,
        )
    number = part * experts[match["before"]] + int(match["number"])
    return f"{match['before']}{number}{match['after']}"


def _of_group(
    shapes: Sequence[tuple[int, ...]], number: int, shares: Sequence[OptimizerStates], path: str
) -> Iterator[TrainedParameter]:
    """Yield the parameters of a group from the vectors of the ranks that share it."""
    groups = [share.groups[number] for share in shares]
    sizes = [math.prod(shape) for shape in shapes]
    vectors = {"": [group.weights for group in groups]}
    vectors |= {kind: [group.state[kind] for group in groups if kind in group.state] for kind in groups[0].state}
    _require_paddings(sum(sizes), number, shares, path)

    def held(vectors: Sequence[FlatVector]) -> Iterator[TensorPieces]:
        """Yield the tensors that lie in the vectors of some ranks."""
        lengths = [vector.elements for vector in vectors]
        gaps = shares[0].gaps[number] if shares[0].gaps else (0,) * len(sizes)
        try:
            runs = in_slices(sizes, lengths) if shares[0].is_sliced else in_partitions(sizes, gaps, lengths)
        except SizeError as error:
            raise ShardError(
                f"group {number} of a DeepSpeed optimizer does not have the parameters that are listed",
                expected=error.expected,
                got=error.got,
                where=f"{path} (param_shapes) and {vectors[0].path}",
                remedy="copy or restore all files of one save",
            ) from None
        for shape, own in zip(shapes, runs, strict=True):
            ranges = tuple(vectors[rank].range(start, length) for rank, start, length in own)
            yield HeldTensor(vectors[0].dtype, shape, ByteRanges(ranges)).as_one_piece

    by_kind = {kind: [*held(own)] for kind, own in vectors.items()}
    others = {**groups[0].values, **groups[0].of_all}
    for place, shape in enumerate(shapes):
        state = {kind: own[place] for kind, own in by_kind.items() if kind}
        yield TrainedParameter(shape, by_kind[""][place], state, others, number)


def _require_paddings(total: int, number: int, shares: Sequence[OptimizerStates], path: str) -> None:
    """Raise ShardError if the padding that ranks say they have is not what parameters leave of their partitions."""
    if any(share.paddings is None or len(share.paddings) <= number for share in shares) or shares[0].is_sliced:
        return
    total += sum(shares[0].gaps[number]) if shares[0].gaps else 0
    lengths = [share.groups[number].weights.elements for share in shares]
    paddings = [share.paddings[number] for share in shares if share.paddings is not None]
    without = len({length + padding for length, padding in zip(lengths, paddings)}) == 1 and sum(lengths) == total
    included = len(set(lengths)) == 1 and sum(lengths) - sum(paddings) == total
    if not (without or included):
        raise ShardError(
            f"the padding of group {number} of a DeepSpeed optimizer is not what its parameters leave",
            expected=f"{total} elements of parameters in partitions of one length",
            got=f"partitions of {first_few(lengths, 8)} elements, and paddings of {first_few(paddings, 8)}",
            where=f"{path} (param_shapes) and {shares[0].path}",
            remedy="copy or restore all files of one save",
        )


def with_shapes(states: RankStates, weights: Sequence[Mapping[str, Value]]) -> RankStates:
    """Return what ranks say, with the shapes of all parameters.

    Args:
        weights: the tensors of the model by name, as each tensor-parallel rank has them.

    Raises ShardError for a parameter that the model has not, or with another number of elements.
    """
    models = {
        ranks: model._replace(shapes=[*_shapes(states, ranks.model, weights[ranks.model % len(weights)])])
        for ranks, model in states.models.items()
    }
    return states._replace(models=models)


def _shapes(states: RankStates, model_rank: int, weights: Mapping[str, Value]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes of each group of a model-parallel rank, in the order in which they lie in its vectors."""
    shares = states.shares(model_rank)
    for number in range(len(shares[0].groups)):
        sizes = Counter[str]()
        for share in shares:
            if number < len(share.pieces):
                sizes.update(share.pieces[number])
        yield {name: _shape(name, size, weights, shares[0].path) for name, size in sizes.items()}


def _shape(name: str, size: int, weights: Mapping[str, Value], path: str) -> tuple[int, ...]:
    own = name.split(".", 2)[2] if name.startswith(TIED) else None
    named = (tensor for other, tensor in weights.items() if other == name or other.partition(".")[2] == own)
    shapes = {tensor.shape for tensor in named if type(tensor) is TensorPieces}
    if {math.prod(shape) for shape in shapes} != {size} or len(shapes) > 1:
        raise ShardError(
            f"the shape of the parameter {name!r} of a DeepSpeed checkpoint is not known",
            expected=f"a tensor of {size} elements in *_model_states.pt, as its optimizer has",
            got=", ".join(map(str, map(list, shapes))) or "none",
            where=path,
            remedy="copy or restore all files of one save",
        )
    return shapes.pop()

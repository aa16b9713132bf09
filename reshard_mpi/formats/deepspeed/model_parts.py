"""Tell what DeepSpeed loads from files of their own: layers of a pipeline, and experts (`parts_of`).

A pipeline's layers have numbers, with which the names of their tensors begin; each stage has some of them. Modules that
several layers share are called `tied_modules` in the optimizer; their weights lie in the files of all these layers.

Experts are divided over as many parts of the ranks as their layer's `ep_size` says, after which the groups of their
parameters are called. Each part calls its own by their places in it. (deepspeed/runtime/pipe/module.py, moe/layer.py,
moe/utils.py and `load_moe_state_dict` of runtime/engine.py in release 0.19)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.layout import LaidParameter
from reshard_mpi.formats.deepspeed.parameters import OF_EXPERT, TIED
from reshard_mpi.formats.deepspeed.training_tree import IS_PIPELINE, LAYERS, PIPELINE, STAGES
from reshard_mpi.formats.nest.nodes import Dict, NestTensor, entry_of
from reshard_mpi.formats.protocol import PackingOptions
from reshard_mpi.formats.torch.file_content import text_of
from reshard_mpi.text import counted, shortened

_LAYER = re.compile(r"(0|[1-9]\d{0,8})\..+")
_EP_SIZE = re.compile(r"ep_size_([1-9]\d{0,8})")
# DeepSpeed begins another group of experts where one would have more elements on a rank.
_MOST_IN_GROUP = 178956971
_OTHERWISE = "choose --to torch or --to dcp"

# The parameters of one group of the optimizer, for each part of the ranks that have them.
_Parts = Sequence[Sequence[LaidParameter]]


class ModelParts(NamedTuple):
    """How a model is divided over files and ranks.

    Attributes:
        groups: for each stage of a pipeline (there is one without), the groups of the optimizer.
        settings: of these groups.
        apart: for each file of a layer or an expert, what names of its tensors begin with.
        layers: the numbers of a pipeline's layers; experts: how many each layer with experts has.
        notes: in words, what people must know of it.
    """

    groups: Sequence[Sequence[_Parts]]
    settings: Sequence[Dict]
    apart: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def parts_of(
    root: Dict, groups: Sequence[Sequence[LaidParameter]], settings: Sequence[Dict], options: PackingOptions
) -> ModelParts:
    """Return how the model of a training is divided.

    Args:
        root: the nest of the training; groups, settings: of its optimizer.

    Raises TargetError if DeepSpeed could not load it so, or the source does not say what it takes.
    """
    counts, zero_stage = _experts(root), options.zero_stage
    if options.ep is not None and (not counts or options.dp % options.ep):
        raise TargetError(
            f"experts cannot be divided over {counted(options.ep, 'rank')}",
            expected="a model with experts, and --dp that is a multiple of --ep",
            got=f"{counted(len(counts), 'layer')} with experts, --dp {options.dp}",
            remedy="leave out --ep, or choose another number",
        )
    if root.get(IS_PIPELINE) is True:
        what, most = "pipeline", 1
    elif counts:
        what, most = "mixture of experts", 2
    else:
        return ModelParts([[[own] for own in groups]], settings)
    if zero_stage > most:
        raise TargetError(
            f"DeepSpeed does not train a {what} at stage {zero_stage} of ZeRO",
            expected=f"--zero-stage {' or '.join(map(str, range(1, most + 1)))}",
            got=str(zero_stage),
            remedy="choose that stage",
        )
    if what == "pipeline":
        if counts:
            raise _not_written("experts in a pipeline", "a pipeline, or experts", min(counts))
        return _of_pipeline(root, groups, settings)
    return _of_experts(root, counts, groups, settings, options)


def _not_written(what: str, expected: str, got: str, remedy: str = _OTHERWISE) -> TargetError:
    return TargetError(
        f"{what}: this is not written as a checkpoint of DeepSpeed", expected=expected, got=got, remedy=remedy
    )


def second_names(root: Dict) -> tuple[tuple[str, str], ...]:
    """Return the second names of tensors that a training has, each with the first one.

    Raises TargetError for the name in a layer of what a pipeline shares if it could be of several modules.
    """
    shared = root.get("shared_params")
    pairs = shared.pairs() if type(shared) is Dict else ()
    own = {name: other for name, other in pairs if type(name) is str and type(other) is str}
    return tuple({**(dict(_names_in_layers(root)) if root.get(IS_PIPELINE) is True else {}), **own}.items())


def _names_in_layers(root: Dict) -> Iterator[tuple[str, str]]:
    """Yield the names of shared tensors in the layers of a pipeline, each with the name in the optimizer."""
    trained = {name for own in _stages(root) for name in own}
    tied: dict[str, list[str]] = {}
    for name in sorted(trained):
        if name.startswith(TIED):
            tied.setdefault("".join(name.split(".", 2)[2:]), []).append(name)
    buffers = root.get("buffer_names") or ()
    for name, value in root.get("model").pairs() if tied else ():
        if type(value) is not NestTensor or name in trained or name in buffers or name.startswith(TIED):
            continue
        first, *others = tied.get(name.partition(".")[2], [""])
        if others:
            expected, got = "each of a name of its own in its module", f"{name!r}: {first!r} or {others[0]!r}"
            raise _not_written("tensors that layers of a pipeline share", expected, got)
        if first:
            yield name, first


def _stages(root: Dict) -> Sequence[Sequence[str]]:
    """Return the names of the parameters that each stage of a pipeline trains, in order; none where it is not said."""
    stages = entry_of(root.get(PIPELINE), STAGES)
    if type(stages) is not list or not all(type(own) is list for own in stages):
        return []
    return stages if all(type(name) is str for own in stages for name in own) else []


def _of_pipeline(root: Dict, groups: Sequence[Sequence[LaidParameter]], settings: Sequence[Dict]) -> ModelParts:
    stages = _stages(root)
    if not stages:
        raise _not_written(
            "a pipeline whose stages are not known",
            f"the parameters of each stage in {PIPELINE}.{STAGES} of the source",
            "none",
            "convert the pipeline's own checkpoint of DeepSpeed, or an up-to-date conversion of it to torch or DCP",
        )
    names = [str(key) for key, _ in root.get("model").pairs()]
    _require_known_places(root, names, stages, {parameter.name for own in groups for parameter in own})
    _require_ascending(stages)
    of_stages: list[list[_Parts]] = []
    for number, own in enumerate(stages):
        place = {name: at for at, name in enumerate(own)}
        of_stage = [
            sorted((each for each in group if each.name in place), key=lambda each: place[each.name])
            for group in groups
        ]
        if [] in of_stage:
            raise _not_written(
                "a pipeline with a stage that lacks a group of the optimizer",
                "parameters of every group on every stage",
                f"none of group {of_stage.index([])} on stage {number}",
            )
        of_stages.append([[group] for group in of_stage])
    kept = root.get(PIPELINE).get(LAYERS)
    without_tensors = [own for own in kept if type(own) is int and 0 <= own < 10**9] if type(kept) is list else []
    layers = tuple(sorted({*_layers_of(names), *without_tensors}))
    return ModelParts(of_stages, settings, tuple(f"{layer}." for layer in layers), layers)


def _layers_of(names: Iterable[str]) -> set[int]:
    """Return the numbers of the layers that have tensors of these names."""
    return {int(match[1]) for match in map(_LAYER.fullmatch, names) if match}


def _require_known_places(root: Dict, names: Sequence[str], stages: Sequence[Sequence[str]], trained: set[str]) -> None:
    """Raise TargetError unless all tensors of a pipeline are of layers, and its stages list all trained parameters.

    Args:
        names: of the tensors in the model.
        trained: the names of the parameters in the optimizer.
    """
    odd = next((name for name in names if not name.startswith(TIED) and not _LAYER.fullmatch(name)), None)
    if odd is not None:
        raise _not_written(
            "a pipeline with tensors of no layer",
            "names that begin with the number of their layer, such as 3.norm.weight",
            repr(odd),
            "convert to DeepSpeed without the map that renames them, or choose --to torch",
        )
    listed = {name for own in stages for name in own}
    unlike = sorted(listed ^ trained)
    if unlike:
        raise _not_written(
            "a pipeline whose stages have other parameters than its optimizer",
            f"each parameter that is trained in {PIPELINE}.{STAGES}, and no other one",
            shortened(unlike),
            "convert to DeepSpeed without a map or selection first, or choose --to torch",
        )
    in_layers = {first for _, first in _names_in_layers(root)}
    loose = next((name for name in sorted(listed) if name.startswith(TIED) and name not in in_layers), None)
    if loose is not None:
        raise _not_written(
            "a pipeline that shares a tensor which none of its layers has",
            f"it in each layer that has its module, as N.{''.join(loose.split('.', 2)[2:])}",
            repr(loose),
            "convert to DeepSpeed without the map that renames tensors of layers, or choose --to torch",
        )


def _require_ascending(stages: Sequence[Sequence[str]]) -> None:
    """Raise TargetError unless each stage of a pipeline has the layers behind the ones of the stage before it."""
    before = -1
    for stage, own in enumerate(stages):
        layers = sorted(_layers_of(own))
        if layers and layers[0] <= before:
            raise _not_written(
                "a pipeline whose stages have other layers than DeepSpeed gives them",
                f"layers from {before + 1} on in stage {stage}: each stage has the layers behind those before",
                f"layer {layers[0]}",
                "convert to DeepSpeed without the map that moves layers over stages, or choose --to torch",
            )
        before = layers[-1] if layers else before


def _experts(root: Dict) -> dict[str, int]:
    """Return how many experts each layer has, by the beginning of its tensors' names, in the model's order.

    Raises TargetError unless they are numbered from 0 on.
    """
    numbers: dict[str, set[str]] = {}
    for match in filter(None, (OF_EXPERT.fullmatch(str(key)) for key, _ in root.get("model").pairs())):
        numbers.setdefault(match["before"], set()).add(match["number"])
    for before, own in numbers.items():
        lacking = [number for number in map(str, range(len(own))) if number not in own]
        if lacking:
            got = f"none called {before}{lacking[0]}"
            raise _lost_experts(f"{len(own)} experts from 0 on in each layer that has some", got)
    counts = {before: len(own) for before, own in numbers.items()}
    told = root.get("num_experts")
    if type(told) is list and counts and told != [*counts.values()]:
        raise _lost_experts(f"{told} in its layers, as num_experts of the source says", str([*counts.values()]))
    return counts


def _lost_experts(expected: str, got: str) -> TargetError:
    remedy = "convert to DeepSpeed without a selection, or choose --to torch"
    return _not_written("a model that lacks experts", expected, got, remedy)


def _of_experts(
    root: Dict,
    counts: Mapping[str, int],
    groups: Sequence[Sequence[LaidParameter]],
    settings: Sequence[Dict],
    options: PackingOptions,
) -> ModelParts:
    trained = {parameter.name for own in groups for parameter in own}
    order = {str(key): place for place, (key, own) in enumerate(root.get("model").pairs()) if type(own) is NestTensor}
    odd = next((name for name in order if OF_EXPERT.fullmatch(name) and name not in trained), None)
    if odd is not None:
        raise _not_written("tensors of experts that are not trained", "experts with parameters alone", repr(odd))
    sizes = [_ep_size(own, of_group, counts, number) for number, (own, of_group) in enumerate(zip(groups, settings))]
    parts_of_groups = [size and (options.ep or math.gcd(size, options.dp)) for size in sizes]
    made = [
        of_group.with_value("name", f"ep_size_{parts}") if parts else of_group
        for of_group, parts in zip(settings, parts_of_groups)
    ]
    texts = Counter(map(text_of, made))

    def ordered(own: Sequence[LaidParameter], parts: int) -> list[LaidParameter]:
        return sorted(own, key=lambda each: (_place(each, counts, parts)[0], order[each.name]))

    laid: list[_Parts] = []
    notes: dict[str, None] = {}
    for number, (own, size, parts) in enumerate(zip(groups, sizes, parts_of_groups)):
        if parts != size:
            is_one = texts[text_of(made[number])] == 1 and sum(each.size for each in own) <= _MOST_IN_GROUP * parts
            if ordered(own, size) != [*own] or not is_one or any(count % parts for count in counts.values()):
                raise _not_written(
                    f"group {number} of the optimizer, whose experts would be in other groups, or in another order",
                    f"them over {size} ranks, as they are now: --dp that is a multiple of {size}, and no other --ep",
                    f"over {counted(parts, 'rank')}; experts: {', '.join(map(str, counts.values()))}"[:200],
                    f"choose such numbers of ranks, or {_OTHERWISE.removeprefix('choose ')}",
                )
            own = ordered(own, parts)
            over = f"{counted(parts, 'rank')}, and were over {size}"
            notes[f"experts are divided over {over}: give their layers ep_size={parts}"] = None
        laid.append(_by_part(own, counts, parts, number) if parts else [own])
    apart = tuple(f"{before}{number}." for before, count in counts.items() for number in range(count))
    return ModelParts([laid], made, apart, experts=tuple(counts.values()), notes=tuple(notes))


def _ep_size(own: Sequence[LaidParameter], settings: Dict, counts: Mapping[str, int], number: int) -> int:
    """Return over how many ranks the experts of a group are divided; 0 if it has none.

    Raises TargetError if it does not say it.
    """
    name = settings.get("name")
    match = _EP_SIZE.fullmatch(name) if type(name) is str and settings.get("moe") is True else None
    experts = [*filter(None, (OF_EXPERT.fullmatch(each.name) for each in own))]
    if not experts:
        return 0
    if match is None or len(experts) < len(own) or any(counts[each["before"]] % int(match[1]) for each in experts):
        raise _not_written(
            f"group {number} of the optimizer, which has experts",
            "experts alone, with moe: True and name: ep_size_N, where N divides the number of experts",
            f"{len(experts)} of {len(own)} are of experts, moe: {settings.get('moe')!r}, name: {name!r}"[:200],
            "give the optimizer the groups of split_params_into_different_moe_groups_for_optimizer",
        )
    return int(match[1])


def _place(parameter: LaidParameter, counts: Mapping[str, int], parts: int) -> tuple[int, str]:
    """Return the part that an expert's parameter is in, and its name there. parts: how many there are."""
    match = OF_EXPERT.fullmatch(parameter.name)
    assert match is not None
    part, own = divmod(int(match["number"]), counts[match["before"]] // parts)
    return part, f"{match['before']}{own}{match['after']}"


def _by_part(own: Sequence[LaidParameter], counts: Mapping[str, int], parts: int, number: int) -> _Parts:
    """Return the parameters of a group by the part of the ranks that they are in."""
    of_parts: list[list[LaidParameter]] = [[] for _ in range(parts)]
    called: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(parts)]
    for parameter in own:
        part, name = _place(parameter, counts, parts)
        of_parts[part].append(parameter)
        called[part].append((name, parameter.shape))
    for part, other in enumerate(called):
        if other != called[0]:
            unlike = next((pair for pair in zip(called[0], other) if pair[0] != pair[1]), (len(called[0]), len(other)))
            raise _not_written(
                f"group {number} of the optimizer, whose experts are not alike",
                f"the same parameters of each, in the same order, as on the first of {parts} ranks: {unlike[0]}",
                f"{unlike[1]} on that of place {part}",
            )
    return of_parts

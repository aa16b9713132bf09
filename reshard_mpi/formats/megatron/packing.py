"""Pack a checkpoint into the files of Megatron-Core's torch_dist, to be loaded in any layout (`packed`, `as_read`).

Of a whole training the weight KEY below `model` becomes KEY, its state `exp_avg` becomes
`optimizer.state.exp_avg.KEY`, and the copy of the weights in float32 `optimizer.state.param.KEY`, as Megatron's form
fully_reshardable has them. Tensors of another checkpoint are the model's, by their own names. A tensor is cut into the
layers and experts that are stacked in it, since a rank that loads one of these reads the whole of its chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.megatron.common_state import common_state
from reshard_mpi.formats.megatron.layers import (
    EXPERTS,
    ModulePlaces,
    NamedChunk,
    StackedPlace,
    least_axes,
    object_key,
    stacked,
)
from reshard_mpi.formats.megatron.training_tree import FP32, sizes_of
from reshard_mpi.formats.nest import flatten_tree, rebuild_tree
from reshard_mpi.formats.nest.nodes import (
    MODEL,
    ORDERED_DICT,
    Call,
    Dict,
    NestError,
    NestTensor,
    Value,
    entry_of,
    is_nest_tensor,
)
from reshard_mpi.formats.protocol import OwnTypes, Packed, PackingOptions, Part, SameParts, TensorTypes
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import KIB, shortened

# The string of the first file that says what else the checkpoint has.
COMMON = "__megatron_common__"
DEFAULT_RELEASE = "0.19"
_OPTIMIZER = "optimizer."
_STATE = f"{_OPTIMIZER}state."
_EXTRA = "_extra_state"
# Keys of Megatron's that are none of weights.
_KEYS = re.compile(
    r"(?:chained_\d+\.)?optimizer\..*|(?:common_state|rng_state|rerun_state_machine_state).*|.*/shard_[\d.]+_[\d.]+"
)
# The kind of state that is one number for all parameters, and is kept with the groups.
_COUNTER = "step"
_FLOAT32 = "float32"
# In all files together.
_MOST_CHUNKS = 1 << 20
_MOST_EXTRA_BYTES = 1024 * KIB
# Modules that save nothing besides tensors.
_WITHOUT_EXTRA = ("embedding.", "output_layer.")


class _SortedTensors(NamedTuple):
    """The tensors of a source, sorted into weights and state: names in it, by key.

    Attributes:
        tensors, own_types: of all of them, by name, as `PackingFormat.packed` has these.
        weights: of the model.
        extra: what modules have besides, where that is a tensor.
        state: of the optimizer by kind and key.
        others: names of what is none of these.
    """

    tensors: TensorTypes
    own_types: OwnTypes
    weights: dict[str, str]
    extra: dict[str, str]
    state: dict[str, dict[str, str]]
    others: list[str]

    @property
    def copies(self) -> dict[str, str]:
        """The copies of weights in float32."""
        return self.state.get(FP32, {})

    @property
    def moments(self) -> dict[str, dict[str, str]]:
        """The state that has the shapes of weights, but for copies of these."""
        return {kind: own for kind, own in self.state.items() if kind not in (_COUNTER, FP32)}

    @property
    def trained(self) -> dict[str, None]:
        """The keys of the weights that the optimizer trains, in order."""
        moments = dict.fromkeys(key for own in self.moments.values() for key in own)
        return moments or dict.fromkeys(self.copies)

    def origin(self, key: str, name: str) -> tuple[str, str]:
        """Return the tensor that a weight is made of, and the type that it is rounded to; empty: its own."""
        is_rounded = name in self.own_types and key in self.copies
        return (self.copies[key], self.tensors[name].dtype.name) if is_rounded else (name, "")


def packed(tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes, options: PackingOptions) -> Packed:
    """Return the files, as `PackingFormat.packed` says."""
    release = options.core_version or DEFAULT_RELEASE
    root, found = _source_tensors(tensors, strings, own_types)
    model = root.get("model")
    kinds = {key: tensors[name] for key, name in found.weights.items()}
    _require_own_keys(kinds)
    places = stacked(kinds, _args(root))
    _require_dimensions(kinds, places)
    _require_trained_together(found, places)
    chunks = [*_weights(found, places), *_state(found, places)]
    extra = _extra_values(model, ModulePlaces(places)) if type(model) is Dict else {}
    extra_tensors = dict(_extra_tensors(found, ModulePlaces(places)))
    if not extra and not extra_tensors:
        extra = dict.fromkeys(_usual_extra(places.values()))
    shapes = {own.key: (*own.counts, *kinds[key].shape) for key, own in places.items()}
    others, changed = _with_sizes(_without_tensors(root.without("model")), shapes)
    has_shares = None if options.ep is None else options.ep > 1
    _require_experts(found, places.values(), options.ep)
    common = common_state(others, has_state=bool(found.trained), has_shares=has_shares, release=release)
    counters = [*found.state.get(_COUNTER, {}).values()]
    held = [Part(name, name, Box.whole(tensors[name].shape)) for name in (*extra_tensors.values(), *counters[:1])]
    if len(chunks) > _MOST_CHUNKS:
        raise TargetError(
            "a Megatron checkpoint would have too many chunks",
            expected=f"at most {_MOST_CHUNKS}",
            got=str(len(chunks)),
            remedy="choose --to dcp",
        )
    kept = Dict(["release", release, "values", common.values, "extra", Dict.of(extra.items())])
    kept.flat += ["extra_tensors", Dict.of(extra_tensors.items()), "step", counters[0] if counters else None]
    files = _filled([*held, *chunks], tensors, options.most_file_bytes)
    return Packed(
        f"iter_{common.iteration:07d}",
        files,
        {COMMON: _text(kept)},
        [tuple(counters)],
        tuple(found.others),
        (*changed, *common.notes),
        only_first=True,
        compared=[[*_copies_in(own, found)] for own in files],
    )


def _require_own_keys(weights: Iterable[str]) -> None:
    """Raise TargetError for a weight that has a key of Megatron's for a name, and would be read as something else."""
    taken = next(filter(_KEYS.fullmatch, weights), None)
    if taken is not None:
        raise TargetError(
            f"the weight {taken!r} has a name by which Megatron keeps something else",
            expected="names of modules",
            got="a key of the optimizer's state, or of an object",
            remedy="give it another name (--map), leave it out (--exclude), or choose --to dcp",
        )


def _require_dimensions(weights: Mapping[str, TensorType], places: Mapping[str, StackedPlace]) -> None:
    """Raise TargetError for a weight that lacks the dimensions of layers, of experts or of a vocabulary."""
    for key, place in places.items():
        needed = least_axes(place.key) - len(place.counts)
        if len(weights[key].shape) < needed:
            raise TargetError(
                f"the weight {key!r} has too few dimensions for a Megatron checkpoint",
                expected=f"{needed} or more: one for layers, one for experts, as its name says; two for a vocabulary",
                got=f"shape {list(weights[key].shape)}",
                remedy="leave it out (--exclude), or choose --to dcp",
            )


def _require_experts(found: _SortedTensors, places: Iterable[StackedPlace], ep: int | None) -> None:
    """Raise TargetError unless `ep` ranks can share out the experts that the optimizer has."""
    counts = {(*own.counts, *own.own_counts)[-1] for own in places if EXPERTS in own.key}
    if ep is not None and not (found.trained and counts and all(count % ep == 0 for count in counts)):
        raise TargetError(
            f"an optimizer of experts for --ep {ep} cannot be made",
            expected=f"a training with its optimizer, of a model whose experts {ep} ranks can share out",
            got=("experts: " + ", ".join(map(str, sorted(counts))) if counts else "no experts")
            + ("" if found.trained else ", no optimizer"),
            remedy="leave out --ep, which says whether Megatron has an optimizer of experts: weights need none",
        )


def _args(root: Dict) -> Mapping[str, Value]:
    """Return the arguments of the run; nothing if the source has none."""
    args = root.get("args")
    return {key: own for key, own in args.pairs() if type(key) is str} if type(args) is Dict else {}


def _with_sizes(root: Dict, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Dict, list[str]]:
    """Return the nest with the sizes in its arguments that its tensors have, and notes on the ones that were others.

    Raises TargetError if tensors contradict each other.

    Args:
        shapes: of stacked tensors, by key.
    """
    args, changed = _args(root), dict[str, int]()
    for name, size in sizes_of(shapes):
        if type(args.get(name)) is int and changed.setdefault(name, size) != size:
            raise TargetError(
                "tensors of a model contradict each other",
                expected=f"one {name} in all of them, as {name} is an argument of Megatron",
                got=f"{changed[name]} and {size}",
                remedy="choose --to dcp or --to torch",
            )
    notes = []
    for name, size in changed.items():
        if size != args[name]:
            root = root.with_value("args", entry_of(root, "args").with_value(name, size))
            notes.append(f"args.{name} is {size}, as the tensors have it; it was {args[name]}")
    return root, notes


def _source_tensors(
    tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes
) -> tuple[Dict, _SortedTensors]:
    """Return the nest of a source, and its tensors sorted. Raises TargetError if it has no model's."""
    root = _root(tensors, strings)
    of_state = next((name for name in tensors if name.startswith(_OPTIMIZER)), None)
    if of_state is not None and type(root.get("model")) is not Dict:
        raise _not_held(f"the weights below {MODEL!r}, where an optimizer lies beside them", of_state)
    found = _sorted(tensors, own_types, root.get("model"))
    if not found.weights:
        raise _not_held("tensors of a model", shortened(list(tensors)) or "no tensors")
    return root, found


def _root(tensors: TensorTypes, strings: Mapping[str, str]) -> Dict:
    """Return the nest of a source, with models of torch as plain dictionaries. Raises TargetError if it is none."""
    try:
        root = rebuild_tree.rebuild({name: NestTensor(name) for name in tensors}, strings)
    except NestError as error:
        raise _not_held("nested dictionaries that hold the tensors by their names", error.problem) from None
    return Dict.of((key, _plain(value)) for key, value in root.pairs()) if type(root) is Dict else Dict()


def _plain(value: Value) -> Value:
    is_ordered = type(value) is Call and value.function == ORDERED_DICT and not value.args
    return Dict([*(value.flat or ())]) if is_ordered else value


def _sorted(tensors: TensorTypes, own_types: OwnTypes, model: Value) -> _SortedTensors:
    """Sort tensors by their names. Raises TargetError for state of a tensor that is no weight.

    Args:
        model: of the nest. None: all tensors are the model's.
    """
    has_model = type(model) is Dict
    own_keys = {key for key, value in model.pairs() if type(value) is NestTensor} if has_model else set()
    found = _SortedTensors(tensors, own_types, {}, {}, {}, [])
    for name in tensors:
        if has_model and not name.startswith(MODEL):
            continue
        key = name.removeprefix(MODEL) if has_model else name
        if f".{_EXTRA}" not in key:
            found.weights[key] = name
        elif not has_model or key in own_keys:
            found.extra[key] = name
        else:  # within an object of a module
            found.others.append(name)
    for name in tensors if has_model else ():
        key, _, kind = name.removeprefix(_STATE).rpartition(".")
        if name.startswith(_STATE):
            if key not in found.weights:
                raise _not_held("state of parameters that the model has, by their names", name)
            found.state.setdefault(kind, {})[key] = name
        elif not name.startswith(MODEL):
            found.others.append(name)
    return found


def _not_held(expected: str, got: str) -> TargetError:
    return TargetError(
        "the source is not what a checkpoint of Megatron is made of",
        expected=expected,
        got=got,
        remedy="convert a checkpoint of Megatron, take another one through a map (--map), or leave the optimizer out"
        " (--exclude 'optimizer.*')",
    )


def _require_trained_together(found: _SortedTensors, places: Mapping[str, StackedPlace]) -> None:
    """Raise TargetError if the optimizer has only some of the layers or experts that are put on top of each other."""
    trained = found.trained
    with_state = {places[key].key for key in trained}
    lacking = next((key for key, own in places.items() if own.key in with_state and key not in trained), None)
    if lacking is not None:
        raise _not_held(f"an optimizer that trains all of {places[lacking].key!r}, or none", f"no state of {lacking!r}")


def _weights(found: _SortedTensors, places: Mapping[str, StackedPlace]) -> Iterator[Part]:
    """Yield the chunks of weights. With another type (`--dtype`) they are their copies in float32, rounded."""
    for key, name in found.weights.items():
        source, dtype = found.origin(key, name)
        yield from _chunks("", places[key], source, found.tensors[name].shape, dtype)


def _copies_in(parts: Iterable[Part], found: _SortedTensors) -> Iterator[SameParts]:
    """Yield the parts of weights whose copies in float32 are in a file, each with the copy rounded.

    Megatron goes on from the copies, and makes the weights of these.
    """
    key_of = {copy: key for key, copy in found.copies.items()}
    for part in parts:
        key = key_of.get(part.source)
        if key is None or not part.name.startswith(f"{_STATE}param."):
            continue
        weight = found.weights[key]
        dtype = found.own_types.get(weight, found.tensors[weight].dtype).name
        yield SameParts.of_copy(part, weight, dtype, "Megatron", key)


def _state(found: _SortedTensors, places: Mapping[str, StackedPlace]) -> Iterator[Part]:
    """Yield the chunks of the optimizer's state. A weight without a copy in float32 is its own.

    Raises TargetError for state that has another shape than its weight, or that only some parameters have.
    """
    kinds, trained, tensors = found.moments, found.trained, found.tensors
    for kind, own in kinds.items():
        lacking = next((key for key in trained if key not in own), None)
        if lacking is not None:
            raise _not_held(f"{kind} of every parameter that the optimizer trains", f"none of {lacking!r}")
    copies = {key: found.copies.get(key) or found.weights[key] for key in trained}
    stray = next((name for key, name in found.copies.items() if key not in trained), None)
    if stray is not None:
        raise _not_held("moments of every weight that has a copy in float32", stray)
    for kind, own in {"param": copies, **kinds}.items():
        for key, name in own.items():
            if tensors[name].shape != tensors[found.weights[key]].shape:
                raise _not_held(
                    f"{kind} of shape {list(tensors[found.weights[key]].shape)}, as the weight {key!r} has it",
                    str(list(tensors[name].shape)),
                )
            dtype = _FLOAT32 if kind == "param" and tensors[name].dtype.name != _FLOAT32 else ""
            yield from _chunks(f"{_STATE}{kind}.", places[key], name, tensors[name].shape, dtype)


def _chunks(prefix: str, own: StackedPlace, name: str, shape: tuple[int, ...], dtype: str = "") -> Iterator[Part]:
    """Yield the parts of a tensor: each layer and expert that is stacked in it, or the whole of it as one of these."""
    rest = shape[len(own.own_counts) :]
    whole, ends = (*own.counts, *shape), (0,) * len(rest)
    for place in product(*map(range, own.own_counts)):
        box = Box((*place, *ends), (*(number + 1 for number in place), *rest))
        yield Part(NamedChunk(prefix + own.key, (*own.place, *place, *ends), whole).name, name, box, dtype)


def _extra_values(model: Dict, modules: ModulePlaces) -> dict[str, Value]:
    """Return what modules have besides tensors, by the keys of objects."""
    pairs = ((key, value) for key, value in model.pairs() if type(key) is str and type(value) is not NestTensor)
    return {modules.object_key(key): _without_tensors(value) for key, value in pairs if _EXTRA in key}


def _extra_tensors(found: _SortedTensors, modules: ModulePlaces) -> Iterator[tuple[str, str]]:
    """Yield what modules have besides tensors where it is one itself: the keys of objects, and names."""
    for key, name in found.extra.items():
        size_bytes = found.tensors[name].size_bytes
        if size_bytes > _MOST_EXTRA_BYTES:
            raise _not_held(f"{_EXTRA} of at most {_MOST_EXTRA_BYTES} bytes", f"{name}: {size_bytes}")
        yield modules.object_key(key), name


def _usual_extra(places: Iterable[StackedPlace]) -> Iterator[str]:
    """Yield the keys of the objects that Megatron's modules have, where the source has none: they are empty."""
    for own in places:
        module, _, part = own.key.rpartition(".")
        if part != "weight" or own.key.startswith(_WITHOUT_EXTRA):
            continue
        modules = [module]
        if module.endswith("self_attention.linear_proj"):
            modules.append(f"{module.removesuffix('linear_proj')}core_attention")
        counts = (*own.counts, *own.own_counts)
        for name in modules:
            for place in product(*map(range, counts)):
                yield object_key(f"{name}.{_EXTRA}", place, counts)


def _without_tensors(value: Value) -> Value:
    """Return a value without the tensors in it, which are left out by their names."""
    kind = type(value)
    if kind is Dict:
        kept = ((key, own) for key, own in value.pairs() if type(own) is not NestTensor)
        return Dict.of((key, _without_tensors(own)) for key, own in kept)
    if kind is list or kind is tuple:
        return kind(_without_tensors(own) for own in value if type(own) is not NestTensor)
    return value


def _filled(parts: Iterable[Part], tensors: TensorTypes, most_bytes: int) -> list[list[Part]]:
    """Return parts by files; no file is larger than said, unless by a single part."""
    files: list[list[Part]] = [[]]
    size_bytes = 0
    for part in parts:
        own_bytes = part.box.size * max(tensors[part.source].dtype.itemsize_bytes, 4 if part.dtype else 0)
        if files[-1] and size_bytes + own_bytes > most_bytes:
            files.append([])
            size_bytes = 0
        files[-1].append(part)
        size_bytes += own_bytes
    return files


def _text(root: Dict) -> str:
    """Return a tree as the text of a nest. Raises TargetError if it is too large."""
    try:
        return flatten_tree.flatten(root, is_nest_tensor).strings[NEST]
    except NestError as error:
        raise _not_held("settings besides tensors of moderate size", error.problem) from None


def as_read(tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes) -> Packed | None:
    """Return the whole tensors that files are read as, as `PackingFormat.as_read` says."""
    root, found = _source_tensors(tensors, strings, own_types)
    places = stacked({key: tensors[name] for key, name in found.weights.items()}, _args(root))
    numbered = next((key for key, own in places.items() if own.key != key), None)
    if numbered is not None:
        raise TargetError(
            "layers and experts that lie by themselves here are on top of each other in a checkpoint of Megatron",
            expected="the record of the run that has put them there, which says file by file what was taken",
            got=f"no record, and {numbered!r}, which is a part of {places[numbered].key!r}",
            remedy="verify the folder that was written, with its .reshard_mpi",
        )
    parts = [*_parts_as_read(found)]
    taken = {part.source for part in parts}
    return Packed("", [parts], {}, left_out=tuple(name for name in tensors if name not in taken))


def _parts_as_read(found: _SortedTensors) -> Iterator[Part]:
    """Yield whole tensors under the names that reading gives them."""
    tensors = found.tensors
    for key, name in (found.weights | found.extra).items():
        source, dtype = found.origin(key, name)
        yield Part(MODEL + key, source, Box.whole(tensors[name].shape), dtype)
    for key in found.trained:
        weight, name = found.weights[key], found.copies.get(key, found.weights[key])
        if tensors[weight].dtype.name != _FLOAT32:
            dtype = "" if tensors[name].dtype.name == _FLOAT32 else _FLOAT32
            yield Part(f"{_STATE}{key}.{FP32}", name, Box.whole(tensors[name].shape), dtype)
        for kind, own in found.moments.items():
            yield Part(f"{_STATE}{key}.{kind}", own[key], Box.whole(tensors[own[key]].shape))

"""Arrange a Megatron training as one nest under names of a whole state (`arranged`), if its parts agree.

Before anything is read as a whole, arguments are checked with tensors, and copies with weights (`require_agreement`): a
few elements of each piece tell whether a float32 copy is its weight's. Megatron-Core 0.15 to 0.19 saves copies and
moments of other parameters where its state is named and its buckets are several.
(megatron/core/optimizer/distrib_optimizer.py, corrected by pull request 5077)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, ShardError
from reshard_mpi.formats.locations import ByteRanges, Location
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.megatron.layers import OF_VOCABULARY, is_expert, layer_axes, least_axes, place_of
from reshard_mpi.formats.megatron.parameter_order import ElementReader, rounded
from reshard_mpi.formats.nest.nodes import MAX_DEPTH, Call, Dict, Global, Value, entry_of
from reshard_mpi.formats.structure import step_in_name
from reshard_mpi.formats.torch.file_content import TensorPieces, listed, text_of
from reshard_mpi.formats.torch.tensors import StoredTensor
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import shortened

NAME = "megatron"
# The float32 copy of a weight, as this program calls it.
FP32 = "fp32_param"
# What Megatron calls it, in files of one form or another.
MAIN_NAMES = ("param", "fp32_param")
_NAMESPACE = Global("argparse", "Namespace")
# Settings of the run that other frameworks have as well, by Megatron's names.
_RENAMED = {"opt_param_scheduler": "scheduler"}
# What is about these files alone, or these ranks.
_OF_LAYOUT = ("content_metadata", "rng_state", "optimizer")
# What tells the groups of an optimizer from each other.
_OF_GROUP_ALONE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_NO_MEMBERS = (
    "which parameters each group of the optimizer has is not in the files, and its groups are not those that Megatron"
    " makes by itself (with and without weight decay): they have no list of parameters"
)
_MEMBERS = (
    "which parameters each group of the optimizer has is not in the files: biases and vectors are taken for those"
    " without weight decay, as Megatron takes them unless it is told otherwise"
)


class SavedTraining(NamedTuple):
    """The contents of all files of a checkpoint together.

    Attributes:
        weights: the tensors of the model by key, and what else its modules save.
        state: the optimizer's state by key and kind: tensors and numbers; `FP32` is the copy of the weights.
        groups: the optimizer's groups with their settings, and their parameters' keys as `params` if these are known.
        values: what else the run keeps, by key.
    """

    weights: Mapping[str, Value]
    state: Mapping[str, Mapping[str, Value]]
    groups: Sequence[Dict]
    values: Mapping[str, Value]


class FolderTraining(NamedTuple):
    """The training of a folder.

    Attributes:
        of_file: returns a tensor among values with its place.
        left_out: in words, what is not kept.
        about_files: in words, what else is not kept, since it is about these files alone.
    """

    training: SavedTraining
    of_file: Callable[[StoredTensor], TensorPieces]
    left_out: tuple[str, ...]
    about_files: tuple[str, ...] = ()


def arranged(read: FolderTraining, folder: str) -> Manifest:
    """Return a checkpoint's tensors as pieces that its files hold, and the rest of it as the text of a nest.

    Raises ShardError if weights and state contradict each other.
    """
    training, model = read.training, Dict()
    for key, value in training.weights.items():
        state = training.state.get(key, {})
        model.flat += [key, _with_copies(key, value, state, folder) if type(value) is TensorPieces else value]
    lacking = [key for key in training.state if type(training.weights.get(key)) is not TensorPieces]
    if lacking:
        raise ShardError(
            "a Megatron checkpoint lacks the weights of parameters that its optimizer has",
            expected=repr(lacking[0]),
            got=f"{len(lacking)} parameters without weights",
            where=folder,
            remedy="copy or restore all files of one save",
        )
    optimizer, notes = _optimizer(training)
    root = Dict(["model", model, "optimizer", optimizer])
    for key, value in training.values.items():
        if key not in _OF_LAYOUT:
            root.flat += [_RENAMED.get(key, key), plain(value)]
    manifest = listed(root, folder, NAME, "Megatron checkpoint", read.of_file)
    return manifest._replace(left_out=(*manifest.left_out, *read.left_out), notes=(*read.about_files, *notes))


def _optimizer(training: SavedTraining) -> tuple[Dict, tuple[str, ...]]:
    """Return the optimizer with its state by parameters, and notes on it.

    It is empty where none was saved: the names of the model are below `model` even so.
    """
    if not training.state:
        return Dict(["param_groups", list(training.groups)] if training.groups else []), ()
    groups, note = _groups(training)
    steps = {name: group.get("step") for group, names in groups for name in names}
    state_tree = Dict()
    for key, kinds in training.state.items():
        own = Dict.of((kind, tensor) for kind, tensor in kinds.items() if _is_kept(kind, key, training))
        if steps.get(key) is not None and "step" not in kinds:
            own.flat += ["step", steps[key]]
        state_tree.flat += [key, own]
    own_groups: list[Value] = [group if note == _NO_MEMBERS else with_members(group, own) for group, own in groups]
    return Dict(["state", state_tree, "param_groups", own_groups]), (note,) if note else ()


def _is_kept(kind: str, key: str, training: SavedTraining) -> bool:
    """Tell whether a kind of state is listed: the copy of a weight that is float32 itself is the weight."""
    return kind != FP32 or training.weights[key].dtype != training.state[key][FP32].dtype


def _with_copies(key: str, tensor: TensorPieces, state: Mapping[str, Value], folder: str) -> TensorPieces:
    """Return a weight with the pieces of its float32 copy, converted, so that both are compared as copies are.

    Raises ShardError if state has another shape.
    """
    for kind, own in state.items():
        if type(own) is TensorPieces and own.shape not in ((), tensor.shape):
            raise ShardError(
                f"{kind} of {key!r} in a Megatron checkpoint has another shape than the weight",
                expected=str(list(tensor.shape)),
                got=str(list(own.shape)),
                where=folder,
                remedy="copy or restore all files of one save",
            )
    main = state.get(FP32)
    return tensor if main is None else tensor._replace(pieces=(*tensor.pieces, *main.pieces_as(tensor.dtype)))


def _groups(training: SavedTraining) -> tuple[list[tuple[Dict, list[str]]], str]:
    """Return the optimizer's groups, each with the names of its parameters, and a note on these."""
    known = [group.get("params") for group in training.groups]
    if known and all(type(names) is list and all(type(name) is str for name in names) for names in known):
        return list(zip(training.groups, known)), ""
    members: list[list[str]] = [[] for _ in training.groups]
    has_expert_groups = any(group.get("is_expert_parallel") is True for group in training.groups)
    for key in training.state:
        dimensions = len(training.weights[key].shape) - layer_axes(key)
        fitting = [
            number
            for number, group in enumerate(training.groups)
            if is_of_group(group, key, dimensions)
            and (not has_expert_groups or group.get("is_expert_parallel") in (None, is_expert(key)))
        ]
        if len(fitting) != 1:
            return [(group, []) for group in training.groups], _NO_MEMBERS
        members[fitting[0]].append(key)
    return list(zip(training.groups, members)), _MEMBERS


def with_members(group: Dict, names: Sequence[str]) -> Dict:
    """Return a group with the names of its parameters in place of what told them before."""
    return Dict([*group.without("params").flat, "params", list(names)])


def is_of_group(group: Dict, key: str, dimensions: int) -> bool:
    """Tell whether a group can have a parameter, if Megatron has made the groups by itself.

    Args:
        dimensions: of the parameter, without those of stacked layers and experts.
    """
    is_decayed = dimensions > 1 and not key.endswith(".bias")
    is_plain = group.get("lr_mult") in (None, 1.0) and not group.get("is_decoupled_lr")
    return is_plain and group.get("wd_mult") in (None, 1.0 if is_decayed else 0.0)


def plain(value: Value, depth: int = 0) -> Value:
    """Return a value in which objects of Megatron's classes are dictionaries.

    A Namespace becomes one of its attributes; a member of an enumeration one of its class and its value. What lies too
    deep for a nest stays as it is.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        return value
    if kind is list:
        return [plain(part, depth + 1) for part in value]
    if kind is tuple:
        return tuple(plain(part, depth + 1) for part in value)
    if kind is Dict:
        return Dict.of((key, plain(own, depth + 1)) for key, own in value.pairs())
    if kind is Call and value.function == _NAMESPACE and type(value.state) is Dict:
        return plain(value.state, depth + 1)
    if kind is Call and value.function.module.startswith("megatron.") and _is_member(value):
        return Dict(["class", str(value.function), "value", value.args[0]])
    return value


def _is_member(value: Call) -> bool:
    """Tell whether an object is made of one number or text, as members of enumerations are."""
    return len(value.args) == 1 and type(value.args[0]) in (int, str) and value.state is None and not value.items


def differing(keys: Sequence[str], what: str) -> Iterator[str]:
    """Say that keys are left out, if there are any, and why."""
    if keys:
        yield f"{shortened(sorted(keys), 3)}: {what}"


def is_of_experts(optimizer: Value) -> bool:
    """Tell whether an optimizer has a group of experts."""
    groups = entry_of(optimizer, "param_groups")
    return any(type(group) is Dict and group.get("is_expert_parallel") is True for group in groups or [])


def kind_of_group(group: Dict) -> str:
    """Return what tells a group from others of its optimizer, as a text."""
    return text_of(list(map(group.get, _OF_GROUP_ALONE)))


def merged(optimizers: Sequence[Value], folder: str, *, may_be_alike: bool = False) -> list[Dict]:
    """Return the groups of all ranks of an optimizer, each once: a rank has groups of its own parameters alone.

    Args:
        may_be_alike: a rank may have several that nothing tells apart, as another framework's optimizer has.
    """
    groups_by_kind: dict[tuple[str, int], Dict] = {}
    for rank, optimizer in enumerate(optimizers):
        alike: Counter[str] = Counter()  # groups of this rank that nothing tells apart
        groups = entry_of(optimizer, "param_groups")
        for group in groups or []:
            if type(group) is not Dict:
                raise ShardError("a group of the optimizer of a Megatron checkpoint is no dictionary", where=folder)
            kind = kind_of_group(group)
            first = groups_by_kind.setdefault((kind, alike[kind]), group)
            alike[kind] += may_be_alike
            if text_of(first) != text_of(group):
                raise not_of_one_save("the settings of its optimizer's groups alike", f"others of rank {rank}", folder)
    return [*groups_by_kind.values()]


def chained(optimizer: Value) -> list[Dict]:
    """Return the optimizers that are chained in one: several have numbers for keys."""
    if type(optimizer) is not Dict:
        return []
    numbered = [own for key, own in optimizer.pairs() if type(key) is int and type(own) is Dict]
    return numbered or [optimizer]


def scaler_of(scalers: Sequence[Value], folder: str) -> Value:
    """Return the state of the scaler of gradients; None if there is none. Raises DisagreementError if ranks differ."""
    texts = {text_of(scaler) for scaler in scalers}
    if len(texts) > 1:
        raise not_of_one_save("one state of the scaler of gradients", f"{len(texts)}", folder)
    return scalers[0] if scalers else None


def require_iteration_of_folder(values: Mapping[str, Value], file: str, folder: str) -> None:
    """Raise ShardError if a folder is named after another iteration than what ranks have in common.

    Args:
        values: what they have in common; file: where that lies, for the error.
    """
    named, iteration = step_in_name(folder, "iter_", 7), values.get("iteration")
    if named is not None and type(iteration) is int and iteration != named:
        raise ShardError(
            "what the ranks of a Megatron checkpoint have in common is of another save than its folder",
            expected=f"iteration {named}, after which the folder is named",
            got=f"iteration {iteration} in {file}",
            where=folder,
            remedy="copy or restore all files of one save; if only the folder has been renamed, give it its own name",
        )


def not_of_one_save(expected: str, got: str, folder: str) -> DisagreementError:
    return DisagreementError(
        "the ranks of a Megatron checkpoint are not of one save",
        expected=expected,
        got=got,
        where=folder,
        remedy="copy or restore all files of one save",
    )


def require_all_parts(
    what: str, key: str, weight: TensorPieces, pieces: Sequence[tuple[Box, Location]], folder: str
) -> None:
    """Raise ShardError unless the optimizer has the state of each part of a weight. what: which state, in words."""
    boxes = {box for box, _ in pieces}
    lacking = next((box for box, _ in weight.pieces if box not in boxes and box.ndim), None)
    if lacking is not None:
        raise ShardError(
            f"the optimizer of a Megatron checkpoint has {what} of a part of {key!r} alone",
            expected=f"that of all parts of shape {list(weight.shape)}",
            got=f"none of {lacking}",
            where=folder,
            remedy="copy or restore all files of one save",
        )


_DECODER = "decoder.layers."


def require_agreement(
    args: Mapping[str, Value],
    weights: Mapping[str, Value],
    state: Mapping[str, Mapping[str, Value]],
    reader: ElementReader,
    folder: str,
) -> None:
    """Raise ShardError if arguments contradict tensors, or the float32 copy of a weight is another's.

    Args:
        args: of the run; empty if they are not kept.
        state: the optimizer's, by key and kind.
    """
    tensors = {key: value for key, value in weights.items() if type(value) is TensorPieces}
    for key, tensor in tensors.items():
        if len(tensor.shape) < least_axes(key):
            raise ShardError(
                f"the tensor {key!r} of a Megatron checkpoint has too few dimensions",
                expected="one for layers, one for experts, as its name says; two for a vocabulary",
                got=f"shape {list(tensor.shape)}",
                where=folder,
            )
    for name, of_files in sizes_of({key: tensor.shape for key, tensor in tensors.items()}):
        said = args.get(name)
        if type(said) is int and said != of_files:
            raise ShardError(
                "the arguments of a Megatron checkpoint contradict its tensors",
                expected=f"{name} of {said}, as its arguments have it",
                got=str(of_files),
                where=folder,
                remedy="copy or restore all files of one save",
            )
    for key, kinds in state.items():
        if key in tensors and FP32 in kinds and tensors[key].shape == kinds[FP32].shape:
            _require_rounded(key, tensors[key], kinds[FP32], reader, folder)


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield sizes of the model as its tensors tell them, by the names of arguments."""
    layers, experts = set[int](), set[int]()
    for key, shape in shapes.items():
        place = place_of(key)
        if key in OF_VOCABULARY:
            yield "padded_vocab_size", shape[0]
            yield "hidden_size", shape[1]
        if key.startswith(_DECODER) and place.stacked_layers:
            yield "num_layers", shape[0]
        elif key.startswith(_DECODER) and place.layer is not None:
            layers.add(place.layer)
        if place.stacked_experts:
            yield "num_experts", shape[place.stacked_layers]
        elif place.expert is not None:
            experts.add(place.expert)
    for name, numbers in (("num_layers", layers), ("num_experts", experts)):
        if numbers:
            yield name, len(numbers)


def _require_rounded(key: str, weight: TensorPieces, copy: TensorPieces, reader: ElementReader, folder: str) -> None:
    """Raise ShardError if elements of a float32 copy that are looked at do not round to its weight."""
    held = {box.start: (box, place) for box, place in weight.pieces}
    for box, place in copy.pieces:
        own_box, own_place = held.get(box.start, (None, None))
        if own_box is None or not (isinstance(place, ByteRanges) and isinstance(own_place, ByteRanges)) or not box.size:
            continue  # as other programs may cut it: they are compared as copies are
        if place.swapped or own_place.swapped:
            continue
        elements = box.size if own_box == box else min(box.shape[-1], own_box.shape[-1])
        main = reader.sample(place, elements, copy.dtype.itemsize_bytes)
        if rounded(main, weight.dtype) not in (None, reader.sample(own_place, elements, weight.dtype.itemsize_bytes)):
            raise ShardError(
                f"the float32 copy of {key!r} in a Megatron checkpoint is not its weight's",
                expected=f"elements that round to the weights, {weight.dtype.name}",
                got=f"others in the part that begins at {list(box.start)}",
                where=folder,
                remedy="releases 0.15 to 0.19 save the state of other parameters with --overlap-grad-reduce and"
                " --dist-ckpt-optim-fully-reshardable: save it without one of the two; weights alone: --from dcp",
            )

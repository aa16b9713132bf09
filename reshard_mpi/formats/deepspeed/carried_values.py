"""Carry a training's values besides tensors into the places that files of DeepSpeed have for them (`model_text`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.layout import FlatGroupLayout
from reshard_mpi.formats.deepspeed.torch_forms import is_engines, is_nest_tensor, loss_scaler
from reshard_mpi.formats.deepspeed.training_tree import CLIENT_STATE, IS_PIPELINE, OF_ENGINE, PIPELINE
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import Dict, NestError, NestTensor, Value, entry_of
from reshard_mpi.text import shortened

# Under this key the optimizer's files are told the settings of its groups.
SETTINGS = "settings"
# Keys of the nest that the optimizer's files have; the rest is the model's.
_OF_OPTIMIZER = ("dynamic_loss_scale", "overflow", "clip_grad")
# Keys at the root of a training that have a place of their own; all others become client state.
KEPT = ("model", "optimizer", "scheduler", *OF_ENGINE, IS_PIPELINE, PIPELINE)
# Of these, the keys whose place is not in the files of weights, or not as values.
_ELSEWHERE = ("model", "optimizer", "ds_config", "buffer_names", "shared_params", IS_PIPELINE, PIPELINE)


def require_places(root: Dict, scaler: Value) -> tuple[str, ...]:
    """Return notes on values for which there is no place.

    Args:
        root: of a training.
        scaler: the loss scaler that its files get; None: the one that scales nothing.

    Raises TargetError for values where others are expected, and for a key that would have two values.
    """
    for key, value, expected in _misplaced(root):
        raise TargetError(
            f"{key} of the source is not what DeepSpeed has there, and would be lost",
            expected=expected,
            got=repr(value)[:100] if type(value) in (str, int, float, bool) else type(value).__name__.lower(),
            remedy="leave it out of the source, or choose --to torch",
        )
    client_state = root.get(CLIENT_STATE)
    besides = [key for key, _ in root.pairs() if key not in (*KEPT, CLIENT_STATE)]
    twice = [key for key, _ in client_state.pairs() if key in besides] if type(client_state) is Dict else []
    if twice:
        raise TargetError(
            "values beside the model would have the keys of client state",
            expected=f"keys that are at the root or in {CLIENT_STATE}",
            got=f"{shortened([*map(str, twice)])} in both",
            remedy="leave one of them out of the source, or choose --to torch",
        )
    return tuple(_notes(root, scaler))


def _misplaced(root: Dict) -> Iterator[tuple[str, Value, str]]:
    """Yield the keys of values that are not of the form that DeepSpeed has, these, and that form."""
    config, names = root.get("ds_config"), root.get("buffer_names")
    zero = entry_of(config, "zero_optimization")
    for key, value in (("ds_config", config), ("ds_config.zero_optimization", zero)):
        if value is not None and type(value) is not Dict:
            yield key, value, "a dictionary"
    version = root.get("ds_version")
    if version is not None and type(version) is not str:
        yield "ds_version", version, "a text"
    if names is not None and not _are_texts(names):
        yield "buffer_names", names, "a list of names"
    shared = root.get("shared_params")
    if shared is not None and not (type(shared) is Dict and _are_texts(shared.flat)):
        yield "shared_params", shared, "a dictionary of names"
    optimizer = root.get("optimizer")
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if state is not None and type(state) is not Dict:
        yield "optimizer.state", state, "a dictionary"
        return
    members = {name for group in groups for name in group.get("params")}
    for name, own in state.pairs() if state is not None else ():
        if type(own) is not Dict:
            yield f"optimizer.state.{name}", own, "a dictionary of the parameter's state"
        elif name not in members and own.flat:
            yield f"optimizer.state.{name}", own, "state of parameters that are in a group of the optimizer"


def _are_texts(values: Value) -> bool:
    return type(values) in (list, tuple) and all(type(value) is str for value in values)


def _notes(root: Dict, scaler: Value) -> Iterator[str]:
    entries, known = root.get("optimizer").pairs(), ("state", "param_groups")
    others = [f"optimizer.{key}" for key, value in entries if key not in known and not is_nest_tensor(value)]
    if others:
        yield f"left out, since DeepSpeed's optimizer has no place for it: {shortened(others)}"
    own, is_dynamic = root.get("scaler"), root.get("dynamic_loss_scale")
    if is_engines(own) and scaler is not own:
        yield "left out, since the model has another type than it was trained in: scaler"
    if is_dynamic is not None and is_dynamic is not (type(scaler) is Dict and scaler.get("dynamic") is True):
        yield "left out, since the loss scaler says it: dynamic_loss_scale"


def module_text(root: Dict) -> str:
    """Return the nest of everything besides tensors that the modules of a model save."""
    pairs = root.get("model").pairs()
    besides = Dict.of((key, value) for key, value in pairs if type(value) is not NestTensor)
    return _text(Dict(["module", besides]))


def model_text(root: Dict, config: Dict, experts: Sequence[int]) -> str:
    """Return the nest of everything besides the model itself that goes into the files of weights.

    Args:
        experts: how many each layer with experts has.
    """
    rest = Dict(["ds_config", config])
    if experts:
        rest.flat += ["num_experts", [*experts]]
    for key, value in root.pairs():
        is_taken = key in (*_ELSEWHERE, *_OF_OPTIMIZER) or (experts and key == "num_experts")
        if not is_taken and not (key == "scaler" and (value is None or is_engines(value))):
            rest.flat += [key, value]
    return _text(rest)


def optimizer_text(
    root: Dict, settings: Sequence[Dict], flat: Sequence[Sequence[FlatGroupLayout]], config: Dict, dtype: str
) -> str:
    """Return the nest of everything besides tensors that goes into the files of the optimizer.

    Args:
        settings: of its groups; flat: the flat groups of each stage of a pipeline.
    """
    state = root.get("optimizer").get("state")
    values = [[_common_values(group, state) for group in of_stage] for of_stage in flat]
    rest = Dict.of(pair for pair in root.pairs() if pair[0] in _OF_OPTIMIZER)
    scaler = loss_scaler(root.get("scaler"), root.get("ds_config"), dtype)
    parts = {SETTINGS: [*settings], "values": values, "scaler": scaler, "rest": rest, "config": config}
    return _text(Dict.of(parts.items()).with_value("ds_version", root.get("ds_version")))


def _common_values(group: FlatGroupLayout, state: Value) -> Dict:
    """Return the values besides tensors that the state of all parameters of a group has alike, such as a step."""
    texts: dict[str, Dict] = {}
    for parameter in group.parameters:
        own = entry_of(state, parameter.name)
        pairs = own.pairs() if type(own) is Dict else ()
        values = Dict.of((key, value) for key, value in pairs if type(value) is not NestTensor)
        texts.setdefault(_text(Dict(["values", values])), values)
    if len(texts) > 1:
        first, other, *_ = texts
        raise no_training("state that is the same number for all parameters of a group", f"{first} and {other}"[:200])
    return next(iter(texts.values()))


def config_for(config: Value, stage: int, ranks: int, dtype: str) -> Dict:
    """Return DeepSpeed's settings for this stage and number of ranks."""
    known = dict(config.pairs()) if type(config) is Dict else {}
    if not known and dtype in ("bfloat16", "float16"):
        known["bf16" if dtype == "bfloat16" else "fp16"] = Dict(["enabled", True])
    zero = known.get("zero_optimization")
    of_zero = dict(zero.pairs()) if type(zero) is Dict else {}
    of_zero["stage"] = stage
    known["zero_optimization"] = Dict.of(of_zero.items())
    size, steps = known.get("train_micro_batch_size_per_gpu"), known.get("gradient_accumulation_steps")
    if type(known.get("train_batch_size")) is int and type(size) is int and type(steps) is int:
        known["train_batch_size"] = size * steps * ranks
    return Dict.of(known.items())


def _text(root: Dict) -> str:
    """Return a tree as the text of a nest. Raises TargetError if it is too large."""
    try:
        return flatten_tree.flatten(root, is_nest_tensor).strings[NEST]
    except NestError as error:
        raise TargetError(
            "the settings of the source besides its tensors cannot be written",
            expected="plain data of moderate size",
            got=error.problem,
            remedy="leave them out of the source, or choose --to torch",
        ) from None


def no_training(expected: str, got: str) -> TargetError:
    """Return the error for a source that is no training, or lacks a part of one."""
    return TargetError(
        "the source is not a whole training, which a checkpoint of DeepSpeed is made of",
        expected=f"{expected}: tensors called model.NAME and optimizer.state.NAME.exp_avg, and"
        " optimizer.param_groups, whose params are names",
        got=got,
        remedy="convert a checkpoint of DeepSpeed, or save one by names of parameters"
        " (torch.distributed.checkpoint.state_dict.get_state_dict)",
    )

"""Hold a training's values against the places that files of DeepSpeed have for them (`require_places`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.deepspeed.torch_forms import is_engines, is_nest_tensor
from reshard_mpi.formats.deepspeed.training_tree import CLIENT_STATE, OF_ENGINE
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.text import shortened

# Keys at the root of a training that have a place of their own; all others become client state.
KEPT = ("model", "optimizer", "scheduler", *OF_ENGINE)


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
    zero = config.get("zero_optimization") if type(config) is Dict else None
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
    others = _others(root.get("optimizer"), ("state", "param_groups"))
    if others:
        yield f"left out, since DeepSpeed's optimizer has no place for it: {shortened(others)}"
    own, is_dynamic = root.get("scaler"), root.get("dynamic_loss_scale")
    if is_engines(own) and scaler is not own:
        yield "left out, since the model has another type than it was trained in: scaler"
    if is_dynamic is not None and is_dynamic is not (type(scaler) is Dict and scaler.get("dynamic") is True):
        yield "left out, since the loss scaler says it: dynamic_loss_scale"


def _others(optimizer: Dict, known: Collection[str]) -> list[str]:
    return [f"optimizer.{key}" for key, value in optimizer.pairs() if key not in known and not is_nest_tensor(value)]

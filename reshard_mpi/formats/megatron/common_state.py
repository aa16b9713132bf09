"""Make the values that all ranks of a Megatron training share, as its loader expects them (`common_state`).

That is the arguments of the run, its iteration, its schedule, and the settings of the optimizer's groups. Its pickle
may name only argparse.Namespace and those enumerations of Megatron-Core that this module lists, besides plain data that
torch loads by itself: objects are made of checked values, never as a text says. (megatron/training/checkpointing.py,
megatron/core/safe_globals.py of Megatron-Core 0.15 to 0.19)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard_mpi.errors import TargetError
from reshard_mpi.formats.megatron.training_tree import kind_of_group
from reshard_mpi.formats.nest.nodes import BYTES_IO, ORDERED_DICT, PLAIN, Call, Dict, Global, Value, entry_of
from reshard_mpi.formats.torch.file_content import text_of
from reshard_mpi.formats.torch.tensors import SIZE
from reshard_mpi.text import shortened

NAMESPACE = Global("argparse", "Namespace")
_TRANSFORMER = "megatron.core.transformer.enums."
_RERUN = "megatron.core.rerun_state_machine."
# The values of the members of each enumeration, each with the first release that has it.
_ENUMERATIONS: Mapping[str, Mapping[int | str, str]] = {
    f"{_TRANSFORMER}AttnBackend": dict.fromkeys(range(1, 6), "0.15"),
    f"{_TRANSFORMER}CudaGraphScope": {**dict.fromkeys(range(1, 8), "0.16"), 8: "0.17"},
    f"{_TRANSFORMER}CudaGraphModule": dict.fromkeys(range(1, 7), "0.18"),
    f"{_TRANSFORMER}InferenceCudaGraphScope": dict.fromkeys(range(1, 4), "0.18"),
    "megatron.core.enums.ModelType": {1: "0.15"},
    f"{_RERUN}RerunDiagnostic": dict.fromkeys(("correct_result", "transient_error", "persistent_error"), "0.15"),
    f"{_RERUN}RerunMode": dict.fromkeys(("disabled", "validate_results", "report_determinism_stats"), "0.15"),
    f"{_RERUN}RerunState": dict.fromkeys(range(6), "0.15"),
}
# Classes that torch loads by itself, or that Megatron-Core allows.
_PLAIN_CLASSES = (
    *(ORDERED_DICT, SIZE, BYTES_IO, Global("types", "SimpleNamespace"), Global("pathlib", "PosixPath")),
    *(Global("builtins", "set"), Global("builtins", "bytearray"), Global("torch", "device")),
)
# Names under which trainings keep how many steps they have taken.
_ITERATIONS = ("iteration", "global_step", "global_steps", "step")
_MOST_ITERATIONS = 10**12
# What Megatron tells groups of an optimizer from each other by.
_OF_GROUPS = ("wd_mult", "lr_mult")
_OF_EXPERTS = "is_expert_parallel"
_RESHARDABLE = "fully_reshardable"


class CommonState(NamedTuple):
    """What all ranks have in common, as plain data of a nest. notes: what of the source is not in it, in words."""

    values: Dict
    iteration: int
    notes: tuple[str, ...]


def common_state(root: Dict, *, has_state: bool, has_shares: bool | None, release: str) -> CommonState:
    """Return the values of a checkpoint besides the tensors of its model and optimizer, as Megatron keeps them.

    Args:
        root: the nest of the checkpoint without these.
        has_state: whether there are tensors of the optimizer.
        has_shares: whether ranks share out experts, which have an optimizer of their own then; None: as their groups
            say.
        release: of Megatron-Core.
    """
    given = dict(root.pairs())
    notes: list[str] = []
    optimizer, scaler = given.pop("optimizer", None), given.pop("scaler", None)
    args = given.pop("args", None)
    iteration = next((own for key in _ITERATIONS if (own := _count(given.get(key))) is not None), 0)
    values: dict[Value, Value] = {}
    if _are_arguments(args):
        values["args"] = args
    else:
        told = "0, since the source tells no step" if iteration == 0 else f"{iteration}, the source's step"
        notes.append(
            f"the source has no arguments of Megatron: the checkpoint has none either, and its iteration is {told}"
        )
    values["checkpoint_version"] = given.pop("checkpoint_version", 3.0)
    values["iteration"] = iteration
    given.pop("iteration", None)
    if has_state:
        own = entry_of(optimizer, "param_groups")
        groups = [group for group in own or [] if type(group) is Dict] if type(own) is list else []
        if has_shares is not None:
            groups = [*_regrouped(groups, has_shares=has_shares)]
        values["optimizer"] = _optimizers(groups, scaler)
        if not groups or not all({*_OF_GROUPS} <= {*group.flat[::2]} for group in groups):
            notes.append(
                "the optimizer's groups are not told apart as Megatron does it (wd_mult, max_lr and others), so that it"
                " finds none of its own: it loads the weights alone (--no-load-optim)"
            )
    schedule = given.pop("scheduler", None)
    if schedule is not None:
        is_own = type(schedule) is Dict and {"num_steps", "lr_decay_style"} <= {*schedule.flat[::2]}
        values["opt_param_scheduler" if is_own else "scheduler"] = schedule
    values.update((key, value) for key, value in given.items() if key not in values)
    content: dict[Value, Value] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if has_state:
        content |= {"distrib_optim_sharding_type": _RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": False}
    values["content_metadata"] = Dict.of(content.items())
    kept = Converting(release)
    kept.value(Dict.of(values.items()), "")
    if kept.left_out:
        listed = shortened(kept.left_out, 4)
        notes.append(f"left out, as objects of classes that Megatron-Core {release} does not load: {listed}")
    return CommonState(Dict.of(values.items()), iteration, tuple(notes))


def objects_of(values: Dict, release: str, step: float | None) -> Dict:
    """Return the common state with the objects that its plain data stand for.

    Args:
        values: as of `CommonState`.
        step: of the optimizer, where its groups do not say it; None: they do, or nothing does.
    """
    made = Converting(release).value(values, "")
    assert type(made) is Dict
    pairs = dict(made.pairs())
    if type(args := pairs.get("args")) is Dict:
        pairs["args"] = namespace = Call(NAMESPACE, (), is_new=True)
        namespace.state = args
    if step is not None:
        for own in _groups_in(pairs["optimizer"]):
            if "step" not in own.flat[::2]:
                own.flat += ["step", step]
    return Dict.of(pairs.items())


class Converting:
    """Turns plain data into what may be in a pickle. left_out: where something was that may not."""

    def __init__(self, release: str) -> None:
        self.left_out: list[str] = []
        self._release = release

    def value(self, value: Value, where: str) -> Value:
        """Return a value, without the parts of it that may not be in a pickle."""
        kind = type(value)
        if kind is Dict:
            member = self._member(value)
            if member is not None:
                return member
            kept = ((key, self._part(own, f"{where}.{key}" if where else str(key))) for key, own in value.pairs())
            return Dict.of((key, own) for key, parts in kept for own in parts)
        if kind is list or kind is tuple:
            return kind(self._all(value, where))
        if kind is Call:
            call = Call(value.function, tuple(self._all(value.args, where)), is_new=value.is_new)
            call.items = None if value.items is None else [*self._all(value.items, where)]
            call.flat = None if value.flat is None else self.value(Dict(value.flat), where).flat
            call.state = None if value.state is None else self.value(value.state, where)
            return call
        return value

    def _all(self, values: Iterable[Value], where: str) -> Iterator[Value]:
        for number, value in enumerate(values):
            yield from self._part(value, f"{where}[{number}]")

    def _part(self, value: Value, where: str) -> tuple[Value, ...]:
        """Return a value as a tuple of one, of none if it may not be in a pickle."""
        is_known = True
        if type(value) is Call:
            is_known = value.function in _PLAIN_CLASSES or value.function == NAMESPACE
        elif type(value) is Global:
            is_known = value.module == "torch" and value in PLAIN
        elif type(value) is Dict and _is_member(value):
            is_known = self._member(value) is not None
        if not is_known:
            self.left_out.append(where)
            return ()
        return (self.value(value, where),)

    def _member(self, value: Dict) -> Call | None:
        """Return the member of an enumeration that a dictionary stands for; None if it stands for none."""
        if not _is_member(value):
            return None
        (_, name), (_, own) = value.pairs()
        since = _ENUMERATIONS.get(name, {}).get(own)
        if since is None or since > self._release:
            return None
        module, _, kind = name.rpartition(".")
        return Call(Global(module, kind), (own,))


def _is_member(value: Dict) -> bool:
    """Tell whether a dictionary is what an object of Megatron's becomes: its class, and its value."""
    return value.flat[::2] == ["class", "value"] and type(value.flat[1]) is str and type(value.flat[3]) in (int, str)


def _are_arguments(value: Value) -> bool:
    return type(value) is Dict and all(_count(value.get(key)) is not None for key in ("num_layers", "hidden_size"))


def _count(value: Value) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_ITERATIONS else None


def _regrouped(groups: Iterable[Dict], *, has_shares: bool) -> Iterator[Dict]:
    """Yield groups as a run has them that shares out experts, or does not.

    Where all groups are of all parameters, experts get groups of their own with the same settings.

    Raises TargetError if they are to have the same groups as others but have other settings.
    """
    own = [*groups]
    of_experts = [group for group in own if group.get(_OF_EXPERTS) is True]
    if has_shares:
        yield from own
        yield from () if of_experts else (group.with_value(_OF_EXPERTS, True) for group in own)
        return
    settings: dict[str, str] = {}
    for group in own:
        made = group.with_value(_OF_EXPERTS, False)
        text = text_of(made.without("params"))
        first = settings.get(kind_of_group(made))
        if first is None:
            settings[kind_of_group(made)] = text
            yield made
        elif first != text:
            raise TargetError(
                "the optimizer of experts has other settings than that of other parameters",
                expected="the same, since Megatron has one for all if a rank has all experts",
                got="others in a group of the same multipliers",
                remedy="leave out --ep",
            )


def _optimizers(groups: Iterable[Dict], scaler: Value) -> Dict:
    """Return the optimizer of a run; the groups of experts are of one of their own, where there are others."""
    parts: dict[bool, list[Value]] = {}
    for group in groups:
        parts.setdefault(group.get(_OF_EXPERTS) is True, []).append(group.without("params"))
    optimizers = []
    for _, own in sorted(parts.items()) or [(False, list[Value]())]:
        optimizer = Dict(["optimizer", Dict(["param_groups", own])])
        if scaler is not None:
            optimizer.flat += ["grad_scaler", scaler]
        optimizer.flat += ["param_state_sharding_type", _RESHARDABLE]
        optimizers.append(optimizer)
    return optimizers[0] if len(optimizers) == 1 else Dict.of(enumerate(optimizers))


def _groups_in(optimizer: Dict) -> Iterator[Dict]:
    """Yield the groups of one optimizer, or of several."""
    own = optimizer.get("optimizer")
    for each in [own] if type(own) is Dict else [value.get("optimizer") for value in optimizer.flat[1::2]]:
        yield from each.get("param_groups")

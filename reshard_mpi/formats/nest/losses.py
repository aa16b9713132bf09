"""What to say of values that cannot be carried."""

from __future__ import annotations

from collections.abc import Callable

from reshard_mpi.formats.nest.trees import Call, Global, Unreadable, Value, parts

# So many parts of a value are looked into for tensors that are lost with it.
_MAX_LOOKED_INTO = 1 << 16


def described(value: Value, is_tensor: Callable[[Value], bool]) -> str:
    """Return in words what a value is that is left out, and how many tensors are lost with it."""
    if is_tensor(value):
        return "a lone tensor"
    if type(value) is Unreadable:
        return value.what
    if type(value) is Global:
        return str(value)[:200]
    if type(value) is not Call:
        return "a tensor within an object, or a value of another kind"
    tensors = _tensors_in(value, is_tensor)
    lost = f", with {tensors} tensor{'' if tensors == 1 else 's'} in it" if tensors else ""
    return f"an object of {value.function}"[:200] + lost


def _tensors_in(value: Value, is_tensor: Callable[[Value], bool]) -> int:
    """Return how many different tensors there are in a value, as far as it is looked into."""
    waiting, met = [value], {id(value)}
    tensors = 0
    while waiting and len(met) < _MAX_LOOKED_INTO:
        part = waiting.pop()
        tensors += is_tensor(part)
        for further in parts(part):
            if id(further) not in met:
                met.add(id(further))
                waiting.append(further)
    return tensors

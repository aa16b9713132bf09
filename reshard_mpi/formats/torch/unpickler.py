"""Read a pickle into inert records; nothing is executed (`load`).

The standard library's Unpickler is not safe even where it may import nothing: nine bytes make it allocate gigabytes,
and nested tuples as keys end the process. Here the memo is a list, nothing is hashed, what a pickle can make of memory
is bounded, and a name is a name. What is known are the opcodes that protocols 2 to 5 write for plain objects.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from reshard_mpi.formats.nest.nodes import BYTEARRAY, FROZENSET, LESS, SET, Call, Dict, Global, Value
from reshard_mpi.formats.torch.pickle_hooks import (
    GETATTR,
    OLD_MODULES,
    OLD_NAMES,
    PLAIN_HOOKS,
    PickleCutShortError,
    PickleError,
    PickleHooks,
    is_enum_member,
    runs_code,
)
from reshard_mpi.text import MIB

# What all objects of one pickle may take of memory, as `_COSTS` counts it: some 100,000 tensors.
BUDGET_BYTES = 112 * MIB
# Whole numbers of more bytes are in no checkpoint, and take long to be written in digits.
_MAX_INT_BYTES = 255
_MAX_GLOBAL_BYTES = 512
# What to do about a pickle that is a program.
_RUNS_CODE = "a pickle would run code if it were loaded"
_PROGRAM = "do not load it: it is no checkpoint but a program; ask who made it for the tensors alone, as safetensors"
_BINFLOAT = struct.Struct(">d")


# About what the object that an opcode makes takes of memory, with its place on the stack and in its container.
_COSTS = [8] * 256
for _opcode, _cost in {
    **dict.fromkeys(b"hjKN)\x88\x89", 16),
    **dict.fromkeys(b"GJM\x8a\x8b", 40),
    **dict.fromkeys(b"XCBT\x8c\x8d\x8e\x96", 64),
    **dict.fromkeys(b"(", 72),
    **dict.fromkeys(b"])t\x85\x86\x87", 72),
    **dict.fromkeys(b"}\x8f\x91", 120),
    **dict.fromkeys(b"R\x81\x92", 112),
    **dict.fromkeys(b"c\x93", 200),
}.items():
    _COSTS[_opcode] = _cost
_OUT_OF_ORDER_COST = 100
# How far a pickle is read until it is looked at what its objects take: little can come of so few bytes.
_LOOKED_AT_BYTES = 4096


def load(
    data: bytes, start: int = 0, hooks: PickleHooks = PLAIN_HOOKS, budget_bytes: int = BUDGET_BYTES
) -> tuple[Value, int]:
    """Read the pickle that begins at byte `start` of `data`; return its object and where it ends.

    Raises PickleCutShortError if it has no end, PickleError for anything that no checkpoint has: unknown opcodes, what
    runs code, more than fits `budget_bytes`.
    """
    with without_collections():
        return _SafeUnpickler(data, start, hooks, budget_bytes).run()


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector while a million new objects are made that are no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _SafeUnpickler:
    """One pickle while it is read."""

    def __init__(self, data: bytes, start: int, hooks: PickleHooks, budget_bytes: int) -> None:
        self._data = data
        self._start = start
        self._hooks = hooks
        self._budget_bytes = budget_bytes
        self._globals: dict[tuple[str, str], Global] = {}
        # Memo entries whose number is not the next one: a real pickler has left some out.
        self._out_of_order: dict[int, Value] = {}

    def run(self) -> tuple[Value, int]:
        data, size, costs = self._data, len(self._data), _COSTS
        calls, objects, persistent = self._hooks.calls, self._hooks.objects, self._hooks.persistent
        stack: list[Value] = []
        outer: list[list[Value]] = []
        memo: list[Value] = []
        spent, offset = 0, self._start
        looked_at = min(size, offset + _LOOKED_AT_BYTES)
        try:
            while True:
                if offset >= looked_at:
                    if offset >= size:
                        raise PickleCutShortError(size)
                    if spent > self._budget_bytes:
                        problem = "the objects of a pickle take too much memory"
                        raise PickleError(problem, offset, f"over {spent} bytes", LESS)
                    looked_at = min(size, offset + _LOOKED_AT_BYTES)
                opcode = data[offset]
                offset += 1
                spent += costs[opcode]
                if opcode == 0x71 or opcode == 0x72:  # BINPUT, LONG_BINPUT
                    if opcode == 0x71:
                        number = data[offset]
                        offset += 1
                    else:
                        number = int.from_bytes(data[offset : offset + 4], "little")
                        offset += 4
                    if number == len(memo):
                        memo.append(stack[-1])
                    else:
                        spent += _OUT_OF_ORDER_COST
                        self._remember(memo, number, stack[-1])
                elif opcode == 0x68 or opcode == 0x6A:  # BINGET, LONG_BINGET
                    if opcode == 0x68:
                        number = data[offset]
                        offset += 1
                    else:
                        number = int.from_bytes(data[offset : offset + 4], "little")
                        offset += 4
                    stack.append(memo[number] if number < len(memo) else self._remembered(number, offset))
                elif opcode == 0x4B:  # BININT1
                    stack.append(data[offset])
                    offset += 1
                elif opcode == 0x58 or opcode == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
                    if opcode == 0x58:
                        length, offset = int.from_bytes(data[offset : offset + 4], "little"), offset + 4
                    else:
                        length, offset = data[offset], offset + 1
                    text, offset, cost = self._text(offset, length)
                    spent += cost
                    stack.append(text)
                elif opcode == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                elif opcode == 0x28:  # MARK
                    outer.append(stack)
                    stack = []
                elif opcode == 0x74:  # TUPLE
                    values = tuple(stack)
                    stack = outer.pop()
                    stack.append(values)
                elif opcode == 0x52 or opcode == 0x81:  # REDUCE, NEWOBJ
                    args = stack.pop()
                    function = stack[-1]
                    if type(function) is not Global or type(args) is not tuple:
                        raise PickleError("a pickle calls what is no name", offset)
                    if function == GETATTR and not is_enum_member(args):
                        raise PickleError(_RUNS_CODE, offset, str(function), _PROGRAM)
                    maker = calls.get(function)
                    if maker is not None:
                        stack[-1] = maker(*args)
                        continue
                    read_objects = objects.get(function) if opcode == 0x81 and not args else None
                    read = read_objects(data, offset, memo) if read_objects is not None else None
                    if read is None:
                        stack[-1] = Call(function, args, is_new=opcode == 0x81)
                    else:
                        stack[-1:], offset = read.values, read.end
                        memo += read.memoized
                        spent += read.cost_bytes
                elif opcode == 0x51:  # BINPERSID
                    stack[-1] = persistent(stack[-1])
                elif opcode == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif opcode == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif opcode == 0x87:  # TUPLE3
                    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                elif opcode == 0x89:  # NEWFALSE
                    stack.append(False)
                elif opcode == 0x88:  # NEWTRUE
                    stack.append(True)
                elif opcode == 0x4E:  # NONE
                    stack.append(None)
                elif opcode == 0x4D:  # BININT2
                    stack.append(int.from_bytes(data[offset : offset + 2], "little"))
                    offset += 2
                elif opcode == 0x4A:  # BININT
                    stack.append(int.from_bytes(data[offset : offset + 4], "little", signed=True))
                    offset += 4
                elif opcode == 0x94:  # MEMOIZE
                    memo.append(stack[-1])
                elif opcode == 0x75:  # SETITEMS
                    pairs = stack
                    stack = outer.pop()
                    self._set_items(stack[-1], pairs, offset)
                elif opcode == 0x73:  # SETITEM
                    value = stack.pop()
                    key = stack.pop()
                    self._set_items(stack[-1], [key, value], offset)
                elif opcode == 0x65 or opcode == 0x90:  # APPENDS, ADDITEMS
                    items = stack
                    stack = outer.pop()
                    self._append(stack[-1], items, offset)
                elif opcode == 0x61:  # APPEND
                    value = stack.pop()
                    self._append(stack[-1], [value], offset)
                elif opcode == 0x62:  # BUILD
                    state = stack.pop()
                    self._build(stack[-1], state, offset)
                elif opcode == 0x7D:  # EMPTY_DICT
                    stack.append(Dict())
                elif opcode == 0x5D:  # EMPTY_LIST
                    stack.append([])
                elif opcode == 0x47:  # BINFLOAT
                    if offset + 8 > size:
                        raise PickleCutShortError(offset)
                    stack.append(_BINFLOAT.unpack_from(data, offset)[0])
                    offset += 8
                elif opcode == 0x8A or opcode == 0x8B:  # LONG1, LONG4
                    width = 1 if opcode == 0x8A else 4
                    length, offset = int.from_bytes(data[offset : offset + width], "little"), offset + width
                    if length > _MAX_INT_BYTES:
                        raise PickleError("a number in a pickle is too long", offset, f"{length} bytes")
                    stack.append(int.from_bytes(data[offset : offset + length], "little", signed=True))
                    spent += length
                    offset += length
                elif opcode == 0x63:  # GLOBAL
                    module, offset = self._line(offset)
                    name, offset = self._line(offset)
                    stack.append(self._global(module, name, offset))
                elif opcode == 0x93:  # STACK_GLOBAL
                    name = stack.pop()
                    stack[-1] = self._global(stack[-1], name, offset)
                elif opcode == 0x80:  # PROTO
                    if data[offset] > 5:
                        raise PickleError("a pickle has an unknown protocol", offset, str(data[offset]))
                    offset += 1
                elif opcode == 0x2E:  # STOP
                    if outer or len(stack) != 1:
                        raise PickleError("a pickle ends with something left on its stack", offset)
                    return stack[0], offset
                elif opcode == 0x95:  # FRAME
                    offset += 8
                elif opcode in _BYTES_WIDTHS:
                    width = _BYTES_WIDTHS[opcode]
                    length, offset = int.from_bytes(data[offset : offset + width], "little"), offset + width
                    if offset + length > size:
                        raise PickleCutShortError(offset)
                    spent += length
                    content = bytes(data[offset : offset + length])
                    offset += length
                    stack.append(Call(BYTEARRAY, (content,)) if opcode == _BYTEARRAY8 else content)
                elif opcode == 0x8D:  # BINUNICODE8
                    length, offset = int.from_bytes(data[offset : offset + 8], "little"), offset + 8
                    text, offset, cost = self._text(offset, length)
                    spent += cost
                    stack.append(text)
                elif opcode == 0x8F:  # EMPTY_SET
                    stack.append(Call(SET, ([],)))
                elif opcode == 0x91:  # FROZENSET
                    made_of = stack
                    stack = outer.pop()
                    stack.append(Call(FROZENSET, (made_of,)))
                elif opcode == 0x92:  # NEWOBJ_EX
                    stack[-3:] = [self._new_with_names(stack[-3], stack[-2], stack[-1], offset)]
                elif opcode == 0x30:  # POP: of objects that are their own parts
                    if stack:
                        stack.pop()
                    else:
                        stack = outer.pop()
                elif opcode == 0x31:  # POP_MARK
                    stack = outer.pop()
                else:
                    raise PickleError("a pickle has an opcode that no checkpoint has", offset, f"0x{opcode:02x}")
        except IndexError:
            if offset >= size:
                raise PickleCutShortError(offset) from None
            raise PickleError("a pickle takes what is not on its stack", offset) from None
        except (ValueError, TypeError) as error:
            raise PickleError("a pickle calls something with unusual arguments", offset, str(error)[:200]) from None

    def _remember(self, memo: list[Value], number: int, value: Value) -> None:
        if number < len(memo):
            memo[number] = value
        else:
            self._out_of_order[number] = value

    def _remembered(self, number: int, offset: int) -> Value:
        if number not in self._out_of_order:
            raise PickleError("a pickle refers to an object that it has not named", offset, f"number {number}")
        return self._out_of_order[number]

    def _text(self, offset: int, length_bytes: int) -> tuple[str, int, int]:
        """Return the text of a number of bytes at `offset`, its end, and the memory it takes."""
        end = offset + length_bytes
        if end > len(self._data):
            raise PickleCutShortError(offset)
        try:
            text = str(self._data[offset:end], "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise PickleError("a text in a pickle is no UTF-8", offset) from None
        # A single character beyond Latin widens all others.
        return text, end, length_bytes if text.isascii() else 4 * length_bytes

    def _line(self, offset: int) -> tuple[str, int]:
        content = bytes(self._data[offset : offset + _MAX_GLOBAL_BYTES])
        end = content.find(b"\n")
        if end < 0:
            if len(content) < _MAX_GLOBAL_BYTES:
                raise PickleCutShortError(offset)
            raise PickleError("a name in a pickle is too long", offset, f"more than {_MAX_GLOBAL_BYTES} bytes")
        try:
            return content[:end].decode(), offset + end + 1
        except UnicodeDecodeError:
            raise PickleError("a name in a pickle is no UTF-8", offset) from None

    def _global(self, module: Value, name: Value, offset: int) -> Global:
        if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > _MAX_GLOBAL_BYTES:
            raise PickleError("a name in a pickle is no text, or too long", offset)
        resolved = self._globals.get((module, name))
        if resolved is None:
            resolved = OLD_NAMES.get(Global(module, name)) or Global(OLD_MODULES.get(module, module), name)
            self._globals[module, name] = resolved
            if runs_code(resolved):
                raise PickleError(_RUNS_CODE, offset, f"{module}.{name}"[:200], _PROGRAM)
        return resolved

    def _new_with_names(self, function: Value, args: Value, names: Value, offset: int) -> Call:
        if type(function) is not Global or type(args) is not tuple or type(names) is not Dict:
            raise PickleError("a pickle calls what is no name", offset)
        if names.flat:
            raise PickleError("a pickle calls something with named arguments", offset, str(function))
        return Call(function, args, is_new=True)

    def _set_items(self, target: Value, pairs: list[Value], offset: int) -> None:
        if len(pairs) % 2:
            raise PickleError("a pickle sets a key without a value", offset)
        if type(target) is Dict:
            target.flat += pairs
        elif type(target) is Call:
            target.flat = _joined(target.flat, pairs)
        else:
            raise PickleError("a pickle sets keys of what is no dictionary", offset)

    def _append(self, target: Value, items: list[Value], offset: int) -> None:
        if type(target) is list:
            target += items
        elif type(target) is Call:
            if target.function == SET and target.args and type(target.args[0]) is list:
                target.args[0].extend(items)
            else:
                target.items = _joined(target.items, items)
        else:
            raise PickleError("a pickle appends to what is no list", offset)

    def _build(self, target: Value, state: Value, offset: int) -> None:
        if type(target) is not Call or target.state is not None:
            raise PickleError("a pickle gives attributes to what takes none", offset)
        target.state = state


# Opcodes of bytes, and how many bytes their lengths have.
_BYTEARRAY8 = 0x96
_BYTES_WIDTHS = {0x43: 1, 0x42: 4, 0x8E: 8, _BYTEARRAY8: 8}


def _joined(first: list[Value] | None, further: list[Value]) -> list[Value]:
    """Append to `first` without copying it when it is long already."""
    if first is None:
        return further
    first += further
    return first

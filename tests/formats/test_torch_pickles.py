"""Pickles without executing them: what the standard pickler writes is read as it is meant, all else is refused."""

from __future__ import annotations

import collections
import pickle
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from reshard_mpi.formats.nest.nodes import BYTEARRAY, FROZENSET, SET, Call, Dict, Global
from reshard_mpi.formats.torch import pickler
from reshard_mpi.formats.torch.pickle_hooks import PickleCutShortError, PickleError
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.text import MIB

BUILTIN = {SET: set, FROZENSET: frozenset, BYTEARRAY: bytearray, Global("builtins", "complex"): complex}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.binary(max_size=5).map(bytearray),
    st.frozensets(st.integers(0, 5), max_size=3),
    st.sets(st.integers(0, 5), max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda parts: st.one_of(
        st.lists(parts, max_size=6),
        st.lists(parts, max_size=6).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), parts, max_size=6),
        st.dictionaries(st.text(max_size=5), parts, max_size=6).map(collections.OrderedDict),
    ),
    max_leaves=20,
)


def made(tree: Any) -> Any:
    """Return what a tree describes, made by an evaluation of its own."""
    match tree:
        case Dict():
            return {made(key): made(value) for key, value in tree.pairs()}
        case Call(function=Global("collections", "OrderedDict"), args=()):
            return collections.OrderedDict((made(key), made(value)) for key, value in tree.pairs())
        case Call():
            return BUILTIN[tree.function](*map(made, tree.args))
        case list():
            return [made(item) for item in tree]
        case tuple() if type(tree) is tuple:
            return tuple(made(item) for item in tree)
    return tree


def same(one: Any, other: Any) -> bool:
    return pickle.dumps(one, 2) == pickle.dumps(other, 2) or (type(one) is type(other) and one == other)


@given(value=VALUES, protocol=st.integers(2, 5))
def test_it_reads_what_the_standard_pickler_writes(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    tree, end = load(data)
    assert end == len(data)
    assert same(made(tree), value)


@given(value=VALUES)
def test_the_standard_unpickler_reads_what_we_write(value: Any) -> None:
    data = pickler.dumps(load(pickle.dumps(value, 2))[0])
    assert same(pickle.loads(data), value)
    assert same(made(load(data)[0]), value)


@given(value=VALUES, at=st.integers(0), byte=st.integers(0, 255))
def test_damaged_pickles_are_read_or_refused(value: Any, at: int, byte: int) -> None:
    data = bytearray(pickle.dumps(value, 2))
    data[at % len(data)] = byte
    try:
        load(bytes(data))
    except PickleError:
        return


@given(value=VALUES, protocol=st.integers(2, 5))
def test_a_pickle_that_is_cut_short_is_known_as_such(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    for end in range(0, len(data), 1 + len(data) // 50):
        with pytest.raises(PickleCutShortError):
            load(data[:end])


def test_pickles_in_a_row() -> None:
    data = pickle.dumps(1, 2) + pickle.dumps([2], 4) + b"rest"
    first, at = load(data)
    second, at = load(data, at)
    assert (first, second, data[at:]) == (1, [2], b"rest")


def test_objects_become_records() -> None:
    counted = collections.Counter("aab")
    tree, _ = load(pickle.dumps(counted, 2))
    assert (type(tree), tree.function) == (Call, Global("collections", "Counter"))
    queue, _ = load(pickle.dumps(collections.deque([1, 2], 5), 2))
    assert (queue.args, queue.items) == (((), 5), [1, 2])
    default, _ = load(pickle.dumps(collections.defaultdict(list, {"a": [1]}), 2))
    assert (default.args, default.flat) == ((Global("builtins", "list"),), ["a", [1]])


def proto(body: bytes) -> bytes:
    return b"\x80\x02" + body


HOSTILE = {
    "os.system": (proto(b"cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "would run code"),
    "_io.FileIO": (proto(b"c_io\nFileIO\n)R."), "would run code"),
    "posix.system": (proto(b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R."), "would run code"),
    "nt.system": (proto(b"cnt\nsystem\nX\x04\x00\x00\x00true\x85R."), "would run code"),
    "subprocess": (proto(b"csubprocess\nPopen\n]\x85R."), "would run code"),
    "builtins.eval": (proto(b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R."), "would run code"),
    "Python 2's eval": (proto(b"c__builtin__\neval\nX\x01\x00\x00\x001\x85R."), "would run code"),
    "getattr": (proto(b"cbuiltins\ngetattr\n)R."), "would run code"),
    "an import": (proto(b"cimportlib\nimport_module\nX\x02\x00\x00\x00os\x85R."), "would run code"),
    "a module of modules": (proto(b"cimportlib.util\nfind_spec\n)R."), "would run code"),
    "sys.modules": (proto(b"csys\nmodules\n."), "would run code"),
    "a name from the stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93)R.", "would run code"),
    "a name with a path": (b"\x80\x04\x8c\x08builtins\x8c\x0dobject.__init\x93)R.", "would run code"),
    "a call of a call": (proto(b"ccollections\nOrderedDict\n)R)R."), "calls what is no name"),
    "a call of a text": (proto(b"X\x01\x00\x00\x00a)R."), "calls what is no name"),
    "arguments that are no tuple": (proto(b"ccollections\nOrderedDict\n]R."), "calls what is no name"),
    "named arguments": (b"\x80\x04ccollections\nOrderedDict\n)}X\x01\x00\x00\x00aK\x01s\x92.", "named arguments"),
    "BINGET of nothing": (proto(b"h\x00."), "has not named"),
    "LONG_BINGET of nothing": (proto(b"j\xff\xff\xff\xff."), "has not named"),
    "an empty stack": (proto(b"."), "left on its stack"),
    "too much on the stack": (proto(b"NN."), "left on its stack"),
    "a mark left": (proto(b"(N."), "left on its stack"),
    "a pop of nothing": (proto(b"0."), "not on its stack"),
    "a tuple without mark": (proto(b"Nt."), "not on its stack"),
    "a key without value": (proto(b"}(Nu."), "a key without a value"),
    "keys of a list": (proto(b"](NNu."), "no dictionary"),
    "appended to a dictionary": (proto(b"}(Ne."), "no list"),
    "attributes of a list": (proto(b"]}b."), "attributes"),
    "attributes twice": (proto(b"ccollections\nOrderedDict\n)R}b}b."), "attributes"),
    "a persistent id": (proto(b"X\x01\x00\x00\x00aQ."), "unusual arguments"),
    "an opcode of protocol 0": (b"I1\n.", "has an opcode"),
    "an extension": (proto(b"\x82\x01."), "has an opcode"),
    "a protocol to come": (b"\x80\x06N.", "unknown protocol"),
    "a number of 2 GB": (proto(b"\x8b\xff\xff\xff\x7f."), "too long"),
    "a name without end": (proto(b"c" + b"a" * 5000), "too long"),
    "a text that is none": (proto(b"X\x01\x00\x00\x00\xff."), "no UTF-8"),
    "bytes in another encoding": (proto(b"c_codecs\nencode\nX\x00\x00\x00\x00X\x03\x00\x00\x00rot\x86R."), "unusual"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name: str) -> None:
    data, problem = HOSTILE[name]
    with pytest.raises(PickleError, match=problem):
        load(data)


BOMBS = {
    "a memo entry far away": proto(b"Nr\xff\xff\xff\xff."),
    "a hundred thousand tuples in each other": proto(b")" + b"\x85" * 100_000 + b"."),
    "a hundred thousand as a key": proto(b"})" + b"\x85" * 100_000 + b"Ns."),
    "a list of lists": proto(b"(" + b"]" * 100_000 + b"t."),
    "dictionaries": proto(b"(" + b"}" * 100_000 + b"t."),
    "marks": proto(b"(" * 100_000),
    "the same again": proto(b"(]q\x00" + b"h\x00" * 200_000 + b"t."),
    "entries out of order": proto(
        b"N" + b"".join(b"r" + (at * 7 + 5).to_bytes(4, "little") for at in range(1 << 14)) + b"."
    ),
    "calls": proto(b"ccollections\nOrderedDict\nq\x00" + b"h\x00)R" * 60_000 + b"."),
    "a text of 4 GB": proto(b"X\xff\xff\xff\xff."),
    "bytes of 8 EB": b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a frame of 8 EB": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
}


@pytest.mark.parametrize("name", few(1, BOMBS))
def test_what_a_pickle_takes_of_memory_is_bounded(name: str) -> None:
    data = BOMBS[name]
    tracemalloc.start()
    try:
        load(data, budget_bytes=2 * MIB)
    except PickleError:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 4 * MIB


def test_doubled_tuples_as_a_key_are_not_hashed() -> None:
    data = proto(b"}" + b")\x85" + b"q\x00h\x00\x86" * 60 + b"Ns.")
    assert type(load(data)[0]) is Dict

"""Tensors that are read many at a time: the same as when the interpreter reads them opcode by opcode."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import torch_peer
from support.examples import many

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.nest.nodes import Call, Dict, Value
from reshard_mpi.formats.torch.bulk_tensors import Storages, TensorRunReader
from reshard_mpi.formats.torch.pickle_hooks import PickleError, PickleHooks
from reshard_mpi.formats.torch.tensors import CALLS, REBUILD
from reshard_mpi.formats.torch.unpickler import load
from reshard_mpi.testing.sample_tensors import SampleTensor

TYPES = st.sampled_from(["float32", "bfloat16", "int8", "bool", "uint16"])
SHAPES = st.sampled_from([(), (3,), (2, 3), (2, 3, 1), (1, 2, 1, 2), (1, 1, 1, 1, 2), (0, 4), (300,), (70_000, 0)])


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    """Draw the pickle of a dictionary with so many tensors that most are written alike, and other things between."""
    kinds = draw(st.lists(st.tuples(TYPES, SHAPES), min_size=1, max_size=3))
    odd = st.one_of(st.none(), st.text(max_size=4), st.integers(), st.lists(st.integers(), max_size=2))
    entries: dict[str, Any] = {"": [str(number) for number in range(260)]}  # so that the memo has long numbers
    for number in range(draw(st.integers(0, 30))):
        dtype, shape = draw(st.sampled_from(kinds))
        made: Any = torch_peer.tensor(SampleTensor.random("", BY_NAME[dtype], shape), str(number))
        if draw(st.integers(0, 9)) == 0:
            made = draw(odd)
        elif entries and draw(st.integers(0, 9)) == 0:
            made = draw(st.sampled_from(list(entries.values())))
        entries[f"{number}{draw(st.sampled_from(['', 'w', 'é' * 3, 'n' * 300]))}"] = made
    return torch_peer.dumps(draw(st.sampled_from([entries, {"nested": entries, "last": 1}, list(entries.values())])))[0]


def read(data: bytes, *, rows: bool) -> Any:
    """Return what a pickle holds and names, or that it is refused."""
    storages = Storages()
    readers = storages.readers if rows else PickleHooks(storages.readers.persistent, CALLS)
    try:
        root, end = load(data, readers=readers)
    except PickleError:
        return None
    return shown(root), storages.by_key, end


def shown(value: Value, above: tuple[int, ...] = ()) -> Any:
    """Return a tree as values that can be compared; above: what it lies in, since a damaged one may hold itself."""
    if id(value) in above:
        return "above", above.index(id(value))
    if type(value) in (Dict, Call, list, tuple):
        above = (*above, id(value))
    if type(value) is Dict:
        return "dict", [shown(part, above) for part in value.flat]
    if type(value) is Call:
        parts = (value.args, value.items, value.flat, value.state)
        return value.function, [shown(part, above) for part in parts]
    return [shown(part, above) for part in value] if type(value) in (list, tuple) else value


@many(200)
@given(pickles())
def test_both_ways_come_to_the_same(data: bytes) -> None:
    assert read(data, rows=True) == read(data, rows=False) is not None


@many(400)
@given(data=pickles(), at=st.integers(0, 1 << 20), value=st.one_of(st.integers(0, 255), st.sampled_from(b"qrhjKMX(tR")))
def test_both_ways_come_to_the_same_of_what_is_damaged(data: bytes, at: int, value: int) -> None:
    changed = bytearray(data)
    changed[-1 - at % min(len(data), 4000)] = value
    assert read(bytes(changed), rows=True) == read(bytes(changed), rows=False)


def test_most_tensors_are_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        f"{number}.{kind}": torch_peer.tensor(SampleTensor.random("", BY_NAME[kind], (2, number % 3)), f"{number}{at}")
        for number in range(500)
        for at, kind in enumerate(("float32", "int64"))
    }
    data, _ = torch_peer.dumps(tensors)
    found: list[int] = []

    class Counting(TensorRunReader):
        def __call__(self, data: bytes, at: int, memo: Any) -> Any:
            read = super().__call__(data, at, memo)
            found.append(0 if read is None else sum(type(value) is not str for value in read.values))
            return read

    storages = Storages()
    known = storages.readers.rows[REBUILD]._known  # type: ignore[attr-defined]
    load(data, readers=PickleHooks(storages.readers.persistent, CALLS, rows={REBUILD: Counting(known)}))
    assert sum(found) > 940 and len(storages.by_key) == 1000


def test_a_storage_of_two_sizes_is_refused() -> None:
    entries = {str(at): torch_peer.tensor(SampleTensor.random("", BY_NAME["int8"], (3,)), str(at)) for at in range(60)}
    entries["x"] = torch_peer.tensor(SampleTensor.random("", BY_NAME["int8"], (4,)), "y")
    data, _ = torch_peer.dumps({"": [str(number) for number in range(260)], **entries})
    spoiled = data.replace(b"X\x01\x00\x00\x00y", b"X\x01\x00\x00\x007")
    assert spoiled != data
    for rows in (True, False):
        assert read(data, rows=rows) is not None and read(spoiled, rows=rows) is None


def test_names_of_many_bytes_take_time_by_their_length() -> None:
    """A pattern that looked for the end of each would take the square of their length."""
    row = b"h\x00((" + b"X\xff\x00\x00\x00" + b"a" * 255
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00" + row * 20_000 + b"."
    seconds = []
    for rows in (False, True):
        begin = time.process_time()
        assert read(data, rows=rows) is None
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 20 * seconds[0], "taken at once they cost far more than one by one"

"""Small tensors moved many at a time: what numpy cuts, whatever lies between them, and whoever fills which part."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many
from support.finals import Finals
from support.float_oracle import became

from reshard_mpi.engine import batches, shard_transfer
from reshard_mpi.engine.shard_transfer import OpenTarget, last_of, write_shard
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest, ShardIdentity
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.planning.made_tensors import converted
from reshard_mpi.planning.rank_plan import Group, Limits, PlannedTensors, RankPlan, ReadGroup
from reshard_mpi.sharding.box import Box

GAP = b"\xee"
# Types in the sources, and in the target.
TYPES = (
    *(("uint16", "uint16"), ("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float32")),
    *(("float32", "float8_e4m3fn"), ("float8_e5m2", "float64"), ("float16", "bfloat16")),
)


class Made:
    """A plan of many small tensors, with the files it is about, and what the target must be."""

    def __init__(self, folder: Path, data: st.DataObject) -> None:
        self._folder, self._data = folder, data
        self.groups: list[Group] = []
        self._contents: list[list[bytes]] = []
        self.overflows: dict[str, int] = {}
        for number in range(data.draw(st.integers(1, 3))):
            self._add_group(number)
        order = [number for number, group in enumerate(self.groups) for _ in group.names]
        self.tensors = PlannedTensors(self.groups, data.draw(st.permutations(order)))
        self.plan = RankPlan(0, 0, ShardIdentity(0, 1, ""), self.tensors, {}, (), (), (), (), frozenset())
        self.target, self.expected = self._target()

    def _add_group(self, number: int) -> None:
        """Draw tensors that are alike: rows of two files, of each of which some columns are taken, maybe turned."""
        draw = self._data.draw
        rows, columns, count = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
        stored, dtype = (BY_NAME[name] for name in draw(st.sampled_from(TYPES)))
        turned, wide = draw(st.booleans()), columns + draw(st.integers(0, 3))
        first = draw(st.integers(0, wide - columns))
        names = [f"g{number}.{index}" for index in range(count)]
        box = Box.whole((columns, 2 * rows) if turned else (2 * rows, columns))
        routes, halves = [], []
        for half in range(2):
            held = Box((half * rows, 0), ((half + 1) * rows, wide))
            region = Box((half * rows, first), ((half + 1) * rows, first + columns))
            raw, size = np.dtype(f"u{stored.itemsize_bytes}"), stored.itemsize_bytes * rows * wide
            arrays = [np.frombuffer(os.urandom(size), raw).reshape(rows, wide) for _ in names]
            taken = zip(names, (array[:, first : first + columns] for array in arrays))
            halves.append([self._converted(name, array, stored, dtype) for name, array in taken])
            tensors, numbers = self._file(f"source_{number}_{half}", arrays, stored)
            tensors = tensors if stored == dtype else converted(tensors, dtype)
            to, order = Box((half * rows, 0), ((half + 1) * rows, columns)), None
            if turned:
                to, order = Box((0, half * rows), (columns, (half + 1) * rows)), (1, 0)
            routes.append(ReadGroup(half, held, region, tensors, numbers, to, order))
        kind = TensorType.of_box(dtype, box, box.shape)
        self.groups.append(Group(kind, names, tuple(routes)))
        wholes = [np.concatenate(pair) for pair in zip(*halves)]
        self._contents.append([(whole.T if turned else whole).tobytes() for whole in wholes])

    def _converted(self, name: str, array: np.ndarray, stored: DType, dtype: DType) -> np.ndarray:
        """Return what elements become, one by one; count those that are too large."""
        if stored == dtype:
            return array
        elements = [became(int(bits), stored.name, dtype.name) for bits in array.reshape(-1)]
        too_large = sum(element.too_large for element in elements)
        if too_large:
            self.overflows[name] = self.overflows.get(name, 0) + too_large
        bits = np.array([element.bits for element in elements], f"u{dtype.itemsize_bytes}")
        return bits.reshape(array.shape)

    def _file(self, name: str, arrays: list[np.ndarray], stored: DType) -> tuple[TensorTable, list[int]]:
        """Write arrays to a file in any order, with gaps; return them, and the number of each."""
        path, draw = self._folder / name, self._data.draw
        order = draw(st.permutations(range(len(arrays))))
        tensors, content, number_of = TensorTable(str(path)), b"", {}
        kind = tensors.kind(TensorType(stored, arrays[0].shape))
        for at in order:
            content += b"-" * draw(st.integers(0, 9))
            number_of[at] = len(tensors)
            tensors.add(f"{at}", kind, len(content))
            content += arrays[at].tobytes()
        path.write_bytes(content)
        return tensors, [number_of[at] for at in range(len(arrays))]

    def _target(self) -> tuple[Manifest, bytes]:
        """Reserve the target: tensors in order with gaps, one of them in two pieces."""
        path, draw = self._folder / "target", self._data.draw
        tensors, empty, full = TensorTable(str(path)), b"", b""
        places = zip(self.tensors.group_of, self.tensors.place_in_group)
        for index, (number, place) in enumerate(places):
            gap = GAP * draw(st.integers(0, 6))
            payload, name = self._contents[number][place], self.groups[number].names[place]
            kind = self.groups[number].kind
            start = len(full) + len(gap)
            empty, full = empty + gap + bytes(len(payload)), full + gap + payload
            if index == 1 and len(payload) > 2:
                ranges = ByteRange(str(path), start, 3), ByteRange(str(path), start + 3, len(payload) - 3)
                tensors.add_entry(TensorEntry(name, kind.dtype, kind.box.shape, ByteRanges(ranges)))
            else:
                tensors.add(name, tensors.kind(TensorType(kind.dtype, kind.box.shape)), start)
        path.write_bytes(empty + GAP)
        return Manifest(str(path), "none", tensors), full + GAP


@many(75)
@given(data=st.data())
def test_what_is_moved_many_at_a_time(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        made = Made(Path(folder), data)
        patch.setattr(shard_transfer, "_FEW_COPIES", 0)
        patch.setattr(batches, "_MAX_RUNS", data.draw(st.sampled_from([1, 4, 1 << 16])))
        patch.setattr(batches, "_CONVERTED_BYTES", data.draw(st.sampled_from([1, 40, 1 << 20])))
        patch.setattr(batches, "_WRITTEN_TOGETHER_BYTES", data.draw(st.sampled_from([0, 1 << 14])))
        patch.setattr(batches, "_LITTLE_BYTES", data.draw(st.sampled_from([0, 64 << 10])))
        limits = Limits(data.draw(st.sampled_from([256, 4096])), data.draw(st.sampled_from([64, 4096])))
        size = len(made.expected)
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=2)))
        spans = [*itertools.pairwise([0, *cuts, size])] if cuts else [None]
        moved: list[int] = []
        overflows: dict[str, int] = {}
        descriptor, finals = os.open(made.target.path, os.O_RDWR), Finals(made.target.path)
        try:
            for span in data.draw(st.permutations(spans)):
                plan, target = made.plan, made.target
                opened = OpenTarget(plan, target, descriptor, span)
                traffic = last_of(write_shard(opened, limits=limits, on_bytes=moved.append, staging=finals))
                for name, count in traffic.overflows.items():
                    overflows[name] = overflows.get(name, 0) + count
        finally:
            os.close(descriptor)
        assert Path(made.target.path).read_bytes() == made.expected
        finals.assert_each_once(made.target.tensors.payload_spans())
        assert sum(moved) == made.plan.written_bytes
        assert overflows == made.overflows


def test_a_source_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    from reshard_mpi.errors import ShardError

    box, names = Box.whole((8,)), [f"w{index}" for index in range(600)]
    kind, source, target = (
        TensorType(BY_NAME["uint8"], (8,)),
        TensorTable(str(tmp_path / "s")),
        TensorTable(str(tmp_path / "t")),
    )
    for tensors in (source, target):
        number = tensors.kind(kind)
        for index, name in enumerate(names):
            tensors.add(name, number, 8 * index)
    (tmp_path / "s").write_bytes(bytes(8 * 300))
    (tmp_path / "t").write_bytes(bytes(8 * 600))
    spec = TensorType.of_box(BY_NAME["uint8"], box, (8,))
    planned = PlannedTensors([Group(spec, names, (ReadGroup(0, box, box, source, range(600)),))], [0] * 600)
    plan = RankPlan(0, 0, ShardIdentity(0, 1, ""), planned, {}, (), (), (), (), frozenset())
    assert shard_transfer.are_many(planned)
    descriptor = os.open(tmp_path / "t", os.O_RDWR)
    try:
        with pytest.raises(ShardError, match="shorter") as caught:
            manifest = Manifest(str(tmp_path / "t"), "none", target)
            opened = OpenTarget(plan, manifest, descriptor)
            last_of(write_shard(opened, limits=Limits(1 << 21, 1 << 24), on_bytes=lambda _: None))
    finally:
        os.close(descriptor)
    assert str(tmp_path / "s") in str(caught.value)

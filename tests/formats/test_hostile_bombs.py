"""Files that cost nothing to make and would cost much to read: each is refused by name, with little work, in 64 MiB.

Every one is read by a process of its own (`hostile_child.py`), with a time-out, so that a defect is a failure and not
the end of the tests.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import hdf5_peer
from support.hostile import MAX_WORK, opened_elsewhere, read_by_child
from support.hostile_hdf5 import groups_that_share_members, soft_links_that_multiply

from reshard_mpi.formats import hdf5
from reshard_mpi.formats.ckpt.wire import encode_header
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.formats.structure import MAX_TENSORS
from reshard_mpi.protobuf_wire import encode_length, encode_varint
from reshard_mpi.sharding.value_checks import MAX_FILE_BYTES
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents
from reshard_mpi.text import MIB

GROWTH_BYTES = 64 << 20

Make = Callable[[Path], None]
CASES: dict[str, tuple[str, str, str, Make]] = {}


def bomb(kind: str, name: str, message: str) -> Callable[[Make], Make]:
    """Add a case: `kind` of reading, name of the file, pattern of the error's problem."""

    def add(make: Make) -> Make:
        CASES[make.__name__] = kind, name, message, make
        return make

    return add


# .ckpt


@bomb("locate", "w.ckpt", "too much memory")
def pieces_with_long_names(path: Path) -> None:
    piece = encode_header("n" * 4096, (1 << 40,), "Int8", 1) + b"x"
    path.write_bytes(piece * 30_000)


@bomb("locate", "w.ckpt", "too much memory")
def long_shapes(path: Path) -> None:
    piece = encode_header("w", (1 << 40,) * 32, "Int8", 1) + b"x"
    path.write_bytes(piece * 60_000)


@bomb("locate", "w.ckpt", "too much memory")
def strings_without_end(path: Path) -> None:
    text = "🜁".encode("utf-32-le") * (1 << 18)
    path.write_bytes(b"".join(encode_header(f"s{number}", (0,), "str", len(text)) + text for number in range(80)))


@bomb("locate", "w.ckpt", "too many dimensions")
def a_thousand_million_dimensions(path: Path) -> None:
    tensor = encode_length(1, 10**9)
    value = encode_length(1, 1) + b"w" + encode_length(2, len(tensor) + 10**9) + tensor
    head = encode_length(1, len(value) + 10**9) + value
    path.write_bytes(head + b"\x01" * 100)
    os.truncate(path, len(head) + 10**9)


# HDF5, foreign


@bomb("locate", "w.h5", "nested too deep|too long")
def deep_groups(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.id
        for _ in range(5000):
            group = h5py.h5g.create(group, b"g")


def file_of(fill: Callable[[h5py.File], None]) -> Make:
    """Return what makes a file of that content."""

    def make(path: Path) -> None:
        with h5py.File(path, "w") as file:
            fill(file)

    make.__name__ = fill.__name__
    return make


for endless in (groups_that_share_members, soft_links_that_multiply):
    bomb("locate", "w.h5", "too many objects")(file_of(endless))


@bomb("locate", "w.h5", "too many objects")
def links_without_end(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        for number in range(MAX_TENSORS + 1):
            file.id.links.create_soft(b"w%d" % number, b"nowhere")


@bomb("locate", "w.h5", "too many objects")
def names_without_end_for_one_dataset(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        file["w"] = np.zeros(3)
        for number in range(5000):
            file.id.links.create_hard(b"w%d" % number, file.id, b"w")


@bomb("locate", "w.h5", "chunks that are too large")
def a_huge_chunk(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("w", shape=(1 << 27,), dtype="f8", chunks=(1 << 27,), compression="gzip")


@bomb("read", "w.h5", "cannot be read|too much memory")
def a_chunk_that_inflates(path: Path) -> None:
    """4 MiB that inflate to 4 GiB, where 64 numbers should be."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("w", shape=(64,), dtype="f4", chunks=(64,), compression="gzip")
        squeezed = zlib.compressobj(9, wbits=-15)
        block = squeezed.compress(bytes(16 * MIB)) + squeezed.flush(zlib.Z_FULL_FLUSH)  # which can be said again
        adler = (256 * 16 * MIB % 65521) << 16 | 1
        dataset.id.write_direct_chunk((0,), b"\x78\xda" + 256 * block + squeezed.flush() + adler.to_bytes(4, "big"))


@bomb("read", "w.h5", "cannot be read|too much memory")
def a_chunk_that_inflates_again_and_again(path: Path) -> None:
    """Three gzip filters in a row."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((64,))
    for _ in range(3):
        properties.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
    data = zlib.compress(zlib.compress(zlib.compress(bytes(256 * MIB), 9), 9), 9)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((64,))
        h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, space, dcpl=properties).write_direct_chunk((0,), data)


@bomb("locate", "w.h5", "too long")
def a_long_text(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("w", dtype=h5py.string_dtype("utf-8", 1 << 30), shape=())


# HDF5, native


def native(path: Path, *, strategy: str = "", contents: bytes | None = None) -> None:
    sample_tensors.write(hdf5, str(path), ShardContents({}), ShardIdentity(0, 1, strategy))
    if contents is not None:
        with h5py.File(path, "a", libver=("v108", "v108")) as file:
            del file["__reshard_mpi__/contents"]
            file["__reshard_mpi__"].create_dataset(
                "contents", data=np.frombuffer(contents, np.uint8), track_times=False
            )


@bomb("locate", "w.h5", "cannot be read|too much|damaged|too long")
def contents_of_brackets(path: Path) -> None:
    native(path, contents=b'{"tensors":[' + b"[]," * (4 * MIB) + b'[]],"strings":{}}')


@bomb("locate", "w.h5", "cannot be read|too much|damaged|too long")
def contents_of_short_names(path: Path) -> None:
    native(path, contents=b'{"tensors":[' + b'"ab",' * (3 * MIB) + b'"ab"],"strings":{}}')


@bomb("locate", "w.h5", "cannot be read")
def contents_of_levels(path: Path) -> None:
    native(path, contents=b"[" * 100_000)


@bomb("locate", "w.h5", "cannot be read|too much")
def a_header_of_gigabytes(path: Path) -> None:
    """A piece of the root's header has the length of a file that is nothing but a hole."""
    names = [f"w{number}" for number in range(40)]  # with few, the root's header is in pieces as it is
    sample_tensors.write(
        hdf5, str(path), ShardContents.of(SampleTensor.random(name, BY_NAME["int8"], (1,)) for name in names)
    )
    content, size_bytes = bytearray(path.read_bytes()), 3 << 30
    piece = len(content)
    content += b"OCHK"
    assert content[48 + 7] == 0x15 and content[48 + 29] == 0x0A
    struct.pack_into("<BHBQQBHBI", content, 48 + 7, 0x10, 16, 0, piece, size_bytes - piece, 0, 4, 0, 0)
    struct.pack_into("<Q", content, 28, size_bytes)
    for start, end in ((0, 44), (48, 48 + 7 + content[48 + 6])):
        struct.pack_into("<I", content, end, hdf5_peer.lookup3(bytes(content[start:end])))
    path.write_bytes(content)
    os.truncate(path, size_bytes)


# Strategy files, of protobuf


@bomb("strategy", "s.ckpt", "several of dev_matrix")
def meshes_of_nothing(path: Path) -> None:
    layouts = b"\x0a\x00" * 400_000 + b"\x28\x00\x30\x00\x38\x00"
    item = b"\x0a\x01w" + encode_length(2, len(layouts)) + layouts
    path.write_bytes(b"\x08\x01" + encode_length(3, len(item)) + item)


def layout_item(name: bytes, field: int, numbers: bytes) -> bytes:
    layouts = encode_length(field, len(encode_length(1, len(numbers))) + len(numbers)) + encode_length(1, len(numbers))
    layouts += numbers + b"\x28\x00\x30\x00\x38\x00"
    item = encode_length(1, len(name)) + name + encode_length(2, len(layouts)) + layouts
    return encode_length(3, len(item)) + item


@bomb("strategy", "s.ckpt", "damaged")
def an_item_of_a_gigabyte(path: Path) -> None:
    path.write_bytes(b"\x08\x01\x1a" + encode_varint(10**9))
    os.truncate(path, MAX_FILE_BYTES - 1)


@bomb("strategy", "s.ckpt", "an operator's strategy is too long")
def inputs_without_end(path: Path) -> None:
    cuts = b"\x08\x00" + b"\x12\x02\x08\x01" * 200_000
    item = b"\x0a\x01a" + encode_length(2, len(cuts)) + cuts
    path.write_bytes(b"\x08\x01" + encode_length(2, len(item)) + item)


# Strategy files, of JSON and TOML


def json_layout(**values: str) -> str:
    given = {"dev_matrix": "[2]", "tensor_map": "[0]", **values}
    return '{"parallel_layout_item": {"w": {' + ", ".join(f'"{key}": {value}' for key, value in given.items()) + "}}}"


@bomb("strategy", "s.json", "damaged JSON|not in UTF-8")
def json_of_nothing(path: Path) -> None:
    path.write_text("{")
    os.truncate(path, 10 * MIB)


@bomb("strategy", "s.toml", "the spec is too large")
def toml_of_nothing(path: Path) -> None:
    path.write_text("mesh = 1\n")
    os.truncate(path, MAX_FILE_BYTES)


@bomb("strategy", "s.toml", "rules are too long|too much memory")
def toml_patterns(path: Path) -> None:
    glob = "*a" * 2000
    path.write_text("mesh = { a = 1 }\n" + "".join(f"[[parameter]]\nmatch = '{glob}'\n" for _ in range(100)))


# The placement table of native shards


def table_of(**values: Any) -> str:
    given = {"version": 1, "world_size": 1024, "stages": 1024, "placements": [], "parameters": {}, "rules": []}
    return json.dumps({**given, **values})


@bomb("table", "t.txt", "wrong type or value")
def table_stages_again_and_again(path: Path) -> None:
    placements = [{"mesh": [1], "stages": list(range(1024))}]
    path.write_text(table_of(placements=placements, parameters={"w": [0] * 200_000}))


@bomb("table", "t.txt", "wrong type or value")
def table_of_many_ways(path: Path) -> None:
    halves = [list(range(512)), list(range(512, 1024))]
    placements = [{"mesh": [1], "stages": half} for half in halves for _ in range(150)]
    ways = {f"{a},{b}": [a, b] for a in range(150) for b in range(150, 300)}
    path.write_text(table_of(placements=placements, parameters=ways))


# What is written whole: the name of the file, the pattern, and what gives the content.
CONTENTS: dict[str, tuple[str, str, Callable[[], str | bytes]]] = {
    "values_without_end": (
        "w.ckpt",
        "too many values",
        lambda: b"".join(encode_header(f"w{number}", (1,), "Int8", 1) + b"x" for number in range(MAX_TENSORS + 1)),
    ),
    "fields_without_end": ("w.ckpt", "too many fields", lambda: encode_length(1, 20 * MIB) + b"\x28\x00" * (10 * MIB)),
    "groups_in_groups": ("w.ckpt", "impossible type", lambda: encode_length(1, MIB) + b"\x2b" * MIB),
    "messages_of_nothing": ("s.ckpt", "damaged", lambda: b"\x08\x01" + b"\x1a\x00" * (8 * MIB)),
    "a_mesh_without_end": (
        "s.ckpt",
        "dev_matrix is too long",
        lambda: b"\x08\x01" + b"".join(layout_item(b"w%d" % number, 1, b"\x81\x08" * 400_000) for number in range(40)),
    ),
    "slices_without_end": (
        "s.ckpt",
        "param_split_shape is too long",
        lambda: b"\x08\x01" + b"".join(layout_item(b"w%d" % number, 3, b"\x81\x08" * 400_000) for number in range(40)),
    ),
    "groups_in_groups_of_a_strategy": ("s.ckpt", "damaged", lambda: b"\x08\x01" + b"\x2b" * MIB),
    "operators_without_end": (
        "s.ckpt",
        "too much memory",
        lambda: b"\x08\x01" + b"\x12\x09\x0a\x01a\x12\x04\x08\x00\x12\x00" * MIB,
    ),
    "json_brackets": ("s.json", "too much memory", lambda: '{"parallel_layout_item": [' + "[]," * (5 * MIB) + "[]]}"),
    "json_numbers": ("s.json", "too much memory", lambda: json_layout(dev_matrix="[" + "1," * (5 * MIB) + "1]")),
    "json_levels": ("s.json", "nested too deep", lambda: '{"parallel_layout_item": ' + "[" * 100_000),
    "json_objects_in_objects": ("s.json", "nested too deep", lambda: '{"parallel_layout_item": ' + '{"a":' * 100_000),
    "json_digits": ("s.json", "damaged JSON", lambda: json_layout(dev_matrix="[" + "9" * MIB + "]")),
    "json_dimensions": ("s.json", "tensor_map", lambda: json_layout(tensor_map="[" + "0," * MIB + "0]")),
    "toml_stages": ("s.toml", "stages", lambda: 'stages = 16777216\nmesh = { a = 1 }\n[[parameter]]\nmatch = "*"\n'),
    "toml_keys_of_many_parts": (
        "s.toml",
        "too many dots",
        lambda: "mesh = { a = 1 }\n" + ".".join("a" * 200_000) + " = 1\n",
    ),
    "toml_keys_in_a_table_of_many_parts": (
        "s.toml",
        "too many dots",
        lambda: f"[{'.'.join('a' * 100_000)}]\n" + "".join(f"k{number} = 1\n" for number in range(20_000)),
    ),
    "toml_tables": (
        "s.toml",
        "too much memory",
        lambda: "mesh = { a = 1 }\n" + "".join(f"a{number}.b.c.d.e.f.g.h = 1\n" for number in range(20_000)),
    ),
    "toml_rules": ("s.toml", "too much memory", lambda: "mesh = { a = 1 }\n" + "[[parameter]]\n" * 35_000),
    "toml_levels": ("s.toml", "neither protobuf nor JSON nor TOML|too much memory", lambda: "mesh = " + "[" * 50_000),
    "toml_digits": ("s.toml", "neither protobuf nor JSON nor TOML", lambda: "mesh = { a = " + "9" * 500_000 + " }"),
    "table_stages": ("t.txt", "stages", lambda: table_of(world_size=1 << 24, stages=1 << 24)),
    "table_rules": (
        "t.txt",
        "wrong type or value",
        lambda: table_of(placements=[{"mesh": [1]}], rules=[["a*", 0]] * 200_000),
    ),
}


def writing(content: Callable[[], str | bytes]) -> Make:
    def make(path: Path) -> None:
        made = content()
        path.write_bytes(made.encode() if isinstance(made, str) else made)

    return make


KINDS = {"w": "locate", "s": "strategy", "t": "table"}
CASES |= {name: (KINDS[file[0]], file, says, writing(content)) for name, (file, says, content) in CONTENTS.items()}


@pytest.mark.parametrize("case", CASES)
def test_bombs(tmp_path: Path, case: str) -> None:
    kind, name, message, make = CASES[case]
    path = tmp_path / name
    make(path)
    outcome = read_by_child(kind, path)
    assert outcome["is_ours"], outcome
    assert re.search(message, outcome["problem"].partition("\n")[0]), outcome
    assert path.name in outcome["problem"]
    assert len(outcome["problem"]) < 3000
    assert outcome["growth_bytes"] <= GROWTH_BYTES, outcome
    assert outcome["helper_growth_bytes"] <= GROWTH_BYTES, outcome
    assert outcome["work"] <= MAX_WORK, outcome
    assert not opened_elsewhere(outcome, path)

"""Safetensors files that are damaged or made to harm: each is refused by name, with the place in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile import MAX_WORK, opened_elsewhere, read_by_child
from support.safetensors_peer import file_of

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import safetensors
from reshard_mpi.formats.safetensors.file_header import MAX_HEADER_BYTES

GROWTH_BYTES = 80 << 20
# Of processor time, on a machine that does other things as well.
FLOATS = bytes(range(16))


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16), **more: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def one(name: str = "w", **facts: object) -> bytes:
    return file_of({name: entry(**facts)}, FLOATS)


def raw(value: str, data: bytes = FLOATS) -> bytes:
    """A file whose header is this text, with a sound entry in the place of `$`."""
    return file_of(value.replace("$", json.dumps(entry())).encode(), data)


HUGE = 1 << 62
REFUSED = {
    # What is no header
    "length 0": (bytes(8) + FLOATS, "not a safetensors file"),
    "length past the end of the file": (file_of(b'{"w":1}', length=500), "truncated"),
    "length over the limit": (file_of(b"{" + b" " * 20, length=MAX_HEADER_BYTES + 1), "not a safetensors file"),
    "less than 8 bytes": (b"\x08\0\0", "not a safetensors file"),
    "a list": (file_of(b"[]"), "not a safetensors file"),
    "white space before": (file_of(b" {}"), "not a safetensors file"),
    "a byte order mark before": (file_of("\ufeff{}".encode()), "not a safetensors file"),
    "padded with NUL": (file_of(b"{}\0\0\0\0\0\0"), "expected: nothing more"),
    "two documents": (file_of(b"{}{}"), "expected: nothing more"),
    "a comment": (raw('{/**/"w":$}'), "damaged"),
    "ends in an entry": (raw('{"w":{"dtype":"F32"'), "damaged"),
    "ends in a string": (raw('{"w":{"dtype":"F3'), "damaged"),
    "ends behind a comma": (raw('{"w":$,'), "damaged"),
    "a comma too many": (raw('{"w":$,}'), "damaged"),
    "no comma": (raw('{"w":$ "v":$}'), "damaged"),
    "no colon": (raw('{"w" $}'), "damaged"),
    "a Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        "Git LFS.*\n.*\n.*\n.*pull",
    ),
    "a pickle": (b"\x80\x02}q\0." + bytes(40), "a bare pickle"),
    "a zip archive": (b"PK\x03\x04" + bytes(40), "zip archive"),
    "a web page": (b"<!DOCTYPE html><html></html>", "web page"),
    # Strings
    "invalid UTF-8 in a name": (file_of(b'{"\xc3\x28":' + json.dumps(entry()).encode() + b"}", FLOATS), "UTF-8"),
    "invalid UTF-8 in a usual name": (
        file_of(b'{"\xc3\x28":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"v":1}', FLOATS),
        "UTF-8",
    ),
    "invalid UTF-8 in metadata": (file_of(b'{"__metadata__":{"k":"\xff"}}'), "UTF-8"),
    "half a pair of surrogates": (raw('{"\\ud83d":$}'), "damaged"),
    "half a pair of surrogates in metadata": (raw('{"__metadata__":{"k":"\\ude00"},"w":$}'), "damaged"),
    "a character that must be escaped": (raw('{"a\nb":$}'), "damaged"),
    "an escape that is none": (raw('{"a\\x":$}'), "damaged"),
    "a name of no characters": (raw('{"":$}'), "impossible length"),
    "a name too long": (one("n" * 4097), "impossible length"),
    "a name too long by far": (one("n" * 100_000), "impossible length"),
    "a name too long in bytes": (one("层" * 1400), "impossible length"),
    # The same twice
    "a tensor twice": (raw('{"w":$,"w":$}'), "'w' appears twice"),
    "a tensor twice, empty": (raw('{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":$}'), "'w' appears twice"),
    "a tensor twice, once escaped": (raw('{"w":$,"\\u0077":$}'), "'w' appears twice"),
    "metadata twice": (raw('{"__metadata__":{},"w":$,"__metadata__":{}}'), "metadata twice"),
    "an entry of metadata twice": (raw('{"__metadata__":{"crc_num":"1","crc_num":"1"},"w":$}'), "'crc_num' twice"),
    "a field twice": (raw('{"w":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}'), "each once"),
    # Metadata
    "metadata a number": (raw('{"__metadata__":{"k":1},"w":$}'), "damaged"),
    "metadata null": (raw('{"__metadata__":null,"w":$}'), "damaged"),
    "metadata a list": (raw('{"__metadata__":[],"w":$}'), "damaged"),
    "metadata like a tensor": (raw('{"__metadata__":$,"w":$}'), "damaged"),
    "a string too long": (file_of({"__metadata__": {"__reshard_mpi__:s": "x" * (17 << 20)}}), "too long"),
    "a string without a name": (file_of({"__metadata__": {"__reshard_mpi__:": "x"}}), "damaged"),
    "Int4 that is none": (raw('{"__metadata__":{"w":"Int4"},"w":$}'), "Int4.*\n.*I8"),
    # Fields
    "an entry that is a list": (raw('{"w":["F32",[2,2],[0,16]]}'), "damaged"),
    "an entry that is a number": (raw('{"w":7}'), "damaged"),
    "no type": (raw('{"w":{"shape":[4],"data_offsets":[0,16]}}'), "damaged"),
    "no fields": (raw('{"w":{}}'), "damaged"),
    "a field that is not known": (one(strides=[2, 1]), "nothing else"),
    "a field that is not known, in the place of one": (raw('{"w":{"dtype":"F32","size":4}}'), "nothing else"),
    "a type that is not known": (one(dtype="F4"), "'w' has a type that is not known|not known.*\n.*\n.*'F4'"),
    "a type in lower case": (one(dtype="f32"), "not known"),
    "a type of no characters": (one(dtype=""), "not known"),
    "a type that is very long": (one(dtype="F" * 100_000), "too long"),
    "a type that is a number": (one(dtype=7), "damaged"),
    "a shape that is a number": (one(shape=4), "damaged"),
    # Numbers
    "a length 2.0": (one(shape=[2.0, 2]), "whole number"),
    "a length 2e0": (raw('{"w":{"dtype":"F32","shape":[2e0,2],"data_offsets":[0,16]}}'), "whole number"),
    "a length true": (one(shape=[True, 4]), "whole number"),
    'a length "2"': (one(shape=["2", 2]), "whole number"),
    "a length null": (one(shape=[None]), "whole number"),
    "a length -0": (raw('{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), "whole number"),
    "a length -4": (one(shape=[-4]), "whole number"),
    "a length 04": (raw('{"w":{"dtype":"F32","shape":[04],"data_offsets":[0,16]}}'), "whole number|damaged"),
    "a length NaN": (raw('{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'), "NaN.*no number"),
    "a length of more than 64 bits": (one(shape=[1 << 64]), "whole number"),
    "a length of 100,000 digits": (raw('{"w":{"dtype":"F32","shape":[' + "1" * 100_000 + "]}}"), "damaged|too long"),
    "an offset of more than 64 bits": (one(offsets=[0, 1 << 70]), "whole number"),
    "a shape nested": (raw('{"w":{"dtype":"F32","shape":[' + "[" * 100_000 + "]}}"), "nested too deeply"),
    "a shape whose product overflows": (one(shape=[HUGE, HUGE]), "impossibly large"),
    "a shape whose product overflows, then 0": (one(shape=[HUGE, HUGE, 0]), "impossibly large"),
    "a shape of too many dimensions": (one(shape=[1] * 33), "up to 32 lengths"),
    # Ranges
    "one offset": (one(offsets=[16]), "two offsets"),
    "three offsets": (one(offsets=[0, 8, 16]), "two offsets"),
    "a range shorter than the shape": (one(offsets=[0, 12]), "does not fit its shape"),
    "a range longer than the shape": (one(shape=[3]), "does not fit its shape"),
    "a range backwards": (one(offsets=[16, 0]), "does not fit its shape"),
    "a range past the end": (one(shape=[5], offsets=[0, 20]), "truncated, or damaged"),
    "bytes before the first": (one(shape=[3], offsets=[4, 16]), "does not follow"),
    "bytes behind the last": (one(shape=[3], offsets=[0, 12]), "goes on behind its last"),
    "bytes of no tensor": (file_of({}, FLOATS), "goes on behind its last"),
    "a hole": (
        file_of({"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[2], offsets=[8, 16])}, FLOATS),
        "'b' does not follow 'a'",
    ),
    "an overlap": (
        file_of({"a": entry(shape=[3], offsets=[0, 12]), "b": entry(shape=[2], offsets=[8, 16])}, FLOATS),
        "'b' overlaps with 'a'",
    ),
    "two names for one range": (file_of({"a": entry(), "b": entry()}, FLOATS), "'b' overlaps with 'a'"),
    "an empty tensor within another": (
        file_of({"a": entry(), "b": entry(shape=[0], offsets=[4, 4])}, FLOATS),
        "'b' overlaps with 'a'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=message) as caught:
        safetensors.locate(str(path))
    assert str(path) in caught.value.where


ACCEPTED = {
    "nothing": file_of({}),
    "tabs and line ends behind": raw('{"w":$}\t\r\n  '),
    "white space within": raw('{ \n"w" : $ ,"__metadata__"\t:\t{ } }'),
    "a header in another order": file_of(
        {"b": entry(shape=[2], offsets=[8, 16]), "a": entry(shape=[2], offsets=[0, 8])}, FLOATS
    ),
    "fields in another order": raw('{"w":{"data_offsets":[0,16],"shape":[4],"dtype":"F32"}}'),
    "an empty tensor between others": file_of(
        {
            "a": entry(shape=[2], offsets=[0, 8]),
            "n": entry(shape=[0, 1 << 40], offsets=[8, 8]),
            "b": entry(shape=[2], offsets=[8, 16]),
        },
        FLOATS,
    ),
    "escaped": raw('{"\\ud83d\\ude00\\n\\/\\u0000":$}'),
    "metadata of other programs": raw(
        '{"__metadata__":{"\\u0041":"' + "x\\n" * 100_000 + '","format":"pt","":""},"w":$}'
    ),
    "misaligned": file_of(
        {"a": entry("U8", [1], [0, 1]), "b": entry("F64", [1], [1, 9]), "c": entry("U8", [7], [9, 16])}, FLOATS
    ),
    "a bool of another byte": one(dtype="BOOL", shape=[16]),
    "Int4 of a tensor that is not there": raw('{"__metadata__":{"v":"Int4"},"w":$}'),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(tmp_path: Path, case: str) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(ACCEPTED[case])
    held = safetensors.locate(str(path))
    assert sum(tensor.size_bytes for tensor in held.tensors.values()) == (0 if case == "nothing" else 16)


def _many(entry: bytes, count: int) -> bytes:
    """Return so many entries of JSON, each with its number wherever one is asked for."""
    return b",".join(entry % ((number,) * entry.count(b"%")) for number in range(count))


# Made only when they are asked for: all of them together take as long as many tests.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty lists": (lambda: b'{"w":[' + b"[]," * 2_000_000, "too long"),
    "a string": (lambda: b'{"' + b"n" * 8_000_000, "too long"),
    "a string, escaped": (lambda: b'{"' + b"\\n" * 4_000_000, "too long"),
    "a string that is kept": (lambda: b'{"__metadata__":{"__reshard_mpi__:s":"' + b"\\n" * (4 << 20) + b'"', "damaged"),
    "metadata": (lambda: b'{"__metadata__":{' + b'"k":"v",' * 1_000_000, "too long"),
    "metadata of many names": (lambda: b'{"__metadata__":{' + _many(b'"%06d":"v"', 200_000), "too long"),
    "metadata of long names": (lambda: b'{"__metadata__":{' + _many(b'"%04000d":"v"', 20_000), "damaged"),
    "a long text, escaped": (lambda: b'{"__metadata__":{"k":"' + b"\\n" * (4 << 20) + b'"', "damaged"),
    "white space": (lambda: b"{" + b" " * 8_000_000, "damaged"),
    "names": (
        lambda: b"{" + _many(b'"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', 140_000),
        "too many tensors",
    ),
    "kinds": (
        lambda: b"{" + _many(b'"%d":{"dtype":"U8","shape":[0,%d],"data_offsets":[0,0]}', 120_000),
        "too much memory",
    ),
    "names, unusual": (
        lambda: b"{" + _many(b'"%07d":{"shape":[0],"dtype":"U8","data_offsets":[0,0]}', 140_000),
        "too many tensors",
    ),
    "Int4 of nothing": (lambda: b'{"__metadata__":{' + _many(b'"%0500d":"Int4"', 80_000), "too much memory"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_and_work_are_bounded(tmp_path: Path, bomb: str) -> None:
    header, message = BOMBS[bomb]
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(file_of(header()))
    found = read_by_child("locate", path)
    assert found["is_ours"] and re.search(message, found["problem"]), found
    assert found["growth_bytes"] <= GROWTH_BYTES, found
    assert found["work"] <= MAX_WORK, found
    assert not opened_elsewhere(found, path)

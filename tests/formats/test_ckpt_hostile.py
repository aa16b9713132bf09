"""Checkpoints that are damaged or made to harm: each is refused by name, with the place in the file."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
from support import ckpt_peer

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import ckpt, structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, payload

FLOATS = struct.pack("<4f", 1, 2, 3, 4)
SOUND = ckpt_peer.value("w", (2, 2), "Float32", FLOATS)


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: bytes | int) -> bytes:
    """One protobuf field: a varint, or bytes with their length."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def value(tag: bytes = field(1, b"w"), tensor: bytes = b"", more: bytes = b"") -> bytes:
    return field(1, tag + tensor + more)


def tensor(
    dims: bytes = field(1, 2) + field(1, 2), kind: bytes = field(2, b"Float32"), content: bytes = field(3, FLOATS)
) -> bytes:
    return field(2, dims + kind + content)


HUGE = 1 << 62
REFUSED = {
    "dims negative": (value(tensor=tensor(field(1, (1 << 64) - 4))), "negative"),
    "dims product overflows": (value(tensor=tensor(field(1, HUGE) * 3)), "impossibly large"),
    "dims product overflows beside a zero": (
        value(tensor=tensor(field(1, HUGE) * 3 + field(1, 0), content=field(3, b""))),
        "impossibly large",
    ),
    "too many dims": (value(tensor=tensor(field(1, 1) * 33)), "too many dimensions"),
    "too many packed dims": (value(tensor=tensor(field(1, b"\1" * 100_000))), "too many dimensions"),
    "packed dims cut short": (value(tensor=tensor(field(1, b"\2\x82"))), "runs past|truncated"),
    "dims of the wrong wire type": (value(tensor=tensor(varint(1 << 3 | 5) + b"\2\0\0\0")), "wrong type"),
    "unknown type": (value(tensor=tensor(kind=field(2, b"Float31"))), "unknown type"),
    "type not UTF-8": (value(tensor=tensor(kind=field(2, b"\xff\xfe"))), "not UTF-8"),
    "type absurdly long": (value(tensor=tensor(kind=field(2, b"x" * 1000))), "impossible length"),
    "tag empty": (value(field(1, b""), tensor()), "impossible length"),
    "tag too long": (value(field(1, b"n" * (structure.MAX_NAME_BYTES + 1)), tensor()), "impossible length"),
    "tag not UTF-8": (value(field(1, b"\xc3\x28"), tensor()), "not UTF-8"),
    "tag a number": (value(field(1, 7), tensor()), "wrong type"),
    "no tag": (value(b"", tensor()), "no tag"),
    "no tensor": (value(), "no tensor"),
    "no type": (value(tensor=tensor(kind=b"")), "no tensor_type"),
    "no content": (value(tensor=tensor(content=b"")), "no tensor_content"),
    "content twice": (value(tensor=tensor(content=field(3, FLOATS) * 2)), "appears twice"),
    "tensor twice": (value(tensor=tensor() * 2), "appears twice"),
    "tag twice in a value": (value(field(1, b"w") * 2, tensor()), "appears twice"),
    "content shorter than dims": (ckpt_peer.value("w", (2, 3), "Float32", FLOATS), "shorter"),
    "content longer than dims": (ckpt_peer.value("w", (3,), "Float32", FLOATS), "longer"),
    "content where there are no elements": (ckpt_peer.value("w", (0, 2), "Float32", FLOATS), "longer"),
    "a tensor again, side by side": (SOUND + SOUND, "longer"),
    "an empty piece of other dims": (SOUND + ckpt_peer.value("w", (0,), "Float32", b""), "do not agree"),
    "a tensor again, with another between": (SOUND + ckpt_peer.value("v", (), "Bool", b"\1") + SOUND, "twice"),
    "a string named as a tensor": (
        SOUND + ckpt_peer.value("v", (), "Bool", b"\1") + ckpt_peer.value("w", (0,), "str", b"x\0\0\0"),
        "twice",
    ),
    "pieces of different dims": (
        ckpt_peer.value("w", (2, 2), "Float32", FLOATS[:8]) + ckpt_peer.value("w", (4,), "Float32", FLOATS[8:]),
        "do not agree",
    ),
    "pieces of different types": (
        ckpt_peer.value("w", (2, 2), "Float32", FLOATS[:8]) + ckpt_peer.value("w", (2, 2), "Int32", FLOATS[8:]),
        "do not agree",
    ),
    "a piece is missing": (ckpt_peer.value("w", (2, 2), "Float32", FLOATS[:8]), "shorter"),
    "map tensor": (field(1, field(1, b"m") + field(3, tensor())), "map tensor"),
    "string too long": (
        ckpt_peer.value("s", (0,), "str", b"x\0\0\0" * (structure.MAX_STRING_BYTES // 4 + 1)),
        "too long",
    ),
    "string not UTF-32": (ckpt_peer.value("s", (0,), "str", b"\xff\xff\xff\xff"), "UTF-32"),
    "string of a broken length": (ckpt_peer.value("s", (0,), "str", b"x\0\0"), "damaged"),
    "string with a shape": (ckpt_peer.value("s", (3,), "str", b"x\0\0\0"), "damaged"),
    "length beyond the file": (b"\x0a" + varint(1 << 40) + SOUND, "truncated"),
    "length negative": (b"\x0a" + varint((1 << 64) - 1) + SOUND, "truncated"),
    "inner length beyond its message": (
        field(1, field(1, b"w") + b"\x12" + varint(500) + b"abc") + SOUND * 40,
        "runs past",
    ),
    "varint of more than 64 bits": (b"\x0a" + b"\xff" * 9 + b"\x02" + SOUND, "64 bits"),
    "varint without end": (b"\x0a" + b"\x80" * 30, "64 bits"),
    "wire type of a group": (value(more=b"\x23"), "impossible type"),
    "wire type that does not exist": (value(more=b"\x27"), "impossible type"),
    "field number 0": (value(more=b"\x02\x00"), "impossible"),
    "field number too large": (value(more=varint(1 << 35)), "impossible"),
    "zeros after the end": (SOUND + bytes(64), "goes on"),
    "another field after the end": (SOUND + field(2, b"x"), "goes on"),
    "trailer not at the end": (SOUND + b"crc_num" + bytes(10) + SOUND, "goes on"),
    "trailer cut short": (SOUND + b"crc_num" + bytes(9), "goes on"),
    "two trailers": (SOUND + (b"crc_num" + bytes(10)) * 2, "goes on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    path = tmp_path / "shard.ckpt"
    path.write_bytes(content)
    with pytest.raises(ShardError) as caught:
        ckpt.locate(str(path))
    assert re.search(message, caught.value.problem), str(caught.value)
    assert re.fullmatch(re.escape(str(path)) + r", byte \d+", caught.value.where)


@pytest.mark.parametrize("mode, magic", [("AES-GCM", 0x7F3A5ED8), ("AES-CBC", 0x7F3A5ED9), ("SM4-CBC", 0x7F3A5EDA)])
def test_encrypted_files_are_refused_by_name(tmp_path: Path, mode: str, magic: int) -> None:
    path = tmp_path / "shard.ckpt"
    path.write_bytes(struct.pack("<I", magic) + bytes(range(100)))
    with pytest.raises(ShardError, match=f"encrypted \\({mode}\\)"):
        ckpt.locate(str(path))


def test_too_many_values_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MAX_TENSORS", 10)
    path = tmp_path / "shard.ckpt"
    path.write_bytes(ckpt_peer.value("w", (2, 2), "Float32", b"") * 10 + SOUND)
    with pytest.raises(ShardError, match="too many values"):
        ckpt.locate(str(path))


def test_too_much_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MAX_KEPT_BYTES", 4000)
    path = tmp_path / "shard.ckpt"
    values = {
        "names": (ckpt_peer.value("n" * 90 + str(i), (), "Bool", b"\1") for i in range(12)),
        "pieces": (ckpt_peer.value("n" * 90, (12,), "Bool", b"\1") for _ in range(12)),
        "strings": (ckpt_peer.value(str(i), (0,), "str", 400 * b"x\0\0\0") for i in range(8)),
    }
    for content in values.values():
        path.write_bytes(b"".join(content))
        with pytest.raises(ShardError, match="too much memory"):
            ckpt.locate(str(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard.ckpt")
    with pytest.raises(ShardError, match="not a regular file"):
        ckpt.locate(str(tmp_path / "shard.ckpt"))


# What is unusual, but sound

ORDERS = {
    "packed dims": value(tensor=tensor(field(1, b"\2\2"))),
    "dims packed and not": value(tensor=tensor(field(1, b"\2") + field(1, 2))),
    "tensor before tag": field(1, tensor() + field(1, b"w")),
    "content first, dims last": value(
        tensor=field(2, field(3, FLOATS) + field(1, 2) + field(2, b"Float32") + field(1, 2))
    ),
    "unknown fields": value(
        tensor=field(2, field(9, b"?") + field(1, 2) * 2 + field(2, b"Float32") + field(7, 300) + field(3, FLOATS)),
        more=field(4, b"new") + varint(5 << 3 | 1) + bytes(8) + varint(6 << 3 | 5) + bytes(4),
    ),
    "varints longer than needed": value(tensor=tensor(varint(8) + b"\x82\x80\x00" + field(1, 2))),
    "trailer": SOUND + b"crc_num" + bytes(6) + b"\x12\x34\x56\x78",
}


@pytest.mark.parametrize("case", ORDERS)
def test_accepted(tmp_path: Path, case: str) -> None:
    path = tmp_path / "shard.ckpt"
    path.write_bytes(ORDERS[case])
    tensor_located = ckpt.locate(str(path)).tensors["w"]
    assert (tensor_located.dtype.name, tensor_located.shape, payload(tensor_located)) == ("float32", (2, 2), FLOATS)


def test_empty_pieces_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    pieces = (b"", FLOATS[:3], b"", FLOATS[3:], b"")
    path.write_bytes(b"".join(ckpt_peer.value("w", (2, 2), "Float32", piece) for piece in pieces))
    assert payload(ckpt.locate(str(path)).tensors["w"]) == FLOATS


def test_a_scalar_with_the_dims_of_older_versions(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    path.write_bytes(ckpt_peer.value("step", (0,), "Int32", b"\7\0\0\0") + ckpt_peer.value("none", (0,), "Int32", b""))
    tensors = ckpt.locate(str(path)).tensors
    assert (tensors["step"].shape, tensors["none"].shape) == ((), (0,))


def test_a_payload_that_ends_like_a_trailer(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    content = bytes(15) + b"crc_num" + bytes(10)
    path.write_bytes(ckpt_peer.value("w", (32,), "UInt8", content))
    assert payload(ckpt.locate(str(path)).tensors["w"]) == content


@pytest.mark.parametrize("cut_bytes", [1, 7, 23, 24, 25])
def test_large_tensors_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_bytes: int) -> None:
    monkeypatch.setattr(ckpt, "CUT_BYTES", cut_bytes)
    contents = ShardContents.of(
        [SampleTensor.random("w", BY_NAME["float64"], (3,)), SampleTensor.random("b", BY_NAME["int8"], (0,))]
    )
    path = tmp_path / "shard.ckpt"
    manifest = sample_tensors.write(ckpt, str(path), contents)
    assert [r.length_bytes for r in manifest.tensors["w"].source.ranges][:-1] == [cut_bytes] * ((24 - 1) // cut_bytes)
    assert ckpt_peer.read(path) == contents
    assert sample_tensors.contents_of(ckpt.locate(str(path))) == contents

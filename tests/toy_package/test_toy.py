"""Test the toy format by a second way to read and write, which shares no code with it."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

from toy_package import toy_format

from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.testing.conformance import FormatConformance
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents


class TestToy(FormatConformance):
    info = toy_format.INFO

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        tensors = contents.tensors.values()
        facts = [[(tensor.name, tensor.dtype.name, tensor.shape) for tensor in tensors], contents.strings]
        head = json.dumps(facts).encode()
        start = b"TOY1" + len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(4, "little") + head
        path.write_bytes(start + b"".join(tensor.content for tensor in tensors))

    def read_independently(self, path: Path) -> ShardContents:
        content = path.read_bytes()
        end = 16 + int.from_bytes(content[4:12], "little")
        tensors, strings = json.loads(content[16:end])
        held = []
        for name, dtype, shape in tensors:
            start, end = end, end + math.prod(shape) * BY_NAME[dtype].itemsize_bytes
            held.append(SampleTensor(name, BY_NAME[dtype], tuple(shape), content[start:end]))
        return ShardContents.of(held, strings)

    def sound_again(self, content: bytes) -> bytes:
        head = content[16 : 16 + int.from_bytes(content[4:12], "little")]
        return content[:12] + zlib.crc32(head).to_bytes(4, "little") + content[16:]

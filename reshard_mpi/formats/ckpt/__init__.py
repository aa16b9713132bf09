"""Read and write MindSpore's checkpoint files (`.ckpt`), by byte range.

    Checkpoint  { repeated Value value = 1 }
    Value       { required string tag = 1; oneof { TensorProto tensor = 2; MapTensorProto maptensor = 3 } }
    TensorProto { repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3 }

A large tensor is cut into adjacent Values of one tag, each with the dims of the whole; a string has type `str`, dims
[0] and UTF-32LE content. `save_checkpoint(crc_check=True)` appends 17 bytes: `crc_num` and, in 10 bytes, the
big-endian CRC-32 of everything before. They are no tensors; `check_crc` verifies them.
"""

from __future__ import annotations

from reshard_mpi.formats.ckpt.reader import NAME, locate, read_back
from reshard_mpi.formats.ckpt.writer import check_crc, reserve, seal, size_at_most_bytes
from reshard_mpi.formats.protocol import no_sums as stored_sums

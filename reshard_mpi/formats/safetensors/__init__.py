"""Read and write safetensors files, as MindSpore 2.10 writes them and all other sound ones.

A file is the length of a header (8 bytes, little-endian), the header, and the payloads: row-major, little-endian, one
after another without a byte between them. The header is JSON:

    {"__metadata__": {KEY: TEXT, ...}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

with offsets counted from its end. MindSpore puts `format` (`ms`), `crc_num` and, for a tensor of Int4, the name of that
into the metadata (see `header`). A file of the same tensors is always written alike.
"""

from __future__ import annotations

from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.safetensors.single_file import (
    NAME,
    check_crc,
    locate,
    read_back,
    reserve,
    seal,
    size_at_most_bytes,
)

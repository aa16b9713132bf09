"""Read and write HDF5 shards (`.h5`, `.hdf5`): native ones, and other programs' files.

A native shard, version 2, holds one contiguous dataset a tensor, allocated when it is created, so that its payload is
one byte range of the file, known before a byte of it is written. The file has the attributes `format`, `version`,
`rank` and `world_size`, and a group `__reshard_mpi__` with the placement table of all ranks (`strategy`), the
order of the tensors and the strings (`contents`, JSON), a table with a row for each tensor in that order (`boxes`: its
logical element type `dtype`, its `global_shape`, and the `offset` of the box that the shard holds), and the tensors
whose names HDF5 cannot hold (`tensors`, under percent-encoded names). Where tensors have been summed, `sums` holds a
number for each, in the order of the contents: the CRC-32 of the whole tensor's row-major bytes with zeros in place of
what this shard does not hold. Behind the end of the HDF5 file there is an `index`. Version 1 had the boxes in
attributes of each dataset; it is refused by name.
"""

from __future__ import annotations

from reshard_mpi.formats.hdf5.native_shard import NAME
from reshard_mpi.formats.hdf5.reader import locate, read_back, seal, size_at_most_bytes, stored_sums
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.protocol import no_crc as check_crc


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the native shard `path` without its payloads (see `writer`)."""
    from reshard_mpi.formats.hdf5 import writer  # the library is loaded only for this

    return writer.reserve(fd, path, spec)

"""HDF5 shards (`.h5`, `.hdf5`): native ones, described by themselves, and those of other programs.

A native shard, version 1, holds one contiguous dataset a tensor, allocated when it is created, so that its payload is
one byte range of the file, known before a byte of it is written. Each dataset has the attributes `dtype` (the logical
element type), `global_shape` and `offset` (the first element of the box it holds). The file has the attributes
`format`, `version`, `rank` and `world_size`, and a group `__reshard_mpi__` with the placement table of the whole
checkpoint (`strategy`), the order of the tensors and the strings (`contents`, JSON), and the tensors whose names HDF5
cannot hold (`tensors`, under percent-encoded names, the true one also in an attribute `name`). Where tensors have been
summed, `sums` holds a number for each, in the order of the contents: the CRC-32 of the whole tensor's row-major bytes
with zeros in place of what this shard does not hold.
"""

from __future__ import annotations

from reshard_mpi.formats.hdf5.reading import locate
from reshard_mpi.formats.hdf5.schema import NAME
from reshard_mpi.formats.hdf5.sealing import check_crc, seal, stored_sums
from reshard_mpi.formats.hdf5.writing import reserve

__all__ = ["NAME", "SUFFIXES", "check_crc", "locate", "reserve", "seal", "stored_sums"]

SUFFIXES = (".h5", ".hdf5")

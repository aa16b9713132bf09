"""Finishing a native shard: the sums that it keeps of its tensors, in a dataset in the order of its contents."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reshard_mpi.errors import UsageError
from reshard_mpi.formats.hdf5 import schema
from reshard_mpi.formats.protocol import NO_SUMS


def seal(path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Add the sums of all tensors, in the order of the list of contents, if they are known.

    Raises UsageError if a checksum of the whole file is asked for: HDF5 has none.
    """
    if crc:
        raise UsageError(
            "an HDF5 shard has no checksum of the whole file", expected="no --crc", got="--crc", where=path
        )
    if sums:
        _write(path, sums)


def _write(path: str, sums: Mapping[str, int]) -> None:
    import numpy as np
    from h5py import h5d, h5f, h5g, h5p, h5s, h5t

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    numbers = np.array(list(sums.values()), np.dtype("<u4"))
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    file = h5f.open(os.fsencode(path), h5f.ACC_RDWR, access)
    try:
        reserved = h5g.open(file, schema.RESERVED.encode())
        space = h5s.create_simple(numbers.shape)
        dataset = h5d.create(reserved, schema.SUMS.encode(), h5t.STD_U32LE, space, dcpl=creation)
        if numbers.size:
            dataset.write(h5s.ALL, h5s.ALL, numbers)
    finally:
        file.close()

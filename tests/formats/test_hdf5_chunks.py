"""A chunk is decoded once, however large it is and however little of it is asked for at a time."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from reshard_mpi.filesystem.source_files import FileVersion, version_of
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.hdf5 import datasets
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import MIB

LENGTH = 3 * MIB


def make(path: Path, count: int) -> FileVersion:
    with h5py.File(path, "w") as file:
        for number in range(count):
            content = np.arange(LENGTH, dtype=np.uint32) + number
            file.create_dataset(f"w{number}", data=content, chunks=(LENGTH,), compression="gzip", compression_opts=1)
    return version_of(str(path))


@pytest.mark.slow
def test_the_library_keeps_the_chunk_that_it_has_decoded(tmp_path: Path) -> None:
    """Opened beside another handle of the same dataset it would keep 1 MiB, and decode it again for every part."""
    path = tmp_path / "a.h5"
    version = make(path, 2)
    try:
        for index in range(2):
            for start in range(0, LENGTH, MIB):
                box = Box((start,), (start + 5,))
                elements = datasets.read(str(path), version, (f"w{index}",), BY_NAME["uint32"], False, box)
                assert elements.tolist() == [start + index + number for number in range(5)]
            _, kept_bytes, _ = datasets._open(str(path), version, (f"w{index}",)).get_access_plist().get_chunk_cache()
            assert kept_bytes >= 4 * LENGTH
            assert datasets._open.cache_info().currsize == 1, "chunks of several datasets are more than is allowed"
    finally:
        datasets.forget()

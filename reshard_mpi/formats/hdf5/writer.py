"""Write all of a native HDF5 shard but the payloads (`reserve`).

The library makes the structure in memory and never writes to the file itself: while it closes a file, it ignores an
error of writing that does not last.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5d, h5f, h5g, h5p, h5s, h5t

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import hdf5, structure
from reshard_mpi.formats.hdf5 import native_shard, types
from reshard_mpi.formats.hdf5.native_shard import GroupPath
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.tensor_table import TensorTable

# A file system in memory; without room in it, the folder for temporary files is used.
_SHARED_MEMORY = "/dev/shm"
_PREFIX = "reshard_mpi-"


class Scratch:
    """A file, empty at first, that only this user may open; it is open for reading and writing until the block ends."""

    def __init__(self, size_bytes: int) -> None:
        """Make the file where there is room for `size_bytes`. Raises OSError."""
        self.descriptor, self.path = tempfile.mkstemp(prefix=_PREFIX, dir=_folder(size_bytes))

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget_name()
        os.close(self.descriptor)

    def forget_name(self) -> None:
        """Remove the name, so that nothing is left of the file even if this process is killed."""
        Path(self.path).unlink(missing_ok=True)


def _folder(size_bytes: int) -> str:
    for folder in (_SHARED_MEMORY, tempfile.gettempdir()):
        if os.access(folder, os.W_OK | os.X_OK):
            status = os.statvfs(folder)
            if not status.f_blocks or status.f_bavail * status.f_frsize >= size_bytes:
                return folder
    raise OSError(errno.ENOSPC, "no room for the structure of a shard", f"{_SHARED_MEMORY} or {tempfile.gettempdir()}")


_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPIED_BYTES = 1 << 20
# More than the library writes for a tensor, with long names, the groups around it, and the unused rest of blocks.
_MOST_BYTES = 4096
# The number of a system error in messages of the library, where it does not raise OSError.
_SYSTEM_ERROR = re.compile(r"errno = (\d+)")


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the native shard `path` without its payloads. The same `spec` gives the same bytes on every machine.

    Args:
        fd: the empty file.

    Returns where the payloads are to be written. Raises TargetError if a name or string cannot be stored, OSError if
    the file cannot be written.
    """
    names = list(spec.specs.names)
    structure.check_names(path, names + list(spec.strings))
    strategy, contents = _texts(path, names, spec)
    with Scratch(_MOST_BYTES * (len(names) + 1) + 2 * len(strategy) + 2 * len(contents)) as scratch:
        try:
            file = _create(scratch.path)
            scratch.forget_name()
            try:
                tensors, places = _write_structure(file, path, spec, strategy, contents)
            finally:
                file.close()
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # as the library says it
            raise _refused(error, scratch.path, path) from error
        _copy(scratch.descriptor, fd)
        manifest = Manifest(path, native_shard.NAME, tensors, dict(spec.strings), spec.identity)
        native_shard.write(fd, SourceFile(scratch.path, scratch.descriptor), manifest, places)
    return manifest


def _write_structure(
    file: Any, path: str, spec: ShardSpec, strategy: bytes, contents: bytes
) -> tuple[TensorTable, native_shard.TextPlaces]:
    """Create the structure of a shard in the new HDF5 file `file`; return where tensors and texts lie in `path`."""
    specs = spec.specs
    names = list(specs.names)
    root_group = h5g.open(file, b"/")
    types.write_text(root_group, "format", native_shard.FORMAT)
    types.write_number(root_group, "version", native_shard.VERSION)
    types.write_number(root_group, "rank", spec.identity.rank)
    types.write_number(root_group, "world_size", spec.identity.world_size)
    writer = _NativeWriter(root_group)
    writer.group((native_shard.RESERVED, native_shard.ESCAPED))
    texts = writer.text(native_shard.STRATEGY, strategy), writer.text(native_shard.CONTENTS, contents)
    places = native_shard.TextPlaces(*texts, None)
    if spec.with_sums:
        sums = writer.dataset((native_shard.RESERVED, native_shard.SUMS), h5t.STD_U32LE, (len(names),))
        places = places._replace(sums=(sums.get_offset() or 0, 4 * len(names)))
    writer.table(native_shard.BOXES, types.table_of(specs))
    routes = native_shard.routes(names)
    stored_types = {dtype: types.create(dtype) for dtype in {kind.dtype for kind in specs.kinds}}
    tensors = TensorTable(path)
    own_numbers = [tensors.kind(kind) for kind in specs.kinds]
    for name, number in zip(names, specs.kind_ids):
        kind = specs.kinds[number]
        handle = writer.dataset(routes[name], stored_types[kind.dtype], kind.shape)
        tensors.add(name, own_numbers[number], (handle.get_offset() or 0) if kind.size_bytes else 0)
    return tensors, places


class _NativeWriter:
    """Creates groups and datasets of one file."""

    def __init__(self, top: Any) -> None:
        self._groups: dict[GroupPath, Any] = {(): top}
        self._group_properties = h5p.create(h5p.GROUP_CREATE)
        self._group_properties.set_obj_track_times(False)
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_char_encoding(h5t.CSET_UTF8)
        # The space of a dataset is allocated when it is created, and not filled.
        self._dataset_properties = h5p.create(h5p.DATASET_CREATE)
        self._dataset_properties.set_layout(h5d.CONTIGUOUS)
        self._dataset_properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._dataset_properties.set_fill_time(h5d.FILL_TIME_NEVER)
        self._dataset_properties.set_obj_track_times(False)

    def group(self, route: GroupPath) -> Any:
        """Return the group at `route`; it and those above it are created if need be."""
        for depth in range(1, len(route) + 1):
            above, route_here = route[: depth - 1], route[:depth]
            if route_here not in self._groups:
                self._groups[route_here] = h5g.create(
                    self._groups[above], route_here[-1].encode(), lcpl=self._links, gcpl=self._group_properties
                )
        return self._groups[route]

    def dataset(self, route: GroupPath, kind: Any, shape: tuple[int, ...]) -> Any:
        """Create the dataset at `route`."""
        group, name = self.group(route[:-1]), route[-1].encode()
        return h5d.create(group, name, kind, _space(shape), dcpl=self._dataset_properties, lcpl=self._links)

    def text(self, name: str, content: bytes) -> native_shard.FileRange:
        """Create a dataset with the bytes `content` in the reserved group; return its byte range."""
        handle = self.dataset((native_shard.RESERVED, name), h5t.STD_U8LE, (len(content),))
        if content:
            handle.write(h5s.ALL, h5s.ALL, np.frombuffer(content, dtype=np.uint8))
        return handle.get_offset() or 0, len(content)

    def table(self, name: str, rows: np.ndarray[Any, Any]) -> None:
        """Create a dataset with `rows` in the reserved group."""
        kind = h5t.py_create(rows.dtype)
        handle = self.dataset((native_shard.RESERVED, name), kind, rows.shape)
        if rows.size:
            handle.write(h5s.ALL, h5s.ALL, rows, mtype=kind)


# Most tensors of a shard have one of a few shapes.
@lru_cache(maxsize=64)
def _space(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def _texts(path: str, names: list[str], spec: ShardSpec) -> tuple[bytes, bytes]:
    """Return the placement table and the list of contents, encoded. Raises TargetError if they are too long to read."""
    too_long = [name for name, text in spec.strings.items() if len(text) > structure.MAX_STRING_BYTES // 4]
    try:
        texts = spec.identity.strategy.encode(), native_shard.contents_text(names, spec.strings)
    except UnicodeEncodeError as error:
        raise TargetError(
            "a string of a shard is no Unicode text",
            got=str(error)[:200],
            where=path,
            remedy="save the checkpoint without it",
        ) from error
    if too_long or max(map(len, texts)) > structure.MAX_TEXT_BYTES:
        raise TargetError(
            "the strings or the placement table of a shard are too long to store",
            expected=f"strings of {structure.MAX_STRING_BYTES // 4} characters, {structure.MAX_TEXT_BYTES} bytes in"
            " all",
            got=f"too long: {too_long[:3]}, {max(map(len, texts))} bytes",
            where=path,
            remedy="save the checkpoint with shorter ones, or write it in another format (--to)",
        )
    return texts


def _refused(error: Exception, scratch: str, path: str) -> Exception:
    """Return the error to raise for `error`, which kept the library from making the structure of the shard `path`."""
    if isinstance(error, OSError) and error.errno is not None:
        number = error.errno
    else:
        match = _SYSTEM_ERROR.search(str(error))
        if match is None:
            return TargetError(
                "the structure of a shard could not be made",
                got=str(error)[:200],
                where=path,
                remedy="write it in another format (--to)",
            )
        number = int(match[1])
    return OSError(number, os.strerror(number), scratch if number in _FULL else path)


def _copy(scratch: int, fd: int) -> None:
    """Give the file `fd` the length of the scratch file and the same bytes in the places that were written to."""
    size_bytes = os.fstat(scratch).st_size
    os.ftruncate(fd, size_bytes)
    end = 0
    while True:
        try:
            start = os.lseek(scratch, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # nothing more
        end = min(os.lseek(scratch, start, os.SEEK_HOLE), start + _COPIED_BYTES)
        structure.write_all(fd, os.pread(scratch, end - start, start), start)


def _create(path: str) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # One version of the structure, whatever library writes it; this one has checksums, and any HDF5 since 1.8 reads it.
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    access.set_alignment(hdf5.ALIGNED_FROM_BYTES, hdf5.ALIGNMENT_BYTES)
    access.set_meta_block_size(hdf5.STRUCTURE_BLOCK_BYTES)
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access)

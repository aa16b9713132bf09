"""Writing all of a native HDF5 shard but the payloads.

The library makes the structure in memory and never writes to the file itself: while it closes a file, it ignores an
error of writing that does not last.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from h5py import h5d, h5f, h5g, h5p, h5s, h5t

from reshard_mpi.errors import TargetError
from reshard_mpi.formats import files
from reshard_mpi.formats.columns import Kind, Tensors
from reshard_mpi.formats.hdf5 import attributes, calls, elements, index, schema, sizing
from reshard_mpi.formats.hdf5.attributes import Attribute
from reshard_mpi.formats.hdf5.schema import Route
from reshard_mpi.formats.hdf5.scratch import Scratch
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.specs import ShardSpec, SpecKind

_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPIED_BYTES = 1 << 20
# More than the library writes for a tensor, with long names, the groups around it, and the unused rest of blocks.
_MOST_BYTES = 4096
# The number of a system error in messages of the library, where it does not raise OSError.
_SYSTEM_ERROR = re.compile(r"errno = (\d+)")


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the native shard `path` without its payloads. The same `spec` gives the same bytes on every machine.

    fd: the empty file. Returns where the payloads are to be written. Raises TargetError if a name or string cannot be
    stored, OSError if the file cannot be written.
    """
    names = list(spec.specs.names)
    files.check_names(path, names + list(spec.strings))
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
        manifest = Manifest(path, schema.NAME, tensors, dict(spec.strings), spec.identity)
        index.write(fd, scratch.descriptor, manifest, places)
    return manifest


def _write_structure(
    file: Any, path: str, spec: ShardSpec, strategy: bytes, contents: bytes
) -> tuple[Tensors, index.Places]:
    """Create the structure of a shard in the new HDF5 file `file`; return where tensors and texts lie in `path`."""
    specs = spec.specs
    names = list(specs.names)
    root_group = h5g.open(file, b"/")
    attributes.text("format", schema.FORMAT).write(root_group)
    attributes.numbers("version", schema.VERSION).write(root_group)
    attributes.numbers("rank", spec.identity.rank).write(root_group)
    attributes.numbers("world_size", spec.identity.world_size).write(root_group)
    writer = _Writer(root_group)
    writer.group((schema.RESERVED, schema.ESCAPED))
    places = index.Places(writer.text(schema.STRATEGY, strategy), writer.text(schema.CONTENTS, contents), None)
    if spec.with_sums:
        sums = writer.dataset((schema.RESERVED, schema.SUMS), h5t.STD_U32LE, (len(names),))
        places = places._replace(sums=(sums.get_offset() or 0, 4 * len(names)))
    routes = schema.routes(names)
    types = {dtype: elements.create(dtype) for dtype in {kind.dtype for kind in specs.kinds}}
    tensors = Tensors(path)
    own_numbers = [tensors.kind(Kind(dtype, box.shape, box, whole)) for dtype, whole, box in specs.kinds]
    recorded = [_recorded(kind) for kind in specs.kinds]
    with calls.alone():
        for name, number in zip(names, specs.kind_of):
            kind, route = specs.kinds[number], routes[name]
            own = (attributes.text("name", name),) if route[0] == schema.RESERVED else ()
            start = writer.tensor(route, types[kind.dtype], kind.box.shape, (*recorded[number], *own))
            tensors.add(name, own_numbers[number], start if kind.size_bytes else 0)
    return tensors, places


class _Writer:
    """Creates groups and datasets of one file."""

    def __init__(self, top: Any) -> None:
        self._groups: dict[Route, Any] = {(): top}
        self._library = calls.library()
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

    def group(self, route: Route) -> Any:
        """Return the group at `route`; it and those above it are created if need be."""
        for depth in range(1, len(route) + 1):
            above, route_here = route[: depth - 1], route[:depth]
            if route_here not in self._groups:
                self._groups[route_here] = h5g.create(
                    self._groups[above], route_here[-1].encode(), lcpl=self._links, gcpl=self._group_properties
                )
        return self._groups[route]

    def dataset(self, route: Route, kind: Any, shape: tuple[int, ...]) -> Any:
        """Create the dataset at `route`."""
        group = self.group(route[:-1])
        return h5d.create(
            group, route[-1].encode(), kind, _space(shape), dcpl=self._dataset_properties, lcpl=self._links
        )

    def tensor(self, route: Route, kind: Any, shape: tuple[int, ...], recorded: Sequence[Attribute]) -> int:
        """Create the dataset of a tensor and its attributes; return the offset of its elements, 0 if it has none."""
        if self._library is None:
            handle = self.dataset(route, kind, shape)
            for attribute in recorded:
                attribute.write(handle)
            return handle.get_offset() or 0
        group, name = self.group(route[:-1]), route[-1].encode()
        created = self._library.dataset(
            group, name, kind, _space(shape), self._dataset_properties, self._links, recorded
        )
        return created or 0

    def text(self, name: str, content: bytes) -> index.Place:
        """Create a dataset with the bytes `content` in the reserved group; return its byte range."""
        handle = self.dataset((schema.RESERVED, name), h5t.STD_U8LE, (len(content),))
        if content:
            handle.write(h5s.ALL, h5s.ALL, np.frombuffer(content, dtype=np.uint8))
        return handle.get_offset() or 0, len(content)


# Most tensors of a shard have one of a few shapes.
@lru_cache(maxsize=64)
def _space(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def _recorded(kind: SpecKind) -> tuple[Attribute, ...]:
    """Return what every tensor of a kind has recorded with its dataset."""
    return (
        attributes.text("dtype", kind.dtype.name),
        attributes.numbers("global_shape", kind.global_shape),
        attributes.numbers("offset", kind.box.start),
    )


def _texts(path: str, names: list[str], spec: ShardSpec) -> tuple[bytes, bytes]:
    """Return the placement table and the list of contents, encoded. Raises TargetError if they are too long to read."""
    too_long = [name for name, text in spec.strings.items() if len(text) > files.MAX_STRING_BYTES // 4]
    try:
        texts = spec.identity.strategy.encode(), schema.contents_text(names, spec.strings)
    except UnicodeEncodeError as error:
        raise TargetError(
            "a string of a shard is no Unicode text",
            got=str(error)[:200],
            where=path,
            remedy="save the checkpoint without it",
        ) from error
    if too_long or max(map(len, texts)) > files.MAX_TEXT_BYTES:
        raise TargetError(
            "the strings or the placement table of a shard are too long to store",
            expected=f"strings of {files.MAX_STRING_BYTES // 4} characters, {files.MAX_TEXT_BYTES} bytes in all",
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
        files.write_all(fd, os.pread(scratch, end - start, start), start)


def _create(path: str) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_file_locking(False, True)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # One version of the structure, whatever library writes it; this one has checksums, and any HDF5 since 1.8 reads it.
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V18)
    access.set_alignment(sizing.ALIGNED_FROM_BYTES, sizing.ALIGNMENT_BYTES)
    access.set_meta_block_size(sizing.STRUCTURE_BLOCK_BYTES)
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    return h5f.create(os.fsencode(path), h5f.ACC_TRUNC, creation, access)

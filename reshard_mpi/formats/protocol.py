"""Define the functions that make up a format (`Format`, `FolderFormat`); its facts are in `registry.FormatInfo`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard_mpi.filesystem.folders import create_file
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import Manifest, ShardSpec
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.sharding.box import Box

NO_SUMS: Mapping[str, int] = {}
# The types of a checkpoint's whole tensors, by name; and the own types of the tensors that `--dtype` changes.
TensorTypes = Mapping[str, TensorType]
OwnTypes = Mapping[str, DType]
# Told how many bytes have just been read.
OnBytes = Callable[[int], None]


def uncounted(count_bytes: int) -> None:
    """Be told of bytes that nobody counts."""


def no_sums(path: str) -> Mapping[str, int]:
    """Return nothing, as `Format.stored_sums` of a format that has no place for the sums of tensors."""
    return NO_SUMS


def no_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Say no, as `Format.check_crc` of a format that has no checksum of a whole file."""
    return False


class Format(Protocol):
    """Tells where the bytes of a shard are; never plans or moves payload bytes.

    A format that is no target has none of the functions that write.
    """

    def locate(self, path: str, like: Manifest | None = None) -> Manifest:
        """Read the structure of the shard at `path`. Raises ShardError if it is not a sound shard of this format.

        Args:
            like: another shard of the checkpoint; where the structure of this one is the same, it need not be parsed.
        """

    def read_back(self, meant: Manifest) -> None:
        """Read back the structure of a shard that was just written. Raises ShardError if it is not as in `meant`."""

    def size_at_most_bytes(self, spec: ShardSpec, *, crc: bool = False) -> int:
        """Return an upper bound of the size of the shard of `spec` in bytes, structure and gaps included.

        Args:
            crc: whether it will have a checksum of the whole file. Loads no library.

        Raises TargetError for a tensor of a type that the format does not have, or not with `crc`; it is called for
        every target before anything is written.
        """

    def reserve(self, fd: int, path: str, spec: ShardSpec) -> Manifest:
        """Write everything but payloads to an empty file, and give it its final length.

        Args:
            fd: the file, open for reading and writing.
            path: of that file. The returned manifest tells where each payload must be written; the place of each tensor
                is `ByteRanges`.

        Raises TargetError for what cannot be stored, OSError if the file cannot be written.
        """

    def seal(self, fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
        """Finish the file after its payloads are in place: write whatever depends on them.

        Args:
            fd: the file, open for reading and writing; it may become longer by a checksum. Its permissions
                are not the format's.
            sums: the CRC-32 of each tensor by name, if the file was reserved `with_sums`; else empty. A format that
                keeps no sums passes over them.
            crc: add a checksum of the whole file, which is read for that in pieces.

        Raises UsageError if the format has no such checksum, OSError if the file cannot be written.
        """

    def stored_sums(self, path: str) -> Mapping[str, int]:
        """Return the sums that the shard at `path` has of its tensors, by name; empty if none. Raises ShardError."""

    def check_crc(self, path: str, on_bytes: OnBytes = uncounted) -> bool:
        """Tell whether the file has a checksum of all of its bytes. Raises ChecksumError if they do not fit it.

        Args:
            on_bytes: told how many bytes have just been read; those of the structure may be missing.
        """


class FolderFormat(Format, Protocol):
    """A format whose checkpoints are folders: files of any names, and an index that lists what lies in them.

    The index is the first of `FormatInfo.marks`; it is written last, when all others are complete. A folder may
    also be told by files that need no index: `formats.names_of_folder`.
    """

    def files_of(self, folder: str) -> tuple[str, ...]:
        """Return the paths of all files of the checkpoint, an index first. Raises ShardError if it is damaged."""

    def open_folder(self, folder: str) -> Mapping[int, Manifest]:
        """Return the tensors of the checkpoint by rank: as a rule rank 0 has all, whole, as `ChunkedTensors`.

        Raises ShardError if it is damaged. Files that are missing or damaged are named in `ChunkedTensors.missing`,
        and none of their pieces are listed. A format that `joins_by_strategy` takes a strategy besides.
        """

    def file_name(self, target_rank: int, targets: int, prefix: str) -> str:
        """Return the name of the file of a target in the folder."""

    def index_contents(self, files: Sequence[Manifest]) -> Mapping[str, bytes]:
        """Return the contents of `FormatInfo.index_names`, by name, as far as the checkpoint has them.

        Args:
            files: all files of the checkpoint, which lie in the folder, by target rank.
        """


class Part(NamedTuple):
    """A part of a tensor that a file has by itself: its name there, whose part, and which.

    dtype: the name of the type that it is converted to, from the one that the tensor has without `--dtype`; empty: the
    one that it has in the target.
    """

    name: str
    source: str
    box: Box
    dtype: str = ""


class SameParts(NamedTuple):
    """Parts of two tensors that must hold the same, since a file has only one of them.

    Attributes:
        first, second: in one type, and of one shape.
        problem, remedy: what is wrong if they differ, and what to do, in words.
    """

    first: Part
    second: Part
    problem: str
    remedy: str

    @classmethod
    def of_copy(cls, copy: Part, weight: str, dtype: str, framework: str, name: str) -> SameParts:
        """Return parts of a weight and of its copy in float32, from which a framework makes the weight.

        Args:
            weight: the tensor; dtype: the name of the type that the copy is rounded to; name: what errors call it.
        """
        return cls(
            copy._replace(source=weight, dtype=dtype),
            copy._replace(dtype=dtype),
            f"the weights of {name!r} are not what {framework} would make of their copy in float32",
            f"leave the copy out (--exclude '{copy.source}', or '*.fp32_param' for all) to go on from these weights, or"
            " change both in the source",
        )

    def in_source(self, names: Mapping[str, str]) -> SameParts:
        """Return the same with other names of tensors."""
        first, second = (part._replace(source=names[part.source]) for part in (self.first, self.second))
        return self._replace(first=first, second=second)


class Packed(NamedTuple):
    """The files that a checkpoint is packed into, by target rank.

    Attributes:
        prefix: what `FolderFormat.file_name` is given for their names.
        files: the parts in each, in the order in which they are written; no name twice in all.
        strings: that every file gets, for `Format.reserve`.
        only_first: whether only the first one gets them.
        equal: names of tensors of which only the first is taken, since the others must hold the same.
        left_out: names of tensors that go nowhere.
        notes: in words, what else people must know of the files.
        absent: what names of tensors begin with that the checkpoint must not have had before a choice (`--exclude`).
        compared: for each file, what must be the same before it is written.
    """

    prefix: str
    files: Sequence[Sequence[Part]]
    strings: Mapping[str, str]
    equal: Sequence[tuple[str, ...]] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    only_first: bool = False
    compared: Sequence[Sequence[SameParts]] = ()


class PackingOptions(NamedTuple):
    """The choices of a user for the files of a format that packs; each takes the ones that its `FormatInfo` names.

    Attributes:
        dp: for how many data-parallel ranks they are.
        zero_stage: of ZeRO.
        ep: over how many ranks experts are shared out; None: as before.
        core_version: the release of Megatron-Core that is to load them, such as 0.19.
        most_file_bytes: how large a file may become.
        name: of the source's folder, if that is of the same format; else empty.
    """

    dp: int = 1
    zero_stage: int = 1
    ep: int | None = None
    core_version: str = ""
    most_file_bytes: int = 1 << 40
    name: str = ""


class PackingFormat(FolderFormat, Protocol):
    """A format whose files have parts of many tensors as its own framework lays them out (`FormatInfo.packs`)."""

    def packed(
        self, tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes, options: PackingOptions
    ) -> Packed:
        """Return the files that these whole tensors are packed into.

        Args:
            tensors, strings: of the checkpoint, by name.
            own_types: of the tensors that `--dtype` gives another type: the one that they have without it, by name.

        Raises TargetError if they cannot be packed.
        """

    def as_read(self, tensors: TensorTypes, strings: Mapping[str, str], own_types: OwnTypes) -> Packed | None:
        """Return the whole tensors, as one file, that the files are read as which these have been packed into.

        None if they are of no training. Raises TargetError as `packed` does.
        """


def reserve_file(module: Format, path: str, spec: ShardSpec) -> Manifest:
    """Make the new file `path` with everything of a shard but payloads; if that fails, no file is left.

    Raises as `Format.reserve` does, and TargetError if there is such a file.
    """
    fd = create_file(path)
    try:
        return module.reserve(fd, path, spec)
    except BaseException:
        Path(path).unlink()
        raise
    finally:
        os.close(fd)


def seal_file(module: Format, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Finish the file `path` after its payloads are in place, as `Format.seal` does."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        module.seal(fd, path, sums, crc=crc)
    finally:
        os.close(fd)

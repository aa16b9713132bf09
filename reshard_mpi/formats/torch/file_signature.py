"""Tell whether a file of a rank is a copy of another rank's (`FileSignature`)."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import DisagreementError
from reshard_mpi.filesystem.paths import is_object_path
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.text import KIB, MIB

# How many samples are read of a file without checksums, how long each is, and how much is compared at once.
_SAMPLES, _SAMPLE_BYTES, _COMPARED_BYTES = 64, 4 * KIB, MIB


class FileSignature(NamedTuple):
    """A signature by which copies of a file are told. If it is of samples, different files may have equal ones."""

    path: str
    sums: tuple[int, ...]
    is_of_samples: bool

    @classmethod
    def of(cls, file: SourceFile, checksums: tuple[int, ...]) -> FileSignature | None:
        """Return the signature of a file that has elements: others may well be alike.

        Args:
            checksums: of all that it holds; empty if it keeps none. Then samples are read, but in an object store,
                where each is a request: there is no signature.
        """
        if checksums:
            return cls(file.path, checksums, False)
        if is_object_path(file.path):
            return None
        step_bytes = max(_SAMPLE_BYTES, file.size_bytes // _SAMPLES)
        samples = (file.read(start, _SAMPLE_BYTES) for start in range(0, file.size_bytes, step_bytes))
        return cls(file.path, (file.size_bytes, *map(crc32, samples)), True)

    def is_of_copy(self, other: FileSignature) -> bool:
        """Tell whether two files hold the same; if signatures are of samples, by reading both files."""
        if self.sums != other.sums or not self.is_of_samples:
            return self.sums == other.sums
        with structure.opened(self.path) as one, structure.opened(other.path) as two:
            return all(
                one.read(start, _COMPARED_BYTES) == two.read(start, _COMPARED_BYTES)
                for start in range(0, one.size_bytes, _COMPARED_BYTES)
            )


def same_files(framework: str, first: str, second: str) -> DisagreementError:
    """Return the error for files of two ranks that hold the same, byte for byte, and should not."""
    return DisagreementError(
        f"files of two ranks of a {framework} checkpoint are copies of one",
        expected="of each rank its own part",
        got=f"the contents of {first}",
        where=second,
        remedy="copy or restore all files of one save",
    )

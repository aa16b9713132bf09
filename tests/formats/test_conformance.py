"""All formats under the one conformance suite, each through a library that it can be made with."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from support import ckpt_peer, hdf5_peer, safetensors_peer, torch_peer

from reshard_mpi import formats
from reshard_mpi.testing.conformance import FormatConformance
from reshard_mpi.testing.sample_tensors import ShardContents


def reading(suite: type[FormatConformance]) -> type[FormatConformance]:
    """Keep the tests that read a file which the suite's own way has written: the others are those of its base class."""
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        code = inspect.getsource(test)
        if name.startswith("test_") and not re.search(r"\.(write_independently|_sound_file|_try_impossible)\(", code):
            setattr(suite, name, None)
    return suite


class TestCheckpoint(FormatConformance):
    info = formats.info("ckpt")
    counts_itself = False

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        ckpt_peer.write(path, contents)

    def read_independently(self, path: Path) -> ShardContents:
        return ckpt_peer.read(path)


@reading
class TestCheckpointInPieces(TestCheckpoint):
    """The same with every tensor cut into pieces that end anywhere."""

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        ckpt_peer.write(path, contents, pieces=3)


class TestHDF5(FormatConformance):
    info = formats.info("hdf5")

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        hdf5_peer.write(path, contents)

    def read_independently(self, path: Path) -> ShardContents:
        return hdf5_peer.read(path, is_whole=True)


@reading
class TestCompressedHDF5(TestHDF5):
    """A native shard that someone compressed (h5repack keeps its attributes)."""

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        hdf5_peer.write(path, contents, compression="gzip", shuffle=True, fletcher32=True)


class TestSafetensors(FormatConformance):
    info = formats.info("safetensors")
    keeps_order = False
    cannot_hold = frozenset({"complex128", "hifloat8"})

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        safetensors_peer.write(path, contents)

    def read_independently(self, path: Path) -> ShardContents:
        return safetensors_peer.read(path)


class TestHuggingFace(TestSafetensors):
    """A file of a folder, by itself."""

    # It is read as any safetensors file is.
    test_reads_what_others_write = test_reads_every_type_and_shape = test_damage_is_refused_or_harmless = None
    test_truncation_is_refused_wherever_it_falls = test_knowing_another_shard_makes_no_difference = None

    info = formats.info("hf")
    cannot_hold = frozenset({"complex128", "hifloat8", "int4"})


class TestTorch(FormatConformance):
    info = formats.info("torch")
    cannot_hold = torch_peer.CANNOT_HOLD
    writes_identity = False  # DTensors are read; what is written are plain tensors

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        torch_peer.write(path, contents)

    def read_independently(self, path: Path) -> ShardContents:
        return torch_peer.read(path)

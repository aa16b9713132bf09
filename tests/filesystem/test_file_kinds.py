"""A file of another kind in the place of a shard or a strategy is called by its name, with what to do about it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_shard

import reshard_mpi
from reshard_mpi.errors import ReshardError, SourceError, StrategyError
from reshard_mpi.filesystem.paths import START_BYTES, kind_of_start
from reshard_mpi.sharding import strategy_files

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def zipped(stream: io.BytesIO) -> None:
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("rank_0/net.ckpt", "content")


def tarred(stream: io.BytesIO) -> None:
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rank_0/net.ckpt"))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
# What it is -> its content, what it is called, and what is to be done.
KINDS: dict[str, tuple[bytes, str, str]] = {
    "hdf5": ((GOLDEN / "native_v1.h5").read_bytes(), "an HDF5 file", "give it the ending .h5"),
    "safetensors": (
        (GOLDEN / "mindspore" / "types.safetensors").read_bytes(),
        "a safetensors file",
        "give it the ending .safetensors",
    ),
    "torch": ((GOLDEN / "torch" / "plain.pt").read_bytes(), "a file that torch.save made", "give it the ending .pt"),
    "torch_legacy": (
        (GOLDEN / "torch" / "legacy.pth").read_bytes(),
        "a file that torch.save made",
        "give it the ending .pt",
    ),
    "pickle": (pickle.dumps({"w": [1]}), "a bare pickle", "save the tensors with torch.save"),
    "old_pickle": (pickle.dumps({"w": [1]}, 2), "a bare pickle", "save the tensors with torch.save"),
    "zip": (written(zipped), "a zip archive", "unpack it"),
    "npz": (written(lambda stream: np.savez(stream, w=np.zeros(3))), "an array of numpy", "save it as safetensors"),
    "npy": (written(lambda stream: np.save(stream, np.zeros(3))), "an array of numpy", "save it as safetensors"),
    "tar": (written(tarred), "a tar archive", "unpack it: tar xf"),
    "gzip": (gzip.compress(b"x"), "a file that is compressed by gzip", "gunzip"),
    "bzip2": (bz2.compress(b"x"), "a file that is compressed by bzip2", "bunzip2"),
    "xz": (lzma.compress(b"x"), "a file that is compressed by xz", "unxz"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00", "a file that is compressed by zstd", "unzstd"),
    "lfs": (LFS, "a pointer of Git LFS in the place of the file", "git lfs pull"),
    "html": (b"<!doctype HTML>\n<p>404", "a web page", "download it again"),
    "xml": (b"\xef\xbb\xbf<?xml version='1.0'?><Error/>", "an XML text", "download it again"),
    "gguf": (b"GGUF\x03\x00\x00\x00", "a GGUF file", "the checkpoint that it was made from"),
    "zeros": (bytes(10_000), "a file that begins with zeros", "save or copy it again"),
    "report": (b'{\n "version": 1,\n "source": "a"}', "the report of a run", "the target folder that it names"),
}
# What may be a strategy.
TEXTS = {
    "json": (b'{"error": "no access"}', "a JSON text, such as the answer of a server", "download it again"),
    "text": (b"Entry not found\n", "a text that begins with 'Entry not found'", "see what it says"),
}
OWN = {".h5": "hdf5", ".safetensors": "safetensors", ".pt": "torch", ".bin": "torch"}


@pytest.mark.parametrize("ending", [".ckpt", ".h5", ".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("name", [*KINDS, *TEXTS])
def test_a_shard_of_another_kind(tmp_path: Path, ending: str, name: str) -> None:
    own = OWN.get(ending, "")
    if own and name.startswith(own):
        return
    content, what, remedy = {**KINDS, **TEXTS}[name]
    path = tmp_path / f"net{ending}"
    path.write_bytes(content)
    with pytest.raises(ReshardError) as error:
        reshard_mpi.inspect(path)
    if own == "torch" and name in ("zip", "npz"):
        assert error.value.problem == "an archive is no checkpoint of torch" and "unpack it" in error.value.remedy
        return
    assert error.value.problem.startswith(f"a shard is {what}") and str(path) in error.value.where
    assert remedy in error.value.remedy
    with pytest.raises(ReshardError, match=error.value.problem):
        reshard_mpi.plan(path)


@pytest.mark.parametrize("ending", [".h5", ".safetensors", ".pt"])
def test_a_mindspore_checkpoint_under_another_name(tmp_path: Path, ending: str) -> None:
    write_shard({"layer.weight": np.ones((3, 4), "f4")}, tmp_path / "net.ckpt")
    path = (tmp_path / "net.ckpt").rename(tmp_path / f"net{ending}")
    with pytest.raises(ReshardError) as error:
        reshard_mpi.inspect(path)
    assert error.value.problem == "a shard is a MindSpore checkpoint"
    assert error.value.remedy == "give it the ending .ckpt"


@pytest.mark.parametrize("name", KINDS)
def test_a_file_without_any_known_ending(tmp_path: Path, name: str) -> None:
    content, what, remedy = KINDS[name]
    path = tmp_path / "net.pkl"
    path.write_bytes(content)
    for read in (reshard_mpi.inspect, reshard_mpi.plan):
        with pytest.raises(SourceError) as error:
            read(path)
        assert what in error.value.got and remedy in error.value.remedy
    with pytest.raises(StrategyError) as strategy_error:
        strategy_files.load(str(path))
    assert what in strategy_error.value.got, strategy_error.value


@pytest.mark.parametrize("name", ["model.safetensors.index.json", ".metadata", "metadata.json"])
def test_an_index_is_given_by_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    for read in (reshard_mpi.inspect, reshard_mpi.plan):
        with pytest.raises(SourceError) as error:
            read(tmp_path / name)
        assert error.value.remedy == f"give {tmp_path}"


def test_a_map_is_no_strategy(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[[map]]\neq = "a <=> b"\n')
    with pytest.raises(StrategyError, match="a map between two models") as error:
        strategy_files.load(str(tmp_path / "map.toml"))
    assert error.value.remedy == "give it by --map"


@given(st.binary(max_size=2 * START_BYTES) | st.text().map(str.encode))
def test_any_bytes_are_looked_at(start: bytes) -> None:
    kind = kind_of_start(start[:START_BYTES])
    assert kind is None or (kind.what.isprintable() and kind.remedy)

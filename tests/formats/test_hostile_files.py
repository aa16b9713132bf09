"""Files that would have the program open, run or write something else: nothing but the files of the source is opened,
nothing is run, and names stay names.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import ckpt_peer, hdf5_peer
from support.command_line import run_apart
from support.conversions import of_every_kind
from support.examples import one_at_a_time
from support.hostile import opened_elsewhere, read_by_child
from support.hostile_hdf5 import external_link, external_storage, soft_link_through_an_external_one, virtual_dataset

from reshard_mpi.formats import hdf5
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)
NAMES = [
    "../../x",
    "/tmp/x",
    "a/../../../b",
    "..",
    ".",
    "a//b",
    "line\nbreak",
    "nul\0inside",
    "n" * 4096,
    "~",
    "*",
    "-rf",
]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("to", ["ckpt", "hdf5"])
@of_every_kind
def test_names_are_not_paths(tmp_path: Path, kind: str, to: str) -> None:
    src, dst = tmp_path / "a" / "b" / "src", tmp_path / "a" / "b" / "dst"
    src.mkdir(parents=True)
    contents = ShardContents.of(SampleTensor.random(name, BY_NAME["int16"], (2, 3)) for name in NAMES)
    if kind == "ckpt":
        ckpt_peer.write(src / "w.ckpt", contents)
    else:
        sample_tensors.write(hdf5, str(src / "w.h5"), contents, ShardIdentity(0, 1, strategy_table.dumps(unsharded())))
    before = files_in(tmp_path)
    run_apart("transform", src, dst, "--to", to, check=True)
    written = {name for name in files_in(tmp_path) - before if "/.reshard_mpi/" not in name}
    ending, peer = {"ckpt": ("ckpt", ckpt_peer), "hdf5": ("h5", hdf5_peer)}[to]
    shard = f"a/b/dst/rank_0/checkpoint_0.{ending}"
    assert written == {shard, "a/b/dst/reshard.json"}
    assert peer.read(tmp_path / shard) == contents


def test_names_of_a_foreign_file_are_not_paths(tmp_path: Path) -> None:
    src, dst = tmp_path / "a" / "src", tmp_path / "a" / "dst"
    src.mkdir(parents=True)
    with h5py.File(src / "w.h5", "w") as file:
        up = h5py.h5g.create(h5py.h5g.create(file.id, b".."), b"..")
        h5py.Group(up)["x\ny"] = NUMBERS
    run_apart("transform", src, dst, "--to", "ckpt", check=True)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"src", "dst"}
    assert list(ckpt_peer.read(dst / "rank_0" / "checkpoint_0.ckpt").tensors) == ["../../x\ny"]


# What HDF5 can be made to open. The files outside are pipes: whoever opened one would wait for ever.


def user_defined_link(file: h5py.File, secret: Path) -> None:
    """Like an external one, but of a class that nobody has registered; made of one below."""
    file["w"] = h5py.ExternalLink(str(secret), "/user_defined")


def virtual_text(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(shape=(), dtype="S4")
    layout[()] = h5py.VirtualSource(str(secret), "w", shape=())
    file.create_virtual_dataset("w", layout)


def references(file: h5py.File, secret: Path) -> None:
    file["v"] = NUMBERS
    file.create_dataset("w", (1,), dtype=h5py.regionref_dtype)[0] = file["v"].regionref[1:2]


def unknown_filter(file: h5py.File, secret: Path) -> None:
    """The gzip of this dataset gets the number of a plugin below."""
    file.create_dataset("w", data=NUMBERS, chunks=(2, 6), compression="gzip")


LEADING_OUT: dict[Callable[[h5py.File, Path], None], str] = {
    external_link: "external link",
    user_defined_link: "user-defined link",
    soft_link_through_an_external_one: "external link",
    external_storage: "other files",
    virtual_dataset: "other files",
    virtual_text: "other files",
    references: "type that no tensor has",
    unknown_filter: "compressed by a method that is not read here",
}


@pytest.mark.parametrize("make", LEADING_OUT)
def test_nothing_outside_is_opened(tmp_path: Path, make: Callable[[h5py.File, Path], None]) -> None:
    outside, path = tmp_path / "outside", tmp_path / "src" / "w.h5"
    path.parent.mkdir()
    outside.mkdir()
    secret = outside / "secret"
    with h5py.File(path, "w") as file:
        make(file, secret)
    content = path.read_bytes()
    if make is user_defined_link:
        # A link message: version 1, flags, the type, and after the name what an external link consists of.
        at = content.index(b"\x01\x08\x40\x01w")
        content = content[: at + 2] + b"\x41" + content[at + 3 :]
    if make is unknown_filter:
        at = content.index(b"deflate\0") - 8
        assert content[at : at + 2] == b"\x01\x00"
        content = content[:at] + (32001).to_bytes(2, "little") + content[at + 2 :]
    path.write_bytes(content)
    for name in ("secret", "libh5plugin.so", "w.h5"):
        os.mkfifo(outside / name)
    outcome = read_by_child("locate", path, HDF5_PLUGIN_PATH=str(outside), HDF5_EXT_PREFIX=str(outside))
    assert outcome["is_ours"] and LEADING_OUT[make] in outcome["problem"].partition("\n")[0], outcome
    assert not opened_elsewhere(outcome, path)


# What others would unpickle


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "protocol"), one_at_a_time(["w.ckpt", "w.h5", "s.json", "s.toml", "strategy.ckpt"], [2, 0, 5, "zip"])
)
def test_nothing_is_unpickled(tmp_path: Path, name: str, protocol: int | str) -> None:
    path, harm = tmp_path / name, tmp_path / "harm"
    if protocol == "zip":  # as torch.save writes it
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Payload(harm), 2))
            archive.writestr("archive/data/0", bytes(64))
    else:
        path.write_bytes(pickle.dumps(Payload(harm), int(protocol)))
    for kind in ("strategy",) if name.startswith("s") else ("locate", "strategy"):
        outcome = read_by_child(kind, path)
        assert outcome["is_ours"], outcome
        assert not opened_elsewhere(outcome, path)
    assert not harm.exists()
    pickle.loads(pickle.dumps(Payload(harm)))
    assert harm.exists()

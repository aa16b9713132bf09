"""Every format as a source in an object store: its targets are those that a copy of the source in a folder gives."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import pytest
from support.command_line import done, run_apart, run_here
from support.conversions import listing, make
from support.examples import few
from support.full_checkpoints import floats, held, map_of, source_of
from support.launch import MPI
from support.object_servers import Bucket, put, upload

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"
DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


class Source(NamedTuple):
    """A checkpoint in a folder: the folder, the name of the source in it, and the options to read it with.

    Names of files that begin with `@` are in that folder.
    """

    folder: Path
    name: str = ""
    options: tuple[str, ...] = ()

    def given(self, place: str) -> list[str]:
        """Return the arguments for the source, wherever the folder has been copied to."""
        words = [f"{place}/{word[1:]}" if word.startswith("@") else word for word in self.options]
        return [f"{place}/{self.name}" if self.name else place, *words]


def cut(kind: str) -> Callable[[Path], Source]:
    """Return what writes shards of 4 ranks with their strategy."""

    def write(folder: Path) -> Source:
        make(folder, kind)
        return Source(folder, "src", ("--src-strategy", "@src_strategy", "--dst-strategy", "@dst_strategy"))

    return write


def ours(form: str, *options: str) -> Callable[[Path], Source]:
    """Return what has a committed run write a checkpoint of 2 ranks, which its records describe."""

    def write(folder: Path) -> Source:
        c = make(folder / "other")
        c.but(dst=folder / "made", dst_strategy=None if form == "hf" else c.dst_strategy).done(
            "transform", "--to", form, "--verify", *options
        )
        return Source(folder / "made", "", ("--verify",))

    return write


def copied(path: Path, name: str = "", *options: str) -> Callable[[Path], Source]:
    """Return what gives a sample that lies in a folder."""

    def write(_: Path) -> Source:
        if not path.exists():
            pytest.skip(f"no {path.name} under RESHARD_MPI_SHARED_DATA or ../shared/data")
        return Source(path, name, options)

    return write


def unpacked(name: str, *options: str, above: bool = True) -> Callable[[Path], Source]:
    """Return what gives a sample that lies in an archive. above: the folder that says which moment is the latest."""

    def write(folder: Path) -> Source:
        if not (DATA / f"{name}.tar.xz").is_file():
            pytest.skip(f"no {name} under RESHARD_MPI_SHARED_DATA or ../shared/data")
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        (found,) = folder.glob("*/*/")
        return Source(found.parent if above else found, "", options)

    return write


def foreign_hdf5(folder: Path) -> Source:
    """Write a file with compressed chunks, which the library reads in a process of its own."""
    with h5py.File(folder / "w.h5", "w") as file:
        file.create_dataset("net/w", data=floats(40, 30), chunks=(16, 8), compression="gzip", shuffle=True)
        file.create_dataset("net/big", data=floats(300, 200).astype(">f4"), chunks=(64, 64))
        file["net/plain"] = floats(20, 3)
        file["step"] = 3
    return Source(folder, "w.h5")


SOURCES: dict[str, Callable[[Path], Source]] = {
    **{f"cut {kind}": cut(kind) for kind in ("ckpt", "hdf5", "safetensors")},
    **{f"ours {form}": ours(form) for form in ("ckpt", "hdf5", "safetensors", "torch", "dcp")},
    "ours hf": ours("hf", "--max-shard-size", "140"),
    "foreign hdf5": foreign_hdf5,
    "torch zip": copied(GOLDEN / "torch", "train.pth"),
    "torch legacy": copied(GOLDEN / "torch", "legacy.pth"),
    "torch of DTensors": copied(GOLDEN / "torch" / "dtensor_ranks"),
    "torch's DCP": copied(GOLDEN / "dcp" / "four_ranks"),
    "Hugging Face": copied(GOLDEN / "hugging_face" / "sharded"),
    "Hugging Face, one file": copied(GOLDEN / "hugging_face" / "tied", "model.safetensors"),
    "MindFormers": copied(GOLDEN / "mindformers"),
    "MindSpore's safetensors": copied(
        GOLDEN / "mindspore", "ranks", "--src-strategy", "@strategy_2x2.ckpt", "--dst-strategy", "@strategy_1x2.ckpt"
    ),
    "DCP of DTensors": copied(DATA / "torch" / "dcp_4ranks"),
    "DCP in safetensors": copied(DATA / "safetensors" / "torch_dcp", "sharded", "--src-files", "2"),
    "DeepSpeed 1": unpacked("deepspeed/zero1_2_bf16_groups_tied"),
    "DeepSpeed 2": unpacked("deepspeed/zero2_2_bf16_frozen", above=False),
    "DeepSpeed 3": unpacked("deepspeed/zero3_4_fp32_frozen_tied"),
    "DeepSpeed, universal": unpacked("deepspeed/zero3_2_bf16_universal"),
    "Megatron": unpacked("megatron/core19_tp2pp2"),
    "Megatron, older optimizer": unpacked("megatron/core14_tp2dp2_model_space"),
    "Megatron, legacy": unpacked("megatron/legacy_tp2pp2"),
}


def uploaded(path: Path, address: str) -> str:
    """Upload a folder; return its address."""
    upload(path, address)
    return address


# What says how it is cut, or is whole, becomes each of these as well.
_TARGETS = ("torch", "safetensors")


def made(folder: Path) -> dict[str, bytes | None]:
    """Return the files of targets, without what says where they are from."""
    return {
        name: content
        for name, content in listing(folder).items()
        if not name.startswith((".reshard_mpi", "reshard.json"))
    }


@pytest.mark.parametrize("name", few(1, SOURCES))
def test_targets_are_the_same(moto: Bucket, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    source = SOURCES[name](tmp_path / "source")
    address = uploaded(source.folder, moto / "source")
    for to in _TARGETS:
        local, remote = tmp_path / f"local_{to}", tmp_path / f"remote_{to}"
        for place, out in ((str(source.folder), local), (address, remote)):
            given = source.given(place)
            done("transform", given[0], out, *given[1:], "--to", to, "--jobs", "1")
        assert made(local) == made(remote) and any(made(local).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut ckpt", "ours hdf5", "foreign hdf5", "torch's DCP", "DeepSpeed 3"])
def test_local_processes(moto: Bucket, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    source = SOURCES[name](tmp_path / "source")
    address = uploaded(source.folder, moto / "source")
    for place, out, jobs in ((str(source.folder), "local", "1"), (address, "remote", "2")):
        given = source.given(place)
        options = ["--to", "torch", "--jobs", jobs, "--progress", "none"]
        run_apart("transform", given[0], tmp_path / out, *given[1:], *options, check=True)
    assert made(tmp_path / "local") == made(tmp_path / "remote")


def test_ranks_of_mpi(moto: Bucket, tmp_path: Path, mpi: MPI) -> None:
    (tmp_path / "source").mkdir()
    source = SOURCES["cut ckpt"](tmp_path / "source")
    address = uploaded(source.folder, moto / "source")
    for place, out, of_mpi in ((str(source.folder), "local", None), (address, "remote", mpi)):
        given = source.given(place)
        run_apart("transform", given[0], tmp_path / out, *given[1:], mpi=of_mpi, check=True)
    assert made(tmp_path / "local") == made(tmp_path / "remote")


def test_every_command_takes_an_address_wherever_a_checkpoint_is_named(moto: Bucket, tmp_path: Path) -> None:
    c = make(tmp_path / "c")
    place = uploaded(c.folder, moto / "c")
    src, strategies = f"{place}/src", ["--src-strategy", f"{place}/src_strategy"]
    for ending in ("", "/"):  # as people write folders
        done(
            "transform", src + ending, tmp_path / f"whole{ending}", *strategies, "--to", "hf", "--verify", "--overwrite"
        )
    whole = uploaded(tmp_path / "whole", moto / "whole")
    for command, *words in (
        ("diff", src, whole, *strategies),
        ("diff", whole, src, "--dst-strategy", f"{place}/src_strategy", "--values"),
        ("verify", src, whole, *strategies),
        ("verify", whole),
        ("audit", whole, "--like", whole, "--before", whole),
        ("inspect", whole, whole),
        ("inspect", f"{src}/rank_0"),
        ("inspect", f"{src}/rank_0/checkpoint_0.ckpt"),
        ("inspect", f"{place}/src_strategy"),
        ("inspect", f"{whole}/reshard.json"),
        ("plan", src, tmp_path / "planned", *strategies),
        ("ranks", "0", *strategies, "--dst-strategy", f"{place}/dst_strategy"),
    ):
        finished = done(command, *words)
        assert "s3:/" not in (finished.out + finished.err).replace("s3://", ""), finished
    config = moto / "config.json"
    put(config, b'{"architectures": ["Other"], "model_type": "other"}')
    assert "no configuration" not in run_here("audit", whole, "--config", config).err
    assert "3." in done("inspect", whole, "w[0]").out
    assert done("inspect", src, "--stats", *strategies).out == done("inspect", c.src, "--stats", *strategies).out


def test_maps_lie_there_too(moto: Bucket, tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a": floats(4, 2)})
    equations = map_of(tmp_path, '[[map]]\neq = "a <=> b"\n')
    place = uploaded(tmp_path, moto / "maps")
    done("transform", f"{place}/src", tmp_path / "out", "--map", f"{place}/{equations.name}")
    assert set(held(tmp_path / "out")) == {"b"}
    done("verify", source, tmp_path / "out", "--map", f"{place}/{equations.name}")

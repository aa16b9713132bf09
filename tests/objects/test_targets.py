"""Targets in an object store: every format, and every way to start a run, gives what a folder has as files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.cases import Side
from support.command_line import done
from support.conversions import Conversion, make, write_conversion
from support.examples import few, one_at_a_time
from support.full_checkpoints import map_of
from support.object_servers import Bucket, objects, upload, uploads
from support.oracle import RawLayout

from reshard_mpi.engine.source_ranges import LEAST_PART_BYTES, plan_parts
from reshard_mpi.journal import staged_parts

# What a run is to be given for targets of each format, by a name for that.
FORMS = {
    "ckpt": ("--to", "ckpt"),
    "ckpt with sums": ("--to", "ckpt", "--crc"),
    "hdf5": ("--to", "hdf5"),
    "safetensors": ("--to", "safetensors"),
    "torch": ("--to", "torch"),
    "dcp": ("--to", "dcp"),
    "hf": ("--to", "hf"),
    "hf in several files": ("--to", "hf", "--max-shard-size", "140"),
    "megatron": ("--to", "megatron"),
}
_WHOLE = ("hf", "deepspeed", "megatron")  # whose files are not cut as a strategy says


class Form(NamedTuple):
    """A conversion that lies in a folder, and the options for one format of its targets."""

    c: Conversion
    options: tuple[str, ...]

    def arguments(self, place: str | Path, target: str | Path, *further: str) -> list[str]:
        """Return the command line. place: of a copy of the conversion's folder."""
        strategies = ["--src-strategy", f"{place}/src_strategy"]
        if self.options[1] not in _WHOLE:
            strategies += ["--dst-strategy", f"{place}/dst_strategy"]
        jobs = () if "--jobs" in further else ("--jobs", "1")
        shown = ("--progress", "none", *jobs)
        return ["transform", f"{place}/src", str(target), *strategies, *self.options, *further, *shown]

    def local(self, *further: str) -> dict[str, bytes]:
        """Return what lies in the folder of a local run, without what says how the run is kept."""
        done(*self.arguments(self.c.folder, self.c.folder / "local", *further))
        return made(files(self.c.folder / "local"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(found: dict[str, bytes]) -> dict[str, bytes]:
    """Return the targets, and what belongs to their format."""
    return {name: found[name] for name in sorted(found) if not name.startswith((".reshard_mpi/", "reshard.json"))}


_CHANGING = {"modified_ns", "check", "tag", "times"}


def kept(found: dict[str, bytes]) -> dict[str, object]:
    """Return what says how the run is kept, without times and tags, and without what only folders need."""
    records = {name: found[name] for name in sorted(found) if name.startswith((".reshard_mpi/", "reshard.json"))}
    return {
        name: {key: value for key, value in json.loads(content).items() if key not in _CHANGING}
        for name, content in records.items()
        if name.endswith(".json")
    }


def form_of(folder: Path, name: str) -> Form:
    return Form(make(folder), FORMS[name])


@pytest.mark.parametrize(("name", "further"), few(1, one_at_a_time(FORMS, ["", "--verify"])))
def test_objects_are_the_files_of_a_local_run(moto: Bucket, tmp_path: Path, name: str, further: str) -> None:
    form, options = form_of(tmp_path, name), further.split()
    local = form.local(*options)
    upload(tmp_path / "src", moto / "in/src")
    for strategy in ("src_strategy", "dst_strategy"):
        upload(tmp_path / strategy, moto / f"in/{strategy}")
    done(*form.arguments(tmp_path, moto / "from_local", *options))
    found = objects(moto / "from_local")
    assert made(found) == local
    assert kept(found) == kept(files(tmp_path / "local"))
    done(*form.arguments(moto / "in", moto / "from_store", *options))
    assert made(objects(moto / "from_store")) == local
    assert not uploads(moto)


MIB = 1 << 20
_ROWS_TO_COLUMNS = ("turned", "wide", "narrow")


def mixed(folder: Path, to: str) -> Conversion:
    """Write a conversion whose targets have several parts, and whose tensors are moved in every way there is.

    Many small ones, long runs, rows that become columns, short runs, and types that change.
    """
    random = np.random.default_rng(1)
    tensors = {
        "long": random.random((1024, 1024), np.float32),
        "wide": random.random((1024, 2048), np.float32),
        "narrow": random.integers(0, 9, (1 << 16, 8), np.int16),
        "turned": random.random((1024, 3072), np.float32),
        **{f"many.{number}": random.random((12, 8), np.float32) for number in range(600)},
        "global_step": np.array(7, np.int32),
    }
    rows, columns = RawLayout((2,), (0, -1)), RawLayout((2,), (-1, 0))
    cut = [name for name in tensors if name != "global_step"]
    whole = RawLayout((2,), ())
    source = Side(2, 1, {**dict.fromkeys(cut, rows), "global_step": whole}, frozenset({"global_step"}))
    target = Side(
        2,
        1,
        {
            **{name.replace("turned", "flipped"): columns if name in _ROWS_TO_COLUMNS else rows for name in cut},
            "global_step": whole,
        },
        frozenset({"global_step"}),
    )
    return write_conversion(folder, "ckpt", source, target, tensors, to=to)


@pytest.fixture
def least_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are as short as a store takes them."""
    monkeypatch.setattr(staged_parts, "plan_parts", partial(plan_parts, sent=LEAST_PART_BYTES))


MIXED = [
    ("ckpt", ""),
    ("safetensors", "--verify"),
    ("safetensors", ""),
    ("hdf5", ""),
    ("dcp", ""),
    ("torch", ""),
    ("ckpt", "--crc"),
    ("ckpt", "--verify"),
    ("hf", "--max-shard-size 16MB"),
    ("megatron", ""),
    ("hdf5", "--verify"),
    ("torch", "--verify"),
    ("dcp", "--verify"),
    ("hf", "--max-shard-size 16MB --verify"),
    ("megatron", "--verify"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("least_parts")
@pytest.mark.parametrize(
    ("to", "options", "bucket"),
    [(to, options, "seaweedfs" if "--verify" in options else "moto") for to, options in MIXED],
    indirect=["bucket"],
)
def test_targets_of_several_parts(bucket: Bucket, tmp_path: Path, to: str, options: str) -> None:
    c = mixed(tmp_path, to)
    if to in _WHOLE:
        c = c.but(dst_strategy=None)
    turning = map_of(tmp_path, "[[map]]\neq = 'turned [a b] <=> flipped [b a]'\n")
    further = ["--dtype", "long=bf16", "--map", str(turning), *options.split()]
    c.done("transform", *further)
    local = made(files(c.dst))
    assert max(map(len, local.values())) > 2 * LEAST_PART_BYTES
    upload(c.src, bucket / "src")
    for source, target in ((c.src, "from_local"), (bucket / "src", "from_store")):
        done("transform", source, bucket / target, *c.arguments("transform", *further)[3:])
        assert made(objects(bucket / target)) == local
    assert not uploads(bucket)

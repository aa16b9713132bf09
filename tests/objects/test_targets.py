"""Targets in an object store: every format, and every way to start a run, gives the objects that a folder has as files."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.command_line import COMMAND, done, refused, run_apart, run_here
from support.conversions import Conversion, make, write_conversion
from support.examples import few
from support.launch import MPI
from support.object_servers import Bucket, delete, names, objects, put, upload, uploads
from support.processes import run_command

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
    "deepspeed": ("--to", "deepspeed", "--dp", "2", "--zero-stage", "1"),
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


@pytest.mark.parametrize("further", ["", "--verify"])
@pytest.mark.parametrize("name", FORMS)
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

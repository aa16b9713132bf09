"""Conversions with real files for tests to run and to spoil: any that is asked for, and a small one of 4 ranks to 2."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard_mpi
from support.cases import Side
from support.checkpoints import (
    ENDINGS,
    KINDS,
    Arrays,
    Read,
    as_read,
    expected_rank,
    read_shard,
    write_shard,
    write_shards,
    write_strategy,
)
from support.command_line import COMMAND, CommandLine, run_apart, run_here
from support.examples import few
from support.launch import MPI
from support.oracle import RawLayout
from support.processes import Finished
from support.zygote import zygote

of_every_kind = pytest.mark.parametrize("kind", few(1, KINDS))

# Source: 2 data parallel x 2 model parallel ranks; columns cut, so ranks 0 and 2 hold the same, as 1 and 3 do.
SRC_LAYOUTS = {"w": RawLayout((2, 2), (-1, 0)), "b": RawLayout((2, 2), (-1,))}
# Target: 2 ranks, rows cut.
DST_LAYOUTS = {"w": RawLayout((2,), (0, -1)), "b": RawLayout((2,), (-1,))}
# Another target: 4 ranks.
FOUR_LAYOUTS = {"w": RawLayout((4,), (0, -1)), "b": RawLayout((2, 2), (1,))}
TENSORS: Arrays = {
    "w": np.arange(32, dtype=np.float32).reshape(8, 4),
    "b": np.arange(8, dtype=np.int64),
    "moments.w": -np.arange(32, dtype=np.float32).reshape(8, 4),
    "global_step": np.array(7, np.int32),
}


@dataclass(frozen=True, slots=True)
class Conversion(CommandLine):
    """Paths of a conversion, and what it is about: the whole tensors, and how both sides hold them.

    kind: the format of shards. A strategy that is None is not given.
    """

    folder: Path
    kind: str
    source: Side
    target: Side
    src: Path
    dst: Path
    src_strategy: Path | None
    dst_strategy: Path | None
    options: tuple[str, ...] = ()
    tensors: Arrays = field(default_factory=lambda: TENSORS)

    @property
    def paths(self) -> tuple[Path, Path, Path, Path]:
        """What `rank_calls` is told of it."""
        assert self.src_strategy is not None and self.dst_strategy is not None
        return self.src, self.dst, self.src_strategy, self.dst_strategy

    def shard(self, rank: int) -> Path:
        """The source shard of `rank`."""
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[self.kind]}"

    def written(self, rank: int) -> Path:
        """The target shard of `rank`."""
        return self.dst / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[self.kind]}"

    def arrays(self, rank: int) -> Arrays:
        """What the source shard of `rank` holds."""
        return expected_rank(self.source, self.tensors, rank)

    def expected(self, rank: int) -> Read:
        """What the target shard of `rank` must hold, by the oracle, in the terms of `read_shard`."""
        return as_read(expected_rank(self.target, self.tensors, rank))

    def rewrite(self, rank: int, changes: Mapping[str, np.ndarray | None]) -> None:
        """Write the source shard of `rank` anew, with other tensors in it (None: without)."""
        arrays = {**self.arrays(rank), **changes}
        write_shard({name: array for name, array in arrays.items() if array is not None}, self.shard(rank))

    def remove(self, *ranks: int) -> None:
        """Remove source shards with their folders."""
        for rank in ranks:
            shutil.rmtree(self.shard(rank).parent)

    def strategy(self, name: str, layouts: Mapping[str, RawLayout]) -> Path:
        """Write another strategy file and return its path."""
        size = next(iter(layouts.values())).stage_size
        return write_strategy(Side(size, 1, dict(layouts)), self.folder / name)

    def to(self, target: Side) -> Conversion:
        """Return the same with another target, whose strategy is written."""
        return self.but(target=target, dst_strategy=write_strategy(target, self.folder / "other_target"))

    def but(self, **changes: object) -> Conversion:
        """Return the same with other values of these fields; nothing is written."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def arguments(self, command: str = "transform", *options: str) -> list[str]:
        """Return the command line; `--jobs 1` unless another number is given, so that no worker is started."""
        given = [command, str(self.src), str(self.dst)]
        for name, path in (("--src-strategy", self.src_strategy), ("--dst-strategy", self.dst_strategy)):
            given += [name, str(path)] if path is not None else []
        has_jobs = command not in ("transform", "verify") or "--jobs" in options
        return [*given, *self.options, *options, *([] if has_jobs else ["--jobs", "1"])]

    def run(self, command: str = "transform", *options: str) -> Finished:
        """Run it without progress: on standard error are only notes, warnings and errors."""
        shows_none = ("--progress", "none") if command in ("transform", "verify") else ()
        return run_here(*self.arguments(command, *options), *shows_none)


def write_conversion(
    folder: Path, kind: str, source: Side, target: Side, tensors: Arrays, *, to: str | None = None
) -> Conversion:
    """Write shards of `kind` and the strategies of both sides under `folder`. to: another format of the targets."""
    write_shards(source, tensors, folder / "src", kind)
    strategies = [
        write_strategy(side, folder / name) for side, name in ((source, "src_strategy"), (target, "dst_strategy"))
    ]
    options = () if to is None else ("--to", to)
    return Conversion(folder, to or kind, source, target, folder / "src", folder / "dst", *strategies, options, tensors)


def make(folder: Path, kind: str = "ckpt") -> Conversion:
    """Write the small conversion."""
    return write_conversion(folder, kind, side(4, SRC_LAYOUTS), side(2, DST_LAYOUTS), TENSORS)


def four_targets(folder: Path, kind: str = "ckpt") -> Conversion:
    """Write the small conversion, with four targets."""
    return make(folder, kind).to(side(4, FOUR_LAYOUTS))


def side(ranks: int, layouts: Mapping[str, RawLayout]) -> Side:
    """Return one stage of ranks with `layouts`; what follows `w` and what every rank holds are not in its strategy."""
    every_layout = {**layouts, "moments.w": layouts["w"], "global_step": RawLayout((ranks,), ())}
    return Side(ranks, 1, every_layout, frozenset({"moments.w", "global_step"}))


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return every path under `folder` with its contents (None: a folder); nothing if it is not there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def timeless(folder: Path) -> dict[str, bytes | None]:
    """Return the same without the times of files that the records of targets keep, and checks of these records."""
    return {
        name: content and re.sub(rb'"(modified_ns|check)": (\d+|{[^}]*}|"[^"]*")', rb'"\1": 0', content)
        for name, content in listing(folder).items()
    }


def shards(folder: Path) -> dict[str, bytes | None]:
    """Return what lies in the rank folders of `folder`."""
    return {name: content for name, content in listing(folder).items() if name.startswith("rank_")}


def assert_right(c: Conversion, ranks: Sequence[int] | None = None) -> None:
    """Check that these targets (None: all) are right, and that no others and no partial files are there."""
    ranks = range(c.target.world_size) if ranks is None else ranks
    assert set(c.dst.glob("rank_*/*")) == {c.written(rank) for rank in ranks}
    for rank in ranks:
        assert read_shard(c.written(rank)) == c.expected(rank)


def transform_apart(
    c: Conversion,
    *options: str,
    mpi: MPI | None = None,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    check: bool = False,
) -> Finished:
    """Run `transform` in a process of its own, forked from one that has loaded it; with `mpi`, on so many ranks."""
    arguments = c.arguments("transform", *options)
    if mpi is not None:
        return run_apart(*arguments, mpi=mpi, ranks=ranks, env=env, check=check)
    finished = zygote().run([*COMMAND, *arguments], env=env)
    assert finished.code == 0 or not check, finished
    return finished


def transform_by_function(c: Conversion, process_num: int = 1, **options: Any) -> None:
    """Call `transform_checkpoints` for targets of the conversion's format."""
    paths = (c.src, c.dst, "checkpoint_", c.src_strategy, c.dst_strategy)
    reshard_mpi.transform_checkpoints(*paths, process_num, **{"output_format": c.kind, **options})


def resume(c: Conversion) -> str:
    """Finish a run in this process; return what it says."""
    return c.done("transform", "--resume").out

"""A small conversion with real files, 4 ranks to 2, for tests to spoil; and ways to run the command line on it."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from reshard_mpi.cli import commands
from support.cases import Side
from support.checkpoints import (
    ENDINGS,
    Arrays,
    as_read,
    expected_rank,
    read_shard,
    write_shard,
    write_shards,
    write_strategy,
)
from support.oracle import RawLayout

COMMAND = [sys.executable, "-m", "reshard_mpi"]

# Source: 2 data parallel x 2 model parallel ranks; columns cut, so ranks 0 and 2 hold the same, as 1 and 3 do.
SRC_LAYOUTS = {"w": RawLayout((2, 2), (-1, 0)), "b": RawLayout((2, 2), (-1,))}
# Target: 2 ranks, rows cut.
DST_LAYOUTS = {"w": RawLayout((2,), (0, -1)), "b": RawLayout((2,), (-1,))}
TENSORS: Arrays = {
    "w": np.arange(32, dtype=np.float32).reshape(8, 4),
    "b": np.arange(8, dtype=np.int64),
    "moments.w": -np.arange(32, dtype=np.float32).reshape(8, 4),
    "global_step": np.array(7, np.int32),
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """Paths of a conversion, and what it is about. None: the option is left out."""

    folder: Path
    kind: str
    source: Side
    target: Side
    src: Path
    dst: Path
    src_strategy: Path | None
    dst_strategy: Path | None
    options: tuple[str, ...] = ()

    def shard(self, rank: int) -> Path:
        """The source shard of `rank`."""
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[self.kind]}"

    def written(self, rank: int) -> Path:
        """The target shard of `rank`."""
        return self.dst / f"rank_{rank}" / f"checkpoint_{rank}.{ENDINGS[self.kind]}"

    def arrays(self, rank: int) -> Arrays:
        """What the source shard of `rank` holds."""
        return expected_rank(self.source, TENSORS, rank)

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

    def but(self, **changes: object) -> Conversion:
        return replace(self, **changes)  # type: ignore[arg-type]

    def arguments(self, command: str = "transform", *options: str) -> list[str]:
        """Return the command line."""
        given = [command, str(self.src), str(self.dst)]
        for name, path in (("--src-strategy", self.src_strategy), ("--dst-strategy", self.dst_strategy)):
            given += [name, str(path)] if path is not None else []
        return [
            *given,
            *self.options,
            *options,
            *(["--jobs", "1"] if command == "transform" and "--jobs" not in options else []),
        ]


def make(folder: Path, kind: str = "ckpt") -> Conversion:
    """Write shards and strategy files under `folder`."""
    source = side(4, SRC_LAYOUTS)
    target = side(2, DST_LAYOUTS)
    write_shards(source, TENSORS, folder / "src", kind)
    src_strategy = write_strategy(source, folder / "src_strategy")
    dst_strategy = write_strategy(target, folder / "dst_strategy")
    return Conversion(folder, kind, source, target, folder / "src", folder / "dst", src_strategy, dst_strategy)


def side(ranks: int, layouts: Mapping[str, RawLayout]) -> Side:
    """Return one stage of ranks with `layouts`; what follows `w` and what every rank holds are not in its strategy."""
    held = {**layouts, "moments.w": layouts["w"], "global_step": RawLayout((ranks,), ())}
    return Side(ranks, 1, held, frozenset({"moments.w", "global_step"}))


@dataclass(frozen=True, slots=True)
class Said:
    """What the command line ended with."""

    code: int
    out: str
    err: str


def command_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    """Run the command line in this process."""
    handlers, hook = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}, sys.unraisablehook
    try:
        commands.main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return Said(end.code, *capsys.readouterr())
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        sys.unraisablehook = hook
    raise AssertionError("the command line must exit")


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return every path under `folder` with its contents (None: a folder); nothing if it is not there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def shards(folder: Path) -> dict[str, bytes | None]:
    """Return what lies in the rank folders of `folder`."""
    return {name: content for name, content in listing(folder).items() if name.startswith("rank_")}


TARGETS = {"w": RawLayout((4,), (0, -1)), "b": RawLayout((2, 2), (1,))}


def four_targets(folder: Path, kind: str = "ckpt") -> Conversion:
    """Return the small conversion, with four targets."""
    c = make(folder, kind)
    target = side(4, TARGETS)
    return c.but(target=target, dst_strategy=write_strategy(target, folder / "four"))


def assert_right(c: Conversion, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Check that these targets are right, and that no others and no partial files are there."""
    assert set(c.dst.glob("rank_*/*")) == {c.written(rank) for rank in ranks}
    for rank in ranks:
        assert read_shard(c.written(rank)) == as_read(expected_rank(c.target, TENSORS, rank))


def resume(c: Conversion, capsys: pytest.CaptureFixture[str]) -> str:
    """Finish a run in this process; return what it says."""
    said = command_line(capsys, *c.arguments("transform", "--resume"))
    assert said.code == 0, said
    return said.out


def warnings(said: str) -> list[str]:
    return [line.removeprefix("warning: ") for line in said.splitlines() if line.startswith("warning: ")]


def make_with(
    tmp_path: Path,
    kind: str = "ckpt",
    *,
    tensors: dict[str, np.ndarray],
    src: dict[str, RawLayout],
    dst: dict[str, RawLayout],
    ranks: tuple[int, int] = (4, 2),
    stages: tuple[int, int] = (1, 1),
) -> Conversion:
    """Make a conversion of these tensors; a layout says where a tensor lies, whether or not the strategy lists it."""
    source, target = (Side(ranks[i], stages[i], layouts) for i, layouts in enumerate((src, dst)))
    write_shards(source, tensors, tmp_path / "src", kind)
    strategies = (write_strategy(side, tmp_path / name) for side, name in ((source, "s"), (target, "d")))
    return Conversion(tmp_path, kind, source, target, tmp_path / "src", tmp_path / "dst", *strategies)


def assert_targets_right(c: Conversion) -> None:
    for rank in range(c.target.world_size):
        assert read_shard(c.written(rank)) == as_read(expected_rank(c.target, TENSORS, rank))

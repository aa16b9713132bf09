"""Tensors cut along rows over several safetensors files, put together along columns and saved.

`safetensors_columns.py make SOURCE COUNT ROWS COLUMNS SOURCES TARGETS` writes the files;
`safetensors_columns.py reshard SOURCE OUTPUT COUNT ROWS COLUMNS SOURCES TARGETS RANK` makes one target.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def make(folder: Path, count: int, rows: int, columns: int, sources: int) -> None:
    """Write one file for each source."""
    for rank in range(sources):
        noise = np.random.default_rng(rank)
        held = {f"w.{at}": noise.random((rows // sources, columns), np.float32) for at in range(count)}
        save_file(held, folder / f"{rank}.safetensors")


def reshard(source: Path, output: Path, columns: int, sources: int, targets: int, rank: int) -> None:
    """Make one target."""
    width = columns // targets
    with ExitStack() as opened:
        files = [
            opened.enter_context(safe_open(source / f"{number}.safetensors", framework="numpy"))
            for number in range(sources)
        ]
        held = {
            name: np.concatenate([file.get_slice(name)[:, rank * width : (rank + 1) * width] for file in files])
            for name in files[0].keys()  # noqa: SIM118 - it is no mapping
        }
    save_file(held, output / f"{rank}.safetensors")


def main() -> None:
    """Do what the command line says."""
    task, source, *rest = sys.argv[1:]
    if task == "make":
        count, rows, columns, sources, _ = map(int, rest)
        make(Path(source), count, rows, columns, sources)
    else:
        output, *numbers = rest
        _, _, columns, sources, targets, rank = map(int, numbers)
        reshard(Path(source), Path(output), columns, sources, targets, rank)


main()

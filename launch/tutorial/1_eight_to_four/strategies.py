"""Where strategy files come from: MindSpore's compiler where it is installed, else the files that it once wrote.

`python strategies.py` says whether it is: yes or no.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from checkpoint_files import load
from known_tensors import Arrays

if TYPE_CHECKING:
    from compile_only import Compiled

SHIPPED = Path(__file__).parent / "strategies"


def has_compiler() -> bool:
    """Tell whether the MindSpore is installed whose compiler `compile_only` knows how to start."""
    try:
        return metadata.version("mindspore").startswith("2.10.")
    except metadata.PackageNotFoundError:
        return False


def compile_or_copy(shipped: str, path: Path, *, cards: int, rank: int, **how: Any) -> Compiled | None:
    """Write a strategy file by MindSpore's compiler, or copy the one that ships with the tutorial.

    The compiler must write what ships, byte by byte. Returns what it says of rank `rank`; None without MindSpore.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the guide all ranks name one file: each makes one of its own, and puts it in its place whole.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written, compiled = Path(folder, path.name), None
        if has_compiler():
            import compile_only

            compiled = compile_only.compile_network(cards, rank, written, **how)
            if written.read_bytes() != (SHIPPED / shipped).read_bytes():
                raise SystemExit(f"MindSpore's compiler has written another strategy than {SHIPPED / shipped}")
        else:
            shutil.copyfile(SHIPPED / shipped, written)
        written.replace(path)
    return compiled


def require_same_slices(compiled: Compiled | None, tensors: Arrays, shard: Path) -> None:
    """Compare a shard with the slices that MindSpore's compiler cuts of the whole tensors; exit where one differs."""
    if compiled is None:
        return
    import compile_only

    slices = compile_only.slices_of(compiled, tensors)
    require_same(load(shard), slices, shard)
    print(f"rank {compiled.rank}: the {len(slices)} slices are those that MindSpore's own compiler cuts")


def require_same(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], shard: Path) -> None:
    """Exit unless a shard holds the expected tensors, no more and no less, equal in every byte."""
    if set(tensors) != set(expected):
        raise SystemExit(f"{shard}: expected {sorted(expected)}, got {sorted(tensors)}")
    for name, array in expected.items():
        if tensors[name].shape != array.shape or tensors[name].tobytes() != array.tobytes():
            raise SystemExit(f"{shard}: {name!r} is not the slice that this rank must hold")


if __name__ == "__main__":
    print("yes" if has_compiler() else "no")

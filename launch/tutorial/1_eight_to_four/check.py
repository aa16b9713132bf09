"""Holds every slice of a converted checkpoint against the whole tensors, cut by numpy.

    python check.py DST CUT [STATE ...]

DST: the folder with rank_0 to rank_3. CUT: the function of known_tensors.py that cuts. STATE: the optimizer's states
that must be there (moments).
"""

from __future__ import annotations

import sys
from pathlib import Path

import known_tensors
from checkpoint_files import load
from strategies import require_same


def check(folder: Path, cut_name: str, states: list[str]) -> int:
    """Return how many slices there are; exit where one is wrong, or where there are other ranks than 0 to 3."""
    cut, tensors = getattr(known_tensors, cut_name), known_tensors.whole_tensors(*states)
    for rank in range(4):
        shard = folder / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        require_same(load(shard), {name: cut(name, whole, rank) for name, whole in tensors.items()}, shard)
    ranks = sorted(path.name for path in folder.iterdir() if path.name.startswith("rank_"))
    if ranks != [f"rank_{rank}" for rank in range(4)]:
        raise SystemExit(f"{folder}: expected 4 ranks, got {ranks}")
    return 4 * len(tensors)


if __name__ == "__main__":
    count = check(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    print(f"{sys.argv[1]}: {count} slices equal those of the whole tensors")

"""Puts the losses of the second epoch side by side: unbroken on 8 cards, and gone on with 4 and with 1.

python compare_losses.py losses_8.json losses_4.json losses_1.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 1e-5  # the order of additions depends on how the network is cut


def main(paths: list[str]) -> None:
    """Print the table; exit where a loss is not that of the first column."""
    columns = np.array([json.loads(Path(path).read_text()) for path in paths])
    print("step", *(f"{Path(path).stem:>10}" for path in paths))
    for step, losses in enumerate(columns.T, 1):
        print(f"{step:4}", *(f"{loss:10.6f}" for loss in losses))
    furthest = float(np.abs(columns / columns[0] - 1).max())
    print(f"{columns.size} losses agree to {furthest:.0e}")
    if not furthest < TOLERANCE:
        raise SystemExit(f"expected: to {TOLERANCE:.0e}")


if __name__ == "__main__":
    main(sys.argv[1:])

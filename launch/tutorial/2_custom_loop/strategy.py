"""Prints a strategy of LeNet for any number of ranks, as even as may be.

    python strategy.py 3 >three.toml

Few numbers divide 6, 10, 16, 84 and 120 alike, so each rule says how large the slices are: all as large as the first,
rounded up, but the last ones. The optimizer's momentum is not listed; it follows the weights.
"""

from __future__ import annotations

import sys

# Which dimension is cut, and how long it is.
CUT = {"conv1.weight": (0, 6), "conv2.weight": (1, 6), "fc1.*": (0, 120), "fc2.*": (0, 84), "fc3.*": (0, 10)}


def sizes(length: int, ranks: int) -> list[int]:
    """Return the lengths of the slices; with more ranks than rows the last ones are empty."""
    step = -(-length // ranks)
    return [max(0, min(step, length - rank * step)) for rank in range(ranks)]


def main(ranks: int) -> None:
    """Print the strategy."""
    print(f"mesh = {{ card = {ranks} }}")
    for pattern, (dimension, length) in CUT.items():
        print(f'\n[[parameter]]\nmatch = "{pattern}"')
        print(f'split = {{ {dimension} = ["card"] }}\nsizes = {{ {dimension} = {sizes(length, ranks)} }}')
    print('\n[[parameter]]\nmatch = "*"')


if __name__ == "__main__":
    main(int(sys.argv[1]))

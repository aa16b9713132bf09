"""`python -m benchmarks conversion`: run a benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.conversion import measure


def main() -> None:
    """Parse the command line and run the benchmark it names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    conversion = commands.add_parser("conversion", help="a whole conversion beside cp of what it writes")
    conversion.add_argument("--megabytes", type=int, default=735, help="size of the tensors (default: %(default)s)")
    conversion.add_argument("--pairs", type=int, default=5, help="interleaved pairs of runs (default: %(default)s)")
    conversion.add_argument("--processes", type=int, default=2, help="of either side (default: %(default)s)")
    conversion.add_argument("--format", choices=("ckpt", "hdf5"), default="ckpt")
    conversion.add_argument("--folder", type=Path, help="where to work (default: memory, if there is room)")
    options = parser.parse_args()
    print(measure(options.megabytes, options.pairs, options.processes, options.format, options.folder))


if __name__ == "__main__":
    main()

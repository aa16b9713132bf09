"""The options that the guide's scripts have, and one of ours."""

from __future__ import annotations

import argparse

_HELP = {
    "src_strategy_dir": "the strategy files of the source's pipeline stages",
    "src_strategy_file": "the source's strategy",
    "dst_strategy_file": "the target's strategy",
    "src_checkpoints_dir": "the source: rank_x/checkpoint_x.ckpt",
    "dst_checkpoints_dir": "the target: rank_x/checkpoint_x.ckpt",
}


def parse_arguments(description: str | None, **defaults: str) -> argparse.Namespace:
    """Parse the options that are named in `defaults`, each a path, and those that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", default=default, help=f"{_HELP[name]} (default: {default})")
    parser.add_argument(
        "--only_compile", type=int, choices=[0, 1], default=0, help="1: make the target's strategy and convert"
    )
    parser.add_argument(
        "--sharding",
        choices=["guide", "cpu"],
        default="guide",
        help="guide: as the guide cuts the network; cpu: as MindSpore's CPU build can train it",
    )
    return parser.parse_args()

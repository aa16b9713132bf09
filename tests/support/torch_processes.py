"""Starts a script of this folder as several processes of torch, and ends one of these: `run_processes`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn


def run_processes(script: str, ranks: int, *paths: Path, first: tuple[str, ...] = (), seconds: int = 240) -> None:
    """Run `script FIRST RANK RANKS PATHS` for every rank; all of them must succeed."""
    command = [sys.executable, Path(__file__).with_name(script), *first]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), *paths], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=seconds)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)


def end_process() -> NoReturn:
    """End this process when all others have come as far."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
    sys.stdout.flush()
    os._exit(0)

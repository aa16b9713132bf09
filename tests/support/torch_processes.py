"""Starts a script of this folder as several processes of torch, and ends one of these: `run_processes`.

The processes are forks of one that has imported what the script does, which takes longer than what each of them does.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn


def run_processes(script: str, ranks: int, *paths: Path, first: tuple[str, ...] = (), seconds: int = 240) -> None:
    """Run `script FIRST RANK RANKS PATHS` for every rank; all of them must succeed."""
    from support.processes import run_command  # by another name where this file is a program

    arguments = [*first, "RANK", ranks, *paths]
    command = [sys.executable, __file__, str(Path(__file__).with_name(script)), *map(str, arguments)]
    run_command(command, timeout_seconds=seconds, check=True)


def _fork_ranks(script: str, arguments: list[str]) -> NoReturn:
    """Run a script in a fork for each rank; end with the worst of their exit codes."""
    runpy.run_path(script)  # under another name than that of a program: only what it imports is done
    ranks = int(arguments[arguments.index("RANK") + 1])
    forks = []
    for rank in range(ranks):
        fork = os.fork()
        if fork == 0:
            sys.argv = [script, *(str(rank) if argument == "RANK" else argument for argument in arguments)]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        forks.append(fork)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])) for fork in forks))


def end_process() -> NoReturn:
    """End this process when all others have come as far."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor when Python takes itself apart, and now and then the process aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], sys.argv[2:])

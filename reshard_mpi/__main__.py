"""`python -m reshard_mpi` and `reshard-mpi`: the command line."""

from __future__ import annotations

from typing import NoReturn

from reshard_mpi.start import begin_command


def command() -> NoReturn:
    """Be the process of the command line, which is loaded when there is memory for it."""
    begin_command()
    from reshard_mpi import cli

    cli.command()


if __name__ == "__main__":
    command()

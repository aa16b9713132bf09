"""`python -m reshard_mpi` and `reshard-mpi`: the command line.

Under `python -m` what is imported here is imported by the program, for which Python looks in the working folder first.
So nothing is, but what lies in this package.
"""

from reshard_mpi.cli.start import begin_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def command() -> "NoReturn":
    """Be the process of the command line, which is loaded when there is memory for it."""
    begin_command()
    from reshard_mpi.cli import commands

    commands.command()


if __name__ == "__main__":
    command()

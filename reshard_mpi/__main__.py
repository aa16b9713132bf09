"""`python -m reshard_mpi` and `reshard-mpi`: the command line.

Under `python -m` what is imported here is imported by the program, for which Python looks in the working folder first.
So nothing is, but what lies in this package and what is part of the interpreter.
"""

import _signal  # type: ignore[import-not-found]
import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def command() -> "NoReturn":
    """Be the process of the command line, which is loaded when there is memory for it.

    No garbage is collected, not even while modules are loaded: hardly anything that is made here is cyclic, and to look
    for it would take longer than a small conversion.
    """
    gc.disable()
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored, and stays so
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no tracebacks of half-loaded modules
    from reshard_mpi.cli.first_lease import end_if_stopped, take_first_lease

    take_first_lease()
    try:
        from reshard_mpi.cli import commands

        commands.command()
    except (KeyboardInterrupt, SystemExit) as end:
        end_if_stopped(end)
        raise


if __name__ == "__main__":
    command()

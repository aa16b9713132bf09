"""Starts a command, waits for it, and writes its exit code and its tree's peak resident memory in bytes to a file.

Run as `python -I -S peak_launcher.py RESULT COMMAND...`, so that this process, whose own size is the floor of what can
be measured, stays small.
"""

import os
import sys

result, *command = sys.argv[1:]
pid = os.posix_spawnp(command[0], command, os.environ)
# The usage of a child that was waited for covers the children it waited for itself; of memory, the largest counts.
_, status, usage = os.wait4(pid, 0)
returncode = os.waitstatus_to_exitcode(status)
with open(result, "w") as file:  # noqa: PTH123 - pathlib would make this process larger
    file.write(f"{returncode} {usage.ru_maxrss * 1024}")
sys.exit(returncode if returncode >= 0 else 128 - returncode)

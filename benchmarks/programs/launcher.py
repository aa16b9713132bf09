"""Starts commands side by side, waits for all of them, and writes what they took to a file.

Run as `python -S -E -s launcher.py RESULT COMMANDS`, the commands being a JSON list of argument lists. A process of its
own, and a small one: a child starts with the peak memory of whoever started it, and counters of children that were
waited for tell only their sum.
"""

import json
import os
import resource
import sys
import time


def io_bytes() -> tuple[int, int]:
    """Return what this process and the children it has waited for have read and written so far."""
    with open("/proc/self/io") as counters:  # noqa: PTH123 - pathlib would make this process larger
        found = dict(line.split(": ") for line in counters)
    return int(found["rchar"]), int(found["wchar"])


def main() -> None:
    """Run the commands of the command line."""
    result, commands = sys.argv[1], json.loads(sys.argv[2])
    read_bytes, written_bytes = io_bytes()
    begin = time.perf_counter()
    pids = [os.posix_spawnp(command[0], command, os.environ) for command in commands]
    ended = dict(os.waitpid(pid, 0) for pid in pids)
    seconds = time.perf_counter() - begin
    read_until, written_until = io_bytes()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "read_bytes": read_until - read_bytes,
        "written_bytes": written_until - written_bytes,
        "codes": [os.waitstatus_to_exitcode(status) for status in ended.values()],
    }
    with open(result, "w") as file:  # noqa: PTH123
        json.dump(facts, file)


main()

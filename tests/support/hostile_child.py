"""Have the package read hostile files, each in a process with limits, and print the outcome and the cost.

Every line of its input is a JSON of the kind (a name of `KINDS`), the path, and what is added to the environment; it is
answered by a line of JSON, which a fork makes: this process has loaded what all need. Processor time is given in units
of a reference workload that was measured at its start, so a bound on it holds on a machine of any speed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from reshard_mpi import formats
from reshard_mpi.errors import ReshardError
from reshard_mpi.formats.locations import LibraryRead
from reshard_mpi.sharding import strategy_files, strategy_table
from reshard_mpi.sharding.box import Box

# Beyond what is measured: more than this is a failure of another kind, before it is one of the machine.
_ROOM_BYTES = 256 << 20


def locate(path: str) -> None:
    formats.by_name(formats.name_of(path) or "").locate(path)


def read(path: str) -> None:
    """Read every tensor that must be decoded."""
    for entry in formats.by_name(formats.name_of(path) or "").locate(path).tensors.values():
        if isinstance(entry.source, LibraryRead):
            entry.source.read(Box.whole(entry.shape))


def load_strategy(path: str) -> None:
    strategy_files.load(path)


def load_table(path: str) -> None:
    strategy_table.loads(Path(path).read_text(), path)


KINDS = {"locate": locate, "read": read, "strategy": load_strategy, "table": load_table}


def status(pid: int, field: str) -> int:
    """Return a figure of a process's memory in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def helper() -> int | None:
    """Return the process that has the HDF5 library, if there is one."""
    module = sys.modules.get("reshard_mpi.formats.hdf5.reader_process")
    process = module and module._keeper._process
    return process.pid if process else None


def warm_up(kind: str, path: str) -> None:
    """Load what reading a sound file of this kind loads, so that only the hostile one is measured."""
    sound = Path(__file__).parents[1] / "fuzz" / "corpus"
    if formats.name_of(path) == "hdf5":
        from reshard_mpi.formats.hdf5 import reader_process

        for seed in ("seed-0", "seed-1", "seed-6"):
            example = sound / "hdf5_foreign" / seed
            for entry in reader_process.locate(str(example), example.stat().st_size).tensors.values():
                if isinstance(entry.source, LibraryRead):
                    entry.source.read(Box.whole(entry.shape))
    elif kind == "strategy":
        for parser in ("strategy_protobuf", "strategy_json", "strategy_toml"):
            strategy_files.load(str(sound / parser / "seed-0"))
    elif formats.name_of(path):
        formats.by_name("ckpt")


def answer(kind: str, path: str, unit_seconds: float) -> dict[str, Any]:
    """Read `path` and return what came of it."""
    warm_up(kind, path)
    opened: set[str] = set()
    sys.addaudithook(lambda event, arguments: opened.add(str(arguments[0])) if event == "open" else None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allowed = status(os.getpid(), "VmData") + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    helping = helper()
    for pid in filter(None, (os.getpid(), helping)):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is from now on
    before, helper_before = status(os.getpid(), "VmRSS"), status(helping, "VmHWM") if helping else 0
    begin_cpu = cpu_seconds(helping)
    error: BaseException | None = None
    try:
        KINDS[kind](path)
    except BaseException as caught:
        error = caught
    lasting = helper()
    if helping and helping == lasting:
        helper_growth, used = status(helping, "VmHWM") - helper_before, cpu_seconds(helping) - begin_cpu
    else:  # it has died
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        helper_growth = 1024 * children.ru_maxrss - helper_before if helping else 0
        used = cpu_seconds(None) + children.ru_utime + children.ru_stime - begin_cpu
    return {
        "error": type(error).__name__ if error else None,
        "is_ours": isinstance(error, ReshardError),
        "problem": str(error),
        "growth_bytes": status(os.getpid(), "VmHWM") - before,
        "helper_growth_bytes": helper_growth,
        "work": used / unit_seconds,
        "opened": sorted(opened),
    }


def reference_seconds() -> float:
    """Return the processor time of a fixed piece of work that shares no code with the package: the least of five."""
    return min(map(_counted_bytes, range(5)))


def _counted_bytes(_: int) -> float:
    begin, total = time.process_time(), 0
    for number in range(400_000):
        total += number & 0x7F
    return time.process_time() - begin + 0 * total


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time of this process, and of another one that lives."""
    used = time.process_time()
    if pid:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def main() -> None:
    unit_seconds = reference_seconds()
    for line in sys.stdin:
        kind, path, environment = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(environment)
                print(json.dumps(answer(kind, path, unit_seconds)), flush=True)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            print(json.dumps({"is_ours": False, "problem": f"exit code {code}"}), flush=True)


if __name__ == "__main__":
    main()

"""Open a checkpoint, and read one row of each tensor: `open_checkpoint.py SOURCE STRATEGY [--peer] [--rows]`.

Prints the seconds from before it is opened until all is read, and by how much the process has grown meanwhile. What is
imported by then does not count. With --peer safetensors does it.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path


def of_safetensors(source: str, rows: bool) -> Callable[[], None]:
    """Return what safetensors does."""
    import numpy as np
    from safetensors import safe_open

    assert np
    (path,) = Path(source).rglob("*.safetensors")

    def read() -> None:
        with safe_open(path, framework="numpy") as opened:
            for name in opened.keys() if rows else ():
                opened.get_slice(name)[5:6]

    return read


def of_ours(source: str, strategy: str, rows: bool) -> Callable[[], None]:
    """Return what we do."""
    import numpy as np

    import reshard_mpi.api
    from reshard_mpi import formats
    from reshard_mpi.engine import regions
    from reshard_mpi.journal import record_finder
    from reshard_mpi.planning import chunk_reads, made_tensors

    assert np and regions and record_finder and chunk_reads and made_tensors
    for form in formats.all_formats():
        form.load()

    def read() -> None:
        with reshard_mpi.api.open(source, src_strategy=strategy or None, check=False) as checkpoint:
            for name in checkpoint if rows else ():
                checkpoint[name][5:6]

    return read


def main() -> None:
    """Do what the command line says."""
    source, strategy, *flags = sys.argv[1:]
    rows = "--rows" in flags
    read = of_safetensors(source, rows) if "--peer" in flags else of_ours(source, strategy, rows)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    read()
    seconds = time.perf_counter() - begin
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    print(json.dumps({"seconds": seconds, "grown_bytes": 1024 * grown_kib}))


main()

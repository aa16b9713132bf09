"""One rank of `launch.run_ranks`: calls the function that waits in a folder and leaves its result there."""

from __future__ import annotations

import faulthandler
import json
import pickle
import sys
import time
from pathlib import Path

from mpi4py import MPI


def main(folder: Path) -> None:
    """Call the function that `folder` has, and leave there what it returned."""
    call = json.loads((folder / "call.json").read_text())
    # Before the job is killed for taking too long, every rank says where it hangs.
    faulthandler.dump_traceback_later(max(call["complain_at"] - time.time(), 0.1))
    sys.path[:] = call["sys_path"]
    function, args = pickle.loads((folder / "call.pickle").read_bytes())
    value = pickle.dumps(function(*args))
    partial = folder / f"partial_{MPI.COMM_WORLD.rank}"
    partial.write_bytes(value)
    partial.rename(folder / f"result_{MPI.COMM_WORLD.rank}.pickle")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

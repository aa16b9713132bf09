"""Which of several checkpoints in a folder was chosen, in words that processes, tasks and later runs can compare.

A folder may hold checkpoints of several moments, and a training may add another one at any time. Then whoever looks
later chooses other files, of the same structure and with other values.
"""

from __future__ import annotations

import hashlib
import json

from reshard_mpi.checkpoints.discovery import ShardFiles
from reshard_mpi.checkpoints.shard_names import NAME_WAYS, name_ending_in_rank, name_without_rank
from reshard_mpi.planning.model import CHOSEN_FILES, Moment

_DIGEST_LENGTH = 32


def chosen_files(files: ShardFiles) -> str:
    """Return what the files are called in all ranks, with `<rank>` for the rank; else a name and a digest of all names.

    What all ranks are called by is the same if some of them are missing, or restored.
    """
    names = {rank: tuple(path.rpartition("/")[2] for path in paths) for rank, paths in files.by_rank.items()}
    if all(len(own) == 1 for own in names.values()):
        # First the way that calls a single rank as it calls many.
        for way in (name_without_rank, *NAME_WAYS, name_ending_in_rank):
            called = (way(rank, own[0]) for rank, own in names.items())
            first = next(called, None)
            if first is not None and all(other == first for other in called):  # most ways are given up at once
                return first
    digest = hashlib.sha256(json.dumps(sorted((rank, sorted(own)) for rank, own in names.items())).encode())
    least, count = min((min(own) for own in names.values() if own), default=""), sum(map(len, names.values()))
    return f"{least} and {count - 1} more, sha256:{digest.hexdigest()[:_DIGEST_LENGTH]}"


def moments_of(files: ShardFiles) -> tuple[Moment, ...]:
    """Return what all who read the checkpoint must agree in: its files, and its folder if that is the latest of some.

    Another checkpoint may become the newest while processes begin.
    """
    chosen = Moment(CHOSEN_FILES, chosen_files(files), files.path)
    return (chosen, Moment("latest checkpoint", files.latest, files.path)) if files.latest else (chosen,)

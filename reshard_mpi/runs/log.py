"""The logger "reshard_mpi": what the functions have to say to callers that listen to it."""

from __future__ import annotations

from collections.abc import Iterable

from reshard_mpi.text import one_line


def log(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Log what the command line prints after `note: ` at level INFO, what it prints after `warning: ` at WARNING."""
    import logging  # when there is a caller: the command line does without

    logger = logging.getLogger("reshard_mpi")
    for note in notes:
        logger.info("%s", one_line(note))
    for warning in warnings:
        logger.warning("%s", one_line(warning))

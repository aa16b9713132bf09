"""Small values that the ranks of an MPI run send to rank 0 now and then, for which nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Posts:
    """A way from every rank to rank 0, beside all other messages of the program. All ranks must open and close it.

    communicator: an mpi4py `Comm`.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator.Dup()
        self._on_its_way: Any = None
        self._sent = self._received = 0

    def send(self, value: object) -> None:
        """Send a value to rank 0, unless the one before is still on its way."""
        if self._on_its_way is None or self._on_its_way.Test():
            self._on_its_way = self._communicator.isend((self._communicator.Get_rank(), value), dest=0)
            self._sent += 1

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """Yield, on rank 0, what has arrived since the last call: the rank that sent it, and the value."""
        while self._communicator.iprobe():
            yield self._receive()

    def close(self) -> None:
        """End it when all ranks call this; what is still on its way is dropped."""
        sent = self._communicator.gather(self._sent)
        while sent is not None and self._received < sum(sent):
            self._receive()
        if self._on_its_way is not None:
            self._on_its_way.Wait()
        self._communicator.Free()

    def _receive(self) -> tuple[int, Any]:
        self._received += 1
        rank, value = self._communicator.recv()
        return rank, value

"""What the engine says of complete bytes of a target (`Finals`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path


class Finals:
    """Is told of complete bytes, as a target in a store is, and keeps them: they must not change any more."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.told: list[tuple[int, bytes]] = []

    def missing_in(self, offset: int, length_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield all: no store copies anything."""
        yield offset, length_bytes

    def final(self, offset: int, length_bytes: int) -> None:
        assert length_bytes > 0
        with self._path.open("rb") as file:
            file.seek(offset)
            self.told.append((offset, file.read(length_bytes)))
        assert len(self.told[-1][1]) == length_bytes

    def assert_each_once(self, payloads: Iterable[tuple[int, int]]) -> None:
        """Check that each byte of these spans, and no other, was told once, as it is now."""
        content = self._path.read_bytes()
        for offset, was in self.told:
            assert content[offset : offset + len(was)] == was, "bytes have changed after they were complete"
        told = sorted(byte for offset, was in self.told for byte in range(offset, offset + len(was)))
        assert told == [byte for start, end in payloads for byte in range(start, end)]

"""Foresee where the values of a `.ckpt` file begin, which tell it one after another (`Steps`).

Layers of a model are alike, so the distances between values repeat. Where each read is a trip to an object store, the
places that follow from the last few distances are read together with the one that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard_mpi.text import KIB

# By how many of the last distances the next one is told, the longer ones first.
_DEPTHS = (4, 3, 2, 1)
# How many values are foreseen at first, and at most; four times as many as were foreseen rightly.
_LEAST, _MOST, _AGAIN = 8, 512, 4
# What is read around a place: names of other lengths move it.
_BEFORE_BYTES, _BEHIND_BYTES = KIB, 3 * KIB


class Steps:
    """The distances between the places where a file was read, ascending."""

    def __init__(self) -> None:
        self._last = -1
        self._steps: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self._right = 0  # how many of the last ones were foreseen

    def add(self, offset: int) -> None:
        """Take note that the file is read at byte `offset`."""
        if 0 <= self._last < offset:
            step = offset - self._last
            foreseen = self._following(self._steps)
            is_right = foreseen is not None and abs(foreseen - step) <= _BEFORE_BYTES
            self._right = self._right + 1 if is_right else 0
            for depth in _DEPTHS:
                if len(self._steps) >= depth:
                    self._next[tuple(self._steps[-depth:])] = step
            self._steps.append(step)
            del self._steps[: -_DEPTHS[0]]
        self._last = offset

    def ahead(self) -> Iterator[tuple[int, int]]:
        """Yield the parts of the file in which the next values are likely to begin."""
        offset, steps = self._last, list(self._steps)
        for _ in range(min(_MOST, max(_LEAST, _AGAIN * self._right))):
            step = self._following(steps)
            if step is None:
                return
            offset += step
            steps = [*steps[1 - _DEPTHS[0] :], step]
            yield offset - min(_BEFORE_BYTES, step), offset + _BEHIND_BYTES

    def _following(self, steps: list[int]) -> int | None:
        """Return the distance that came behind the last ones before; None if they are new."""
        known = (self._next.get(tuple(steps[-depth:])) for depth in _DEPTHS if len(steps) >= depth)
        return next((step for step in known if step is not None), None)

"""Every parser with any bytes: what fuzzing has found is replayed, and real files are changed at random.

`tests/fuzz/fuzz.py` looks for more, for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import parsers
from hypothesis import given
from hypothesis import strategies as st

CORPUS = [
    pytest.param(name, path, id=f"{name}/{path.name}", marks=pytest.mark.slow if path.name.startswith("busy") else ())
    for name in parsers.PARSERS
    for path in parsers.corpus(name)
]
# Numbers that sizes and counts are compared with, or overflow at.
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


@pytest.mark.parametrize("parser, path", CORPUS)
def test_the_corpus(parser: str, path: Path) -> None:
    parsers.PARSERS[parser](path.read_bytes())


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A real file with a few changes: bits, numbers, parts removed, repeated, or taken from another file."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from((1, 1, 2, 4, 8, 64))))
        match draw(st.sampled_from(("bit", "number", "cut", "repeat", "graft", "bytes", "end"))):
            case "bit" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                width = draw(st.sampled_from((1, 2, 4, 8)))
                data[at : at + width] = (draw(st.sampled_from(NUMBERS)) % (1 << 8 * width)).to_bytes(width, "little")
            case "cut":
                del data[at:end]
            case "repeat":
                data[at:at] = data[at:end] * draw(st.integers(1, 50))
            case "graft":
                other = draw(st.sampled_from(seeds))
                start = draw(st.integers(0, len(other)))
                data[at:end] = other[start : start + end - at]
            case "bytes":
                data[at:end] = draw(st.binary(max_size=8))
            case "end":
                del data[at:]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("parser", parsers.PARSERS)
@given(data=st.data())
def test_changed_files(parser: str, data: st.DataObject) -> None:
    parsers.PARSERS[parser](data.draw(changed([path.read_bytes() for path in parsers.corpus(parser)])))


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for name in parsers.PARSERS for path in parsers.corpus(name)) < 300_000

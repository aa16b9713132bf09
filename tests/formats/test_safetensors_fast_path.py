"""Entries told by being like others, and entries read as JSON, are the same: in sound headers and damaged ones."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.safetensors_peer import file_of

from reshard_mpi.errors import ShardError
from reshard_mpi.filesystem.source_files import open_file
from reshard_mpi.formats import structure
from reshard_mpi.formats.safetensors import file_header
from reshard_mpi.formats.safetensors.file_header import HeaderContents, read

_SIZES = {"F32": 4, "U8": 1, "BF16": 2, "F": 8}
# Names that a header may say twice, that mean something, or that are written in more than one way.
NAMES = st.sampled_from(["w", "v", "", "__metadata__", "层", 'a"b', "a\\b", "\x7f", "n" * 1024, "n" * 1025, "n" * 4097])


def both(path: Path) -> tuple[HeaderContents | str, HeaderContents | str]:
    """Return what a file holds, or what is wrong with it, as it is read, and with each entry read as JSON."""

    def found() -> HeaderContents | str:
        try:
            with open_file(str(path)) as file:
                return read(file)
        except ShardError as error:
            return str(error)

    usual = found()
    with mock.patch.object(file_header, "_USUAL_ENTRY", re.compile("(?!)")):
        return usual, found()


@given(
    tensors=st.lists(
        st.tuples(
            NAMES | st.text(max_size=3),
            st.sampled_from(sorted(_SIZES)),
            st.lists(st.integers(0, 3), max_size=2),
            st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1, 1 << 63]),
        ),
        max_size=8,
    ),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(b'0159-,:[]{}"\\ \ne') | st.integers(0, 255))),
    is_spaced=st.booleans(),
    is_escaped=st.booleans(),
)
def test_both_ways_find_the_same(
    tensors: list[tuple[str, str, list[int], int]], flips: list[tuple[int, int]], is_spaced: bool, is_escaped: bool
) -> None:
    entries, begin = [], 0
    for name, dtype, shape, wrong in tensors:
        end = begin + _SIZES[dtype] * (shape[0] if shape else 1) * (shape[1] if shape[1:] else 1)
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin + wrong, end]}
        separators = None if is_spaced else (",", ":")
        texts = (json.dumps(each, ensure_ascii=is_escaped, separators=separators) for each in (name, entry))
        entries.append(":".join(texts))
        begin = end
    header = bytearray(f"{{{','.join(entries)}}}".encode(errors="surrogatepass"))
    for at, byte in flips[:2]:
        header[at % len(header)] = byte
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(file_of(bytes(header), bytes(begin)))
        usual, as_json = both(path)
    assert usual == as_json


@pytest.mark.parametrize("limit", ["MAX_TENSORS", "MAX_KEPT_BYTES"])
def test_limits_are_the_same(tmp_path: Path, limit: str) -> None:
    entries = {f"{n}": {"dtype": "U8", "shape": [2], "data_offsets": [2 * n, 2 * n + 2]} for n in range(99)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(json.dumps(entries, separators=(",", ":")).encode(), bytes(198)))
    with mock.patch.object(structure, limit, 50 if limit == "MAX_TENSORS" else 9000):
        usual, as_json = both(path)
    assert usual == as_json and "too m" in str(usual)


@pytest.mark.slow
def test_few_entries_are_read_as_json(tmp_path: Path) -> None:
    entries = {f"层.{n}": {"dtype": "U8", "shape": [2], "data_offsets": [2 * n, 2 * n + 2]} for n in range(5000)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode(), bytes(10_000)))
    with mock.patch.object(file_header, "as_object", wraps=file_header.as_object) as parsed:
        usual, as_json = both(path)
        assert usual == as_json and isinstance(usual, HeaderContents) and list(usual.tensors) == [*entries]
    assert parsed.call_count < 5000 + 20

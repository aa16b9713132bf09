"""JSON that is read part by part: the same values as the standard parser's, wherever the window ends."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.safetensors import json_reader
from reshard_mpi.formats.safetensors.json_reader import JsonReader, as_numbers, as_object, shown
from reshard_mpi.text import MIB

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=20,
)


def reader_of(content: bytes) -> JsonReader:
    return JsonReader(lambda start, length: content[start : start + length], "a.json", 0, len(content), "the text")


def read_whole(content: bytes) -> Any:
    """Return an object as pairs, members of objects in it as pairs, and items of arrays in it one by one."""
    reader = reader_of(content)
    read: list[Any] = []
    for key in reader.members():
        if reader.at_object:
            read.append((key, [(inner, reader.value()) for inner in reader.members()]))
        else:
            read.append((key, reader.value()))
    reader.require_end()
    return read


def expected(content: bytes) -> Any:
    whole = json.loads(content, object_pairs_hook=tuple)
    return [(key, list(value) if type(value) is tuple else value) for key, value in whole]


@many(150)
@given(
    value=st.dictionaries(TEXTS, VALUES, max_size=6),
    window=st.integers(40, 400),
    indent=st.sampled_from([None, 1]),
    ensure_ascii=st.booleans(),
)
def test_it_reads_what_the_standard_parser_reads(
    value: Any, window: int, indent: int | None, ensure_ascii: bool
) -> None:
    content = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "_WINDOW_BYTES", window)
        assert read_whole(content) == expected(content)


@many(150)
@given(
    value=st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), at=st.integers(0, 1 << 20), byte=st.integers(0, 255)
)
def test_what_is_damaged_is_refused_or_read_as_the_standard_parser_does(value: Any, at: int, byte: int) -> None:
    content = bytearray(json.dumps(value, ensure_ascii=False).encode())
    content[at % len(content)] = byte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_reader, "_WINDOW_BYTES", 64)
        try:
            read = read_whole(bytes(content))
        except ShardError as error:
            assert "a.json" in error.where
        else:
            assert read == expected(bytes(content))


REFUSED = {
    "nothing": b"",
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "a document behind": b'{"a": 1}{}',
    "a comma at the end": b'{"a": 1,}',
    "a comma at the beginning": b'{,"a": 1}',
    "half of a pair of surrogates": b'{"a": ["\\ud83d"]}',
    "half of a pair of surrogates in a name": b'{"\\ude00": 1}',
    "a character that must be escaped": b'{"a": "\n"}',
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-8 cut short": b'{"a": 1} \xe5\xb1',
    "a number of very many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "nested deeply": b'{"a": ' + b"[" * 200_000,
    "objects nested deeply": b'{"a": ' + b'{"a":' * 200_000,
    "a name that is a number": b"{1: 2}",
    "a long value": b'{"a": [' + b"0," * MIB + b"0]}",
    "a long name": b'{"' + b"a" * 2 * MIB + b'": 1}',
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises(ShardError) as caught:
        read_whole(REFUSED[case])
    assert "a.json" in caught.value.where and len(str(caught.value)) < 1000


def test_numbers_are_exact() -> None:
    reader = reader_of(
        b'{"a": [18446744073709551615, 0], "b": [1e3], "c": [-0], "d": [true], "e": [18446744073709551616]}'
    )
    values = {key: reader.value() for key in reader.members()}
    assert as_numbers(values["a"]) == ((1 << 64) - 1, 0)
    assert [as_numbers(values[key]) for key in "bcde"] == [None] * 4
    assert as_numbers([1] * 32) is not None and as_numbers([1] * 33) is None


def test_keys_that_are_there_twice_are_seen() -> None:
    reader = reader_of(b'{"a": {"b": 1, "b": 2}, "a": {"b": 1}}')
    assert [(key, as_object(reader.value())) for key in reader.members()] == [("a", None), ("a", {"b": 1})]


@pytest.mark.parametrize("end", [b'"', b'\\"', b""])
def test_a_text_that_is_too_long_is_passed_over(end: bytes) -> None:
    content = b'{"a": "' + b"\\u0041\\\\x" * 30_000 + end + b', "b": "x"}'
    reader = reader_of(content)
    if end == b'"':
        assert [(key, reader.text(1000)) for key in reader.members()] == [("a", None), ("b", "x")]
        return
    with pytest.raises(ShardError):
        [reader.text(1000) for _ in reader.members()]


def test_a_text_of_exactly_as_many_bytes_is_read() -> None:
    for length in (100_000, MIB):
        reader = reader_of(b'{"a": "%b"}%b' % (b"x" * length, b" " * 2 * MIB))
        assert [reader.text(length) for _ in reader.members()] == ["x" * length]


def test_the_error_names_the_byte() -> None:
    reader = reader_of('{"层": 1, "b" 2}'.encode())
    with pytest.raises(ShardError) as caught:
        [reader.value() for _ in reader.members()]
    assert caught.value.where == "a.json, byte 15"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["[],", '"ab",'])
def test_a_long_value_takes_little_memory(value: str) -> None:
    content = b'{"a": [' + value.encode() * (4 * MIB // len(value)) + b"0]}"
    tracemalloc.start()
    with pytest.raises(ShardError, match="too long"):
        read_whole(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 * MIB


def test_a_value_that_is_nested_deeply_is_shown() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert "deeply" in shown(deep) and shown([1]) == "[1]"

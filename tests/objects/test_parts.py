"""A target that is sent in parts while it is filled: each part once, with its bytes, and what stays can be read."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import md5
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.engine.source_ranges import TargetRange, plan_parts
from reshard_mpi.errors import StoreUnreachableError, TransformError
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState
from reshard_mpi.filesystem.object_uploads import FilePart, SentPart
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.journal import staged_parts as module
from reshard_mpi.journal.staged_parts import StagedParts
from reshard_mpi.journal.target_records import sample_of

PAGE = 4096


class Sent:
    """Stands for an upload: takes parts, and copies them. fails: the number of the part that is refused."""

    place = ObjectPlace("bucket", "target")
    has_crc = True

    def __init__(self, source: bytes = b"", fails: int | None = None) -> None:
        self.made: dict[int, bytes] = {}
        self.copied: set[int] = set()
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        self._source = source
        self._fails = fails

    def send(self, number: int, content: FilePart) -> SentPart:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        part = self._taken(number, content.read())
        with self._lock:
            self.under_way -= 1
        if number == self._fails:
            raise StoreUnreachableError("the store does not answer")
        return part

    def copy(self, number: int, source: ObjectPlace, state: ObjectState, offset: int, length_bytes: int) -> SentPart:
        self.copied.add(number)
        return self._taken(number, self._source[offset : offset + length_bytes])

    def parts(self) -> list[SentPart]:
        """Return the parts as a store lists them."""
        return [SentPart(number, f"tag {number}", len(self.made[number]), None) for number in sorted(self.made)]

    def _taken(self, number: int, data: bytes) -> SentPart:
        with self._lock:
            assert number not in self.made, "a part was made twice"
            self.made[number] = data
        return SentPart(number, f"tag {number}", len(data), crc32(data))


def staged_parts(
    descriptor: int,
    upload: Sent,
    payloads: list[tuple[int, int]],
    part_pages: int,
    runs: Sequence[TargetRange] = (),
    there: Callable[[Sequence[TargetRange]], Sequence[SentPart]] = lambda _: (),
    **options: Any,
) -> StagedParts:
    """Return the parts of a file, each of so many pages. there: by the plan, those that the store has already."""
    options = {"is_streamed": True, **options}
    planned = partial(plan_parts, least=PAGE, sent=part_pages * PAGE, copied=part_pages * PAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_parts", planned)
        patch.setattr(module, "wants_uniform_parts", lambda: False)
        patch.setattr(module, "_state_of", lambda _: ObjectState("tag", 1 << 40, 0))
        parts = StagedParts(descriptor, lambda plan, _: (upload, there(plan)), payloads, runs, **options)  # type: ignore[return-value]
        parts._copying.shutdown(wait=True)
        return parts


@contextlib.contextmanager
def staged(content: bytes, payloads: list[tuple[int, int]]) -> Iterator[int]:
    """Yield a file in memory that has everything but its payloads."""
    descriptor = os.memfd_create("target")
    try:
        os.pwrite(descriptor, content, 0)
        for start, end in payloads:
            os.pwrite(descriptor, bytes(end - start), start)
        yield descriptor
    finally:
        os.close(descriptor)


@st.composite
def spans(draw: st.DrawFn, size_bytes: int) -> list[tuple[int, int]]:
    """Draw spans that do not touch, ascending; ends lie at pages, or anywhere."""
    edges = st.one_of(st.integers(0, size_bytes), st.integers(0, size_bytes // PAGE).map(lambda page: page * PAGE))
    cuts = sorted(draw(st.lists(edges, max_size=12, unique=True)))
    return list(zip(cuts[::2], cuts[1::2]))


@many(100)
@given(data=st.data(), size_bytes=st.integers(1, 40 * PAGE), part_pages=st.integers(1, 9))
def test_parts_are_made_once_and_whole(data: st.DataObject, size_bytes: int, part_pages: int) -> None:
    """Whatever of the payloads is copied, and whatever parts are there already."""
    payloads = data.draw(spans(size_bytes))
    content, source = os.urandom(size_bytes), bytearray(os.urandom(3 * size_bytes))
    pieces, runs = [], []
    for start, end in payloads:
        cuts = sorted({start, end, *data.draw(st.lists(st.integers(start, end), max_size=4))})
        for first, last in itertools.pairwise(cuts):
            pieces.append((first, last))
            if data.draw(st.booleans()):
                offset = data.draw(st.sampled_from([first, 0, size_bytes])) + len(runs) % 3
                if source[offset : offset + last - first] != content[first:last]:
                    source += content[first:last]
                    offset = len(source) - (last - first)
                runs.append(TargetRange(first, last - first, "s3:/bucket/source", offset))
    upload = Sent(bytes(source))
    earlier = data.draw(st.sets(st.integers(1, 20), max_size=3))

    def there(plan: Sequence[TargetRange]) -> list[SentPart]:
        numbers = [number for number in earlier if number <= len(plan)]
        planned = [(number, plan[number - 1]) for number in numbers]
        return [upload._taken(number, content[p.start : p.start + p.length_bytes]) for number, p in planned]

    with staged(content, payloads) as descriptor:
        expected = sample_of_bytes(content)
        parts = staged_parts(descriptor, upload, payloads, part_pages, runs, there)
        with contextlib.closing(parts):
            for number, (start, end) in enumerate(data.draw(st.permutations(pieces))):
                for offset, length in parts.missing_in(start, end - start):
                    os.pwrite(descriptor, content[offset : offset + length], offset)
                unsent = (each for each, elsewhere in zip(parts._missing, parts._is_left_out) if not elsewhere)
                if number == 0 and any(unsent) and data.draw(st.booleans()):
                    with pytest.raises(TransformError, match="not filled"):
                        parts.finish()
                parts.final(start, end - start)
            sent = parts.finish()
        kept = os.pread(descriptor, size_bytes, 0)
        assert sample_of(SourceFile("target", descriptor)) == expected
    assert b"".join(upload.made[part.number] for part in sent) == content
    assert [part.number for part in sent] == list(range(1, len(sent) + 1)) == sorted(upload.made)
    assert upload.most_under_way <= module._UNDER_WAY
    inside = {byte for start, end in payloads for byte in range(start, end)}
    assert all(kept[byte] == content[byte] for byte in range(size_bytes) if byte not in inside)


class Unfaithful(Sent):
    """Copies parts, each as it is told to, and tells of each what is true of it, or not.

    ways: for each part, whether its bytes are right, and what is told: CRC, MD5, NOTHING, OTHER (an MD5), or SHORTER
    (with the CRC).
    """

    def __init__(self, source: bytes, ways: Sequence[tuple[bool, str]]) -> None:
        super().__init__(source)
        self._ways = ways
        self._told: dict[int, SentPart] = {}

    def copy(self, number: int, source: ObjectPlace, state: ObjectState, offset: int, length_bytes: int) -> SentPart:
        is_right, told = self._ways[number - 1]
        data = self._source[offset : offset + length_bytes]
        data = data if is_right else bytes([data[0] ^ 1, *data[1:]])
        self.made[number] = data
        tag = md5(data).hexdigest() if told == "MD5" else md5(b"").hexdigest() if told == "OTHER" else "tag-1"
        part = SentPart(
            number, f'"{tag}"', len(data) - (told == "SHORTER"), crc32(data) if told in ("CRC", "SHORTER") else None
        )
        self._told[number] = part
        return part

    def send(self, number: int, content: FilePart) -> SentPart:
        self.made.pop(number, None)
        self._told.pop(number, None)
        return super().send(number, content)

    def parts(self) -> list[SentPart]:
        return [self._told.get(part.number, part) for part in super().parts()]


_WAYS = st.tuples(st.booleans(), st.sampled_from(["CRC", "MD5", "NOTHING", "OTHER", "SHORTER"]))


@many(100)
@given(data=st.data(), pages=st.integers(1, 40), part_pages=st.integers(1, 9))
def test_copied_parts_of_a_whole_file_are_the_ones_that_lie_there(
    data: st.DataObject, pages: int, part_pages: int
) -> None:
    content = os.urandom(pages * PAGE)
    runs = [
        TargetRange(start, end - start, "s3:/bucket/source", start) for start, end in data.draw(spans(len(content)))
    ]
    ways = data.draw(st.lists(_WAYS, min_size=2 * pages, max_size=2 * pages))
    upload = Unfaithful(content, ways)
    earlier = data.draw(st.dictionaries(st.integers(1, 20), st.booleans(), max_size=3))

    def there(plan: Sequence[TargetRange]) -> list[SentPart]:
        """Tell of parts that another process has sent: the same, or others that are as long."""
        planned = [(number, plan[number - 1]) for number in earlier if number <= len(plan)]
        return [
            upload._taken(
                number, content[p.start : p.start + p.length_bytes] if earlier[number] else bytes(p.length_bytes)
            )
            for number, p in planned
            if not p.path
        ]

    with (
        staged(content, []) as descriptor,
        contextlib.closing(staged_parts(descriptor, upload, [], part_pages, runs, there, is_streamed=False)) as parts,
    ):
        sent = parts.finish()
        faithful = [
            part.length_bytes
            for part, (is_right, told) in zip(parts._planned, ways)
            if part.path and is_right and told in ("CRC", "MD5")
        ]
        assert parts.copied_bytes == sum(faithful)
    assert b"".join(upload.made[part.number] for part in sent) == content


@many(100)
@given(data=st.data(), pages=st.integers(1, 40), part_pages=st.integers(1, 9))
def test_what_has_a_known_sum_need_not_lie_in_a_whole_file(data: st.DataObject, pages: int, part_pages: int) -> None:
    """Nor be read, but where the store has copied other bytes, or does not tell."""
    content, payloads = os.urandom(pages * PAGE), [(0, pages * PAGE)]
    runs = [
        TargetRange(start, end - start, "s3:/bucket/source", start) for start, end in data.draw(spans(len(content)))
    ]
    known = data.draw(spans(len(content)))
    ways = data.draw(st.lists(_WAYS, min_size=2 * pages, max_size=2 * pages))
    upload, fetched = Unfaithful(content, ways), list[tuple[int, int]]()

    def read(_: ObjectPlace, __: ObjectState, offset: int, buffer: memoryview) -> None:
        fetched.append((offset, offset + len(buffer)))
        buffer[:] = content[offset : offset + len(buffer)]

    with pytest.MonkeyPatch.context() as patch, staged(content, payloads) as descriptor:
        patch.setattr(module, "read_range", read)
        patch.setattr(module, "_state_of", lambda _: ObjectState("tag", 1 << 40, 0))
        parts = staged_parts(descriptor, upload, payloads, part_pages, runs, is_streamed=False, recorded=known)
        with contextlib.closing(parts):
            unread = [
                (part, way)
                for part, way in zip(parts._planned, ways)
                if part.path and any(a <= part.start and part.start + part.length_bytes <= b for a, b in known)
            ]
            for offset, length in parts.missing_in(*payloads[0]):
                os.pwrite(descriptor, content[offset : offset + length], offset)
            for start, end in known:
                if parts.crc_of(start, end) != crc32(content[start:end]):
                    parts.fetch(start, end)
                assert parts.crc_of(start, end) == crc32(content[start:end])
            sent = parts.finish()
            wrong = [(p.start, p.start + p.length_bytes) for p, way in unread if way != (True, "CRC")]
            assert all(any(a <= start and end <= b for a, b in known) for start, end in fetched)
            assert {*wrong} <= {*fetched}
            assert bool(wrong) == bool(fetched)
            assert parts.copied_spans == [
                (part.start, part.start + part.length_bytes)
                for part, way in zip(parts._planned, ways)
                if part.path and way in ((True, "CRC"), (True, "MD5"))
            ]
            lying = [os.pread(descriptor, end - start, start) for start, end in parts.copied_spans]
            assert all(len(data) == end - start for data, (start, end) in zip(lying, parts.copied_spans))
    assert b"".join(upload.made[part.number] for part in sent) == content


def test_what_a_format_appends_when_it_seals_a_file_is_sent() -> None:
    content = os.urandom(9 * PAGE)
    for end, rest in ((8 * PAGE, []), (9 * PAGE, [b"sum"])):  # behind a part that is sent; behind one that is copied
        upload = Sent(content)
        runs = [TargetRange(4 * PAGE, end - 4 * PAGE, "s3:/bucket/source", 4 * PAGE)]
        with staged(content, []) as descriptor:
            parts = staged_parts(descriptor, upload, [], 4, runs, is_streamed=False)
            os.pwrite(descriptor, b"sum", len(content))
            with contextlib.closing(parts):
                sent = parts.finish()
        assert b"".join(upload.made[part.number] for part in sent) == content + b"sum"
        assert not rest or upload.made[len(sent)] == b"sum"


def sample_of_bytes(content: bytes) -> str:
    with staged(content, []) as descriptor:
        return sample_of(SourceFile("whole", descriptor))


def test_what_is_sent_takes_no_memory_any_more() -> None:
    content = os.urandom(256 * PAGE + 17)
    payloads = [(100, 130 * PAGE), (130 * PAGE + 8, 256 * PAGE + 1)]
    with staged(content, payloads) as descriptor:
        with contextlib.closing(staged_parts(descriptor, Sent(), payloads, 4)) as parts:
            for start, end in payloads:
                os.pwrite(descriptor, content[start:end], start)
                parts.final(start, end - start)
            parts.finish()
        assert os.fstat(descriptor).st_blocks * 512 < len(content) // 4
        assert sample_of(SourceFile("target", descriptor)) == sample_of_bytes(content)


def test_what_the_store_has_already_takes_no_memory_when_it_is_put_together_once_more() -> None:
    content = os.urandom(256 * PAGE)
    payloads, upload = [(0, len(content))], Sent()

    def there(plan: Sequence[TargetRange]) -> list[SentPart]:
        parts = [(number, content[p.start : p.start + p.length_bytes]) for number, p in enumerate(plan, 1)]
        return [upload._taken(*part) for part in parts[:-1]]

    with staged(content, payloads) as descriptor:
        with contextlib.closing(staged_parts(descriptor, upload, payloads, 4, there=there)) as parts:
            os.pwrite(descriptor, content, 0)
            parts.final(0, len(content))
            parts.finish()
        assert os.fstat(descriptor).st_blocks * 512 < len(content) // 4
        assert sample_of(SourceFile("target", descriptor)) == sample_of_bytes(content)


def test_what_sending_a_part_raises_comes_out() -> None:
    content = bytes(range(256)) * 16 * 12
    with staged(content, [(0, len(content))]) as descriptor:
        parts = staged_parts(descriptor, Sent(fails=2), [(0, len(content))], 1)
        with contextlib.closing(parts), pytest.raises(StoreUnreachableError):
            for start in range(0, len(content), PAGE):
                parts.final(start, PAGE)
            parts.finish()

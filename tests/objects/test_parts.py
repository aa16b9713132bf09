"""A target that is sent in parts while it is filled: each part once, with its bytes, and what stays can be read."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.errors import StoreUnreachableError, TransformError
from reshard_mpi.filesystem.object_store import ObjectPlace
from reshard_mpi.filesystem.object_uploads import FilePart, SentPart
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.journal import object_publication
from reshard_mpi.journal.object_publication import part_bytes_of
from reshard_mpi.journal.target_records import sample_of

PAGE = 4096


class Sent:
    """Stands for an upload: takes parts. fails: the number of the part that is refused."""

    place = ObjectPlace("bucket", "target")

    def __init__(self, fails: int | None = None) -> None:
        self.parts: dict[int, bytes] = {}
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()
        self._fails = fails

    def send(self, number: int, content: FilePart) -> SentPart:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        data = content.read()
        with self._lock:
            assert number not in self.parts, "a part was sent twice"
            self.parts[number] = data
            self.under_way -= 1
        if number == self._fails:
            raise StoreUnreachableError("the store does not answer")
        return SentPart(number, f"tag {number}", len(data), crc32(data))


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
def test_parts_are_sent_once_and_whole(data: st.DataObject, size_bytes: int, part_pages: int) -> None:
    payloads = data.draw(spans(size_bytes))
    content = os.urandom(size_bytes)
    pieces = []
    for start, end in payloads:
        cuts = sorted({start, end, *data.draw(st.lists(st.integers(start, end), max_size=4))})
        pieces += list(itertools.pairwise(cuts))
    upload = Sent()
    with pytest.MonkeyPatch.context() as patch, staged(content, payloads) as descriptor:
        patch.setattr(object_publication, "part_bytes_of", lambda _: part_pages * PAGE)
        patch.setattr(
            object_publication, "sampled_pages", lambda size: [0, (size - 1) // PAGE // 2, (size - 1) // PAGE]
        )
        parts = object_publication._Parts(descriptor, upload, payloads)  # type: ignore[arg-type]
        with contextlib.closing(parts):
            for number, (start, end) in enumerate(data.draw(st.permutations(pieces))):
                os.pwrite(descriptor, content[start:end], start)
                if number == 0 and data.draw(st.booleans()):
                    with pytest.raises(TransformError, match="not filled"):
                        parts.finish()
                parts.final(start, end - start)
            sent = parts.finish()
        kept = os.pread(descriptor, size_bytes, 0)
    assert b"".join(upload.parts[part.number] for part in sent) == content
    assert [part.number for part in sent] == list(range(1, len(sent) + 1)) == sorted(upload.parts)
    assert upload.most_under_way <= object_publication._UNDER_WAY
    inside = {byte for start, end in payloads for byte in range(start, end)}
    for page in range(-(-size_bytes // PAGE)):
        span = range(page * PAGE, min((page + 1) * PAGE, size_bytes))
        if page in (0, (size_bytes - 1) // PAGE // 2, (size_bytes - 1) // PAGE) or not inside.issuperset(span):
            assert kept[span.start : span.stop] == content[span.start : span.stop]


def test_what_is_kept_has_the_sample_of_the_whole() -> None:
    content = os.urandom(64 * PAGE + 17)
    payloads = [(100, 30 * PAGE), (30 * PAGE + 8, 64 * PAGE + 1)]
    with pytest.MonkeyPatch.context() as patch, staged(content, payloads) as descriptor:
        whole = os.memfd_create("whole")
        os.pwrite(whole, content, 0)
        expected = sample_of(SourceFile("whole", whole))
        os.close(whole)
        patch.setattr(object_publication, "part_bytes_of", lambda _: 4 * PAGE)
        with contextlib.closing(object_publication._Parts(descriptor, Sent(), payloads)) as parts:  # type: ignore[arg-type]
            for start, end in payloads:
                os.pwrite(descriptor, content[start:end], start)
                parts.final(start, end - start)
            parts.finish()
        assert sample_of(SourceFile("target", descriptor)) == expected
        assert os.fstat(descriptor).st_blocks * 512 < len(content)


def test_what_sending_a_part_raises_comes_out() -> None:
    content = bytes(range(256)) * 16 * 12
    with pytest.MonkeyPatch.context() as patch, staged(content, [(0, len(content))]) as descriptor:
        patch.setattr(object_publication, "part_bytes_of", lambda _: PAGE)
        parts = object_publication._Parts(descriptor, Sent(fails=2), [(0, len(content))])  # type: ignore[arg-type]
        with contextlib.closing(parts), pytest.raises(StoreUnreachableError):
            for start in range(0, len(content), PAGE):
                parts.final(start, PAGE)
            parts.finish()


@pytest.mark.parametrize("size_bytes", [0, 1, 8 << 20, (80_000 << 20) - 1, 80_000 << 20, 5 << 40])
def test_no_target_has_more_parts_than_a_store_takes(size_bytes: int) -> None:
    length = part_bytes_of(size_bytes)
    assert length % PAGE == 0 and length >= 5 << 20
    assert -(-size_bytes // length) <= 10_000

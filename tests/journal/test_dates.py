"""Sources of any date that a file system keeps: committed, and never made again for it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.command_line import done
from support.conversions import Conversion, listing, make
from support.examples import few

from reshard_mpi.journal.provenance import FileState, SourceStates

YEAR = 31_556_952 * 10**9
DATES = {
    "1901": -69 * YEAR,
    "1969": -1,
    "1970": 0,
    "tomorrow": time.time_ns() + YEAR // 365,
    "2262": (1 << 63) + 1,
    "2300": 330 * YEAR + 1,
    "2446": 476 * YEAR,
    "9999": 8029 * YEAR,
    "the end of days": ((1 << 63) - 1) * 10**9,
}


def dated(path: Path, modified_ns: int) -> None:
    """Give a file a date; skip where the file system has no such date."""
    try:
        os.utime(path, ns=(modified_ns, modified_ns))
    except OverflowError:
        pytest.skip("no such date in a system call")
    if path.stat().st_mtime_ns // YEAR != modified_ns // YEAR:
        pytest.skip(f"this file system makes {path.stat().st_mtime_ns} of {modified_ns}")


@pytest.mark.parametrize("date", few(1, DATES))
def test_a_source_of_that_date(tmp_path: Path, date: str) -> None:
    c: Conversion = make(tmp_path)
    dated(c.shard(1), DATES[date])
    c.done("transform", "--rank", "0")
    c.done("transform", "--rank", "1", "--resume")
    assert (c.dst / "reshard.json").exists()
    made = listing(c.dst)
    for arguments in (c.arguments("transform", "--resume", "--progress", "none"), ["commit", str(c.dst)]):
        finished = done(*arguments)
        assert "wrote 1" not in finished.out and finished.err == "", finished
    assert listing(c.dst) == made
    dated(c.shard(1), DATES[date] - 10**9)
    said = c.refused("transform", "--resume")
    assert "sources that have changed since" in said
    assert said.count("error:") == 1


@pytest.mark.parametrize("date", DATES)
def test_a_record_keeps_that_date(date: str) -> None:
    """Whatever the file system of these tests has of it."""
    sources = SourceStates("/src", (FileState("rank_0/a.ckpt", 1, DATES[date]),))
    assert SourceStates.of(json.loads(json.dumps(sources.as_json()))) == sources
    assert str(sources.files[0]).startswith("1 bytes of ")

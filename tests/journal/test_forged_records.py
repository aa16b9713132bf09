"""Records that nobody of ours has written: damaged, so that they are good for nothing; never a hang or a traceback."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import measure_apart, refused, run_here
from support.conversions import Conversion, make, shards
from support.examples import few
from support.forging import MISSING, TEXTS, VALUES, Keys, as_text, forged, path_of, places

import reshard_mpi
from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.errors import ReshardError
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.record_files import RUN_ROOM, read_json, written
from reshard_mpi.journal.run_records import COMMIT_ROOM, CommitRecord, RunIdentity
from reshard_mpi.journal.target_records import TARGET_ROOM, RecordHead, TargetRecord, TensorSum
from reshard_mpi.planning.rank_plan import StageDigest
from reshard_mpi.text import MIB

RECORDS = ("run.json", "rank_0.json", "reshard.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """A conversion that is complete, verified and committed."""
    c = make(tmp_path_factory.mktemp("whole"))
    assert c.src_strategy is not None and c.dst_strategy is not None
    c.done("transform", "--verify")
    return c


@pytest.fixture
def c(whole: Conversion) -> Iterator[Conversion]:
    """The complete conversion, as it was."""
    kept = whole.folder / "kept"
    if not kept.exists():
        shutil.copytree(whole.dst, kept)
    shutil.rmtree(whole.dst)
    shutil.copytree(kept, whole.dst)
    yield whole


def facts_of(c: Conversion, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(path_of(c.dst, name).read_text())
    return facts


def read(c: Conversion, name: str) -> RunIdentity | TargetRecord | CommitRecord | None:
    state = c.dst / ".reshard_mpi"
    if name == "run.json":
        return RunIdentity.recorded(state)
    return TargetRecord.read(state, 0) if name == "rank_0.json" else CommitRecord.read(c.dst)


def shown(record: RunIdentity | TargetRecord | CommitRecord) -> dict[str, Any]:
    """Return what a record that has been read says, as its file does."""
    if isinstance(record, CommitRecord):
        sizes = record.sizes_bytes
        return {
            **record.run.as_json(),
            "digest": record.digest,
            "sums": dict(record.sums),
            "sources": [{"file": file, "size_bytes": size} for file, size in record.sources],
            "targets": [
                {"rank": rank, "file": file, **({"size_bytes": sizes[rank]} if rank in sizes else {})}
                for rank, file in record.files.items()
            ],
        }
    facts: dict[str, Any] = json.loads(record.as_text())
    facts.pop("check", None)
    return facts


def without(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a commit record that are read."""
    targets = [{name: one[name] for name in one if name != "read_ranks"} for one in facts["targets"]]
    rest = {name: facts[name] for name in facts if name not in ("format", "version", "targets")}
    return {"sums": {}, "sources": [], **rest, "targets": targets}


@pytest.mark.slow
def test_what_is_read_is_what_is_written(c: Conversion) -> None:
    """Nothing that a record says is taken for anything else, and what it leaves out is not made up."""
    for name in RECORDS:
        facts = facts_of(c, name)
        for place in places(facts):
            for kind, value in VALUES.items():
                made = forged(facts, place, value)
                path_of(c.dst, name).write_text(as_text(name, made))
                record = read(c, name)
                if record is None:
                    continue
                written = json.loads(as_text(name, made))
                assert shown(record) == (without(written) if name == "reshard.json" else written), (place, kind)


@pytest.mark.parametrize("kind", TEXTS)
def test_whole_files_that_are_no_records(c: Conversion, kind: str) -> None:
    for name in RECORDS:
        path = path_of(c.dst, name)
        path.write_bytes(TEXTS[kind](path.read_text()))
        assert read(c, name) is None


IMPOSSIBLE: dict[str, tuple[str, Keys, Any]] = {
    "a million million million targets": ("run.json", ("target_ranks",), 10**18),
    "more targets than any strategy has": ("run.json", ("target_ranks",), (1 << 24) + 1),
    "no targets": ("run.json", ("target_ranks",), 0),
    "less than no targets": ("run.json", ("target_ranks",), -1),
    "true targets": ("run.json", ("target_ranks",), True),
    "no source": ("run.json", ("source",), MISSING),
    "a source that is none": ("run.json", ("source",), None),
    "a format that is none": ("run.json", ("to",), "../ckpt"),
    "the file of another rank": ("rank_0.json", ("file",), "rank_1/checkpoint_1.ckpt"),
    "another file of its rank": ("rank_0.json", ("file",), "rank_0/other_0.ckpt"),
    "a file outside": ("rank_0.json", ("file",), "/etc/hostname"),
    "a file above": ("rank_0.json", ("file",), "rank_0/../../src/rank_0/checkpoint_0.ckpt"),
    "another rank": ("rank_0.json", ("rank",), 1),
    "source ranks in a text": ("rank_0.json", ("read_ranks",), "01"),
    "a time beyond all": ("rank_0.json", ("sources", "files", 0, 2), 10**30),
    "a sum of no digits": ("rank_0.json", ("sums", 0, 5), "+1"),
    "a tensor beyond all": ("rank_0.json", ("sums", 0, 2, 0), 1 << 62),
    "two sums of one tensor": ("rank_0.json", ("sums", 0, 0), "b"),
}


@pytest.mark.parametrize("case", few(4, IMPOSSIBLE))
def test_a_record_that_cannot_be(c: Conversion, case: str) -> None:
    """Whoever commits names it or calls its target not written; --resume makes that anew."""
    name, place, value = IMPOSSIBLE[case]
    before = shards(c.dst)
    facts = facts_of(c, name)
    if case == "two sums of one tensor":
        facts["sums"][1][0] = "b"
    path_of(c.dst, name).write_text(as_text(name, forged(facts, place, value)))
    finished = run_here("commit", c.dst)
    expected = "a record of a run that is damaged" if name == "run.json" else "1 of 2 targets are not complete: 0\n"
    assert finished.code == (3 if name == "run.json" else 4) and expected in finished.err, finished
    assert finished.err.count("error:") == 1
    finished = c.run("transform", "--resume", "--verify")
    if name == "run.json":
        assert finished.code == 3 and "holds another run" in finished.err
    elif case == "another file of its rank":
        assert finished.code == 3 and "a file that this run has not written lies where target rank 0" in finished.err
    else:
        assert finished.code == 0 and re.match("wrote( and verified)? 1 shard", finished.out)
    assert shards(c.dst) == before


@pytest.mark.parametrize("targets", few(1, [1 << 17, 1 << 24]))
def test_many_targets_of_which_none_is_there(c: Conversion, targets: int) -> None:
    """Up to as many as a strategy can have: told in no time, and not one by one."""
    path = path_of(c.dst, "run.json")
    path.write_text(as_text("run.json", forged(facts_of(c, "run.json"), ("target_ranks",), targets)))
    said = refused("commit", c.dst, code=4)
    assert f"{targets} of {targets} targets are not complete: 0-{targets - 1}\n" in said
    lines = run_here("inspect", c.dst).out.splitlines()
    assert f"run: 0 of {targets} targets complete, not committed" in lines and f"  and {targets - 20} more" in lines
    run = inspect(c.dst)["run"]
    assert run["target_ranks"] == targets and len(run["incomplete"]) == 1 << 16
    assert run["incomplete"]["0"] == "is of another run" and run["incomplete"]["9"] == "has not been written"


COMMANDS = (
    ("transform", "--resume", "--progress", "none"),
    ("transform", "--verify", "--resume", "--progress", "none"),
    ("plan", "--resume"),
    ("transform", "--progress", "none"),
    ("commit",),
    ("verify", "--jobs", "1"),
    ("inspect",),
    ("inspect", "--json"),
)


def assert_harmless(c: Conversion) -> None:
    """Run every command that reads records: one clear message, or the same shards."""
    before = shards(c.dst)
    for command, *options in COMMANDS:
        alone = [command, str(c.dst), *options]
        finished = run_here(*(c.arguments(command, *options) if command in ("transform", "plan") else alone))
        assert finished.code in (0, 3, 4), finished
        assert finished.err.count("error:") == (finished.code != 0 and command != "verify"), finished
        assert shards(c.dst) == before
        if options == ["--json"] and finished.code == 0:
            json.loads(finished.out)
    try:
        inspect(c.dst)
        inspect(c.dst / "reshard.json")
    except ReshardError:
        pass
    reshard_mpi.transform_checkpoints(str(c.src), str(c.dst), "checkpoint_", str(c.src_strategy), str(c.dst_strategy))
    assert shards(c.dst) == before


QUICK = [
    ("run.json", ("target_ranks",), "10^18"),
    ("rank_0.json", ("file",), "half of a surrogate pair"),
    ("rank_0.json", ("sources", "files", 0, 0), "half of a surrogate pair"),
    ("rank_0.json", ("sources", "folder"), "a long text"),
    ("reshard.json", ("targets", 0, "rank"), "10^18"),
]


@pytest.mark.parametrize(("name", "place", "kind"), few(1, QUICK), ids=str)
def test_every_command(c: Conversion, name: str, place: Keys, kind: str) -> None:
    path_of(c.dst, name).write_text(as_text(name, forged(facts_of(c, name), place, VALUES[kind])))
    assert_harmless(c)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*zip([*VALUES, *TEXTS], itertools.cycle(RECORDS))])
def test_every_command_with_every_value(c: Conversion, name: str, kind: str) -> None:
    facts, path = facts_of(c, name), path_of(c.dst, name)
    if kind in TEXTS:
        text = TEXTS[kind](path.read_text())
    else:
        place = random.Random(f"{name} {kind}").choice(list(places(facts)))
        text = as_text(name, forged(facts, place, VALUES[kind])).encode()
    path.write_bytes(text)
    assert_harmless(c)


# How large


@pytest.mark.slow
def test_a_record_without_end_is_not_read(c: Conversion) -> None:
    """4 GiB that take no room on the disk: every command says so, or does without, in little memory."""
    for name in RECORDS:
        os.truncate(path_of(c.dst, name), 4 << 30)
        assert read_json(path_of(c.dst, name)) == {}
    assert inspect(c.dst)["commit"] == {"problem": "the commit record is damaged"}
    finished = measure_apart("inspect", c.dst)
    assert finished.code == 0 and finished.peak_rss_bytes < 100 * MIB


@pytest.mark.parametrize("filling", [b"[],", b"{},"])
def test_a_record_that_would_take_much_memory_is_not_parsed(tmp_path: Path, filling: bytes) -> None:
    """Lists and names without content take twenty times their own bytes."""
    path = tmp_path / "run.json"
    path.write_bytes(b'{"a": [' + filling * (RUN_ROOM.file_bytes // len(filling) - 10) + b"1]}")
    assert path.stat().st_size <= RUN_ROOM.file_bytes and read_json(path, RUN_ROOM) == {}


@pytest.mark.slow
def test_there_is_room_for_what_is_real() -> None:
    """20,000 tensors with sums for one target; a commit of 16,384 targets and 640,000 tensors."""
    names = [
        f"network.layers.{number // 20}.block_{number % 20}.attention.projection.weight" for number in range(20_001)
    ]
    sums = tuple(TensorSum(name, "bfloat16", (8192, 8192), (0, 4096), (8192, 512), 1 << 31, False) for name in names)
    head = RecordHead("0" * 64, 0, "rank_0/c_0.ckpt", 1 << 40, None)
    record = TargetRecord(head, TargetInputs((0,), StageDigest(0, "0" * 64, 0), (), ()), sums)
    text = record.as_text()
    assert len(text) * 4 < TARGET_ROOM.file_bytes
    line = '{"rank": 16383, "file": "rank_16383/checkpoint_16383.ckpt", "size_bytes": 1099511627776, "read_ranks": '
    line += str(list(range(10_000, 10_064))) + "},\n  "
    commit = line * 16384 + f' "{names[-1]}": "01234567",\n' * 640_000
    assert written(commit, COMMIT_ROOM, "a commit") == commit


def test_a_record_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(ReshardError, match="the record of target rank 0 would be too large"):
        written("x" * (RUN_ROOM.file_bytes + 1), RUN_ROOM, "target rank 0")


def test_a_file_system_that_has_nothing_to_give_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python then returns None in place of what is read, which is no record, and no damage either."""
    path = tmp_path / "run.json"
    path.write_text("{}")

    class Unready(io.FileIO):
        def read(self, size_bytes: int = -1) -> None:  # type: ignore[override]
            return None

    monkeypatch.setattr("builtins.open", lambda path, mode, opener: Unready(path, opener=opener))
    with pytest.raises(BlockingIOError, match=os.strerror(errno.EAGAIN)) as raised:
        read_json(path)
    assert raised.value.filename == path

"""What is safe to write and what is done: run identity, locks, partial files, records."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few

from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.journal import target_journal
from reshard_mpi.journal.provenance import TargetInputs
from reshard_mpi.journal.publication import Publication, remove_dead_records
from reshard_mpi.journal.record_files import STATE
from reshard_mpi.journal.run_records import RunIdentity, keep_strategy, strategy_of_run
from reshard_mpi.journal.target_folders import Unrecorded
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.journal.target_records import TargetRecord
from reshard_mpi.planning.rank_plan import SharedFact, StageDigest
from reshard_mpi.planning.source_flaws import PrefixDigest

EVIDENCE = TargetInputs(
    (0, 1), StageDigest(0, "d1", 0), (SharedFact("global_step", "7", "/data/src/0"),), (PrefixDigest("seed", "d2", 1),)
)
FACTS = {"source": "/data/src", "prefix": "checkpoint_", "format": "ckpt", "target_ranks": 1}

# A process that says what it has got as far as, and then stays where it is until it is ended.
HOLDER = """
import sys, time
from pathlib import Path
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.planning.rank_plan import StageDigest as Held
from reshard_mpi.journal.run_records import RunIdentity
from reshard_mpi.journal.target_records import TargetInputs
folder = Path(sys.argv[1])
journal = Journal(folder, RunIdentity({"source": "here"}), resume=False, overwrite=False)
journal.begin()
with journal.writing(0, folder / "rank_0" / "net.ckpt", TargetInputs((), Held(0, "", 0), (), ())) as publication:
    publication.partial.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""


def journal(folder: Path, *, resume: bool = False, overwrite: bool = False, **facts: object) -> Journal:
    return Journal(folder, RunIdentity({**FACTS, **facts}), resume=resume, overwrite=overwrite)


def write(state: Journal | Unrecorded, path: Path, content: bytes = b"whole", rank: int = 0) -> None:
    state.begin()
    with state.writing(rank, path, EVIDENCE) as publication:
        publication.partial.write_bytes(content)
        publication.publish()


@contextmanager
def published(path: Path) -> Iterator[Publication]:
    with Folder.open(path.parent) as folder, Publication(folder, path.name) as publication:
        yield publication


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def refused(call: Callable[[], object]) -> TargetError:
    with pytest.raises(TargetError) as error:
        call()
    assert error.value.expected and error.value.got and error.value.where and error.value.remedy
    return error.value


# Publishing


def test_a_published_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "net.ckpt"
    with published(path) as publication:
        partial = publication.partial
        assert partial.parent == path.parent and partial.name.startswith(".")
        partial.write_bytes(b"half")
        assert not path.exists()
        partial.write_bytes(b"whole")
        publication.publish()
        assert path.exists()
    assert path.read_bytes() == b"whole"
    assert files(tmp_path) == {"net.ckpt"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [None, b"before"])
def test_what_fails_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], before: bytes | None
) -> None:
    path = tmp_path / "net.ckpt"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(error), published(path) as publication:
        publication.partial.write_bytes(b"half")
        raise error
    assert files(tmp_path) == (set() if before is None else {"net.ckpt"})
    assert before is None or path.read_bytes() == before


def test_what_is_not_published_is_removed(tmp_path: Path) -> None:
    with published(tmp_path / "net.ckpt") as publication:
        publication.partial.write_bytes(b"half")
    assert files(tmp_path) == set()


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.ckpt"
    synced = []

    def sync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with published(path) as publication:
        publication.partial.write_bytes(b"whole")
        publication.publish()
    assert synced == [(publication.partial, False), (tmp_path, True)]


def test_a_disk_that_fails_at_the_end_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), published(tmp_path / "net.ckpt") as publication:
        publication.partial.write_bytes(b"whole")
        publication.publish()
    assert files(tmp_path) == set()


def test_without_a_journal_targets_are_replaced_and_no_state_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rank_0" / "net.ckpt"
    state = Unrecorded(tmp_path / "new")
    state.check()
    assert not (tmp_path / "new").exists()
    for content in (b"one", b"two"):
        assert not state.skips(0, path)
        write(state, path, content)
        assert path.read_bytes() == content
    assert files(tmp_path) == {"new/rank_0/net.ckpt"}


# Run identity

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)


@given(st.dictionaries(st.text(), VALUES, min_size=1), st.randoms(use_true_random=False), VALUES)
def test_the_same_facts_are_the_same_run_in_any_order(facts: dict[str, object], random: object, value: object) -> None:
    items = list(facts.items())
    random.shuffle(items)
    run = RunIdentity(facts)
    assert RunIdentity(dict(items)).digest == run.digest
    assert run.differences(RunIdentity(dict(items))) == ("", "")
    name = next(iter(facts))
    other = RunIdentity({**facts, name: value})
    assert (other.digest == run.digest) == (json.dumps(value) == json.dumps(facts[name]))


def test_a_difference_names_what_is_and_was() -> None:
    now = RunIdentity({"prefix": "net_", "to": "ckpt", "strict": True, "target_ranks": 2})
    was = RunIdentity({"prefix": "checkpoint_", "to": "ckpt", "select": "*", "target_ranks": 4})
    assert now.differences(was) == (
        "--prefix 'net_', no --select, --strict, target ranks: 2",
        "--prefix 'checkpoint_', --select '*', no --strict, target ranks: 4",
    )


def test_a_difference_names_strategies_by_their_files() -> None:
    runs = [
        RunIdentity({"dst_strategy": "0a"}, {"dst_strategy": "/tp4.toml"}),
        RunIdentity({"dst_strategy": "0b"}, {"dst_strategy": "/tp8.toml"}),
        RunIdentity({"dst_strategy": "0c"}, {"dst_strategy": "/tp4.toml"}),
        RunIdentity({"dst_strategy": None}),
    ]
    first = runs[0]
    assert first.differences(runs[1]) == ("--dst-strategy /tp4.toml", "--dst-strategy /tp8.toml")
    assert first.differences(runs[2]) == (
        "--dst-strategy /tp4.toml as it is now",
        "--dst-strategy /tp4.toml as it was then",
    )
    assert first.differences(runs[3]) == ("--dst-strategy /tp4.toml", "no --dst-strategy")
    moved = RunIdentity({"dst_strategy": "0a"}, {"dst_strategy": "/elsewhere.toml"})
    assert moved.digest == first.digest and moved.differences(first) == ("", "")


# Joining and refusing


def test_nothing_is_created_before_it_begins(tmp_path: Path) -> None:
    state = journal(tmp_path / "new")
    state.check()
    assert not state.skips(0, tmp_path / "new" / "rank_0" / "net.ckpt")
    assert not (tmp_path / "new").exists()
    state.begin()
    assert files(tmp_path) == {"new/.reshard_mpi/run.json", "new/.reshard_mpi/run.lock"}


def test_overwriting_makes_the_folder_its_own(tmp_path: Path) -> None:
    journal(tmp_path).begin()
    other = journal(tmp_path, overwrite=True, prefix="net_")
    other.check()
    other.begin()
    journal(tmp_path, prefix="net_").check()
    refused(journal(tmp_path).check)


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "{}"])
def test_a_state_that_cannot_be_read_is_another_run(tmp_path: Path, content: str) -> None:
    journal(tmp_path).begin()
    (tmp_path / ".reshard_mpi" / "run.json").write_text(content)
    assert refused(journal(tmp_path).check).got.startswith("a record of a run that cannot be read: ")
    journal(tmp_path, overwrite=True).check()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder, problem in (
        (tmp_path / "file", "the target is not a folder"),
        (tmp_path / "file" / "new", "a file is in the way of the target"),
    ):
        for state in (journal(folder), Unrecorded(folder)):
            assert refused(state.check).problem == problem


@pytest.mark.slow
def test_of_many_that_begin_at_once_one_names_the_run(tmp_path: Path) -> None:
    """Every process begins the same folder with settings of its own: exactly one of them may go on."""
    program = (
        "import sys; from pathlib import Path; from reshard_mpi.journal.target_journal import Journal;"
        "from reshard_mpi.journal.run_records import RunIdentity;"
        "j = Journal(Path(sys.argv[1]), RunIdentity({'n': sys.argv[2]}), resume=False, overwrite=False);"
        "print('ready', flush=True); sys.stdin.readline(); j.begin()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "new"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(6)
    ]
    for process in started:
        process.stdout.readline()
    for process in started:
        process.stdin.write(b"\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=300) for process in started]
    won = [number for number, process in enumerate(started) if process.returncode == 0]
    assert len(won) == 1
    assert all(b"holds another run" in err for number, (_, err) in enumerate(ends) if number not in won)
    assert json.loads((tmp_path / "new" / ".reshard_mpi" / "run.json").read_text())["n"] == str(won[0])
    assert files(tmp_path) == {"new/.reshard_mpi/run.json", "new/.reshard_mpi/run.lock"}


# Records


def test_a_complete_target_is_recorded_and_skipped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path)
    record = TargetRecord.read(tmp_path / ".reshard_mpi", 0)
    modified_ns = path.stat().st_mtime_ns
    head = RunIdentity(FACTS).digest, 0, "rank_0/net.ckpt", 5, modified_ns, None, f"{crc32(b'whole'):08x}", None, False
    assert record == (head, EVIDENCE, (), "")
    assert journal(tmp_path, resume=True).skips(0, path)
    assert not journal(tmp_path, resume=True).skips(1, tmp_path / "rank_1" / "net.ckpt")
    assert not journal(tmp_path, overwrite=True).skips(0, path)
    error = refused(lambda: journal(tmp_path).skips(0, path))
    assert error.problem == "target rank 0 is there already"
    assert error.got == "5 bytes, complete by the record of this run"
    assert "--resume" in error.remedy and "--overwrite" in error.remedy


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, path: path.unlink(),
        lambda folder, path: (folder / ".reshard_mpi" / "rank_0.json").write_text("{"),
        lambda folder, path: (folder / ".reshard_mpi" / "rank_0.json").write_text('{"digest": "", "size_bytes": 5}'),
    ],
    ids=["gone", "damaged record", "record of another run"],
)
def test_what_is_not_complete_by_its_record_is_done_again(
    tmp_path: Path, spoil: Callable[[Path, Path], object]
) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path)
    spoil(tmp_path, path)
    resumed = journal(tmp_path, resume=True)
    assert not resumed.skips(0, path)
    write(resumed, path)
    assert resumed.skips(0, path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, path: path.write_bytes(b"another size"),
        lambda folder, path: (folder / ".reshard_mpi" / "rank_0.json").unlink(),
        lambda folder, path: shutil.rmtree(folder / ".reshard_mpi"),
        lambda folder, path: (path.unlink(), path.symlink_to(folder / "nowhere")),
    ],
    ids=["another size", "no record", "no records", "a link that leads nowhere"],
)
def test_what_no_record_explains_is_replaced_by_overwriting_alone(
    tmp_path: Path, spoil: Callable[[Path, Path], object]
) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path)
    spoil(tmp_path, path)
    for state in (journal(tmp_path), journal(tmp_path, resume=True)):
        error = refused(lambda state=state: state.skips(0, path))  # type: ignore[misc]
        assert "this run has not written" in error.problem and error.where == str(path)
        assert "--overwrite" not in error.remedy and "another target folder" in error.remedy
    write(journal(tmp_path, overwrite=True), path)
    assert journal(tmp_path, resume=True).skips(0, path)


def test_a_note_of_what_is_replaced_is_of_that_file_alone(tmp_path: Path) -> None:
    """A writer that was to replace a file may be killed; the file that then lies there may be another one."""
    path = tmp_path / "rank_0" / "net.ckpt"
    path.parent.mkdir()
    path.write_bytes(b"before")
    again = journal(tmp_path, overwrite=True)
    again.begin()
    with pytest.raises(ValueError), again.writing(0, path, EVIDENCE):
        raise ValueError
    assert not journal(tmp_path, resume=True).skips(0, path)
    assert "about to replace" in refused(lambda: journal(tmp_path).skips(0, path)).got
    path.write_bytes(b"others")
    os.utime(path, ns=(0, 0))
    refused(lambda: journal(tmp_path, resume=True).skips(0, path))


def test_a_run_that_is_overtaken_takes_nothing_from_the_other(tmp_path: Path) -> None:
    path, first = tmp_path / "rank_0" / "net.ckpt", journal(tmp_path, overwrite=True)
    first.begin()
    write(journal(tmp_path, overwrite=True, n=1), path)
    (tmp_path / "reshard.json").write_text("of the other")
    there = {file.name: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(TargetError, match="another run has begun"), first.writing(0, path, EVIDENCE):
        pytest.fail("it is not to be written")
    assert {file.name: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == there


def test_a_file_that_a_killed_writer_was_to_replace_goes_with_its_run(tmp_path: Path) -> None:
    """Its record is gone; the note tells that file from another one that somebody has saved there since."""
    path = tmp_path / "rank_0" / "checkpoint_0.ckpt"
    write(journal(tmp_path), path)
    with pytest.raises(ValueError), journal(tmp_path, overwrite=True).writing(0, path, EVIDENCE):
        raise ValueError
    other, modified_ns = journal(tmp_path, overwrite=True, to="torch"), path.stat().st_mtime_ns
    os.utime(path, ns=(0, 0))
    assert set(other.leftovers()) == set()
    os.utime(path, ns=(0, modified_ns))
    assert set(other.leftovers()) == {"rank_0/checkpoint_0.ckpt"}
    other.begin()
    assert not path.exists()


def test_a_target_that_fails_is_neither_there_nor_recorded_and_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path, b"before")
    again = journal(tmp_path, overwrite=True)
    with pytest.raises(ValueError), again.writing(0, path, EVIDENCE) as publication:
        publication.partial.write_bytes(b"half")
        raise ValueError
    assert path.read_bytes() == b"before"
    assert not journal(tmp_path, resume=True).skips(0, path)
    write(again, path, b"after")
    assert path.read_bytes() == b"after"
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]


# Kills between the record and the name


def killed_before(folder: Path, count: int, content: bytes) -> int:
    """Write target 0 anew in a process that is killed before its `count`-th rename; return how that ended."""
    process = os.fork()
    if process == 0:
        left = count

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event == "os.rename":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            write(journal(folder, overwrite=True), folder / "rank_0" / "net.ckpt", content)
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1]


def test_a_target_is_complete_from_the_instant_on_in_which_it_has_its_name(tmp_path: Path) -> None:
    """Renames: of a first record, of the target, of the last record. An older file of the same size lies there."""
    path, state = tmp_path / "rank_0" / "net.ckpt", tmp_path / ".reshard_mpi"
    for count, content, whole in ((1, b"older", False), (2, b"older", False), (3, b"newer", True), (4, b"newer", True)):
        write(journal(tmp_path, overwrite=True), path, b"older")
        ended = killed_before(tmp_path, count, b"newer")
        assert ended == (signal.SIGKILL if count < 4 else 0)
        assert path.read_bytes() == content
        assert journal(tmp_path, resume=True).skips(0, path) == whole
        record = TargetRecord.read(state, 0)
        assert (record is None) == (count == 1)
        assert record is None or (record.head.announced is None) == (count == 4)
    with Folder.open(state) as folder:
        remove_dead_records(folder)
    assert {path.name for path in state.iterdir()} == {
        "commit.lock",
        "rank_0.json",
        "rank_0.lock",
        "run.json",
        "run.lock",
    }


def test_a_file_that_is_saved_in_the_place_of_a_target_that_has_just_got_its_name_is_not_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sync = tmp_path / "rank_0" / "net.ckpt", Folder.sync

    def save_then_sync(folder: Folder) -> None:
        if path.exists() and path.read_bytes() == b"ours":
            (tmp_path / "theirs").write_bytes(b"mine")
            (tmp_path / "theirs").replace(path)
        sync(folder)

    monkeypatch.setattr(Folder, "sync", save_then_sync)
    write(journal(tmp_path), path, b"ours")
    assert path.read_bytes() == b"mine"
    assert "not written lies where target rank 0 goes" in str(
        refused(lambda: journal(tmp_path, resume=True).skips(0, path))
    )


@pytest.mark.parametrize("other", few(1, [{"format": "safetensors"}, {"prefix": "net_"}, {"target_ranks": 1}]))
def test_partial_files_of_a_killed_run_go_with_its_targets(tmp_path: Path, other: dict[str, Any]) -> None:
    """The next run has other names, and does not meet them; a process that is still at work keeps its own."""
    earlier = {"target_ranks": 3}
    write(journal(tmp_path, **earlier), tmp_path / "rank_0" / "checkpoint_0.ckpt")
    child = os.fork()
    if not child:
        with journal(tmp_path, **earlier).writing(
            1, tmp_path / "rank_1" / "checkpoint_1.ckpt", EVIDENCE
        ) as publication:
            publication.partial.write_bytes(b"half")
            os._exit(9)
    os.waitpid(child, 0)
    alive = journal(tmp_path, **earlier)
    with alive.writing(2, tmp_path / "rank_2" / "checkpoint_2.ckpt", EVIDENCE) as publication:
        (tmp_path / "rank_1" / ".mine.partial").write_bytes(b"somebody's")
        journal(tmp_path, overwrite=True, **other).begin()
        kept = {"rank_1/.mine.partial", f"rank_2/{publication.partial.name}"}
        assert {file for file in files(tmp_path) if file.endswith("partial")} == kept
    (tmp_path / "rank_1" / ".mine.partial").unlink()


def test_an_emptied_rank_folder_of_a_killed_run_goes(tmp_path: Path) -> None:
    state = journal(tmp_path, target_ranks=2)
    state.begin()
    child = os.fork()
    if not child:
        with state.writing(1, tmp_path / "rank_1" / "checkpoint_1.ckpt", EVIDENCE) as publication:
            publication.partial.write_bytes(b"half")
            os._exit(9)
    os.waitpid(child, 0)
    journal(tmp_path, overwrite=True, format="dcp", target_ranks=2).begin()
    assert not (tmp_path / "rank_1").exists()


def test_a_copy_of_a_folder_is_as_complete_as_it_was(tmp_path: Path) -> None:
    write(journal(tmp_path / "one"), tmp_path / "one" / "rank_0" / "net.ckpt")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copy)
    assert journal(tmp_path / "two", resume=True).skips(0, tmp_path / "two" / "rank_0" / "net.ckpt")


@pytest.mark.parametrize("way", ["copied back", "hard link"])
def test_a_target_with_the_same_bytes_and_another_time_is_not_called_others(tmp_path: Path, way: str) -> None:
    """As restored by cp, or made one file with an equal target; the time that the error names makes it the target."""
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path)
    if way == "hard link":
        shutil.copyfile(path, tmp_path / "other")
        path.unlink()
        path.hardlink_to(tmp_path / "other")
    else:
        content = path.read_bytes()
        path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    error = refused(lambda: journal(tmp_path, resume=True).skips(0, path))
    assert "others" not in error.got and "another time" in error.got
    (command,) = re.findall(r"touch -d @\S+ \S+net.ckpt", error.remedy)
    subprocess.run(command.split(), check=True)
    assert journal(tmp_path, resume=True).skips(0, path)
    path.write_bytes(b"x" * path.stat().st_size)
    assert "but others" in refused(lambda: journal(tmp_path, resume=True).skips(0, path)).got


def test_a_copy_is_told_from_another_file_by_a_sample_of_its_pages(tmp_path: Path) -> None:
    path, pages = tmp_path / "rank_0" / "net.ckpt", 100
    content = os.urandom(pages * 4096 - 1)
    write(journal(tmp_path), path, content)
    for copied in (path, tmp_path / ".reshard_mpi" / "rank_0.json"):
        os.utime(copied, ns=(0, 0))
    assert journal(tmp_path, resume=True).skips(0, path)
    noticed = set()
    for page in range(pages):
        with path.open("r+b") as file:
            file.seek(page * 4096 + 4094)
            file.write(bytes([content[page * 4096 + 4094] ^ 1]))
            file.flush()
            try:
                assert journal(tmp_path, resume=True).skips(0, path)
            except TargetError as error:
                noticed.add(page)
                assert "not written" in error.problem and "as many as this run has written, but others" in error.got
            file.seek(page * 4096 + 4094)
            file.write(content[page * 4096 + 4094 :][:1])
    assert len(noticed) == 32 and {0, pages - 1} < noticed
    assert all(noticed & set(range(page, page + 4)) for page in range(pages - 4))


def test_a_record_without_a_sample_is_about_files_that_are_not_earlier(tmp_path: Path) -> None:
    """As earlier versions have written it; archives have whole seconds."""
    path, record = tmp_path / "rank_0" / "net.ckpt", tmp_path / STATE / "rank_0.json"
    write(journal(tmp_path), path)
    facts = json.loads(record.read_text())
    del facts["sample"], facts["check"]
    record.write_text(json.dumps(facts))
    made_ns = facts["modified_ns"]
    for modified_ns in (made_ns, made_ns - made_ns % (2 * 10**9), made_ns + 10**12):
        os.utime(path, ns=(modified_ns, modified_ns))
        assert journal(tmp_path, resume=True).skips(0, path)
    os.utime(path, ns=(0, made_ns - 3 * 10**9))
    assert "not written" in refused(lambda: journal(tmp_path, resume=True).skips(0, path)).problem


def test_what_was_written_lasts_before_it_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is synced and renamed, in order: no name lasts without its bytes, none that is told of is lost."""
    events: list[str] = []
    sync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        at = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"sync {at.name.replace(tmp_path.name, 'top')}")
        sync(descriptor)

    def note_name(file: str, target: str, **folders: int) -> None:
        events.append(f"name {target}")
        rename(file, target, **folders)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", note_name)
    write(journal(tmp_path / "new"), tmp_path / "new" / "rank_0" / "net.ckpt")
    events = [re.sub(r"^sync \.(.*)\.\w+\.partial$", r"sync \1", event) for event in events]
    assert events == [
        "sync top",  # has `new` now
        "sync new",  # and that the state
        *("sync run.json", "name run.json", "sync .reshard_mpi"),
        "sync new",  # has `rank_0` now
        "sync net.ckpt",
        "name rank_0.json",  # needs not last: it speaks of a file that may not be there
        *("name net.ckpt", "sync rank_0"),
        *("sync rank_0.json", "name rank_0.json", "sync .reshard_mpi"),
    ]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_died_while_it_named_the_run_is_cleared(tmp_path: Path, overwrite: bool) -> None:
    journal(tmp_path).begin()
    stale = tmp_path / ".reshard_mpi" / ".run.json.0123.partial"
    stale.write_text("{")
    before = (tmp_path / ".reshard_mpi" / "run.json").stat()
    journal(tmp_path, overwrite=overwrite).begin()
    assert not stale.exists()
    assert (tmp_path / ".reshard_mpi" / "run.json").stat().st_ino == before.st_ino  # nothing to write


def test_one_at_a_time_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one would clear what another is just writing, and two could each name it."""
    looked: list[Path] = []

    def look(folder: Folder, name: str) -> None:
        looked.append(folder.path / name)
        with (tmp_path / ".reshard_mpi" / "run.lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(target_journal, "remove_dead_partials", look)
    journal(tmp_path).begin()
    assert looked == [tmp_path / ".reshard_mpi" / "run.json"]


# Locks


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is writing target 0, until it is ended."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.kill()


def test_a_target_that_a_live_process_writes_is_refused_by_name(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        state = Journal(tmp_path, RunIdentity({"source": "here"}), resume=resume, overwrite=overwrite)
        for call in (partial(state.skips, 0, path), partial(write, state, path)):
            assert refused(call).problem == "target rank 0 is being written by another process"
        assert not state.skips(1, tmp_path / "rank_1" / "net.ckpt")
    (half,) = (tmp_path / "rank_0").iterdir()
    assert half.read_bytes() == b"half"


def test_one_who_looks_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks whether a target is written shares its lock for an instant; who is to write it waits that long."""
    path = tmp_path / "rank_0" / "net.ckpt"
    write(journal(tmp_path), path, b"before")
    with (tmp_path / ".reshard_mpi" / "rank_0.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        write(journal(tmp_path, overwrite=True), path, b"after")
    assert path.read_bytes() == b"after"


@pytest.mark.parametrize("how", few(1, [signal.SIGKILL, signal.SIGTERM]))
def test_death_frees_the_target_and_its_partial_file_is_removed(
    tmp_path: Path, holder: subprocess.Popen[bytes], how: signal.Signals
) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    holder.send_signal(how)
    holder.wait(timeout=300)
    assert not path.exists() and len(list(path.parent.iterdir())) == 1
    state = Journal(tmp_path, RunIdentity({"source": "here"}), resume=True, overwrite=False)
    state.check()
    assert not state.skips(0, path)
    write(state, path)
    assert list(path.parent.iterdir()) == [path]
    assert state.skips(0, path)


def test_partial_files_of_odd_names_are_removed_and_others_left(tmp_path: Path) -> None:
    path = tmp_path / "net[0]*.ckpt"
    stale, others = tmp_path / ".net[0]*.ckpt.12.partial", tmp_path / ".net0x.ckpt.12.partial"
    for left in (stale, others):
        left.write_bytes(b"half")
    write(journal(tmp_path), path)
    assert not stale.exists()
    assert others.exists()


# Files of others that appear while a run is at work, and file systems that fail


@pytest.mark.parametrize("when", ["before it is begun", "while it is written"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_that_is_saved_in_the_place_of_a_target_meanwhile_is_kept(
    tmp_path: Path, when: str, resume: bool
) -> None:
    path = tmp_path / "rank_0" / "net.ckpt"
    state = journal(tmp_path, resume=resume)
    state.begin()
    assert not state.skips(0, path)
    path.parent.mkdir()
    if when == "before it is begun":
        path.write_bytes(b"saved")
    with (
        pytest.raises(TargetError, match="a file that this run has not written"),
        state.writing(0, path, EVIDENCE) as publication,
    ):
        publication.partial.write_bytes(b"whole")
        path.write_bytes(b"saved")
        publication.publish()
    assert path.read_bytes() == b"saved" and not list(path.parent.glob(".*"))
    with pytest.raises(TargetError):
        journal(tmp_path, resume=True).skips(0, path)
    write(journal(tmp_path, overwrite=True), path)
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize("fails", ["rank_0/net.ckpt", "reshard.json"])
def test_a_file_system_that_does_not_say_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A handle of NFS may be stale once: that is not "nothing", in whose place a target goes."""
    path = tmp_path / "rank_0" / "net.ckpt"
    path.parent.mkdir()
    (tmp_path / fails).write_bytes(b"saved")
    real = os.stat
    for failing in range(1, 12):
        looks = itertools.count(1)

        def stale(place: Any, *args: Any, looks: Iterator[int] = looks, failing: int = failing, **kwargs: Any) -> Any:
            if str(place) == str(tmp_path / fails) and next(looks) == failing:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), place)
            return real(place, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stale)
            patch.setattr(os, "lstat", partial(stale, follow_symlinks=False))
            state = journal(tmp_path, resume=True)
            with pytest.raises((OSError, TargetError)):
                state.check()
                state.skips(0, path)


def test_a_run_that_is_refused_leaves_the_strategy_of_the_other(tmp_path: Path) -> None:
    """Another run begins between its look at the folder, which is empty, and its own beginning."""
    identities = [RunIdentity({**FACTS, "dst_strategy": digest}) for digest in ("0a", "0b")]
    first, other = (
        Journal(tmp_path, identity, resume=True, overwrite=False, strategy=lambda: "ours") for identity in identities
    )
    other.check()
    first.begin()
    refused(other.begin)
    assert strategy_of_run(tmp_path, identities[0].digest) == ("ours", str(tmp_path / STATE / "strategy.json"))


def test_the_strategy_of_an_overwriting_run_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """It lies beside `run.json` of the run before, which goes on."""
    identity = RunIdentity(FACTS)
    first = Journal(tmp_path, identity, resume=False, overwrite=False, strategy=lambda: "ours")
    first.begin()
    with Folder.open(tmp_path / STATE) as state:
        keep_strategy(state, "0" * 64, "of the one that was killed")
    Journal(tmp_path, identity, resume=True, overwrite=False, strategy=lambda: "ours").begin()
    assert strategy_of_run(tmp_path, identity.digest) == ("ours", str(tmp_path / STATE / "strategy.json"))

"""Requests of a run to the store of its targets that fail: all is well only with the right objects.

Else one message says what is wrong, nothing half-done has the name of a target, and the same command, resumed, ends
with all that an undisturbed run makes, and no upload left.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.cases import Side
from support.conversions import Conversion, write_conversion
from support.examples import few, few_cases
from support.fault_proxy import (
    ACCESS_DENIED,
    CONFLICT,
    ERROR_IN_200,
    LASTING,
    NO_CONDITIONS,
    NO_COPIED_RANGES,
    NO_COPIES,
    NO_SUCH_UPLOAD,
    NOT_IMPLEMENTED,
    PASSING,
    Answer,
    Break,
    Fault,
    FaultProxy,
    Operation,
    Request,
    Reword,
)
from support.object_servers import Bucket, forget, names, objects, put, upload, uploads
from support.oracle import RawLayout
from support.processes import Finished

from reshard_mpi.filesystem import object_store, object_uploads

ExponentialBackoff = pytest.importorskip("botocore.retries.standard").ExponentialBackoff

_STATE = [f".reshard_mpi/{name}.json" for name in ("committed", "rank_0", "rank_1", "run", "strategy")]
_TARGETS = ["rank_0/checkpoint_0.ckpt", "rank_1/checkpoint_1.ckpt"]
WHOLE = [*_STATE, *_TARGETS, "reshard.json"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are made again at once, a few times, and each test finds out anew what the store can do."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    monkeypatch.setattr(object_store, "_ATTEMPTS", 3)
    monkeypatch.setattr(object_store, "_LONGEST_NAP_SECONDS", 0.0)
    monkeypatch.setattr(object_uploads, "_WITH_CRC", {})


def sent(c: Conversion, address: str, *options: str) -> Finished:
    """Run a conversion whose targets go to an address."""
    forget()
    object_uploads._WITH_CRC.clear()
    return c.but(dst=address).run("transform", *options)  # type: ignore[arg-type]


def assert_whole(bucket: Bucket, c: Conversion) -> None:
    """Check that exactly the objects of an undisturbed run are there."""
    assert names(bucket / "out") == WHOLE
    assert not uploads(bucket)
    if not c.dst.exists():
        c.done("transform")
    found = objects(bucket / "out")
    for name in _TARGETS:
        assert found[name] == (c.dst / name).read_bytes()


@pytest.mark.parametrize("fault", few(1, [Break.LOST_ANSWER, NOT_IMPLEMENTED, ACCESS_DENIED]))
def test_nothing_stays_of_what_tells_whether_a_store_keeps_conditions(
    moto: Bucket, proxy: FaultProxy, c: Conversion, fault: object
) -> None:
    proxy.spoil(fault, when=Operation.DELETE, count=None)  # type: ignore[arg-type]
    sent(c, moto / "out")
    assert not [name for name in names(moto / "out") if ".reshard_mpi/trial" in name]


@pytest.mark.parametrize("overwrite", few(1, [False, True]))
def test_a_store_that_keeps_no_conditions_is_refused(
    moto: Bucket, proxy: FaultProxy, c: Conversion, overwrite: bool
) -> None:
    if overwrite:
        assert sent(c, moto / "out", "--to", "hdf5").code == 0
    before = objects(moto / "out")
    proxy.spoil(NO_CONDITIONS, count=None)
    given = ["--overwrite"] if overwrite else []
    finished = sent(c, moto / "out", *given)
    assert finished.code == 3 and "--single-writer" in finished.err, finished
    assert objects(moto / "out") == before
    assert sent(c, moto / "out", "--single-writer", *given).code == 0
    assert_whole(moto, c)


@few_cases(
    2, "told", ["without UploadId", "without Key", "without ETag", "without Size", "cannot be understood", "again"]
)
def test_answers_that_nobody_can_use(moto: Bucket, proxy: FaultProxy, c: Conversion, told: str) -> None:
    """Fields that are not there or have no value, and a listing whose end never comes."""
    field = told.removeprefix("without ")
    fault = Reword(f"<{field}>[^<]*</{field}>".encode(), b"")
    if told == "cannot be understood":
        fault = Reword(b"<LastModified>[^<]*</LastModified>", b"<LastModified>yesterday</LastModified>")
    elif told == "again":
        end = b"<IsTruncated>false</IsTruncated>"
        fault = Reword(end, b"<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>")
    put(moto / "out/notes.txt", b"of somebody else")  # so that a listing has an object
    operation = Operation.CREATE_UPLOAD if field == "UploadId" else Operation.LIST
    proxy.spoil(fault, when=operation, count=None)
    finished = sent(c, moto / "out")
    assert finished.code == 4 and told in finished.err and "Traceback" not in finished.err, finished
    proxy.heal()
    assert sent(c, moto / "out", "--resume").code == 0
    assert names(moto / "out") == sorted([*WHOLE, "notes.txt"]) and not uploads(moto)


def test_a_commit_that_the_store_refuses(moto: Bucket, proxy: FaultProxy, c: Conversion) -> None:
    """All targets are there, so it is no refusal of all."""

    def is_late(request: Request) -> bool:
        is_written = _TARGETS[1] in names(moto / "out")
        return is_written and request.operation is Operation.GET and request.key.endswith("rank_0.json")

    proxy.spoil(Answer(400, "BadRequest"), when=is_late, count=None)
    finished = sent(c, moto / "out")
    assert finished.code == 4 and "the commit record could not be written" in finished.err, finished
    proxy.heal()
    assert sent(c, moto / "out", "--resume").code == 0
    assert_whole(moto, c)


@pytest.mark.slow
def test_the_record_of_a_run_whose_answer_was_lost(moto: Bucket, proxy: FaultProxy, c: Conversion) -> None:
    is_record = lambda request: request.operation is Operation.PUT and request.key.endswith("run.json")  # noqa: E731
    proxy.spoil(Break.LOST_ANSWER, when=is_record)
    assert sent(c, moto / "out").code == 0
    assert_whole(moto, c)


@pytest.mark.slow
def test_what_a_killed_process_left_of_a_trial_is_removed(moto: Bucket, c: Conversion) -> None:
    trial = f"out/{_TARGETS[0]}.0123456789abcdef01234567.trial"
    put(moto / trial, b"trial")
    moto.server.client.create_multipart_upload(Bucket=moto.name, Key=trial)
    other = f"{moto.name}/out/{_TARGETS[0]}.trial"
    put(f"s3://{other}", b"of somebody else")
    assert sent(c, moto / "out").code == 0
    assert objects(f"s3://{other}")[""] == b"of somebody else"
    assert names(moto / "out") == sorted([*WHOLE, f"{_TARGETS[0]}.trial"])
    assert not uploads(moto)


@pytest.mark.slow
def test_a_trial_that_cannot_be_removed_is_told(moto: Bucket, proxy: FaultProxy, c: Conversion) -> None:
    proxy.spoil(ACCESS_DENIED, when=lambda request: request.operation is Operation.DELETE, count=None)
    finished = sent(c, moto / "out")
    assert finished.code in (3, 4) and "AccessDenied" in finished.err, finished
    proxy.heal()
    assert sent(c, moto / "out", "--resume").code == 0
    assert_whole(moto, c)


def copied(folder: Path, bucket: Bucket) -> Conversion:
    """Write a conversion from a store, in which the store can copy the second half of the target by itself."""

    def side(ranks: int) -> Side:
        return Side(ranks, 1, {"w": RawLayout((ranks,), (0, -1))})

    tensors = {"w": np.random.default_rng(0).random((3 << 10, 1 << 10), np.float32)}
    c = write_conversion(folder, "safetensors", side(2), side(1), tensors)
    c.done("transform")
    upload(c.src, bucket / "src")
    return c


# A store that copies the whole source, nothing, that knows nothing of it, or lets nobody copy.
@pytest.mark.slow
@pytest.mark.parametrize("fault", [NO_COPIED_RANGES, NO_COPIES, NOT_IMPLEMENTED, ACCESS_DENIED], ids=str)
def test_a_store_that_cannot_copy_ranges_is_sent_them(
    moto: Bucket, proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    c = copied(tmp_path, moto)
    proxy.spoil(fault, when=Operation.COPY_PART, count=None)
    assert sent(c.but(src=moto / "src"), moto / "out").code == 0
    assert proxy.counts[Operation.COPY_PART] == 1
    assert objects(moto / "out")["rank_0/checkpoint_0.safetensors"] == c.written(0).read_bytes()
    assert not uploads(moto)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PASSING.values(), ERROR_IN_200, NO_SUCH_UPLOAD, Answer(412, "PreconditionFailed")])
@pytest.mark.parametrize("count", [1, None])
def test_copies_that_fail(moto: Bucket, proxy: FaultProxy, tmp_path: Path, fault: Fault, count: int | None) -> None:
    c = copied(tmp_path, moto)
    proxy.spoil(fault, when=Operation.COPY_PART, count=count)
    finished = sent(c.but(src=moto / "src"), moto / "out")
    passes = count == 1 and (fault in PASSING.values() or fault is ERROR_IN_200)
    assert finished.code == (0 if passes else 4) and finished.err.count("error:") == (not passes), finished
    assert ("rank_0/checkpoint_0.safetensors" in names(moto / "out")) == passes
    proxy.heal()
    assert sent(c.but(src=moto / "src"), moto / "out", "--resume").code == 0
    assert objects(moto / "out")["rank_0/checkpoint_0.safetensors"] == c.written(0).read_bytes()
    assert not uploads(moto)


@pytest.mark.slow
def test_a_commit_of_another_run_that_comes_late(moto: Bucket, proxy: FaultProxy, c: Conversion) -> None:
    """It was begun before this run replaced what it is about, and all was there yet when it looked again."""
    assert sent(c, moto / "out", "--to", "hdf5").code == 0
    late = objects(moto / "out/reshard.json")[""]
    assert sent(c.but(options=("--to", "ckpt")), moto / "out", "--overwrite").code == 0
    assert sent(c, moto / "out", "--overwrite", "--to", "hdf5").code == 0

    def commit(_: object) -> None:
        put(moto / "out/reshard.json", late)

    is_last = lambda request: request.operation is Operation.COMPLETE and request.key.endswith("_1.ckpt")  # noqa: E731
    proxy.spoil(commit, when=is_last)
    assert sent(c, moto / "out", "--overwrite").code == 0
    assert_whole(moto, c)
    assert objects(moto / "out/reshard.json")[""] != late


@pytest.mark.parametrize("when", few(1, [Operation.CREATE_UPLOAD, Operation.PUT_PART]))
def test_another_run_that_begins_meanwhile(moto: Bucket, proxy: FaultProxy, c: Conversion, when: Operation) -> None:
    assert sent(c, moto / "out", "--to", "hdf5").code == 0
    other = objects(moto / "out/.reshard_mpi/run.json")[""]

    def begin(_: object) -> None:
        put(moto / "out/.reshard_mpi/run.json", other)

    proxy.spoil(begin, when=lambda request: request.operation is when and request.key.endswith("_1.ckpt"))
    finished = sent(c, moto / "out", "--overwrite")
    assert finished.code == 4 and finished.err.count("error:") == 1 and "begun" in finished.err, finished
    assert _TARGETS[1] not in names(moto / "out")
    assert not uploads(moto)


@pytest.mark.slow
@pytest.mark.parametrize("of_trial", [False, True])
def test_an_upload_of_which_the_answer_was_lost(moto: Bucket, proxy: FaultProxy, c: Conversion, of_trial: bool) -> None:
    def is_meant(request: Request) -> bool:
        return request.operation is Operation.CREATE_UPLOAD and request.key.endswith(".trial") == of_trial

    proxy.spoil(Break.LOST_ANSWER, when=is_meant)
    assert sent(c, moto / "out").code == 0
    assert_whole(moto, c)


_OPERATIONS = [Operation.LIST, Operation.LIST_UPLOADS, Operation.HEAD, Operation.GET, Operation.PUT]
_OPERATIONS += [Operation.CREATE_UPLOAD, Operation.PUT_PART, Operation.COMPLETE, Operation.DELETE]
# What an operation may have an answer of its own for; what is told from any answer alike is met by each in its turn.
_OF_AN_OPERATION = {
    "lost answer": Break.LOST_ANSWER,
    "error in 200": ERROR_IN_200,
    "no such upload": NO_SUCH_UPLOAD,
    "conflict": CONFLICT,
    "not implemented": NOT_IMPLEMENTED,
}
_OF_ANY = [{name: fault for name, fault in PASSING.items() if fault is not Break.LOST_ANSWER}, LASTING]
_FAULTS = {**_OF_AN_OPERATION, **PASSING, **LASTING}
# Requests that are let through first, and how many then fail: one of these for each fault of each operation in turn.
_SKIPPED_AND_FAILING = ((0, 1), (2, 1), (0, None))
_MET = [
    (operation, name)
    for turn, operation in enumerate(_OPERATIONS)
    for name in [*_OF_AN_OPERATION, *([*alike][(turn + more) % len(alike)] for alike in _OF_ANY for more in (0, 2))]
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), _MET)
def test_requests_that_fail_once_or_for_good(
    moto: Bucket, proxy: FaultProxy, c: Conversion, name: str, operation: Operation
) -> None:
    c.done("transform")
    turn = [*_FAULTS].index(name) + _OPERATIONS.index(operation)
    skip, count = _SKIPPED_AND_FAILING[turn % len(_SKIPPED_AND_FAILING)]
    proxy.spoil(_FAULTS[name], when=operation, skip=skip, count=count)
    finished = sent(c, moto / "out")
    assert finished.code in (0, 3, 4) and finished.err.count("error:") == bool(finished.code), finished
    for target, content in objects(moto / "out").items():
        assert target not in _TARGETS or content == (c.dst / target).read_bytes()
    if finished.code == 0:
        assert_whole(moto, c)
    proxy.heal()
    assert sent(c, moto / "out", "--resume").code == 0
    assert_whole(moto, c)

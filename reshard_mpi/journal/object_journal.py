"""Keep the state of a run whose targets go to an object store (`ObjectJournal`): the same records, as small objects.

A store has no locks, and needs none: targets are determined by the run, objects appear whole, and `run.json` is
written on the condition that there is none, or that it is the one that was read. Whoever begins a target aborts all
other uploads of its name, so a writer that was stopped meanwhile ends; with `--resume` the one that a process of the
run has left behind goes on. A target is recorded when it is in place; one whose writer has died in between says itself
which run it is of, and is made again.

A target is made in a file of its own that becomes an object when it is whole (`ObjectPublication`). Formats and the
engine write to a file in memory, which is sent while it is filled. A format that writes among payloads when the file is
sealed, or what is to be verified, is kept whole until then, in a temporary file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from reshard_mpi.engine.source_ranges import TargetRange
from reshard_mpi.errors import TargetError
from reshard_mpi.filesystem import object_folders, object_uploads
from reshard_mpi.filesystem.folders import close
from reshard_mpi.filesystem.object_folders import ObjectFolder
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, state_of
from reshard_mpi.filesystem.object_uploads import SentPart, Upload
from reshard_mpi.filesystem.source_files import SourceFile, first_bytes, is_folder, is_taken
from reshard_mpi.formats.locations import Span
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.file_ownership import remove_earlier_run, require_own_target
from reshard_mpi.journal.provenance import SourceStates, TargetInputs
from reshard_mpi.journal.publication import Publication
from reshard_mpi.journal.record_files import COMMIT_RECORD, STATE, read_json, record_path, run_path, upload_path
from reshard_mpi.journal.run_records import RunIdentity
from reshard_mpi.journal.staged_parts import Begin, StagedParts
from reshard_mpi.journal.target_folders import uncommit
from reshard_mpi.journal.target_journal import Journal
from reshard_mpi.journal.target_records import RecordHead, TargetRecord, TensorSum, sample_of
from reshard_mpi.text import Say

# The name under which an object says, in its metadata, which run has made it.
_RUN = "reshard-run"
# The name of an object that is never there.
_TRIAL = "rights.trial"
_MOST_KEY_BYTES = 1024  # Amazon S3, "Naming Amazon S3 objects"

Check = Callable[[], None]
Confirm = Callable[[ObjectState, str, Sequence[TensorSum], str], None]


class ObjectPublication(Publication):
    """A target that is made in a file of its own, and becomes an object when `publish` is called.

    If the block ends without that, what was sent is given up.

    Attributes:
        partial: the path of the file. descriptor: open for reading and writing as long as the block lasts.
    """

    def __init__(
        self, begin: Begin, check: Check, confirm: Confirm, *, only_new: Callable[[], bool], is_streamed: bool
    ) -> None:
        """begin: begins the upload, before anything is sent, or goes on with one; returns what of its parts is there.

        Args:
            check: called before the object takes its name; raises if it must not.
            confirm: called with the object, the sample of its bytes, and what `publish` was given.
            only_new: tells whether the object must not replace another one.
            is_streamed: whether the file is sent while it is filled, and so lies in memory; else on the disk.
        """
        self._begin = begin
        self._check = check
        self._confirm_object = confirm
        self._only_new = only_new
        self._is_streamed = is_streamed
        self._parts: StagedParts | None = None
        self.is_published = False

    @property
    def partial(self) -> Path:
        return Path(f"/proc/self/fd/{self.descriptor}")

    def __enter__(self) -> Self:
        self.descriptor = os.memfd_create("target") if self._is_streamed else _disk_file()
        return self

    def move_to_disk(self) -> None:
        """Have an empty file on the disk, for a target whose parts do not become complete one after another."""
        close(self.descriptor)
        self.descriptor = _disk_file()

    def __exit__(self, *_: object) -> None:
        try:
            if self._parts is not None:
                self._parts.close()
            if self._parts is not None and not self.is_published:
                with contextlib.suppress(Exception):  # the error that led here is told; the next run gives it up too
                    self._parts.upload.abort()
        finally:
            close(self.descriptor)

    def stage(self, manifest: Manifest, runs: Sequence[TargetRange], recorded: Sequence[Span] = ()) -> StagedParts:
        """Begin to send the target; return the object that is told of complete bytes.

        Args:
            manifest: of the file, which has everything but its payloads.
            runs: what the store may copy by itself, ascending.
            recorded: as for `StagedParts`.
        """
        payloads, is_streamed = manifest.tensors.payload_spans(), self._is_streamed
        self._parts = StagedParts(
            self.descriptor, self._begin, payloads, runs, is_streamed=is_streamed, recorded=recorded
        )
        return self._parts

    def publish(self, sums: Sequence[TensorSum] = (), besides: str = "", *, synced: bool = True) -> None:
        """Send what has not been sent, and put the object in place of whatever is there.

        Args:
            sums: of its tensors, for its record; besides: a digest of all else (see `TargetRecord`).
            synced: without meaning here.
        """
        assert self._parts is not None
        self._check()
        sent = self._parts.finish()
        self.store_copied_bytes = self._parts.copied_bytes
        sample = sample_of(SourceFile(str(self.partial), self.descriptor))
        self._check()
        state = self._parts.upload.complete(sent, only_new=self._only_new())
        self.is_published = True
        self._confirm_object(state, sample, sums, besides)


def _disk_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class ObjectJournal(Journal):
    """The state of one run below one prefix of an object store. Nothing is created before `begin`.

    Attributes:
        is_streamed: whether parts of a target are sent while it is filled.
    """

    def __init__(
        self,
        folder: Path,
        identity: RunIdentity,
        *,
        resume: bool,
        overwrite: bool,
        strategy: Callable[[], str] | None = None,
        is_streamed: bool = False,
        is_single_writer: bool = False,
    ) -> None:
        """The first arguments are as for `Journal`.

        Args:
            is_single_writer: whether the user says that nobody else writes there meanwhile.
        """
        super().__init__(folder, identity, resume=resume, overwrite=overwrite, strategy=strategy)
        self.is_streamed = is_streamed
        self._is_single_writer = is_single_writer
        self._seen: ObjectState | None = None  # the record of the run, when it was last read

    def check(self) -> None:
        """Raise TargetError if the prefix cannot be joined: something else lies there, or it is another run's."""
        object_folders.forget_below(self._place)
        if self._place.key and object_folders.state_of(self._place) is not None:
            raise TargetError(
                "the target is not a folder",
                expected="a prefix",
                got="an object",
                where=str(self._place),
                remedy="choose another target",
            )
        self._require_joinable()

    @property
    def _place(self) -> ObjectPlace:
        return ObjectPlace.of(self.folder)

    def _require_place(self, path: Path) -> None:
        place = ObjectPlace.of(path)
        if len(os.fsencode(place.key)) > _MOST_KEY_BYTES:
            raise TargetError(
                "the name of an object would be too long",
                expected=f"at most {_MOST_KEY_BYTES} bytes",
                got=f"{len(os.fsencode(place.key))} bytes",
                where=str(place),
                remedy="take a shorter prefix",
            )
        if is_folder(path):
            raise TargetError(
                "a folder is in the place of a target",
                expected="an object, or nothing",
                got=f"objects whose names begin with {place}/",
                where=str(place),
                remedy="remove them, or choose another target",
            )

    def begin(self, say: Say = lambda _: None) -> None:
        """Record the run below the prefix; join the run if another process has begun it.

        Raises TargetError as `check` does, and for a store that does not keep conditions; StoreError if it does not
        allow what every target needs.
        """
        object_uploads.require_rights(ObjectPlace.of(self._state / _TRIAL))
        folder = ObjectFolder.open(self.folder)
        state = folder.inner(STATE)
        place = ObjectPlace.of(run_path(self._state))
        object_folders.forget_below(self._place)
        earlier = self._recorded_state(place)
        if not self._is_begun() and (earlier is None or self._overwrite):
            content = self.identity.as_text().encode()
            if not self._is_single_writer:
                self._require_conditions(place, content, earlier)
            if self._overwrite:
                remove_earlier_run(folder, state, self.identity, self._index_names)
            if earlier is not None or self._is_single_writer:
                object_folders.put(place, content, instead_of=None if self._is_single_writer else earlier)
        self.check()
        if self._is_begun():
            self._keep_strategy(state)

    def _require_begun(self) -> None:
        """Raise TargetError if another run has begun since: the record is looked at anew, and read if it changed."""
        there = self._recorded_state(ObjectPlace.of(run_path(self._state)))
        if there is None or there != self._seen:
            object_folders.forget_below(self._place)
            super()._require_begun()
            self._seen = there

    def _recorded_state(self, place: ObjectPlace) -> ObjectState | None:
        try:
            return state_of(place)
        except FileNotFoundError:
            return None

    def _require_conditions(self, place: ObjectPlace, content: bytes, earlier: ObjectState | None) -> None:
        """Write the record of the run, if there is none of an earlier one, and try to write over the record there.

        What a store that lets that pass has written is the same, so nothing is lost and nothing stays behind.

        Args:
            place: of the record. content: of this run's. earlier: the one that lies there.

        Raises TargetError for a store that writes over an object that must not be there.
        """
        if earlier is not None:
            content = first_bytes(run_path(self._state), earlier.size_bytes)
            keeps = object_folders.is_kept(place, content)
        else:  # if another process was quicker, the store has told so
            keeps = object_folders.is_kept(place, content) or object_folders.is_kept(place, content)
        if earlier is None and not keeps:
            object_folders.remove(place)
        if not keeps:
            raise TargetError(
                "the store does not keep conditions, by which processes know of each other",
                expected="that it refuses to write over an object with If-None-Match",
                got="that it wrote, or does not know the condition",
                where=str(self._place),
                remedy="--single-writer, if nobody else writes there meanwhile",
            )

    @contextlib.contextmanager
    def writing(
        self, target_rank: int, path: Path, inputs: TargetInputs, say: Say = lambda _: None
    ) -> Iterator[ObjectPublication]:
        """Yield the target to write and publish; if it is not published, nothing of it stays.

        Args:
            inputs: for its record.

        Raises TargetError if another run has begun since.
        """
        object_folders.forget_below(self._place)
        place, state = ObjectPlace.of(path), ObjectFolder(self._state)
        self._require_begun()
        if not self._overwrite:
            if is_taken(path):
                self._require_recorded(target_rank, path)
            self._require_own_index()
        uncommit(ObjectFolder.open(self.folder), self._index_names)
        was_there = is_taken(path)
        state.remove(record_path(self._state, target_rank).name)

        def check() -> None:
            inputs.require_sources_unchanged(target_rank)
            self._require_begun()

        def confirm(written: ObjectState, sample: str, sums: Sequence[TensorSum], besides: str) -> None:
            """Record the target, which is in place.

            A commit that was begun before it was replaced may have come since, and have found all as it was.
            """
            if self._recorded_state(ObjectPlace.of(self.folder / COMMIT_RECORD)) is not None:
                object_folders.forget_below(self._place)
                uncommit(ObjectFolder.open(self.folder), self._index_names)
            file = path.relative_to(self.folder).as_posix()
            own = self.identity.digest, target_rank, file, written.size_bytes, written.modified_ns
            head = RecordHead(*own, sample=sample, tag=written.inode)
            TargetRecord(head, inputs, tuple(sums), besides).publish(state)
            state.remove(upload_path(self._state, target_rank).name)

        publication = ObjectPublication(
            partial(self._upload, place, target_rank, inputs.sources),
            check,
            confirm,
            only_new=lambda: not was_there and not self._is_single_writer,
            is_streamed=self.is_streamed,
        )
        with publication:
            yield publication

    def _upload(
        self, place: ObjectPlace, rank: int, sources: SourceStates, planned: Sequence[TargetRange], structure: str
    ) -> tuple[Upload, Sequence[SentPart]]:
        """Go on with the upload of a target that a process of this run has left, or begin one; abort all others.

        Returns the upload, and the parts of it that are there. They are those that would be sent: of the same sources,
        in the same structure, cut at the same places.
        """
        unfinished = object_uploads.unfinished(place)
        lying = [upload.upload_id for upload in unfinished if upload.key == place.key]
        object_uploads.remove_trials(place, unfinished)
        made_of = repr((self.identity.digest, sources.files, sources.versions, planned, structure))
        digest = hashlib.sha256(made_of.encode(errors="surrogatepass")).hexdigest()
        facts = read_json(upload_path(self._state, rank)) or {}
        upload = None
        if self._resume and facts.get("digest") == digest and facts.get("id") in lying:
            upload = Upload(place, str(facts["id"]), str(facts.get("token")), has_crc=facts.get("crc") is True)
        for upload_id in lying:
            if upload is None or upload_id != upload.upload_id:
                object_uploads.abort(place, upload_id)
        if upload is not None and (there := upload.parts()):
            return upload, there
        upload = upload or Upload.begin(place, {_RUN: self.identity.digest})
        facts = {"id": upload.upload_id, "token": upload.token, "crc": upload.has_crc, "digest": digest}
        object_folders.put(ObjectPlace.of(upload_path(self._state, rank)), json.dumps(facts).encode())
        return upload, ()

    def _require_recorded(self, target_rank: int, path: Path) -> None:
        said = object_folders.metadata_of(ObjectPlace.of(path))
        if said.get(_RUN) != self.identity.digest:  # else its writer has died before it was recorded
            require_own_target(ObjectFolder(self._state), self.folder, target_rank, path)

    def left_bytes(self, path: Path) -> int:
        """Return 0: uploads take no room of this host."""
        return 0

    def paths(self, target_rank: int, path: Path) -> tuple[Path, ...]:
        """Return nothing: names in a store have a limit of their own."""
        return ()

    def _refuse_locked(self, target_rank: int) -> None:
        """Do nothing: there are no locks."""

"""Make a target in a file of its own that becomes an object of a store when it is whole (`ObjectPublication`).

Formats and the engine write to a file in memory, which is sent while it is filled. A format that writes among payloads
when the file is sealed, or what is to be verified, is kept whole until then, in a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from reshard_mpi.engine.checksums import Span
from reshard_mpi.filesystem.folders import close
from reshard_mpi.filesystem.object_parts import CopiedRun
from reshard_mpi.filesystem.object_store import ObjectState
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.journal.publication import Publication
from reshard_mpi.journal.staged_parts import Begin, StagedParts
from reshard_mpi.journal.target_records import TensorSum, sample_of

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
        if self._is_streamed:
            self.descriptor = os.memfd_create("target")
        else:
            self.descriptor = _disk_file()
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

    def stage(self, manifest: Manifest, runs: Sequence[CopiedRun], recorded: Sequence[Span] = ()) -> StagedParts:
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

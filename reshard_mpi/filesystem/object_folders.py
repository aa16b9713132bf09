"""Write small objects at once, on conditions (`put`), also as files of a folder that is open (`ObjectFolder`).

Such a folder is a prefix. Its files are objects, which appear whole; there are no owners, modes or locks, and nothing
is to be synced.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

from reshard_mpi.errors import StoreError
from reshard_mpi.filesystem import object_listing
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, asked, state_of, tag_in

# What a store answers where a condition is not met, and where it knows none.
NOT_MET = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
_UNKNOWN = ("NotImplemented", "InvalidArgument", "InvalidRequest", "NotSupported")


def put(
    place: ObjectPlace, content: bytes, *, only_new: bool = False, instead_of: ObjectState | None = None
) -> ObjectState | None:
    """Write a small object; return it, or None if a condition is not met. Raises as `object_store.asked` does.

    Args:
        only_new: on the condition that there is no object of the name.
        instead_of: on the condition that this object lies there.
    """
    from botocore.exceptions import ClientError

    conditions = {"IfNoneMatch": "*"} if only_new else {} if instead_of is None else {"IfMatch": f'"{instead_of.tag}"'}

    def request(store: Any) -> Any:
        try:
            return store.put_object(
                Bucket=place.bucket,
                Key=place.key,
                Body=content,
                ContentMD5=base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
                **conditions,
            )
        except ClientError as error:
            if conditions and error.response.get("Error", {}).get("Code") in NOT_MET:
                return None
            raise

    answer = asked(place, request)
    if answer is None:
        return None
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")  # which something on the way may leave out
    state = (
        ObjectState.of(tag_in(answer, place), len(content), parsedate_to_datetime(date)) if date else state_of(place)
    )
    object_listing.note(place, state)
    return state


def is_kept(place: ObjectPlace, content: bytes) -> bool:
    """Write an object on the condition that there is none; tell whether there is one, which the store has kept.

    False also for a store that knows no such condition. Raises as `object_store.asked` does.
    """
    from botocore.exceptions import ClientError

    try:
        return put(place, content, only_new=True) is None
    except StoreError as error:
        refusal = error.__cause__
        if isinstance(refusal, ClientError) and refusal.response.get("Error", {}).get("Code") in _UNKNOWN:
            return False
        raise


def remove(place: ObjectPlace) -> None:
    """Remove an object, if it is there. Raises as `object_store.asked` does."""
    asked(place, lambda store: store.delete_object(Bucket=place.bucket, Key=place.key))
    object_listing.note(place, None)


def metadata_of(place: ObjectPlace) -> Mapping[str, str]:
    """Return what an object's writer has said of it, by lower-case names. Raises as `object_store.asked` does."""
    answer = asked(place, lambda store: store.head_object(Bucket=place.bucket, Key=place.key))
    return {name.lower(): str(value) for name, value in answer.get("Metadata", {}).items()}


class ObjectFolder(Folder):
    """A folder of an object store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, -1)

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""

    @classmethod
    def open(cls, path: Path) -> Self:
        return cls(path)

    def inner(self, name: str) -> Folder:
        return ObjectFolder(self.path / name)

    def made_inner(self, name: str) -> Folder:
        return self.inner(name)

    def open_file(self, name: str, flags: int, purpose: str) -> int:
        """Raise FileNotFoundError: only locks are opened so, and a store has none."""
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))

    def names(self) -> list[str]:
        try:
            return list(object_listing.children(ObjectPlace.of(self.path)))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> bool:
        place = ObjectPlace.of(self.path / name)
        if object_listing.state_of(place) is None:
            return False
        remove(place)
        return True

    def put(self, name: str, content: bytes) -> bool:
        put(ObjectPlace.of(self.path / name), content)
        return True

    def remove_empty(self, name: str) -> None:
        """Do nothing: a folder in which nothing lies is not there."""

    def blocks(self, name: str) -> int:
        return 0

    def sync(self) -> None:
        """Do nothing: an object that is written can be read."""

    def require_own_file(self, name: str) -> None:
        """Do nothing: objects have no owners that matter here."""


def listed_anew(path: Path) -> ObjectFolder:
    """Open a folder of an object store, and forget all that was listed there: others may have written to it."""
    object_listing.forget_below(ObjectPlace.of(path))
    return ObjectFolder.open(path)

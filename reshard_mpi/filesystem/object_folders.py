"""Take prefixes of an object store for folders: list them (`children`), and write there (`put`, `ObjectFolder`).

A folder that is asked about is listed with all that lies below it, once for a command, and told to the other processes
of a run (`known`, `learn`): thousands of processes that list at once are refused by a store, and an answer that is
missing must not pass for an empty folder.

Files of an `ObjectFolder` are objects, which appear whole; there are no owners, modes or locks, and nothing is to be
synced.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import threading
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from reshard_mpi.errors import SourceError, StoreError
from reshard_mpi.filesystem import object_store
from reshard_mpi.filesystem.folders import Folder
from reshard_mpi.filesystem.object_store import ObjectPlace, ObjectState, asked, field_of, listing

# Pages of a listing of all that lies below a folder; one with more is listed folder by folder, as it is asked about.
_MOST_PAGES = 20

# The names in a folder; the state of an object, None for a folder.
Children = dict[str, ObjectState | None]


class ListedFolders(NamedTuple):
    """The contents of buckets, as far as they were listed. Plain values, so that one process can tell the others."""

    folders: dict[ObjectPlace, Children]  # by their places
    whole: set[ObjectPlace]  # folders that were listed with all that lies below them
    objects: dict[ObjectPlace, ObjectState | None]  # that were asked about singly; None: there is none


class _Listings:
    """What this process has listed."""

    def __init__(self) -> None:
        self.known = ListedFolders({}, set(), {})
        self.renew_lock()

    def renew_lock(self) -> None:
        self.lock = threading.RLock()


_LISTINGS = _Listings()
# A thread of the parent may hold the lock while it forks.
os.register_at_fork(after_in_child=_LISTINGS.renew_lock)


def forget() -> None:
    """Forget all that has been listed: a new command looks again."""
    with _LISTINGS.lock:
        for part in _LISTINGS.known:
            part.clear()


def forget_below(place: ObjectPlace) -> None:
    """Forget what has been listed of a place and below it, or of more than that: others may write there."""
    with _LISTINGS.lock:
        known = _LISTINGS.known
        beginning = f"{place.key}/" if place.key else ""
        for part in known:
            for other in [other for other in part if other.bucket == place.bucket]:
                is_above = not other.key or f"{place.key}/".startswith(f"{other.key}/")
                if is_above or f"{other.key}/".startswith(beginning):
                    part.discard(other) if isinstance(part, set) else part.pop(other)


def note(place: ObjectPlace, state: ObjectState | None) -> None:
    """Change the listings of the folders that an object lies in, which this process has written, or removed (None)."""
    with _LISTINGS.lock:
        _LISTINGS.known.objects.pop(place, None)
        known = _LISTINGS.known.folders
        above, _, name = place.key.rpartition("/")
        folder = ObjectPlace(place.bucket, above)
        children = _known_folder(folder)
        if children is None:
            return
        if state is None:
            children.pop(name, None)  # a folder that becomes empty is one that nothing lies in
            return
        known.setdefault(folder, children)[name] = state
        while folder.key:
            above, _, name = folder.key.rpartition("/")
            parent = ObjectPlace(folder.bucket, above)
            siblings = _known_folder(parent)
            if siblings is None:
                break
            known.setdefault(parent, siblings).setdefault(name, None)
            folder = parent


def known() -> ListedFolders:
    """Return all that has been listed."""
    return _LISTINGS.known


def learn(listed: ListedFolders) -> None:
    """Take over what another process has listed."""
    with _LISTINGS.lock:
        _LISTINGS.known.folders.update(listed.folders)
        _LISTINGS.known.whole.update(listed.whole)
        _LISTINGS.known.objects.update(listed.objects)


def look(path: str) -> None:
    """List what lies at an address, an object or a folder. Raises as `object_store.asked` does."""
    _kind(ObjectPlace.of(path))


def is_folder(place: ObjectPlace) -> bool:
    """Tell whether objects lie below a place. Raises as `object_store.asked` does."""
    return _kind(place) is _FOLDER


def state_of(place: ObjectPlace) -> ObjectState | None:
    """Return the object at a place as it was listed; None if there is none. Raises as `object_store.asked` does."""
    kind = _kind(place)
    return kind if isinstance(kind, ObjectState) else None


def children(place: ObjectPlace) -> Children:
    """Return what lies in a folder, by name.

    Raises FileNotFoundError if it is none, and as `object_store.asked` does.
    """
    with _LISTINGS.lock:
        found = _folder(place)
    if not found and place.key:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
    return found


class _FolderMark:
    """Stands for a folder among the kinds of what lies at a place."""


_FOLDER = _FolderMark()


def _kind(place: ObjectPlace) -> ObjectState | _FolderMark | None:
    """Return what lies at a place: an object, a folder, or nothing."""
    if not place.key:
        return _FOLDER
    with _LISTINGS.lock:
        if place in _LISTINGS.known.objects:
            return _LISTINGS.known.objects[place]
        above, _, name = place.key.rpartition("/")
        siblings = _known_folder(ObjectPlace(place.bucket, above))
        if siblings is None and _known_folder(place):
            return _FOLDER
        if siblings is None:
            return _look(place)
        if name not in siblings:
            return None
        return siblings[name] or _FOLDER


def _look(place: ObjectPlace) -> ObjectState | _FolderMark | None:
    """Ask the store what lies at a place that was not listed; a folder is listed."""
    state, has_below = None, False
    for page in listing(place, place.key, by_folder=True):
        state = page.objects.get(place.key, state)
        has_below = has_below or f"{place.key}/" in page.folders
        if max((*page.objects, *page.folders), default="") > f"{place.key}/":
            break
    if state is not None and has_below:
        raise _both(place)
    if state is not None:
        _LISTINGS.known.objects[place] = state
        return state
    if has_below and _folder(place):
        return _FOLDER
    _LISTINGS.known.objects[place] = None
    return None


def _both(place: ObjectPlace) -> SourceError:
    return SourceError(
        "an object and a folder have the same name",
        expected="names that files could have",
        got=f"{place} and {place}/...",
        where=str(place),
        remedy="remove one of them",
    )


def _known_folder(place: ObjectPlace) -> Children | None:
    """Return the listed contents of a folder, empty for one that is not there; None if it was not listed."""
    found = _LISTINGS.known.folders.get(place)
    if found is None and any(
        place.bucket == whole.bucket and (not whole.key or f"{place.key}/".startswith(f"{whole.key}/"))
        for whole in _LISTINGS.known.whole
    ):
        return {}
    return found


def _folder(place: ObjectPlace) -> Children:
    """Return what lies in a folder, listed if need be."""
    found = _known_folder(place)
    if found is not None:
        return found
    prefix = f"{place.key}/" if place.key else ""
    listed: dict[ObjectPlace, Children] = {place: {}}
    for number, page in enumerate(listing(place, prefix, by_folder=False)):
        if number == _MOST_PAGES:
            return _one_folder(place, prefix)
        for key, state in page.objects.items():
            _add(listed, place, key, state)
    _LISTINGS.known.folders.update(listed)
    _LISTINGS.known.whole.add(place)
    return listed[place]


def _one_folder(place: ObjectPlace, prefix: str) -> Children:
    """Return what lies in a folder that has too much below it to be listed whole."""
    listed: dict[ObjectPlace, Children] = {place: {}}
    for page in listing(place, prefix, by_folder=True):
        for key, state in page.objects.items():
            _add(listed, place, key, state)
        for folder in page.folders:
            _add(listed, place, f"{folder}/", None)
    _LISTINGS.known.folders[place] = listed[place]
    return listed[place]


def _add(listed: dict[ObjectPlace, Children], top: ObjectPlace, key: str, state: ObjectState | None) -> None:
    """Add an object to the folders that its name leads through, from `top` on.

    An empty object whose name ends in a slash marks a folder. Raises SourceError for a name that no path has.
    """
    is_mark = key.endswith("/")
    parts = key[len(top.key) :].strip("/").split("/") if is_mark else key[len(top.key) :].split("/")
    if top.key and not is_mark:
        parts = parts[1:]  # the slash behind the folder
    if parts == [""]:
        return  # the mark of the folder itself
    if any(part in ("", ".", "..") for part in parts):
        raise SourceError(
            "an object has a name that no file can have",
            expected="names between slashes that are neither empty nor dots",
            got=repr(key),
            where=str(top),
            remedy="rename it, or move the checkpoint to a prefix of its own",
        )
    folder = top
    for name in parts if is_mark else parts[:-1]:
        if isinstance(listed[folder].setdefault(name, None), ObjectState):
            raise _both(_below(folder, name))
        folder = _below(folder, name)
        listed.setdefault(folder, {})
    if not is_mark and listed[folder].setdefault(parts[-1], state) is None:
        raise _both(_below(folder, parts[-1]))


def _below(folder: ObjectPlace, name: str) -> ObjectPlace:
    return ObjectPlace(folder.bucket, f"{folder.key}/{name}" if folder.key else name)


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
    if date:
        state = ObjectState.of(field_of(answer, "ETag", place), len(content), parsedate_to_datetime(date))
    else:
        state = object_store.state_of(place)
    note(place, state)
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
    note(place, None)


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
            return list(children(ObjectPlace.of(self.path)))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> bool:
        place = ObjectPlace.of(self.path / name)
        if state_of(place) is None:
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

    def require_removable(self, name: str) -> None:
        """Do nothing: objects have no owners that matter here."""


def listed_anew(path: Path) -> ObjectFolder:
    """Open a folder of an object store, and forget all that was listed there: others may have written to it."""
    forget_below(ObjectPlace.of(path))
    return ObjectFolder.open(path)

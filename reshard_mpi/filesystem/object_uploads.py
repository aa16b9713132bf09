"""Send large objects in parts (`Upload`), and find uploads that were not completed (`unfinished`).

An object appears whole, when its upload is completed, or not at all. Every part has a checksum that the store holds it
against: CRC-32, and one of the whole object, where the store knows that (Amazon S3, "Checking object integrity":
checksums of the type FULL_OBJECT), else MD5.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from reshard_mpi.errors import StoreError, StoreUnreachableError, TargetError
from reshard_mpi.filesystem import object_folders
from reshard_mpi.filesystem.object_folders import NOT_MET, metadata_of, remove
from reshard_mpi.filesystem.object_store import (
    ObjectPlace,
    ObjectState,
    asked,
    changed,
    client,
    field_of,
    pages,
    state_of,
)
from reshard_mpi.filesystem.source_files import FileStream, SourceFile

_GONE = "NoSuchUpload"
_UNIFORM_STORE = ".r2.cloudflarestorage.com"
_TOKEN = "reshard-upload"
_TOKEN_BYTES = 12
_TRIAL = ".trial"
_PIECE_BYTES = 256 << 10
_MD5 = re.compile("[0-9a-f]{32}")


class SentPart(NamedTuple):
    """A part of an object that the store has. tag: by which the store knows it."""

    number: int  # from 1
    tag: str
    length_bytes: int
    crc: int | None  # its CRC-32; None of one that a store has copied without telling it


class UnfinishedUpload(NamedTuple):
    """An upload that has been begun and neither completed nor aborted. begun_ns: since 1970, as the store says."""

    key: str
    upload_id: str
    begun_ns: int


def unfinished(place: ObjectPlace) -> list[UnfinishedUpload]:
    """Return the uploads of a bucket whose keys begin with the key of `place`. Raises as `object_store.asked` does."""
    found: list[UnfinishedUpload] = []

    def request(marks: dict[str, Any]) -> Any:
        return asked(place, lambda store: store.list_multipart_uploads(Bucket=place.bucket, Prefix=place.key, **marks))

    for page in pages(place, ("KeyMarker", "UploadIdMarker"), request):
        for upload in page.get("Uploads", ()):
            key, upload_id, begun = (field_of(upload, name, place) for name in ("Key", "UploadId", "Initiated"))
            found.append(UnfinishedUpload(key, upload_id, int(begun.timestamp()) * 10**9))
    return found


def abort(place: ObjectPlace, upload_id: str) -> None:
    """Abort an upload, if there is such a one. Raises as `object_store.asked` does."""
    from botocore.exceptions import ClientError

    def request(store: Any) -> None:
        try:
            store.abort_multipart_upload(Bucket=place.bucket, Key=place.key, UploadId=upload_id)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in (_GONE, "404"):
                raise

    asked(place, request)


def require_rights(place: ObjectPlace) -> None:
    """Require the rights that are needed late, to remove an object and to list uploads, at a place without any.

    Raises as `object_store.asked` does.
    """
    with contextlib.suppress(FileNotFoundError):
        remove(place)
    unfinished(place)


def wants_uniform_parts() -> bool:
    """Tell whether the store wants all parts but the last equally long, as Cloudflare's R2 does."""
    endpoint = urlsplit(client().meta.endpoint_url).hostname or ""
    return endpoint.endswith(_UNIFORM_STORE)


class FilePart(FileStream):
    """A part of a file that is read while it is sent: no copy of it lies in memory."""

    def __init__(self, descriptor: int, start: int, length_bytes: int) -> None:
        super().__init__(SourceFile(f"/proc/self/fd/{descriptor}", descriptor), start, length_bytes)
        self._descriptor = descriptor
        self._piece = memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length_bytes - self._offset)]
        count = os.preadv(self._descriptor, [view], self._start + self._offset)
        self._offset += count
        return count

    def read(self, size_bytes: int = -1) -> memoryview:
        """Return the next bytes, valid until more are read: more than are asked for, which is 16 KiB for a connection.

        urllib3 takes that many at a time whatever it sends, and each time costs it as much as sending 16 KiB.
        """
        self._piece = self._piece or memoryview(bytearray(_PIECE_BYTES))
        return self._piece[: self.readinto(self._piece)]

    def sums(self, *, with_md5: bool) -> tuple[int, str]:
        """Return the CRC-32 of all, and the MD5 in base64; empty if it is not asked for. Raises OSError."""
        from zlib_ng.zlib_ng import crc32

        crc, md5, buffer = 0, hashlib.md5(usedforsecurity=False), memoryview(bytearray(_PIECE_BYTES))
        self.seek(0)
        while count := self.readinto(buffer):
            crc = crc32(buffer[:count], crc)
            if with_md5:
                md5.update(buffer[:count])
        if self.seek(0, os.SEEK_CUR) != self.length_bytes:
            raise OSError(errno.EIO, "a file became shorter while it was sent")
        self.seek(0)
        return crc, base64.b64encode(md5.digest()).decode() if with_md5 else ""

    def is_told_by(self, *told: SentPart) -> bool:
        """Tell whether a part of an object has these bytes, by the sums that a store has told of it.

        A sum is its CRC-32, or else its tag, where that is an MD5. False if the store has told none. Raises OSError.
        """
        crcs = {part.crc for part in told if part.crc is not None}
        tags = {part.tag.strip('"').lower() for part in told}
        if not crcs and not all(map(_MD5.fullmatch, tags)):
            return False
        crc, md5 = self.sums(with_md5=not crcs)
        return crcs == {crc} if crcs else tags == {base64.b64decode(md5).hex()}


class Upload:
    """An object that is sent in parts. Threads may send parts at the same time."""

    def __init__(self, place: ObjectPlace, upload_id: str, token: str, *, has_crc: bool) -> None:
        """Go on with an upload that was begun with a token, which the object has in its metadata.

        Args:
            has_crc: whether its parts, and the whole, have a CRC-32.
        """
        self.place = place
        self.upload_id = upload_id
        self.token = token
        self.has_crc = has_crc
        self._named = {"Bucket": place.bucket, "Key": place.key, "UploadId": upload_id}

    @classmethod
    def begin(cls, place: ObjectPlace, metadata: Mapping[str, str]) -> Upload:
        """Begin to send an object, which is to have this metadata. Raises as `object_store.asked` does."""
        return cls._begun(place, metadata, has_crc=_knows_crc(place))

    @classmethod
    def _begun(cls, place: ObjectPlace, metadata: Mapping[str, str], *, has_crc: bool) -> Upload:
        token = os.urandom(_TOKEN_BYTES).hex()
        checksum = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if has_crc else {}
        said = {**metadata, _TOKEN: token}
        answer = asked(
            place,
            lambda store: store.create_multipart_upload(
                Bucket=place.bucket, Key=place.key, Metadata=said, ContentType="application/octet-stream", **checksum
            ),
        )
        upload_id = field_of(answer, "UploadId", place)
        if answer["ResponseMetadata"].get("RetryAttempts"):  # an answer may be lost, and its upload stay
            for other in unfinished(place):
                if other.key == place.key and other.upload_id != upload_id:
                    abort(place, other.upload_id)
        return cls(place, upload_id, token, has_crc=has_crc)

    def send(self, number: int, content: FilePart) -> SentPart:
        """Send a part. Raises as `object_store.asked` does, TargetError if the upload has been aborted."""
        crc, md5 = content.sums(with_md5=not self.has_crc)
        checksum = {"ContentMD5": md5} if md5 else {"ChecksumCRC32": _base64(crc)}
        answer = self._asked(
            lambda store: store.upload_part(**self._named, PartNumber=number, Body=content, **checksum)
        )
        return SentPart(number, field_of(answer, "ETag", self.place), content.length_bytes, crc)

    def parts(self) -> list[SentPart]:
        """Return the parts that the store has, by their numbers; none if the upload is gone.

        Raises as `object_store.asked` does.
        """

        def request(marks: dict[str, Any]) -> Any:
            return self._asked(lambda store: store.list_parts(**self._named, **marks))

        try:
            told = [own for page in pages(self.place, ["PartNumberMarker"], request) for own in page.get("Parts", ())]
        except TargetError:
            return []
        found: list[SentPart] = []
        for part in told:
            number, tag, size_bytes = (field_of(part, name, self.place) for name in ("PartNumber", "ETag", "Size"))
            found.append(SentPart(number, tag, size_bytes, self._crc_in(part)))
        return found

    def copy(self, number: int, source: ObjectPlace, state: ObjectState, offset: int, length_bytes: int) -> SentPart:
        """Have the store copy a range of another object into a part.

        Raises as `object_store.asked` does: StoreError if the store cannot do that, DisagreementError if the source has
        changed; TargetError if the upload has been aborted.
        """
        answer = self._asked(
            lambda store: store.upload_part_copy(
                **self._named,
                PartNumber=number,
                CopySource={"Bucket": source.bucket, "Key": source.key},
                CopySourceRange=f"bytes={offset}-{offset + length_bytes - 1}",
                CopySourceIfMatch=f'"{state.tag}"',
            ),
            source,
        )
        result = answer.get("CopyPartResult", {})
        if "ETag" not in result:  # what else was asked for has been done: an empty part was sent
            raise StoreError(
                "the object store copies no ranges", expected="the tag of a part", got="none", where=str(self.place)
            )
        return SentPart(number, result["ETag"], length_bytes, self._crc_in(result))

    def _crc_in(self, part: Mapping[str, Any]) -> int | None:
        """Return the sum that the store tells of a part; None if it tells none."""
        told = part.get("ChecksumCRC32") if self.has_crc else None
        return None if told is None else int.from_bytes(base64.b64decode(told), "big")

    def complete(self, parts: Sequence[SentPart], *, only_new: bool) -> ObjectState:
        """Make the object of its parts, in their order; return it.

        Args:
            only_new: on the condition that there is no object of the name.

        Raises as `object_store.asked` does, TargetError if the condition is not met, or the upload has been aborted.
        """
        listed = [
            {"PartNumber": part.number, "ETag": part.tag}
            | ({"ChecksumCRC32": _base64(part.crc)} if self.has_crc and part.crc is not None else {})
            for part in parts
        ]
        crc = crc_of_whole(parts) if self.has_crc else None
        whole = {} if crc is None else {"ChecksumCRC32": _base64(crc), "ChecksumType": "FULL_OBJECT"}
        condition = {"IfNoneMatch": "*"} if only_new else {}
        try:
            self._asked(
                lambda store: store.complete_multipart_upload(
                    **self._named, MultipartUpload={"Parts": listed}, **whole, **condition
                )
            )
        except (StoreError, TargetError):
            # An answer may be lost on its way; the request is then made again, and the upload is gone.
            if not self._is_in_place():
                raise
        state = state_of(self.place)
        size_bytes = sum(part.length_bytes for part in parts)
        if state.size_bytes != size_bytes or not self._is_in_place():
            raise _taken(self.place, f"an object of {state.size_bytes} bytes, where {size_bytes} were sent")
        object_folders.note(self.place, state)
        return state

    def abort(self) -> None:
        """Give the upload up. Raises as `object_store.asked` does."""
        abort(self.place, self.upload_id)

    def _is_in_place(self) -> bool:
        try:
            return metadata_of(self.place).get(_TOKEN) == self.token
        except FileNotFoundError:
            return False

    def _asked(self, request: Any, source: ObjectPlace | None = None) -> Any:
        """Ask for a part or for the whole. source: of a part that is copied, the object whose tag is a condition."""
        from botocore.exceptions import ClientError

        def answered(store: Any) -> Any:
            try:
                return request(store)
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                if code == _GONE:
                    raise _aborted(self.place) from error
                if code in NOT_MET and source is not None:
                    raise changed(source) from error
                if code in NOT_MET:
                    raise _taken(self.place, "an object that somebody has put there meanwhile") from error
                raise

        return asked(self.place, answered)


def crc_of_whole(parts: Sequence[SentPart]) -> int | None:
    """Return the CRC-32 of an object from its parts' CRC-32; None if one is not known."""
    from zlib_ng.zlib_ng import crc32_combine

    crc = 0
    for part in parts:
        if part.crc is None:
            return None
        crc = crc32_combine(crc, part.crc, part.length_bytes)
    return crc


def _aborted(place: ObjectPlace) -> TargetError:
    return TargetError(
        "the upload of a target has been aborted",
        expected="one process for each target",
        got="another one that has begun it since, or a rule of the bucket",
        where=str(place),
        remedy="let the other process finish; --resume goes on with what is complete",
    )


def _taken(place: ObjectPlace, got: str) -> TargetError:
    return TargetError(
        "the place of a target was taken while it was made",
        expected="no object of its name",
        got=got,
        where=str(place),
        remedy="see who else writes there; --resume skips what is complete, --overwrite replaces it",
    )


_WITH_CRC: dict[str, bool] = {}  # whether a bucket's store knows the checksum of a whole object, once it was tried


def _knows_crc(place: ObjectPlace) -> bool:
    """Tell whether a store takes the CRC-32 of a whole object, by a small one beside the target, which is removed."""
    if place.bucket not in _WITH_CRC:
        trial = place._replace(key=f"{place.key}.{os.urandom(_TOKEN_BYTES).hex()}{_TRIAL}")
        try:
            _WITH_CRC[place.bucket] = _takes_crc(trial)
        finally:
            remove(trial)
    return _WITH_CRC[place.bucket]


def _takes_crc(trial: ObjectPlace) -> bool:
    upload = None
    try:
        upload = Upload._begun(trial, {}, has_crc=True)
        with tempfile.TemporaryFile() as file:
            file.write(b"trial")
            file.flush()
            upload.complete([upload.send(1, FilePart(file.fileno(), 0, 5))], only_new=False)
    except (StoreError, TargetError) as error:
        if upload is not None:
            upload.abort()
        if isinstance(error, StoreUnreachableError):
            raise
        return False
    return True


def remove_trials(place: ObjectPlace, unfinished: Sequence[UnfinishedUpload]) -> None:
    """Remove what processes that were killed have left of trials beside an object. Raises as `object_store.asked` does.

    Args:
        unfinished: the uploads whose keys begin with the key of `place`.
    """
    is_trial = re.compile(rf"{re.escape(place.key)}\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}{re.escape(_TRIAL)}").fullmatch
    for upload in unfinished:
        if is_trial(upload.key):
            abort(place._replace(key=upload.key), upload.upload_id)
    above, slash, _ = place.key.rpartition("/")
    with contextlib.suppress(FileNotFoundError):
        for name in list(object_folders.children(place._replace(key=above))):
            if is_trial(f"{above}{slash}{name}"):
                remove(place._replace(key=f"{above}{slash}{name}"))


def _base64(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()

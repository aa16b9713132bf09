"""Ask an object store in the protocol of S3, by botocore: list and read objects (`listing`, `read_range`).

Credentials, signatures, regions, retries and proxies are botocore's; it is loaded when an `s3://` address is first
named. What a store refuses becomes an error that says what to do; that an object is not there is FileNotFoundError.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard_mpi.errors import DisagreementError, StoreError, StoreUnreachableError, UsageError
from reshard_mpi.filesystem.paths import OBJECTS

if TYPE_CHECKING:
    from datetime import datetime

_PREFIX = "s3://"
# Attempts at one request: botocore's own, and ours where an answer breaks off, which botocore does not try again.
_ATTEMPTS = 8
_BODY_ATTEMPTS = 5
_LONGEST_NAP_SECONDS = 4.0
_CONNECTIONS = 16
_PIECE_BYTES = 256 << 10  # that is taken from a connection at once
_MOST_KEYS = 1000  # of one answer to a listing

_NOT_THERE = ("404", "NoSuchKey", "NotFound")
_CHANGED = ("412", "PreconditionFailed")
_TEMPORARY = ("SlowDown", "503", "500", "502", "504", "InternalError", "ServiceUnavailable", "RequestTimeout")
_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_REMEDIES = {
    "NoSuchBucket": "check the name of the bucket, and which store --s3-endpoint or AWS_ENDPOINT_URL names",
    "PermanentRedirect": "name the region of the bucket: AWS_DEFAULT_REGION",
    "AuthorizationHeaderMalformed": "name the region of the bucket: AWS_DEFAULT_REGION",
    "301": "name the region of the bucket: AWS_DEFAULT_REGION",
    "RequestTimeTooSkewed": "set the clock of this host: the store refuses requests that are dated wrongly",
    "InvalidBucketName": "check the name of the bucket",
    "KeyTooLongError": "give a shorter prefix: the names of objects have at most 1,024 bytes",
}
_DENIED = ("AccessDenied", "403")
# What must be allowed for an operation of the protocol; for all that are not here, it is to write.
_RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject and s3:ListBucket",
    "GetObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "UploadPartCopy": "s3:GetObject and s3:PutObject",
}


class ObjectPlace(NamedTuple):
    """A bucket, and the name of an object or folder in it; "" is the bucket's root."""

    bucket: str
    key: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ObjectPlace:
        """Return the place that an address names; a path made of one has lost one slash of `s3://`.

        Raises UsageError if it names no bucket.
        """
        text = os.fspath(path)
        bucket, _, key = text.removeprefix(OBJECTS).removeprefix("/").partition("/")
        if not bucket:
            raise UsageError(
                "an address names no bucket",
                expected=f"{_PREFIX}BUCKET/PREFIX",
                got=text,
                remedy="name the bucket behind s3://",
            )
        return cls(bucket, key.strip("/"))

    def __str__(self) -> str:
        return f"{_PREFIX}{self.bucket}/{self.key}"


class ObjectState(NamedTuple):
    """An object as it is at one moment: the store's tag of its content, its size, and when it was written."""

    tag: str
    size_bytes: int
    modified_ns: int  # since 1970; what is below a second, which not all answers tell, stands for the tag

    @classmethod
    def of(cls, tag: str, size_bytes: int, modified: datetime) -> ObjectState:
        """Return the state by an answer of the store, which has its tag in quotes.

        What replaces an object within a second has another time, as it would among files.
        """
        tag = tag.strip('"')
        return cls(tag, size_bytes, int(modified.timestamp()) * 10**9 + _number_of(tag) % 10**9)

    @property
    def inode(self) -> int:
        """A number that stands for the content, in the place where a file has its inode."""
        return _number_of(self.tag)


def _number_of(tag: str) -> int:
    return int.from_bytes(hashlib.sha256(tag.encode()).digest()[:7])


class _Connection:
    """The client of this process, made on first use: connections are not kept over a fork."""

    def __init__(self) -> None:
        self.client: Any = None
        self.settings: dict[str, str] = {}  # of the environment, when it was made
        self.lock = threading.Lock()


_CONNECTION = _Connection()
os.register_at_fork(after_in_child=_CONNECTION.__init__)  # type: ignore[misc]


def client() -> Any:
    """Return botocore's client for S3. Raises UsageError without botocore, StoreError for settings that cannot be."""
    with _CONNECTION.lock:
        if _CONNECTION.client is None:
            _CONNECTION.settings = _settings()
            _CONNECTION.client = _new_client()
        return _CONNECTION.client


def look_again() -> None:
    """Have the next request go to the store, and be made with the credentials, that the environment names by then."""
    with _CONNECTION.lock:
        if _CONNECTION.client is not None and _CONNECTION.settings != _settings():
            _CONNECTION.client = None


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _new_client() -> Any:
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, PartialCredentialsError
        from botocore.session import Session
    except ImportError:
        raise UsageError(
            "an s3:// address needs botocore",
            expected="the package with its extra for object storage",
            got="botocore is not installed",
            remedy="pip install 'reshard-mpi[s3]'",
        ) from None
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        connect_timeout=20,
        read_timeout=60,
        # Other stores than AWS's know nothing of its newer checksums; what needs one asks for it.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = Session()
    try:
        has_region = session.get_config_variable("region") is not None
        # Stores other than AWS's take any region; AWS's says by its answer which one a bucket has.
        return session.create_client("s3", config=config, region_name=None if has_region else "us-east-1")
    except PartialCredentialsError as error:
        raise _without_credentials(error, "") from error
    except (BotoCoreError, ValueError) as error:
        problem, expected = "the object store cannot be asked", "settings that botocore understands"
        raise StoreError(problem, expected=expected, got=str(error), remedy=_SETTINGS) from error


_SETTINGS = "check AWS_PROFILE, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL (or --s3-endpoint), and ~/.aws/config"

T = TypeVar("T")


def asked(place: ObjectPlace, request: Callable[[Any], T]) -> T:
    """Return what `request`, given the client, returns.

    Raises FileNotFoundError if the object is not there, DisagreementError if it is another one by now, StoreError for
    what the store refuses, StoreUnreachableError if it does not answer.
    """
    store = client()
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
    )

    try:
        return request(store)
    except ClientError as error:
        raise _refused(place, error.response, error.operation_name) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise _without_credentials(error, str(place)) from error
    except ParamValidationError as error:
        problem, expected = "the store can have no such object", "names that S3 allows"
        got, remedy = str(error).splitlines()[-1], "check the name of the bucket, and the prefix"
        raise StoreError(problem, expected=expected, got=got, where=str(place), remedy=remedy) from error
    except BotoCoreError as error:
        raise _unreachable(place, str(error)) from error
    except KeyError as error:  # botocore decodes the keys of a listing, and expects them there
        raise _without_field(place, str(error.args[0])) from error
    except (TypeError, ValueError) as error:  # botocore parses times and numbers
        raise _unreachable(place, f"an answer that cannot be understood: {error}") from error


def _without_credentials(error: Exception, where: str) -> StoreError:
    remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; aws configure writes a profile"
    problem, expected = "there are no credentials for the store", "a pair of keys, a profile, or a role of this machine"
    return StoreError(problem, expected=expected, got=str(error), where=where, remedy=remedy)


def _refused(place: ObjectPlace, response: dict[str, Any], operation: str) -> Exception:
    """Return the error for an answer that refuses a request. operation: its name in the protocol."""
    error, status = response.get("Error", {}), response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = str(error.get("Code", status))
    if code in _NOT_THERE:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
    if code in _CHANGED:
        return changed(place)
    got = f"{code}: {error.get('Message', '')}".rstrip(": ")
    if code in _TEMPORARY or ((status or 0) >= 500 and status != HTTPStatus.NOT_IMPLEMENTED):
        return _unreachable(place, got)
    remedy = "check the credentials and their time" if code in _CREDENTIALS else _REMEDIES.get(code, _SETTINGS)
    if code in _DENIED:
        right = _RIGHTS.get(operation, "s3:PutObject")
        remedy = f"have these credentials allowed {right}; reshard-mpi help buckets lists all rights"
    expected = "a request that it allows"
    return StoreError("the object store refused", expected=expected, got=got, where=str(place), remedy=remedy)


def _unreachable(place: ObjectPlace, got: str) -> StoreUnreachableError:
    return StoreUnreachableError(
        "the object store does not answer as it should",
        expected=f"an answer within {_ATTEMPTS} attempts",
        got=got,
        where=str(place),
        remedy="check --s3-endpoint or AWS_ENDPOINT_URL, and the network; then run the same command again",
    )


def field_of(answer: Mapping[str, Any], name: str, place: ObjectPlace) -> Any:
    """Return a field of an answer, or of one of its items. Raises StoreUnreachableError if it is not there."""
    if answer.get(name) is None:
        raise _without_field(place, name)
    return answer[name]


def pages(place: ObjectPlace, names: Collection[str], request: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    """Yield the answers to a listing, page by page.

    Args:
        names: of the marks by which the next page is asked for.
        request: asks for a page by these marks; the first one has none.

    Raises StoreUnreachableError if marks are not there, or the same again: the listing would never end.
    """
    marks: dict[str, Any] = {}
    while True:
        page = request(marks)
        yield page
        if not page.get("IsTruncated"):
            return
        before, marks = marks, {name: field_of(page, f"Next{name}", place) for name in names}
        if marks == before:
            raise _unreachable(place, "a listing whose next part is the same again")


def _without_field(place: ObjectPlace, name: str) -> StoreUnreachableError:
    return _unreachable(place, f"an answer without {name}")


def _state_in(answer: Mapping[str, Any], size_name: str, place: ObjectPlace) -> ObjectState:
    return ObjectState.of(*(field_of(answer, name, place) for name in ("ETag", size_name, "LastModified")))


def changed(place: ObjectPlace) -> DisagreementError:
    """Return the error for an object that has been replaced since it was first looked at."""
    return DisagreementError(
        "an object was replaced while it was read",
        expected="the object that lay there when the command began",
        got="another one",
        where=str(place),
        remedy="make sure that nothing writes to the source, and run again",
    )


def state_of(place: ObjectPlace) -> ObjectState:
    """Return an object as it is now. Raises as `asked` does."""
    answer = asked(place, lambda store: store.head_object(Bucket=place.bucket, Key=place.key))
    return _state_in(answer, "ContentLength", place)


class ListedPage(NamedTuple):
    """One answer to a listing: objects by key, and, where folders are asked for, the names of those, ending in `/`."""

    objects: dict[str, ObjectState]
    folders: tuple[str, ...]


def listing(place: ObjectPlace, prefix: str, *, by_folder: bool) -> Iterator[ListedPage]:
    """Yield the contents of a bucket under a prefix, in the order of keys, page by page. Raises as `asked` does.

    Args:
        by_folder: stop at the next slash behind the prefix.
    """
    arguments = {"Bucket": place.bucket, "Prefix": prefix, "MaxKeys": _MOST_KEYS}
    if by_folder:
        arguments["Delimiter"] = "/"

    def request(marks: dict[str, Any]) -> Any:
        return asked(place, lambda store: store.list_objects_v2(**arguments, **marks))

    for page in pages(place, ["ContinuationToken"], request):
        yield ListedPage(
            {field_of(found, "Key", place): _state_in(found, "Size", place) for found in page.get("Contents", ())},
            tuple(field_of(found, "Prefix", place) for found in page.get("CommonPrefixes", ())),
        )


def read_range(place: ObjectPlace, state: ObjectState, offset: int, buffer: memoryview) -> None:
    """Fill a buffer with bytes of an object from `offset` on. Raises as `asked` does; DisagreementError if it changed.

    The range must lie in the object. An answer that breaks off is asked for again from where it did.
    """
    done, problem = 0, ""
    for attempt in range(_BODY_ATTEMPTS):
        if attempt:
            time.sleep(min(_LONGEST_NAP_SECONDS, 0.1 * 2**attempt) * random.uniform(0.5, 1))
        try:
            for count in _pieces(place, state, offset + done, buffer[done:]):
                done += count
        except FileNotFoundError:
            raise
        except _broken_answers() as error:
            problem = f"{type(error).__name__}: {error}"
        if done == len(buffer):
            return
    raise _unreachable(place, problem or f"{done} of {len(buffer)} bytes from byte {offset} on")


def _pieces(place: ObjectPlace, state: ObjectState, offset: int, buffer: memoryview) -> Iterator[int]:
    """Read what one answer gives into a buffer, piece by piece; yield how long each is."""
    last = offset + len(buffer) - 1
    answer = asked(
        place,
        lambda store: store.get_object(
            Bucket=place.bucket, Key=place.key, Range=f"bytes={offset}-{last}", IfMatch=f'"{state.tag}"'
        ),
    )
    with answer["Body"] as body:
        if "ETag" not in answer:
            raise ConnectionError("an answer that does not say which object it is of")
        if answer["ETag"].strip('"') != state.tag:
            raise changed(place)
        if answer.get("ContentRange") != f"bytes {offset}-{last}/{state.size_bytes}":
            got = answer.get("ContentRange") or f"{answer['ContentLength']} bytes without a range"
            raise StoreError(
                "the object store gives other bytes than it was asked for",
                expected=f"bytes {offset}-{last}/{state.size_bytes}",
                got=got,
                where=str(place),
                remedy="look for a proxy on the way; copy the checkpoint to a file system",
            )
        done = 0
        while done < len(buffer) and (count := body.readinto(buffer[done : done + _PIECE_BYTES])):
            done += count
            yield count


def _broken_answers() -> tuple[type[Exception], ...]:
    """Return the errors of an answer that breaks off."""
    from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
    from urllib3.exceptions import HTTPError

    return IncompleteReadError, ReadTimeoutError, ResponseStreamingError, HTTPError, OSError

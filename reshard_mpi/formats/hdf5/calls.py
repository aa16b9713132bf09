"""What is done for every tensor of a shard that is written, by calls of the HDF5 library without h5py between.

For a dataset with three attributes h5py takes as long as the library itself: each of its own objects is counted, locked
and looked up, and an attribute's object is found by its name again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from h5py import h5d
from h5py._objects import phil

from reshard_mpi.formats.hdf5.attributes import Attribute

_Call = Callable[..., int]

_IDENTIFIER = ctypes.c_int64  # of an object, since HDF5 1.10
_ADDRESS = ctypes.c_uint64
_STATUS = ctypes.c_int
_DEFAULT = 0  # the usual properties; of errors, those of the last call
_NO_ADDRESS = (1 << 64) - 1
_FROM_THE_CAUSE_ON = 0


class _Error(ctypes.Structure):
    """An entry of the library's list of what led to an error (`H5E_error2_t`)."""

    _fields_ = (
        ("class_id", _IDENTIFIER),
        ("major", _IDENTIFIER),
        ("minor", _IDENTIFIER),
        ("line", ctypes.c_uint),
        ("function", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
    )


_OnError = ctypes.CFUNCTYPE(_STATUS, ctypes.c_uint, ctypes.POINTER(_Error), ctypes.c_void_p)


class Library(NamedTuple):
    """Functions of the library that h5py has loaded, by what they do."""

    create_dataset: _Call
    offset_of_dataset: _Call
    close_dataset: _Call
    create_attribute: _Call
    write_attribute: _Call
    close_attribute: _Call
    walk_errors: _Call

    def dataset(
        self, group: Any, name: bytes, kind: Any, space: Any, creation: Any, links: Any, attributes: Sequence[Attribute]
    ) -> int | None:
        """Create a dataset with attributes in a group; return the offset of its elements, None if it has no place.

        kind, space, creation, links: objects of h5py, as its `h5d.create` takes them. Raises RuntimeError with what the
        library says.
        """
        dataset = self._done(self.create_dataset(group.id, name, kind.id, space.id, links.id, creation.id, _DEFAULT))
        try:
            for attribute in attributes:
                self._write(dataset, attribute)
            offset = self.offset_of_dataset(dataset)
        finally:
            self._done(self.close_dataset(dataset))
        return None if offset == _NO_ADDRESS else offset

    def _write(self, dataset: int, attribute: Attribute) -> None:
        kind = attribute.kind.id
        made = self._done(self.create_attribute(dataset, attribute.name, kind, attribute.space.id, _DEFAULT, _DEFAULT))
        try:
            if attribute.content:
                self._done(self.write_attribute(made, kind, attribute.content))
        finally:
            self._done(self.close_attribute(made))

    def _done(self, result: int) -> int:
        if result < 0:
            raise RuntimeError(self._reasons())
        return result

    def _reasons(self) -> str:
        """Return what the library says of the call that has just failed: the cause last."""
        reasons: list[str] = []

        def note(_: int, error: Any, __: Any) -> int:
            reasons.append((error.contents.description or b"").decode(errors="replace"))
            return 0

        self.walk_errors(_DEFAULT, _FROM_THE_CAUSE_ON, _OnError(note), None)
        return "; ".join(reversed(reasons)) or "the library does not say why"


@lru_cache(maxsize=1)
def library() -> Library | None:
    """Return the library that h5py has loaded; None if it cannot be reached but through h5py."""
    try:
        found = ctypes.PyDLL(h5d.__file__)  # a module's functions are found with those of the libraries it needs
        return Library(
            _function(found.H5Dcreate2, _IDENTIFIER, _IDENTIFIER, ctypes.c_char_p, *[_IDENTIFIER] * 5),
            _function(found.H5Dget_offset, _ADDRESS, _IDENTIFIER),
            _function(found.H5Dclose, _STATUS, _IDENTIFIER),
            _function(found.H5Acreate2, _IDENTIFIER, _IDENTIFIER, ctypes.c_char_p, *[_IDENTIFIER] * 4),
            _function(found.H5Awrite, _STATUS, _IDENTIFIER, _IDENTIFIER, ctypes.c_char_p),
            _function(found.H5Aclose, _STATUS, _IDENTIFIER),
            _function(found.H5Ewalk2, _STATUS, _IDENTIFIER, _STATUS, _OnError, ctypes.c_void_p),
        )
    except (OSError, AttributeError):
        return None


@contextmanager
def alone() -> Iterator[None]:
    """Keep other threads of this process out of the library, as h5py does around each of its own calls."""
    with phil:
        yield


def _function(function: Any, result: Any, *arguments: Any) -> _Call:
    function.restype, function.argtypes = result, arguments
    call: _Call = function
    return call

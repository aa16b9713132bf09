"""The toy formats, registered as a package would register them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy_package import toy_folder, toy_format

from reshard_mpi import formats


@pytest.fixture
def registered_toys() -> Iterator[None]:
    """Register both toy formats, for one test."""
    toys = toy_format.INFO, toy_folder.INFO
    for form in toys:
        formats.register(form)
    yield
    for form in toys:
        formats.unregister(form.name)

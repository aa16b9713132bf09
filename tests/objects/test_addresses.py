"""Addresses that name nothing that could be in an object store."""

from __future__ import annotations

import pytest
from support.command_line import refused
from support.conversions import Conversion
from support.object_servers import Bucket, names


@pytest.mark.parametrize("address", ["s3://", "s3:///run", "s3://bucket/../run", "s3://bucket/a/./b", "s3://bucket/.."])
def test_an_address_that_is_none(c: Conversion, address: str) -> None:
    """As of a variable of the shell that is not set: what follows must not be taken for the bucket."""
    for given in ([address, c.dst], [c.src, address]):
        said = refused("transform", *given, "--src-strategy", c.src_strategy, code=2)
        assert "s3://BUCKET/PREFIX" in said and repr(address) in said


def test_a_bucket_that_no_store_has(moto: Bucket, c: Conversion) -> None:
    said = c.but(dst="s3://Bad_Bucket!/run").refused("transform")
    assert "Bad_Bucket!" in said and "check the name of the bucket" in said
    assert not names(moto.url)

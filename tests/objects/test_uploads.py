"""Objects that are written: what a store answers, and what it leaves out."""

from __future__ import annotations

from support.fault_proxy import Answer, FaultProxy, Operation
from support.object_servers import Bucket, put

from reshard_mpi.filesystem import object_store, object_uploads
from reshard_mpi.filesystem.object_store import ObjectPlace


def test_an_answer_without_a_date(moto: Bucket, proxy: FaultProxy) -> None:
    place = ObjectPlace(moto.name, "small")
    put(moto / "small", b"1")
    proxy.spoil(Answer(200, "", (("ETag", '"some"'),)), when=Operation.PUT)
    assert object_uploads.put(place, b"1") == object_store.state_of(place)

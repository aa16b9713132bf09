"""Objects that are written: what a store answers, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from support.object_servers import Bucket

from reshard_mpi.filesystem import object_folders, object_store
from reshard_mpi.filesystem.object_store import ObjectPlace


def test_an_answer_without_a_date(moto: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    client = object_store.client()
    put_object = client.put_object

    def undated(**given: Any) -> Any:
        answer = put_object(**given)
        answer["ResponseMetadata"]["HTTPHeaders"].pop("date")
        return answer

    monkeypatch.setattr(client, "put_object", undated)
    place = ObjectPlace(moto.name, "small")
    assert object_folders.put(place, b"1") == object_store.state_of(place)

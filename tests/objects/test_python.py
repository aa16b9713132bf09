"""Calls of Python on checkpoints in an object store: each looks anew, and an open one stays what it was."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_ranks
from support.conversions import TENSORS, Conversion
from support.fault_proxy import FaultProxy, Operation
from support.full_checkpoints import floats, held, source_of
from support.object_servers import Bucket, delete, upload

import reshard_mpi
from reshard_mpi.errors import DisagreementError, ReshardError


def test_an_open_checkpoint_is_read_by_slices(moto: Bucket, c: Conversion, tmp_path: Path) -> None:
    upload(tmp_path, moto / "c")
    options = {"src_strategy": moto / "c/src_strategy"}
    with reshard_mpi.open(moto / "c/src", **options) as checkpoint:
        assert set(checkpoint) == set(TENSORS)
        for name, array in TENSORS.items():
            assert np.array_equal(checkpoint[name][...], array)
        assert np.array_equal(checkpoint["w"][2:7:2, 1], TENSORS["w"][2:7:2, 1])
        assert {part.files for part in checkpoint.sources("w", np.s_[0, 0])} == {
            (moto / "c/src/rank_0/checkpoint_0.ckpt",)
        }
        again = pickle.loads(pickle.dumps(checkpoint))
        with ThreadPoolExecutor(4) as pool:
            read = [pool.submit(one.__getitem__("w").__getitem__, ...) for one in (checkpoint, again) for _ in range(8)]
        assert all(np.array_equal(each.result(), TENSORS["w"]) for each in read)
    rank = reshard_mpi.load_rank(1, moto / "c/src", moto / "c/src_strategy", moto / "c/dst_strategy")
    assert {name: array.tobytes() for name, array in rank.items()} == {
        name: array.tobytes() for name, array in reshard_mpi.load_rank(1, *c.paths[::2], c.dst_strategy).items()
    }


def test_every_call_sees_what_is_there_by_then(moto: Bucket, tmp_path: Path) -> None:
    for number in range(3):
        source = source_of(tmp_path / str(number), {"w": floats(8, first=number), f"only{number}": floats(2)})
        delete(moto / "src")
        upload(source, moto / "src")
        reshard_mpi.transform(moto / "src", tmp_path / f"out{number}", to="safetensors")
        assert set(held(tmp_path / f"out{number}")) == {"w", f"only{number}"}
        reshard_mpi.diff(moto / "src", source)
        with reshard_mpi.open(moto / "src") as checkpoint:
            assert np.array_equal(checkpoint["w"][...], floats(8, first=number))
        assert set(reshard_mpi.load_rank(0, moto / "src")) == {"w", f"only{number}"}
    delete(moto / "src")
    with pytest.raises(ReshardError, match="no"):
        reshard_mpi.open(moto / "src")


@pytest.mark.parametrize("looks", [False, True], ids=["alone", "while others look"])
def test_an_open_checkpoint_is_not_read_once_it_is_another(moto: Bucket, tmp_path: Path, looks: bool) -> None:
    upload(source_of(tmp_path / "one", {"w": floats(300, 400), "v": floats(5)}), moto / "src")
    checkpoint = reshard_mpi.open(moto / "src")
    kept = pickle.dumps(checkpoint)
    assert np.array_equal(checkpoint["w"][:3], floats(300, 400)[:3])
    upload(source_of(tmp_path / "other", {"w": floats(300, 400, first=1), "v": floats(5)}), moto / "src")
    if looks:
        with reshard_mpi.open(moto / "src") as other:
            assert np.array_equal(other["w"][...], floats(300, 400, first=1))
    with pytest.raises(DisagreementError):
        checkpoint["w"][...]
    with pytest.raises(DisagreementError):
        pickle.loads(kept)


def test_a_call_lists_once(proxy: FaultProxy, moto: Bucket, tmp_path: Path) -> None:
    """However many files and tensors there are."""
    write_ranks({rank: {f"w{number}": floats(4) for number in range(20)} for rank in range(6)}, tmp_path / "src")
    upload(tmp_path / "src", moto / "deep/in/src")
    (tmp_path / "s.toml").write_text('mesh = { d = 6 }\n[[parameter]]\nmatch = "*"\n')
    with reshard_mpi.open(moto / "deep/in/src", src_strategy=tmp_path / "s.toml") as checkpoint:
        for tensor in checkpoint.values():
            assert np.array_equal(tensor[...], floats(4))
    assert proxy.counts[Operation.LIST] <= 4 and proxy.counts[Operation.HEAD] == 0
    assert proxy.counts[Operation.GET] <= 6


def test_what_calls_return_has_addresses_as_people_write_them(moto: Bucket, tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": floats(4)})
    done = reshard_mpi.transform(source, tmp_path / "made", to="safetensors", verify=True)
    assert not done.checked
    upload(tmp_path / "made", moto / "made")
    verified = reshard_mpi.verify(Path(moto / "made"))  # which has lost a slash
    assert [shard.path for shard in verified.checked] == [moto / "made/rank_0/checkpoint_0.safetensors"]
    facts = reshard_mpi.inspect(moto / "made")
    assert facts["path"] == moto / "made"
    assert facts["shards"][0][0]["path"] == moto / "made/rank_0/checkpoint_0.safetensors"


@pytest.mark.slow
def test_a_call_asks_the_store_that_the_environment_names_by_then(
    moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(source_of(tmp_path, {"w": floats(4)}), moto / "src")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ReshardError, match="credentials"):
        reshard_mpi.open(moto / "src")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.server.secret)
    assert set(reshard_mpi.open(moto / "src")) == {"w"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9/no/such/store")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ReshardError, match="store"):
        reshard_mpi.open(moto / "src")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.server.endpoint)
    assert set(reshard_mpi.open(moto / "src")) == {"w"}

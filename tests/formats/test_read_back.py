"""What the program has written it reads back, by the same bounds by which it will be read later."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import TARGETS

from reshard_mpi import formats
from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.protocol import reserve_file, seal_file
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, spec_of


def contents(count: int, length: int) -> ShardContents:
    names = [f"{number:06d}".rjust(length, "n") for number in range(count)]
    return ShardContents.of([SampleTensor(name, BY_NAME["int8"], (1,), b"\0") for name in names])


@pytest.mark.parametrize("length", [127, 130])
def test_long_names_take_no_more_than_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Tensors of one type and shape are one kind, whether their encoded names are long or not."""
    ckpt, path = formats.by_name("ckpt"), str(tmp_path / "net.ckpt")
    reserve_file(ckpt, path, spec_of(contents(100, length)))
    monkeypatch.setattr(
        structure, "MAX_KEPT_BYTES", 100 * structure.kept_bytes("n" * length) + structure.kept_kind_bytes(1)
    )
    assert len(ckpt.locate(path).tensors) == 100
    monkeypatch.setattr(structure, "MAX_KEPT_BYTES", structure.MAX_KEPT_BYTES - 1)
    with pytest.raises(ShardError, match="take too much memory"):
        ckpt.locate(path)


@pytest.mark.parametrize("name", ["ckpt", "safetensors"])
def test_what_cannot_be_read_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, path = formats.by_name(name), str(tmp_path / "net")
    meant = reserve_file(module, path, spec_of(contents(100, 130)))
    seal_file(module, path)
    module.read_back(meant)
    monkeypatch.setattr(structure, "MAX_KEPT_BYTES", 1000)
    with pytest.raises(ShardError, match="take too much memory"):
        module.read_back(meant)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_very_many_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    share = 10 if name in ("ckpt", "safetensors", "hf") else 1  # all else has bounds of its own, in its reader
    monkeypatch.setattr(structure, "MAX_KEPT_BYTES", structure.MAX_KEPT_BYTES // share)
    module, path = formats.by_name(name), str(tmp_path / "net")
    meant = reserve_file(module, path, spec_of(contents(45_000 // share, 130)))
    seal_file(module, path)
    module.read_back(meant)

"""`verify` of files that were written for DeepSpeed: by themselves, as a source, and against what they were made of."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import deepspeed_peer, torch_peer
from support.deepspeed_peer import Form
from support.examples import one_at_a_time

import reshard_mpi
from reshard_mpi.errors import ReshardError

pytestmark = pytest.mark.slow

SHAPES = {"a.weight": (5, 3), "a.bias": (1,), "b.weight": (7, 2), "b.scale": ()}
STAGES, DTYPES = (3, 1, 2), ("bfloat16", "float32")
of_every_stage = pytest.mark.parametrize("stage", STAGES)


def source_of(folder: Path, dtype: str = "bfloat16") -> Path:
    training = deepspeed_peer.training(SHAPES, {"c.weight": (11,)}, dtype=dtype, buffers={"n": np.arange(3)})
    deepspeed_peer.write(folder / "save", training, Form(2, 2))
    return folder / "save"


def written(folder: Path, source: Path, stage: int, **options: Any) -> Path:
    reshard_mpi.transform(source, folder / "out", to="deepspeed", dp=3, zero_stage=stage, **options)
    return folder / "out"


def changed(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(("stage", "dtype", "is_verified"), one_at_a_time(STAGES, DTYPES, [False, True]))
def test_files_are_sound_by_themselves_and_as_a_source(
    tmp_path: Path, stage: int, dtype: str, is_verified: bool
) -> None:
    out = written(tmp_path, source_of(tmp_path, dtype), stage, verify=is_verified)
    report = reshard_mpi.verify(out)
    assert not report.warnings and not report.notes[1:]
    reshard_mpi.transform(out, tmp_path / "torch", to="torch", verify=True)


@pytest.mark.parametrize(("stage", "kind"), one_at_a_time(STAGES, ["model_states", "optim_states"]))
def test_files_of_another_state_are_damage(tmp_path: Path, stage: int, kind: str) -> None:
    """A file of the same size from another run, and sound by its checksums."""
    first, second = tmp_path / "first", tmp_path / "second"
    outs = []
    for seed, folder in enumerate((first, second)):
        training = deepspeed_peer.training(SHAPES, seed=seed, buffers={"n": np.arange(3) + seed})
        deepspeed_peer.write(folder / "save", training, Form(2, 2))
        outs.append(written(folder, folder / "save", stage, verify=True))
    name = next(path.name for path in sorted((outs[0] / "global_step3").iterdir()) if kind in path.name)
    ours, theirs = (out / "global_step3" / name for out in outs)
    assert ours.stat().st_size == theirs.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(ReshardError, match=r"besides its tensors|damaged"):
        reshard_mpi.verify(outs[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "map": {"map": "{p*} <=> n.{p*}", "forward": True},
    "types": {"dtype": "*.exp_avg=bf16"},
    "choice": {"exclude": ["*.exp_avg_sq"]},
}


@pytest.mark.parametrize(("stage", "dtype", "option"), one_at_a_time(STAGES, DTYPES, OPTIONS))
def test_options_are_taken_from_the_record(tmp_path: Path, stage: int, dtype: str, option: str) -> None:
    source = source_of(tmp_path, dtype)
    options = OPTIONS[option]
    if option == "map":
        training = deepspeed_peer.training(SHAPES, dtype=dtype)
        deepspeed_peer.write(tmp_path / "plain", training, Form(2, 2))
        source = tmp_path / "plain"
    out = written(tmp_path, source, stage, **options)
    for given in ({}, options):
        report = reshard_mpi.verify(source, out, **given)
        assert any("compared with" in note for note in report.notes) is not bool(given)


@pytest.mark.parametrize("form", [Form(1, 2), Form(2, 2, expert_parts=2), Form(3, 2)])
def test_a_copy_without_records_is_held_against_its_commit(tmp_path: Path, form: Form) -> None:
    """Each file of another save is sound by its checksums; with the one that was copied it makes no checkpoint."""
    of_expert = "l.deepspeed_experts."
    experts = {f"{of_expert}{number}.w": (3, 2) for number in range(4)} if form.expert_parts > 1 else {}
    for seed, name in enumerate(("one", "other")):
        groups, has_experts = [SHAPES, experts] if experts else [SHAPES], {of_expert: 4} if experts else {}
        buffers = {"n": np.arange(3) + seed}
        training = deepspeed_peer.training(*groups, seed=seed, experts=has_experts, buffers=buffers)
        deepspeed_peer.write(tmp_path / f"save_of_{name}", training, form)
        how: dict[str, Any] = {"to": "deepspeed", "dp": 2, "zero_stage": form.stage, "verify": True}
        reshard_mpi.transform(tmp_path / f"save_of_{name}", tmp_path / name, **how)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "one", copy, ignore=shutil.ignore_patterns(".reshard_mpi"))
    reshard_mpi.verify(copy)
    reshard_mpi.transform(copy, tmp_path / "sound", to="torch", verify=True)
    files = sorted(copy.rglob("*.pt"))
    assert len(files) == {1: 3, 2: 7, 3: 4}[form.stage]
    for path in files:
        own = path.read_bytes()
        path.write_bytes((tmp_path / "other" / path.relative_to(copy)).read_bytes())
        with pytest.raises(ReshardError):
            reshard_mpi.transform(copy, tmp_path / "torn", to="torch", verify=True)
        assert not (tmp_path / "torn").exists()
        with pytest.raises(ReshardError, match=path.name):
            reshard_mpi.verify(copy)
        path.write_bytes(own)


def in_bf16(folder: Path) -> Path:
    """Return a training in bf16 by names, without fp32 copies."""
    reshard_mpi.transform(source_of(folder), folder / "torch", to="torch", exclude=["*.fp32_param"])
    return folder / "torch"


@of_every_stage
def test_an_fp32_copy_that_was_made_of_the_weights_is_none_too_many(tmp_path: Path, stage: int) -> None:
    source = in_bf16(tmp_path)
    out = written(tmp_path, source, stage)
    reshard_mpi.verify(source, out)
    reshard_mpi.diff(source, out)
    reshard_mpi.diff(out, source)
    name = next((out / "global_step3").glob("*rank_1_mp_rank_00_optim_states.pt"))
    loaded = deepspeed_peer.load(name)["optimizer_state_dict"]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    vector = next(own for own in loaded[key] if torch_peer.sample_of("", own).content.strip(b"\0"))
    content = torch_peer.sample_of("", vector).content
    changed(name, content, bytes([content[0] ^ 1]) + content[1:])  # which rounds to the same weight
    for compare in (reshard_mpi.verify, reshard_mpi.diff):
        with pytest.raises(ReshardError, match="fp32_param' differs"):
            compare(source, out)


@of_every_stage
def test_another_type_of_the_model_makes_or_spares_fp32_copies(tmp_path: Path, stage: int) -> None:
    source = source_of(tmp_path, "float32")
    out = written(tmp_path, source, stage, dtype="model.*=bf16")
    reshard_mpi.verify(source, out)


@of_every_stage
def test_tensors_beside_model_and_optimizer_are_found_under_client_state(tmp_path: Path, stage: int) -> None:
    reshard_mpi.transform(source_of(tmp_path), tmp_path / "torch", to="torch")
    loaded = deepspeed_peer.load(tmp_path / "torch/rank_0/checkpoint_0.pt")
    tensor = torch_peer.tensor(deepspeed_peer.sample(np.arange(4.0)), "new")
    loaded |= {"seen": tensor, "scheduler": {"last": tensor}, "client_state": {"mine": tensor}}
    torch_peer.save(tmp_path / "x.pt", loaded)
    out = written(tmp_path, tmp_path / "x.pt", stage)
    with reshard_mpi.open(out) as opened:
        assert {"client_state.seen", "client_state.mine", "scheduler.last"} <= {*opened}
    reshard_mpi.verify(tmp_path / "x.pt", out)


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_copies_that_are_not_the_weights_are_damage(tmp_path: Path, stage: int) -> None:
    """A sound file, by its checksum, of other copies; DeepSpeed goes on from these."""
    source = source_of(tmp_path, "float32")
    reshard_mpi.transform(source, tmp_path / "torch", to="torch")
    reshard_mpi.transform(tmp_path / "torch", tmp_path / "out", to="deepspeed", dp=1, zero_stage=stage)
    reshard_mpi.verify(tmp_path / "torch", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/*_optim_states.pt")
    with reshard_mpi.open(tmp_path / "torch") as checkpoint:
        content = np.asarray(checkpoint["model.a.weight"]).tobytes()
    with zipfile.ZipFile(path) as archive:
        (entry,) = (each for each in archive.infolist() if content in archive.read(each))
        old = archive.read(entry)
    new = old.replace(content, bytes([content[0] ^ 1]) + content[1:])
    changed(path, old, new)
    changed(path, entry.CRC.to_bytes(4, "little"), zlib.crc32(new).to_bytes(4, "little"))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with pytest.raises(ReshardError, match=r"copies of 'model\.a\.weight' differ"):
        reshard_mpi.verify(tmp_path / "torch", tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "how"),
    one_at_a_time(DTYPES, [{"exclude": "*.exp_avg"}, {"include": "model.*"}, {"exclude": "optimizer.*"}]),
)
def test_some_tensors_are_compared_with_a_checkpoint_of_another_format(
    tmp_path: Path, dtype: str, how: dict[str, Any]
) -> None:
    """Copies of weights in float32 that the other lacks are made up for it, and chosen as all others are."""
    source = source_of(tmp_path, dtype)
    reshard_mpi.transform(source, tmp_path / "whole", to="torch")
    reshard_mpi.transform(source, tmp_path / "part", to="torch", **how)
    with reshard_mpi.open(tmp_path / "part") as part:
        chosen = sum(1 for _ in part)
    for other in ("whole", "part"):
        for pair in ((source, tmp_path / other), (tmp_path / other, source)):
            report = reshard_mpi.diff(*pair, **how)
            assert [each.tensors for each in report.checked] == [chosen]
            assert [note for note in report.notes if "values beside" in note] == [
                "values beside the tensors are not compared: a DeepSpeed checkpoint has some of its own"
            ]
            comparison = reshard_mpi.diff(*pair, values=True, **how).comparison
            assert comparison is not None and comparison.passes and not comparison.values

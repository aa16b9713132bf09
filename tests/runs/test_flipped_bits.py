"""A bit that is flipped anywhere in a target that was verified, or in its index, is found by each way to verify it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import as_torch_writes, flip_bits, sample
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi.errors import DamageError, ReshardError
from reshard_mpi.journal.commit import commit
from reshard_mpi.soundness.findings import FindingKind

FORMS = ("ckpt", "hdf5", "safetensors", "torch", "dcp", "hf")
SUFFIXES = (".ckpt", ".h5", ".safetensors", ".pt", ".distcp")
Check = Callable[[Path, Path], Any]


def training(folder: Path, *, is_named: bool = False, added: int = 0) -> Path:
    """Save a training with settings beside its tensors.

    Args:
        is_named: its optimizer is by names of parameters, which formats that pack need.
        added: to all elements, and to the epoch.
    """
    keys = count()

    def tensor(value: float, *shape: int) -> Any:
        return torch_peer.tensor(sample("", np.full(shape, value + added, np.float32)), str(next(keys)))

    saved = {
        "model": {"fc.weight": tensor(1, 3, 5), "fc.bias": tensor(2, 3, 5)},
        "optimizer": {"state": {0: {"exp_avg": tensor(3, 3, 5)}}, "param_groups": [{"lr": 0.125, "params": [0, 1]}]},
        "epoch": 3 + added,
        "name": "a run",
    }
    if is_named:
        state = {
            name: {"step": tensor(7), "exp_avg": tensor(3, 3, 5), "exp_avg_sq": tensor(4, 3, 5)}
            for name in ("fc.weight", "fc.bias")
        }
        saved["optimizer"] = {"state": state, "param_groups": [{"lr": 0.125, "params": ["fc.weight", "fc.bias"]}]}
    torch_peer.save(folder / "x.pt", saved)
    return folder / "x.pt"


def verify_alone(_: Path, out: Path) -> object:
    return reshard_mpi.verify(out)


def verify_pair(src: Path, out: Path) -> object:
    return reshard_mpi.verify(src, out)


def read_verified(_: Path, out: Path) -> object:
    return reshard_mpi.transform(out, out.parent / "again", to="safetensors", verify=True, overwrite=True)


def audited(_: Path, out: Path) -> object:
    report = reshard_mpi.audit(out)
    of_files = [each for each in report.findings if each.kind in (FindingKind.SUM, FindingKind.STRUCTURE)]
    if of_files:
        raise DamageError(of_files[0].detail)
    return report


# The first byte of which a bit is flipped, and how many there are from one to the next.
FEW, MORE = (3, 499), (29, 97)


@few_cases(
    1,
    ("check", "places", "form"),
    [
        *itertools.product((verify_alone,), (FEW, MORE), FORMS),
        *itertools.product((verify_pair, read_verified, audited), (FEW,), FORMS),
    ],
)
def test_a_flipped_bit_is_found(tmp_path: Path, form: str, check: Check, places: tuple[int, int]) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    reshard_mpi.transform(src, out, to=form, verify=True, max_shard_size=64 if form == "hf" else None)
    _require_found(src, out, check, places)


PACKED: dict[str, dict[str, Any]] = {
    "megatron": {"to": "megatron", "max_shard_size": 300},
    "with common.pt": {"to": "megatron", "core_version": "0.18"},
    "stage 2": {"to": "deepspeed", "dp": 2, "zero_stage": 2},
    "stage 3": {"to": "deepspeed", "dp": 2, "zero_stage": 3},
}


@few_cases(
    1,
    ("form", "check", "places"),
    [
        *itertools.product(PACKED, (verify_alone,), (FEW,)),
        *itertools.product(("megatron", "stage 2"), (verify_pair, read_verified, audited), ((3, 1499),)),
    ],
)
def test_a_flipped_bit_is_found_in_a_folder_beside_the_records(
    tmp_path: Path, form: str, check: Check, places: tuple[int, int]
) -> None:
    """Megatron and DeepSpeed have a folder for each save."""
    src, out = training(tmp_path, is_named=True), tmp_path / "out"
    reshard_mpi.transform(src, out, verify=True, **PACKED[form])
    _require_found(src, out, check, places)


def test_a_flipped_bit_of_a_tensor_is_found_in_a_copy_without_records(tmp_path: Path) -> None:
    """Megatron's files have no checksum; the commit has the sums of the parts of tensors that are in them."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    reshard_mpi.transform(training(tmp_path, is_named=True), out, verify=True, **PACKED["with common.pt"])
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".reshard_mpi"))
    (path,) = copy.glob("*/*.distcp")
    content, moment = path.read_bytes(), np.full((3, 5), 3, np.float32).tobytes()
    read_verified(tmp_path, copy)
    for place in (content.index(moment), content.rindex(moment) + len(moment) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for form in (None, "dcp"):
            with pytest.raises(ReshardError, match="is not what the source was committed with"):
                reshard_mpi.transform(copy, tmp_path / "read", to="safetensors", verify=True, source_format=form)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_file_by_itself_is_held_against_the_commit_above(tmp_path: Path, form: str) -> None:
    """Records lie beside it or above it, and were not copied."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    reshard_mpi.transform(training(tmp_path), out, to=form, verify=True)
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".reshard_mpi"))
    (path,) = (path for path in copy.rglob("*") if path.suffix in SUFFIXES)
    given = [path, *([path.parent] if path.parent != copy else [])]
    for number, source in enumerate(given):
        reshard_mpi.transform(source, tmp_path / f"sound_{number}", to="torch", verify=True)
    flip_bits(path, np.full((3, 5), 2, np.float32).tobytes())
    for source in given:
        with pytest.raises(ReshardError):
            reshard_mpi.transform(source, tmp_path / "read", to="torch", verify=True)
        assert not (tmp_path / "read").exists()


def test_some_of_the_committed_files_are_held_if_their_tensors_are_whole(tmp_path: Path) -> None:
    src, cut = training(tmp_path), tmp_path / "cut.toml"
    reshard_mpi.transform(src, tmp_path / "hf", to="hf", max_shard_size=70, verify=True)
    shutil.rmtree(tmp_path / "hf/.reshard_mpi")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        reshard_mpi.transform(path, tmp_path / f"sound_{path.stem}", to="torch", verify=True)
        flip_bits(path, -1)
        with pytest.raises(ReshardError, match="is not what the source was committed with"):
            reshard_mpi.transform(path, tmp_path / "read", to="torch", verify=True)
    # A rank's own part of a tensor has not the sum of the whole.
    cut.write_text('mesh = { card = 3 }\n[[parameter]]\nmatch = "model.*"\nsplit = { 0 = ["card"] }\n')
    reshard_mpi.transform(src, tmp_path / "ranks", dst_strategy=cut, to="safetensors", verify=True)
    for rank in (0, 2):
        shutil.rmtree(tmp_path / f"ranks/rank_{rank}")
    shutil.rmtree(tmp_path / "ranks/.reshard_mpi")
    with pytest.raises(ReshardError, match="is no full checkpoint"):
        reshard_mpi.transform(tmp_path / "ranks/rank_1", tmp_path / "one", to="torch", verify=True)


@pytest.mark.parametrize("form", few(1, FORMS))
def test_audit_holds_a_copy_without_records_against_its_commit(tmp_path: Path, form: str) -> None:
    """It reads all values in any case."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    reshard_mpi.transform(training(tmp_path), out, to=form, verify=True)
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".reshard_mpi"))
    report = reshard_mpi.audit(copy)
    assert "sums" in report.checked and all(each.kind is not FindingKind.SUM for each in report.findings)
    (path,) = (path for path in copy.rglob("*") if path.suffix in SUFFIXES)
    flip_bits(path, np.full((3, 5), 2, np.float32).tobytes())
    findings = reshard_mpi.audit(copy).findings
    assert [each.tensor for each in findings if each.kind is FindingKind.SUM and "committed" in each.detail] == [
        "fc.bias" if form == "hf" else "model.fc.bias"
    ]


@pytest.mark.parametrize("form", few(1, PACKED))
@pytest.mark.parametrize("read", few(1, ["the target folder", "its own folder"]))
def test_a_lost_file_is_found_in_a_folder_beside_the_records(tmp_path: Path, form: str, read: str) -> None:
    out = tmp_path / "out"
    reshard_mpi.transform(training(tmp_path, is_named=True), out, verify=True, **PACKED[form])
    for path in sorted(out.glob("*/*.pt")) + sorted(out.glob("*/*.distcp")):
        folder = out if read == "the target folder" else path.parent
        reshard_mpi.verify(folder)
        path.rename(tmp_path / "lost")
        with pytest.raises(ReshardError):
            reshard_mpi.verify(folder)
        (tmp_path / "lost").rename(path)


def test_another_save_beside_the_one_that_was_committed_is_not_held_against_its_record(tmp_path: Path) -> None:
    """A training has gone on in the target folder, and has removed the save from which it began."""
    src, out = training(tmp_path, is_named=True), tmp_path / "out"
    reshard_mpi.transform(src, out, verify=True, **PACKED["stage 2"])
    reshard_mpi.transform(src, tmp_path / "later", **PACKED["stage 2"])
    (saved,) = (tmp_path / "later").glob("global_step*")
    saved.rename(out / "global_step99")
    (out / "latest").write_text("global_step99")
    shutil.rmtree(out / saved.name)
    assert reshard_mpi.verify(out).checked[0].by == ("its checksum",)


def test_a_file_that_the_index_does_not_name_is_not_missed(tmp_path: Path) -> None:
    """The first of Megatron's files holds what all have in common, and here no tensor but the count of steps."""
    out = tmp_path / "out"
    reshard_mpi.transform(training(tmp_path, is_named=True), out, verify=True, to="megatron", max_shard_size=1)
    reshard_mpi.verify(out)
    next(out.glob("*/__0_0.distcp")).unlink()
    with pytest.raises(ReshardError, match="a shard is missing"):
        reshard_mpi.verify(out)


def test_records_of_another_run_do_not_make_its_index_the_one_that_was_committed(tmp_path: Path) -> None:
    """A copy has brought records and the index of another save beside files and the commit of the first."""
    outs = []
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        outs.append(tmp_path / f"{number}" / "out")
        reshard_mpi.transform(training(tmp_path / f"{number}", added=number), outs[-1], to="dcp", verify=True)
    shutil.rmtree(outs[0] / ".reshard_mpi")
    shutil.copytree(outs[1] / ".reshard_mpi", outs[0] / ".reshard_mpi")
    (outs[0] / ".metadata").write_bytes((outs[1] / ".metadata").read_bytes())
    with pytest.raises(ReshardError, match="files of several runs"):
        reshard_mpi.transform(outs[0], tmp_path / "read", to="safetensors", verify=True)


@pytest.mark.parametrize("is_verified", few(1, [True, False]))
def test_a_training_may_save_again_in_the_folder_of_the_one_that_was_committed(
    tmp_path: Path, is_verified: bool
) -> None:
    """All files and the index are another's then, as in a folder of torch's distributed checkpoints."""
    src, out = training(tmp_path, is_named=True), tmp_path / "out"
    reshard_mpi.transform(src, out, verify=is_verified, **PACKED["megatron"])
    reshard_mpi.transform(src, tmp_path / "later", **{**PACKED["megatron"], "max_shard_size": 500})
    (saved,) = out.glob("iter_*")
    shutil.rmtree(saved)
    shutil.copytree(tmp_path / "later" / saved.name, saved, copy_function=shutil.copyfile)
    as_torch_writes(saved / ".metadata")
    report = reshard_mpi.transform(out, tmp_path / "again", to="torch", verify=True)
    assert not [warning for warning in report.warnings if "modified" in warning]
    with pytest.raises(ReshardError, match="no shard keeps sums"):
        reshard_mpi.verify(out)


def _require_found(src: Path, out: Path, check: Check, places: tuple[int, int]) -> None:
    first, step = places
    check(src, out)
    files = [path for path in out.rglob("*") if path.is_file() and ".reshard_mpi" not in path.parts]
    passed = []
    for path in (path for path in files if path.name != "reshard.json"):
        content = path.read_bytes()
        for place in range(first % len(content), len(content), step):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                check(src, out)
                passed.append((path.name, place))
            except ReshardError:
                pass
        path.write_bytes(content)
    assert passed == []
    check(src, out)


@pytest.mark.parametrize("content", few(1, [b"", b"{}", None]))
@pytest.mark.parametrize(("form", "index"), [("dcp", ".metadata"), ("hf", "model.safetensors.index.json")])
def test_a_damaged_index_is_made_anew_by_resume(tmp_path: Path, form: str, index: str, content: bytes | None) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    asked: dict[str, Any] = {"to": form, "max_shard_size": 64 if form == "hf" else None}
    reshard_mpi.transform(src, out, **asked)
    committed = (out / index).read_bytes()
    if content is None:
        (out / index).unlink()
    else:
        (out / index).write_bytes(content)
    reshard_mpi.transform(src, out, resume=True, **asked)
    assert (out / index).read_bytes() == committed


@pytest.mark.parametrize("by", ["resume", "commit"])
def test_a_commit_record_that_names_other_files_is_made_anew(tmp_path: Path, by: str) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    reshard_mpi.transform(src, out, to="torch")
    record = out / "reshard.json"
    committed = record.read_text()
    assert "rank_0/checkpoint_0.pt" in committed
    record.write_text(committed.replace("checkpoint_0.pt", "checkpoint_4.pt"))
    if by == "resume":
        reshard_mpi.transform(src, out, to="torch", resume=True)
    else:
        commit(out)
    assert record.read_text() == committed


@pytest.mark.parametrize("way", few(1, ["file", "selected", "links", "uncommitted"]))
def test_sums_of_files_that_are_read_by_themselves(tmp_path: Path, way: str) -> None:
    """Files of a folder with an index, one of them damaged, read without that index."""
    src, out = training(tmp_path), tmp_path / "out"
    reshard_mpi.transform(src, out, to="hf", max_shard_size=64, verify=True)
    damaged = out / "model-00002-of-00002.safetensors"
    flip_bits(damaged, -2, 4)
    given: dict[str, Any] = {}
    read = out
    if way == "file":
        read = damaged
    elif way == "selected":
        given["select"] = "model-0000*"
    elif way == "links":
        (tmp_path / "links").mkdir()
        read = tmp_path / "links"
        for path in out.glob("*.safetensors"):
            (read / path.name).symlink_to(path)
    else:
        for name in ("reshard.json", "model.safetensors.index.json"):
            (out / name).unlink()
        with pytest.raises(ReshardError, match="is damaged"):
            reshard_mpi.verify(out)
    with pytest.raises(ReshardError, match="is damaged"):
        reshard_mpi.transform(read, tmp_path / "again", to="safetensors", verify=True, **given)


def test_a_lost_shard_among_files_of_others(tmp_path: Path) -> None:
    src, out = training(tmp_path), tmp_path / "out"
    (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\n')
    reshard_mpi.transform(src, out, None, tmp_path / "two.toml", verify=True)
    (out / "rank_1").rename(out / "rank_4")
    (out / "rank_4/checkpoint_1.pt").rename(out / "rank_4/checkpoint_4.pt")
    with pytest.raises(ReshardError, match="1 committed shard is missing"):
        reshard_mpi.verify(out)

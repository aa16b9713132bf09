"""Copies without records are held against what was committed: through links, and in each of several folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import safetensors_peer, torch_peer
from support.checkpoints import sample
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi.errors import DisagreementError, ReshardError
from reshard_mpi.soundness.findings import FindingKind

WHOLE = {"fc.weight": np.arange(24, dtype=np.float32).reshape(4, 6), "fc.bias": np.arange(8, dtype=np.float32) + 100}
MOMENTS = {name: array + 1000 for name, array in WHOLE.items()}
CUT = 'mesh = { card = 2 }\n[[parameter]]\nmatch = "*step"\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["card"] }\n'


def saved(path: Path, content: dict[str, Any], *, added: int = 0) -> Path:
    """Save dictionaries of arrays and plain values as torch does. added: to all elements."""

    def of(value: Any, key: str) -> Any:
        if isinstance(value, np.ndarray):
            return torch_peer.tensor(sample("", value + np.float32(added)), key)
        return {name: of(each, f"{key}_{name}") for name, each in value.items()} if isinstance(value, dict) else value

    path.parent.mkdir(parents=True, exist_ok=True)
    torch_peer.save(path, of(content, "t"))
    return path


def training(path: Path, *, added: int = 0, **beside: Any) -> Path:
    state = {
        name: {"step": np.full((), 5, np.float32), "exp_avg": array, "exp_avg_sq": array * 2}
        for name, array in MOMENTS.items()
    }
    groups = [{"lr": 0.125, "params": list(WHOLE)}]
    optimizer = {"state": state, "param_groups": groups}
    return saved(path, {"model": WHOLE, "optimizer": optimizer, **beside}, added=added)


def copied(source: Path, copy: Path) -> Path:
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".reshard_mpi"))
    return copy


def flip(folder: Path, array: np.ndarray[Any, Any]) -> Callable[[], object]:
    """Flip a bit of an array in the file that has it; return what makes it sound again."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "reshard.json")
    path, content = next((path, data) for path in files if array.tobytes() in (data := path.read_bytes()))
    place = content.index(array.tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    return lambda: path.write_bytes(content)


PACKED: dict[str, dict[str, Any]] = {
    "megatron": {"to": "megatron"},
    "deepspeed": {"to": "deepspeed", "dp": 2, "zero_stage": 1},
    "in slices": {"to": "deepspeed", "dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("form", PACKED)
def test_a_link_to_the_folder_of_a_save(tmp_path: Path, form: str) -> None:
    for seed, name in enumerate(("one", "other")):
        source = training(tmp_path / f"{name}.pt", added=seed)
        reshard_mpi.transform(source, tmp_path / name, verify=True, **PACKED[form])
    copy = copied(tmp_path / "one", tmp_path / "copy")
    (own,) = (path for path in copy.iterdir() if path.is_dir())
    newest = tmp_path / "newest"
    newest.symlink_to(own)
    reshard_mpi.transform(newest, tmp_path / "sound", to="torch", verify=True)
    for path in sorted([*own.glob("*.pt"), *own.glob("__*.distcp")]):
        content, others = path.read_bytes(), (tmp_path / "other" / path.relative_to(copy)).read_bytes()
        if others == content:
            continue  # the files of ranks in slices hold nothing of the model
        path.write_bytes(others)
        for source in (own, newest):
            with pytest.raises(ReshardError):
                reshard_mpi.transform(source, tmp_path / "torn", to="torch", verify=True)
            assert not (tmp_path / "torn").exists()
            if form != "megatron":  # its files have no sums of their own
                with pytest.raises(ReshardError, match=path.name):
                    reshard_mpi.verify(source)
        path.write_bytes(content)
    if form != "megatron":
        reshard_mpi.verify(newest)


def linked(folder: Path, *targets: Path) -> Path:
    """Make a folder of links to what lies in others, but for the commit record."""
    folder.mkdir()
    for path in (path for target in targets for path in target.iterdir() if path.name != "reshard.json"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("form", few(2, ["ckpt", "safetensors", "hf"]))
def test_a_folder_of_links(tmp_path: Path, form: str) -> None:
    (tmp_path / "cut.toml").write_text(CUT)
    is_cut = form in ("ckpt", "safetensors")
    strategy = {"dst_strategy": tmp_path / "cut.toml"} if is_cut else {}
    reading = {"src_strategy": tmp_path / "cut.toml"} if is_cut else {}
    size = {"max_shard_size": 300} if form == "hf" else {}
    source = training(tmp_path / "one.pt")
    reshard_mpi.transform(source, tmp_path / "out", to=form, verify=True, **strategy, **size)
    copy = copied(tmp_path / "out", tmp_path / "copy")
    links = linked(tmp_path / "links", copy)
    reshard_mpi.transform(links, tmp_path / "sound", to="torch", verify=True, **reading)
    flip(copy, WHOLE["fc.weight"][:2])
    for way in (copy, links):
        with pytest.raises(ReshardError, match="is not what the source was committed with"):
            reshard_mpi.transform(way, tmp_path / "read", to="torch", verify=True, **reading)


def test_links_to_files_of_two_commits(tmp_path: Path) -> None:
    (tmp_path / "cut.toml").write_text(CUT)
    for seed, name in enumerate(("one", "other")):
        source = training(tmp_path / f"{name}.pt", added=seed)
        reshard_mpi.transform(
            source, tmp_path / f"{name}_out", to="ckpt", verify=True, dst_strategy=tmp_path / "cut.toml"
        )
        copied(tmp_path / f"{name}_out", tmp_path / name)
    links = tmp_path / "links"
    links.mkdir()
    for rank, name in enumerate(("one", "other")):
        (links / f"rank_{rank}").symlink_to(tmp_path / name / f"rank_{rank}")
    with pytest.raises(DisagreementError, match="files of several commits"):
        reshard_mpi.transform(links, tmp_path / "torn", to="torch", verify=True, src_strategy=tmp_path / "cut.toml")
    assert not (tmp_path / "torn").exists()


@pytest.mark.parametrize("is_named_again", [False, True])
def test_branches_in_folders_of_their_own(tmp_path: Path, *, is_named_again: bool) -> None:
    """Their sums are by the names of tensors in the branch.

    is_named_again: each branch is a dictionary with its own name as the only key.
    """
    state = {name: {"exp_avg": array} for name, array in MOMENTS.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.125, "params": list(WHOLE)}]}
    branches = {"pytorch_model_fsdp_0": ("model", WHOLE), "optimizer_0": ("optimizer", optimizer)}
    for name, (key, content) in branches.items():
        source = saved(tmp_path / f"{name}.pt", {key: content} if is_named_again else content)
        reshard_mpi.transform(source, tmp_path / "out" / name, to="dcp", verify=True)
    copy = copied(tmp_path / "out", tmp_path / "copy")
    reshard_mpi.transform(copy, tmp_path / "sound", to="torch", verify=True)
    assert "sums" in reshard_mpi.audit(copy).checked
    for name, array, tensor in (
        ("pytorch_model_fsdp_0", WHOLE["fc.bias"], "model.fc.bias"),
        ("optimizer_0", MOMENTS["fc.weight"], "optimizer.state.fc.weight.exp_avg"),
    ):
        mend = flip(copy / name, array)
        with pytest.raises(ReshardError, match="is not what the source was committed with") as error:
            reshard_mpi.transform(copy, tmp_path / "read", to="torch", verify=True)
        assert tensor in error.value.problem
        findings = [each.tensor for each in reshard_mpi.audit(copy).findings if each.kind is FindingKind.SUM]
        assert findings == [tensor]
        mend()
    index = copy / "optimizer_0/.metadata"
    index.write_bytes(index.read_bytes() + b" ")
    with pytest.raises(ReshardError, match="the index of a checkpoint is not what was committed"):
        reshard_mpi.transform(copy, tmp_path / "read", to="torch", verify=True)
    with pytest.raises(ReshardError, match="not what was committed"):
        reshard_mpi.verify(copy)


@pytest.mark.parametrize("form", few(2, ["ckpt", "safetensors", "hdf5", "torch"]))
def test_files_that_were_renamed(tmp_path: Path, form: str) -> None:
    """If all are, another checkpoint may have taken the place of the one that was committed."""
    (tmp_path / "cut.toml").write_text(CUT)
    for seed, name in enumerate(("one", "other")):
        source = training(tmp_path / f"{name}.pt", added=seed)
        reshard_mpi.transform(source, tmp_path / name, to=form, verify=True, dst_strategy=tmp_path / "cut.toml")
    copy = copied(tmp_path / "one", tmp_path / "copy")
    (own,) = (copy / "rank_1").iterdir()
    content, others = own.read_bytes(), (tmp_path / "other" / own.relative_to(copy)).read_bytes()
    renamed = own.with_name(f"net_1{own.suffix}")
    own.rename(renamed)
    reading: dict[str, Any] = {"to": "torch", "verify": True}
    reading |= {"src_strategy": tmp_path / "cut.toml"} if form != "hdf5" else {}
    reshard_mpi.transform(copy, tmp_path / "sound", **reading)
    renamed.write_bytes(others)
    with pytest.raises(ReshardError):
        reshard_mpi.transform(copy, tmp_path / "torn", **reading)
    renamed.write_bytes(content)
    (copy / "rank_0" / own.name.replace("1", "0")).rename(copy / "rank_0" / renamed.name.replace("1", "0"))
    report = reshard_mpi.transform(copy, tmp_path / "unheld", **reading)
    assert any("has sums of files that are not there" in warning for warning in report.warnings)


@pytest.mark.parametrize("form", few(1, ["safetensors", "ckpt"]))
def test_a_rank_by_itself(tmp_path: Path, form: str) -> None:
    """Each holds all tensors, and a sample of what lies beside it does not show where it differs."""
    whole = np.arange(512 * 512, dtype=np.float32).reshape(512, 512)
    source = saved(tmp_path / "one.pt", {"model": {"w": whole, "v": whole[:4]}})
    (tmp_path / "both.toml").write_text('mesh = { card = 2 }\n[[parameter]]\nmatch = "*"\n')
    reshard_mpi.transform(source, tmp_path / "out", to=form, verify=True, dst_strategy=tmp_path / "both.toml")
    copy = copied(tmp_path / "out", tmp_path / "copy")
    (own,) = (copy / "rank_0").iterdir()
    reshard_mpi.transform(own, tmp_path / "sound", verify=True)
    flip(copy / "rank_0", whole[300:301, 77:78])
    for way in (own, own.parent):
        with pytest.raises(ReshardError, match=r"'model\.w' is not what the source was committed with"):
            reshard_mpi.transform(way, tmp_path / "read", verify=True)
        (finding,) = (each for each in reshard_mpi.audit(way).findings if each.kind is FindingKind.SUM)
        assert finding.tensor == "model.w"


@few_cases(
    1, ("form", "name"), [("safetensors", b'"model.fc.bias":{'), ("ckpt", b"model.fc.bias"), ("hf", b'"fc.bias":{')]
)
def test_another_name_than_was_committed(tmp_path: Path, form: str, name: bytes) -> None:
    """The tensor under it was never committed, and the one that was is gone."""
    reshard_mpi.transform(training(tmp_path / "one.pt"), tmp_path / "out", to=form, verify=True)
    copy = copied(tmp_path / "out", tmp_path / "copy")
    (path,) = (path for path in copy.rglob("*") if path.suffix in (".safetensors", ".ckpt"))
    content = path.read_bytes()
    assert name in content
    path.write_bytes(content.replace(name, name.replace(b"fc.bias", b"fc.bibs")))
    with pytest.raises(ReshardError, match=r"fc\.bias[^']*' was committed, and is not in the source") as error:
        reshard_mpi.transform(copy, tmp_path / "read", to="safetensors", verify=True)
    assert "fc.bibs" in error.value.got
    (finding,) = (each for each in reshard_mpi.audit(copy).findings if each.kind is FindingKind.SUM)
    assert "fc.bias" in finding.tensor
    reshard_mpi.transform(path, tmp_path / "unverified", to="safetensors")


def test_the_folder_of_a_save_that_was_renamed(tmp_path: Path) -> None:
    reshard_mpi.transform(training(tmp_path / "one.pt"), tmp_path / "out", to="megatron", verify=True)
    for folder in (copied(tmp_path / "out", tmp_path / "copy"), tmp_path / "out"):
        (own,) = folder.glob("iter_*")
        renamed = own.rename(folder / "renamed")
        report = reshard_mpi.transform(renamed, tmp_path / f"of_{folder.name}", to="torch", verify=True)
        assert any("has sums of files that are not there" in warning for warning in report.warnings)


def test_a_committed_file_that_no_index_names(tmp_path: Path) -> None:
    """The largest tensor fills a file of Megatron's by itself, so the first one has a count of steps alone."""
    reshard_mpi.transform(
        training(tmp_path / "one.pt"), tmp_path / "out", to="megatron", verify=True, max_shard_size=80
    )
    (own,) = (tmp_path / "out").glob("iter_*")
    path = own / "__0_0.distcp"
    assert path.name.encode() not in (own / ".metadata").read_bytes()
    reshard_mpi.verify(tmp_path / "out")
    assert not [each for each in reshard_mpi.audit(tmp_path / "out").findings if each.severity == "error"]
    content = path.read_bytes()
    middle = len(content) // 2
    for spoiled in (content[:-4], b"", content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]):
        path.write_bytes(spoiled)
        with pytest.raises(ReshardError):
            reshard_mpi.verify(tmp_path / "out")
        assert any(path.name in each.file for each in reshard_mpi.audit(tmp_path / "out").findings)


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("form", ["deepspeed", "in slices"])
def test_an_audit_tells_a_file_that_breaks_its_own_checksum(tmp_path: Path, form: str, *, is_committed: bool) -> None:
    reshard_mpi.transform(training(tmp_path / "one.pt"), tmp_path / "out", verify=True, **PACKED[form])
    copy = copied(tmp_path / "out", tmp_path / "copy")
    if not is_committed:
        (copy / "reshard.json").unlink()
    assert "sums" in reshard_mpi.audit(copy).checked
    flip(copy, MOMENTS["fc.bias"][:3])
    findings = [each for each in reshard_mpi.audit(copy).findings if each.kind is FindingKind.SUM]
    assert any("own checksum" in each.detail for each in findings)


@pytest.mark.parametrize("form", few(1, ["megatron", "safetensors"]))
def test_an_audit_with_a_map_or_of_megatron(tmp_path: Path, form: str) -> None:
    reshard_mpi.transform(training(tmp_path / "one.pt"), tmp_path / "out", to=form, verify=True)
    copy = copied(tmp_path / "out", tmp_path / "copy")
    maps: tuple[dict[str, Any], ...] = ({}, {"map": "{p*} <=> {p*}"})
    for how in maps:
        report = reshard_mpi.audit(copy, **how)
        assert "sums" in report.checked and not [each for each in report.findings if each.kind is FindingKind.SUM]
    flip(copy, MOMENTS["fc.bias"][:3])
    for how in maps:
        (finding,) = (each for each in reshard_mpi.audit(copy, **how).findings if each.kind is FindingKind.SUM)
        assert "fc.bias" in finding.tensor


@pytest.mark.parametrize("committed", ["model", "optim"])
def test_loose_branches_in_rank_folders(tmp_path: Path, committed: str) -> None:
    """The record names the files of one branch, whose tensors have other names as a part of the whole."""
    (tmp_path / "cut.toml").write_text(CUT.replace('"*step"', '"*step"\noptional = true'))
    state = {name: {"exp_avg": array} for name, array in MOMENTS.items()}
    branches = {"model": WHOLE, "optim": {"state": state, "param_groups": [{"params": list(WHOLE)}]}}
    how: dict[str, Any] = {"to": "torch", "verify": True, "dst_strategy": tmp_path / "cut.toml"}
    for seed, name in enumerate(("one", "other")):
        for branch, content in branches.items():
            source = saved(tmp_path / f"{name}_{branch}.pt", content, added=seed)
            reshard_mpi.transform(source, tmp_path / name / branch, prefix=f"{branch}_", **how)
    joined = copied(tmp_path / "one/model", tmp_path / "joined")
    shutil.copytree(copied(tmp_path / "one/optim", tmp_path / "optim"), joined, dirs_exist_ok=True)
    shutil.copy(tmp_path / "one" / committed / "reshard.json", joined)
    reading: dict[str, Any] = {"to": "torch", "verify": True, "src_strategy": tmp_path / "cut.toml"}
    reshard_mpi.transform(joined, tmp_path / "sound", **reading)
    file = f"rank_1/{committed}_1.pt"
    shutil.copy(tmp_path / "other" / committed / file, joined / file)
    with pytest.raises(ReshardError, match="is not what the source was committed with"):
        reshard_mpi.transform(joined, tmp_path / "torn", **reading)


def test_the_folder_above_the_one_that_a_link_leads_to(tmp_path: Path) -> None:
    """Text alone would take `link/..` for the folder that holds the link, where another checkpoint lies."""
    for seed, folder in enumerate((tmp_path, tmp_path / "real")):
        source = training(folder / "one.pt", added=seed)
        reshard_mpi.transform(source, folder / "out", to="ckpt", verify=True)
    (tmp_path / "real/inner").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real/inner")
    way = f"{tmp_path}/link/../out"
    reshard_mpi.verify(way)
    flip(tmp_path / "real/out", WHOLE["fc.weight"] + 1)
    reshard_mpi.verify(tmp_path / "out")
    with pytest.raises(ReshardError):
        reshard_mpi.verify(way)


def test_ranks_without_tensors_are_verified_as_those_they_are(tmp_path: Path) -> None:
    """Of replicas one alone writes tensors; the index does not name the others' files."""
    stages = 'mesh = { card = 3 }\nstages = 2\n[[parameter]]\nmatch = "model.fc.weight"\nstage = 1\n'
    (tmp_path / "stages.toml").write_text(stages + '[[parameter]]\nmatch = "*"\nstage = 0\n')
    source = saved(tmp_path / "one.pt", {"model": WHOLE})
    out = tmp_path / "out"
    reshard_mpi.transform(source, out, to="dcp", verify=True, dst_strategy=tmp_path / "stages.toml")
    index = (out / ".metadata").read_bytes()
    unnamed = [rank for rank in range(6) if f"__{rank}_0.distcp".encode() not in index]
    assert len(unnamed) == 4
    for rank in range(6):
        path = out / f"__{rank}_0.distcp"
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        for ranks in (None, [rank]):
            with pytest.raises(ReshardError):
                reshard_mpi.verify(out, rank=ranks)
        reshard_mpi.verify(out, rank=[other for other in range(6) if other != rank])
        path.unlink()
        with pytest.raises(ReshardError):
            reshard_mpi.verify(out, rank=[rank])
        path.write_bytes(content)


@pytest.mark.parametrize("form", few(1, ["ckpt", "safetensors", "torch", "hdf5"]))
def test_a_shard_that_is_no_checkpoint_any_more(tmp_path: Path, form: str) -> None:
    """A bit in its first byte makes it something else, as a MindSpore checkpoint a strategy file."""
    (tmp_path / "cut.toml").write_text(CUT)
    reshard_mpi.transform(
        training(tmp_path / "one.pt"), tmp_path / "out", to=form, verify=True, dst_strategy=tmp_path / "cut.toml"
    )
    (path,) = (tmp_path / "out/rank_1").iterdir()
    content = path.read_bytes()
    for bit in range(8):
        path.write_bytes(bytes([content[0] ^ 1 << bit]) + content[1:])
        with pytest.raises(ReshardError):
            reshard_mpi.verify(tmp_path / "out")


def test_what_cannot_be_removed_is_refused_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "cut.toml").write_text(CUT)
    out = tmp_path / "out"
    source = training(tmp_path / "one.pt")
    reshard_mpi.transform(source, out, to="ckpt", verify=True, dst_strategy=tmp_path / "cut.toml")
    (out / "rank_1").rename(tmp_path / "elsewhere")
    (out / "rank_1").symlink_to(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".lock"}
    with pytest.raises(ReshardError, match="symbolic link"):
        reshard_mpi.transform(source, out, to="torch", overwrite=True)
    assert {path: path.read_bytes() for path in before} == before
    reshard_mpi.verify(out)


@pytest.mark.parametrize("form", PACKED)
def test_damage_is_told_of_the_target_that_has_it(tmp_path: Path, form: str) -> None:
    """Names of files are in another order than targets are: DeepSpeed's optimizer comes before its model."""
    out = tmp_path / "out"
    report = reshard_mpi.transform(training(tmp_path / "one.pt"), out, verify=True, **PACKED[form])
    for target in report.targets:
        path = Path(target.path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ReshardError, match=f"target rank {target.rank}: "):
            reshard_mpi.verify(out)
        for other in report.targets:
            if other.rank != target.rank:
                reshard_mpi.verify(out, rank=[other.rank])
        with pytest.raises(ReshardError):
            reshard_mpi.verify(out, rank=[target.rank])
        path.write_bytes(content)


def test_a_file_without_tensors_of_another_save_is_not_the_sources(tmp_path: Path) -> None:
    """The settings of a rank in slices are in no tensor that `verify SRC DST` compares."""
    for seed, name in enumerate(("one", "other")):
        source = training(tmp_path / f"{name}.pt", epoch=seed)
        reshard_mpi.transform(source, tmp_path / name, verify=True, **PACKED["in slices"])
    copy = copied(tmp_path / "one", tmp_path / "copy")
    reshard_mpi.verify(tmp_path / "one.pt", copy)
    (own,) = copy.glob("*/zero_pp_rank_0_*model_states.pt")
    others = tmp_path / "other" / own.relative_to(copy)
    assert others.read_bytes() != own.read_bytes()
    shutil.copy(others, own)
    with pytest.raises(ReshardError, match="besides its tensors"):
        reshard_mpi.verify(tmp_path / "one.pt", copy)


def test_links_to_some_files_of_a_commit_beside_copies_are_told(tmp_path: Path) -> None:
    (tmp_path / "cut.toml").write_text(CUT)
    source = training(tmp_path / "one.pt")
    reshard_mpi.transform(source, tmp_path / "out", to="ckpt", verify=True, dst_strategy=tmp_path / "cut.toml")
    committed = copied(tmp_path / "out", tmp_path / "committed")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "rank_0").symlink_to(committed / "rank_0")
    shutil.copytree(committed / "rank_1", mixed / "rank_1")
    report = reshard_mpi.transform(
        mixed, tmp_path / "read", to="torch", verify=True, src_strategy=tmp_path / "cut.toml"
    )
    assert any("has sums of some of these files" in warning for warning in report.warnings)


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_audit_warns_of_a_file_of_another_save_as_opening_does(kind: str, tmp_path: Path) -> None:
    (spec := tmp_path / "to.toml").write_text(CUT.replace('[[parameter]]\nmatch = "*step"\n', ""))
    for name, added in (("a", 0), ("b", 1)):
        saved(tmp_path / f"{name}.pt", WHOLE, added=added)
        reshard_mpi.transform(tmp_path / f"{name}.pt", tmp_path / name, dst_strategy=spec, to=kind)
    cut = spec if kind == "safetensors" else None
    assert reshard_mpi.audit(tmp_path / "a", src_strategy=cut).is_sound(strict=True)
    (ours,) = (path for path in (tmp_path / "a").rglob("*1*") if path.suffix in (".distcp", ".safetensors"))
    time_ns = ours.stat().st_mtime_ns + 10**9
    ours.write_bytes((tmp_path / "b" / ours.relative_to(tmp_path / "a")).read_bytes())
    os.utime(ours, ns=(time_ns, time_ns))
    report = reshard_mpi.audit(tmp_path / "a", src_strategy=cut)
    assert ["a copy of another shard" in warning for warning in report.warnings] == [True], report
    assert report.is_sound() and not report.is_sound(strict=True)
    assert report.summary().endswith(": sound, 1 warning")


def test_audit_warns_of_what_a_commit_is_not_held_against(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", WHOLE)
    reshard_mpi.transform(tmp_path / "a.pt", tmp_path / "a", to="safetensors", verify=True)
    copy = copied(tmp_path / "a", tmp_path / "copy")
    assert not reshard_mpi.audit(copy).warnings
    (file,) = copy.rglob("*.safetensors")
    file.rename(file.with_name("net_0.safetensors"))
    assert ["nothing is held against them" in text for text in reshard_mpi.audit(copy).warnings] == [True]


def test_audit_warns_of_a_file_that_lacks_what_other_ranks_hold(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = {"w": entry, "__metadata__": {"remove_redundancy": "True"}}
    path.write_bytes(safetensors_peer.file_of(header, np.ones(2, np.float32).tobytes()))
    assert ["tensors of theirs may be missing" in text for text in reshard_mpi.audit(path).warnings] == [True]

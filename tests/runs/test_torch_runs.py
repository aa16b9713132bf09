"""Files of torch through whole runs: from any format to any, nests kept, rank files of DTensors without a strategy."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from support import torch_peer
from support.command_line import done
from support.examples import few_cases

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints.inspection import inspect
from reshard_mpi.errors import SourceError, TargetError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import ckpt, torch
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.torch import file_content
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

GOLDEN = Path(__file__).parent.parent / "formats" / "golden" / "torch"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
MESH = "mesh = { dp = 2, tp = 2 }\n"
CUT = MESH + '[[parameter]]\nmatch = "*weight"\nsplit = { 0 = ["tp"] }\n[[parameter]]\nmatch = "*"\n'


def contents_of(path: Path) -> ShardContents:
    name = formats.name_of(str(path))
    assert name is not None
    return sample_tensors.contents_of(formats.by_name(name).locate(str(path)))


def transformed(src: Path, dst: Path, **options: Any) -> Path:
    """Reshard into `dst`; return the file of rank 0."""
    reshard_mpi.transform(src, dst, **options)
    return next((dst / "rank_0").iterdir())


def test_there_and_back_through_every_format(tmp_path: Path) -> None:
    """A training file keeps its nest, and the strides of views are gone."""
    original = contents_of(GOLDEN / "train.pth")
    path = GOLDEN / "train.pth"
    for number, to in enumerate(("hdf5", "torch", "safetensors", "torch", "torch")):
        path = transformed(path, tmp_path / str(number), to=to)
        assert contents_of(path) == original
    assert path.suffix == ".pt"


def test_a_loaded_rank_has_no_text_of_the_programs_own() -> None:
    loaded = reshard_mpi.load_rank(0, GOLDEN / "train.pth")
    own = contents_of(GOLDEN / "train.pth")
    assert NEST in own.strings and loaded.keys() == (own.tensors.keys() | own.strings.keys()) - {NEST}


def test_there_and_back_through_a_format_that_cannot_hold_all_of_it(tmp_path: Path) -> None:
    original = contents_of(GOLDEN / "train.pth")
    with pytest.raises(reshard_mpi.TargetError, match="'f8' is of a type that nobody reads from MindSpore") as error:
        transformed(GOLDEN / "train.pth", tmp_path / "all", to="ckpt")
    assert "safetensors" in str(error.value) and not (tmp_path / "all").exists()
    with pytest.raises(reshard_mpi.TargetError, match="'f8' is of a type that nobody reads from MindSpore"):
        reshard_mpi.transform_checkpoint_by_rank(0, {0: GOLDEN / "train.pth"}, tmp_path / "all" / "one.ckpt")
    assert not (tmp_path / "all").exists()
    path = GOLDEN / "train.pth"
    for number, to in enumerate(("ckpt", "torch")):
        path = transformed(path, tmp_path / str(number), to=to, exclude="f8" if to == "ckpt" else ())
        assert contents_of(path).strings == original.strings
        assert contents_of(path).tensors == {name: held for name, held in original.tensors.items() if name != "f8"}


def test_the_default_is_the_format_of_the_source(tmp_path: Path) -> None:
    path = transformed(GOLDEN / "legacy.pth", tmp_path / "out")
    assert path.name == "checkpoint_0.pt"
    assert torch_peer.load(path).keys() == {"base", "t", "v"}


@few_cases(
    1,
    "command",
    ["transform SRC DST --to hdf5 --jobs 1", "plan SRC DST --to hdf5", "inspect SRC", "verify SRC --jobs 1"],
)
def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """It is asked whose rank it is before it is known to be all of the checkpoint."""
    parsed: list[str] = []

    def content_of(file: SourceFile) -> file_content.FileContent:
        parsed.append(file.path)
        return file_content.content_of(file)

    monkeypatch.setattr(torch, "content_of", content_of)
    paths = {"SRC": str(GOLDEN / "train.pth"), "DST": str(tmp_path / "out")}
    done(*(paths.get(word, word) for word in command.split()))
    assert parsed == [str(GOLDEN / "train.pth")]


def test_cut_and_put_together_again(tmp_path: Path) -> None:
    (tmp_path / "cut.toml").write_text(CUT)
    tensors = [SampleTensor.random(f"layer.{at}.weight", BY_NAME["bfloat16"], (8, 3)) for at in range(3)]
    contents = ShardContents.of([*tensors, SampleTensor.random("bias", BY_NAME["uint16"], (4,))], {"note": "text"})
    (tmp_path / "src").mkdir()
    sample_tensors.write(torch, str(tmp_path / "src" / "net.pt"), contents)
    first = transformed(tmp_path / "src", tmp_path / "cut", dst_strategy=tmp_path / "cut.toml")
    assert contents_of(first).tensors["layer.0.weight"].shape == (4, 3)
    ranks = sorted(path.name for path in (tmp_path / "cut").glob("rank_*"))
    assert ranks == [f"rank_{rank}" for rank in range(4)]
    whole = transformed(tmp_path / "cut", tmp_path / "whole", src_strategy=tmp_path / "cut.toml")
    assert contents_of(whole) == contents


def test_ranks_of_distributed_tensors_need_no_strategy(tmp_path: Path) -> None:
    path = transformed(GOLDEN / "dtensor_ranks", tmp_path / "out")
    found = contents_of(path).tensors
    assert {name: zlib.crc32(tensor.content) for name, tensor in found.items()} == {
        name: facts["crc32"] for name, facts in EXPECTED["dtensor_ranks"].items()
    }
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        name: facts["shape"] for name, facts in EXPECTED["dtensor_ranks"].items()
    }


def test_a_rank_that_is_missing_is_missed_by_name(tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    for rank in (0, 1, 2):
        name = f"model_world_size_4_rank_{rank}.pt"
        (src / name).write_bytes((GOLDEN / "dtensor_ranks" / name).read_bytes())
    with pytest.raises(reshard_mpi.ReshardError, match="both"):
        reshard_mpi.transform(src, tmp_path / "out")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    report = reshard_mpi.transform(GOLDEN / "plain.pt", tmp_path / "out", to="hdf5")
    said = "\n".join(report.warnings)
    assert "left out of" in said and "config: an object of my_project.config.Config, with 1 tensor in it" in said
    assert inspect(GOLDEN / "plain.pt")["left_out"][1] == "function: random.Random"


def test_verify_says_what_it_could_not_compare(tmp_path: Path) -> None:
    reshard_mpi.transform(GOLDEN / "plain.pt", tmp_path / "out", to="hdf5")
    assert "warning: left out of" in done("verify", str(GOLDEN / "plain.pt"), tmp_path / "out", "--jobs", "1").err


def test_what_is_left_out_is_refused_if_all_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(reshard_mpi.ReshardError, match=r"cannot be carried[^\0]*my_project.config.Config"):
        reshard_mpi.transform(GOLDEN / "plain.pt", tmp_path / "out", to="hdf5", strict=True)
    assert not list(tmp_path.glob("out/rank_*/*"))
    reshard_mpi.transform(GOLDEN / "train.pth", tmp_path / "out", to="hdf5", strict=True)


def test_a_type_that_torch_has_not_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    contents = ShardContents.of([SampleTensor.random(name, BY_NAME["int4"], (4,)) for name in ("a", "b")])
    sample_tensors.write(ckpt, str(tmp_path / "net.ckpt"), contents)
    with pytest.raises(TargetError, match=r"'a'[^\0]*int4[^\0]*--to ckpt"):
        reshard_mpi.transform(tmp_path / "net.ckpt", tmp_path / "out", to="torch")
    assert not list(tmp_path.glob("out/rank_*/*"))


def test_loose_files_with_nests_of_their_own_are_not_mixed(tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    for name in ("first", "second"):
        made = torch_peer.tensor(SampleTensor.random(name, BY_NAME["float32"], (2,)), "0")
        torch_peer.save(src / f"{name}.pt", {name: {"w": made}})
    with pytest.raises(SourceError, match="nested dictionaries of their own"):
        reshard_mpi.transform(src, tmp_path / "out")
    path = transformed(src, tmp_path / "out", select="first.pt")
    expected = {"nest": {"dict": [["first", {"dict": []}]]}, "order": [0, "first.w"]}
    assert json.loads(contents_of(path).strings[NEST]) == expected


def test_a_damaged_member_is_found_before_anything_is_written(tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "train.pth").read_bytes())
    start = torch.locate(str(GOLDEN / "train.pth")).tensors.offsets[0]
    content[start] ^= 1
    (tmp_path / "net.pth").write_bytes(content)
    with pytest.raises(reshard_mpi.ReshardError, match="does not fit its own checksum"):
        reshard_mpi.transform(tmp_path / "net.pth", tmp_path / "out", verify=True)
    assert not list(tmp_path.glob("out/rank_*/*"))

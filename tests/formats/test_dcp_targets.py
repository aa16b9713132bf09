"""Targets in the form of torch.distributed.checkpoint: what a peer reads of them, and runs that make them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from support import dcp_peer, torch_peer
from support.cases import Side
from support.checkpoints import flip_bits, sample, write_ranks
from support.command_line import done, refused, run_apart
from support.conversions import TENSORS, Conversion, make, write_conversion
from support.examples import few, many
from support.launch import MPI, by_one_mpi
from support.oracle import RawLayout

from reshard_mpi.errors import DisagreementError, ShardError, TargetError
from reshard_mpi.formats import dcp, structure
from reshard_mpi.formats.dcp.file_layout import of_tensor
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import NEST, Manifest, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import example_contents, sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

GOLDEN = Path(__file__).parent / "golden" / "dcp"
FLOAT = BY_NAME["float32"]


def conversion(folder: Path) -> Conversion:
    """Write the small conversion from 4 ranks to 2, with targets in this form."""
    return make(folder).but(options=("--to", "dcp"))


def assert_whole(folder: Path) -> None:
    """Check that a peer finds the tensors of the small conversion."""
    found = dcp_peer.read(folder).tensors
    assert {name: tensor.content for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }


def test_a_target_with_no_element_is_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    """FSDP cuts fewer rows than ranks so; torch's metadata names no piece of that file."""
    spec = tmp_path / "rows.toml"
    spec.write_text('mesh = { a = 4 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["a"] }\nsizes = "ceil"\n')
    write_ranks({0: {"w": np.arange(3, dtype="f4"), "v": np.arange(2, dtype="f4")}}, tmp_path / "src", "safetensors")
    out = tmp_path / "out"
    done("transform", tmp_path / "src", out, "--to", "dcp", "--dst-strategy", spec, "--verify")
    assert "verified 4 shards" in done("verify", out).out
    assert "__3_0.distcp" not in done("transform", out, tmp_path / "back", "--to", "safetensors").err
    with (out / "__3_0.distcp").open("r+b") as file:
        file.write(b"\0")
    assert "__3_0.distcp" in refused("verify", out, code=4)


@pytest.mark.slow
def test_what_is_written_is_read_by_others(tmp_path: Path) -> None:
    c = conversion(tmp_path)
    c.done("transform", "--verify")
    assert sorted(path.name for path in c.dst.glob("__*")) == ["__0_0.distcp", "__1_0.distcp"]
    assert_whole(c.dst)
    (first, second) = dcp_peer.read(c.dst).metadata.state_dict_metadata["w"].chunks
    assert (first.offsets, first.sizes) == ((0, 0), (4, 4)) and (second.offsets, second.sizes) == ((4, 0), (4, 4))
    c.but(options=(), dst_strategy=None).done("verify")
    done("verify", c.dst)
    assert "torch distributed checkpoint, 2 files, 4 tensors" in done("plan", c.dst, tmp_path / "x").out
    done("inspect", c.dst, "--json")
    back = c.but(src=c.dst, src_strategy=None, dst=tmp_path / "back", options=("--to", "ckpt"))
    back.done("transform", "--verify")
    assert "the same" in done("diff", c.dst, back.dst, "--dst-strategy", c.dst_strategy).out


def test_what_several_ranks_hold_is_written_once(tmp_path: Path) -> None:
    """By ranks that share the work; by which follows from the strategy, so that tasks of an array agree."""
    replicated = {f"r{number}": RawLayout((2, 2), (-1,)) for number in range(40)}
    half = {f"h{number}": RawLayout((2, 2), (1,)) for number in range(40)}
    tensors = {name: np.arange(8, dtype=np.float32) + at for at, name in enumerate((*replicated, *half, "step"))}
    source = Side(
        2,
        1,
        {**{name: RawLayout((2,), (-1,)) for name in (*replicated, *half)}, "step": RawLayout((2,), ())},
        frozenset({"step"}),
    )
    target = Side(4, 1, {**replicated, **half, "step": RawLayout((4,), ())}, frozenset({"step"}))
    c = write_conversion(tmp_path, "ckpt", source, target, tensors, to="dcp")
    for part in (2, 0, 3, 1):
        c.done("transform", "--part", f"{part}/4", "--verify")
    held = [dcp.locate(str(c.dst / f"__{rank}_0.distcp")).tensors for rank in range(4)]
    names = [name for tensors in held for name in tensors]
    assert sorted(names) == sorted((*replicated, *half, *half, "step"))
    assert all(len(tensors) > 20 for tensors in held) and "step" in held[0]
    found = dcp_peer.read(c.dst).tensors
    assert {name: tensor.content for name, tensor in found.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }
    c.but(options=(), dst_strategy=None).done("verify")
    done("verify", c.dst)


def test_lists_of_a_nest_need_not_lie_in_every_file(tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    samples_of = {f"t{at}": SampleTensor.random(f"t{at}", FLOAT, (4,)) for at in range(8)}
    torch_peer.save(source, {"list": [torch_peer.tensor(own, str(at)) for at, own in enumerate(samples_of.values())]})
    (tmp_path / "two.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "*"\n')
    out = tmp_path / "out"
    done("transform", source, out, "--to", "dcp", "--dst-strategy", tmp_path / "two.toml", "--jobs", "1")
    assert all(0 < len(dcp.locate(str(out / f"__{rank}_0.distcp")).tensors) < 8 for rank in range(2))
    assert [tensor.content for tensor in dcp_peer.read(out).tensors.values()] == [
        own.content for own in samples_of.values()
    ]


def test_without_a_strategy_it_is_one_full_checkpoint(tmp_path: Path) -> None:
    c = conversion(tmp_path).but(dst_strategy=None)
    c.done("transform")
    assert [path.name for path in c.dst.glob("__*")] == ["__0_0.distcp"]
    assert_whole(c.dst)


def test_damage_is_found(tmp_path: Path) -> None:
    c = conversion(tmp_path)
    c.done("transform", "--verify")
    path = c.dst / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.index(TENSORS["w"][1].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    alone = c.but(options=(), dst_strategy=None)
    assert "'w'" in alone.refused("verify", code=4)
    assert "'w'" in refused("verify", c.dst, code=4)
    content[at] ^= 1
    content[content.index(b"PK\x03\x04")] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardError, match="is not where its file says"):
        dcp.locate(str(path))


def test_files_without_metadata(tmp_path: Path) -> None:
    c = conversion(tmp_path)
    c.done("transform", "--part", "0/2")
    assert "no index of them" in refused("plan", c.dst, tmp_path / "x")
    c.done("transform", "--part", "1/2")
    assert_whole(c.dst)


@by_one_mpi
def test_ranks_of_mpi(tmp_path: Path, mpi: MPI) -> None:
    c = conversion(tmp_path)
    run_apart(*c.arguments("transform", "--verify"), mpi=mpi, ranks=2, check=True)
    assert_whole(c.dst)


def test_real_ones_to_a_file_of_torch_and_back(tmp_path: Path) -> None:
    source, file, again = str(GOLDEN / "four_ranks"), str(tmp_path / "file"), str(tmp_path / "again")
    done("transform", source, file, "--to", "torch", "--jobs", "1", "--strict")
    done("transform", file, again, "--to", "dcp", "--jobs", "1", "--strict")
    assert "the same" in done("diff", source, again).out
    assert dcp.open_folder(again)[0].strings == dcp.open_folder(source)[0].strings
    with structure.opened(str(Path(source, ".metadata"))) as opened:
        before, after = dcp_peer.read(tmp_path / "again"), dcp.metadata.read(opened)
    assert before.paths == dict(after.paths)
    assert before.objects["optim.param_groups.0.betas"] == (0.9, 0.95)


def test_real_ones_are_verified_by_their_checksums(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "four_ranks", source)
    assert "verified 4 shards" in done("verify", source).out
    path = source / "__1_0.distcp"
    entry = dcp.locate(str(path)).tensors["model.col [0, 4]"]
    assert entry.stored is not None
    flip_bits(path, entry.stored.ranges[0].offset_bytes)
    assert "does not fit its own checksum" in refused("verify", source, code=4)
    said = refused("transform", source, tmp_path / "x", "--to", "ckpt", "--verify")
    assert str(path) in said and not (tmp_path / "x").exists()


NESTS = {
    "numbers as keys": '{"dict":[["w"],["state",{"dict":[[0,{"dict":[["step",{"float":"7ff0000000000000"}]]}]]}]]}',
    "tuples and lists": '{"dict":[["t",{"tuple":[1,[2,{"tuple":[]}]]}],["l",[[],{"dict":[]}]],["e",{"dict":[]}]]}',
    "other classes": '{"dict":[["o",{"call":["collections","OrderedDict",[]],"dict":[["x",1]]}],'
    '["n",{"call":["argparse","Namespace",[]],"new":true,"state":{"dict":[["lr",0.5]]}}]]}',
    "a list as root": '[1,{"dict":[["x",2]]}]',
}


def written(folder: Path, shards: list[ShardSpec]) -> None:
    """Write files of zeros, and their metadata."""
    made = []
    for spec in shards:
        path = str(folder / dcp.file_name(spec.identity.rank, len(shards), ""))
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        dcp.read_back(dcp.reserve(fd, path, spec))
        os.close(fd)
        assert Path(path).stat().st_size <= dcp.size_at_most_bytes(spec)
        made.append(dcp.locate(path))
    write_index(folder, made)


def write_index(folder: Path, made: list[Manifest]) -> None:
    for name, content in dcp.index_contents(made).items():
        (folder / name).write_bytes(content)


def spec_of(names: list[str], strings: dict[str, str], rank: int = 0, of: int = 1) -> ShardSpec:
    box = Box((2 * rank,), (2 * rank + 2,))
    return ShardSpec(ShardIdentity(rank, of, ""), [TensorSpec(name, FLOAT, (2 * of,), box) for name in names], strings)


@pytest.mark.parametrize("what", NESTS)
def test_nests_come_back(tmp_path: Path, what: str) -> None:
    strings = {NEST: NESTS[what]}
    names = [] if what == "a list as root" else ["w"] if "w" in NESTS[what] else ["e.w"] if '"e"' in NESTS[what] else []
    written(tmp_path, [spec_of(names, strings)])
    assert dcp.open_folder(str(tmp_path))[0].strings == strings


def test_objects_that_others_read(tmp_path: Path) -> None:
    strings = {NEST: '{"dict":[["model",{"dict":[]}],["epoch",3],["groups",[{"dict":[["lr",0.5]]},1]],["l",[1,2]]]}'}
    written(tmp_path, [spec_of(["model.w"], strings)])
    found = dcp_peer.read(tmp_path)
    assert found.objects == {"epoch": 3, "groups.0.lr": 0.5, "groups.1": 1, "l": [1, 2]}
    assert found.paths == {
        "model.w": ("model", "w"),
        "epoch": ("epoch",),
        "groups.0.lr": ("groups", 0, "lr"),
        "groups.1": ("groups", 1),
        "l": ("l",),
    }


PAIR = {NEST: '{"dict":[["betas",{"tuple":[{"tensor":null},{"dict":[["x"]]},3]}]]}'}


def test_a_tuple_with_tensors_is_one_object(tmp_path: Path) -> None:
    """As torch has it, so that it finds it under its key; for us its tensors are listed as well."""
    written(tmp_path, [spec_of(["w", "betas.0", "betas.1.x"], PAIR)])
    found = dcp_peer.read(tmp_path)
    ((first, inner, number),) = found.objects.values()
    assert [*found.objects] == ["betas"] and number == 3
    samples = (torch_peer.sample_of("", each) for each in (first, inner["x"]))
    assert all((sample.dtype, sample.shape, sample.content) == (FLOAT, (2,), bytes(8)) for sample in samples)
    assert found.paths == {"betas": ("betas",), **{name: (name,) for name in ("w", "betas.0", "betas.1.x")}}
    assert {*dcp.open_folder(str(tmp_path))[0].tensors} == {"w", "betas.0", "betas.1.x"}


def test_tensors_of_a_tuple_are_in_the_object_alone_where_ranks_have_strings_of_their_own(tmp_path: Path) -> None:
    spec = spec_of(["betas.0", "betas.1.x"], {**PAIR, "note": "0"})
    other = spec_of(["w"], {"note": "1"})._replace(identity=ShardIdentity(1, 2, ""))
    written(tmp_path, [spec, other])
    assert {*dcp_peer.read(tmp_path).paths} == {"w", "betas", "note"}
    opened = dcp.open_folder(str(tmp_path))[0]
    assert {*opened.tensors} == {"w", "betas.0", "betas.1.x"}


@pytest.mark.parametrize("shape", [(1 << 16,), (4,)])
def test_large_or_cut_tensors_of_a_tuple_are_refused(shape: tuple[int, ...]) -> None:
    box = Box((0,), (shape[0] if shape[0] > 4 else 2,))
    tensors = [TensorSpec("w", FLOAT, shape, box), TensorSpec("betas.0", FLOAT, shape, box)]
    spec = ShardSpec(ShardIdentity(0, 1, ""), tensors, {NEST: '{"dict":[["betas",{"tuple":[{"tensor":null}]}]]}'})
    with pytest.raises(TargetError, match=r"(?s)'betas' as one object.*'betas\.0'"):
        dcp.size_at_most_bytes(spec)
    dcp.size_at_most_bytes(spec._replace(strings={}))


COUNTER = '{"call":["collections","Counter",[{"dict":[[1,1],[4,2]]}]]}'
DEFAULTS = '{"call":["collections","defaultdict",[{"global":["builtins","list"]}]],"dict":[["x",1]]}'


def test_dictionaries_of_other_classes_are_taken_apart(tmp_path: Path) -> None:
    """As torch does with any mapping, such as the milestones of MultiStepLR; what makes their values is no entry."""
    strings = {NEST: f'{{"dict":[["w"],["milestones",{COUNTER}],["d",{DEFAULTS}]]}}'}
    written(tmp_path, [spec_of(["w"], strings)])
    found = dcp_peer.read(tmp_path)
    assert found.objects == {"milestones.1": 1, "milestones.4": 2, "d.x": 1}
    assert found.paths["milestones.4"] == ("milestones", "4")
    assert dcp.open_folder(str(tmp_path))[0].strings == strings


def test_ranks_with_nests_of_their_own(tmp_path: Path) -> None:
    """Stages of a pipeline hold other tensors, in other dictionaries; the checkpoint has all of them."""
    strings = [{NEST: f'{{"dict":[["stage{rank}",{{"dict":[]}}],["epoch",3]]}}'} for rank in range(2)]
    written(tmp_path, [spec_of([f"stage{rank}.w"], strings[rank], rank, 2) for rank in range(2)])
    manifest = dcp_peer.read(tmp_path)
    assert manifest.objects == {"epoch": 3}
    assert manifest.paths == {"stage0.w": ("stage0", "w"), "epoch": ("epoch",), "stage1.w": ("stage1", "w")}


def test_types_that_torch_has_not(tmp_path: Path) -> None:
    spec = ShardSpec(ShardIdentity(0, 1, ""), [TensorSpec("w", BY_NAME["int4"], (2,), Box((0,), (2,)))], {})
    with pytest.raises(TargetError, match="cannot hold 'w'"):
        dcp.size_at_most_bytes(spec)


def test_names_that_torch_joins_to_the_same(tmp_path: Path) -> None:
    strings = {NEST: '{"dict":[["a",{"dict":[["b",1]]}],["a.b",2]]}'}
    with pytest.raises(TargetError, match="same name when their keys are joined"):
        dcp.size_at_most_bytes(spec_of([], strings))


def test_files_of_different_tensors_under_one_name(tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match="'w'"):
        written(tmp_path, [spec_of(["w"], {}, 0, 2), spec_of(["w"], {}, 1, 3)])


def test_large_payloads_begin_at_blocks() -> None:
    large, small = (of_tensor(samples_kind(length)) for length in (1 << 16, 4))
    assert (large.start_behind(1) + len(large.head)) % 4096 == 0
    assert (small.start_behind(1) + len(small.head)) % 64 == 0


def samples_kind(length: int) -> dcp.file_layout.TensorType:
    return dcp.file_layout.TensorType(FLOAT, (length,))


@many(30)
@given(contents=example_contents.contents())
def test_any_contents_come_back(tmp_path_factory: pytest.TempPathFactory, contents: ShardContents) -> None:
    held = [tensor for tensor in contents.tensors.values() if tensor.dtype.name not in torch_peer.CANNOT_HOLD]
    texts = {name: text for name, text in contents.strings.items() if name != NEST}
    contents = ShardContents.of(held, texts)
    folder = tmp_path_factory.mktemp("any")
    path = folder / "__0_0.distcp"
    sample_tensors.write(dcp, str(path), contents)
    manifest = dcp.locate(str(path))
    assert sample_tensors.contents_of(manifest) == contents
    write_index(folder, [manifest])
    opened = dcp.open_folder(str(folder))[0]
    assert opened.strings == texts and set(opened.tensors) == set(contents.tensors)
    found = dcp_peer.read(folder)
    assert found.tensors == contents.tensors
    assert found.objects == texts


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    sample_tensors.write(dcp, str(path), ShardContents.of([SampleTensor.random("w", FLOAT, (3,))], {"note": "text"}))
    whole = path.read_bytes()
    for length in range(1, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ShardError):
            dcp.locate(str(path))
    for at in range(len(whole) - 300, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ShardError):
            dcp.locate(str(path))


@pytest.mark.parametrize("value", few(1, [3, [], {"": []}]))
def test_a_value_under_an_empty_key_comes_back(tmp_path: Path, value: object) -> None:
    weights = torch_peer.tensor(sample("w", np.arange(4, dtype=np.float32)), "0")
    torch_peer.save(tmp_path / "a.pt", {"": value, "w": weights})
    done("transform", tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp", "--jobs", "1")
    done("transform", tmp_path / "dcp", tmp_path / "back", "--to", "torch", "--jobs", "1")
    assert done("diff", tmp_path / "a.pt", tmp_path / "back", "--jobs", "1").out.count("note: ") == 0

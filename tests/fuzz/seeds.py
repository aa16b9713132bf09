"""Makes the sound files of the corpus, of every kind that a parser reads.

To be run as `PYTHONPATH=tests python tests/fuzz/seeds.py`.

They are small, since fuzzing changes few bytes at a time. Beside them the corpus holds inputs that fuzzing has found.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import h5py
import numpy as np
import parsers
from support import ckpt_peer, dcp_peer, hdf5_peer, safetensors_peer, sliced_peer, torch_peer

from reshard_mpi.formats import ckpt, dcp, hdf5, safetensors, torch
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import NEST, ShardIdentity
from reshard_mpi.formats.protocol import seal_file
from reshard_mpi.formats.safetensors import huggingface as safetensors_index
from reshard_mpi.journal.provenance import FileState, SourceStates, TargetInputs, digest_of_texts
from reshard_mpi.journal.run_records import RunIdentity
from reshard_mpi.journal.target_records import RecordHead, TargetRecord, TensorSum
from reshard_mpi.planning.rank_plan import SharedFact, StageDigest
from reshard_mpi.planning.source_flaws import PrefixDigest
from reshard_mpi.sharding import mindspore_json, mindspore_layouts, strategy_table, toml_spec
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf
from reshard_mpi.testing import sample_tensors
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents

NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)
TENSORS = [
    SampleTensor.random("layer.weight", BY_NAME["bfloat16"], (3, 2)),
    SampleTensor.random("layer/bias", BY_NAME["float32"], (4,)),
    SampleTensor.random("step", BY_NAME["int64"], ()),
    SampleTensor.random(".", BY_NAME["float8_e4m3fn"], (2,)),
    SampleTensor.random("none", BY_NAME["float16"], (0, 3)),
]
CONTENTS = ShardContents.of(TENSORS, {"note": "a text"})
LAYOUTS = {
    "w": RawLayout((2, 2), ((1,), (0,)), tensor_shape=(4, 4)),
    "b": RawLayout((2, 2), ((-1,),), -1, 1, tensor_shape=(4,)),
    "u": RawLayout((4,), ((0,),), param_split_shape=(1, 2, 3, 4), indices_offset=(0, 1, 3, 6), tensor_shape=(10,)),
}
ITEMS = (StrategyItem("Default/MatMul-op0", 0, ((1, 2), (2, 1))),)
SPECS = [
    'mesh = { dp = 2, tp = 4 }\n[[parameter]]\nmatch = "*"\n',
    "mesh = { dp = 2, tp = 4 }\nstages = 2\n[[parameter]]\nmatch = 'layers.*.qkv'\nsplit = { 1 = ['tp'] }\n"
    "optimizer = ['dp']\nstage = [0, 1]\n[[parameter]]\nmatch = 'u'\nsplit = { 0 = ['dp'] }\nsizes = { 0 = [3, 9] }\n",
]


def ckpts(path: Path) -> Iterator[None]:
    ckpt_peer.write(path, CONTENTS)
    yield
    ckpt_peer.write(path, CONTENTS, pieces=3)
    yield
    path.write_bytes(ckpt_peer.value("w", (2, 3), "Int8", bytes(6)) + b"crc_num" + bytes(10))
    yield
    path.unlink()
    sample_tensors.write(ckpt, str(path), CONTENTS)
    yield


def safetensors_files(path: Path) -> Iterator[None]:
    sample_tensors.write(safetensors, str(path), CONTENTS)
    yield
    path.unlink()
    sample_tensors.write(safetensors, str(path), ShardContents.of(TENSORS[:2]))
    seal_file(safetensors, str(path), crc=True)
    yield
    path.unlink()
    four_bits = SampleTensor.random("four bits", BY_NAME["int4"], (3,))
    safetensors_peer.write(path, ShardContents.of([*TENSORS, four_bits], {"a\nstring": "\U0001f701"}))
    yield
    entry = {"shape": [2], "data_offsets": [0, 2], "dtype": "U8"}
    metadata = {"format": "pt", "x": "y" * 99}
    path.write_bytes(safetensors_peer.file_of({"\u5c42": entry, "__metadata__": metadata}, b"ab"))
    yield
    piece = sliced_peer.file_of({"w": NUMBERS[:1, :2]}, {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4, 0]}}'})
    path.write_bytes(piece)
    yield


def hugging_face_indices(path: Path) -> Iterator[None]:
    path.write_text(safetensors_index.write({"w": "a.safetensors", "\u5c42\U0001f701": "b/c.safetensors"}, 99))
    yield
    besides = {"total_size": 1.5e9, "a": [True, None, {"b": [[], -1, "x\n"]}]}
    path.write_text(json.dumps({"metadata": besides, "other": {}, "weight_map": {"w": "a.safetensors"}}))
    yield


def mindformers_indices(path: Path) -> Iterator[None]:
    whole = np.zeros((4, 2), np.float32)
    tensors = {
        "w": sliced_peer.Sliced(whole, (2, 1), [[0, 2], [1]]),
        "\u5c42'": sliced_peer.Sliced(whole[0], (1,), [[0, 1]], "opt"),
    }
    with TemporaryDirectory() as folder:
        sliced_peer.write_mindformers(Path(folder), tensors, 3)
        index = json.loads(Path(folder, "metadata.json").read_text())
        for indent in (4, None):
            path.write_text(json.dumps(index, indent=indent, ensure_ascii=indent is None))
            yield
    for name in index["state_dict_metadata"]:
        del index["state_dict_metadata"][name]["layout"]
    path.write_text(json.dumps({"other": [1, {"a": None}], **dict(reversed(index.items()))}, separators=(",", ":")))
    yield


def sharding_texts(path: Path) -> Iterator[None]:
    path.write_text(json.dumps({"layers.0.w": {"saved_offsets": [4, 0]}, "b": {"saved_offsets": []}}))
    yield
    path.write_text(json.dumps({"\u5c42\U0001f701": {"saved_offsets": [0]}, 'a"\n': {"saved_offsets": [7]}}, indent=1))
    yield


def native_shards(path: Path) -> Iterator[None]:
    placements = strategy_table.dumps(mindspore_layouts.to_strategy([StageFile(LAYOUTS, ITEMS)], ""))
    sample_tensors.write(hdf5, str(path), CONTENTS, ShardIdentity(1, 4, placements))
    yield
    # So many that the library no longer keeps the links of a group side by side.
    many = [SampleTensor.random(f"layers.{number}.w", BY_NAME["float16"], (2,)) for number in range(11)]
    path.unlink()
    sample_tensors.write(hdf5, str(path), ShardContents.of(many))
    yield
    hdf5_peer.write(path, CONTENTS)
    yield


def foreign_shards(path: Path) -> Iterator[None]:
    for libver in ("earliest", "v108", "latest"):
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("plain", data=NUMBERS)
            file.create_dataset("a/swapped", data=NUMBERS.astype(">f4"))
            file["a/again"] = h5py.SoftLink("swapped")
            file["hard"] = file["plain"]
        yield
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("chunked", data=NUMBERS, chunks=(2, 4), maxshape=(None, 6))
            file.create_dataset("gzip", data=NUMBERS, chunks=(3, 3), compression="gzip", shuffle=True)
        yield
    with h5py.File(path, "w") as file:
        file.create_dataset("lzf", data=NUMBERS, chunks=(4, 6), compression="lzf", fletcher32=True)
        file.create_dataset("swapped", data=NUMBERS.astype(">f4"), chunks=(4, 3), compression="gzip")
        file["text"] = "variable"
        file["fixed"] = np.bytes_(b"abc")
    yield
    with h5py.File(path, "w", libver="latest", track_order=True, userblock_size=512) as file:
        for number in range(12):
            file[f"w{number}"] = np.int16(number)
        file.attrs["note"] = "x" * 100
    yield


def protobufs(path: Path) -> Iterator[None]:
    path.write_bytes(encode_protobuf(StageFile(LAYOUTS, ITEMS)))
    yield
    nested = {"0-w": RawLayout((2, 2), ((1, 0), (-1,))), "1-w": RawLayout((4,), ((-1,), (0,)))}
    items = (StrategyItem("a", 0), StrategyItem("b", 1))
    path.write_bytes(encode_protobuf(StageFile(nested, items)))
    yield


def jsons(path: Path) -> Iterator[None]:
    path.write_bytes(mindspore_json.encode_json(StageFile(LAYOUTS, ITEMS)))
    yield
    nested = {"w": RawLayout((2, 2), ((1, 0), (-1,)), tensor_shape=(8, 4))}
    path.write_bytes(mindspore_json.encode_json(StageFile(nested, ITEMS)))
    yield


def tomls(path: Path) -> Iterator[None]:
    for text in SPECS:
        path.write_text(text)
        yield


def tables(path: Path) -> Iterator[None]:
    for strategy in (
        mindspore_layouts.to_strategy([StageFile(LAYOUTS, ITEMS)], ""),
        *(toml_spec.parse(text, "") for text in SPECS),
        mindspore_layouts.to_strategy(
            [mindspore_json.decode_json((parsers.CORPUS / "strategy_json" / "seed-1").read_text(), "")], ""
        ),
    ):
        path.write_text(strategy_table.dumps(strategy))
        yield


def records(path: Path) -> Iterator[None]:
    identity = RunIdentity({"target_ranks": 1, "to": "ckpt", "source": "src", "prefix": "checkpoint_"})
    path.write_text(identity.as_text())
    yield
    sources = SourceStates("/src", (FileState("rank_0/a.ckpt", 99, 1),))
    moments, beginnings = (SharedFact("step", "3", "p"),), (PrefixDigest("lr", "00", 1),)
    inputs = TargetInputs((0, 2), StageDigest(0, "0" * 8, 0), moments, beginnings, sources, digest_of_texts({}))
    sums = (TensorSum("w", "float32", (4, 2), (2, 0), (2, 2), 1, loose=False),)
    head = RecordHead(identity.digest, 0, "rank_0/checkpoint_0.ckpt", 77, None, (5, 6))
    record = TargetRecord(head, inputs, sums)
    path.write_text(record.as_text())
    yield
    target = {"rank": 0, "file": record.file, "size_bytes": 77, "read_ranks": [0]}
    path.write_text(json.dumps({"digest": identity.digest, "sums": {"w": "00000001"}, "targets": [target]}))
    yield
    files = [{"file": "rank_0/a.ckpt", "size_bytes": 99}]
    whole = {"format": "reshard_mpi commit", "version": 1, "digest": identity.digest, **identity.as_json()}
    path.write_text(json.dumps({**whole, "sums": {"w": "00000001"}, "sources": files, "targets": [target]}))
    yield
    path.write_text(record._replace(announced=None, sums=()).as_text())
    yield


def name_patterns(path: Path) -> Iterator[None]:
    for lines in (["adam.layers.1.w", "layers.*.w", "*"], ["a.b[.c", "?.[!a]*", "b[*", "*.c", "c"]):
        path.write_text("\n".join(lines))
        yield


TORCH_GOLDEN = Path(__file__).parent.parent / "formats" / "golden" / "torch"


def torch_files(path: Path) -> Iterator[None]:
    torch_peer.write(path, CONTENTS)
    yield
    path.unlink()
    sample_tensors.write(torch, str(path), CONTENTS)
    yield
    for name in ("legacy.pth", "dtensor_ranks/model_world_size_4_rank_2.pt"):
        path.write_bytes((TORCH_GOLDEN / name).read_bytes())
        yield


def torch_pickles(path: Path) -> Iterator[None]:
    """The pickles of torch's own files: of training, of plain data, of a rank's DTensors; and one of protocol 5."""
    for name in ("train.pth", "plain.pt", "dtensor_ranks/model_world_size_4_rank_1.pt"):
        with zipfile.ZipFile(TORCH_GOLDEN / name) as opened:
            member = next(info for info in opened.infolist() if info.filename.endswith("/data.pkl"))
            path.write_bytes(opened.read(member))
        yield
    path.write_bytes(pickle.dumps({"a": [1, 2.5, {3}, b"bytes", bytearray(b"x"), frozenset("y")], (1, 2): 1 << 70}, 5))
    yield


def dcp_files(path: Path) -> Iterator[None]:
    sample_tensors.write(dcp, str(path), CONTENTS)
    yield


def dcp_metadata(path: Path) -> Iterator[None]:
    """What torch has written, what this program writes, and a pickle of the protocol before."""
    path.write_bytes((TORCH_GOLDEN.parent / "dcp" / "four_ranks" / ".metadata").read_bytes())
    yield
    with TemporaryDirectory() as folder:
        file = str(Path(folder, "__0_0.distcp"))
        path.write_bytes(
            dcp.index_contents([sample_tensors.write(dcp, file, ShardContents.of(TENSORS, {"note": "a text"}))])[
                path.name
            ]
        )
        yield
        sample = SampleTensor.random("w", BY_NAME["float32"], (2,))
        tensors = {"w": dcp_peer.Listed("float32", (4,), [("__0_0.distcp", (at,), sample) for at in (0, 2)])}
        dcp_peer.write(Path(folder), tensors, {"epoch": ("__0_0.distcp", 3)}, paths={"w": ("w",)}, protocol=2)
        path.write_bytes(Path(folder, ".metadata").read_bytes())
        yield


def nests(path: Path) -> Iterator[None]:
    for name in ("train.pth", "plain.pt"):
        strings = torch.locate(str(TORCH_GOLDEN / name)).strings
        path.write_text(strings[NEST].replace("A" * 8, "")[:4000])
        yield
    path.write_text(
        '{"dict":[["a",{"dict":[["w"],[0,{"dict":[]}]]}],["list",[{"tensor":null},{"tuple":[1,null]}]],'
        '["x",{"call":["collections","OrderedDict",[]],"state":{"dict":[["s",true]]},"dict":[]}]]}'
    )
    yield


MAPS = [
    "[axes]\nr = 2\nd = 'deep.size'\n"
    "[[map]]\neq = 'a.{l}.q [(g r d) h], a.{l}.k [(g d) h] <=> x.{l} [(g (r d + d)) h]'\n",
    "[[map]]\neq = 'e.{n}.w [f h] <=> e [h n f] : bf16'\n[[map]]\neq = 'b [(x 4)] <=> y [(x | 6) 4]'\npads = 'drop'\n"
    "[[map]]\ncopy = true\neq = '{p*}.w <=> {p*}.g, {p*}.h'\noptional = true\n",
    "[axes]\nv = '(heads + 4) / 2 * 1'\n[[map]]\neq = 'z [v] <=> c.norm.w [(v | 2)]'\n"
    "[[map]]\ndrop = 's*'\noptional = true\n"
    "[[map]]\nfill = { name = '{p*}.n', value = 1, shape = [], type = 'int64', beside = '{p*}.w' }\nside = 'left'\n",
]


def maps(path: Path) -> Iterator[None]:
    for text in MAPS:
        path.write_text(text)
        yield


MAKERS = {
    "map": maps,
    "dcp": dcp_files,
    "dcp_metadata": dcp_metadata,
    "torch": torch_files,
    "torch_pickle": torch_pickles,
    "nest": nests,
    "ckpt": ckpts,
    "safetensors": safetensors_files,
    "hugging_face_index": hugging_face_indices,
    "mindformers_index": mindformers_indices,
    "sharding_text": sharding_texts,
    "hdf5_native": native_shards,
    "hdf5_foreign": foreign_shards,
    "strategy_protobuf": protobufs,
    "strategy_json": jsons,
    "strategy_toml": tomls,
    "placement_table": tables,
    "patterns": name_patterns,
    "records": records,
}


def main() -> None:
    """Write `seed-0`, `seed-1` ... into the corpus of every parser."""
    for parser, make in MAKERS.items():
        folder = parsers.CORPUS / parser
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as scratch:
            path = Path(scratch, "file")
            for number, _ in enumerate(make(path)):
                (folder / f"seed-{number}").write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()

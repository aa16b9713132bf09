"""Write the files of DeepSpeed's ZeRO, all but the elements (`reserve`), and name them (`file_name`).

A file has plain data, tensors, and objects of four classes of DeepSpeed, which its engine needs: a loss scaler, the
stage as a member of an enumeration, and addresses in vectors. They are made of checked numbers alone, never of what a
nest says. (deepspeed/runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py of release 0.19)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import TargetError
from reshard_mpi.formats import structure, torch
from reshard_mpi.formats.deepspeed.layout import (
    LAYOUT,
    FlatGroupLayout,
    LaidParameter,
    RankVectors,
    Vector,
    ZeroLayout,
    frozen_vectors,
    layer_of,
    names_by_file,
    vectors_of,
    whole_part,
)
from reshard_mpi.formats.deepspeed.parameters import TIED
from reshard_mpi.formats.deepspeed.ranks import TargetNames
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import NEST, Manifest, ShardSpec, Specs
from reshard_mpi.formats.nest import rebuild_tree
from reshard_mpi.formats.nest.nodes import MODEL, ORDERED_DICT, Call, Dict, Global, NestError, Value
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.formats.torch.archive import ENDS_BYTES, MEMBER_BYTES
from reshard_mpi.formats.torch.file_content import content_of
from reshard_mpi.formats.torch.pickler import WrittenTensor, dumps, require_types
from reshard_mpi.formats.torch.tensors import BY_TORCH_NAME, SIZE

NAME = "deepspeed"
_STEM_BYTES = 64
_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_DYNAMIC = "DynamicLossScaler"
# The attributes of each class of loss scalers, with the types that they may have.
_SCALERS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "LossScaler": {"cur_scale": (int, float), "dynamic": (bool,)},
    _DYNAMIC: {
        **dict.fromkeys(("cur_scale", "scale_factor", "min_scale"), (int, float)),
        **dict.fromkeys(("cur_iter", "last_overflow_iter", "scale_window"), (int,)),
        **dict.fromkeys(("delayed_shift", "cur_hysteresis"), (int,)),
        **dict.fromkeys(("consecutive_hysteresis", "raise_error_at_min_scale", "dynamic"), (bool,)),
        "dtype": (Global,),
    },
}
_NO_SCALER = Dict(["class", "LossScaler", "cur_scale", 1.0, "dynamic", False])
# What names of tensors among the settings of an optimizer's groups begin with.
_SETTINGS = "settings."
# What an engine that has not said its release is taken for: one whose files have this form.
_RELEASE = "0.19.8"
_NO_LAYER = 10**9
# Keys of the engine that its files have in any case, with what stands there if nothing is known.
_OF_ENGINE = {"data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": 0, "global_samples": 0}


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return the path of a file in the folder of the checkpoint.

    Args:
        prefix: as `packing.packed` makes it.
    """
    return TargetNames.of_prefix(prefix).path(target_rank, targets)


def index_contents(files: Sequence[Manifest]) -> Mapping[str, bytes]:
    """Return `latest`, the file that names the folder of the files."""
    return {"latest": Path(files[0].path).parent.name.encode()}


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for what cannot be stored."""
    require_types(spec.specs, "a file of DeepSpeed", "")
    file = _written(spec, "")
    members = sum(storage.size_bytes + MEMBER_BYTES + _STEM_BYTES for storage in file.storages)
    return members + len(dumps(file.root)) + torch.SMALL_MEMBERS_BYTES + ENDS_BYTES


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without the elements of its tensors, as `Format.reserve` says."""
    require_types(spec.specs, "a file of DeepSpeed", path)
    file = _written(spec, path)
    starts, digest = torch.write_archive(fd, dumps(file.root), [storage.size_bytes for storage in file.storages])
    tensors = _placed(spec, file, starts, path)
    return Manifest(path, NAME, tensors, dict(spec.strings), spec.identity, header_digest=digest)


def _placed(spec: ShardSpec, file: _WrittenFile, starts: Sequence[int], path: str) -> TensorTable:
    """Return where the parts of a file lie."""
    place = {name: start + offset for own, start in zip(file.storages, starts) for name, offset in own.parts.items()}
    tensors, specs = TensorTable(path), spec.specs
    for name, number in zip(specs.names, specs.kind_ids):
        dtype, shape, *_ = specs.kinds[number]
        size_bytes = specs.kinds[number].size_bytes
        ranges = (ByteRange(path, place[name], size_bytes),) if size_bytes else ()
        tensors.add_entry(TensorEntry(name, dtype, shape, ByteRanges(ranges)))
    return tensors


def read_back(meant: Manifest) -> None:
    """Read the structure of a file that was just written. Raises ShardError if it is not what was meant."""
    with structure.opened(meant.path) as file:
        content = content_of(file)
    assert meant.identity is not None
    kinds = [meant.tensors.kind_named(name) for name in meant.tensors]
    spec = ShardSpec(meant.identity, Specs([*meant.tensors], kinds, range(len(kinds))), meant.strings)
    again = _written(spec, meant.path)
    sizes = [storage.size_bytes for storage in again.storages]
    starts = [content.starts.get(str(number), 0) if size_bytes else 0 for number, size_bytes in enumerate(sizes)]
    is_same_pickle = content.pickle_crc == content.found_crc == crc32(dumps(again.root))
    if not is_same_pickle or _placed(spec, again, starts, meant.path) != meant.tensors:
        raise structure.not_as_written(meant.path)


seal = torch.seal


class _WrittenStorage(NamedTuple):
    """A storage of a file: its size, and the parts in it by name, each with the byte where it begins."""

    size_bytes: int
    parts: Mapping[str, int]


class _WrittenFile(NamedTuple):
    """A file: its object, whose tensors have the numbers of storages as keys, and these."""

    root: Value
    storages: Sequence[_WrittenStorage]


class _StoragesInFile:
    """The storages of a file while it is made. kinds: the types of its parts, by name."""

    def __init__(self, kinds: Mapping[str, TensorType]) -> None:
        self.made: list[_WrittenStorage] = []
        self.kinds = kinds

    def vector(self, vector: Vector, dtype: DType) -> WrittenTensor:
        """Return a tensor of one dimension in a storage of its own."""
        itemsize_bytes = dtype.itemsize_bytes
        parts = {part.name: place * itemsize_bytes for place, part in vector.parts}
        return self._tensor(TensorType(dtype, (vector.length,)), parts)

    def whole(self, name: str) -> WrittenTensor:
        """Return a part of the file as a tensor in a storage of its own."""
        return self._tensor(self.kinds[name].unplaced, {name: 0})

    def empty(self, dtype: DType) -> WrittenTensor:
        """Return a tensor without elements, as parameters of stage 3 are in the files of weights."""
        return self._tensor(TensorType(dtype, (0,)), {})

    def _tensor(self, kind: TensorType, parts: Mapping[str, int]) -> WrittenTensor:
        self.made.append(_WrittenStorage(kind.size_bytes, parts))
        return WrittenTensor(str(len(self.made) - 1), kind)


def _written(spec: ShardSpec, path: str) -> _WrittenFile:
    """Return the file of a target. Raises TargetError if it cannot be made."""
    text = spec.strings.get(LAYOUT)
    if text is None:
        raise TargetError(
            "a file of DeepSpeed is only written as a part of a whole training",
            expected="the layout of all files",
            got="none",
            where=path,
            remedy="use reshard-mpi transform --to deepspeed",
        )
    layout = ZeroLayout.of_text(text)
    specs = spec.specs
    kinds = {name: specs.kinds[kind] for name, kind in zip(specs.names, specs.kind_ids)}
    number = spec.identity.rank
    storages = _StoragesInFile(kinds)
    of_weights = number - layout.optimizer_files
    if of_weights < 0:
        suffix = whole_part("", (), number).name
        of_settings = [name for name in kinds if name.startswith(_SETTINGS)]
        leaves = {name.removesuffix(suffix): storages.whole(name) for name in of_settings}
        root = _optimizer_states(layout, number, _values(layout.optimizer, leaves, path), storages)
    elif of_weights < layout.model_files:
        root = _model_states(layout, number, storages, path)
    else:
        root = _part_of_model(layout, number, storages, path)
    return _WrittenFile(root, storages.made)


def _values(text: str, leaves: Mapping[str, Value], path: str) -> Dict:
    """Return the values that a text of a nest says, with these tensors among them."""
    try:
        root = rebuild_tree.rebuild(leaves, {NEST: text})
    except NestError as error:
        raise TargetError(
            "the settings of a training cannot be made again",
            expected="the nest that was made of them",
            got=error.problem,
            where=path,
            remedy="choose --to torch",
        ) from None
    assert type(root) is Dict
    return root


def _optimizer_states(layout: ZeroLayout, file: int, settings: Dict, storages: _StoragesInFile) -> Dict:
    """Return the object of a file with one rank's share of the optimizer."""
    vectors = [*vectors_of(layout, file)]
    model_rank = file // layout.ranks
    of_stage = layout.groups[model_rank]
    weights = [storages.vector(own.weights, BY_NAME["float32"]) for own in vectors]
    values = settings.get("values")[model_rank]
    state = Dict()
    for number, (own, besides) in enumerate(zip(vectors, values)):
        of_group = Dict([*besides.flat])
        for kind, part in own.counters.items():
            of_group.flat += [kind, storages.whole(part.name)]
        for kind, dtype in layout.kinds:
            of_group.flat += [kind, storages.vector(own.state[kind], BY_NAME[dtype])]
        state.flat += [number, of_group]
    groups = [
        Dict([*own.flat, "params", [place for place, flat in enumerate(of_stage) if flat.settings == number]])
        for number, own in enumerate(settings.get("settings"))
    ]
    base = Dict(["state", state, "param_groups", groups])
    rest = dict(settings.get("rest").pairs())
    scaler = _scaler(settings.get("scaler"))
    common = ["loss_scaler", scaler, "dynamic_loss_scale", scaler.function.name == _DYNAMIC]
    common += ["overflow", rest.get("overflow", False)]
    stage: list[Value] = ["zero_stage", Call(_STAGE, (layout.stage,))]
    version = _release(settings.get("ds_version"))
    clip = ["clip_grad", rest["clip_grad"]] if "clip_grad" in rest else []
    if layout.is_sliced:
        own_state = [*stage, *common, *clip, "partition_count", layout.ranks]
        own_state += ["optimizer_state_dict", base, "fp32_flat_groups", weights]
    else:
        own_state = [*common, *clip, "base_optimizer_state", base, "single_partition_of_fp32_groups", weights, *stage]
        own_state += ["group_paddings", [own.padding for own in vectors]]
        own_state += ["param_alignment_paddings", [list(group.gaps) for group in of_stage]]
        own_state += ["partition_count", [layout.ranks // group.parts for group in of_stage], "ds_version", version]
        own_state += ["param_slice_mappings", [_addresses(*both) for both in zip(of_stage, vectors)]]
    return Dict(["optimizer_state_dict", Dict(own_state), "ds_config", settings.get("config"), "ds_version", version])


def _addresses(group: FlatGroupLayout, own: RankVectors) -> Call:
    """Return where the parameters of a group lie in the partition of a rank."""
    addresses: dict[str, Value] = {}
    for run in own.runs:
        addresses[group.parameters[run.parameter].name] = address = Call(_ADDRESS, (), is_new=True)
        address.state = Dict(["numel", run.length, "start", run.start])
    return _ordered(addresses)


def _release(version: Value) -> str:
    return version if type(version) is str and version else _RELEASE


def _scaler(value: Value) -> Call:
    """Return a loss scaler of checked attributes. Raises TargetError if no scaler of DeepSpeed has them."""
    given = dict((value if type(value) is Dict else _NO_SCALER).pairs())
    name = given.pop("class", None)
    known = _SCALERS.get(name) if type(name) is str else None
    odd = [key for key, own in given.items() if known is None or type(own) not in known.get(key, ())]
    if known is None or odd or "cur_scale" not in given:
        raise TargetError(
            "the loss scaler of the source is none of DeepSpeed's",
            expected=f"{' or '.join(_SCALERS)} with its attributes",
            got=f"{name!r} with {odd or [*given]}"[:200],
            remedy="leave it out of the source, or choose --to torch",
        )
    dtype = given.get("dtype")
    if dtype is not None and (dtype.module != "torch" or dtype.name not in BY_TORCH_NAME):
        raise TargetError(
            "the type of a loss scaler is none of torch's",
            expected="torch.float16 or another",
            got=str(dtype),
            remedy="leave the scaler out of the source, or choose --to torch",
        )
    scaler = Call(Global(_SCALER, str(name)), (), is_new=True)
    scaler.state = Dict.of(given.items())
    return scaler


def _model_states(layout: ZeroLayout, number: int, storages: _StoragesInFile, path: str) -> Dict:
    """Return the object of a file of weights and settings."""
    rank, suffix = number - layout.optimizer_files, whole_part("", (), number).name
    model_rank = 0 if layout.is_sliced else rank
    tensors = {name.removesuffix(suffix): storages.whole(name) for name in storages.kinds if name.endswith(suffix)}
    of_values = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}
    values = dict(_values(layout.model, of_values, path).pairs())
    dtypes = {own.name: own.dtype for own in layout.frozen}
    module = {
        name: tensors.get(MODEL + name) or storages.empty(BY_NAME[dtypes.get(name) or layout.dtype])
        for name in names_by_file(layout, layout.names).get("", ())
    }
    fragments: dict[str, Value] | None = None
    if layout.is_sliced:
        vectors = zip(layout.frozen, frozen_vectors(layout, rank))
        fragments = {own.name: storages.vector(vector, BY_NAME[own.dtype]) for own, vector in vectors}
    elif layout.stage > 1:
        fragments = {own.name: module[own.name] for own in layout.frozen}
    besides = _values_in_module(layout, "", path)
    # What layers of a pipeline share is in the files of these, and not said.
    shared = [pair for pair in layout.shared if not (layout.is_pipeline and pair[1].startswith(TIED))]
    root: dict[str, Value] = {
        "module": None if layout.is_pipeline else _ordered({**module, **besides}),
        "buffer_names": [*_buffers_of(layout, model_rank)],
        "optimizer": None,
        "param_shapes": [_shapes(group.of_part(0)) for group in layout.groups[model_rank]],
        "frozen_param_shapes": None if fragments is None else _shapes(layout.frozen),
        "shared_params": Dict.of(shared if rank == 0 else ()),
        "frozen_param_fragments": None if fragments is None else _ordered(fragments),
        "lr_scheduler": values.pop("scheduler", None),
        **{key: values.pop(key, otherwise) for key, otherwise in _OF_ENGINE.items()},
        "dp_world_size": layout.ranks,
        "mp_world_size": len(layout.groups),
        "checkpoint_parallel_dimensions": Dict(["pp_degree", len(layout.groups), "tp_degree", 1]),
        "ds_config": values.pop("ds_config"),
        "ds_version": _release(values.pop("ds_version", None)),
    }
    client_state = values.pop("client_state", Dict())
    values |= dict(client_state.pairs()) if type(client_state) is Dict else {"client_state": client_state}
    clash = sorted(str(key) for key in values if key in root)
    if clash:
        raise TargetError(
            "the training's own state has keys of DeepSpeed's engine",
            expected="others",
            got=", ".join(clash),
            where=path,
            remedy="leave them out of the source",
        )
    return Dict.of({**root, **values}.items())


def _values_in_module(layout: ZeroLayout, begin: str, path: str) -> dict[str, Value]:
    """Return what modules of the model save besides tensors, in a file whose names begin so."""
    values = dict(_values(layout.module, {}, path).get("module").pairs())
    own = {*names_by_file(layout, map(str, values)).get(begin, ())}
    return {key: value for key, value in values.items() if str(key) in own}


def _buffers_of(layout: ZeroLayout, model_rank: int) -> Sequence[str]:
    """Return the names of the buffers in a stage of a pipeline: of those layers that are behind its first one."""
    if not layout.is_pipeline:
        return layout.buffers
    firsts = [
        min((layer_of(own.name, _NO_LAYER) for group in groups for own in group.parameters), default=_NO_LAYER)
        for groups in layout.groups
    ]
    return [name for name in layout.buffers if max(bisect_right(firsts, layer_of(name, 0)), 1) - 1 == model_rank]


def _part_of_model(layout: ZeroLayout, number: int, storages: _StoragesInFile, path: str) -> Value:
    """Return the object of a file of a layer, whose names begin without its number, or of an expert."""
    begin = layout.apart[number - layout.optimizer_files - layout.model_files]
    names = names_by_file(layout, layout.names).get(begin, ())
    own: dict[str, Value] = {name: storages.whole(whole_part(MODEL + name, (), number).name) for name in names}
    own |= _values_in_module(layout, begin, path)
    if layout.is_pipeline:
        return _ordered({name.removeprefix(begin): value for name, value in own.items()})
    return Dict.of(own.items())


def _ordered(values: Mapping[str, Value]) -> Call:
    ordered = Call(ORDERED_DICT, ())
    ordered.flat = [part for pair in values.items() for part in pair]
    return ordered


def _shapes(parameters: Sequence[LaidParameter]) -> Call:
    return _ordered({parameter.name: Call(SIZE, (parameter.shape,)) for parameter in parameters})

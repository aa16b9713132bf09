"""Read and write Megatron-Core's checkpoints: weights, and the optimizer's state in any of its forms.

A folder `iter_0000003` has a training in the form torch_dist, or files of each rank in the older form. A file
`latest_checkpointed_iteration.txt` beside it names the newest one. Facts are of Megatron-Core 0.14 to 0.19.
What is written are files of torch_dist, which are those of torch's distributed checkpoints. The prefix of a run is the
name of their folder, `iter_0000003`.

Names are those of a whole training state: `model.<key>`, `optimizer.state.<key>.exp_avg` and so on, with
`optimizer.state.<key>.fp32_param` where the model has a parameter in another type, by the keys of torch_dist.
A weight that lies both in the model and, in float32, in the optimizer is listed as two pieces, so that both are
compared as copies are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard_mpi.errors import ShardError, TargetError
from reshard_mpi.formats import dcp, structure, torch
from reshard_mpi.formats.dcp import file_layout, seal
from reshard_mpi.formats.dcp.bulk_metadata import ItemPlace
from reshard_mpi.formats.dcp.file_layout import tensors_in
from reshard_mpi.formats.dcp.metadata_writer import CollectedTensor, content_of, contents_of
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import NEST, Manifest, ShardSpec
from reshard_mpi.formats.megatron.common_state import objects_of
from reshard_mpi.formats.megatron.layers import chunk_of, item_kind
from reshard_mpi.formats.megatron.legacy import read_legacy
from reshard_mpi.formats.megatron.packing import COMMON, as_read, packed
from reshard_mpi.formats.megatron.rank_folders import files_of_ranks
from reshard_mpi.formats.megatron.torch_dist import files_of_torch_dist, is_torch_dist, read_training
from reshard_mpi.formats.megatron.training_tree import NAME, arranged
from reshard_mpi.formats.nest import rebuild_tree
from reshard_mpi.formats.nest.nodes import Dict, NestError, NestTensor, Value
from reshard_mpi.formats.protocol import OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.torch.pickler import require_types
from reshard_mpi.formats.torch.unpickler import without_collections


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the checkpoint's files. Raises ShardError if it is damaged."""
    return files_of_torch_dist(folder) if is_torch_dist(folder) else files_of_ranks(folder)


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the whole tensors of the checkpoint, and everything else that it has as the text of a nest.

    Raises ShardError if a file is missing, not sound, or contradicts others; DisagreementError if files are of several
    saves.
    """
    with without_collections():
        read = read_training(folder) if is_torch_dist(folder) else read_legacy(folder)
        return {0: arranged(read, folder)}


_HOLDER = "a Megatron checkpoint"
# The prefix of a run whose files have got no names yet.
_FOLDER = re.compile(r"iter_\d{7,}")
_COMMON_STATE = "common_state/shard_0_1"
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
# What `metadata.json` says besides up to this release, which has a file `common.pt`.
_COMMON_BACKEND = {"common_backend": "torch", "common_backend_version": 1}
_LAST_WITH_COMMON_FILE = "0.18"


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return the path of a file in the folder of the checkpoint.

    Args:
        prefix: as `packing.packed` makes it. A user's own says nothing: these files have names of their own.
    """
    folder = prefix if _FOLDER.fullmatch(prefix) else "iter_0000000"
    return f"{folder}/__{target_rank}_0.distcp"


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for what cannot be stored."""
    require_types(spec.specs, _HOLDER, "")
    _require_common(spec, "")
    return file_layout.size_at_most_bytes(spec)


def _require_common(spec: ShardSpec, path: str) -> None:
    """Raise TargetError for a first file that is not one of a whole checkpoint: it says what all have in common."""
    if spec.identity.rank == 0 and COMMON not in spec.strings:
        raise TargetError(
            "a file of Megatron is only written as a part of a whole checkpoint",
            expected="what the checkpoint has besides tensors",
            got="nothing",
            where=path,
            remedy="use reshard-mpi transform --to megatron",
        )


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without the elements of its tensors, as `Format.reserve` says."""
    require_types(spec.specs, _HOLDER, path)
    _require_common(spec, path)
    specs, strings = spec.specs, dict(spec.strings)
    structure.check_names(path, [*specs.names, *strings])
    return Manifest(path, NAME, dcp.write_items(fd, path, specs, strings, item_kind), strings)


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the chunks of tensors in a file that this program has written. Raises ShardError if it is another one."""
    with structure.opened(path) as file:
        is_own = file_layout.has_footer(file)
    if not is_own:
        raise ShardError(
            "one file of a Megatron checkpoint is no checkpoint",
            expected="the folder of all its files",
            got="one of them",
            where=path,
            remedy=f"give {Path(path).parent}",
        )
    footer = dcp.read_items(path, item_kind)
    part_of, to_have_all = "a Megatron checkpoint", f"give {Path(path).parent}"
    return Manifest(path, NAME, footer.tensors, footer.strings, part_of=part_of, to_have_all=to_have_all)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether a file has checksums, as Megatron's own have. Raises ChecksumError if one does not fit."""
    if path.endswith(".distcp"):
        return dcp.check_crc(path, on_bytes)
    return path.endswith(".pt") and torch.check_crc(path, on_bytes)


def read_back(meant: Manifest) -> None:
    """Look at the structure of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate(meant.path), meant)


def index_contents(files: Sequence[Manifest]) -> Mapping[str, bytes]:
    """Return the index of the checkpoint, and the file that names its folder, in the order of their writing."""
    own = _values(files[0])
    release = own.get("release")
    common = objects_of(own.get("values"), release, _step(own.get("step"), files))
    has_file = release <= _LAST_WITH_COMMON_FILE
    objects: dict[str, Value] = {key: [value] for key, value in own.get("extra").pairs()}
    objects |= {key: [NestTensor(name)] for key, name in own.get("extra_tensors").pairs()}
    if not has_file:
        objects[_COMMON_STATE] = [common]
    items = {key: file_layout.of_object(value, contents_of(tensors_in(value), files)) for key, value in objects.items()}
    wholes = _wholes(files)
    folder = Path(files[0].path).parent.name
    index = {".metadata": content_of(wholes, (*wholes, *items), items)}
    if has_file:
        index["common.pt"] = file_layout.of_object(common, {})
    index["metadata.json"] = json.dumps({**_BACKEND, **(_COMMON_BACKEND if has_file else {})}).encode()
    pointer = {"latest_checkpointed_iteration.txt": str(int(folder.removeprefix("iter_"))).encode()}
    return {f"{folder}/{name}": content for name, content in index.items()} | pointer


def _values(first: Manifest) -> Dict:
    """Return the values that the first file says of the checkpoint. Raises ShardError if it says none."""
    try:
        root = rebuild_tree.rebuild({}, {NEST: first.strings.get(COMMON, "")})
    except NestError as error:
        raise ShardError(
            "the first file of a Megatron checkpoint does not say what all have in common",
            expected="a record of it",
            got=error.problem,
            where=first.path,
            remedy="make it anew with --overwrite",
        ) from None
    assert type(root) is Dict
    return root


def _step(name: Value, files: Sequence[Manifest]) -> float | None:
    """Return the number of steps that a tensor in one of the files says; None if there is none."""
    if name is None:
        return None
    ((kind, content),) = contents_of([name], files).values()
    return float(numbers(content, kind.dtype)[0])


def _wholes(files: Sequence[Manifest]) -> dict[str, CollectedTensor]:
    """Return the tensors that the chunks in all files make up."""
    wholes: dict[str, CollectedTensor] = {}
    for file in files:
        tensors, file_name_here = file.tensors, Path(file.path).name
        for name, start, number in zip(tensors, tensors.offsets, tensors.kind_ids):
            chunk, kind = chunk_of(name), tensors.kinds[number]
            if chunk is None:
                continue
            whole = wholes.setdefault(chunk.key, CollectedTensor(kind.dtype, chunk.whole, {}))
            item = file_layout.of_tensor(item_kind(name, kind))
            place = ItemPlace(file_name_here, start - len(item.head), item.length_bytes)
            whole.pieces[chunk.start] = (chunk.shape(kind), place)
    return wholes

"""Write the files of DeepSpeed's ZeRO, all but the elements (`reserve`), and name them (`file_name`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

from reshard_mpi.formats import structure
from reshard_mpi.formats.deepspeed.file_names import TargetNames
from reshard_mpi.formats.deepspeed.written_files import WrittenFile, written
from reshard_mpi.formats.locations import ByteRange, ByteRanges
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable
from reshard_mpi.formats.torch import writer as torch_writer
from reshard_mpi.formats.torch.archive_layout import ENDS_BYTES, MEMBER_BYTES
from reshard_mpi.formats.torch.file_content import content_of
from reshard_mpi.formats.torch.pickler import dumps, require_types

NAME = "deepspeed"
_STEM_BYTES = 64


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return the path of a file in the folder of the checkpoint.

    Args:
        prefix: as `packing.packed` makes it.
    """
    return TargetNames.of_prefix(prefix).path(target_rank, targets)


def index_files(files: Sequence[Manifest]) -> Mapping[str, bytes]:
    """Return `latest`, the file that names the folder of the files."""
    return {"latest": Path(files[0].path).parent.name.encode()}


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for what cannot be stored."""
    require_types(spec.specs, "a file of DeepSpeed", "")
    file = written(spec, "")
    members = sum(storage.size_bytes + MEMBER_BYTES + _STEM_BYTES for storage in file.storages)
    return members + len(dumps(file.root)) + torch_writer.SMALL_MEMBERS_BYTES + ENDS_BYTES


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without the elements of its tensors, as `Format.reserve` says."""
    require_types(spec.specs, "a file of DeepSpeed", path)
    file = written(spec, path)
    starts, digest = torch_writer.write_archive(fd, dumps(file.root), [storage.size_bytes for storage in file.storages])
    tensors = _placed(spec, file, starts, path)
    return Manifest(path, NAME, tensors, dict(spec.strings), spec.identity, header_digest=digest)


def _placed(spec: ShardSpec, file: WrittenFile, starts: Sequence[int], path: str) -> TensorTable:
    """Return where the parts of a file lie."""
    place = {
        name: start + offset for storage, start in zip(file.storages, starts) for name, offset in storage.parts.items()
    }
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
    again = written(spec, meant.path)
    sizes = [storage.size_bytes for storage in again.storages]
    starts = [content.starts.get(str(number), 0) if size_bytes else 0 for number, size_bytes in enumerate(sizes)]
    is_same_pickle = content.pickle_crc == content.found_crc == crc32(dumps(again.root))
    if not is_same_pickle or _placed(spec, again, starts, meant.path) != meant.tensors:
        raise structure.not_as_written(meant.path)


seal = torch_writer.seal

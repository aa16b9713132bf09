"""Read and write files of torch.save (`.pt`, `.pth`, `.bin`) without executing them.

A file is a zip archive of members as they are: a pickle of one object, in which each tensor is a name, a shape and a
place in a storage, and the bytes of every storage. Files of torch before 1.6 are pickles in a row, and are read too.
Facts of the layout are of torch 2.13.

DeepSpeed's files list the shapes of all parameters, whether or not the file has them; Megatron's have the arguments of
the run, which say over how many ranks a model was cut. Facts are of DeepSpeed 0.19 and Megatron-Core 0.18.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from reshard_mpi.errors import ChecksumError, ShardError
from reshard_mpi.filesystem.source_files import SourceFile
from reshard_mpi.formats import structure
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import NEST, HeaderDigest, Manifest, ShardSpec
from reshard_mpi.formats.nest import flatten_tree, nodes
from reshard_mpi.formats.nest.nodes import Call, Dict, Value, text_pairs
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.tensor_table import TensorEntry, TensorTable, TensorType
from reshard_mpi.formats.torch import archive
from reshard_mpi.formats.torch.archive import (
    ENDS_BYTES,
    MEMBER_BYTES,
    TOP,
    Placed,
    descriptor,
    ends,
    first_members,
    local_header,
    placed,
)
from reshard_mpi.formats.torch.dtensors import WholeTensor, whole_tensors
from reshard_mpi.formats.torch.file_content import OWN_RECORD, FileContent, content_of
from reshard_mpi.formats.torch.pickler import WrittenTensor, dumps, rebuilt, require_types
from reshard_mpi.formats.torch.tensors import DistributedTensor, StoredTensor, is_tensor, numbers, place_of

NAME = "torch"
_HOLDER = "a file of torch"
# Entries of a file with one rank's optimizer state, by the stage of ZeRO that writes them.
_FLAT_STATE = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_WHOLE = "give the folder of all files of the checkpoint"
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_AS_RANKS = "put the files of all ranks into folders rank_0, rank_1 ... (links will do), and say how they are cut"


class RankShare(NamedTuple):
    """Of what checkpoint a file is one rank's share, in words, and what to do to have all of it; empty: of none."""

    part_of: str = ""
    remedy: str = ""


def require_weights(root: Value, path: str) -> None:
    """Raise ShardError for a file of DeepSpeed or Megatron in which the tensors themselves are not, or in pieces."""
    if type(root) is not Dict:
        return
    state = root.get("optimizer_state_dict")
    if type(state) is Dict and any(state.get(name) is not None for name in _FLAT_STATE):
        raise ShardError(
            "a file holds one rank's part of the optimizer of a DeepSpeed ZeRO checkpoint",
            expected="whole tensors, or parts of each",
            got="flat pieces of all parameters in a row",
            where=path,
            remedy=_WHOLE,
        )
    if root.get("buckets_coalesced") is not None:
        raise ShardError(
            "a file holds the distributed optimizer of a Megatron checkpoint (distrib_optim.pt)",
            expected="whole tensors, or parts of each",
            got="flat buckets, in which many parameters lie in a row",
            where=path,
            remedy="give the folder of all ranks, which is the one above this file's own",
        )
    if root.get("ds_version") is not None and root.get("param_shapes") is not None:
        _require_listed_weights(root, path)


def _require_listed_weights(root: Dict, path: str) -> None:
    """Raise ShardError unless a file with DeepSpeed's model states holds all parameters that it lists."""
    held = dict(text_pairs(root.get("module")))
    lacking, empty = [], []
    shapes = root.get("param_shapes")
    for name, shape in (pair for group in (shapes if type(shapes) is list else [shapes]) for pair in text_pairs(group)):
        tensor = held.get(name)
        if tensor is None:
            lacking.append(name)
        elif type(tensor) is StoredTensor and 0 in tensor.shape and not _is_size(shape, tensor.shape):
            empty.append(name)
    if empty:
        raise ShardError(
            "a file is of a DeepSpeed ZeRO stage 3 checkpoint, and has no weights",
            expected="parameters of the shapes that the file lists",
            got=f"{len(empty)} that are empty, such as {empty[0]!r} of shape {list(held[empty[0]].shape)}",
            where=path,
            remedy="the weights lie in pieces in the files *_optim_states.pt beside it: " + _WHOLE,
        )
    if lacking:
        others = "layer_*_expert_*_model_states.pt" if held else "layer_*-model_states.pt"
        raise ShardError(
            "a file of a DeepSpeed checkpoint does not hold all weights that it lists",
            expected=f"all parameters, {lacking[0]!r} among them",
            got=f"{len(lacking)} are not in it; "
            + ("experts" if held else "layers of a pipeline")
            + f" lie in {others}",
            where=path,
            remedy=_WHOLE,
        )


def share_of(root: Value) -> RankShare:
    """Return of what checkpoint a file says that it is one rank's share."""
    if type(root) is not Dict:
        return RankShare()
    ranks = root.get("mp_world_size")
    if root.get("ds_version") is not None and type(ranks) is int and ranks > 1:
        return RankShare(f"a DeepSpeed checkpoint of {ranks} model-parallel ranks", _AS_RANKS)
    args = root.get("args")
    if type(args) is Call and type(args.state) is Dict and root.get("checkpoint_version") is not None:
        sizes = [args.state.get(name) for name in _PARALLEL]
        if any(type(size) is int and size > 1 for size in sizes):
            shown = " x ".join(str(size) for size in sizes if type(size) is int)
            what = f"a Megatron checkpoint of {shown} ranks (tensor x pipeline x expert parallel)"
            return RankShare(what, "give the folder of all ranks, iter_... above the folders mp_rank_*")
    return RankShare()


def _is_size(value: Value, shape: tuple[int, ...]) -> bool:
    """Tell whether a size equals the size of a tensor, or is no size at all."""
    try:
        return numbers(value) == shape
    except ValueError:
        return True


# Tensors with a class or attributes of their own that are named; of more the number is said.
_MAX_BESIDES = 100


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the tensors of the file at `path` without executing anything, and without reading any payload.

    Args:
        like: another shard; one of the same structure has its tensors at the same places.

    Names of nested dictionaries are joined by dots; the nest is kept as a string (`manifest.NEST`). What is neither
    tensor nor plain data is left out and named. Raises ShardError if the file is not sound, or would run code.
    """
    with structure.opened(path) as file:
        digest = None if like is None else like.header_digest
        if like is not None and digest is not None and archive.of_file(file, like.tensors) == digest:
            return like.at(path)
        manifest = _parsed(path, content_of(file))
        if manifest.identity is None:  # the files of different ranks say different ranks
            manifest = manifest._replace(header_digest=archive.of_file(file, manifest.tensors))
    return manifest


def _parsed(path: str, content: FileContent) -> Manifest:
    """Parse the content of a file."""
    strings = _own_strings(content, path)
    is_of_others = strings is None  # what this program has written may have settings of what it was made from
    if is_of_others:
        require_weights(content.root, path)
    try:
        flattened = flatten_tree.flatten(content.root, is_tensor)
    except nodes.NestError as error:
        raise error.of_file("a shard", path) from None
    named_tensors = flattened.tensors
    if strings is not None:
        # Its dictionaries are in the order of the nest, its storages in the shard's order.
        named_tensors = sorted(named_tensors, key=_storage_number)
    wholes, identity = whole_tensors(named_tensors, path)
    tensors = TensorTable(path)
    _add(tensors, named_tensors, content, wholes)
    if not tensors and flattened.left_out:
        raise ShardError(
            "a shard holds no tensor that can be read",
            expected="a state_dict()",
            got="; ".join(flattened.left_out[:3]),
            where=path,
            remedy="load it with torch, and save its state_dict()",
        )
    texts = flattened.strings if strings is None else strings
    besides = tuple(f"{name}: {tensor.besides}" for name, tensor in named_tensors if getattr(tensor, "besides", ""))
    left_out = (*flattened.left_out, *besides[:_MAX_BESIDES])
    part_of, to_have_all = share_of(content.root) if is_of_others else RankShare()
    return Manifest(path, NAME, tensors, texts, identity, left_out=left_out, part_of=part_of, to_have_all=to_have_all)


def read_back(meant: Manifest) -> None:
    """Read the structure of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate(meant.path), meant)


def _storage_number(named: tuple[str, Value]) -> int:
    key = named[1].storage.key if type(named[1]) is StoredTensor else ""
    return int(key) if key.isdecimal() and len(key) < 20 else 0


def _add(
    tensors: TensorTable,
    named_tensors: Iterable[tuple[str, Value]],
    content: FileContent,
    wholes: Mapping[str, WholeTensor],
) -> None:
    """Add the tensors of the file, each with its part of the whole where the file says that it has one."""
    starts, path = content.starts, tensors.path
    # Most tensors are like others before, so what is known of a kind is looked up.
    seen: dict[tuple[DType, tuple[int, ...], tuple[int, ...], WholeTensor | None], tuple[TensorType, int, bool]] = {}
    for name, tensor in named_tensors:
        stored: StoredTensor = tensor.local if type(tensor) is DistributedTensor else tensor
        storage, dtype, offset, shape, strides, _ = stored
        whole = wholes.get(name)
        alike = seen.get((dtype, shape, strides, whole))
        if alike is None:
            kind = TensorType(dtype, shape, *whole) if whole is not None else TensorType(dtype, shape)
            alike = seen[dtype, shape, strides, whole] = kind, tensors.kind(kind), stored.is_row_major
        kind, number, is_row_major = alike
        swapped = content.swapped and dtype.part_bytes > 1
        start = starts[storage.key] + offset * dtype.itemsize_bytes
        if not kind.size_bytes:
            tensors.add(name, number, 0)
        elif is_row_major and not swapped:
            tensors.add(name, number, start)
        else:
            source = place_of(path, stored, start, swapped)
            assert source is not None
            tensors.add_entry(TensorEntry(name, dtype, shape, source, kind.box, kind.global_shape))


def _own_strings(content: FileContent, path: str) -> Mapping[str, str] | None:
    """Return the strings with which this program wrote the file; None if others wrote it, or changed it.

    Raises ShardError if the pickle is damaged.
    """
    if content.own_record is None:
        return None
    try:
        record = json.loads(content.own_record)
    except (ValueError, RecursionError):
        return None
    match record:
        case {"pickle_crc": int() as crc, "strings": dict() as strings} if crc == content.pickle_crc:
            if content.found_crc != crc:
                raise ChecksumError(
                    "data.pkl of a shard does not fit its own checksum: it is damaged",
                    expected=f"CRC-32 {crc:08x}, as when it was written",
                    got=f"{content.found_crc:08x}",
                    where=path,
                    remedy="copy it again, or use another replica",
                )
            if all(type(text) is str for text in strings.values()):
                return strings
    return None


_ID_DIGITS = 40
# What a pickle has of a tensor besides name, shape and strides, and of its first one of a kind.
_PICKLED_BYTES, _PICKLED_KIND_BYTES, _NUMBER_BYTES = 96, 256, 11
# No character of a string, or of a nest, takes more in a pickle.
_PICKLED_CHARACTER_BYTES = 5
# The most that an archive takes besides its pickle and storages.
SMALL_MEMBERS_BYTES = 7 * (MEMBER_BYTES + 2 * len(TOP) + 128)


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path` without the elements of its tensors, in the layout of torch 2.13.

    Each tensor has a storage of its own, in the order of `spec`.

    Args:
        fd: the empty file.

    Raises TargetError for what torch cannot hold, or a nest that does not fit the tensors; OSError if it cannot be
    written.
    """
    specs = spec.specs
    structure.check_names(path, [*specs.names, *spec.strings])
    pickle = dumps(_root(spec, path))
    strings = dict(spec.strings)
    own = json.dumps({"pickle_crc": crc32(pickle), "strings": strings}).encode() if NEST in strings else None
    sizes = [specs.kinds[kind].size_bytes for kind in specs.kind_ids]
    starts, digest = write_archive(fd, pickle, sizes, own)
    tensors = TensorTable(path)
    kinds = [tensors.kind(kind) for kind in _kinds(spec)]
    for name, kind, start in zip(specs.names, specs.kind_ids, starts):
        tensors.add(name, kinds[kind], start)
    return Manifest(path, NAME, tensors, strings, header_digest=digest)


def write_archive(
    fd: int, pickle: bytes, sizes: Sequence[int], own_record: bytes | None = None
) -> tuple[list[int], HeaderDigest]:
    """Write an archive without the elements of its storages; return where each begins, 0 for an empty one.

    Args:
        fd: the empty file.
        sizes: of the storages in bytes, whose keys are their numbers.
        own_record: what is kept beside them (`OWN_RECORD`).
    """
    members, writer = list[Placed](), structure.HeaderDigestWriter(fd)

    def add(name: str, content: bytes) -> None:
        member = placed(name, len(content), members[-1].end if members else 0, crc32(content))
        writer.add(member.header_start, local_header(member) + content + descriptor(member))
        members.append(member)

    for name, content in first_members(pickle).items():
        add(name, content)
    starts = []
    for number, size_bytes in enumerate(sizes):
        member = placed(f"data/{number}", size_bytes, members[-1].end)
        writer.add(member.header_start, local_header(member))
        if size_bytes:
            writer.add(member.payload_start + size_bytes, descriptor(member))
        members.append(member)
        starts.append(member.payload_start if size_bytes else 0)
    if own_record is not None:
        add(OWN_RECORD, own_record)
    add("version", b"3\n")
    add(".data/serialization_id", _identity(pickle))
    writer.add(members[-1].end, ends(members, members[-1].end))
    return starts, writer.finish()


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for tensors that torch cannot hold."""
    specs = spec.specs
    require_types(specs, _HOLDER, "")
    if NEST in spec.strings:
        _root(spec, "")
    dimensions = [2 * len(kind.shape) * _NUMBER_BYTES for kind in specs.kinds]
    of_tensors = sum(
        MEMBER_BYTES + 2 * (len(TOP) + 16) + _PICKLED_BYTES + 4 * len(name) + dimensions[kind]
        for name, kind in zip(specs.names, specs.kind_ids)
    )
    of_strings = sum(_string_bytes(name, text) for name, text in spec.strings.items())
    of_kinds = _PICKLED_KIND_BYTES * (len(specs.kinds) + 1)
    return specs.size_bytes + of_tensors + of_strings + of_kinds + SMALL_MEMBERS_BYTES + ENDS_BYTES


def _string_bytes(name: str, text: str) -> int:
    """Return the largest size of a string in the pickle, and in the record beside a nest."""
    recorded_bytes = len(json.dumps(name)) + len(json.dumps(text)) + 16
    return _PICKLED_CHARACTER_BYTES * (len(name) + len(text) + 16) + recorded_bytes


def _root(spec: ShardSpec, path: str) -> Value:
    """Return the tree that the file is a pickle of. Raises TargetError if there is none."""
    specs = spec.specs
    require_types(specs, _HOLDER, path)
    kinds = list(_kinds(spec))
    leaves = {
        name: WrittenTensor(str(index), kinds[kind])
        for index, (name, kind) in enumerate(zip(specs.names, specs.kind_ids))
    }
    return rebuilt(leaves, spec.strings, path)


def _kinds(spec: ShardSpec) -> Iterator[TensorType]:
    """Yield the pickled form of each kind of tensors."""
    return (kind.unplaced for kind in spec.specs.kinds)


def _identity(pickle: bytes) -> bytes:
    """Return digits that tell files of different tensors, as torch gives each file."""
    digest = int.from_bytes(hashlib.blake2b(pickle).digest(), "little")
    return str(digest)[-_ID_DIGITS:].zfill(_ID_DIGITS).encode()


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Put the CRC-32 of every member behind its payload and into the directory.

    There is no place in it for the sums of tensors; members always have theirs, so `crc` changes nothing.
    """
    file = SourceFile(path, fd)
    members = archive.Archive(file).members()
    start, listed, _ = archive.Archive(file).directory()
    directory = bytearray(listed)
    for offset, member, member_crc in zip(archive.entries(listed), members.values(), _sums(file, members)):
        directory[offset + archive.ENTRY_CRC_AT : offset + archive.ENTRY_CRC_AT + len(member_crc)] = member_crc
        if member.size_bytes:
            structure.write_all(fd, member_crc, member.offset_bytes + member.size_bytes + archive.DESCRIPTOR_CRC_AT)
    structure.write_all(fd, bytes(directory), start)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every member of the file has a checksum. Raises ChecksumError if one does not fit.

    torch can be told to leave them out; then they are 0. Files of the older layout have none.
    """
    with structure.opened(path) as file:
        return archive.is_archive(file.read(0, 4)) and check_members(file, archive.Archive(file).members(), on_bytes)


def check_members(file: SourceFile, members: Mapping[str, archive.Member], on_bytes: OnBytes) -> bool:
    """Tell whether every member of an archive has a checksum. Raises ChecksumError if one does not fit.

    Args:
        on_bytes: told how many bytes have just been read.
    """
    if any(member.size_bytes and not member.crc for member in members.values()):
        return False
    for (name, member), crc in zip(members.items(), _sums(file, members, on_bytes)):
        if int.from_bytes(crc, "little") != member.crc:
            raise ChecksumError(
                "a member of a shard does not fit its own checksum: it is damaged",
                expected=f"CRC-32 {member.crc:08x}, as the directory says",
                got=f"{int.from_bytes(crc, 'little'):08x}",
                where=f"{file.path}, byte {member.offset_bytes}, member {name!r}",
                remedy="copy it again, or use another replica",
            )
    return True


def _sums(file: SourceFile, members: Mapping[str, archive.Member], on_bytes: OnBytes = uncounted) -> Iterator[bytes]:
    """Yield the CRC-32 of each member's payload, as it is written."""
    for member in members.values():
        span = member.offset_bytes, member.offset_bytes + member.size_bytes
        yield structure.crc32_of(file, span, on_bytes=on_bytes).to_bytes(4, "little")

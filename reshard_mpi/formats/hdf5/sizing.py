"""The size that a native shard has at most, with the structure that the HDF5 library makes; computed without it.

How much space the library leaves unused depends on the order of what it creates. The numbers here are measured upper
bounds for files as `writing` makes them; `tests/runs/test_room.py` compares them with real files.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from reshard_mpi.formats.hdf5 import index, schema
from reshard_mpi.formats.specs import ShardSpec

# From this size on payloads are aligned; file systems share blocks between offsets that are multiples of 4096, and
# smaller payloads are not worth the gaps.
ALIGNED_FROM_BYTES = 65536
ALIGNMENT_BYTES = 4096
# Structure is written in blocks of this size: the default of 2 KiB spreads it all over the file.
STRUCTURE_BLOCK_BYTES = 16384

# The superblock, the root, the reserved groups and texts, and the unused rest of blocks.
_FILE_BYTES = 4 * STRUCTURE_BLOCK_BYTES
# The header of a dataset with its attributes, and its entry in its group; each dimension is in three of its messages.
_TENSOR_BYTES = 380
_DIMENSION_BYTES = 36
# A group, and the heap and tree to which its links go when they no longer fit its header.
_GROUP_BYTES = 320
_LINKS_IN_HEADER = 8
_HEAP_AND_TREE_BYTES = 2560
# A long name may begin a new block of the heap, up to twice as large as needed.
_LONG_NAME_BYTES = 256
# The attribute with a tensor's name where no link can have that name.
_NAME_ATTRIBUTE_BYTES = 80
_SUM_BYTES = 4


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the size that the shard of `spec` has at most."""
    structure_bytes = _FILE_BYTES + len(spec.identity.strategy.encode(errors="surrogatepass"))
    structure_bytes += sum(map(_quoted_bytes, (*spec.strings, *spec.strings.values())))
    specs = spec.specs
    structure_bytes += _names_bytes(tuple(specs.names))
    payload_bytes = dimensions = misaligning = aligned = 0
    for number, count in Counter(specs.kind_of).items():
        kind = specs.kinds[number]
        payload_bytes += count * kind.size_bytes
        dimensions += count * len(kind.global_shape)
        aligned += count * (kind.size_bytes >= ALIGNED_FROM_BYTES)
        misaligning += count * bool(kind.size_bytes % ALIGNMENT_BYTES)
    tensor_bytes = _TENSOR_BYTES + (_SUM_BYTES if spec.with_sums else 0)
    structure_bytes += tensor_bytes * len(spec.tensors) + _DIMENSION_BYTES * dimensions
    # There is a gap before an aligned payload where the one before it does not end at a multiple of the alignment.
    gaps = min(aligned, misaligning + structure_bytes // STRUCTURE_BLOCK_BYTES)
    return payload_bytes + structure_bytes + gaps * (ALIGNMENT_BYTES - 1) + index.size_at_most_bytes(spec)


# The targets of a stage hold tensors of the same names.
@lru_cache(maxsize=2)
def _names_bytes(names: tuple[str, ...]) -> int:
    """Return the space for names: in the list of contents, as links of groups, and as attributes."""
    size_bytes = sum(map(_quoted_bytes, names))
    links: Counter[schema.Route] = Counter()
    groups: set[schema.Route] = {(schema.RESERVED,), (schema.RESERVED, schema.ESCAPED)}
    for name, route in schema.routes(names).items():
        size_bytes += _link_bytes(route[-1])
        if route[0] == schema.RESERVED:
            size_bytes += _NAME_ATTRIBUTE_BYTES + _encoded_bytes(name)
        groups.update(route[:depth] for depth in range(1, len(route)))
        links[route[:-1]] += 1
    for group in groups:
        size_bytes += _GROUP_BYTES + _link_bytes(group[-1])
        links[group[:-1]] += 1
    return size_bytes + _HEAP_AND_TREE_BYTES * sum(count > _LINKS_IN_HEADER for count in links.values())


def _quoted_bytes(text: str) -> int:
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return _encoded_bytes(text) * (1 if plain else 6) + 3


def _link_bytes(name: str) -> int:
    """Return the space of a link of that name, in a heap or a header."""
    length_bytes = _encoded_bytes(name)
    return length_bytes + length_bytes // 4 + (length_bytes if length_bytes > _LONG_NAME_BYTES else 0)


def _encoded_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))

"""Write all of a `.distcp` file but the elements (`reserve`, `seal`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from reshard_mpi.errors import ShardError, TargetError, UsageError
from reshard_mpi.formats import structure
from reshard_mpi.formats.dcp import file_layout
from reshard_mpi.formats.dcp.file_layout import ItemLayout, Keys, TensorLeaf, flattened, tensors_in
from reshard_mpi.formats.dcp.items import Common, locate_items
from reshard_mpi.formats.dcp.metadata import INDEX
from reshard_mpi.formats.dcp.reader import NAME, wanted_in
from reshard_mpi.formats.manifest import Manifest, ShardSpec, Specs
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.protocol import NO_SUMS, OnBytes, uncounted
from reshard_mpi.formats.tensor_table import TensorTable
from reshard_mpi.formats.torch import check_members
from reshard_mpi.formats.torch.archive import Archive
from reshard_mpi.formats.torch.pickler import rebuilt, require_types
from reshard_mpi.text import KIB

_HOLDER = "a torch distributed checkpoint"
# Tensors in objects, such as betas, lie in the metadata as well.
_MOST_IN_OBJECT_BYTES = 64 * KIB


def file_name(target_rank: int, targets: int, prefix: str) -> str:
    """Return what torch calls the file of a rank; a prefix of the user's has no place in it."""
    return f"__{target_rank}_0.distcp"


def size_at_most_bytes(spec: ShardSpec, *, crc: bool = False) -> int:
    """Return the largest size of the file of `spec`. Raises TargetError for tensors that torch cannot hold."""
    require_types(spec.specs, _HOLDER, "")
    specs = spec.specs
    _require_small(entries_of([*specs.names, *spec.written_by_others], spec.strings, ""), specs, "")
    return file_layout.size_at_most_bytes(spec)


def reserve(fd: int, path: str, spec: ShardSpec) -> Manifest:
    """Write the file `path`: an item for each tensor, in the order of `spec`, and a record of them behind.

    Args:
        fd: the empty file.

    Raises TargetError for what torch cannot hold, or strings from which its objects cannot be made.
    """
    specs, strings = spec.specs, dict(spec.strings)
    structure.check_names(path, [*specs.names, *strings])
    require_types(specs, _HOLDER, path)
    _require_small(entries_of([*specs.names, *spec.written_by_others], strings, path), specs, path)
    layouts = [file_layout.of_tensor(kind) for kind in specs.kinds]
    return Manifest(path, NAME, write_items(fd, path, specs, strings, lambda _, kind: layouts[kind]), strings)


# Returns the layout of an item of a name and a number of a kind.
LayoutOf = Callable[[str, int], ItemLayout]


def write_items(fd: int, path: str, specs: Specs, strings: dict[str, str], layout_of: LayoutOf) -> TensorTable:
    """Write items without their payloads to an empty file, and the record behind them; return where payloads lie."""
    tensors, writer, end = TensorTable(path), structure.HeaderDigestWriter(fd), 0
    kinds = [tensors.kind(kind) for kind in specs.kinds]
    for name, kind in zip(specs.names, specs.kind_ids):
        item = layout_of(name, kind)
        start = item.start_behind(end)
        payload_start = start + len(item.head)
        writer.add(start, item.head)
        writer.add(payload_start + item.payload_bytes, item.tail)
        tensors.add(name, kinds[kind], payload_start)
        end = start + item.length_bytes
    writer.add(end, file_layout.footer_of(tensors, strings))
    writer.finish()
    return tensors


def _require_small(entries: Iterable[Entry], specs: Specs, path: str) -> None:
    """Raise TargetError for a tensor in an object that is large, or cut: the metadata is to have all of it."""
    kind_of = dict(zip(specs.names, specs.kind_ids))
    for name, _, value in entries:
        for tensor in tensors_in(value) if type(value) is not TensorLeaf else ():
            kind = specs.kinds[kind_of[tensor]] if tensor in kind_of else None
            if kind is not None and (kind.size_bytes > _MOST_IN_OBJECT_BYTES or kind.shape != kind.whole_shape):
                raise TargetError(
                    f"torch keeps {name!r} as one object, and a tensor in it is large or cut",
                    expected=f"tensors of {_MOST_IN_OBJECT_BYTES} bytes at most, whole on each rank",
                    got=f"{tensor!r} {list(kind.shape)} of {list(kind.whole_shape)}",
                    where=path,
                    remedy="save a list or a dictionary in place of a tuple or an object",
                )


def locate_own(path: str) -> Manifest:
    """Find the tensors of a file that this program has written. Raises ShardError if it is another one, or damaged."""

    def layouts(tensors: TensorTable) -> LayoutOf:
        of_kinds = [file_layout.of_tensor(kind) for kind in tensors.kinds]
        return lambda _, kind: of_kinds[kind]

    footer = read_items(path, layouts)
    return Manifest(path, NAME, footer.tensors, footer.strings)


def read_items(path: str, layouts: Callable[[TensorTable], LayoutOf]) -> file_layout.Footer:
    """Return the items that the record of a file lists, as `write_items` wrote them. Raises ShardError if not so."""
    with structure.opened(path) as file:
        own_footer = file_layout.read_footer(file)
        tensors, end = own_footer.tensors, 0
        layout_of = layouts(tensors)
        items = [layout_of(*named) for named in zip(tensors, tensors.kind_ids)]
        spans, parts = list[structure.Span](), list[bytes]()
        for start, item in zip(tensors.offsets, items):
            head_start, tail_start = start - len(item.head), start + item.payload_bytes
            if head_start < end or tail_start + len(item.tail) > own_footer.end:
                break
            end = tail_start + len(item.tail)
            spans += ((head_start, start), (tail_start, end))
            parts += (item.head, item.tail)
        unlike = (number for number, part in enumerate(structure.contents(file, spans)) if part != parts[number])
        misplaced = next(unlike, len(parts)) // 2
    if misplaced < len(tensors):
        raise ShardError(
            f"{list(tensors)[misplaced]!r} is not where its file says",
            expected="an item of its type and shape",
            got="something else",
            where=f"{path}, byte {tensors.offsets[misplaced] - len(items[misplaced].head)}",
        )
    return own_footer


def read_back(meant: Manifest) -> None:
    """Look at the structure of a file that was just written. Raises ShardError if it is not what was meant."""
    structure.require_as_written(locate_own(meant.path), meant)


def seal(fd: int, path: str, sums: Mapping[str, int] = NO_SUMS, *, crc: bool = False) -> None:
    """Do nothing: all but payloads is there, and there is no place for what depends on them.

    Raises UsageError for `crc`.
    """
    if crc:
        raise UsageError("a .distcp file has no checksum of its own", expected="no --crc", got="--crc", where=path)


# The name of an entry of a checkpoint, its path, and a `TensorLeaf` or an object.
Entry = tuple[str, Keys, Value]


def entries_of(names: Sequence[str], strings: Mapping[str, str], where: str) -> list[Entry]:
    """Return the entries of a checkpoint of these tensors and strings.

    Tensors in objects have entries of their own besides, for this program. Raises TargetError if the strings do not
    fit the tensors, or two entries have the same name.
    """
    root = rebuilt({name: TensorLeaf(name) for name in names}, strings, where)
    entries: list[Entry] = []
    met: set[str] = set()
    values = [*flattened(root)]
    objects = [value for _, value in values if type(value) is not TensorLeaf]
    values += [((name,), TensorLeaf(name)) for value in objects for name in tensors_in(value)]
    for path, value in values:
        name = ".".join(map(str, path))
        if type(value) is TensorLeaf and value.name != name:
            name, path = value.name, (value.name,)
        if name in met:
            raise TargetError(
                "two entries have the same name when their keys are joined by dots, as torch does",
                got=repr(name),
                where=where,
                remedy="choose another format with --to",
            )
        met.add(name)
        entries.append((name, path, value))
    return entries


def locate(path: str, like: Manifest | None = None) -> Manifest:
    """Find the pieces of tensors in a file, by its footer, or by the metadata beside it.

    Those that others have written are called by their places too, since a file may have several of a tensor. Raises
    ShardError if it is damaged, or nothing says what it holds.
    """
    if _is_own(path):
        return locate_own(path)
    wanted = [item for item in wanted_in(path) if item.kind is not None]
    tensors = TensorTable(path)
    if wanted:
        located = locate_items(path, wanted, Common())
        for key, number in located.numbers.items():
            kind, start = located.tensors.kind_ids[number], located.tensors.offsets[number]
            if number in located.tensors.locations:
                tensors.locations[len(tensors)] = located.tensors.locations[number]
            tensors.add(f"{key.name} {list(key.offsets or ())}", tensors.kind(located.tensors.kinds[kind]), start)
    return Manifest(path, NAME, tensors)


def check_crc(path: str, on_bytes: OnBytes = uncounted) -> bool:
    """Tell whether every item of a file has checksums. Raises ShardError if one does not fit.

    What this program writes has none, nor has the metadata.
    """
    if Path(path).name == INDEX or _is_own(path):
        return False
    wanted = wanted_in(path)
    with structure.opened(path) as file:
        members = (Archive(file, item.offset_bytes, item.length_bytes).members() for item in wanted)
        checked = [check_members(file, of_item, on_bytes) for of_item in members]
    return bool(checked) and all(checked)


def _is_own(path: str) -> bool:
    with structure.opened(path) as file:
        return file_layout.has_footer(file)

"""Find out how a checkpoint is quantized, and place the companions of its weights (`with_quantization`).

Its configuration says so: that of the model (`config.json`, or the file of `--config`), one of the quantizer alone, or
the text that files of ranks carry. Shapes never do: 576 rows and 5 scales fit every block from 116 to 143.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import excerpt
from reshard_mpi.errors import ReshardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.manifest import NEST, Manifest
from reshard_mpi.formats.tensor_table import ChunkedTensors, TensorEntry, TensorTable, TensorType
from reshard_mpi.quantization.weights import QuantizedWeight, QuantizedWeights, StoredWeight
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout, whole_shape_of_parts
from reshard_mpi.text import MIB

# Files beside a checkpoint that say how it is quantized.
_FILES = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")
_MOST_BYTES = 64 * MIB
_MOST_DIMENSIONS = 8
_MOST_DIGITS = 10


def with_quantization(source: SourceCheckpoint) -> SourceCheckpoint:
    """Return the checkpoint; if it is quantized, its strategy also lists the companions of its weights.

    Raises SourceError for a configuration that cannot be read, StrategyError or SourceError where it contradicts the
    checkpoint, LayoutError where the strategy cuts a weight within a block.
    """
    configuration = _configuration(source)
    if configuration is None:
        return source
    from reshard_mpi.quantization.grouping import quantized_weights

    content, where = configuration
    source.is_told_by_config = where == source.files.config
    shards = [manifest for rank in sorted(source.files.by_rank) if (manifest := source.find(rank)) is not None]
    kinds = _kinds_of_parts(shards)
    stated = _StoredNumbers(shards)
    of_parts = quantized_weights(content, kinds, where, stated.of)
    if not of_parts:
        return source
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    if source.strategy.world_size == 1:
        checked = map(stated.whole_if_in_order, of_parts)
        weights = {weight.stored: StoredWeight(weight, kinds[weight.stored].shape) for weight in checked}
        source.quantization = QuantizedWeights(text, weights, where)
        return source
    whole = {weight.stored: _whole_shape(source, weight.stored, kinds[weight.stored]) for weight in of_parts}
    whole_kinds = {name: kind._replace(shape=shape) for name, kind, shape in _whole_kinds(of_parts, kinds, whole)}
    stated_whole = {
        companion.name: _stated_whole(source, weight, stated.of(companion.name), whole[weight.stored])
        for weight in of_parts
        if (companion := weight.companion("shape")) is not None
    }
    of_wholes = quantized_weights(content, {**kinds, **whole_kinds}, where, stated_whole.get)
    checked = map(stated.whole_if_in_order, of_wholes)
    weights = {weight.stored: StoredWeight(weight, whole[weight.stored]) for weight in checked}
    source.quantization = QuantizedWeights(text, weights, where)
    source.strategy = source.quantization.placing(source.strategy, "source")
    if source.recorded_strategy is not None:
        source.recorded_strategy = source.quantization.placing(source.recorded_strategy, "source")
    return source


def _configuration(source: SourceCheckpoint) -> tuple[Mapping[str, Any], str] | None:
    """Return how a checkpoint is quantized, and the file that says so; None if nothing says that it is."""
    for content, where in _contents(source):
        if content is not None:
            from reshard_mpi.quantization.schemes import quantization_config_of

            said = quantization_config_of(content)
            if said is not None:
                return said, where
    return None


def _contents(source: SourceCheckpoint) -> Iterator[tuple[Mapping[str, Any] | None, str]]:
    """Yield the contents of files that may say how a checkpoint is quantized, and these; what counts most first."""
    files = source.files
    if files.config is not None:
        yield _content(Path(files.config)), files.config  # who reads it for a map says what is wrong with it
    first = next(filter(None, map(source.find, sorted(files.by_rank))), None)
    if first is not None and first.strings:
        yield {name: _value(text) for name, text in first.strings.items() if name != NEST}, first.path
    own = Path(files.path)
    folders = (own if source_files.is_folder(own) else own.parent, Path(next(iter(files.by_rank.values()))[0]).parent)
    for path in (folder / name for folder in dict.fromkeys(folders) for name in _FILES):
        yield _content(path), str(path)


def _value(text: str) -> Any:
    """Return a text of a file; if it is a number, as other programs write `bits`, that number."""
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < _MOST_DIGITS else text


def _content(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a file of JSON; None if there is none, or if it is no dictionary."""
    if not source_files.is_file(path):
        return None
    try:
        size_bytes = source_files.version_of(path).size_bytes  # whose memory is taken before it is read
        content = json.loads(source_files.first_bytes(path, min(size_bytes, _MOST_BYTES)))
    except (ValueError, RecursionError, OSError, ReshardError):
        return None
    return content if isinstance(content, dict) else None


def _kinds_of_parts(shards: list[Manifest]) -> dict[str, TensorType]:
    """Return the types of all tensors, with the shape of one part of each."""
    kinds: dict[str, TensorType] = {}
    for manifest in shards:
        for name in manifest.tensors:
            if name not in kinds:
                kinds[name] = manifest.tensors.kind_named(name).unplaced
    return kinds


def _whole_shape(source: SourceCheckpoint, name: str, kind: TensorType) -> tuple[int, ...]:
    """Return the shape of a whole tensor whose parts ranks hold. Raises LayoutError if the parts do not tell it."""
    placements = source.strategy.find(name)
    parts = {}
    for rank in sorted(source.files.by_rank):
        manifest = source.find(rank)
        if manifest is not None and name in manifest.tensors:
            near = source.strategy.of_rank(placements, rank)
            if near is None:
                return kind.shape  # no strategy places it: it is whole on every rank
            own = manifest.tensors.kind_named(name)
            if own.global_shape is not None:
                return own.global_shape
            parts[rank] = own.shape
            if not near.ceil:
                return whole_shape_of_parts(near, parts)
    return whole_shape_of_parts(placements[0], parts)


def _whole_kinds(
    weights: tuple[QuantizedWeight, ...], kinds: Mapping[str, TensorType], whole: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, TensorType, tuple[int, ...]]]:
    """Yield the tensors of quantized weights with the shapes that they have whole, if companions follow the weights."""
    for weight in weights:
        yield weight.stored, kinds[weight.stored], whole[weight.stored]
        for companion in weight.companions:
            kind = kinds[companion.name]
            shape = tuple(
                length if relation is None else relation.length(whole[weight.stored][relation.dim])
                for length, relation in zip(kind.shape, companion.dims or (None,) * len(kind.shape))
            )
            yield companion.name, kind, shape


def _stated_whole(
    source: SourceCheckpoint, weight: QuantizedWeight, stated: tuple[int, ...] | None, whole: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the shape of a whole packed weight. Its last part tells where it ends, as the last word may not be full.

    Args:
        stated: what one of its parts states of itself.
        whole: the shape of the whole tensor with its elements.
    """
    name, companion, bits = weight.stored, weight.companion("shape"), weight.scheme.bits
    if stated is None or companion is None or len(stated) != len(whole):
        return stated
    placements = source.strategy.find(name)
    for rank in sorted(source.files.by_rank):
        manifest = source.find(rank)
        if manifest is None or name not in manifest.tensors or companion.name not in manifest.tensors:
            continue
        near = source.strategy.of_rank(placements, rank)
        if near is None:
            return stated
        box = Layout(near, whole).box(rank)
        own = _StoredNumbers([manifest]).of(companion.name)
        if own is not None and box.shape[-1] and box.stop[-1] == whole[-1]:
            return (*whole[:-1], box.start[-1] * 32 // bits + own[-1])
    return (*whole[:-1], whole[-1] * 32 // bits)


class _StoredNumbers:
    """Reads the numbers that tensors beside a packed weight hold: its shape, the groups of its columns."""

    def __init__(self, shards: list[Manifest]) -> None:
        self._shards = shards

    def of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that a tensor states; None if there is no such tensor, or it is none."""
        tensors = next((shard.tensors for shard in self._shards if name in shard.tensors), None)
        entry = None if tensors is None else _entry(tensors, name)
        if entry is None or len(entry.shape) != 1 or entry.shape[0] > _MOST_DIMENSIONS or "int" not in entry.dtype.name:
            return None
        with Files() as files:
            content = excerpt(files, entry, Box.whole(entry.shape))
        return tuple(numbers(content, entry.dtype))

    def whole_if_in_order(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return a weight as one that is never cut, if its columns are in order though their order is to be any.

        compressed-tensors says so by groups of -1. A part of it would have the scales of all groups, and begin anew
        with the first.
        """
        groups = weight.companion("group_index") if weight.scheme.act_order else None
        tensors = next((shard.tensors for shard in self._shards if groups and groups.name in shard.tensors), None)
        entry = None if groups is None or tensors is None else _entry(tensors, groups.name)
        if entry is None or not entry.size_bytes:
            return weight
        with Files() as files:
            (first,) = numbers(excerpt(files, entry, Box((0,), (1,))), entry.dtype)
        return weight if first >= 0 else weight._replace(scheme=weight.scheme._replace(kind="whole"))


def _entry(tensors: TensorTable, name: str) -> TensorEntry | None:
    """Return where a tensor lies; None if it is listed in several pieces."""
    if not isinstance(tensors, ChunkedTensors):
        return tensors[name]
    number = tensors.index_by_name[name]
    chunks, numbers_in_files = tensors.chunk_lists[tensors.chunk_list_ids[number]], tensors.numbers[number]
    if len(chunks) != 1:
        return None
    ((_, in_file),), (own,) = chunks, numbers_in_files
    dtype, shape, *_ = in_file.kinds[in_file.kind_ids[own]]
    return TensorEntry(name, dtype, shape, in_file.source(own))

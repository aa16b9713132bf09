"""Find the step counters of shards, by which they are of one moment (`moment_counters`, `plain_counters`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from math import prod
from typing import Any

from reshard_mpi.formats.manifest import NEST, Manifest, TensorSpec, nest_root
from reshard_mpi.formats.tensor_table import ChunkedTensors
from reshard_mpi.planning.rank_plan import ReadItem, SharedFact, TensorPlan
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.state_names import STATE_KEY
from reshard_mpi.text import KIB

# Costs next to nothing to read from every opened shard. Of a larger tensor, as many bytes tell shards apart.
SMALL_BYTES = 64 * KIB
# How MindSpore records the moment of a checkpoint: ModelCheckpoint's append_info, and the optimizers' step counter.
MOMENTS = ("epoch_num", "step_num", "global_step")
# The last words of names of other step counters, if these are single numbers: torch's optimizers have one for each
# parameter (`state.w.step`), Megatron `iteration`.
_COUNTERS = frozenset(
    (
        "step",
        "steps",
        "global_step",
        "global_steps",
        "step_num",
        "iteration",
        "iterations",
        "iter",
        "epoch",
        "epoch_num",
    )
)
_COUNTER_ENDINGS = tuple(_COUNTERS)
# Counters of all the run, wherever they are; and the count that an optimizer of torch has of each parameter.
_OF_RUN = ("global_step", "global_steps", "iteration")
_STEP = re.compile(rf"(?:^|[./]){STATE_KEY}[./].+[./]step$")
# Values of a dictionary that are looked at.
_MAX_LOOKED_AT = 256
# Names compared, the shortest paths first: if these agree, all are of one moment.
_MAX_COUNTERS = 16


def is_moment(name: str, shape: Shape = ()) -> bool:
    """Tell whether a tensor is a step counter. shape: of the whole tensor."""
    return name in MOMENTS or (
        name.endswith(_COUNTER_ENDINGS)
        and re.split(r"[./]", name)[-1] in _COUNTERS
        and all(length == 1 for length in shape)
    )


def counters_among(names: Iterable[str]) -> set[str]:
    """Return the names to compare as step counters, if their shapes are shapes of counters."""
    named = sorted((name for name in names if is_moment(name)), key=lambda name: (len(re.split(r"[./]", name)), name))
    return {*named[:_MAX_COUNTERS], *(name for name in named if name in MOMENTS)}


def moment_counters(
    manifests: Mapping[int, Manifest], is_listed: Callable[[str], bool]
) -> Iterator[tuple[str, TensorPlan]]:
    """Yield each step counter of the opened shards once: the path of a shard that has it, and how to read it there.

    Args:
        is_listed: tells whether the source strategy places a tensor; then what has dimensions may be a part of more.
            `agreement_checks` compares the counters of the shards opened for one target, `require_one_checkpoint` those
            of targets.
    """
    yielded: set[str] = set()
    for rank, manifest in manifests.items():
        tensors = manifest.tensors
        unreadable = tensors.unreadable.keys() if isinstance(tensors, ChunkedTensors) else ()
        for name in sorted(counters_among(tensors) - yielded.union(unreadable)):
            entry = tensors[name]
            is_whole = not entry.shape or not is_listed(name) or (name in MOMENTS and prod(entry.shape) == 1)
            if is_whole and is_moment(name, entry.shape) and 0 < entry.size_bytes <= SMALL_BYTES:
                yielded.add(name)
                box = Box.whole(entry.shape)
                spec, item = TensorSpec(name, entry.dtype, entry.shape, box), ReadItem(rank, entry, box, box)
                reads: tuple[ReadItem, ...] = (item,)
                if tensors.in_pieces:
                    from reshard_mpi.planning.chunk_reads import ChunkReads  # which only such checkpoints need

                    reads = ChunkReads(0, 1).reads(item, tensors)
                yield manifest.path, TensorPlan(spec, reads)


def plain_counters(manifests: Iterable[Manifest], *, are_mapped: bool = False) -> tuple[SharedFact, ...]:
    """Return the step counters of shards that are no tensors, each value once: texts, and numbers beside a model.

    Args:
        are_mapped: whether a map has made the shards, so that numbers in names may be others' than in the source.
    """
    path_of = {text: manifest.path for manifest in manifests for text in manifest.strings.items()}
    counters: dict[tuple[str, str], str] = {}
    for text, path in path_of.items():
        values: list[tuple[Any, Any]] = [text]
        if text[0] == NEST:
            with contextlib.suppress(ValueError, RecursionError):  # a damaged nest is told of where it is made again
                values = [*_plain_values(nest_root(text[1]), are_mapped=are_mapped)]
        own: dict[str, set[str]] = {}
        for name, value in values:
            if type(name) is str and type(value) in (int, float, str) and is_moment(name):
                own.setdefault(name, set()).add(str(value))
        for name, distinct in own.items():
            if len(distinct) == 1:  # else keys like 0 and "0" have one name here
                counters.setdefault((name, distinct.pop()), path)
    return tuple(SharedFact(name, value, path) for (name, value), path in counters.items())


def _plain_values(root: Any, *, are_mapped: bool) -> Iterator[tuple[Any, Any]]:
    """Yield values of a nest, by dotted keys: all at the root, counters of the run, and steps of a few parameters."""
    from reshard_mpi.formats.nest import pairs_of

    for key, value in pairs_of(root):
        yield key, value
        for inner, below in islice(pairs_of(value), _MAX_LOOKED_AT):
            if inner in _OF_RUN:
                yield f"{key}.{inner}", below
            states = pairs_of(below) if inner == STATE_KEY and not are_mapped else ()
            for parameter, own in islice(states, _MAX_COUNTERS):
                yield from ((f"{key}.{inner}.{parameter}.{kind}", count) for kind, count in pairs_of(own))


def steps_apart(facts: Iterable[SharedFact]) -> Iterator[str]:
    """Yield a warning if two shards have counts of an optimizer's steps, and none of these is the same in both.

    Stages have parameters of their own. Some may have been trained for fewer steps, as experts that are not used.
    """
    counts: dict[str, set[str]] = {}
    for fact in facts:
        if _STEP.search(fact.name):
            counts.setdefault(fact.path, set()).add(fact.value)
    for (path, own), (other_path, others) in pairwise(counts.items()):
        if own.isdisjoint(others):
            yield (
                f"{path} counts {min(own)} steps of its parameters, and {other_path} {min(others)} of its own: unless"
                " the training has begun with one of them later, they are of two saves"
            )
            return

"""Check that shards and targets are of one checkpoint (`require_one_checkpoint`): by counters, texts, names, shapes.

`agreement_checks` lists what is compared of tensors that all opened shards hold whole. The module also tells what of
shards cannot be converted (`left_out_of`), and joins their strings for a target (`CommonStrings`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard_mpi.errors import CoverageError, DisagreementError
from reshard_mpi.formats.locations import Constant
from reshard_mpi.formats.manifest import (
    NEST,
    Manifest,
    TensorSpec,
    common_nest,
    nest_root,
    nest_settings,
    nest_without_order,
    shown_string,
)
from reshard_mpi.groups import grouped
from reshard_mpi.planning.rank_plan import CHOSEN_FILES, Check, RankPlan, ReadItem, SharedFact, StageDigest, TensorPlan
from reshard_mpi.planning.source_flaws import TEXT, PrefixDigest
from reshard_mpi.planning.source_tensors import SourceGroup, SourceTensors
from reshard_mpi.planning.step_counters import MOMENTS, SMALL_BYTES, counters_among, is_moment
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import first_few

# If stages of the target share more tensors than this, targets compare one digest of all of them.
_MAX_COMPARED_BY_NAME = 16
# Things named that one shard holds and that cannot be converted.
_MAX_LEFT_OUT = 8
# Why values that each rank has for itself need not be the same.
OWN = "each rank has its own; one of them was taken"
_DIFFERENT_MOMENTS = "the shards are of different moments"


def agreement_checks(
    tensors: SourceTensors, wanted: Container[str], stage_of: Callable[[int], int], *, same_world: bool
) -> Iterator[Check]:
    """Yield the checks on tensors that every opened shard holds whole. Of a large one only the beginning is compared.

    Args:
        wanted: the names of the tensors that the target holds.
        same_world: whether source and target have as many ranks. Step counters must be equal. Wanted tensors that no
            strategy lists should be, and a difference is reported; with `same_world` they are compared only where
            several stages have them, since each rank keeps its own (random state).
    """
    names = tensors.names if len(tensors.ranks) > 1 else ()
    counters = counters_among(names)
    for name in names:
        group = tensors.group(name)
        counts = name in counters and is_moment(name, group.shape)
        is_compared = (
            name in wanted and not group.listed and not (same_world and len({*map(stage_of, group.ranks)}) == 1)
        )
        if len(group.ranks) < 2 or not (counts or is_compared):
            continue
        # A slice may be all of it, and other ranks' slices empty.
        entries = {rank: entry for rank, entry in tensors.entries(name).items() if entry.shape == group.shape}
        if len(entries) < 2:
            continue
        first = next(iter(entries.values()))
        moment = counts and first.size_bytes <= SMALL_BYTES
        if not (moment or is_compared):
            continue
        box = Box.whole(group.shape)
        start = next(box.blocks(SMALL_BYTES // first.dtype.itemsize_bytes), box)
        reads = tuple(ReadItem(rank, entry, box, start) for rank, entry in entries.items())
        why = _DIFFERENT_MOMENTS if moment else OWN
        yield Check(name, reads, refuse=moment, why=why)


def shared_tensors(
    stages: tuple[int, ...], tensors: Mapping[str, SourceGroup], manifests: Mapping[int, Manifest]
) -> Iterator[SharedFact]:
    """Yield the names of the tensors that `stages` of the target share and, if these are few, their types and shapes.

    Args:
        tensors: those that the stages share, by name.
        manifests: the opened shards, by rank.
    """
    names = sorted(tensors)
    few = len(names) <= _MAX_COMPARED_BY_NAME
    lines = [] if few else [f"{name} {group.dtype} {list(group.shape)}" for name, group in tensors.items()]
    digest = hashlib.sha256("\0".join(sorted(lines)).encode()).hexdigest()
    path = manifests[min(manifests)].path
    yield SharedFact(
        f"tensors of stages {', '.join(map(str, stages))}",
        ", ".join(map(repr, names)) if few else f"{len(names)} tensors, SHA-256 {digest}",
        path,
    )
    for name, group in tensors.items() if few else ():
        yield SharedFact(name, f"{group.dtype} {list(group.shape)}", manifests[group.ranks[0]].path)


def unlisted_beginnings(plan: RankPlan) -> Iterator[TensorPlan]:
    """Yield the plans of the first bytes of tensors that no strategy places, 64 KiB of each at most."""
    groups = plan.tensors.groups
    for number, place in zip(plan.tensors.group_of, plan.tensors.place_in_group) if plan.unlisted else ():
        name = groups[number].names[place]
        if name in plan.unlisted and name not in MOMENTS and groups[number].kind.size_bytes:
            tensor = groups[number].tensor(place)
            spec = tensor.spec
            if not tensor.reads or spec.box != Box.whole(spec.global_shape):
                continue  # a gradient whose sum is not known, which is told; or the target cuts it: all are compared
            item = tensor.reads[0]
            if isinstance(item.source.source, Constant):
                continue  # it is of no rank
            start = next(spec.box.blocks(SMALL_BYTES // spec.dtype.itemsize_bytes))
            yield TensorPlan(
                TensorSpec(spec.name, spec.dtype, spec.global_shape, start), (item._replace(region=start),)
            )


def text_digests(plan: RankPlan, *, of_stages: bool) -> Iterator[PrefixDigest]:
    """Yield digests of the strings of a target, by which it is seen that other targets have others.

    In a nest the order of its tensors counts for nothing.

    Args:
        of_stages: whether the source has several stages, which have texts, tensors and optimizers of their own.
    """
    for name, text in plan.strings.items() if plan.read_ranks else ():
        if of_stages and name != NEST:
            continue
        if name == NEST:
            with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
                text = nest_settings(text) if of_stages else nest_without_order(text)
        yield PrefixDigest(f"{TEXT}{shown_string(name)}", hashlib.sha256(text.encode()).hexdigest(), plan.read_ranks[0])


def differing_stages(digests: Iterable[StageDigest]) -> tuple[int, ...]:
    """Return the target stages whose ranks would not all hold the same parameters, ascending."""
    by_stage = grouped((held.stage, held.digest) for held in digests)
    return tuple(sorted(stage for stage, own in by_stage.items() if len(set(own)) > 1))


def require_same_names(names: Mapping[int, Collection[str]], where: str) -> None:
    """Raise CoverageError for a parameter that one target rank of a stage would hold and another not.

    That happens only if source shards contradict each other.

    Args:
        names: of the parameters that strategies place, by target rank.
    """
    holder_of = {name: rank for rank, rank_names in names.items() for name in rank_names}
    for rank, rank_names in names.items():
        missing = sorted(holder_of.keys() - rank_names)
        if missing:
            other = holder_of[missing[0]]
            raise CoverageError(
                f"no shard opened for target rank {rank} holds {missing[0]!r}, but those for rank {other} do",
                expected="each parameter in all of the shards that should hold a part of it",
                got=f"{len(missing)} only in some of them: {first_few(missing, 3)}",
                where=where,
                remedy="restore the shards that lack it, or list it in the source strategy: then all holders are asked",
            )


def require_same_shapes(placed: Mapping[int, Mapping[str, str]], where: str) -> None:
    """Raise DisagreementError for a parameter that target ranks of a stage would hold with different shapes or types.

    Args:
        placed: by target rank, the type and whole shape of each parameter that strategies place, by name.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, described in placed.items():
        for name, description in described.items():
            other, expected = first.setdefault(name, (rank, description))
            if description != expected:
                raise DisagreementError(
                    f"source shards disagree in the type or shape of {name!r}",
                    expected=f"{expected}, as by the shards opened for target rank {other}",
                    got=f"{description} by those for target rank {rank}",
                    where=where,
                    remedy="use shards of one and the same checkpoint; reshard-mpi inspect shows what they hold",
                )


def require_one_checkpoint(moments: Iterable[SharedFact]) -> None:
    """Raise DisagreementError if shards that different targets opened are of different steps or tensors."""
    first: dict[str, SharedFact] = {}
    for moment in moments:
        other = first.setdefault(moment.name, moment)
        if moment.value != other.value and moment.name == CHOSEN_FILES:
            raise DisagreementError(
                "not all have chosen the same checkpoint in the source",
                expected=other.value,
                got=moment.value,
                where=moment.path,
                remedy="another one has appeared: run again, and choose one with --select while more may come",
            )
        if moment.value != other.value:
            step = is_moment(moment.name)
            raise DisagreementError(
                _DIFFERENT_MOMENTS if step else f"source shards disagree in what targets share: {moment.name!r}",
                expected=f"{other.name!r} = {other.value}, as in {other.path}",
                got=f"{moment.name!r} = {moment.value}",
                where=moment.path,
                remedy="use shards of one and the same " + ("moment" if step else "checkpoint"),
            )


def require_tensors_or_strings(manifests: Mapping[int, Manifest]) -> None:
    """Raise DisagreementError for a name that is a tensor in one of the shards and a string in another."""
    for rank, manifest in manifests.items():
        for name in manifest.strings:
            holder = next((other for other in manifests.values() if name in other.tensors), None)
            if holder is not None:
                raise DisagreementError(
                    f"{name!r} is a tensor in one source shard and a string in another",
                    expected=f"a tensor in all of them, as in {holder.path}, or a string",
                    got=f"a string on rank {rank}",
                    where=manifest.path,
                    remedy="use shards of one and the same checkpoint",
                )


def left_out_of(manifests: Mapping[int, Manifest]) -> Iterator[str]:
    """Yield a warning for things in the opened shards that cannot be converted; one for all shards with the same."""
    alike = grouped((manifest.left_out, manifest) for manifest in manifests.values() if manifest.left_out)
    for left_out, shards in alike.items():
        others = f" and {len(shards) - 1} more shards" if len(shards) > 1 else ""
        more = f"; and {len(left_out) - _MAX_LEFT_OUT} more" if len(left_out) > _MAX_LEFT_OUT else ""
        yield f"left out of {shards[0].path}{others}: {'; '.join(left_out[:_MAX_LEFT_OUT])}{more}"


def require_nothing_left_out(manifests: Mapping[int, Manifest]) -> None:
    """Raise DisagreementError if anything in the opened shards cannot be converted."""
    for warning in left_out_of(manifests):
        raise not_carried(warning, expected="tensors and plain data alone", remedy="save the source without it")


def not_carried(what: str, *, expected: str, remedy: str, where: str = "") -> DisagreementError:
    """Return the error for something in the source that a target would be without, where `strict` wants all of it."""
    return DisagreementError(
        "something in the source cannot be carried to the target",
        expected=f"{expected}, as --strict demands",
        got=what,
        where=where,
        remedy=f"leave out --strict, or {remedy}",
    )


class CommonStrings(NamedTuple):
    """The strings of a target.

    Attributes:
        strings: texts by name.
        ranks: the source ranks that they are taken from.
        notes: one for each string that differs between opened shards.
        apart: by rank, what names of the state of its optimizers begin with that are not in the nest, and why.
    """

    strings: dict[str, str]
    ranks: tuple[int, ...]
    notes: list[str]
    apart: Mapping[int, Mapping[str, str]]

    @classmethod
    def of(cls, manifests: Mapping[int, Manifest], in_order: Sequence[int]) -> CommonStrings:
        """Take the strings of opened shards; where these differ, from the first rank `in_order` that has the string.

        Nests that differ are joined, if they are those of stages.
        """
        strings: dict[str, str] = {}
        notes = []
        nests = {rank: manifests[rank].strings[NEST] for rank in in_order if NEST in manifests[rank].strings}
        common = common_nest(nests.values())
        ranks = {*{text: rank for rank, text in reversed(nests.items())}.values()}  # the first of each text
        if common is not None:
            strings[NEST] = common.text
        for rank in in_order:
            for name, text in manifests[rank].strings.items():
                if name not in strings:
                    strings[name] = text
                    ranks.add(rank)
                elif strings[name] != text and (name != NEST or common is None or not common.is_whole):
                    notes.append(f"{TEXT}{shown_string(name)} of {manifests[rank].path} differs from the one taken")
        apart = {} if common is None else {rank: common.apart.get(text, {}) for rank, text in nests.items()}
        return cls(dict(sorted(strings.items())), tuple(sorted(ranks)), notes, apart)


def numbers_of_stages(
    strings: Mapping[str, str], manifests: Mapping[int, Manifest], stage_of: Callable[[int], int]
) -> Iterator[str]:
    """Yield a warning for an optimizer that stages have alike, if its numbers seem to mean each stage's parameters.

    One of all stages, as this program has cut it, has more numbers than a stage has parameters. Stages that have saved
    optimizers of their own are told by their state, but for one that has none, or zeros only.

    Args:
        strings: those of the target.
        manifests: the opened shards.
    """
    from reshard_mpi.formats.nest import BUFFERS, numbered_in

    try:
        numbered = [*numbered_in(nest_root(strings[NEST]))] if NEST in strings else []
    except (ValueError, RecursionError):
        return
    begins = tuple(begin for begin, _ in numbered)
    of_stages: dict[int, set[str]] = {}
    for rank in sorted(manifests) if numbered else ():
        names = (name for name in manifests[rank].tensors if not name.endswith(BUFFERS))
        of_stages.setdefault(stage_of(rank), set()).update(name for name in names if not name.startswith(begins))
    for begin, numbers in numbered:
        for first, other in pairwise(of_stages.values()):
            if first - other and other - first and numbers <= min(len(first), len(other)):
                yield (
                    f"{begin}param_groups, alike in all stages, is taken for one optimizer: it numbers {numbers}"
                    " parameters, no more than a stage has tensors, so each stage may mean its own"
                )
                break


def unlike_by_group(manifests: Mapping[int, Manifest], in_order: Sequence[int]) -> Iterator[str]:
    """Yield a warning if schedulers have other values by groups of parameters in another one of the opened shards.

    The values kept are those of the first rank `in_order` (see `CommonStrings`), whatever groups the joined optimizers
    have.
    """
    path_of: dict[str, str] = {}  # by distinct nests
    for rank in in_order:
        if NEST in manifests[rank].strings:
            path_of.setdefault(manifests[rank].strings[NEST], manifests[rank].path)
    texts = [*path_of]
    if len(texts) < 2:
        return
    from reshard_mpi.formats.nest import lists_by_group

    try:
        first, *others = [dict(lists_by_group(nest_root(text))) for text in texts]
    except (ValueError, RecursionError, LookupError, TypeError):
        return  # a damaged nest is told of where it is made again
    for text, other in zip(texts[1:], others):
        unlike = [path for path in first if other.get(path, first[path]) != first[path]]
        if unlike:
            yield (
                f"{', '.join(unlike)}: kept as in {path_of[texts[0]]}; {path_of[text]} has other values, by its own"
                " groups of parameters: set them anew if the joined optimizer has groups of both"
            )
            return

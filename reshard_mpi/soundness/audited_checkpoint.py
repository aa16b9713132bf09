"""Open a checkpoint to be audited (`open_audited`), and find faults of its files and of values (`value_findings`).

It is planned as one full checkpoint, which finds all parts of every tensor and proves that they cover it, as for a
transform. Tensors that lack parts do not refuse it, but are named. Values are judged by themselves (NaN, zeros), and by
those of tensors that are their kin (copies, norms far from theirs).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.errors import ChecksumError, DamageError, ReshardError, ShardError, told
from reshard_mpi.formats.dtypes import BY_NAME, FLOATS
from reshard_mpi.formats.locations import paths_of
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import UNREADABLE, parsed
from reshard_mpi.mapping.tensor_kinds import TensorKind, kin_of, kind_of
from reshard_mpi.planning.gradient_joining import gradient_texts, notes_on
from reshard_mpi.planning.rank_choice import Accumulated
from reshard_mpi.planning.rank_plan import RankPlan, TensorPlan, meeting
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.quantization.layouts import FLOATS_8_BIT
from reshard_mpi.quantization.weights import QuantizedWeight
from reshard_mpi.runs.diff import PlannedWhole
from reshard_mpi.runs.outcome import Outcome
from reshard_mpi.runs.planner import LIMITS, Planner
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import ProgressStage
from reshard_mpi.runs.scheduling import assign
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import unravel
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.soundness.content import TensorContent, bound_of, content_of, lowest_of
from reshard_mpi.soundness.findings import Finding, FindingKind
from reshard_mpi.text import KIB, MIB, counted

# How much is read at once; the largest element fits.
_BUFFER_BYTES = MIB
# What is kept of the content of each tensor, in two forms while processes exchange it.
_CONTENT_BYTES = 2 * KIB
# A numpy that is in use, with its library for linear algebra, and tables of small floats: more than it takes to load.
_USED_NUMPY_BYTES = 24 * MIB
# Where an element of a tensor lies, or its first one (None): the source rank, and the path of the file.
PlaceOf = Callable[[str, tuple[int, ...] | None], tuple[int | None, str]]
# The quantized weight that a tensor is stored for, and its role, by its name.
Roles = Mapping[str, tuple[QuantizedWeight, str]]

_WEIGHTS = (TensorKind.MODEL, TensorKind.COPY)
# A smaller share of subnormal values is usual in float16.
_SUBNORMAL_SHARE = 0.1
# Fewer tensors do not tell what is usual among their kin. A norm is unusual that is ten times the median, or a tenth,
# and eight times as far from it as the middle one is.
_LEAST_KIN, _FAR, _SPREADS = 4, 10.0, 8.0
# No step of a training doubles the norm of a weight.
_CHANGED = 2.0
# Types of weights that are quantized. Masks and positions, which layers have alike, are of others.
_QUANTISED = frozenset(("int8", "int4", "uint8", "hifloat8"))
_ADJUSTABLE = frozenset(dtype.name for dtype in FLOATS) | {"complex64", "complex128"}


class AuditedCheckpoint(NamedTuple):
    """A checkpoint that is open to be audited, and the plan of all that it holds."""

    source: SourceCheckpoint
    planner: Planner  # to one full checkpoint in its own names
    plan: RankPlan
    numbers: Mapping[str, int]  # by name, of the tensors that have all their parts
    outcome: Outcome  # notes and warnings on it

    def tensor(self, name: str) -> TensorPlan:
        """Return a tensor that has all its parts."""
        return self.plan.tensors[self.numbers[name]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, also where parts are lacking."""
        return {name: group.kind.shape for group in self.plan.tensors.groups for name in group.names}

    @property
    def roles(self) -> Roles:
        """The roles of tensors that are stored for quantized weights, by name."""
        quantization = self.source.quantization
        return {} if quantization is None else quantization.roles

    def place(self, name: str, element: tuple[int, ...] | None = None) -> tuple[int | None, str]:
        """Return the source rank and the file that hold an element of a tensor, or its first one."""
        reads = self.tensor(name).reads if name in self.numbers else ()
        if element is not None:
            reads = tuple(meeting(reads, Box(element, tuple(index + 1 for index in element))))
        if not reads:
            return None, self.source.files.path
        rank = reads[0].source_rank if self.source.strategy.world_size > 1 else None
        return rank, next(iter(paths_of(reads[0].source.source)), "")

    def flaws(self) -> Iterator[Finding]:
        """Yield the findings on its files, and on how tensors lie in them."""
        yield from (broken(error, name) for name, error in self.plan.holes.items())
        path = self.source.files.path
        for name in self.plan.absent:
            yield Finding(FindingKind.STRUCTURE, name, None, path, "the strategy lists it, and no shard holds it")
        for lost in self.plan.lost:
            if lost.problem:
                yield Finding(FindingKind.STRUCTURE, "", lost.rank, lost.where, lost.problem)
        missing = self.source.missing
        if missing is not None:
            yield Finding(FindingKind.STRUCTURE, "", None, missing.where, str(missing))
        if NEST in self.plan.strings:
            try:
                parsed(self.plan.strings[NEST])
            except UNREADABLE as error:
                detail = f"what it holds beside its tensors cannot be read: {error}"
                yield Finding(FindingKind.STRUCTURE, "", None, path, detail)


def broken(error: ReshardError, name: str = "", rank: int | None = None) -> Finding:
    """Return an error of a file, or of a tensor, as a finding."""
    kind = FindingKind.SUM if isinstance(error, (DamageError, ChecksumError)) else FindingKind.STRUCTURE
    return Finding(kind, name, rank, error.where, told(error))


def open_audited(process: RunProcess, files: ShardFiles) -> AuditedCheckpoint:
    """Open the source of a request, with memory enough to read it.

    Args:
        files: of the source.

    Raises a ReshardError if it cannot be planned.
    """
    request, memory = process.request, process.memory
    governor, purpose = memory.lease().governor, f"auditing {request.source}"
    process.reserve_for_reading(purpose, files.format)
    source = open_source(files, process.read_strategies().source)
    files = source.files  # with what has been noticed while they were opened
    # Partial sums of a step that is not finished differ, and are judged by their mean.
    policy = Policy(replicas=request.replicas, accumulated=Accumulated.MEAN, allows_holes=True)
    planner = Planner(source, unsharded(), policy)
    memory.free_with(planner.forget)
    plan, peak_bytes, notes_on_ranks, warnings, drift = PlannedWhole.of(planner, source, process, purpose)
    peak_bytes += _USED_NUMPY_BYTES + _BUFFER_BYTES + _CONTENT_BYTES * len(plan.tensors)
    while not memory.reserve_peak(peak_bytes, purpose):
        plan = planner.plan(0, checked=False)
    of_targets = {*notes_on(policy.accumulated, plan.gradients)}
    of_plan = (note for note in plan.notes if note not in of_targets)
    notes = (*gradient_texts(policy.accumulated, plan.gradients), *of_plan)
    outcome = Outcome(
        notes=tuple(dict.fromkeys((*notes, *notes_on_ranks, *files.notes, *governor.notes))),
        modified=files.modified,
        other_warnings=(*drift, *warnings, *files.warnings, *plan.warnings, *plan.left_out),
    )
    names = plan.tensors.specs.names
    numbers = {name: number for number, name in enumerate(names) if name not in plan.holes}
    return AuditedCheckpoint(source, planner, plan, numbers, outcome)


def read_contents(opened: AuditedCheckpoint, process: RunProcess) -> tuple[list[TensorContent], list[Finding]]:
    """Read this process's share of the tensors; return descriptions of their values, and findings on the others."""
    comm, progress = process.comm, process.progress
    tensors, specs = opened.plan.tensors, opened.plan.tensors.specs
    sizes = {number: specs[number].size_bytes for number in opened.numbers.values()}
    mine = sorted(assign(sizes, range(comm.size))[comm.rank])
    stage = ProgressStage("auditing", sum(sizes.values()), len(sizes), "tensor")
    progress.begin(stage, sum(map(sizes.__getitem__, mine)))
    contents: list[TensorContent] = []
    unreadable: list[Finding] = []
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    with Files() as files:
        for number in mine:
            tensor = tensors[number]
            try:
                contents.append(content_of(files, tensor, LIMITS, buffer, progress.moved))
            except ShardError as error:
                unreadable.append(broken(error, tensor.spec.name))
            progress.completed()
    return contents, unreadable


def value_findings(contents: Sequence[TensorContent], place: PlaceOf, roles: Roles) -> Iterator[Finding]:
    """Yield the findings on the values of tensors.

    Args:
        contents: of all tensors of the checkpoint.
    """
    shapes = {content.name: content.shape for content in contents}
    alike: defaultdict[tuple[object, ...], list[TensorContent]] = defaultdict(list)
    kin: defaultdict[tuple[object, ...], list[TensorContent]] = defaultdict(list)
    for content in contents:
        weight, role = roles.get(content.name, (None, ""))
        yield from _of_one(content, place, role)
        if weight is not None and (flaw := _flaw_of_companion(content, weight, role, shapes)):
            yield Finding(FindingKind.SCALE, content.name, *place(content.name, None), flaw)
        kind = kind_of(content.name)
        if not _is_matrix(content) or content.is_constant or role not in _HOLDS_ELEMENTS:
            continue
        of_kin = kin_of(content.name)
        numberless = _NUMBER.sub("*", of_kin)  # a layer may be told by its number alone, as in torch's Sequential
        if numberless != content.name and kind is not TensorKind.OTHER and (role or _may_not_be_a_copy(content)):
            alike[numberless, content.key].append(content)
        if kind is TensorKind.MODEL and not role and content.dtype in _ADJUSTABLE and content.first_bad is None:
            kin[of_kin, content.shape, content.dtype].append(content)
    for same in alike.values():
        first, *others = same
        for content in others:
            detail = f"holds the same as {first.name!r}, which is of another layer or expert"
            yield Finding(FindingKind.COPY, content.name, *place(content.name, None), detail)
    for members in kin.values():
        yield from _far_from_kin(members, place)


def changed_norms(
    contents: Iterable[TensorContent], previous: Mapping[str, TensorContent], place: PlaceOf, roles: Roles
) -> Iterator[Finding]:
    """Yield the weights whose norm is far from the one in the previous checkpoint.

    Args:
        roles: of the tensors of quantized weights in either. Only a scale's norm is one of the weight's size.
    """
    for content in contents:
        before = previous.get(content.name)
        _, role = roles.get(content.name, (None, ""))
        if role and (
            role != "scale" or before is None or (before.shape, before.dtype) != (content.shape, content.dtype)
        ):
            continue
        if role and content.dtype not in _ADJUSTABLE:
            continue
        if before is None or kind_of(content.name) not in _WEIGHTS or not _is_matrix(content):
            continue
        if before.norm and content.norm and abs(math.log(content.norm / before.norm)) > math.log(_CHANGED):
            detail = f"its norm is {content.norm:.4g}, and was {before.norm:.4g} in the previous checkpoint"
            yield Finding(FindingKind.CHANGE, content.name, *place(content.name, None), detail)


def _of_one(content: TensorContent, place: PlaceOf, role: str) -> Iterator[Finding]:
    """Yield the findings on one tensor by itself. role: in a quantized weight, or empty."""
    name, values = content.name, content.parts
    bad = content.first_bad
    element = None if bad is None else unravel(bad, content.shape)
    for kind, count, what in (
        (FindingKind.NAN, content.nan, "NaN"),
        (FindingKind.INFINITE, content.infinite, "infinite"),
    ):
        if count and not (kind is FindingKind.INFINITE and _is_added_mask(content)):
            of_all = f"{count} of {counted(values, 'value')} {'is' if count == 1 else 'are'} {what}"
            first = f", the first bad one at {list(element or ())}" if content.shape else ""
            yield Finding(kind, name, *place(name, element), f"{of_all}{first}")
    bound = bound_of(content.dtype)
    is_mask = content.is_mask and content.least == lowest_of(content.dtype)
    if content.magnitude > bound and content.size > 1 and not is_mask:
        detail = f"a magnitude of {content.magnitude:.4g}, and no value of a training is beyond {bound:.4g}"
        detail += f"; the first bad value is at {list(element or ())}"
        yield Finding(FindingKind.BEYOND, name, *place(name, element), detail)
    may_be_judged = (content.dtype in _ADJUSTABLE or role) and role in _HOLDS_ELEMENTS and _is_matrix(content)
    if may_be_judged and kind_of(name) not in _UNJUDGED:
        yield from _of_matrix(content, place, is_weight=kind_of(name) in _WEIGHTS)


def _of_matrix(content: TensorContent, place: PlaceOf, *, is_weight: bool) -> Iterator[Finding]:
    """Yield the findings on the values of a matrix that are no sign of damage by themselves: zeros, constants."""
    name, values, (rows, first_row, last_row) = content.name, content.parts, content.zero_rows
    if is_weight and content.zeros == values:
        yield Finding(FindingKind.ZERO, name, *place(name, None), f"all {counted(values, 'value')} are zero")
    elif is_weight and content.is_constant and content.least is not None:
        detail = f"all {counted(values, 'value')} are {content.least}"
        yield Finding(FindingKind.CONSTANT, name, *place(name, None), detail)
    elif rows and (is_weight or rows == content.shape[0]):
        which = f"row {first_row}" if rows == 1 else f"the first {first_row}, the last {last_row}"
        detail = f"{rows} of {counted(content.shape[0], 'row')} {'is' if rows == 1 else 'are'} all zero: {which}"
        yield Finding(FindingKind.ROWS, name, *place(name, (first_row, *(0 for _ in content.shape[1:]))), detail)
    share = content.subnormal / values
    if is_weight and share >= _SUBNORMAL_SHARE and BY_NAME[content.dtype].part_bytes > 1:
        detail = f"{share:.0%} of its values are subnormal in {content.dtype}"
        yield Finding(FindingKind.SUBNORMAL, name, *place(name, None), detail)


_UNJUDGED = (TensorKind.STEP, TensorKind.OTHER)
# The roles of tensors that hold elements of weights: of quantized ones, and of others.
_HOLDS_ELEMENTS = ("stored", "")
# Scales of these are quotients of magnitudes; integers may be negated by theirs.
_POSITIVE_SCALES = ("fp8", "nvfp4", "mxfp4")
_NAN_EXPONENT = 255


def _flaw_of_companion(
    content: TensorContent, weight: QuantizedWeight, role: str, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the flaw of a companion of a quantized weight in words; empty: it has none.

    NaN and infinities are found in all tensors.
    """
    least, greatest, of_all = content.least, content.greatest, counted(content.parts, "scale")
    if least is None or greatest is None:
        return ""
    if role in ("scale", "global_scale"):
        if content.dtype == "uint8":
            return "has 255, which is NaN as the exponent of a scale" if greatest == _NAN_EXPONENT else ""
        if least < 0 and weight.scheme.kind in _POSITIVE_SCALES:
            return f"the least of {of_all} is {least:.4g}, and none is negative"
        # What is small becomes zero where scales are of 8 bits too.
        if content.zeros and (content.dtype not in FLOATS_8_BIT or content.zeros == content.parts):
            return (
                f"{content.zeros} of {of_all} {'is' if content.zeros == 1 else 'are'} zero, and so is what they scale"
            )
    scale = weight.companion("scale")
    if role == "group_index" and scale is not None and scale.name in shapes:
        groups = shapes[scale.name][-2 if weight.scheme.kind == "gptq" else -1]
        is_unused = least == greatest == -1  # compressed-tensors writes an index before it is known
        if not is_unused and (least < 0 or greatest >= groups):
            return f"numbers from {least} to {greatest}, and there are {counted(groups, 'group')}"
    return ""


def _far_from_kin(members: Sequence[TensorContent], place: PlaceOf) -> Iterator[Finding]:
    norms = {content.name: math.log(content.norm) for content in members if 0 < content.norm < math.inf}
    if len(norms) < _LEAST_KIN:
        return
    middle = median(norms.values())
    spread = median(abs(norm - middle) for norm in norms.values())
    for name, norm in norms.items():
        if abs(norm - middle) > max(math.log(_FAR), _SPREADS * spread):
            detail = f"its norm is {math.exp(norm):.4g}, usual of {len(norms)} of its kind is {math.exp(middle):.4g}"
            yield Finding(FindingKind.NORM, name, *place(name, None), detail)


def _is_matrix(content: TensorContent) -> bool:
    """Tell whether a tensor has more than one dimension: norms and biases may be constant, and alike."""
    return sum(length > 1 for length in content.shape) > 1


def _is_added_mask(content: TensorContent) -> bool:
    """Tell whether a tensor that is called a mask has zeros and infinities alone."""
    return content.name.endswith("mask") and not content.nan and (content.least, content.greatest) == (0, 0)


_NUMBER = re.compile(r"(?:^|(?<=[./]))\d{1,9}(?=[./])")
# Tables of positions, which all layers of some models have of their own.
_TABLE = re.compile(
    r"(?:.*\.)?(?:(?:cos|sin)(?:_cached?)?|cos_sin_cache|freqs?_c[io]s|pe|position_ids|relative_(?:position_index|coords_table))"
)


def _may_not_be_a_copy(content: TensorContent) -> bool:
    is_told = content.dtype in _ADJUSTABLE or content.dtype in _QUANTISED
    is_mask = content.is_mask or _is_added_mask(content)
    return is_told and not is_mask and not _TABLE.fullmatch(content.name)

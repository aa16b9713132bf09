"""Open a checkpoint to be audited (`open_audited`), find faults of its files, and read its tensors.

It is planned as one full checkpoint, which finds all parts of every tensor and proves that they cover it, as for a
transform. Tensors that lack parts do not refuse it, but are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from reshard_mpi.checkpoints.compare_replicas import comparing_bytes
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.checkpoints.shard_opener import ShardShare
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.engine.open_files import Files
from reshard_mpi.errors import DamageError, ReshardError, ShardError
from reshard_mpi.formats.locations import paths_of
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest.nodes import UNREADABLE, parsed
from reshard_mpi.planning.rank_plan import RankPlan, TensorPlan, meeting
from reshard_mpi.planning.source_flaws import difference_messages
from reshard_mpi.planning.strategy_check import drift_warning
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.outcome import Outcome
from reshard_mpi.runs.plan_conversion import LIMITS, Conversion
from reshard_mpi.runs.process_memory import RunMemory
from reshard_mpi.runs.progress import Progress, ProgressStage
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.scheduling import assign
from reshard_mpi.runs.target_needs import Workload
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.soundness.content import TensorContent, content_of
from reshard_mpi.soundness.findings import Finding, FindingKind
from reshard_mpi.soundness.value_findings import Roles
from reshard_mpi.text import KIB, MIB

# How much is read at once; the largest element fits.
_BUFFER_BYTES = MIB
# What is kept of the content of each tensor, in two forms while processes exchange it.
_CONTENT_BYTES = 2 * KIB
# A numpy that is in use, with its library for linear algebra, and tables of small floats.
_NUMPY_BYTES = 24 * MIB


class AuditedCheckpoint(NamedTuple):
    """A checkpoint that is open to be audited, and the plan of all that it holds."""

    source: SourceCheckpoint
    conversion: Conversion  # to one full checkpoint in its own names
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
        copies = self.tensor(name).copies if name in self.numbers else ()
        if element is not None:
            copies = tuple(meeting(copies, Box(element, tuple(index + 1 for index in element))))
        if not copies:
            return None, self.source.files.path
        rank = copies[0].source_rank if self.source.strategy.world_size > 1 else None
        return rank, next(iter(paths_of(copies[0].source.source)), "")

    def flaws(self) -> Iterator[Finding]:
        """Yield the findings on its files, and on how tensors lie in them."""
        for name, error in self.plan.holes.items():
            yield broken(error, name)
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
    kind = FindingKind.SUM if isinstance(error, DamageError) else FindingKind.STRUCTURE
    parts = (("expected", error.expected), ("got", error.got))
    detail = ", ".join([error.problem, *(f"{label} {text}" for label, text in parts if text)])
    return Finding(kind, name, rank, error.where, detail)


def open_audited(
    request: Request, files: ShardFiles, comm: Comm, memory: RunMemory, strategies: Strategies | None
) -> AuditedCheckpoint:
    """Open the source of a request, with memory enough to read it.

    Args:
        files: of the source.

    Raises a ReshardError if it cannot be planned.
    """
    governor, purpose = memory.open(), f"auditing {request.source}"
    named = (request.src_strategy,) if strategies is None else ()
    memory.reserve_for_reading(named, purpose, files.format)
    read = strategies or Strategies.read(request)
    source = open_source(files, read.source)
    conversion = Conversion(source, unsharded(), Policy(replicas=request.replicas, allows_holes=True))
    memory.on_memory_released(conversion.forget)
    memory.reserve_for_planning(Workload(conversion, files.format, also_read=source), purpose)
    drift = conversion.drifted_tensors(process=comm.rank, processes=comm.size)
    warnings = [drift_warning(drift.copies)] if drift.copies else []
    plan = conversion.plan(0, checked=False)
    conversion.require_none_left_behind(plan, ShardShare(comm.rank, comm.size))
    differing = conversion.checked(plan).differing if comm.rank == 0 else ()
    found = difference_messages((*drift.unlisted, *differing), files.path)
    peak_bytes = memory.require_possible(plan) + (comparing_bytes(LIMITS) if plan.alike else 0)
    peak_bytes += _NUMPY_BYTES + _BUFFER_BYTES + _CONTENT_BYTES * len(plan.tensors)
    while not memory.reserve_for_copying(peak_bytes, purpose):
        plan = conversion.plan(0, checked=False)
    outcome = Outcome(
        notes=tuple(dict.fromkeys((*plan.notes, *found.notes, *files.notes, *governor.notes))),
        modified=files.modified,
        other_warnings=(*warnings, *found.warnings, *files.warnings, *plan.warnings, *plan.left_out),
    )
    names = plan.tensors.specs.names
    numbers = {name: number for number, name in enumerate(names) if name not in plan.holes}
    return AuditedCheckpoint(source, conversion, plan, numbers, outcome)


def read_contents(
    opened: AuditedCheckpoint, comm: Comm, progress: Progress
) -> tuple[list[TensorContent], list[Finding]]:
    """Read this process's share of the tensors; return descriptions of their values, and findings on the others."""
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

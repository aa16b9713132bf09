"""Do the command `audit`: hold one checkpoint against all that tells whether it is whole (`audit`).

Each process reads its share of the tensors, and process 0 judges what all of them have found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard_mpi.checkpoints.opening import require_same_choice
from reshard_mpi.errors import CoverageError, DamageError, DisagreementError, ReshardError, ShardError, SourceError
from reshard_mpi.planning.source_flaws import UnusableShard
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.diff import compare_copies
from reshard_mpi.runs.outcome import Checked, Outcome, agreed, together
from reshard_mpi.runs.process_memory import RunMemory
from reshard_mpi.runs.progress import Progress, ProgressStage
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.runs.verify_command import verify_by_sums
from reshard_mpi.soundness.audited_checkpoint import AuditedCheckpoint, broken, open_audited, read_contents
from reshard_mpi.soundness.content import TensorContent
from reshard_mpi.soundness.findings import Finding, FindingKind, worst_first
from reshard_mpi.soundness.value_findings import value_findings

# Errors that say what is wrong with files, and with a checkpoint once these have been found.
_OF_FILES = (ShardError, CoverageError, DisagreementError, DamageError)
_BROKEN = (*_OF_FILES, SourceError)
# What a checkpoint is held against.
_STRUCTURE, _SUMS, _VALUES = "structure", "sums", "values"


def audit(
    request: Request, comm: Comm, progress: Progress, memory: RunMemory, strategies: Strategies | None
) -> Outcome:
    """Audit the checkpoint `request.source`; the findings are in the outcome, worst first.

    Raises a ReshardError, the same on all processes, if there is no checkpoint, or options do not fit it.
    """
    progress.begin(ProgressStage("planning"))
    try:
        files = agreed(request.shard_files, comm)
    except _OF_FILES as error:
        return _unopened(error, request, comm)
    require_same_choice(comm, files)
    try:
        opened = agreed(lambda: open_audited(request, files, comm, memory, strategies), comm)
        lost = compare_copies([(opened.source, opened.plan)], comm, progress)
    except _BROKEN as error:
        return _unopened(error, request, comm)
    if comm.rank == 0:
        progress.display.reading(opened.source.summary_text)
    summed = verify_by_sums(request, comm, progress, memory)[1]
    shares = together(comm, lambda: read_contents(opened, comm, progress))
    of_all = (content for own, _ in shares for content in own)
    contents = sorted(of_all, key=lambda content: opened.numbers[content.name])
    findings: tuple[Finding, ...] = ()
    if comm.rank == 0:
        found = [
            *opened.flaws(),
            *_of_lost(lost),
            *(broken(failure.error, "", failure.rank) for failure in summed.failures),
            *(unreadable for _, of_share in shares for unreadable in of_share),
            *value_findings(contents, opened.place),
        ]
        findings = worst_first(found, request.allow)
    by = (_STRUCTURE, *((_SUMS,) if any(shard.by for shard in summed.checked) else ()), _VALUES)
    checked = _checked(opened, contents, by) if comm.rank == 0 else ()
    own = opened.outcome._replace(findings=findings, checked=checked)
    return Outcome(processes=comm.size).joined(comm.allgather(own))


def _unopened(error: ReshardError, request: Request, comm: Comm) -> Outcome:
    """Return the outcome for a checkpoint that cannot be read at all."""
    checked = Checked(0, request.source, 0, 0, (_STRUCTURE,))
    return Outcome(processes=comm.size, findings=(broken(error),), checked=(checked,))


def _of_lost(lost: Sequence[UnusableShard]) -> Iterator[Finding]:
    for shard in lost:
        yield Finding(FindingKind.STRUCTURE, "", shard.rank, shard.where, shard.problem or "there is no shard")


def _checked(opened: AuditedCheckpoint, contents: Sequence[TensorContent], by: tuple[str, ...]) -> tuple[Checked, ...]:
    tensors = opened.plan.tensors
    read_bytes = sum(tensors[opened.numbers[content.name]].spec.size_bytes for content in contents)
    return (Checked(0, opened.source.files.path, len(contents), read_bytes, by),)

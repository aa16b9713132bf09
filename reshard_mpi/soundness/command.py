"""Do the command `audit`: hold one checkpoint against all that tells whether it is whole (`audit`).

Each process reads its share of the tensors, and process 0 judges what all of them have found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.checkpoints.opening import require_same_choice
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.errors import (
    ChecksumError,
    CoverageError,
    DamageError,
    DisagreementError,
    ReshardError,
    ShardError,
    SourceError,
)
from reshard_mpi.journal.record_files import COMMIT_RECORD
from reshard_mpi.journal.record_finder import RecordFinder
from reshard_mpi.mapping.tensor_kinds import TensorKind, kind_of
from reshard_mpi.planning.rank_choice import is_partial_sum
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.check_commit import (
    CommittedSums,
    changed_since_commit,
    commit_of,
    committed_tensors,
    damage_before_indexes,
    is_to_be_held,
    missing_from,
)
from reshard_mpi.runs.diff import compare_copies
from reshard_mpi.runs.maps_and_packing import planner_with_maps
from reshard_mpi.runs.outcome import Checked, Outcome, agreed, together
from reshard_mpi.runs.planner import LIMITS
from reshard_mpi.runs.process_memory import RunProcess
from reshard_mpi.runs.progress import ProgressStage
from reshard_mpi.runs.request import Request
from reshard_mpi.runs.verify_command import verify_by_sums
from reshard_mpi.soundness.audited_checkpoint import (
    AuditedCheckpoint,
    Roles,
    broken,
    changed_norms,
    open_audited,
    read_contents,
    value_findings,
)
from reshard_mpi.soundness.content import TensorContent
from reshard_mpi.soundness.definition import Definition, ModelConfig, ModelProcess
from reshard_mpi.soundness.findings import Finding, FindingKind, worst_first
from reshard_mpi.soundness.training_state import StateOfParameters, differing_copies
from reshard_mpi.text import shortened

if TYPE_CHECKING:
    from reshard_mpi.pictures.pages import TensorNorm
    from reshard_mpi.quantization.weights import QuantizedWeights

# Errors that say what is wrong with the files of a checkpoint.
_OF_FILES = (ShardError, CoverageError, DisagreementError, DamageError)
# Errors that say what is wrong with a checkpoint whose files have been found.
_BROKEN = (*_OF_FILES, SourceError)
# What a checkpoint is held against.
_STRUCTURE, _SUMS, _VALUES, _STATE = "structure", "sums", "values", "training state"


def audit(process: RunProcess) -> Outcome:
    """Audit the source of the request; the findings are in the outcome, worst first.

    Raises a ReshardError, the same on all processes, if there is no checkpoint, or options do not fit it.
    """
    request, comm, _, progress, _ = process
    progress.begin(ProgressStage("planning"))
    config = agreed(lambda: _config(request), comm)
    # The configuration of the model without quantization does not say how the checkpoint is quantized.
    named = str(config.path) if config is not None and config.is_asked_for and config.is_quantized else None
    request = request._replace(config=named)
    process = process._replace(request=request)
    # It finds the definition of the model while the checkpoint is read.
    with nullcontext() if config is None or comm.rank else closing(ModelProcess(config)) as model:
        try:
            files = agreed(request.shard_files, comm)
        except _OF_FILES as error:
            return _unopened(error, request, comm)
        require_same_choice(comm, files)
        like = agreed(lambda: _like(process), comm)
        previous = _previous(process)
        try:
            opened = agreed(lambda: open_audited(process, files), comm)
        except _BROKEN as error:
            return _unopened(error, request, comm)
        of_copies = _of_copies(opened, process)
        unchecked = None if config is None else agreed(lambda: config.unchecked(opened.source.quantization), comm)
        shapes = agreed(lambda: _in_names_of_the_model(request, config, opened), comm)
        agreed(lambda: _require_same_weights(opened, previous, request), comm)
        if comm.rank == 0:
            progress.display.reading(opened.source.summary_text)
        read = _Read.of(opened, process)

        def judged() -> Outcome:
            if comm.rank:
                return opened.outcome
            by, found = read.judged(opened, of_copies, previous, request)
            notes = [*opened.outcome.notes, *read.state.notes]
            digests = {} if request.map else {content.name: content.key for content in read.contents}
            of_model = (unchecked or (None if model is None else model.result()), shapes.logical)
            for definition, own in (shapes.definition_by(like, request), of_model):
                if isinstance(definition, str):
                    notes.append(definition)
                elif definition is not None:
                    by.append(definition.origin)
                    found += _by_definition(definition, config, own, digests, opened)
            tensors = opened.plan.tensors
            read_bytes = sum(tensors[opened.numbers[content.name]].spec.size_bytes for content in read.contents)
            checked = Checked(0, opened.source.files.path, len(read.contents), read_bytes, tuple(by))
            findings = worst_first(found, request.allow)
            norms = _norms(read.contents) if request.norms else ()
            warnings = (*opened.outcome.other_warnings, *read.commit.warnings)
            outcome = opened.outcome._replace(notes=tuple(notes), other_warnings=warnings)
            return outcome._replace(findings=findings, checked=(checked,), norms=norms)

        return Outcome(processes=comm.size).joined(comm.allgather(agreed(judged, comm)))


def _config(request: Request) -> ModelConfig | None:
    if request.config is not None:
        return ModelConfig.named(request.config)
    return None if request.like is not None else ModelConfig.beside(request.source)


def _by_definition(
    definition: Definition,
    config: ModelConfig | None,
    shapes: Mapping[str, tuple[int, ...]],
    digests: Mapping[str, object],
    opened: AuditedCheckpoint,
) -> list[Finding]:
    """Return the findings by a definition. Raises SourceError for the definition of another model.

    But a configuration that only lies beside the files is one of the things that may be wrong with them.
    """
    try:
        return [*definition.findings(shapes, digests, opened.place, opened.source.files.path)]
    except SourceError as error:
        if definition.is_all or config is None or config.is_asked_for:
            raise
        return [broken(error)._replace(kind=FindingKind.MISSING, file=str(config.path))]


class _ShapesByName(NamedTuple):
    """The shapes of all tensors of a checkpoint."""

    stored: Mapping[str, tuple[int, ...]]
    logical: Mapping[str, tuple[int, ...]]  # as they would be without quantization
    quantized: str  # how it is quantized, as JSON; empty: it is not

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], quantization: QuantizedWeights | None) -> _ShapesByName:
        """Return the shapes of a checkpoint with quantized weights, or with none."""
        if quantization is None:
            return cls(shapes, shapes, "")
        return cls(shapes, quantization.logical(shapes), quantization.text)

    def definition_by(
        self, like: _ShapesByName | None, request: Request
    ) -> tuple[Definition | None, Mapping[str, tuple[int, ...]]]:
        """Return another checkpoint as a definition, and the shapes of this one to hold against it.

        They are those of stored tensors if both are quantized alike, else as they would be without quantization.
        """
        if like is None:
            return None, {}
        theirs, ours = (like.stored, self.stored) if like.quantized == self.quantized else (like.logical, self.logical)
        return Definition(str(request.like), theirs, is_all=True), ours


def _in_names_of_the_model(request: Request, config: ModelConfig | None, opened: AuditedCheckpoint) -> _ShapesByName:
    """Return the shapes of all tensors by the names that maps give them. Raises MapError if a map does not fit."""
    if not request.map:
        return _ShapesByName.of(opened.shapes, opened.source.quantization)
    path = None if config is None else str(config.path)
    mapped, _ = planner_with_maps(request._replace(config=path, like=None), opened.planner)
    plan = mapped.plan(0, checked=False)
    shapes = {name: group.kind.shape for group in plan.tensors.groups for name in group.names}
    return _ShapesByName.of(shapes, mapped.planned_source.quantization)


def _opened_other(path: str, process: RunProcess) -> AuditedCheckpoint:
    """Open another checkpoint, which is cut as the audited one is, or says itself how."""
    other = Request(path, path, process.request.src_strategy, replicas=process.request.replicas)
    return open_audited(process._replace(request=other, strategies=None), find_shards(path, role="other"))


def _like(process: RunProcess) -> _ShapesByName | None:
    """Return the tensors of the other checkpoint that this one is to be like, if one is named."""
    if process.request.like is None:
        return None
    opened = _opened_other(process.request.like, process)
    return _ShapesByName.of(opened.shapes, opened.source.quantization)


class _Previous(NamedTuple):
    """The previous checkpoint of the training."""

    contents: Mapping[str, TensorContent]  # by name
    names: Collection[str]  # of its tensors as they would be without quantization
    roles: Roles

    def changed_norms(self, contents: Sequence[TensorContent], opened: AuditedCheckpoint) -> Iterator[Finding]:
        return changed_norms(contents, self.contents, opened.place, {**self.roles, **opened.roles})


def _previous(process: RunProcess) -> _Previous | None:
    """Return descriptions of the values of the previous checkpoint, if one is named."""
    before = process.request.before
    if before is None:
        return None
    opened = agreed(lambda: _opened_other(before, process), process.comm)
    contents = {content.name: content for content in _all_contents(opened, process)[0]}
    return _Previous(contents, _ShapesByName.of(opened.shapes, opened.source.quantization).logical, opened.roles)


def _require_same_weights(opened: AuditedCheckpoint, previous: _Previous | None, request: Request) -> None:
    """Raise SourceError unless both checkpoints have weights of the same names."""
    if previous is None:
        return
    ours, theirs = (
        dict.fromkeys(name for name in names if kind_of(name) is TensorKind.MODEL)
        for names in (_ShapesByName.of(opened.shapes, opened.source.quantization).logical, previous.names)
    )
    for names, others, path in ((ours, theirs, request.before), (theirs, ours, request.source)):
        alone = [repr(name) for name in names if name not in others]
        if alone:
            raise SourceError(
                "the previous checkpoint has other tensors",
                expected="the same names in both",
                got=f"not there: {shortened(alone)}",
                where=str(path),
                remedy="give the checkpoint that the same training has saved before",
            )


class _Read(NamedTuple):
    """What all processes together have read of a checkpoint, and found by that."""

    summed: Outcome  # of holding the files against sums
    summed_files: ShardFiles
    contents: Sequence[TensorContent]
    unreadable: Sequence[Finding]
    state: StateOfParameters
    unlike_weights: Sequence[Finding]
    commit: CommittedSums
    unlike_commit: Sequence[Finding]

    @classmethod
    def of(cls, opened: AuditedCheckpoint, process: RunProcess) -> _Read:
        """Read all files and values of a checkpoint whose copies have been compared. Every process must call this."""
        summed_files, summed = verify_by_sums(process)
        contents, unreadable = _all_contents(opened, process)
        state = agreed(lambda: StateOfParameters.of(opened), process.comm)
        unlike_weights = _unlike_weights(opened, state, process)
        commit = agreed(lambda: commit_of(opened.source.files), process.comm)
        changed = _of_commit(contents, commit, opened, process)
        return cls(summed, summed_files, contents, unreadable, state, unlike_weights, commit, changed)

    def judged(
        self, opened: AuditedCheckpoint, of_copies: Sequence[Finding], previous: _Previous | None, request: Request
    ) -> tuple[list[str], list[Finding]]:
        """Judge all without definitions of models; return the names of the evidence, and the findings."""
        contents = self.contents
        by_name = {content.name: content for content in contents}
        as_constructed = self.state.as_constructed(by_name)
        has_sums = bool(self.commit.sums) or any(shard.by for shard in self.summed.checked)
        by = [_STRUCTURE, *([_SUMS] if has_sums else []), _VALUES, *([_STATE] if self.state.tensors else [])]
        by += [f"the norms of {request.before}"] if previous is not None else []
        return by, [
            *opened.flaws(),
            *of_copies,
            *_of_sums(self.summed, self.summed_files, opened),
            *self.unlike_commit,
            *self.unreadable,
            *value_findings([each for each in contents if each.name not in as_constructed], opened.place, opened.roles),
            *self.state.findings(opened, by_name),
            *self.unlike_weights,
            *([] if previous is None else previous.changed_norms(contents, opened)),
        ]


def _all_contents(opened: AuditedCheckpoint, process: RunProcess) -> tuple[list[TensorContent], list[Finding]]:
    """Read all tensors, each process its share; return descriptions of their values, and findings on the others."""
    shares = together(process.comm, lambda: read_contents(opened, process))
    of_all = (content for own, _ in shares for content in own)
    contents = sorted(of_all, key=lambda content: opened.numbers[content.name])
    return contents, [finding for _, findings in shares for finding in findings]


def _unopened(error: ReshardError, request: Request, comm: Comm) -> Outcome:
    """Return the outcome for a checkpoint that cannot be read at all."""
    checked = Checked(0, request.source, 0, 0, (_STRUCTURE,))
    return Outcome(processes=comm.size, findings=(broken(error),), checked=(checked,))


def _unlike_weights(opened: AuditedCheckpoint, state: StateOfParameters, process: RunProcess) -> list[Finding]:
    """Return the copies in float32 that are not the weights; each process compares its share."""
    pairs = state.copies(opened)
    if not pairs:
        return []
    comm, progress = process.comm, process.progress
    mine = pairs[comm.rank :: comm.size]
    all_bytes, own_bytes = (sum(opened.tensor(copy).spec.size_bytes for _, copy in some) for some in (pairs, mine))
    progress.begin(ProgressStage("comparing weights with their copies", all_bytes), own_bytes)
    found = together(comm, lambda: [*differing_copies(opened, mine, LIMITS, progress.moved)])
    return [finding for own in found for finding in own]


def _of_sums(summed: Outcome, files: ShardFiles, opened: AuditedCheckpoint) -> Iterator[Finding]:
    """Yield the findings by sums. A file of a folder with an index may be nothing by itself, if no run has written it.

    Args:
        files: those that were summed.
    """
    finder = RecordFinder()

    def is_recorded(rank: int | None) -> bool:
        paths = () if rank is None else files.by_rank.get(rank, ())
        return any(finder.find_head(path, rank or 0) is not None for path in paths)

    for failure in summed.failures:
        is_damage = isinstance(failure.error, (DamageError, ChecksumError)) or not opened.source.files.is_folder
        if is_damage or is_recorded(failure.rank):
            yield broken(failure.error, "", failure.rank)
    yield from map(broken, damage_before_indexes(opened.source.files))


def _of_commit(
    contents: Iterable[TensorContent], commit: CommittedSums, opened: AuditedCheckpoint, process: RunProcess
) -> list[Finding]:
    """Return the tensors that are not what was committed, or were committed and are not there.

    Of a format that packs, the parts of tensors in its files are summed, each process its share, if they have no
    records.
    """
    path, comm = opened.source.files.path, process.comm
    if commit.packs:
        is_held = agreed(lambda: is_to_be_held(commit, opened.source.files), comm)
        try:
            tensors = agreed(lambda: committed_tensors(commit, opened.source, lambda _: True) if is_held else [], comm)
        except ShardError as error:
            return [broken(error)._replace(kind=FindingKind.SUM)]
        mine = tensors[comm.rank :: comm.size]
        changed = together(comm, lambda: [*changed_since_commit(commit, mine, path, process.progress.moved)])
        return [broken(error, name)._replace(kind=FindingKind.SUM) for own in changed for name, error in own]
    found = [
        Finding(FindingKind.SUM, name, None, path, f"was committed, as {COMMIT_RECORD} says, and is not there")
        for name in missing_from(opened.shapes, commit)
    ]
    for content in contents:
        expected, got = commit.sums.get(content.name), f"{content.digest:08x}"
        if expected is not None and got != expected and not is_partial_sum(content.name):
            detail = f"is not what was committed: CRC-32 {got}, expected {expected}, as {COMMIT_RECORD} says"
            found.append(Finding(FindingKind.SUM, content.name, *opened.place(content.name, None), detail))
    return found


def _of_copies(opened: AuditedCheckpoint, process: RunProcess) -> list[Finding]:
    """Compare what several ranks or files hold, and must be the same; return the first difference, and lost shards."""
    try:
        lost = compare_copies([(opened.source, opened.plan)], process)
    except _OF_FILES as error:
        return [broken(error)]
    return [
        Finding(FindingKind.STRUCTURE, "", shard.rank, shard.where, shard.problem) for shard in lost if shard.problem
    ]


def _norms(contents: Sequence[TensorContent]) -> tuple[TensorNorm, ...]:
    from reshard_mpi.pictures.pages import TensorNorm

    return tuple(
        TensorNorm(content.name, content.norm, f"{content.dtype} {list(content.shape)}") for content in contents
    )

"""Take from records of earlier runs their options (`as_made`), and the sums of tensors (`RecordedSums`).

A checkpoint is compared with the options of the run that made it. What a store copies inside itself need not be read:
it tells the CRC-32 of what it has copied, and a target tensor is known that is made of whole tensors of shards, one
behind another, each of which has a sum in the record of its run.
"""

from __future__ import annotations

import shlex
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.checkpoints.opening import chosen_files
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.engine.checksums import ContiguousPart, crc_of_contiguous, crc_of_pieces, sum_of_contiguous
from reshard_mpi.errors import DisagreementError, ReshardError, ShardError, UsageError
from reshard_mpi.filesystem.source_files import exists, is_file
from reshard_mpi.formats.locations import ByteRange, Span, paths_of
from reshard_mpi.formats.manifest import Manifest, TensorSpec
from reshard_mpi.journal.record_finder import RecordFinder, fits_record, folder_of_records, run_of
from reshard_mpi.journal.run_records import CHOSEN, CommitRecord, RunIdentity, joined_words
from reshard_mpi.planning.rank_choice import Accumulated
from reshard_mpi.planning.rank_plan import RankPlan, ReadItem, TensorPlan
from reshard_mpi.runs.request import Request, Strategies
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import Strategy, Unlisted

if TYPE_CHECKING:
    from reshard_mpi.checkpoints.source import SourceCheckpoint
    from reshard_mpi.journal.staged_parts import StagedParts

_FILES = ("map", "config", "like")
_REPEATED = ("axis", "dtype", "include", "exclude")
_OPTIONS = (
    "the options that it was made with, or none of --map, --dtype, --include, --exclude and --unlisted: then they are"
    " taken"
)


def recorded_run(files: ShardFiles) -> RunIdentity | None:
    """Return the run that made a checkpoint, as records of its files or its commit record say; None if none does."""
    paths = ((path, rank) for rank, rank_paths in files.by_target_rank.items() for path in rank_paths)
    finder = RecordFinder()
    found = next((run for path, rank in paths if (run := run_of(path, rank, finder)) is not None), None)
    committed = None if found is not None else CommitRecord.read(folder_of_records(files.path, files.format))
    return committed.run if committed is not None else found and found[0]


def as_made(request: Request, run: RunIdentity | None, path: str) -> tuple[Request, tuple[str, ...]]:
    """Return a request with the options of the run that made the checkpoint at `path`, and notes on them.

    What becomes of names, shapes and types is taken from the record if the request says nothing of it, and so is
    `--unlisted`. Raises UsageError if a recorded file is not there.
    """
    if run is None:
        return request, ()
    facts = run.facts
    notes: tuple[str, ...] = ()
    if request.unlisted is Unlisted.FOLLOW and (unlisted := _unlisted(facts.get("unlisted"))):
        request = request._replace(unlisted=Unlisted(unlisted["unlisted"]))
        notes = (f"compared with {_shown(run, unlisted)}",)
    options = {name: facts[name] for name in (*_FILES, "direction", *_REPEATED) if facts.get(name)}
    if request.is_mapped or not options:
        return request, _said(notes, path)
    for name in (name for name in _FILES if name in options):
        if not _is_there(run, name):
            raise _not_given(f"--{name}, whose file is not there any more", _shown(run, options), path)
    as_run = request._replace(
        map=run.maps,
        config=run.files.get("config"),
        like=run.files.get("like"),
        forward=options.get("direction") == "forward",
        reverse=options.get("direction") == "reverse",
        axis=_words(options, "axis"),
        dtype=_words(options, "dtype"),
        include=_words(options, "include"),
        exclude=_words(options, "exclude"),
    )
    return as_run, _said((*notes, f"compared with {_shown(run, options)}"), path)


def _is_there(run: RunIdentity, name: str) -> bool:
    """Return whether the recorded files of an option can still be read; an equation needs none."""
    if name == "map":
        from reshard_mpi.options import ARROW

        return bool(run.maps) and all(ARROW in word or is_file(word) for word in run.maps)
    path = run.files.get(name, "")
    return bool(path) and (name == "like" or is_file(path))


def made_otherwise(
    request: Request,
    strategies: Strategies,
    digests: Mapping[str, str],
    source: SourceCheckpoint,
    run: RunIdentity | None,
    path: str,
) -> UsageError | None:
    """Return the error for a checkpoint at `path` made with other options than the request's, or of other files.

    Others may come to the same, so it is an error only if the checkpoint is not what the request makes.

    Args:
        strategies: those of the request.
        digests: of the map, its configuration, and the checkpoint that it is like, as `planner_with_maps` returns them.
        run: the one that made it.
    """
    if run is None:
        return None
    chosen = chosen_files(source.files)
    made_of = run.facts.get(CHOSEN, chosen)
    if made_of != chosen:
        return UsageError(
            "the target was made of other files of the source than these",
            expected=f"{made_of}, as its record says",
            got=chosen,
            where=path,
            remedy="give --select with the names of the files it was made of",
        )
    for name, digest in (("src_strategy", strategies.source_digest), ("dst_strategy", strategies.target_digest)):
        if digest is not None and digest != run.facts.get(name):
            option = f"--{name.replace('_', '-')}"
            return UsageError(
                "the target was made with another strategy than this",
                expected=f"{option} {run.files[name]}, as its record says" if name in run.files else f"no {option}",
                got=f"{option} {getattr(request, name)}, another text",
                where=path,
                remedy="give the strategies that it was made with; whether it is damaged, verify DST alone tells",
            )
    if source.quantization_digest != run.facts.get("quantization"):
        return UsageError(
            "the target was made when the source's configuration said otherwise how weights are quantized",
            expected="the quantization that its record has",
            got="another, or none",
            where=path,
            remedy="give the configuration that it was made with; whether it is damaged, verify DST alone tells",
        )
    given = {
        **digests,
        **{name: words for name in _REPEATED if (words := joined_words(_given(request, name)))},
        **_unlisted(str(request.unlisted)),
    }
    of_run = {name: run.facts[name] for name in (*_FILES, *_REPEATED) if run.facts.get(name)}
    of_run |= _unlisted(run.facts.get("unlisted"))
    differing = [name for name in (*_FILES, *_REPEATED, "unlisted") if given.get(name) != of_run.get(name)]
    if not differing:
        return None
    return _not_given(f"{' and '.join(f'--{name}' for name in differing)} of other values", _shown(run, of_run), path)


def say_if_source_changed(error: ReshardError, target: ShardFiles, rank: int | None) -> None:
    """Change what an error about a target's file advises, if its record says that the source has changed since.

    Then the target need not be damaged, and is not to be made anew without a thought.
    """
    finder = RecordFinder()
    paths = target.shards if target.is_folder else target.by_rank.get(-1 if rank is None else rank, ())
    for path in paths if error.where.startswith(target.path) else ():
        record = finder.find(path, rank or 0)
        try:
            if record is not None:
                record.inputs.sources.require_unchanged("", "")
        except DisagreementError as change:
            error.remedy = (
                f"the source has changed since the target was made of it ({change.expected}; now {change.got}):"
                " transform it again if you want what it holds now; verify DST alone tells of damage"
            )


def _given(request: Request, name: str) -> Sequence[str]:
    """Return the values of a repeated option in the order of records."""
    values: Sequence[str] = getattr(request, name)
    return sorted(values) if name == "axis" else values


def _unlisted(value: str | None) -> dict[str, str]:
    """Return the option of this value, by its name; none for the default."""
    return {} if value is None or value == Unlisted.FOLLOW else {"unlisted": value}


def _not_given(got: str, made_with: str, path: str) -> UsageError:
    return UsageError(
        "the target was made with other options than these",
        expected=made_with or "no map, types or choice, as its record says",
        got=got,
        where=path,
        remedy=f"give {_OPTIONS}",
    )


def _shown(run: RunIdentity, options: Mapping[str, Any]) -> str:
    """Return settings as on the command line."""
    words = []
    for name in options:
        if name == "map":
            words += [word for text in run.maps or ("FILE",) for word in ("--map", text)]
        elif name in _FILES:
            words += [f"--{name}", run.files.get(name, "FILE")]
        elif name == "direction":
            words.append(f"--{options[name]}")
        else:
            words += [word for text in _words(options, name) for word in (f"--{name}", text)]
    return shlex.join(words)


def _words(options: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(shlex.split(str(options.get(name, ""))))


def _said(notes: tuple[str, ...], path: str) -> tuple[str, ...]:
    return tuple(f"{note}, as {path} says" for note in notes)


def accumulated_as_made(request: Request, run: RunIdentity | None) -> Accumulated:
    """Return the target's handling of accumulated gradients: as requested, else from its record."""
    if request.accumulated is not Accumulated.REFUSE:
        return request.accumulated
    return Accumulated(run.facts.get("accumulated", Accumulated.REFUSE)) if run else Accumulated.REFUSE


def strategy_to_drop_by(run: RunIdentity | None, path: str) -> Strategy | None:
    """Return the target strategy of the run that made the checkpoint at `path`; None if no record names one.

    Raises UsageError if the file is not there any more, or is another one.
    """
    recorded = None if run is None else run.files.get("dst_strategy")
    if run is None or recorded is None:
        return None
    from reshard_mpi.sharding.strategy_files import digest, load

    if not exists(recorded) or digest(recorded) != run.facts["dst_strategy"]:
        made_with = shlex.join(["--dst-strategy", recorded, "--unlisted", "drop"])
        raise _not_given("no --dst-strategy, and its file is not there any more, or is another one", made_with, path)
    return load(recorded)


class RecordedTensor(NamedTuple):
    """A tensor of a target whose bytes are known by their sum."""

    spec: TensorSpec
    spans: tuple[Span, ...]  # where it is in the file
    crc: int  # the CRC-32 of its bytes
    sources: tuple[str, ...]  # the paths of the shards that it is made of

    @property
    def value(self) -> int:
        """Its sum, as records have it."""
        place = ContiguousPart.of(self.spec.box, self.spec.global_shape, self.spec.dtype.itemsize_bytes)
        assert place is not None
        return sum_of_contiguous(self.crc, place)


class _FileSums:
    """The CRC-32 of tensors of a file by their places, in columns: there may be as many as in all of a checkpoint."""

    def __init__(self, crcs: Mapping[ByteRange, int]) -> None:
        places = sorted(crcs)
        self._offsets = array("q", (place.offset_bytes for place in places))
        self._lengths = array("q", (place.length_bytes for place in places))
        self._crcs = array("I", map(crcs.__getitem__, places))

    def of(self, place: ByteRange) -> int | None:
        """Return the CRC-32 of a tensor; None if it is not known."""
        for number in range(bisect_left(self._offsets, place.offset_bytes), len(self._offsets)):
            if self._offsets[number] != place.offset_bytes:
                break
            if self._lengths[number] == place.length_bytes:
                return self._crcs[number]
        return None


class RecordedSums:
    """The sums that records have of tensors in the shards of a source in an object store, read when they are needed."""

    def __init__(self, files: ShardFiles) -> None:
        self._files = files
        self._finder = RecordFinder()
        self._sums: dict[str, _FileSums] = {}  # by path

    def forget(self) -> None:
        """Free what was read; it is read again when it is needed."""
        self._sums.clear()

    def tensors(self, planned: Iterable[TensorPlan], target: Manifest) -> list[RecordedTensor]:
        """Return the tensors of a target whose sums are known, in the order of the file."""
        recorded = []
        for tensor in planned:
            crc = self.crc_of(tensor) if tensor.spec.size_bytes else None
            if crc is not None:
                ranges = target.payload(tensor.spec.name).ranges
                spans = ((part.offset_bytes, part.offset_bytes + part.length_bytes) for part in ranges)
                paths = dict.fromkeys(path for item in tensor.reads for path in paths_of(item.source.source))
                recorded.append(RecordedTensor(tensor.spec, tuple(spans), crc, tuple(paths)))
        return sorted(recorded, key=lambda tensor: tensor.spans)

    def unknown_ranks(self, plan: RankPlan) -> set[int]:
        """Return the source ranks from which a target takes more than tensors whose sums are known.

        Numbers that are computed for a map are in no tensor of the sources; with them, other tensors are unknown too.
        """
        ranks = set[int]()
        for group in plan.tensors.groups:
            tensors = (group.tensor(place) for place in range(len(group.names)))
            if group.kind.size_bytes and any(self.crc_of(tensor) is None for tensor in tensors):
                ranks.update(rank for route in group.routes for rank in route.joined_ranks or (route.source_rank,))
        return ranks | {*plan.value_ranks} if ranks else ranks

    def crc_of(self, tensor: TensorPlan) -> int | None:
        """Return the CRC-32 of the bytes of a target tensor; None if it is not known from records."""
        box = tensor.spec.box
        if ContiguousPart.of(box, tensor.spec.global_shape, tensor.spec.dtype.itemsize_bytes) is None:
            return None
        reads = sorted(tensor.reads, key=lambda item: box.offset_of(item.target_region))
        crcs = [self._crc_of_item(item, box) for item in reads]
        known = [crc for crc in crcs if crc is not None]
        return crc_of_pieces(zip(known, (item.size_bytes for item in reads))) if len(known) == len(crcs) else None

    def _crc_of_item(self, item: ReadItem, target: Box) -> int | None:
        """Return the CRC-32 of an item that is a whole tensor of a shard and one run of the target; None of others."""
        stored = item.source.stored
        if not item.source.is_as_stored or stored is None or len(stored.ranges) != 1 or item.region != item.source_box:
            return None
        if item.strides(target).run_length != item.region.size:
            return None
        place = stored.ranges[0]
        if place.path not in self._sums:
            self._sums[place.path] = _FileSums(self._recorded(place.path, item.source_rank))
        return self._sums[place.path].of(place)

    def _recorded(self, path: str, rank: int) -> dict[ByteRange, int]:
        """Return the CRC-32 of the tensors of a file, by their places, as far as its record has sums of them."""
        record = self._finder.find(path, rank)
        if record is None or not record.sums:
            return {}
        shard, crcs = self._files.locate(path), dict[ByteRange, int]()
        for recorded in record.sums:
            entry = shard.tensors.get(recorded.name)
            if entry is None or not fits_record(recorded, entry):
                return {}
            place = ContiguousPart.of(recorded.box, recorded.global_shape, entry.dtype.itemsize_bytes)
            stored = entry.stored
            if entry.is_as_stored and stored is not None and len(stored.ranges) == 1 and place is not None:
                crcs[stored.ranges[0]] = crc_of_contiguous(recorded.value, place)
        return crcs


def spans_of(tensors: Sequence[RecordedTensor]) -> list[Span]:
    """Return the spans of a file that tensors (ascending) fill; neighbours without a gap have one span."""
    spans: list[Span] = []
    for start, end in (span for tensor in tensors for span in tensor.spans):
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def require_as_recorded(tensors: Sequence[RecordedTensor], staged: StagedParts) -> None:
    """Raise ShardError for the first tensor of a filled target that has not the recorded sum.

    Neighbours are looked at together, since a part that the store has copied may hold several tensors. It is fetched
    and looked at where its sum is another one: the store may have copied other bytes.
    """
    for group in _neighbours(tensors):
        expected = crc_of_pieces((tensor.crc, tensor.spec.size_bytes) for tensor in group)
        if _crc_in(staged, spans_of(group)) == expected:
            continue
        for span in spans_of(group):
            staged.fetch(*span)
        for tensor in group:
            crc = _crc_in(staged, tensor.spans)
            if crc != tensor.crc:
                raise ShardError(
                    f"the source of {tensor.spec.name!r} is not what was written",
                    expected=f"the CRC-32 {tensor.crc:08x}, as the records of its shards say",
                    got=f"{crc:08x}",
                    where=", ".join(tensor.sources),
                    remedy="restore the shard of the source that reshard-mpi verify finds damaged; if it finds none,"
                    " look for a failing disk or memory, and run the same command with --resume",
                )


def _neighbours(tensors: Sequence[RecordedTensor]) -> list[list[RecordedTensor]]:
    """Return tensors in groups that have no gap in the file between one and the next."""
    groups: list[list[RecordedTensor]] = []
    for tensor in tensors:
        if groups and groups[-1][-1].spans[-1][1] == tensor.spans[0][0]:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return groups


def _crc_in(staged: StagedParts, spans: Iterable[Span]) -> int:
    return crc_of_pieces((staged.crc_of(start, end), end - start) for start, end in spans)

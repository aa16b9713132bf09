"""Read the maps and selections of a request (`TensorMap`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.checkpoints.source import SourceCheckpoint
from reshard_mpi.errors import UsageError
from reshard_mpi.formats.dtypes import DType
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.tensor_table import ChunkedTensors
from reshard_mpi.mapping.map_file import read_rules
from reshard_mpi.mapping.numbered_state import named_tensors, training_in
from reshard_mpi.mapping.rules import TYPES, Rules
from reshard_mpi.mapping.selection import Selection, TargetTemplate
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.request import Request
from reshard_mpi.sharding.placement import unsharded

_MAX_MAPS_LENGTH = 1 << 15


class TensorMap(NamedTuple):
    """A request's maps, types and selection."""

    # of maps that are applied one after another; if there are none, every tensor keeps its name and shape
    rules: tuple[Rules, ...]
    # choice, like: of what the last one makes
    choice: Selection
    forward: bool | None  # the direction in which they are read; None: as the names tell
    like: TargetTemplate | None
    digests: Mapping[str, str]  # of what decides what the rules make, by the names of the options

    @classmethod
    def read(cls, request: Request) -> TensorMap:
        """Read the map, the types and the selection that a request names.

        Raises MapError if the map cannot be read, UsageError for options that do not belong together.
        """
        if not request.map:
            options = {"--config": request.config, "--forward": request.forward, "--reverse": request.reverse}
            for option, given in (options | {"--like": request.like}).items():
                if given:
                    raise UsageError(f"{option} belongs to a map", expected="--map as well", got="no --map")
        choice = Selection(request.include or None, request.exclude, tuple(map(_typed, request.dtype)))
        length = sum(map(len, request.map))
        if length > _MAX_MAPS_LENGTH:  # records of runs hold them
            raise UsageError(
                "the maps are too long together",
                expected=f"{_MAX_MAPS_LENGTH} characters at most",
                got=str(length),
                remedy="put equations into a file (reshard-mpi help maps)",
            )
        read = [read_rules(name, request.config) for name in request.map]
        digests = {key: text for _, digests_of_one in read for key, text in digests_of_one.items()}
        if len(read) > 1:
            in_order = " ".join(digests_of_one["map"] for _, digests_of_one in read)
            digests["map"] = hashlib.sha256(in_order.encode()).hexdigest()
        like = None if request.like is None else _like(request.like)
        forward = request.forward if request.forward or request.reverse else None
        if like is not None:  # wherever it lies
            digests["like"] = hashlib.sha256(repr(like._replace(path="")).encode()).hexdigest()
        return cls(tuple(rules for rules, _ in read), choice, forward, like, digests)

    def of_two_checkpoints(self) -> TensorMap:
        """Return the same for one of two checkpoints: globs may match tensors of the other one only."""
        return self._replace(choice=self.choice._replace(may_match_none=True))

    def choice_alone(self) -> TensorMap:
        """Return the selection alone, for a checkpoint that already is in the map's result form."""
        return self._replace(rules=(), forward=None, like=None, choice=self.choice._replace(types=()), digests={})


def _typed(text: str) -> tuple[str, DType]:
    """Return the glob and the type of `--dtype TYPE` or `--dtype GLOB=TYPE`."""
    glob, equals, name = text.rpartition("=")
    if name not in TYPES or (equals and not glob):
        short = next((short for short, dtype in TYPES.items() if dtype.name == name), None)
        raise UsageError(
            "--dtype is no type" + ("" if short is None else f"; did you mean {short!r}?"),
            expected=f"TYPE or GLOB=TYPE, TYPE one of {', '.join(TYPES)}",
            got=text,
        )
    return glob or "*", TYPES[name]


def _like(path: str) -> TargetTemplate:
    """Read the names and shapes of a checkpoint."""
    files = discovery.find_shards(path, role="checkpoint that the target is to be like")
    source = open_source(files, None)
    plan = Conversion(source, unsharded()).plan(0, checked=False)
    shapes = {spec.name: spec.global_shape for spec in plan.tensors.specs}
    nest = plan.strings.get(NEST)
    training = training_in(nest, shapes, tied_tensors(source, shapes), path)
    named = named_tensors(training, shapes, path, is_stripped=True)
    plain = {name: shapes[in_file] for name, in_file in named.items()}
    return TargetTemplate(
        path, plain, nest, {name: in_file for name, in_file in named.items() if name != in_file}, training
    )


def tied_tensors(source: SourceCheckpoint, names: Iterable[str]) -> Mapping[str, str]:
    """Return those tensors of a file that are other ones once more, with the name of the first of these."""
    if len(source.files.by_rank) != 1:
        return {}
    tensors = source.manifest(min(source.files.by_rank)).tensors
    if isinstance(tensors, ChunkedTensors):  # each is written by itself
        return {}
    first: dict[object, str] = {}
    tied = {}
    for name in names:
        entry = tensors.get(name)
        if entry is None or not entry.size_bytes:
            continue
        other = first.setdefault((entry.dtype, entry.shape, entry.source), name)
        if other != name:
            tied[name] = other
    return tied

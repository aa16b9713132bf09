"""Open a checkpoint without converting it (`open`): its tensors by name, read by slices (`Checkpoint`, `Tensor`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.api.calls import Index, PathLike, chosen_of, public, request_of, require_fitting
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.engine.regions import RegionReader
from reshard_mpi.errors import DisagreementError, ShardError, UnknownTensorError, UsageError, WrongTypeError
from reshard_mpi.filesystem.source_files import look_again
from reshard_mpi.formats.dtypes import to_numpy
from reshard_mpi.formats.manifest import NEST
from reshard_mpi.journal.provenance import FileState
from reshard_mpi.options import check_flag
from reshard_mpi.planning.rank_plan import meeting
from reshard_mpi.planning.target_tensors import Policy
from reshard_mpi.runs.maps_and_packing import planner_with_maps
from reshard_mpi.runs.outcome import Overflow, overflow_warnings
from reshard_mpi.runs.planner import Planner
from reshard_mpi.runs.progress import log
from reshard_mpi.runs.request import Request, Strategies, list_object_stores
from reshard_mpi.runs.transform import plan_alone
from reshard_mpi.sharding.box import Box
from reshard_mpi.text import with_addresses

if TYPE_CHECKING:
    import numpy as np

    from reshard_mpi.filesystem.source_files import FileVersion
    from reshard_mpi.planning.rank_plan import Group, RankPlan
    from reshard_mpi.quantization.weights import QuantizedWeights


class SourcePart(NamedTuple):
    """Where a part of a tensor comes from.

    Attributes:
        rank: the source rank whose shard holds it.
        files: the paths of the files that it lies in; none for elements that a map makes up.
        start, stop: the part, as the first index and the one after the last in each dimension of the tensor.
    """

    rank: int
    files: tuple[str, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


class Tensor:
    """A tensor of an open checkpoint. Only indexing it reads.

    It is used as a dataset of h5py is.

    Attributes:
        name: its name in the checkpoint.
        shape: of the whole tensor.
        dtype: numpy's; for bfloat16 and float8 that of ml_dtypes, for int4 int8.
    """

    __slots__ = ("_checkpoint", "_group", "_place", "dtype", "name", "shape")

    def __init__(self, checkpoint: Checkpoint, group: Group, place: int) -> None:
        self._checkpoint = checkpoint
        self._group, self._place = group, place
        self.name = group.names[place]
        self.shape: tuple[int, ...] = group.kind.shape
        self.dtype: np.dtype[Any] = to_numpy(group.kind.dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise WrongTypeError(
                "a tensor of no dimensions has no length",
                expected="one dimension or more",
                got="[]",
                where=self.name,
                remedy="read it with [()]",
            )
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name!r}: {self.dtype.name} {list(self.shape)}>"

    @public
    def __getitem__(self, index: Index) -> Any:
        """Read elements at integers and slices, with steps too, as an array of numpy has them.

        Raises UsageError for other indices, OutOfRangeError for an integer out of range; errors of the source as
        `reshard_mpi.transform` does.
        """
        import numpy as np

        chosen, view = chosen_of(index, self.shape, self.name)
        array: np.ndarray[Any, Any] = np.empty([*map(len, chosen)], self.dtype)
        self._read(chosen, array)
        return array if view is None else array[view]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise UsageError(
                "a tensor of a checkpoint is read into a new array",
                expected="copy=True, or none said",
                got="copy=False",
                where=self.name,
                remedy="read_into fills an array that is there",
            )
        array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)  # type: ignore[no-any-return]

    @public
    def read_into(self, array: np.ndarray[Any, Any], box: Index = ...) -> None:
        """Read elements into memory that the caller owns; straight into it, where the bytes can go there.

        Args:
            array: of the tensor's type, writable, with the shape of what is read; of any strides, but no element may
                lie where another does.
            box: what is read, as in `tensor[...]`, without negative steps; dimensions of integers have length 1.

        If it raises, `array` may be filled in part. Raises as `tensor[...]` does.
        """
        chosen, view = chosen_of(box, self.shape, self.name)
        if any(isinstance(each, slice) and each.step for each in view or ()):
            raise UsageError(
                "a box has a negative step",
                expected="elements in their order",
                got=str(box),
                where=self.name,
                remedy="read into a view of the array that is turned: array[::-1]",
            )
        require_fitting(array, self.dtype, tuple(map(len, chosen)), self.name)
        self._read(chosen, array)

    def _read(self, chosen: Sequence[range], array: np.ndarray[Any, Any]) -> None:
        """Read elements, and log how many were too large for their type."""
        too_large = self._checkpoint.reader.read(self._group, self._place, chosen, array)
        if too_large:
            log((), overflow_warnings([[Overflow(self.name, self._group.kind.dtype.name, too_large)]]))

    def sources(self, box: Index = ...) -> tuple[SourcePart, ...]:
        """Return which parts of files the elements come from; see `Checkpoint.sources`."""
        from reshard_mpi.formats.locations import paths_of

        chosen, _ = chosen_of(box, self.shape, self.name)
        if not all(map(len, chosen)):
            return ()
        plan = self._group.tensor(self._place)
        first = plan.spec.box.start
        start = tuple(low + each[0] for low, each in zip(first, chosen))
        stop = tuple(low + each[-1] + 1 for low, each in zip(first, chosen))
        return tuple(
            SourcePart(item.source_rank, tuple(map(with_addresses, paths)), own.start, own.stop)
            for item in meeting(plan.reads, Box(start, stop))
            for own, paths in ((item.target_region, dict.fromkeys(paths_of(item.source.source))),)
        )

    def __reduce__(self) -> tuple[object, ...]:
        return operator.getitem, (self._checkpoint, self.name)


# The folder of a source, its files, and the digests of what it is read by.
State = tuple[str, tuple[FileState, ...], tuple[object, ...]]


class _Origin(NamedTuple):
    """The origin of an open checkpoint: one target of a request, planned, and the versions of its files by path.

    Attributes:
        state: by which it is seen that another process, or a later one, has opened the same: the files of the source,
            and the digests of strategies, maps and what else it is read by.
    """

    request: Request
    rank: int
    plan: RankPlan
    planner: Planner
    versions: Mapping[str, FileVersion]
    state: State

    @classmethod
    def of(cls, request: Request, rank: int, *, check: bool) -> _Origin:
        """Open the source of a request, and plan a target; `check` is as in `open`."""
        list_object_stores(request)
        shards, strategies = request.shard_files(), Strategies.read(request)
        planner = Planner(
            open_source(shards, strategies.source),
            strategies.target,
            Policy(request.unlisted, request.strict, request.replicas, request.accumulated),
        )
        planner, digests = planner_with_maps(request, planner)
        if check:
            (plan,), outcome = plan_alone(planner, [rank])
            log(outcome.notes, outcome.warnings)
        else:
            plan = planner.plan(rank, checked=False)
        files = planner.source.files
        sources, versions = files.sources(plan.read_ranks), files.versions(plan.read_ranks)
        read_by = (strategies.source_digest, strategies.target_digest, *sorted(digests.items()))
        return cls(request, rank, plan, planner, versions, (sources.folder, sources.files, read_by))


class Checkpoint(Mapping[str, Tensor]):
    """An open checkpoint: its tensors by name, in order. It is a context manager, and closes its files at the end.

    Threads may read from it at the same time, and a child process that was forked. A pickle of it opens it again where
    it is loaded, and is refused there if the files are others by then.
    """

    def __init__(self, origin: _Origin) -> None:
        self._origin = origin
        self._plan = origin.plan
        self._path = origin.planner.source.files.path
        self._is_closed = False
        self._reader = RegionReader(origin.planner.limits, origin.versions)

    def __getitem__(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            raise UnknownTensorError(
                f"the checkpoint has no tensor {name!r}", expected=_like(name, self._places), where=self._path
            )
        number, index = place
        return Tensor(self, self._plan.tensors.groups[number], index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.tensors.specs.names)

    def __len__(self) -> int:
        return len(self._plan.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"<Checkpoint {self._path!r}: {len(self)} tensors>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Nothing can be read afterwards."""
        self._is_closed = True
        self._reader.close()

    @cached_property
    def attrs(self) -> dict[str, Any]:
        """Steps, schedulers, settings of optimizers and other plain nested values beside the tensors.

        A dict lacks the entries that are tensors, and in a list None is in the place of one. Raises ShardError if the
        source has it in a form that cannot be read.
        """
        from reshard_mpi.formats.nest.nodes import NestError
        from reshard_mpi.formats.nest.rebuild_tree import values_beside

        try:
            tree = values_beside(self, self._plan.strings)
        except NestError as error:
            raise ShardError(
                "what a checkpoint holds beside its tensors cannot be read", got=str(error), where=self._path
            ) from error
        return tree if isinstance(tree, dict) else {"": tree}

    def sources(self, name: str, box: Index = ...) -> tuple[SourcePart, ...]:
        """Return which files and source ranks a tensor, or a box of it, comes from; nothing is read.

        Args:
            box: as in `checkpoint[name][box]`. With steps: of all that lies between its first and last elements.
        """
        return self[name].sources(box)

    @property
    def texts(self) -> dict[str, str]:
        """The texts beside the tensors, by name, as files have them."""
        return {name: text for name, text in self._plan.strings.items() if name != NEST}

    @property
    def quantization(self) -> QuantizedWeights | None:
        """The quantized weights, each with its companions; None if no weight is known to be quantized."""
        return self._origin.planner.planned_source.quantization

    @property
    def reader(self) -> RegionReader:
        """The reader of the tensors. Raises UsageError if the checkpoint is closed."""
        if self._is_closed:
            raise UsageError(
                "the checkpoint is closed",
                expected="one that is open",
                got="a tensor that is read after close(), or behind its `with`",
                where=self._path,
                remedy="read within `with reshard_mpi.open(...)`, or open it again",
            )
        return self._reader

    @property
    def state(self) -> State:
        """The folder of the checkpoint, its files as they are, and digests of strategies and maps."""
        return self._origin.state

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return self._plan.tensors.places

    def __reduce__(self) -> tuple[object, ...]:
        return _checkpoint_again, (self._origin.request, self._origin.rank, self.state)


@public
def open(
    source: PathLike,
    *,
    src_strategy: PathLike | None = None,
    map: PathLike | Iterable[PathLike] | None = None,
    forward: bool = False,
    reverse: bool = False,
    config: PathLike | None = None,
    axis: Mapping[str, int] | str | Iterable[str] = (),
    like: PathLike | None = None,
    dtype: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    source_format: str | None = None,
    select: str | None = None,
    src_files: int | None = None,
    replicas: str = "sample",
    accumulated: str = "refuse",
    check: bool = True,
) -> Checkpoint:
    """Open a checkpoint of any format, whole, whatever it is cut into; nothing is converted or copied.

    Only the structure of its files is read, and a sample of them by which it is seen that a strategy does not fit.

    Args:
        source: its path. src_strategy to accumulated: as in `transform`; with a map, types or a choice the checkpoint
            has what they make.
        check: False leaves out the sample, and that shards which should hold the same do.

    Raises a ReshardError, the same one as `transform` would: for a strategy that does not fit, for a shard that is
    missing, for shards that disagree. What only reading can tell is refused when it is read.
    """
    arguments = dict(locals())
    is_checked = check_flag(arguments.pop("check"), "check")
    return opened(request_of(arguments).from_anywhere(), 0, check=is_checked)


def opened(request: Request, rank: int, *, check: bool = True) -> Checkpoint:
    """Return the tensors of target rank `rank` of a request as an open checkpoint; `check` is as in `open`."""
    return Checkpoint(_Origin.of(request, rank, check=check))


def _checkpoint_again(request: Request, rank: int, state: State) -> Checkpoint:
    """Open a checkpoint that has been pickled. Raises DisagreementError if it is another one by now."""
    return Checkpoint(_origin_again(request, rank, state))


@lru_cache(maxsize=4)
def _origin_again(request: Request, rank: int, state: State) -> _Origin:
    look_again()
    origin = _Origin.of(request, rank, check=False)
    require_same_state(state, origin.state)
    return origin


def require_same_state(expected: State, got: State) -> None:
    """Raise DisagreementError if a checkpoint was opened in two states."""
    if expected != got:
        others = (f"{now} instead of {was}" for was, now in zip_longest(expected[1], got[1]) if was != now)
        raise DisagreementError(
            "a checkpoint is another one than was opened before, or elsewhere",
            expected=f"the files of {expected[0]} as they were, read by the same strategies and maps",
            got=next(others, f"those of {got[0]}, or other strategies or maps"),
            where=got[0],
            remedy="choose the checkpoint (--select) while others are saved beside it; copies need their times (cp -p)",
        )


def _like(name: object, names: Mapping[str, object]) -> str:
    """Return names that are like a wrong one, or some of all."""
    import difflib

    some = list(names)[:1000]
    near = difflib.get_close_matches(str(name), some, 3) or some[:3]
    return ", ".join(map(repr, near)) or "none: it has no tensors"

"""The map of a request. All that reads and applies maps is loaded only where there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from reshard_mpi.filesystem.paths import real_path
from reshard_mpi.runs.conversion import Conversion
from reshard_mpi.runs.request import Request


def through_map(request: Request, conversion: Conversion) -> tuple[Conversion, Mapping[str, str]]:
    """Return the conversion of what the request's maps make of the source, and digests of what decides what that is.

    The same conversion if the request leaves all tensors as they are. Raises MapError
    if the map cannot be read, UsageError for options that do not belong together.
    """
    if not request.is_mapped:
        return conversion, {}
    from reshard_mpi.runs.mapped import conversion_through
    from reshard_mpi.runs.maps import TensorMap

    tensor_map = TensorMap.read(request)
    return conversion_through(tensor_map, conversion), tensor_map.digests


def map_words(request: Request) -> tuple[str, ...]:
    """Return the request's maps as they may be given from any folder: absolute paths, and equations as they are."""
    if not request.map:
        return ()
    from reshard_mpi.mapping.reading import map_path

    paths = ((name, map_path(name)) for name in request.map)
    return tuple(name if path is None else str(real_path(path)) for name, path in paths)


def both_through_map(
    request: Request, first: Conversion, second: Conversion
) -> tuple[tuple[Conversion, Conversion], Callable[[Collection[str]], None]]:
    """Return the conversions of two checkpoints to be compared: the first through the map, of both what is chosen.

    Also returns a function that takes the names of both and raises MapError if a glob matches none, or nothing is left.
    """
    if not request.is_mapped:
        return (first, second), lambda _: None
    from reshard_mpi.mapping.choice import require_any
    from reshard_mpi.runs.mapped import conversion_through
    from reshard_mpi.runs.maps import TensorMap

    tensor_map = TensorMap.read(request)
    of_both = tensor_map.of_two_checkpoints()
    first = conversion_through(of_both, first)
    if request.include or request.exclude:
        second = conversion_through(of_both.choice_alone(), second)

    def require_some(names: Collection[str]) -> None:
        require_any(tensor_map.choice, names)

    return (first, second), require_some

"""Read the files in which a framework keeps its training by torch (`read_content`), and compare them."""

from __future__ import annotations

from collections.abc import Iterator

from reshard_mpi.errors import ShardError
from reshard_mpi.formats import structure
from reshard_mpi.formats.nest import flatten_tree
from reshard_mpi.formats.nest.nodes import Call, Dict, NestError, Value
from reshard_mpi.formats.torch.file_content import FileContent, content_of
from reshard_mpi.formats.torch.tensors import is_tensor


def read_content(path: str, framework: str) -> FileContent:
    """Read the object of a file, in which the path is put before the keys of storages.

    Args:
        framework: whose checkpoint it is of, as errors say.

    Raises ShardError if it is not sound, or of the other byte order.
    """
    with structure.opened(path) as file:
        content = content_of(file, prefix=path)
    if content.swapped:
        problem = f"a file of a {framework} checkpoint has the byte order that this machine has not"
        raise ShardError(problem, where=path)
    return content


def pairs_of(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield the entries of a dictionary, ordered or not, whose keys are texts; none of anything else."""
    if type(value) is Dict or type(value) is Call:
        yield from ((key, entry) for key, entry in value.pairs() if type(key) is str)


def text_of(value: Value) -> str:
    """Return a text that is equal for equal values, without tensors."""
    try:
        flattened = flatten_tree.flatten([value], is_tensor, has_order=False)
    except NestError as error:
        return error.problem
    return str([*flattened.strings.values()])

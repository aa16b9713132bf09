"""Join what several files of one rank hold into one manifest (`joined`).

Files that hold different tensors lie side by side, under their own names. Branches of a training's state come under
the name of their branch, since a model and its optimizer each have names of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.checkpoints.file_names import branches_in, keys_of
from reshard_mpi.errors import DisagreementError, SourceError
from reshard_mpi.formats.manifest import NEST, Manifest, ShardIdentity, same_nest
from reshard_mpi.formats.nest.nodes import LESS, MAX_CHARACTERS, NestError, decoded, parsed, written
from reshard_mpi.formats.tensor_table import ChunkedTensors, ListedChunk, TensorTable
from reshard_mpi.planning.shared_facts import require_one_checkpoint
from reshard_mpi.planning.step_counters import plain_counters
from reshard_mpi.sharding import strategy_table
from reshard_mpi.sharding.strategy import Strategy

_TO_BE_ONE_CHECKPOINT = "choose files with --select, or put the shards of several ranks into rank_* folders"


class _Branch(NamedTuple):
    """The nest of one file as a branch.

    Example, of a file `{"optim": {"state": {...}}}` that becomes the branch `optimizer`:

        _Branch("optimizer.", "optim.", {"dict": [["state", {"dict": [...]}]]}, ["optimizer.state.0.exp_avg"])
    """

    prefix: str  # what names of its tensors begin with
    own_prefix: str  # what they begin with in the file, and not as a branch; mostly empty
    root: Any  # the nest below the branch's name
    order: Sequence[str] | None  # names of its tensors in order; None: it is not known

    def name(self, own_name: str) -> str:
        """Return the name that a tensor of the file has as a part of the branch."""
        return self.prefix + own_name.removeprefix(self.own_prefix)


def joined(manifests: Sequence[Manifest], path: str, *, by_branch: bool) -> Manifest:
    """Return one manifest of several files.

    Args:
        path: what errors call it.
        by_branch: each file is a branch, which its name says.

    Raises SourceError if two have the same name, or nests that cannot be joined; DisagreementError if they are of
    different ranks, or count other steps.
    """
    require_one_checkpoint(plain_counters(manifests))
    return _under_branches(_branches(manifests, path), path) if by_branch else _side_by_side(manifests, path)


def names_in_branches(manifests: Sequence[Manifest], path: str) -> dict[str, Mapping[str, str]]:
    """Return the names that tensors get when branches are joined, by the path of a branch and their names in it.

    Args and errors as of `joined`.
    """
    return {
        own.path: {name: name if branch is None else branch.name(name) for name in own.tensors}
        for own, branch in _branches(manifests, path)
    }


def _branches(manifests: Sequence[Manifest], path: str) -> list[tuple[Manifest, _Branch | None]]:
    """Return files by the branches that their names say; None beside files that are of no branch."""
    held = branches_in(Path(manifest.path) for manifest in manifests)
    of_path = {Path(manifest.path): manifest for manifest in manifests}
    own = {word: _side_by_side([of_path[each] for each in paths], path) for word, paths in held.items()}
    return [(manifest, _branch(word, manifest) if word else None) for word, manifest in own.items()]


def _side_by_side(manifests: Sequence[Manifest], path: str) -> Manifest:
    """Join files under the names that their tensors have."""
    if len(manifests) == 1:
        return manifests[0]
    nested = [manifest for manifest in manifests if NEST in manifest.strings]
    strings = {name: text for manifest in manifests for name, text in manifest.strings.items()}
    if nested:
        common = same_nest(manifest.strings[NEST] for manifest in nested)
        if common is None:
            raise _two_nests(nested, path)
        strings[NEST] = common
    return _merged([(manifest, None) for manifest in manifests], strings, path)._replace(identity=None)


def _two_nests(nested: Sequence[Manifest], path: str) -> SourceError:
    return SourceError(
        "two of the loose files have nested dictionaries of their own",
        expected="one file, or files that are dictionaries of tensors",
        got=f"{nested[0].path} and another",
        where=path,
        remedy="choose one of them with --select, and convert the others by themselves",
    )


def _branch(word: str, manifest: Manifest) -> _Branch:
    try:
        return _branch_of(word, keys_of(word), manifest.tensors.keys(), manifest.strings)
    except NestError as error:
        raise _unsound(error, manifest.path) from None


def _branch_of(word: str, keys: Collection[str], names: Collection[str], strings: Mapping[str, str]) -> _Branch:
    """Make a branch of what one file holds. Raises NestError if the text of its nest is none.

    Args:
        word: the name of the branch.
        keys: a dictionary with one of these as its only key says itself which branch it is.
        names: of the file's tensors, in its order.
    """
    texts = [[key, text] for key, text in strings.items() if key != NEST]
    if NEST not in strings:  # a dictionary of tensors, followed by texts
        root: Any = {"dict": [*([name] for name in names if texts), *texts]}
        return _Branch(f"{word}.", "", root, [f"{word}.{name}" for name in names])
    try:
        content = parsed(strings[NEST])
    except (ValueError, RecursionError) as error:
        raise NestError("the text of the nest is no JSON", str(error)[:100]) from None
    match content.root:
        case {"dict": [[str() as key, {} as below]], **rest} if (
            key in keys and not rest and not texts and all(name.startswith(f"{key}.") for name in names)
        ):
            branch = _Branch(f"{word}.", f"{key}.", below, None)
        case {"dict": list() as entries, **rest} if texts:
            branch = _Branch(f"{word}.", "", {**rest, "dict": [*entries, *texts]}, None)
        case _:
            branch = _Branch(f"{word}.", "", content.root, None)
    return branch if content.order is None else branch._replace(order=[*map(branch.name, decoded(content.order))])


def _unsound(error: NestError, path: str) -> SourceError:
    return SourceError(
        f"the files of a checkpoint cannot be joined: {error.problem}",
        got=error.got,
        where=path,
        remedy=error.remedy or "choose one of them with --select",
    )


def _under_branches(parts: Sequence[tuple[Manifest, _Branch | None]], path: str) -> Manifest:
    """Join branches, and files that are none, whose tensors keep their names.

    A name of the latter that begins as a branch would come to lie in that.
    """
    branches = [branch for _, branch in parts if branch is not None]
    others = [manifest for manifest, branch in parts if branch is None]
    for manifest in others:
        if NEST in manifest.strings:
            raise _two_nests([manifest], path)
        prefixes = tuple(branch.prefix for branch in branches)
        clash = next((name for name in manifest.tensors if name.startswith(prefixes)), None)
        if clash is not None:
            raise _held_twice(clash, "a branch of this name", manifest.path, path)
    try:
        nest = _nest_of_branches(branches)
    except NestError as error:
        raise _unsound(error, path) from None
    strings = {name: text for manifest in others for name, text in manifest.strings.items()}
    return _merged(parts, {**strings, NEST: nest}, path)


def _nest_of_branches(branches: Sequence[_Branch]) -> str:
    """Return one text for branches of different names, with the order of their tensors if there is room for it.

    Raises NestError if it is too long.
    """
    root = {"dict": [[branch.prefix[:-1], branch.root] for branch in branches]}
    orders = [branch.order for branch in branches if branch.order is not None]
    if len(orders) == len(branches):
        text = written(root, chain.from_iterable(orders))
        if len(text) <= MAX_CHARACTERS:
            return text
    text = written(root, None)
    if len(text) > MAX_CHARACTERS:
        raise NestError("what files hold besides tensors is too much", f"more than {MAX_CHARACTERS} characters", LESS)
    return text


def _held_twice(name: str, first: str, second: str, path: str) -> SourceError:
    return SourceError(
        f"two of the loose files hold {name!r}",
        expected="files of one full checkpoint, each tensor in one of them",
        got=f"it is in {first} and {second}",
        where=path,
        remedy=_TO_BE_ONE_CHECKPOINT,
    )


def _merged(parts: Sequence[tuple[Manifest, _Branch | None]], strings: Mapping[str, str], path: str) -> Manifest:
    """Return one manifest of files whose nests have been joined."""
    manifests = [manifest for manifest, _ in parts]
    is_chunked = any(isinstance(manifest.tensors, ChunkedTensors) for manifest in manifests)
    tensors = ChunkedTensors(path) if is_chunked else TensorTable(path)
    holder: dict[str, str] = {}
    for manifest, branch in parts:
        for own_name in manifest.tensors:
            name = own_name if branch is None else branch.name(own_name)
            if name in tensors:
                raise _held_twice(name, holder[name], manifest.path, path)
            _add(tensors, name, manifest.tensors, own_name)
            holder[name] = manifest.path
        if isinstance(tensors, ChunkedTensors) and isinstance(manifest.tensors, ChunkedTensors):
            tensors.missing += manifest.tensors.missing
    left_out = tuple(
        what if branch is None else f"{branch.prefix[:-1]}: {what}"
        for manifest, branch in parts
        for what in manifest.left_out
    )
    part = next((manifest for manifest in manifests if manifest.part_of), manifests[0])
    return Manifest(
        path,
        manifests[0].format,
        tensors,
        strings,
        _identity(parts),
        left_out=left_out,
        lacks_others=any(manifest.lacks_others for manifest in manifests),
        part_of=part.part_of,
        to_have_all=part.to_have_all,
    )


def _add(tensors: TensorTable, name: str, of_file: TensorTable, own_name: str) -> None:
    """Add a tensor of a file under another name, with its pieces if these are listed."""
    if not (isinstance(tensors, ChunkedTensors) and isinstance(of_file, ChunkedTensors)):
        tensors.add_entry(of_file[own_name]._replace(name=name))
        return
    kind, number = of_file.kind_named(own_name), of_file.index_by_name[own_name]
    if own_name in of_file.unreadable:
        tensors.add_unreadable(name, kind.dtype, kind.shape, of_file.unreadable[own_name])
        return
    places = zip(of_file.chunk_lists[of_file.chunk_list_ids[number]], of_file.numbers[number])
    pieces = [ListedChunk(box, pieces_of_file, own) for (box, pieces_of_file), own in places]
    tensors.add_listed(name, kind.dtype, kind.shape, pieces)


def _identity(parts: Sequence[tuple[Manifest, _Branch | None]]) -> ShardIdentity | None:
    """Return the identity of files of one rank, which places the tensors of all; None if none says its rank."""
    stated = [(manifest, branch, manifest.identity) for manifest, branch in parts if manifest.identity is not None]
    if not stated:
        return None
    (first, _, identity), *others = stated
    for other, _, own in others:
        if own[:2] != identity[:2]:
            raise DisagreementError(
                "two files of one rank say they are of different ranks",
                expected=f"rank {identity.rank} of {identity.world_size}, as {first.path}",
                got=f"rank {own.rank} of {own.world_size}",
                where=other.path,
                remedy="put every file back to those of its own rank",
            )
    placements = {
        name if branch is None else branch.name(name): placement
        for manifest, branch, own in stated
        for name, placement in strategy_table.stated(own.strategy, manifest.path).parameters.items()
    }
    strategy = Strategy(identity.world_size, 1, placements, origin=first.path)
    return identity._replace(strategy=strategy_table.dumps(strategy))

"""Tell by the names of files which branch of a training each holds (`branch_of_name`), and choose a step (`choose`).

Trainings save `model.pt` beside `optim.pt`, and so in every rank; the words of the names say what is in them. Where
rank folders hold files of several steps, only the names tell which belong together.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, SourceError
from reshard_mpi.groups import grouped
from reshard_mpi.text import first_few, natural_key

# Of the words in a name, one of these says what the file is; the branch that it becomes, in the order of branches.
_BRANCHES = {
    "model": "model",
    "optimizer": "optimizer",
    "optim": "optimizer",
    "extra": "extra_state",
    "scheduler": "scheduler",
    "scaler": "scaler",
}
MODEL, OPTIMIZER = "model", "optimizer"
# Random states and places in the data are of one layout of ranks. The Trainer of transformers pickles its arguments.
LEFT_OUT = "left out"
_ARGUMENTS = "training_args.bin"
_LEFT_OUT_WORDS = frozenset(("rng", "random", "sampler"))


def branch_of_name(name: str) -> str:
    """Return the branch that a file or folder of this name holds; empty if its words name none, or several.

    `LEFT_OUT` for what becomes no branch.
    """
    words = re.findall("[a-z]+", _stem(name).lower())
    branches = {_BRANCHES[word] for word in words if word in _BRANCHES}
    if len(branches) == 1:
        return branches.pop()
    is_left_out = not branches and (name == _ARGUMENTS or not _LEFT_OUT_WORDS.isdisjoint(words))
    return LEFT_OUT if is_left_out else ""


def keys_of(branch: str) -> frozenset[str]:
    """Return the keys by which a dictionary says itself that it is this branch."""
    return frozenset(word for word, own in _BRANCHES.items() if own == branch) | {branch}


def branches_in(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Group files by the branch that they hold, in the order of branches; last what names none (empty text).

    Empty if there are not two branches at least: then each file is what it is without the others.
    """
    held: dict[str, list[Path]] = {branch: [] for branch in dict.fromkeys((*_BRANCHES.values(), ""))}
    for path in paths:
        branch = branch_of_name(path.name)
        if branch != LEFT_OUT:
            held[branch].append(path)
    held = {branch: of_branch for branch, of_branch in held.items() if of_branch}
    return held if len(held.keys() - {""}) > 1 else {}


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def numbers_of(path: Path) -> tuple[int, ...]:
    """Return the numbers in a name: ranks, steps.

    None of a part's name (`model-00001-of-00002.pt`), whose numbers count parts.
    """
    return () if PART.fullmatch(path.name) else tuple(map(int, re.findall("[0-9]+", _stem(path.name))))


# Epoch and step, as MindSpore ends names.
STEP = re.compile(r"-(\d+)_(\d+)\.\w+$")
_DIGITS = re.compile(r"\d+")


def name_without_rank(rank: int, name: str) -> str:
    """Return the name of a shard of `rank` with the rank replaced: the same for all ranks, if epoch and step are."""
    cut, number = _end_of_stem(name), str(rank)
    return _DIGITS.sub(lambda match: "<rank>" if match[0] == number else match[0], name[:cut]) + name[cut:]


def _name_without_last_rank(rank: int, name: str) -> str:
    """Return the name with the rank replaced where it comes last before the step: in `llama2_7b_rank_2` only once."""
    return _replaced_last(rank, name, _end_of_stem(name))


def name_ending_in_rank(rank: int, name: str) -> str:
    """Return the name with the rank replaced also where the step else is: targets may have the prefix `net-3_`."""
    return _replaced_last(rank, name, len(name) - len(Path(name).suffix))


def _replaced_last(rank: int, name: str, cut: int) -> str:
    places = [match.span() for match in _DIGITS.finditer(name[:cut]) if match[0] == str(rank)]
    return f"{name[: places[-1][0]]}<rank>{name[places[-1][1] :]}" if places else name


def _end_of_stem(name: str) -> int:
    """Return where the part of a shard's name ends that comes before its epoch and step, or before its ending."""
    step = STEP.search(name)
    return step.start() if step else len(name) - len(Path(name).suffix)


# Ways to call what all ranks have by one name. They take a rank and the name of its file.
NAME_WAYS: tuple[Callable[[int, str], str], ...] = (
    lambda _, name: name,
    name_without_rank,
    _name_without_last_rank,
)


# One of several files that hold a checkpoint together: how the others are called, its number, and how many there are.
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,6})(?P<rest>-of-(?P<total>\d{1,6})\.\w+)")
# Where files of an earlier run lie there, MindSpore puts `_1`, `_2` ... before epoch and step.
_RUN_NUMBER = re.compile(r"_\d+(?=-\d+_\d+\.\w+$)")
_NUMBER = re.compile(r"[0-9]+")
# Text right before a number that makes it a step. `checkpoint_3` is this package's name for rank 3.
_STEP_WORD = re.compile(
    r"(?:^|[^a-z])(?:(?:global_?)?(?:steps?|it|iters?|iterations?|epochs?)[-_=.]?|(?:checkpoint|ckpt)-)$", re.IGNORECASE
)
_MAX_NAMED = 4


class FileChoice(NamedTuple):
    """One file of each rank. notes: what was chosen if there was a choice. warnings: on names that differ."""

    files: Mapping[int, Path]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class _Name(NamedTuple):
    """The name of a shard, cut at its numbers."""

    words: tuple[str, ...]  # the texts between them
    numbers: tuple[int, ...]
    is_step: tuple[bool, ...]  # of each number, whether it looks like an epoch or a step
    ends_in_step: bool  # whether the last two are an epoch and a step, as MindSpore ends names

    def moment(self, place: int) -> str:
        """Return the moment that the number at a place in `numbers` says; it looks like a step."""
        if self.ends_in_step and place >= len(self.numbers) - 2:
            return f"epoch {self.numbers[-2]} step {self.numbers[-1]}"
        return f"step {self.numbers[place]}"


def choose(candidates: Mapping[int, list[Path]], path: str, *, is_selected: bool = False) -> FileChoice:
    """Return the file of each rank of the newest checkpoint that all rank folders have.

    Args:
        candidates: the shards in each rank folder, one or more, in natural order of their names.
        path: of the checkpoint. Names of one folder may differ in their numbers only: files of other names hold other
            tensors of the rank.
        is_selected: whether the user has selected them, so that numbers that differ from rank to rank are only told.

    Raises SourceError if they do, if files are parts of one shard, or no checkpoint is in all folders;
    DisagreementError if the names are of different steps, or differ in other numbers than the rank's and are not
    selected.
    """
    _require_no_parts(candidates, path)
    _require_one_wording(candidates, path)
    files, notes = _newest(candidates, path)
    require_one_step(files, path)
    if not is_selected:
        _require_numbers_of_ranks(files, path)
    return FileChoice(files, notes, tuple(_warnings(files, path)))


def require_one_step(files: Mapping[int, Path], path: str) -> None:
    """Raise DisagreementError if the names of the files, by rank, are of different epochs or steps."""
    for names in _by_wording(files).values():
        ranks = list(names)
        for place in _places_that_differ(names):
            if not names[ranks[0]].is_step[place] or _are_of_one_moment(names, place):
                continue
            first, other = ranks[0], _first_other(names, place)
            raise DisagreementError(
                "the shards are of different moments",
                expected=f"{names[first].moment(place)}, as {files[first].name} of rank {first}",
                got=f"{names[other].moment(place)}: {files[other].name} of rank {other}",
                where=path,
                remedy="restore the missing shards, or choose one moment with --select",
            )


def _require_numbers_of_ranks(files: Mapping[int, Path], path: str) -> None:
    """Raise DisagreementError if names differ in a number other than the rank's: it may say another moment.

    Nothing else says so where no word before it does: `net-100`, `net-200`.
    """
    for first, other in _of_other_numbers(files):
        raise DisagreementError(
            "the names of the shards differ in a number that is not that of the rank",
            expected=f"one checkpoint, as {files[first].name} of rank {first}",
            got=f"{files[other].name} of rank {other}",
            where=path,
            remedy="restore the missing shards, or choose one checkpoint, such as"
            f" --select '{glob.escape(files[first].name)}'; if they belong together, as where the number is that of a"
            f" host or a device, select them all: --select '{_glob_of(files[first].name)}'",
        )


def _of_other_numbers(files: Mapping[int, Path]) -> Iterator[tuple[int, int]]:
    """Yield two ranks for each number in which names of the same words differ and that is not the rank's."""
    for names in _by_wording(files).values():
        ranks = list(names)
        for place in _places_that_differ(names):
            values = [name.numbers[place] for name in names.values()]
            if not any(_follows(values, ranks, first) for first in (0, 1)):
                others = (
                    rank for rank, value in zip(ranks, values) if value not in (values[0], values[0] + rank - ranks[0])
                )
                yield ranks[0], next(others, _first_other(names, place))


def _require_no_parts(candidates: Mapping[int, list[Path]], path: str) -> None:
    """Raise SourceError if names say that several files hold the shard of a rank: `model-00001-of-00002`.

    Where each rank has one of them, with the number of the rank, they are the shards themselves.
    """
    parts: dict[int, dict[int, str]] = {}
    for rank, entries in candidates.items():
        for entry in entries:
            match = PART.fullmatch(entry.name)
            if match is not None and int(match["total"]) > 1:
                parts.setdefault(rank, {})[int(match["number"])] = entry.name
    are_shards = len(parts) > 1 and any(
        all(set(numbers) == {rank + first} for rank, numbers in parts.items()) for first in (0, 1)
    )
    if parts and not are_shards:
        rank, names = next(iter(parts.items()))
        raise SourceError(
            "several files hold the shard of one rank together, each a part of it",
            expected="one file a rank",
            got=f"{first_few(list(names.values()), _MAX_NAMED)} of rank {rank}",
            where=path,
            remedy="save the tensors of each rank in one file",
        )


def _require_one_wording(candidates: Mapping[int, list[Path]], path: str) -> None:
    """Raise SourceError if names of a rank's files differ in words: each may hold other tensors of the rank."""
    for rank, entries in candidates.items():
        names: dict[tuple[str, ...], str] = {}
        for entry in entries:
            names.setdefault(_parsed(entry.name).words, entry.name)
        if len(names) > 1:
            globs = " or ".join(f"--select '{_glob_of(name)}'" for name in list(names.values())[:2])
            raise SourceError(
                "several files of one rank",
                expected="one file a rank, or names that differ in their step only",
                got=f"{first_few(list(names.values()), _MAX_NAMED)} of rank {rank}",
                where=path,
                remedy=f"choose with {globs}, and convert the others into another folder",
            )


def _newest(candidates: Mapping[int, list[Path]], path: str) -> tuple[dict[int, Path], tuple[str, ...]]:
    """Return by rank the file of the newest checkpoint that all rank folders have, with a note if there are several."""
    if all(len(entries) == 1 for entries in candidates.values()):
        return {rank: entries[0] for rank, entries in candidates.items()}, ()
    for key_of in NAME_WAYS:
        keyed = {rank: {key_of(rank, entry.name): entry for entry in entries} for rank, entries in candidates.items()}
        common = set.intersection(*(set(keys) for keys in keyed.values()))
        if common:
            newest = max(common, key=natural_key)
            note = f"several checkpoints in {path}: {newest} chosen, the newest by name that all ranks have"
            return {rank: keys[newest] for rank, keys in keyed.items()}, (note,)
    raise SourceError(
        "no checkpoint that all rank folders have",
        expected="one file of the same name (or the same but for the rank) in every rank folder",
        got="; ".join(f"rank_{rank}: {entries[-1].name}" for rank, entries in list(candidates.items())[:4]),
        where=path,
        remedy="choose one with --select",
    )


def _warnings(files: Mapping[int, Path], path: str) -> Iterator[str]:
    """Yield a warning if names of the files, by rank, differ in more than the rank; steps are known to agree."""
    firsts = [next(iter(names)) for names in _by_wording(files).values()]
    pairs = [(firsts[0], firsts[1])] if len(firsts) > 1 else list(_of_other_numbers(files))
    for pair in pairs[:1]:
        yield (
            f"the shards in {path} may be of different checkpoints: their names differ in more than the rank, as "
            + " and ".join(f"{files[rank].name} of rank {rank}" for rank in pair)
        )


def _places_that_differ(names: Mapping[int, _Name]) -> Iterator[int]:
    """Yield the places of the numbers in names of the same words that are not the same in all."""
    values_at = enumerate(zip(*(name.numbers for name in names.values())))
    return (place for place, values in values_at if len(set(values)) > 1)


def _first_other(names: Mapping[int, _Name], place: int) -> int:
    """Return the first rank whose name has another number at a place than the first rank's name."""
    first = next(iter(names.values())).numbers[place]
    return next(rank for rank, name in names.items() if name.numbers[place] != first)


def _by_wording(files: Mapping[int, Path]) -> dict[tuple[str, ...], dict[int, _Name]]:
    """Group the names of the files by their words; return each group by rank."""
    names = {rank: _parsed(entry.name) for rank, entry in files.items()}
    by_words = grouped((name.words, (rank, name)) for rank, name in names.items())
    return {words: dict(own) for words, own in by_words.items()}


def _parsed(name: str) -> _Name:
    stem, _, ending = _RUN_NUMBER.sub("", name).rpartition(".")
    texts = _NUMBER.split(stem)
    starts = [match.start() for match in _NUMBER.finditer(stem)]
    ends_in_step = STEP.search(name) is not None
    is_step = tuple(
        (ends_in_step and place >= len(starts) - 2) or bool(_STEP_WORD.search(stem[:start]))
        for place, start in enumerate(starts)
    )
    numbers = tuple(map(int, _NUMBER.findall(stem)))
    return _Name((*texts[:-1], f"{texts[-1]}.{ending}"), numbers, is_step, ends_in_step)


def _are_of_one_moment(names: Mapping[int, _Name], place: int) -> bool:
    """Tell whether the number at a place, which looks like a step, is equal in all names, or is the rank's own number.

    Our own names end in the rank, whatever the user has put before it: `checkpoint_3`, `net-1_3`.
    """
    values = [name.numbers[place] for name in names.values()]
    name = next(iter(names.values()))
    is_epoch = name.ends_in_step and place == len(name.numbers) - 2
    return len(set(values)) == 1 or (not is_epoch and _follows(values, list(names), 0))


def _follows(values: Sequence[int], ranks: Sequence[int], first: int) -> bool:
    """Tell whether a number in names is the rank's, where ranks are counted from `first` on."""
    return all(value == rank + first for value, rank in zip(values, ranks))


def _glob_of(name: str) -> str:
    """Return the glob that the names match that differ from this one in numbers only."""
    stem, _, ending = name.rpartition(".")
    return "*".join(map(glob.escape, _NUMBER.split(stem))) + f".{ending}"

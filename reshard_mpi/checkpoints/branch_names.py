"""Tell by the names of files which branch of a training's state each holds (`branch_of_name`, `branches_in`).

Trainings save `model.pt` beside `optim.pt`, and so in every rank; the words of the names say what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from reshard_mpi.checkpoints.choose_step import PART

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

"""Merge the groups that the ranks of one of Megatron's optimizers have (`merged`)."""

from __future__ import annotations

from collections.abc import Sequence

from reshard_mpi.errors import DisagreementError, ShardError
from reshard_mpi.formats.nest.nodes import Dict, Value
from reshard_mpi.formats.torch.framework_files import text_of

# What tells the groups of an optimizer from each other.
_OF_GROUP_ALONE = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def kind_of_group(group: Dict) -> str:
    """Return what tells a group from others of its optimizer, as a text."""
    return text_of(list(map(group.get, _OF_GROUP_ALONE)))


def merged(optimizers: Sequence[Value], folder: str) -> list[Dict]:
    """Return the groups of all ranks of an optimizer, each once: a rank has groups of its own parameters alone."""
    groups_by_kind: dict[str, Dict] = {}
    for rank, optimizer in enumerate(optimizers):
        groups = optimizer.get("param_groups") if type(optimizer) is Dict else None
        for group in groups or []:
            if type(group) is not Dict:
                raise ShardError("a group of the optimizer of a Megatron checkpoint is no dictionary", where=folder)
            first = groups_by_kind.setdefault(kind_of_group(group), group)
            if text_of(first) != text_of(group):
                raise not_of_one_save("the settings of its optimizer's groups alike", f"others of rank {rank}", folder)
    return [*groups_by_kind.values()]


def not_of_one_save(expected: str, got: str, folder: str) -> DisagreementError:
    return DisagreementError(
        "the ranks of a Megatron checkpoint are not of one save",
        expected=expected,
        got=got,
        where=folder,
        remedy="copy or restore all files of one save",
    )

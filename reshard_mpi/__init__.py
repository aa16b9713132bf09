"""Reshard a distributed checkpoint: of M ranks into one of N ranks, bit-exactly, in bounded memory.

What the command line does, with its options:

    transform(source, target, src_strategy, dst_strategy)   reshard a checkpoint into a folder
    plan(source, src_strategy, dst_strategy)                what that would read, write and need, writing nothing
    verify(source, target)                                  whether a target holds what its source does
    audit(source)                                           whether it is whole, and its values are a training's
    diff(first, second)                                     whether two checkpoints hold the same tensors
    inspect(path)                                           what a shard, a checkpoint or a strategy holds
    open(source)                                            its tensors by name, read by slices; nothing is converted
    load_rank(rank, source, src_strategy, dst_strategy)     what one rank would hold, as arrays; nothing is written

With MindSpore's names, arguments and file conventions:

    transform_checkpoints, transform_checkpoint_by_rank     also called convert_checkpoints, convert_checkpoint_by_rank
    rank_list_for_transform                                 also called rank_list_for_convert
    merge_pipeline_strategys, unified_safetensors

A strategy is the path of a file (or folder of files) that says how tensors are cut over ranks; None means that the
shards say it themselves, or that they are one full checkpoint. What a user can do wrong is a ReshardError. Notes and
warnings go to the logger "reshard_mpi". `help(reshard_mpi.transform)` tells the arguments of a function, and
`reshard-mpi help python` is a page with examples.
"""

# First, so that nothing else is taken from a folder that happens to be the working folder.
from reshard_mpi.processes.imports import keep_out_the_working_folder as _keep_out_the_working_folder

_keep_out_the_working_folder()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from reshard_mpi.api import (
        audit,
        convert_checkpoint_by_rank,
        convert_checkpoints,
        diff,
        inspect,
        load_rank,
        merge_pipeline_strategys,
        plan,
        rank_list_for_convert,
        rank_list_for_transform,
        transform,
        transform_checkpoint_by_rank,
        transform_checkpoints,
        unified_safetensors,
        verify,
    )
    from reshard_mpi.api import open as open
    from reshard_mpi.errors import (
        BudgetError,
        ChecksumError,
        CoverageError,
        DamageError,
        DifferenceError,
        DisagreementError,
        LayoutError,
        MapError,
        OutOfRangeError,
        ReshardError,
        ShardError,
        SourceError,
        StoreError,
        StoreUnreachableError,
        StrategyError,
        TargetError,
        TransformError,
        UnknownTensorError,
        UsageError,
        WrongTypeError,
    )

__version__ = "0.2.0"
__all__ = [
    "BudgetError",
    "ChecksumError",
    "CoverageError",
    "DamageError",
    "DifferenceError",
    "DisagreementError",
    "LayoutError",
    "MapError",
    "OutOfRangeError",
    "ReshardError",
    "ShardError",
    "SourceError",
    "StoreError",
    "StoreUnreachableError",
    "StrategyError",
    "TargetError",
    "TransformError",
    "UnknownTensorError",
    "UsageError",
    "WrongTypeError",
    "audit",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "diff",
    "inspect",
    "load_rank",
    "merge_pipeline_strategys",
    "plan",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "transform",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
    "verify",
]


def __getattr__(name: str) -> "Any":
    # Imported when first used: `import reshard_mpi` and `reshard-mpi --help` load neither numpy nor h5py.
    if name != "open" and name not in __all__:  # `from reshard_mpi import *` leaves Python's own `open`
        raise AttributeError(f"module 'reshard_mpi' has no attribute {name!r}")
    if name.endswith("Error"):
        from reshard_mpi import errors

        return getattr(errors, name)
    from reshard_mpi import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "open"})

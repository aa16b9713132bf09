"""The functions with MindSpore's names: its signatures, its other names, and arguments of unexpected types."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
import pytest
from support.conversions import TENSORS, Conversion, assert_right, listing, transform_by_function

import reshard_mpi
from reshard_mpi import UsageError, WrongTypeError, api
from reshard_mpi.api import mindspore
from reshard_mpi.api.calls import public
from reshard_mpi.errors import ReshardError
from reshard_mpi.options import OPTIONS

# MindSpore 2.10.0, `mindspore.parallel`; every argument may be given by position.
SIGNATURES = {
    "rank_list_for_transform": "rank_id, src_strategy_file=None, dst_strategy_file=None",
    "transform_checkpoint_by_rank": "rank_id, checkpoint_files_map, save_checkpoint_file_name,"
    " src_strategy_file=None, dst_strategy_file=None",
    "transform_checkpoints": "src_checkpoints_dir, dst_checkpoints_dir, ckpt_prefix, src_strategy_file=None,"
    " dst_strategy_file=None, process_num=1, output_format='ckpt'",
    "merge_pipeline_strategys": "src_strategy_dirs, dst_strategy_file",
}
OTHER_NAMES = {
    "rank_list_for_convert": "rank_list_for_transform",
    "convert_checkpoint_by_rank": "transform_checkpoint_by_rank",
    "convert_checkpoints": "transform_checkpoints",
}


@pytest.mark.parametrize("name", [*SIGNATURES, *OTHER_NAMES])
def test_signatures_are_those_of_mindspore(name: str) -> None:
    every = inspect.signature(getattr(reshard_mpi, name)).parameters.values()
    by_position = [one for one in every if one.kind is one.POSITIONAL_OR_KEYWORD]
    shown = ", ".join(one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in by_position)
    assert shown == SIGNATURES[OTHER_NAMES.get(name, name)]
    assert all(one.default is not one.empty for one in every if one not in by_position)


def test_other_names_do_the_same(c: Conversion, tmp_path: Path) -> None:
    strategies = (c.src_strategy, c.dst_strategy)
    assert reshard_mpi.rank_list_for_convert(0, *strategies) == [0, 1]
    reshard_mpi.convert_checkpoints(c.src, c.dst, "checkpoint_", *strategies)
    files = {rank: c.shard(rank) for rank in reshard_mpi.rank_list_for_convert(1, *strategies)}
    reshard_mpi.convert_checkpoint_by_rank(1, files, tmp_path / "one.ckpt", *strategies)
    assert (tmp_path / "one.ckpt").read_bytes() == c.written(1).read_bytes()


def test_no_processes_are_one(c: Conversion) -> None:
    """MindSpore does not look at `process_num` where it transforms .ckpt files."""
    transform_by_function(c, 0)
    assert_right(c)


def test_numbers_of_any_type(c: Conversion, tmp_path: Path) -> None:
    strategies = (c.src_strategy, c.dst_strategy)
    for rank in (1, np.int64(1), np.uint8(1), True):  # MindSpore takes True for 1
        ranks = reshard_mpi.rank_list_for_transform(rank, *strategies)
        assert ranks == [2, 3] and {type(one) for one in ranks} == {int}
    files = {np.int32(rank): c.shard(rank) for rank in range(4)}
    one, other = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    reshard_mpi.transform_checkpoint_by_rank(np.int64(1), MappingProxyType(files), one, *strategies)
    reshard_mpi.transform_checkpoint_by_rank(
        1, {rank: str(c.shard(rank)) for rank in range(4)}, str(other), *strategies
    )
    assert one.read_bytes() == other.read_bytes()
    (summary,) = reshard_mpi.plan(c.src, *strategies, rank=np.arange(1, 2)).targets
    assert type(summary.rank) is int and summary.rank == 1
    assert set(reshard_mpi.load_rank(np.int64(1), c.src, *strategies)) == set(TENSORS)


CALLS: dict[str, tuple[Callable[[Conversion], object], type[UsageError], str]] = {
    "a rank of half": (lambda c: reshard_mpi.rank_list_for_transform(0.5), WrongTypeError, "rank_id(.|\n)*float: 0.5"),
    "no rank": (lambda c: reshard_mpi.load_rank(None, c.src), WrongTypeError, "rank(.|\n)*NoneType: None"),
    "ranks of text": (lambda c: reshard_mpi.plan(c.src, rank="01"), WrongTypeError, "rank is of(.|\n)*str: '01'"),
    "a list of files": (
        lambda c: reshard_mpi.transform_checkpoint_by_rank(0, [str(c.shard(0))], c.folder / "o.ckpt"),
        WrongTypeError,
        "checkpoint_files_map(.|\n)*expected: a dict from rank to checkpoint file(.|\n)*got: list: ",
    ),
    "a rank in text": (
        lambda c: reshard_mpi.transform_checkpoint_by_rank(0, {"0": c.shard(0)}, c.folder / "o.ckpt"),
        WrongTypeError,
        "a rank in checkpoint_files_map(.|\n)*got: str: '0'",
    ),
    "a rank of a float": (
        lambda c: reshard_mpi.load_rank(0, {0.0: c.shard(0)}),
        WrongTypeError,
        "a rank in source(.|\n)*expected: a whole number(.|\n)*float: 0.0",
    ),
    "a file that is none": (
        lambda c: reshard_mpi.transform_checkpoint_by_rank(0, {0: None}, c.folder / "o.ckpt"),
        WrongTypeError,
        "the file of rank 0 in checkpoint_files_map(.|\n)*got: NoneType",
    ),
    "a flag in words": (
        lambda c: reshard_mpi.transform(c.src, c.dst, overwrite="no"),
        WrongTypeError,
        "overwrite is of a wrong type(.|\n)*True or False(.|\n)*str: 'no'",
    ),
    "a path of bytes": (lambda c: reshard_mpi.plan(b"src"), WrongTypeError, "source is of a wrong type"),
    "an empty path": (lambda c: reshard_mpi.plan(""), UsageError, "source can be no path"),
    "an empty strategy": (lambda c: reshard_mpi.plan(c.src, ""), UsageError, "src_strategy can be no path"),
    "a NUL byte in a target": (
        lambda c: reshard_mpi.transform_checkpoints(c.src, "a\0b", "p"),
        UsageError,
        r"dst_checkpoints_dir can be no path(.|\n)*got: 'a\\x00b'",
    ),
    "a NUL byte in a strategy": (lambda c: reshard_mpi.load_rank(0, c.src, "a\0b"), UsageError, "NUL"),
    "stages in a set": (
        lambda c: reshard_mpi.merge_pipeline_strategys({str(c.src_strategy)}, c.folder / "m.ckpt"),
        WrongTypeError,
        "src_strategy_dirs",
    ),
    "a number of stages": (
        lambda c: reshard_mpi.merge_pipeline_strategys([3], c.folder / "m.ckpt"),
        WrongTypeError,
        "one of src_strategy_dirs",
    ),
    "processes of half": (
        lambda c: reshard_mpi.transform_checkpoints(c.src, c.dst, "p", process_num=1.5),
        WrongTypeError,
        "process_num",
    ),
    "a rank in text among others": (
        lambda c: reshard_mpi.plan(c.src, rank=[0, "1"]),
        WrongTypeError,
        "one of rank(.|\n)*str: '1'",
    ),
    "memory of a float": (
        lambda c: reshard_mpi.transform_checkpoints(c.src, c.dst, "p", c.src_strategy, memory=1e9),
        WrongTypeError,
        "memory(.|\n)*float",
    ),
    "half a process at once": (
        lambda c: reshard_mpi.verify(c.src, max_active=0.5),
        WrongTypeError,
        "max_active(.|\n)*float",
    ),
    "a list of formats": (
        lambda c: reshard_mpi.transform_checkpoints(c.src, c.dst, "p", output_format=["ckpt"]),
        WrongTypeError,
        "output_format",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_cannot_be(c: Conversion, tmp_path: Path, name: str) -> None:
    before = listing(tmp_path)
    call, kind, says = CALLS[name]
    with pytest.raises(kind, match=says) as caught:
        call(c)
    assert type(caught.value) is kind and "expected: " in str(caught.value) and "got: " in str(caught.value)
    assert listing(tmp_path) == before


def arguments_that_are_ignored(function: ast.FunctionDef) -> set[str]:
    """Return the arguments of a function that neither its code reads by name nor the request that it makes of all."""
    arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    if "locals" not in read:
        return arguments - read
    called = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    return arguments - read - called - OPTIONS.keys() - {"source", "target", *mindspore._FILES.values()}


@pytest.mark.parametrize("module", [api, mindspore])
def test_no_argument_is_accepted_and_ignored(module: ModuleType) -> None:
    functions = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]
    ignored = {function.name: arguments_that_are_ignored(function) for function in functions}
    ignored.get("unified_safetensors", set()).discard("merge_with_redundancy")  # its documentation says why
    assert len(functions) > 3 and not any(ignored.values()), ignored


@pytest.mark.parametrize("module", [api, mindspore])
def test_every_public_function_is_public(module: ModuleType) -> None:
    exported = [getattr(module, name) for name in reshard_mpi.__all__ if hasattr(module, name)]
    functions = [value for value in exported if getattr(value, "__module__", "") == module.__name__]
    assert functions and all(hasattr(function, "__wrapped__") for function in functions)


def test_errors_of_the_file_system(tmp_path: Path) -> None:
    @public
    def fail() -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "a--to"))

    with pytest.raises(ReshardError, match="No space left") as raised:
        fail()
    assert raised.value.where == str(tmp_path / "a--to")


def test_messages_name_options_as_the_command_line_does(c: Conversion) -> None:
    strategies = (c.src_strategy, c.dst_strategy)
    reshard_mpi.transform(c.src, c.dst, *strategies)
    with pytest.raises(ReshardError) as raised:
        reshard_mpi.transform(c.src, c.dst, *strategies)
    assert "--resume skips what is complete, --overwrite replaces it" in str(raised.value)
    assert str(raised.value) in c.run().err

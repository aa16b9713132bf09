"""The errors a user can catch: exported by name, pickled whole, and ValueErrors where MindSpore raises one."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.conversions import Conversion
from support.processes import run_command

import reshard_mpi
from reshard_mpi import api, errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ReshardError)]


def test_every_error_is_exported() -> None:
    assert len(KINDS) > 10
    for kind in KINDS:
        assert getattr(reshard_mpi, kind.__name__) is kind
        assert kind.__name__ in reshard_mpi.__all__ and kind.__name__ in dir(reshard_mpi)


def test_every_error_that_a_function_names_is_exported() -> None:
    functions = [getattr(reshard_mpi, name) for name in reshard_mpi.__all__ if not name.endswith("Error")]
    named = {name for function in functions for name in re.findall(r"\w+Error\b", function.__doc__ or "")}
    assert {"BudgetError", "TransformError", "UsageError", "DamageError"} <= named <= set(reshard_mpi.__all__)
    records = {"AuditReport", "Finding", "FindingKind", "Plan", "RankSummary", "Report", "RunStatus"}
    records |= {"ShardReport", "TargetReport"}
    of_open = {"open", "Checkpoint", "SourcePart", "Tensor"}  # which `import *` does not take, for the sake of `open`
    assert set(api.__all__) - records - of_open <= set(reshard_mpi.__all__)
    assert reshard_mpi.open is api.open and "open" in dir(reshard_mpi)


def test_an_error_is_imported_without_what_is_heavy() -> None:
    code = "import sys; from reshard_mpi import BudgetError; print(*sys.modules)"
    loaded = set(run_command([sys.executable, "-c", code], check=True).out.split())
    assert "reshard_mpi.errors" in loaded and not loaded & {"reshard_mpi.api", "numpy", "h5py", "logging"}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling(kind: type[errors.ReshardError]) -> None:
    error = kind("it went wrong", expected="right", got="wrong", where="here", remedy="do it again")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and vars(again) == vars(error) and str(again) == str(error)
    assert str(error).splitlines()[-1] == "  what to do: do it again"


# What MindSpore 2.10's functions of the same names raise, as they were seen to do it.


def transform(c: Conversion, **changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {
        "src_checkpoints_dir": c.src,
        "dst_checkpoints_dir": c.dst,
        "ckpt_prefix": "checkpoint_",
        "src_strategy_file": c.src_strategy,
        "dst_strategy_file": c.dst_strategy,
    }
    return lambda: reshard_mpi.transform_checkpoints(**{**arguments, **changes})


def by_rank(c: Conversion, **changes: object) -> Callable[[], None]:
    arguments: dict[str, object] = {
        "rank_id": 0,
        "checkpoint_files_map": {rank: c.shard(rank) for rank in range(4)},
        "save_checkpoint_file_name": c.folder / "out.ckpt",
        "src_strategy_file": c.src_strategy,
        "dst_strategy_file": c.dst_strategy,
    }
    return lambda: reshard_mpi.transform_checkpoint_by_rank(**{**arguments, **changes})


def spoil(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


VALUE_ERRORS: dict[str, Callable[[Conversion], Callable[[], object]]] = {
    "no such source": lambda c: transform(c, src_checkpoints_dir=c.folder / "none"),
    "no such strategy": lambda c: transform(c, src_strategy_file=c.folder / "none"),
    "an empty strategy": lambda c: transform(c, dst_strategy_file=spoil(c.folder / "empty", b"")),
    "a strategy of broken JSON": lambda c: transform(c, dst_strategy_file=spoil(c.folder / "broken.json", b"{")),
    "a target format that cannot be": lambda c: transform(c, output_format="pickle"),
    "a prefix that leads elsewhere": lambda c: transform(c, ckpt_prefix="../x"),
    "no files by rank": lambda c: by_rank(c, checkpoint_files_map={}),
    "a file by rank that is not there": lambda c: by_rank(c, checkpoint_files_map={0: c.folder / "none"}),
    "too few files by rank": lambda c: by_rank(c, checkpoint_files_map={0: c.shard(0)}),
    "a damaged file": lambda c: by_rank(c, checkpoint_files_map={0: spoil(c.folder / "cut.ckpt", b"\x0a\x09")}),
    "an empty file": lambda c: by_rank(c, checkpoint_files_map={0: spoil(c.folder / "cut.ckpt", b"")}),
    "an ending of no format": lambda c: by_rank(c, save_checkpoint_file_name=str(c.folder / "out.pickle")),
    "a name with a NUL byte": lambda c: by_rank(c, save_checkpoint_file_name="a\0.ckpt"),
}
TYPE_ERRORS: dict[str, Callable[[Conversion], Callable[[], object]]] = {
    "a list of files": lambda c: by_rank(c, checkpoint_files_map=[c.shard(0)]),
    "a rank that is no whole number": lambda c: by_rank(c, rank_id=1.0),
    "a rank that is text": lambda c: lambda: reshard_mpi.rank_list_for_transform("1"),
    "a target that is no path": lambda c: by_rank(c, save_checkpoint_file_name=3),
    "a prefix that is no text": lambda c: transform(c, ckpt_prefix=3),
    "a strategy that is no path": lambda c: transform(c, src_strategy_file=3),
}


@pytest.mark.parametrize("name", [*VALUE_ERRORS, *TYPE_ERRORS])
def test_errors_are_of_the_kinds_that_mindspore_raises(c: Conversion, tmp_path: Path, name: str) -> None:
    call = {**VALUE_ERRORS, **TYPE_ERRORS}[name](c)
    with pytest.raises(TypeError if name in TYPE_ERRORS else ValueError) as caught:
        call()
    assert isinstance(caught.value, reshard_mpi.ReshardError)
    assert isinstance(caught.value, reshard_mpi.UsageError) == (caught.value.exit_code == 2)
    assert not c.dst.exists() and not (tmp_path / "out.ckpt").exists()


def test_a_shard_that_cannot_be_read_says_what_to_do() -> None:
    assert "\n  what to do: copy the file again" in str(
        errors.ShardError("the header of a shard is damaged", where="a")
    )
    assert str(errors.ShardError("it is encrypted", remedy="decrypt it")).endswith("what to do: decrypt it")

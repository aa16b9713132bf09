"""Who calls a function reads the names of its arguments, and who types a command those of options."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.command_line import Capture, run_here
from support.conversions import Conversion, make

import reshard_mpi
from reshard_mpi import api
from reshard_mpi.api import arguments, mindspore
from reshard_mpi.api.arguments import in_python, public
from reshard_mpi.cli.arguments import parser
from reshard_mpi.errors import ReshardError, UsageError


@public
def like_transform(text: str, to: str = "", resume: bool = False, unlisted: str = "", source_files: int = 0) -> str:
    return in_python(text)


@public
def like_mindspore(text: str, output_format: str = "", process_num: int = 1) -> str:
    return in_python(text)


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (like_transform, "choose another format (--to)", "choose another format (to)"),
        (like_transform, "--to ckpt or --to hdf5", "to='ckpt' or to='hdf5'"),
        (like_mindspore, "--to ckpt", "output_format='ckpt'"),
        (like_transform, "--resume skips what is complete", "resume=True skips what is complete"),
        (like_transform, "leave out --resume, or not", "leave out resume, or not"),
        (like_transform, "neither --resume nor this", "neither resume nor this"),
        (like_transform, "use --unlisted replicate or --unlisted drop", "use unlisted='replicate' or unlisted='drop'"),
        (like_transform, "give --src-files N", "give source_files=N"),
        (like_transform, "choose with --select 'part*'", "choose with select='part*' of reshard_mpi.transform"),
        (like_mindspore, "try fewer --jobs", "try fewer process_num"),
        (like_transform, "run the same command with --resume", "make the same call with resume=True"),
        (like_mindspore, "mend it and run the same command with --resume", "mend it and make it again"),
        (like_transform, "sbatch --array=3, the job's --mem", "sbatch --array=3, the job's --mem"),
        (like_transform, "a file called run--to.ckpt", "a file called run--to.ckpt"),
    ],
)
def test_options_become_arguments(function: Callable[[str], str], text: str, expected: str) -> None:
    assert function(text) == expected


def test_outside_of_a_call_nothing_is_known() -> None:
    assert arguments._arguments.get() == ()


def test_every_option_of_a_transform_has_an_argument() -> None:
    transform = next(
        action.choices["transform"] for action in parser()._actions if hasattr(action, "choices") and action.choices
    )
    options = {text.removeprefix("--") for action in transform._actions for text in action.option_strings}
    only_typed = {"help", "h", "report", "progress", "quiet", "q", "verbose", "v", "-h", "-q", "-v"}
    assert options - only_typed <= arguments._ARGUMENTS.keys()
    own = api.transform.__wrapped__.__code__.co_varnames  # type: ignore[attr-defined]
    assert all(names[0] in own for names in arguments._ARGUMENTS.values())


@pytest.mark.parametrize("module", [api, mindspore])
def test_every_public_function_is_public(module: ModuleType) -> None:
    exported = [getattr(module, name) for name in reshard_mpi.__all__ if hasattr(module, name)]
    functions = [value for value in exported if getattr(value, "__module__", "") == module.__name__]
    assert functions and all(hasattr(function, "__wrapped__") for function in functions)


# As users meet it


def both(call: Callable[[], object], capsys: Capture, *arguments: str) -> tuple[str, str]:
    """Return what a function and what the command say of the same mistake."""
    with pytest.raises(ReshardError) as raised:
        call()
    return str(raised.value), run_here(capsys, *arguments).err


def test_a_target_that_is_there(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    strategies = (c.src_strategy, c.dst_strategy)
    reshard_mpi.transform(c.src, c.dst, *strategies)
    told, typed = both(lambda: reshard_mpi.transform(c.src, c.dst, *strategies), capsys, *c.arguments())
    assert "resume=True skips what is complete, overwrite=True replaces it" in told
    assert "--resume skips what is complete, --overwrite replaces it" in typed


def test_workers_and_errors_of_others(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    (c.src_strategy.parent / "nothing").mkdir()
    told, typed = both(
        lambda: reshard_mpi.transform(c.src, c.dst, c.src_strategy, jobs=2, unlisted="drop"),
        capsys,
        *("transform", str(c.src), str(c.dst), "--src-strategy", str(c.src_strategy), "--unlisted", "drop"),
    )
    assert "unlisted='drop' needs a list" in told and "dst_strategy with the parameters" in told
    assert "--unlisted drop needs a list" in typed


def test_the_command_ranks_is_told_of_options(tmp_path: Path, capsys: Capture) -> None:
    c = make(tmp_path)
    (c.src_strategy).write_bytes(b"noise")
    finished = run_here(capsys, "ranks", "0", "--src-strategy", str(c.src_strategy))
    assert finished.code == 3 and "=True" not in finished.err


def test_what_is_logged_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Capture) -> None:
    c: Conversion = make(tmp_path)
    with caplog.at_level(logging.INFO, "reshard_mpi"):
        report = reshard_mpi.transform(c.src, c.dst, c.src_strategy, c.dst_strategy, accumulated="mean")
    (note,) = (note for note in report.notes if "is no use" in note)
    assert note.endswith("accumulated='mean' is no use") and note in caplog.messages
    again = c.but(dst=tmp_path / "again")
    assert (
        "--accumulated mean is no use" in run_here(capsys, *again.arguments("transform", "--accumulated", "mean")).err
    )


def test_errors_of_the_file_system(tmp_path: Path) -> None:
    @public
    def fail() -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "a--to"))

    with pytest.raises(ReshardError, match="No space left") as raised:
        fail()
    assert raised.value.where == str(tmp_path / "a--to")


def test_what_a_function_raises_keeps_its_kind() -> None:
    with pytest.raises(UsageError):
        reshard_mpi.rank_list_for_transform(7)

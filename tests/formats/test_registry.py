"""Formats of other packages: registered by a program, or by an entry point of an installed package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command_line import run_apart
from support.conversions import make
from toy_package import toy_format

from reshard_mpi import formats
from reshard_mpi.errors import UsageError

TESTS = Path(__file__).parents[1]


def installed(folder: Path, entry_points: str) -> dict[str, str]:
    """Return the environment of a process for which a package with these entry points is installed in `folder`."""
    about = folder / "toy_package-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"}


def test_a_format_of_an_installed_package(tmp_path: Path) -> None:
    c, toys, back = make(tmp_path), tmp_path / "toys", tmp_path / "back"
    assert c.src_strategy is not None and c.dst_strategy is not None
    entry_points = "[console_scripts]\nx = y:z\n\n[reshard_mpi.formats]\ntoy = toy_package.toy_format:INFO\n"
    environment = installed(tmp_path / "site", entry_points)

    def run(command: str, source: Path, target: Path, strategy: Path, *options: str) -> None:
        strategies = ("--src-strategy", strategy, "--dst-strategy", c.dst_strategy)
        run_apart(command, source, target, *strategies, *options, env=environment, check=True)

    run("transform", c.src, toys, c.src_strategy, "--to", "toy")
    assert {path.suffix for path in toys.glob("rank_*/*")} == {".toy"}
    run("transform", toys, back, c.dst_strategy, "--to", "ckpt")
    run("verify", c.src, back, c.src_strategy)


@pytest.mark.parametrize(
    ("entry_points", "message"),
    [
        ("toy = no_such_package:INFO", "No module named 'no_such_package'"),
        ("toy = toy_package.toy_format:locate", "a FormatInfo called toy"),
        ("other = toy_package.toy_format:INFO", "a FormatInfo called other"),
        ("toy = toy_package.toy_format:INFO\ntoys = toy_package.toy_format:INFO", "a FormatInfo called toys"),
    ],
)
def test_an_entry_point_that_leads_to_no_format(tmp_path: Path, entry_points: str, message: str) -> None:
    environment = installed(tmp_path / "site", f"[reshard_mpi.formats]\n{entry_points}\n")
    finished = run_apart("inspect", tmp_path, env=environment)
    assert finished.code == 2
    assert "the format" in finished.err and "cannot be loaded" in finished.err and message in finished.err
    assert "Traceback" not in finished.err


def test_names_are_given_once() -> None:
    formats.register(toy_format.INFO)
    try:
        assert formats.names()[-1] == "toy"
        with pytest.raises(UsageError, match="two checkpoint formats are called toy"):
            formats.register(toy_format.INFO)
        with pytest.raises(UsageError, match="two checkpoint formats are called ckpt"):
            formats.register(toy_format.INFO._replace(name="ckpt"))
    finally:
        formats.unregister("toy")
    with pytest.raises(UsageError, match="unknown checkpoint format"):
        formats.info("toy")


@pytest.mark.parametrize("name", formats.names())
def test_facts_and_functions_agree(name: str) -> None:
    """A format has the functions that its facts promise, and calls itself by its name."""
    form = formats.info(name)
    module = form.load()
    wanted = {"locate", "check_crc", "stored_sums"} - ({"stored_sums"} if not form.is_target else set())
    if form.is_target:
        wanted |= {"read_back", "size_at_most_bytes", "reserve", "seal"}
    if form.is_folder:
        wanted |= {"files_of", "open_folder"} | ({"file_name", "index_files"} if form.is_target else set())
    assert [function for function in sorted(wanted) if not callable(getattr(module, function, None))] == []
    assert form.sharded_variant in (None, *formats.targets()) and form.default_target in (None, *formats.targets())

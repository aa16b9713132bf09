"""Formats of other packages: registered by a program, or by an entry point of an installed package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_line import run_apart, run_here
from support.conversions import make
from support.examples import few_cases
from toy_package import toy_format

from reshard_mpi import formats
from reshard_mpi.errors import UsageError
from reshard_mpi.formats import registry

TESTS = Path(__file__).parents[1]


def installed(folder: Path, entry_points: str) -> dict[str, str]:
    """Return the environment of a process for which a package with these entry points is installed in `folder`."""
    about = folder / "toy_package-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"}


@pytest.fixture
def installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Install a package with some entry points for this process: the returned function does, and tells its folder."""

    def install(entry_points: str) -> Path:
        site = tmp_path / "site"
        installed(site, entry_points)
        monkeypatch.setattr(sys, "path", [str(site), *sys.path])
        monkeypatch.setattr(sys, "modules", sys.modules.copy())
        return site

    monkeypatch.setattr(registry, "_left_out", {})
    registry._registered.cache_clear()
    yield install
    registry._registered.cache_clear()


@pytest.mark.slow
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


LACKING = """
from reshard_mpi.formats.registry import FormatInfo
INFO = FormatInfo("brk", __name__, (".brk",), read_tensor_bytes=1024)
def locate(path, like=None): ...
def reserve(fd, path, spec): ...
"""
NO_MODULE = """
from reshard_mpi.formats.registry import FormatInfo
INFO = FormatInfo("brk", "no_such_module", (".brk",), read_tensor_bytes=1024)
"""


@few_cases(
    1,
    ("entry_points", "name", "message"),
    [
        ("toy = no_such_package:INFO", "toy", "No module named 'no_such_package'"),
        ("toy = toy_package.toy_format:locate", "toy", "expected a FormatInfo called toy, got a function"),
        ("other = toy_package.toy_format:INFO", "other", "expected a FormatInfo called other, got one called toy"),
        ("toy = toy_package.toy_format:INFO\ntoys = toy_package.toy_format:INFO", "toys", "got one called toy"),
        (
            "brk = text_of_suffixes:INFO",
            "brk",
            "expected a tuple of file name endings that begin with a dot, got '.brk'",
        ),
        ("brk = of_another:INFO", "brk", "files of the format brk would be taken for those of ckpt"),
        ("brk = ends_as_another:INFO", "brk", "got .brk.ckpt, and .ckpt of ckpt"),
    ],
)
def test_an_entry_point_that_leads_to_no_format(
    tmp_path: Path, installed_here: Callable[[str], Path], entry_points: str, name: str, message: str
) -> None:
    """It is warned of, and left out; who asks for it is refused."""
    c, site = make(tmp_path), installed_here(f"[reshard_mpi.formats]\n{entry_points}\n")
    said = NO_MODULE.replace('(".brk",)', "SUFFIXES")
    for module, suffixes in (
        ("text_of_suffixes", "'.brk'"),
        ("of_another", "('.ckpt',)"),
        ("ends_as_another", "('.brk.ckpt',)"),
    ):
        (site / f"{module}.py").write_text(said.replace("SUFFIXES", suffixes))
    finished = run_here("inspect", c.src)
    assert finished.code == 0 and finished.err.startswith("warning: ") and message in finished.err
    assert finished.err.count("\n") == 1
    for option in ("--to", "--from"):
        refused = run_here("transform", c.src, tmp_path / "out", option, name)
        assert refused.code == 2 and "Traceback" not in refused.err and "warning" not in refused.err
        assert "error" in refused.err and all(
            part.removeprefix("expected ") in refused.err for part in message.removeprefix("got ").split(", got ")
        )
    assert run_here("transform", "--help").code == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LACKING, "no stored_sums, no check_crc, no size_at_most_bytes, no seal, no read_back"),
        (NO_MODULE, "No module named"),
    ],
)
def test_a_module_that_lacks_functions_is_refused(
    tmp_path: Path, installed_here: Callable[[str], Path], source: str, message: str
) -> None:
    c, site = make(tmp_path), installed_here("[reshard_mpi.formats]\nbrk = broken:INFO\n")
    (site / "broken.py").write_text(source)
    (tmp_path / "a.brk").write_bytes(b"brk")
    strategies = ("--src-strategy", c.src_strategy, "--dst-strategy", c.dst_strategy)
    for arguments in (
        ("inspect", tmp_path / "a.brk"),
        ("transform", c.src, tmp_path / "out", *strategies, "--to", "brk"),
    ):
        refused = run_here(*arguments)
        assert refused.code == 2 and "Traceback" not in refused.err
        assert "the format brk of an installed package cannot be loaded" in refused.err and message in refused.err
    assert run_here("inspect", c.src).err == ""


@pytest.mark.parametrize("suffixes", [".toy", (), ("toy",), (".",), (1,), [".toy"], ("./toy",), (".ckpt",), (".a.pt",)])
def test_endings_that_cannot_be(suffixes: object) -> None:
    with pytest.raises(UsageError, match="the format toy"):
        formats.register(toy_format.INFO._replace(suffixes=suffixes))  # type: ignore[arg-type]
    assert "toy" not in formats.names()


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
    assert [function for function in form.functions if not callable(getattr(module, function, None))] == []
    assert form.sharded_variant in (None, *formats.targets()) and form.default_target in (None, *formats.targets())

"""Names may hold anything; what a terminal is given of them is printable."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest
from support.cases import Side
from support.checkpoints import write_shards, write_strategy
from support.command_line import run_apart, run_here
from support.conversions import TENSORS, Conversion, make, of_every_kind
from support.examples import few
from support.forging import as_text
from support.oracle import RawLayout
from support.processes import Finished

import reshard_mpi
from reshard_mpi.cli.output import Bar, Lines
from reshard_mpi.errors import ReshardError, TransformError
from reshard_mpi.runs.monitor import Display
from reshard_mpi.text import counted, did_you_mean, lines, nearest_first, number_ranges, one_line

# Colours, a title, a line that is forged, a carriage return, one byte that opens a sequence, turned text, no spaces.
EVIL = "\x1b[31m\x1b]0;owned\x07\nreshard-mpi: error: forged\r\x7f\x9b1m\u202etxt\u2066\u200f\u2028\u200b"
SHORT = "w\x1b[31m\n\x9b\u202e"


def assert_clean(*texts: str) -> None:
    for text in texts:
        raw = [char for char in text if char != "\n" and not char.isprintable()]
        assert not raw, (raw, text)
        assert not any(line.startswith("reshard-mpi: error: forged") for line in text.splitlines()), text


@pytest.mark.parametrize("text", [EVIL, SHORT, "\udcff", "\ud800", "\0", "\x85", "\u2029", "\ufeff", "a\tb"])
def test_what_is_escaped(text: str) -> None:
    assert one_line(f"a {text} b").isprintable() and one_line(one_line(text)) == one_line(text)
    assert one_line(f"a\n{text}").count("\n") == 0 and lines("a\nb") == "a\nb"
    one_line(text).encode()


@pytest.mark.parametrize("text", ["", "plain", "größe 权重 重み ñ", "back\\slash", "a  b"])
def test_what_is_not(text: str) -> None:
    assert one_line(text) == lines(text) == text


def test_errors() -> None:
    error = ReshardError(f"a {EVIL}", expected=EVIL, got=EVIL, where=EVIL, remedy=EVIL)
    assert_clean(str(error))
    begins = ["a \\x1b", "  expected: ", "  got: ", "  where: ", "  what to do: "]
    assert all(map(str.startswith, str(error).splitlines(), begins)) and str(error).count("\n") == 4
    assert error.problem == f"a {EVIL}"  # programs have it as it is
    several = TransformError(f"1 of 2 targets failed; the first: {error}", got=EVIL)
    assert_clean(str(several))
    assert str(several).count("\n") == 5


@pytest.mark.parametrize("display", [Lines, partial(Bar, with_colour=False)])
def test_what_a_run_says(capsys: pytest.CaptureFixture[str], display: Callable[[TextIO], Display]) -> None:
    display(sys.stderr).say(f"waiting for {EVIL}")
    assert_clean(capsys.readouterr().err)


def evil(folder: Path, kind: str) -> Conversion:
    """Return a conversion in which everything that can have a name has one that does harm."""
    folder = folder / SHORT.replace("\x9b", "")
    folder.mkdir()
    c = make(folder, kind)
    layouts = {SHORT: RawLayout((2, 2), (-1, 0)), "b": RawLayout((2, 2), (-1,))}
    source = Side(4, 1, layouts)
    tensors = {SHORT: TENSORS["w"], "b": TENSORS["b"]}
    src, name = folder / f"src{SHORT}", f"strategy{SHORT}"
    write_shards(source, tensors, src, kind)
    strategies = (
        write_strategy(source, folder / name),
        write_strategy(
            Side(2, 1, {SHORT: RawLayout((2,), (0, -1)), "b": RawLayout((2,), (-1,))}), folder / f"dst_{name}"
        ),
    )
    return c.but(src=src, dst=folder / f"dst{SHORT}", src_strategy=strategies[0], dst_strategy=strategies[1])


def tell(*arguments: str, code: int | None = None) -> Finished:
    finished = run_here(*arguments)
    assert_clean(finished.out, finished.err)
    assert code is None or finished.code == code, finished
    return finished


@pytest.mark.parametrize("kind", ["ckpt", pytest.param("hdf5", marks=pytest.mark.slow)])
def test_every_command(tmp_path: Path, kind: str) -> None:
    c = evil(tmp_path, kind)
    strategies = c.arguments("x")[3:]
    for command in (["plan"], ["plan", "--json"], ["plan", "--sbatch"]):
        tell(*c.arguments(*command), code=0)
    tell(*c.arguments("plan", "--explain", SHORT), code=0)
    tell(*c.arguments("plan", "--explain", EVIL), code=2)
    for ending in ("html", "svg"):
        picture = c.folder / f"{SHORT}.{ending}"
        tell(*c.arguments("plan", "--plot", str(picture), "--tensor", SHORT), code=0)
        assert_clean(picture.read_text(encoding="utf-8"))
    tell(*c.arguments("transform", "--prefix", f"p{SHORT}", "--verify", "--progress", "plain"), code=0)
    tell(*c.arguments("transform", "--verify"), code=3)
    for path in (c.src, c.dst, *c.dst.rglob("*"), c.src_strategy, c.folder):
        tell("inspect", str(path))
        finished = tell("inspect", "--json", str(path))
        assert finished.code or json.loads(finished.out)
    tell("commit", str(c.dst), code=0)
    tell("verify", str(c.dst), code=0)
    tell("verify", str(c.src), str(c.dst), *strategies, code=0)
    tell("ranks", "0", *strategies, code=0)
    tell("governor", code=0)
    tell("merge-strategies", str(c.folder / EVIL[:40]), str(c.folder / "out"), code=3)
    tell("plan", EVIL, EVIL, EVIL, code=2)
    tell(f"plan{EVIL}", code=2)
    tell(*c.arguments("transform", "--select", EVIL), code=3)
    tell(*c.arguments("transform", "--jobs", EVIL), code=2)
    shard = next(c.src.rglob(f"checkpoint_0.{'ckpt' if kind == 'ckpt' else 'h5'}"))
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[: len(content) // 2])
    lost = tell(*c.arguments("transform", "--overwrite"), code=0)
    assert "warning: " in lost.err and "\\x1b[31m" in lost.err
    for shard in c.src.rglob("checkpoint_*"):
        shard.write_bytes(b"")
    tell(*c.arguments("transform", "--overwrite"), code=3)
    for shard in c.dst.rglob("p*"):
        shard.write_bytes(b"\x1b" * 100)
    assert tell("verify", str(c.dst)).code in (3, 4)


SPECS = {
    "an axis": 'mesh = {{ "{evil}" = 4 }}\n[[parameter]]\nmatch = "w"\nsplit = {{ 0 = ["{evil}"] }}\n',
    "a pattern": 'mesh = {{ dp = 4 }}\n[[parameter]]\nmatch = "{evil}"\n',
    "a key": '"{evil}" = 1\n',
    "a value": 'mesh = "{evil}"\n',
    "no TOML": 'mesh = "{evil}',
}


@pytest.mark.parametrize("case", few(1, SPECS))
def test_specs(c: Conversion, tmp_path: Path, case: str) -> None:
    spec = tmp_path / "spec.toml"
    text = "".join(f"\\u{ord(char):04x}" if char < " " or char == "\x7f" else char for char in SHORT)
    spec.write_text(SPECS[case].format(evil=text))
    for command in ("plan", "transform"):
        tell(*c.but(src_strategy=spec).arguments(command))
        tell(*c.but(dst_strategy=spec).arguments(command))
    tell("inspect", str(spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, ["rank_0.json", "run.json", "reshard.json"]))
def test_records(c: Conversion, name: str) -> None:
    c.done("transform")
    path = c.dst / name if name == "reshard.json" else c.dst / ".reshard_mpi" / name
    facts = json.loads(path.read_text())
    for key, value in facts.items():
        path.write_text(as_text(name, {**facts, key: EVIL if isinstance(value, str | None) else {EVIL: EVIL}}))
        for command in (c.arguments("transform", "--resume"), ["commit", str(c.dst)], ["inspect", str(c.dst)]):
            tell(*command)


@of_every_kind
def test_what_the_functions_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    c = evil(tmp_path, kind)
    shard = next(c.src.rglob("checkpoint_0.*"))
    shard.write_bytes(shard.read_bytes()[:60])
    with caplog.at_level(logging.INFO, "reshard_mpi"):
        reshard_mpi.transform_checkpoints(c.src, c.dst, "p", c.src_strategy, c.dst_strategy, output_format=kind)
    assert caplog.messages
    assert_clean(*caplog.messages)


@pytest.mark.slow
def test_bytes_that_are_no_text(c: Conversion, tmp_path: Path) -> None:
    """Of a terminal that knows nothing but ASCII too: what it cannot show is escaped, and no traceback."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/s\xff\x9b\xc3\xa9")
    c.src.rename(folder)
    plan = [folder if word == str(c.src) else word for word in c.arguments("plan")]
    pictures = (["--plot", f"{folder}/plan.{ending}"] for ending in ("html", "svg", "png"))
    for command in (["--explain", "w"], *pictures):
        finished = run_apart(*plan, *command, env={"PYTHONIOENCODING": "ascii:strict"}, check=True)
        assert_clean(finished.out, finished.err)
    for command in (["inspect", folder], ["inspect", "--json", folder], ["inspect", folder + "x"]):
        for encoding in ("utf-8", "ascii"):
            finished = run_apart(*command, env={"PYTHONIOENCODING": f"{encoding}:strict"})
            assert finished.code == (3 if command[-1] != folder else 0), finished
            assert "Traceback" not in finished.err
            assert_clean(finished.out, finished.err)


def test_numbers_of_things() -> None:
    assert [number_ranges(ranks) for ranks in ([], [3], [0, 1], [0, 1, 2, 5], [1, 4, 5, 6, 7])] == [
        *("", "3", "0, 1", "0-2, 5", "1, 4-7")
    ]
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("transfrom", ["transform", "plan", "verify"], "transform"),
        ("Plan", ["transform", "plan", "verify"], "plan"),
        ("tr", ["transform", "plan", "verify"], "transform"),
        ("--resum", ["--resume", "--report", "--rank"], "--resume"),
        ("resume", ["--resume", "--report", "--rank"], "--resume"),
        ("--dst-stratgy", ["--src-strategy", "--dst-strategy"], "--dst-strategy"),
        ("--src", ["--src-strategy", "--src-files"], "--src-files"),
        ("hdf", ["ckpt", "hdf5", "hf"], "hdf5"),
        ("--foo", ["--to", "--from", "--rank"], None),
        ("", ["--to", ""], None),
        ("--", ["--to"], None),
        ("x" * 100_000, ["x" * 100_000, "xx"], None),
    ],
)
def test_the_name_that_was_meant(typed: str, known: list[str], meant: str | None) -> None:
    assert did_you_mean(typed, known) == ("" if meant is None else f"; did you mean {meant!r}?")


def test_a_suggested_name_is_printable() -> None:
    assert_clean(did_you_mean(SHORT[:-1], [SHORT]))


def test_names_like_a_pattern_come_first() -> None:
    names = ["other", *(f"layers.{layer}.attn.{part}.weight" for layer in range(2) for part in "qkv")]
    nearest = nearest_first("layers.*.attn.key.weight", names)
    assert sorted(nearest) == sorted(names) and {nearest[0], nearest[1]} == {
        f"layers.{i}.attn.k.weight" for i in (0, 1)
    }
    assert nearest_first("k.weight", names)[:2] == [f"layers.{i}.attn.k.weight" for i in (0, 1)]
    assert nearest_first("*", names) == names and nearest_first("[" * 100_000, names) == names

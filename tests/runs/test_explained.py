"""`plan --explain`: what it says of rules, boxes and bytes is true of the files, in every form of a source."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.cases import Side
from support.checkpoints import write_shard, write_shards, write_strategy
from support.command_line import run_here
from support.conversions import make, of_every_kind, side
from support.examples import few
from support.oracle import RawLayout

import reshard_mpi

SOURCE = """\
# How the source is cut: the header of the second rule is in line 10.
stages = 1
mesh = { dp = 2, tp = 2 }

[[parameter]]
match = "embed"
split = { 1 = ["tp"] }


  [[ "parameter" ]]   # and a note
match = "layers.*.w"
split = { 0 = ["tp"] }
optimizer = ["dp"]

[[parameter]]
match = "*"
"""
TARGET = """\
mesh = { fsdp = 3 }
parameter = [
  { match = "layers.*", split = { 0 = ["fsdp"] }, sizes = "ceil" },
  { match = "*" },
]
"""
TENSORS = {
    "embed": np.arange(48, dtype=np.float32).reshape(6, 8),
    "layers.0.w": np.arange(96, dtype=np.float32).reshape(16, 6),
    "layers.1.w": -np.arange(96, dtype=np.float32).reshape(16, 6),
    "step": np.array(7, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}
# Formats whose shards say themselves how they are cut.
DESCRIBED = ("hdf5", "dcp")


class Said(NamedTuple):
    """One part of a tensor as it is explained: its box, and which bytes of which file."""

    box: tuple[slice, ...]
    begin: int
    end: int
    path: Path
    runs: int
    run_bytes: int


def explain(*arguments: str | Path, code: int = 0) -> str:
    finished = run_here("plan", *map(str, arguments))
    assert finished.code == code, finished
    return finished.out if code == 0 else finished.err


def parts(text: str) -> list[Said]:
    """Return the parts that are explained."""
    found = re.findall(
        r"^  \[([^\]]*)\] comes from .*:\n"
        r"    .*: bytes (\d+) up to (\d+) of ([^,\n]*)(?:, in (\d+) runs of (\d+) bytes)?",
        text,
        re.MULTILINE,
    )
    return [
        Said(
            tuple(slice(*map(int, bounds.split(":"))) for bounds in box.split(", ") if bounds),
            int(begin),
            int(end),
            Path(path),
            int(runs or 1),
            int(run_bytes or int(end) - int(begin)),
        )
        for box, begin, end, path, runs, run_bytes in found
    ]


def assert_bytes(said: Said, whole: np.ndarray) -> None:
    """See that the bytes are those of the elements: all if they are one run, else the first and last run."""
    content = said.path.read_bytes()[said.begin : said.end]
    expected = np.ascontiguousarray(whole[said.box]).tobytes()
    assert said.runs * said.run_bytes == len(expected)
    assert content[: said.run_bytes] == expected[: said.run_bytes]
    assert content[-said.run_bytes :] == expected[-said.run_bytes :]


@pytest.fixture
def specs(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "source.toml").write_text(SOURCE)
    (tmp_path / "target.toml").write_text(TARGET)
    return tmp_path / "source.toml", tmp_path / "target.toml"


def made(tmp_path: Path, kind: str, strategy: Path | None) -> list[str | Path]:
    """Write the tensors in a format, and return the arguments that plan has for it."""
    full = tmp_path / "full.safetensors"
    write_shard(TENSORS, full)
    is_cut = kind != "hf"
    reshard_mpi.transform(full, tmp_path / kind, dst_strategy=strategy if is_cut else None, to=kind)
    given = ["--src-strategy", strategy] if is_cut and kind not in DESCRIBED and strategy is not None else []
    return [tmp_path / kind, tmp_path / "dst", *given]


@pytest.mark.parametrize("kind", few(1, ["ckpt", "hf", "hdf5", "safetensors", "torch", "dcp"]))
def test_bytes_are_those_of_the_elements(tmp_path: Path, specs: tuple[Path, Path], kind: str) -> None:
    source, target = specs
    arguments = [*made(tmp_path, kind, source), "--dst-strategy", target]
    for name, whole in TENSORS.items():
        text = explain(*arguments, "--explain", name, "--rank", "0", "--rank", "2")
        assert text.startswith(f"{name}: {whole.dtype} {list(whole.shape)}, ")
        assert text.count("\ntarget rank ") == 2
        said = parts(text)
        for part in said:
            assert_bytes(part, whole)
        elements = sum(int(np.prod([cut.stop - cut.start for cut in part.box], dtype=int)) for part in said)
        rows = 6 + 4 if name.startswith("layers") else None  # of 16, cut into 6, 6 and 4
        once = kind == "dcp"  # what all ranks hold is written by one
        expected = 6 * rows if rows else whole.size * (1 if once else 2)
        if rows or not once:
            assert elements == expected, text


def test_rules_are_told_with_their_lines(tmp_path: Path, specs: tuple[Path, Path]) -> None:
    source, target = specs
    arguments = [*made(tmp_path, "safetensors", source), "--dst-strategy", target]
    text = explain(*arguments, "--explain", "layers.1.w")
    assert f"placed by {source}, line 10, [[parameter]] 2, match 'layers.*.w'" in text
    assert "dimension 0 is cut into 2 over tp" in text
    assert "each of these is cut along dimension 0 into 2 by the optimizer (mesh dp=2, tp=2)" in text
    assert "4 pieces, each on 1 rank" in text
    # Rules that are no tables of their own have no lines.
    assert f"placed by {target}, [[parameter]] 1, match 'layers.*'" in text
    assert "dimension 0 is cut into 3 over fsdp, of 6, 6, 4" in text
    assert "--rank R explains the other target ranks, 0 to 2" in text


def test_a_header_within_a_text_is_no_rule(tmp_path: Path, specs: tuple[Path, Path]) -> None:
    source, target = specs
    header = "[[parameter]]\n"
    source.write_text(f'mesh = {{ x = 2 }}\n{header}match = """\n{header}*"""\noptional = true\n{header}match = "*"\n')
    arguments = [*made(tmp_path, "ckpt", source), "--dst-strategy", target]
    assert f"{source}, line 7, [[parameter]] 2, match '*'" in explain(*arguments, "--explain", "embed")


@of_every_kind
def test_layouts_of_mindspore_and_what_follows(tmp_path: Path, kind: str) -> None:
    conversion = make(tmp_path, kind)
    text = explain(*conversion.arguments("plan")[1:], "--explain", "moments.w")
    assert f"placed by that of 'w', which it is named after: {conversion.src_strategy}, layout 1 of 2, 'w'" in text
    assert f"which it is named after: {conversion.dst_strategy}, layout 1 of 2, 'w'" in text
    unlisted = explain(*conversion.arguments("plan")[1:], "--explain", "global_step")
    assert "whole on every rank, since the source's strategy does not place it" in unlisted
    assert "whole on every rank, since the target's strategy does not list it (--unlisted follow)" in unlisted
    replicated = explain(*conversion.arguments("plan")[1:], "--unlisted", "replicate", "--explain", "moments.w")
    assert "does not list it (--unlisted replicate)" in replicated


def test_json_of_stages(tmp_path: Path) -> None:
    layouts = {"first": RawLayout((2,), (0, -1), stages=(0,)), 'last "one"': RawLayout((2,), (-1, 0), stages=(1,))}
    arrays = {name: np.arange(16, dtype=np.float32).reshape(4, 4) for name in layouts}
    whole = Side(4, 2, layouts)
    shapes = dict.fromkeys(layouts, (4, 4))
    strategy = write_strategy(whole, tmp_path / "strategies", shapes=shapes)
    write_shards(whole, arrays, tmp_path / "src", "ckpt")
    arguments = [tmp_path / "src", tmp_path / "dst", "--src-strategy", strategy]
    text = explain(*arguments, "--explain", 'last "one"')
    (file, line) = re.findall(r"placed by (\S+), line (\d+), ", text)[0]
    lines = Path(file).read_text().splitlines()
    assert file.endswith("strategy_1.json") and json.dumps('last "one"') in lines[int(line) - 1]
    assert "2 pieces, each on 1 rank of stage 1" in text
    assert [part.path.parent.name for part in parts(text)] == ["rank_2", "rank_3"]
    for part in parts(text):
        assert_bytes(part, arrays['last "one"'])
    # Each stage is a target of its own.
    text = explain(*arguments, "--dst-strategy", strategy, "--explain", 'last "one"', "--rank", "0", "--rank", "3")
    assert "target rank 0 (stage 0): does not hold it" in text
    assert "target rank 3 (stage 1): holds [0:4, 2:4]" in text


def test_a_map_is_told_with_its_equation(tmp_path: Path) -> None:
    arrays = {name: np.arange(12, dtype=np.float32).reshape(3, 4) + place for place, name in enumerate("qkv")}
    layouts = {name: RawLayout((2,), (-1, 0)) for name in "qkv"}
    write_shards(Side(2, 1, layouts), arrays, tmp_path / "src", "ckpt")
    strategy = write_strategy(Side(2, 1, layouts), tmp_path / "strategy")
    (tmp_path / "map.toml").write_text('\n[[map]]\neq = "q [a h], k [a h], v [a h] <=> qkv [(a + a + a) h]"\n')
    given = [tmp_path / "src", tmp_path / "dst", "--src-strategy", strategy, "--map", tmp_path / "map.toml"]
    text = explain(*given, "--explain", "qkv")
    assert f"made of q, k, v, by {tmp_path}/map.toml, line 2, [[map]] 1" in text
    for name in "qkv":
        assert f"{name}: float32 [3, 4], placed by {strategy}, layout" in text
    assert "[0:3, 0:2] comes from source rank 0 as [0:3, 0:2] of q, which holds [0:3, 0:2]:" in text
    assert "[3:6, 0:2] comes from source rank 0 as [0:3, 0:2] of k, which holds [0:3, 0:2]:" in text
    pieces = [line for line in text.splitlines() if " comes from " in line]
    assert all(re.search(r"as \[[^\]]*\] of [qkv], which holds", piece) for piece in pieces), pieces
    made_of = np.concatenate(list(arrays.values()))
    assert len(parts(text)) == 6
    for part in parts(text):
        assert_bytes(part, made_of)
    err = explain(*given, "--explain", "k", code=2)
    assert "'k' is a tensor of the source" in err and "which goes into qkv" in err


def test_an_unknown_name(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    err = explain(*conversion.arguments("plan")[1:], "--explain", "moment.w", code=2)
    assert "'moment.w'; did you mean 'moments.w'?" in err
    err = explain(*conversion.arguments("plan")[1:], "--explain", "\x1b[2J", code=2)
    assert "\x1b" not in err


def test_what_is_converted_and_what_is_turned(tmp_path: Path) -> None:
    conversion = make(tmp_path)
    text = explain(*conversion.arguments("plan")[1:], "--dtype", "bf16", "--explain", "w")
    assert text.startswith("w: bfloat16 [8, 4], 64 B") and "converted from float32 to bfloat16" in text
    (tmp_path / "map.toml").write_text('[[map]]\neq = "w [a b] <=> v [b a]"\n')
    other = conversion.but(dst_strategy=conversion.strategy("other", {"v": RawLayout((2,), (0, -1))}))
    text = explain(*other.arguments("plan")[1:], "--map", str(tmp_path / "map.toml"), "--explain", "v")
    assert "its dimensions in the order [1, 0]" in text


def test_every_rank_of_a_pipeline_is_asked_for(tmp_path: Path) -> None:
    conversion = make(tmp_path).to(side(4, {"w": RawLayout((4,), (0, -1)), "b": RawLayout((2, 2), (1,))}))
    ranks = [word for rank in range(4) for word in ("--rank", str(rank))]
    text = explain(*conversion.arguments("plan")[1:], "--explain", "w", *ranks)
    boxes = re.findall(r"target rank (\d): holds (\S+ \S+), 32 B", text)
    assert boxes == [(str(rank), f"[{2 * rank}:{2 * rank + 2}, 0:4]") for rank in range(4)]

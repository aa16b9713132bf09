"""Maps that are wrong, or do not fit the checkpoint: each is refused, and the message names the place in the map."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import TARGETS, write_ranks
from support.command_line import run_here
from support.examples import few, few_cases

import reshard_mpi
from reshard_mpi import MapError, TargetError, UsageError
from reshard_mpi.formats import structure
from reshard_mpi.mapping import box_pairs, matching
from reshard_mpi.mapping.axis_sizes import ExpressionProblem, evaluated
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.runs import target_plans

TENSORS = {
    "a.0.q": np.arange(24, dtype=np.float32).reshape(6, 4),
    "a.0.k": np.arange(8, dtype=np.float32).reshape(2, 4),
    "a.1.q": np.arange(24, dtype=np.float32).reshape(6, 4),
    "a.1.k": np.arange(8, dtype=np.float32).reshape(2, 4),
    "count": np.arange(3, dtype=np.int64),
    "e.0": np.ones((2, 3), np.float32),
    "e.2": np.ones((2, 3), np.float32),
}


def checkpoint(folder: Path, tensors: dict[str, np.ndarray] = TENSORS) -> Path:
    write_ranks({0: tensors}, folder / "src", "safetensors")
    return folder / "src"


def refused(tmp_path: Path, text: str, **options: object) -> str:
    """Return the message with which a transform is refused before it has written anything."""
    (tmp_path / "map.toml").write_text(text)
    source = checkpoint(tmp_path)
    with pytest.raises(MapError) as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=tmp_path / "map.toml", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "dst").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("equation", "says"),
    [
        ("a [x", "an axis, '(' or ']' is expected"),
        ("a [(x] <=> b [x]", "')' is expected before ']'"),
        ("a [x))] <=> b [x]", "an axis, '(' or ']' is expected"),
        ("a [(x |)] <=> b [x]", "an axis or a number"),
        ("a [()] <=> b [1]", "an axis or a number is expected"),
        ("a [(x + )] <=> b [x]", "an axis or a number is expected"),
        ("a [x] => b [x]", "'<=>' or ',' is expected"),
        ("a [x] <=> b [x] <=> c [x]", "',' or the end"),
        ("a [x], <=> b [x]", "the name of a tensor is expected"),
        ("[x] <=> b [x]", "the name of a tensor is expected"),
        ("a [x] : float <=> b [x]", "unknown type"),
        ("a.{l [x] <=> b [x]", "brace"),
        ("a.{l}{m} [x] <=> b.{l}.{m} [x]", "nothing between them"),
        ("{a*}.{b*} [x] <=> {a*}.{b*} [x]", "more than one capture of any text"),
        ("a.{l}.{l} [x] <=> b.{l} [x]", "capture twice"),
        ("a [" + "(" * 40 + "x" + ")" * 40 + "] <=> b [x]", "nested more than"),
        ("a [x 007] <=> b [x 7]", "leading zeros"),
        ("a [(x | 4611686018427387903)] <=> b [x]", "at most 18 digits"),
        ("a [x y] <=> b [x]", "not one-to-one: 'y'"),
        ("a [x] <=> b [y]", "not one-to-one"),
        ("a [x x] <=> b [x]", "twice"),
        ("a.{l} [x] <=> b [x]", "not one-to-one: 'l'"),
        ("{p*}.a [x] <=> b [x]", "is not in the name"),
        ("a [x], b [x] <=> c [x]", "2 blocks"),
        ("a [x], b [x] <=> c [(x + x + x)]", "2 blocks"),
        ("a [(x + x) (y + y)] <=> c [x y], d [x y]", "more than one concatenation"),
        ("a [((x | 4) + x)] <=> b [x], c [x]", "padding within a concatenation"),
        ("a [x], b <=> c [x], d [x]", "no dimensions in brackets"),
        ("a.{l} [l x] <=> b.{l} [l x]", "in both names and a dimension"),
        ("a.{l} [x], b [x] <=> c.{l} [x], d [x]", "captures that stay captures must be in all names"),
        ("a [x], a [x] <=> b [(x + x)]", "a is twice on a side"),
        ("a [x] <=> b [x], b [x]", "b is twice on a side"),
        ("a.{l}0 [x] <=> b.{l} [x]", "a digit behind the capture of an integer"),
        ("a [2 x] <=> b [3 x]", "not one-to-one: '2'"),
    ],
)
def test_an_equation_that_is_none(equation: str, says: str) -> None:
    with pytest.raises(MapError) as error:
        parse_rules(f"\n\n[[map]]\neq = '{equation}'\n", "map.toml")
    assert says in str(error.value) and "map.toml, line 3, [[map]] 1" in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[map]", "no TOML"),
        ("", "no [[map]] entries"),
        ("map = 3", "no [[map]] entries"),
        ("map = [3]", "no table"),
        ("[[map]]", "needs one of eq, state, drop, fill, count, number, caution"),
        ("[[map]]\neq = 'a <=> b'\ndrop = 'c'", "needs one of"),
        ("[[map]]\neq = 3", "eq is no text"),
        ("[[map]]\neq = 'a <=> b'\noptionl = true", "unknown key"),
        ("[[map]]\neq = 'a <=> b'\noptional = 1", "true or false"),
        ("[[map]]\neq = 'a <=> b'\npads = 'keep'", "pads is wrong"),
        ("[[map]]\ndrop = 'a'\nside = 'up'", "side is wrong"),
        ("[[map]]\nfill = 3", "no table"),
        ("[[map]]\nfill = { name = 'a' }", "needs a shape and a type"),
        (
            "[[map]]\nfill = { name = 'a.{l}', shape = [], type = 'int64' }",
            "captures that the tensor beside it has not",
        ),
        ("[[map]]\nfill = { name = 'a', shape = [-1], type = 'int64' }", "no list of lengths"),
        ("[[map]]\nfill = { name = 'a', shape = [], type = 'int65' }", "type is unknown"),
        ("[[map]]\nfill = { name = 'a', shape = [], type = 'int64', value = 'x' }", "value is no number"),
        ("[axes]\nz = 3\n[[map]]\neq = 'a [x] <=> b [x]'", "which no equation has"),
        ("[axes]\nx = 0\n[[map]]\neq = 'a [x] <=> b [x]'", "no length"),
        ("[axes]\nx = '4 /'\n[[map]]\neq = 'a [x] <=> b [x]'", "cannot be computed"),
        ("axes = 3\n[[map]]\neq = 'a [x] <=> b [x]'", "no table"),
        ("extra = 3\n[[map]]\neq = 'a [x] <=> b [x]'", "cannot have"),
        ("[[map]]\neq = 'a [x] <=> b [x], c [x y]'\ncopy = true", "their dimensions differ"),
        ("[[map]]\neq = 'e [v h] <=> i.{v} [h], o.{v} [h]'\ncopy = true", "copy = true is for whole tensors"),
        ("[[map]]\neq = 'a [x], b [x] <=> c [x], d [x]'\ncopy = true", "one tensor, without '+'"),
    ],
)
def test_a_file_that_is_no_map(text: str, says: str) -> None:
    with pytest.raises(MapError) as error:
        parse_rules(text, "map.toml")
    assert says in str(error.value) and "map.toml" in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[map]]\neq = 'b.{l}.q [x y] <=> c.{l}.q [x y]'", "does not fit the checkpoint in either direction"),
        ("[[map]]\neq = 'a.{l}.q [x y], a.{l}.v [x y] <=> c.{l} [(x + x) y]'", "in either direction"),
        ("[[map]]\neq = 'a.{l}.q [x y], a.{l}.k [x y] <=> c.{l} [(x + x) y]'", "is 2 long, not 6"),
        (
            "[[map]]\neq = 'a.{l}.q [(g r d) h], a.{l}.k [(g d) h] <=> c.{l} [(g (r d + d)) h]'",
            "does not tell how long",
        ),
        ("[axes]\nd = 4\n[[map]]\neq = 'a.{l}.q [(g d) h] <=> c.{l} [d g h]'", "no length of 'g'"),
        ("[[map]]\neq = 'e.{n} [x y] <=> c [n x y]'", "n from 0 to 2"),
        ("[axes]\nl = 3\n[[map]]\neq = 'a.{l}.k [x y] <=> c [l x y]'", "2 tensors for 'l', not 3"),
        ("[[map]]\neq = 'a.{l}.k [x y] <=> c.{l} [(x | m) y]'", "'m'"),
        ("[[map]]\neq = 'a.{l}.k [(x | 4) y] <=> c.{l} [x y]'", "how much of dimension 0 of a.{l}.k is padding"),
        ("[axes]\nx = 2\n[[map]]\neq = 'a.{l}.q [(x | 4) y] <=> c.{l} [x y]'", "is 6 long, not 4"),
        ("[axes]\nx = 5\n[[map]]\neq = 'a.{l}.q [(x | 6) y] <=> c.{l} [x y]'", "the padding of a.0.q is not zero"),
        ("[[map]]\neq = 'a.0.q [x y] <=> count [x y]'", "two tensors would have the name count"),
        ("[[map]]\neq = 'a.0.q [x y] <=> b [x y]'\n[[map]]\neq = 'a.1.q [x y] <=> b [x y]'", "would have the name b"),
        ("[[map]]\neq = 'count [x] <=> number [x] : bf16'", "count cannot become bfloat16"),
        ("[[map]]\neq = 'a.0.q [x y] <=> a.0.q [y x]'", "both directions"),
        ("[[map]]\neq = 'a.0.q [x y] <=> b [y x]'\n[[map]]\ndrop = 'nothing.*'", "nothing is left out by a pattern"),
        (
            "[[map]]\neq = 'a.0.q [x y] <=> b [y x]'\n[[map]]\nfill = { name = 'count', shape = [], type = 'int64' }",
            "what is made up has the name of another tensor",
        ),
        (
            "[[map]]\neq = 'a.0.q [x y] <=> b [y x]'\n[[map]]\n"
            "fill = { name = 'z', shape = [], type = 'int8', value = 400 }",
            "cannot be made up of 400",
        ),
        ("[[map]]\neq = 'new [y] <=> a.0.q [y], a.1.q [y]'\ncopy = true", "in either direction"),
        ("[[map]]\neq = 'new [x y] <=> a.0.k [x y], e.0 [x y]'\ncopy = true", "is 3 long, not 4"),
        (
            "[[map]]\nfill = { name = 'z', shape = [], type = 'int8', value = nan }\n[[map]]\neq = 'a.0.q <=> b'",
            "made up of nan",
        ),
        ("[[map]]\neq = 'other <=> a.0.q'\n[[map]]\ndrop = 'left.*'", "the map loses what it leaves out"),
    ],
)
def test_a_map_that_does_not_fit(tmp_path: Path, text: str, says: str) -> None:
    message = refused(tmp_path, text)
    assert says in message and "map.toml" in message


def test_a_side_that_is_there_in_part_names_what_is_there(tmp_path: Path) -> None:
    message = refused(tmp_path, "[[map]]\neq = 'a.{l}.q [x y], e.{l} [z w] <=> c.{l}.q [x y], c.{l}.e [z w]'")
    assert "a.1.q without e.1" in message and "line 1, [[map]] 1" in message


@pytest.mark.parametrize(("name", "shape"), [("e.03.w", (2, 3)), ("e.12345678901.w", (2, 3)), ("e.1.w", (6,))])
def test_tensors_of_a_stack_that_are_not_as_the_others_are_not_left_out(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors = {"e.0.w": np.ones((2, 3), np.float32), name: np.ones(shape, np.float32)}
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'e.{n}.w [x y] <=> c [n x y]'")
    with pytest.raises(MapError, match="would be left out") as error:
        reshard_mpi.plan(checkpoint(tmp_path, tensors), map=tmp_path / "map.toml")
    assert name in str(error.value)


def test_a_map_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "map.toml")
    with pytest.raises(MapError, match="the map is no file\n  expected: a file\n  got: a pipe\n"):
        reshard_mpi.plan(checkpoint(tmp_path), map=tmp_path / "map.toml")


def test_texts_as_editors_of_other_systems_save_them(tmp_path: Path) -> None:
    """With a mark of their encoding, and line ends of two characters."""
    rules = b"[axes]\r\nn = 'n'\r\n[[map]]\r\neq = 'a.0.q [x n] <=> b [n x]'\r\n"
    (tmp_path / "map.toml").write_bytes(b"\xef\xbb\xbf" + rules)
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{\r\n"n": 3\r\n}')
    source = checkpoint(tmp_path, {"a.0.q": np.ones((2, 3), np.float32)})
    options = {"map": tmp_path / "map.toml", "config": tmp_path / "config.json"}
    report = reshard_mpi.transform(source, tmp_path / "dst", **options)  # type: ignore[arg-type]
    assert any("makes 1 tensor" in note for note in report.notes)


def test_a_configuration_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'a.0.q [x y] <=> b [y x]'")
    with pytest.raises(MapError, match="the configuration is no file"):
        reshard_mpi.plan(checkpoint(tmp_path), map=tmp_path / "map.toml", config=tmp_path / "config.json")


def test_a_tensor_that_two_terms_take(tmp_path: Path) -> None:
    message = refused(tmp_path, "[[map]]\neq = 'a.1.k [x y], a.{n}.k [x y] <=> c [(x + n x) y]'")
    assert "takes a tensor twice" in message and "a.1.k" in message


@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("a [b c] <=> x.{b} [c]", (1 << 20, 0)),
        ("a [(b c)] <=> x [(c b)]", (1 << 17,)),
        (
            "a ["
            + " ".join(f"n{at}" for at in range(18))
            + "] <=> x [("
            + " ".join(f"n{at}" for at in range(18))
            + ")]",
            (2,) * 18,
        ),
    ],
)
def test_what_would_take_too_many_boxes(tmp_path: Path, equation: str, shape: tuple[int, ...]) -> None:
    text = f"[axes]\nb = 256\n[[map]]\neq = '{equation}'" if "(c b)" in equation else f"[[map]]\neq = '{equation}'"
    (tmp_path / "map.toml").write_text(text)
    source = checkpoint(tmp_path, {"a": np.zeros(shape, np.int8)})
    with pytest.raises(MapError, match="boxes"):
        reshard_mpi.transform(source, tmp_path / "dst", map=tmp_path / "map.toml", forward=True)


@pytest.mark.slow
def test_equations_that_take_too_many_boxes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 4096 may be, one equation of 2,500 may be; two of different shapes may not. Any number takes its time."""
    assert matching.MAX_PAIRS == box_pairs.MAX_PAIRS
    for module in (matching, box_pairs):
        monkeypatch.setattr(module, "MAX_PAIRS", 4096)
    tensors = {f"a{at}": np.zeros((1_250 + at) * 2, np.int8) for at in range(4)}
    equations = [f"[[map]]\neq = 'a{at} [(b 2)] <=> x{at} [(2 b)]'" for at in range(4)]
    (tmp_path / "map.toml").write_text(equations[0])
    reshard_mpi.plan(checkpoint(tmp_path, tensors), map=tmp_path / "map.toml")
    (tmp_path / "map.toml").write_text("\n".join(equations))
    with pytest.raises(MapError, match="boxes of different shapes"):
        reshard_mpi.plan(tmp_path / "src", map=tmp_path / "map.toml")


ONES = "1 " * 31


@few_cases(
    1,
    ("equation", "says"),
    [
        (f"count [x] <=> {'n' * 4097} [x]", "a name that the map makes is too long"),
        ("count [x] <=> " + "\u00e4" * 2049 + " [x]", "4098 bytes"),
        (f"{{p*}}.k [x y] <=> {'n' * 4094}.{{p*}}.k [x y]", "a name that the map makes is too long"),
        (f"count [x] <=> c [x {ONES} 1]", "too many dimensions"),
        (f"a.0.q [x y] <=> c [x {'1 ' * 70} y] : bf16", "too many dimensions"),
        (f"a.0.q [x y] <=> c [y {'1 ' * 70} x]", "too many dimensions"),
    ],
)
def test_what_no_shard_can_hold(tmp_path: Path, equation: str, says: str) -> None:
    source, target = checkpoint(tmp_path), tmp_path / "dst"
    (tmp_path / "map.toml").write_text(f"[[map]]\neq = '{equation}'")
    given: dict[str, Any] = {"map": tmp_path / "map.toml", "forward": True}
    for read in (
        lambda: reshard_mpi.transform(source, target, **given),
        lambda: reshard_mpi.transform(source, target, to="hdf5", **given),
        lambda: reshard_mpi.plan(source, **given),
        lambda: reshard_mpi.load_rank(0, source, **given),
        lambda: reshard_mpi.diff(source, source, **given),
        lambda: reshard_mpi.verify(source, source, **given),
    ):
        with pytest.raises(MapError, match=says) as error:
            read()
        assert "map.toml, line 1" in str(error.value) and not target.exists()


@pytest.mark.parametrize("to", few(1, TARGETS))
def test_what_a_shard_can_just_hold(tmp_path: Path, to: str) -> None:
    source, name = checkpoint(tmp_path), "n" * 4096
    (tmp_path / "map.toml").write_text(f"[[map]]\neq = 'a.0.q [x y] <=> {name} [y {'1 ' * 30}x] : bf16'")
    reshard_mpi.transform(source, tmp_path / "dst", to=to, map=tmp_path / "map.toml")
    reshard_mpi.verify(source, tmp_path / "dst", map=tmp_path / "map.toml")
    assert reshard_mpi.load_rank(0, tmp_path / "dst")[name].ndim == 32


@pytest.mark.slow
def test_names_that_could_not_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """850 names of 3,000 bytes take more memory than a twentieth of what a reader gives a shard's names."""
    assert target_plans.MAX_KEPT_BYTES == structure.MAX_KEPT_BYTES
    monkeypatch.setattr(target_plans, "MAX_KEPT_BYTES", structure.MAX_KEPT_BYTES // 20)
    (tmp_path / "map.toml").write_text(f"[[map]]\neq = 'w [e f] <=> {{e}}.{'w' * 3000} [f]'")
    source = checkpoint(tmp_path, {"w": np.zeros((850, 1), np.int8)})
    with pytest.raises(TargetError, match="more than it could be read with again"):
        reshard_mpi.transform(source, tmp_path / "dst", map=tmp_path / "map.toml")
    assert not (tmp_path / "dst").exists()


def test_names_of_very_many_parts_do_not_take_long(tmp_path: Path) -> None:
    name = "optimizer." + ".".join("a" * 1500)
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'a.0.q [x y] <=> b [y x]'")
    tensors = {"a.0.q": np.zeros((2, 3), np.float32), name: np.zeros((2, 3), np.float32)}
    plan = reshard_mpi.plan(checkpoint(tmp_path, tensors), map=tmp_path / "map.toml")
    assert plan.targets[0].tensors == 2


def test_one_tensor_for_several_that_differ(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 3), np.float32)}
    tensors["b"][1, 2] = 1
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'one [x y] <=> a [x y], b [x y]'\ncopy = true")
    with pytest.raises(MapError, match="one tensor is taken for several"):
        reshard_mpi.transform(checkpoint(tmp_path, tensors), tmp_path / "dst", map=tmp_path / "map.toml")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float"}, "^--dtype is no type"),
        ({"dtype": "w=bfloat16"}, "^--dtype is no type; did you mean 'bf16'"),
        ({"dtype": "=bf16"}, "^--dtype is no type"),
        ({"forward": True}, "^--forward belongs to a map"),
        ({"reverse": True}, "^--reverse belongs to a map"),
        ({"config": "config.json"}, "^--config belongs to a map"),
        ({"map": "m.toml", "forward": True, "reverse": True}, "exclude each other"),
    ],
)
def test_options_that_do_not_belong_together(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        reshard_mpi.transform(checkpoint(tmp_path), tmp_path / "dst", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"map": "no-such-map"}, "there is no map of this name"),
        ({"map": "./no-such-file.toml"}, "the map cannot be read"),
        ({"include": "nothing.*"}, "matches no tensor"),
        ({"dtype": ["bf16", "nothing.*=fp16"]}, "^--dtype nothing.*=fp16 matches no floating-point tensor"),
        ({"dtype": "count=fp16"}, "matches no floating-point tensor"),
        ({"dtype": ["a.0.*=fp32", "bf16"]}, "^--dtype a.0.*=fp32 has no effect"),
        ({"dtype": ["a.0.q=fp32", "fp64", "a.*=bf16"]}, "^--dtype a.0.q=fp32 has no effect"),
        ({"exclude": "nothing.*"}, "matches no tensor"),
        ({"include": "a.*", "exclude": "a.*"}, "leave no tensor"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(MapError, match=says):
        reshard_mpi.transform(checkpoint(tmp_path), tmp_path / "dst", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(300, "int8"), (1.5, "int32"), (2, "bool"), (1e6, "fp16"), (3.4e38, "bf16"), (1e300, "fp32"), (1, "fp8_e5m2")],
)
def test_what_is_made_up_of_a_value_that_its_type_cannot_hold(tmp_path: Path, value: float, dtype: str) -> None:
    fill = f"[[map]]\nfill = {{ name = 'new', value = {value}, shape = [2], type = '{dtype}' }}"
    equation = "[[map]]\neq = 'a.0.q [x y] <=> b [x y]'\n"
    assert "cannot be made up" in refused(tmp_path, equation + fill)


@pytest.mark.parametrize("content", few(4, [b"{", b"[1]", b"\xff", b'{"a": ' * 5000, b"{}" + b" " * (5 << 20)]))
def test_a_configuration_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'a.0.q [x y] <=> b [y x]'")
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(MapError, match=r"(?s)the configuration.*config\.json.*what to do: "):
        reshard_mpi.transform(
            checkpoint(tmp_path), tmp_path / "dst", map=tmp_path / "map.toml", config=tmp_path / "config.json"
        )


def test_the_command_line_refuses_in_a_message(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text("[[map]]\neq = 'a.0.q [x y] <=> b [y z]'")
    finished = run_here("transform", f"{checkpoint(tmp_path)}", f"{tmp_path}/dst", "--map", f"{tmp_path}/map.toml")
    assert finished.code == 3 and "not one-to-one" in finished.err and "Traceback" not in finished.err


CONFIG = {"heads": 12, "kv": 4, "deep": {"size": 64}, "text": "x", "flag": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("heads / kv", 3), ("deep.size * 2 + 1", 129), ("(heads - kv) * 2", 16), (" 2*3 ", 6), ("12/2/3", 2)],
)
def test_expressions(text: str, value: int) -> None:
    assert evaluated(text, CONFIG) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "heads kv", "heads / 5", "1 / 0", "nothing", "deep", "text", "flag", "(1", "1)", "1 +", "2 ** 3", "-1 -"),
        *(
            "__import__",
            "deep.size.x",
            "9" * 30,
            "(" * 50 + "1" + ")" * 50,
            "4000000000 * 4000000000",
            "1 // 2",
            "a" * 2000,
        ),
    ],
)
def test_expressions_that_are_none(text: str) -> None:
    with pytest.raises(ExpressionProblem):
        evaluated(text, CONFIG)


@pytest.mark.parametrize(
    ("length", "config", "got", "remedy"),
    [
        ("n / k", {"n": 2, "k": 4}, "2 / 4, which is no integer (n = 2, k = 4)", "correct these keys in the file that"),
        ("6 / 4", {}, "6 / 4, which is no integer", "correct the expression"),
        ("heads", {"head": 4}, "no key 'heads' in the configuration; did you mean 'head'?", "or write a number"),
        ("deep.size", {"deep": 4}, "no key 'deep.size' in the configuration", "add 'deep.size' with its number"),
        (
            "heads",
            {"heads": 4.5},
            "'heads' of the configuration, which is no integer: '4.5'",
            "set 'heads' to an integer",
        ),
        ("4 /", {}, "it ends where a number or a key is expected", "correct the expression"),
    ],
)
def test_a_length_that_cannot_be_computed_says_what_to_do(
    tmp_path: Path, length: str, config: dict[str, object], got: str, remedy: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f"[axes]\nx = '{length}'\n[[map]]\neq = 'a.{{l}}.q [(x r) h] <=> c.{{l}} [(x r) h]'"
    said = refused(tmp_path, text, config=tmp_path / "config.json")
    assert f"expected: an integer from '{length}'" in said and f"got: {got}" in said
    assert "map.toml, [axes]" in said and re.search(f"what to do: .*{re.escape(remedy)}", said)


@pytest.mark.parametrize("options", [{}, {"forward": True}])
def test_a_misspelt_tensor_is_named(tmp_path: Path, options: dict[str, bool]) -> None:
    text = "[[map]]\neq = 'a.{l}.q [x y], a.{l}.kk [z y] <=> c.{l} [(x + z) y]'"
    said = refused(tmp_path, text, **options)
    missing = "a.0.kk is not there and a.0.q is" if not options else "a.0.q without a.0.kk"
    assert f"{missing}; did you mean 'a.0.k'?" in said and "line 1, [[map]] 1" in said


@pytest.mark.parametrize(
    ("equation", "says"),
    [
        ("coutn [x] <=> number [x]", "coutn is not there; did you mean 'count'?"),
        ("count [x y] <=> number [x y]", "count is not there (count has the shape [3])"),
        ("nowhere [x] <=> number [x]", "nowhere is not there\n"),
        ("f.{n}, g.{n} <=> h.{n}, i.{n}", "f.{n}, g.{n} are not there"),
    ],
)
def test_tensors_that_are_nowhere_are_named(tmp_path: Path, equation: str, says: str) -> None:
    assert says in refused(tmp_path, f"[[map]]\neq = '{equation}'", forward=True)

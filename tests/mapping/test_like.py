"""A checkpoint that the target is to be like decides between equations, and the result has its names and shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import torch_peer
from support.checkpoints import sample, write_shard
from support.command_line import done, refused
from support.torch_runs import transformed

import reshard_mpi
from reshard_mpi.errors import MapError, UsageError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.direction import Inventory
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.mapping.result import MapResult
from reshard_mpi.mapping.selection import Selection, TargetTemplate

Shapes = dict[str, tuple[int, ...]]


def inventory(shapes: Shapes) -> Inventory:
    return {name: TensorType(BY_NAME["float32"], shape) for name, shape in shapes.items()}


def made(text: str, source: Shapes, like: Shapes | None, forward: bool | None = None) -> MapResult:
    wanted = None if like is None else TargetTemplate("target", like)
    return applied(parse_rules(text, "map.toml"), Selection(), inventory(source), forward, wanted)


def shapes_of(mapped: MapResult) -> Shapes:
    return {tensor.name: tensor.assembly.shape for tensor in mapped.made}


ALTERNATIVES = """
[[map]]
eq = "{p*}.weight [v h] <=> {p*}.table [v h]"
like = "forward"
[[map]]
eq = "{p*}.weight [o i k] <=> {p*}.weight [o i 1 k]"
like = "needed"
"""


@pytest.mark.parametrize("like", [{"a.table": (5, 3), "b.weight": (5, 3)}, {"a.weight": (5, 3), "b.table": (5, 3)}])
def test_names_decide(like: Shapes) -> None:
    assert shapes_of(made(ALTERNATIVES, {"a.weight": (5, 3), "b.weight": (5, 3)}, like, True)) == like


def test_shapes_decide() -> None:
    like: Shapes = {"conv.weight": (4, 3, 1, 2), "bilinear.weight": (4, 3, 2)}
    source: Shapes = {"conv.weight": (4, 3, 2), "bilinear.weight": (4, 3, 2)}
    assert shapes_of(made(ALTERNATIVES, source, like, True)) == like
    assert shapes_of(made(ALTERNATIVES, like, source, False)) == source


def test_without_it_what_names_do_not_tell_is_refused() -> None:
    with pytest.raises(MapError, match="names and shapes do not tell what becomes of a tensor") as raised:
        made(ALTERNATIVES, {"a.weight": (5, 3)}, None, True)
    assert "a.table" in str(raised.value) and "--like" in str(raised.value)


def test_backwards_names_tell() -> None:
    assert shapes_of(made(ALTERNATIVES, {"a.table": (5, 3)}, None)) == {"a.weight": (5, 3)}


@pytest.mark.parametrize(
    ("like", "told"),
    [
        ({"a.table": (5, 3), "c": (2,)}, r"nothing makes: c \[2\]"),
        ({}, r"not in it: a.weight \[5, 3\]"),
        ({"a.table": (6, 3)}, r"nothing makes: a.table \[6, 3\]; not in it: a.weight \[5, 3\]"),
        ({"a.weight": (3, 5)}, r"of another shape: a.weight \[5, 3\], not \[3, 5\]"),
    ],
)
def test_what_is_not_like_it_is_refused(like: Shapes, told: str) -> None:
    with pytest.raises(MapError, match="what the map makes is not like the target's checkpoint") as raised:
        made(ALTERNATIVES, {"a.weight": (5, 3)}, like, True)
    raised.match(told)


def test_only_with_it() -> None:
    text = '[[map]]\neq = "a [h] <=> b [h]"\nlike = "only"\n[[map]]\neq = "a [h] <=> c [h]"\n'
    assert shapes_of(made(text, {"a": (2,)}, None)) == {"c": (2,)}
    with pytest.raises(MapError, match="an equation applies nowhere"):
        made(text, {"a": (2,)}, {"b": (2,)}, True)
    optional = f"{text}optional = true\n"
    assert shapes_of(made(optional, {"a": (2,)}, {"b": (2,)})) == {"b": (2,)}


def test_padding_is_as_long_as_there() -> None:
    text = '[axes]\nv = 5\n[[map]]\neq = "a [v h] <=> b [(v | m) h]"\n'
    forward = made(text, {"a": (5, 3)}, {"b": (8, 3)})
    assert shapes_of(forward) == {"b": (8, 3)}
    assert [box.size for box in forward.made[0].assembly.zeros] == [9]
    assert shapes_of(made(text, {"b": (8, 3)}, None)) == {"a": (5, 3)}
    with pytest.raises(MapError, match=r"(?s)nothing tells how long 'm' is\n.*--like CHECKPOINT"):
        made(text, {"a": (5, 3)}, None)


def test_what_is_padded_is_as_long_as_there() -> None:
    text = '[[map]]\neq = "a [v h] <=> b [(v | 4) h]"\n'
    assert shapes_of(made(text, {"b": (8, 3)}, {"a": (5, 3)})) == {"a": (5, 3)}
    with pytest.raises(MapError, match=r"padding cannot be told: give 'v'"):
        made(text, {"b": (8, 3)}, {"a": (4, 3)})
    with pytest.raises(MapError, match=r"padding cannot be told: give 'v'"):
        made(text, {"b": (8, 3)}, None)


def test_lengths_are_as_there() -> None:
    text = '[[map]]\neq = "a [x h], b [y h] <=> c [(x + y) h]"\n'
    assert shapes_of(made(text, {"c": (5, 3)}, {"a": (2, 3), "b": (3, 3)})) == {"a": (2, 3), "b": (3, 3)}
    with pytest.raises(MapError, match="does not tell how long"):
        made(text, {"c": (5, 3)}, None)
    with pytest.raises(MapError, match="does not tell how long"):
        made(text, {"c": (5, 3)}, {"a": (2, 3), "b": (4, 3)})


@pytest.mark.parametrize(("own", "other"), [((), (1,)), ((1,), ()), ((1, 1), (1,))])
def test_a_single_element_gets_the_shape_it_has_there(own: tuple[int, ...], other: tuple[int, ...]) -> None:
    text = '[[map]]\neq = "a [h] <=> b [h]"\n'
    assert shapes_of(made(text, {"a": (2,), "step": own}, {"b": (2,), "step": other}))["step"] == other


def test_what_is_made_up_or_left_out_is_as_there() -> None:
    text = """
[[map]]
eq = "{p*}.a [h] <=> {p*}.b [h]"
[[map]]
drop = "*.count"
optional = true
[[map]]
fill = { name = "{p*}.one", value = 1, beside = "{p*}.b" }
like = "only"
"""
    source: Shapes = {"p.a": (2,), "q.a": (2,), "p.count": (1,), "q.count": (1,)}
    assert made(text, source, None).constants == ()
    mapped = made(text, source, {"p.b": (2,), "q.b": (2,), "q.one": (2,), "p.count": (1,)})
    assert [constant.name for constant in mapped.constants] == ["q.one"]
    assert mapped.left_out == ("q.count",)


def test_files(tmp_path: Path) -> None:
    tensors = {"a.weight": np.arange(15, dtype=np.float32).reshape(5, 3), "step": np.array([7], np.int32)}
    (tmp_path / "map.toml").write_text(ALTERNATIVES)
    write_shard(tensors, tmp_path / "src.ckpt")
    write_shard({"a.table": np.zeros((5, 3), np.float32), "step": np.int32(0).reshape(())}, tmp_path / "like.ckpt")
    options = ("--map", str(tmp_path / "map.toml"), "--forward", "--like", str(tmp_path / "like.ckpt"))
    for command in ("plan", "transform", "verify", "diff"):
        done(command, tmp_path / "src.ckpt", tmp_path / "dst", *options)
    arrays = reshard_mpi.load_rank(
        0, tmp_path / "src.ckpt", map=tmp_path / "map.toml", forward=True, like=tmp_path / "like.ckpt"
    )
    assert {name: np.shape(array) for name, array in arrays.items()} == {"a.table": (5, 3), "step": ()}
    both = (str(tmp_path / "src.ckpt"), str(tmp_path / "other"))
    done("plan", *both, *options, "--exclude", "step")
    assert "the map does nothing" in refused("plan", *both, *options[:-1], tmp_path / "src.ckpt")


def test_it_belongs_to_a_map(tmp_path: Path) -> None:
    write_shard({"a": np.zeros(2, np.float32)}, tmp_path / "src.ckpt")
    with pytest.raises(UsageError, match=r"^--like belongs to a map"):
        reshard_mpi.plan(tmp_path / "src.ckpt", like=tmp_path / "src.ckpt")


def test_it_is_nested_as_there(tmp_path: Path) -> None:
    """Names are those below the dictionary of all tensors; values that both have are those of the source."""
    tensor = torch_peer.tensor(sample("a", np.arange(2, dtype=np.float32)), "0")
    torch_peer.save(tmp_path / "src.pt", {"state_dict": {"a": tensor}, "epoch": 3, "lr": 0.5})
    torch_peer.save(tmp_path / "like.pt", {"model": {"b": tensor}, "epoch": 9, "note": "there"})
    (tmp_path / "map.toml").write_text('[[map]]\neq = "a [h] <=> b [h]"\n')
    options = {"map": tmp_path / "map.toml"}
    loaded = transformed(tmp_path / "src.pt", tmp_path / "dst", like=tmp_path / "like.pt", **options)
    assert loaded["epoch"] == 3 and loaded["note"] == "there" and list(loaded["model"]) == ["b"] and len(loaded) == 3
    write_shard({"b": np.zeros(2, np.float32)}, tmp_path / "like.ckpt")
    arrays = reshard_mpi.load_rank(0, tmp_path / "src.pt", like=tmp_path / "like.ckpt", **options)
    assert list(arrays) == ["b"]

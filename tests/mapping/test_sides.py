"""Sides of several tensors, what one axis ties together, and lengths that only a configuration tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_shard

import reshard_mpi
from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.mapping.result import MapResult
from reshard_mpi.mapping.selection import Selection

Shapes = dict[str, tuple[int, ...]]

TIED = """[[map]]
eq = "x.{e}.a [f h], x.{e}.b [f h], x.{e}.c [h f], x.r [e h] <=> y.ab [e (f + f) h], y.c [e h f], y.r [e h]"
"""


def mapped(text: str, shapes: Shapes, config: dict[str, Any] | None = None) -> MapResult:
    kinds = {name: TensorType(BY_NAME["float32"], shape) for name, shape in shapes.items()}
    return applied(parse_rules(text, "map.toml", config), Selection(), kinds)


def apart(experts: int, router: int, f: int = 2, h: int = 3) -> Shapes:
    shapes: Shapes = {"x.r": (router, h)}
    for e in range(experts):
        shapes |= {f"x.{e}.a": (f, h), f"x.{e}.b": (f, h), f"x.{e}.c": (h, f)}
    return shapes


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_concatenations_beside_other_tensors(e: int, f: int, h: int) -> None:
    source = apart(e, e, f, h)
    target = {tensor.name: tensor.assembly.shape for tensor in mapped(TIED, source).made}
    assert target == {"y.ab": (e, 2 * f, h), "y.c": (e, h, f), "y.r": (e, h)}
    again = mapped(TIED, target)
    assert {tensor.name: tensor.assembly.shape for tensor in again.made} == source
    assert all(sum(pair.to.size for pair in tensor.assembly.pairs) for tensor in again.made)


@pytest.mark.parametrize("router", [2, 4])
def test_an_axis_ties_the_tensors_of_a_side(router: int) -> None:
    with pytest.raises(MapError, match="does not fit the shapes"):
        mapped(TIED, apart(3, router))


@pytest.mark.parametrize("length", [2, 4])
def test_lengths_that_the_map_gives_bind_names_as_well(length: int) -> None:
    text = f'[axes]\ne = {length}\n[[map]]\neq = "x.{{e}} [h] <=> y [e h]"\n'
    with pytest.raises(MapError, match=rf"there are 3 tensors for \'e\', not {length}"):
        mapped(text, {f"x.{e}": (2,) for e in range(3)})


@pytest.mark.parametrize("bias", [4, 5, 8, 9])
def test_another_tensor_tells_how_much_is_padding(bias: int) -> None:
    text = '[[map]]\neq = "a [v h], b [v] <=> c [(v | 4) h], d [v]"\n'
    source = {"c": (8, 3), "d": (bias,)}
    if bias in (5, 8):
        assert {tensor.name: tensor.assembly.shape for tensor in mapped(text, source).made} == {
            "a": (bias, 3),
            "b": (bias,),
        }
        return
    with pytest.raises(MapError, match=rf"is 8 long, not {-(-bias // 4) * 4} \(v = {bias}\)"):
        mapped(text, source)


def test_without_a_configuration_shapes_tell_or_it_is_asked_for() -> None:
    text = '[axes]\ng = "groups"\n[[map]]\neq = "x [(g d)] <=> y [d g]"\n'
    assert mapped(text, {"x": (6,)}, {"groups": 2}).made[0].assembly.shape == (3, 2)
    assert mapped(text, {"y": (3, 2)}).made[0].assembly.shape == (6,)
    with pytest.raises(MapError, match=r"--config FILE\.json"):
        mapped(text, {"x": (6,)})
    with pytest.raises(MapError, match="cannot be computed"):
        mapped(text, {"x": (6,)}, {"group": 2})


def test_one_tensor_for_several_of_either_side() -> None:
    text = '[[map]]\neq = "a [h], b [h] <=> c [h]"\ncopy = true\n'
    forward = mapped(text, {"a": (2,), "b": (2,)})
    assert [tensor.name for tensor in forward.made] == ["c"] and forward.equal[0].names == ("a", "b")
    assert [tensor.name for tensor in mapped(text, {"c": (2,)}).made] == ["a", "b"]


def test_what_is_left_out_may_have_to_be_zeros(tmp_path: Path) -> None:
    text = '[[map]]\neq = "a [h] <=> b [h]"\n[[map]]\ndrop = "*.stat"\noptional = true\nzeros = true\n'
    (tmp_path / "map.toml").write_text(text)
    tensors = {"a": np.ones(2, np.float32), "a.stat": np.zeros(3, np.float32)}
    write_shard(tensors, tmp_path / "source.ckpt")
    assert list(reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map=tmp_path / "map.toml")) == ["b"]
    tensors["a.stat"][1] = 1
    write_shard(tensors, tmp_path / "source.ckpt")
    with pytest.raises(MapError, match=r"a\.stat is left out, and is not zero"):
        reshard_mpi.load_rank(0, tmp_path / "source.ckpt", map=tmp_path / "map.toml")

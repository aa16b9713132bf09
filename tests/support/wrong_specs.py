"""Checkpoints with a right TOML spec, wrong ones made of it by one slip, and what the bytes alone say against them.

A spec is read here by its own words and the oracle's rules; nothing of the package takes part.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

import reshard_mpi
from reshard_mpi.errors import ReshardError
from support.checkpoints import as_read, read_shard, write_ranks
from support.oracle import RawLayout, rank_holds, slice_for_rank

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Rule:
    """One [[parameter]] of a spec."""

    match: str
    split: dict[int, tuple[str, ...]]
    optimizer: tuple[str, ...] = ()
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """A TOML spec. mesh: ranks by axis, in order."""

    mesh: dict[str, int]
    rules: tuple[Rule, ...]
    stages: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values()) * self.stages

    def text(self) -> str:
        """The spec as people write it."""
        axes = ", ".join(f"{axis} = {size}" for axis, size in self.mesh.items())
        lines = [f"mesh = {{ {axes} }}", f"stages = {self.stages}"]
        for rule in self.rules:
            lines += ["", "[[parameter]]", f'match = "{rule.match}"']
            if rule.split:
                cuts = ", ".join(f"{dim} = {_listed(axes)}" for dim, axes in rule.split.items())
                lines.append(f"split = {{ {cuts} }}")
            if rule.optimizer:
                lines.append(f"optimizer = {_listed(rule.optimizer)}")
            if rule.stages is not None:
                lines.append(f"stage = {list(rule.stages)}")
        return "\n".join(lines) + "\n"

    def layout(self, name: str, ndim: int) -> RawLayout | None:
        """How a tensor lies, in the oracle's terms."""
        rule = next((rule for rule in self.rules if fnmatchcase(name, rule.match)), None)
        if rule is None:
            return None
        axes = list(self.mesh)
        numbers = [tuple(len(axes) - 1 - axes.index(axis) for axis in rule.split.get(d, ())) for d in range(ndim)]
        pieces = math.prod(self.mesh[axis] for axis in rule.optimizer)
        stages = tuple(range(self.stages)) if rule.stages is None else rule.stages
        mesh = tuple(self.mesh.values())
        return RawLayout(mesh, tuple(n or (-1,) for n in numbers), pieces if pieces > 1 else 0, stages=stages)

    def shards(self, tensors: Tensors) -> dict[int, Tensors]:
        """What every rank holds. Raises ValueError where a cut does not divide."""
        layouts = {name: self.layout(name, array.ndim) for name, array in tensors.items()}
        return {
            rank: {
                name: tensors[name].reshape(-1)[_indices(layout, tensors[name].shape, rank)]
                for name, layout in layouts.items()
                if layout is not None and rank_holds(layout, rank)
            }
            for rank in range(self.world_size)
        }


def _listed(axes: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{axis}"' for axis in axes) + "]"


@dataclass(frozen=True, slots=True)
class Slip:
    """A checkpoint, the spec it was made by, one that differs from it by a slip of the pen, and the target's spec."""

    tensors: Tensors = field(repr=False)
    right: Spec
    wrong: Spec
    what: str
    target: Spec


# What a model's parameters are called and what shape they have, in units that every mesh drawn here divides.
_KINDS = {
    "layers.{}.qkv.weight": 2,
    "layers.{}.out.weight": 2,
    "layers.{}.qkv.bias": 1,
    "layers.{}.norm.weight": 1,
    "embedding": 2,
    "head": 2,
    "experts.{}.up": 3,
}
_LENGTH = 24
_LAST_LENGTH = 12  # of three
_AXES = ("dp", "tp", "ep")
_SIZES = (1, 2, 3, 4)


@st.composite
def slips(draw: st.DrawFn) -> Slip:
    """Draw a checkpoint with its spec, and a slip in it."""
    spec = draw(_specs())
    names = [kind.format(layer) for kind in _kinds_of(spec) for layer in (range(3) if "{}" in kind else [0])]
    noise = np.random.default_rng(draw(st.integers(0, 2**16)))
    tensors = {name: noise.standard_normal(_shape(name), dtype=np.float32) for name in names}
    what = draw(st.sampled_from(sorted(_SLIPS)))
    wrong = _SLIPS[what](draw, spec)
    targets = draw(st.integers(1, 4))
    target = Spec({"n": targets}, (Rule("*", {0: ("n",)}) if draw(st.booleans()) else Rule("*", {}),))
    return Slip(tensors, spec, wrong, what, target)


def _shape(name: str) -> tuple[int, ...]:
    ndim = next(ndim for kind, ndim in _KINDS.items() if fnmatchcase(name, kind.replace("{}", "*")))
    return (_LENGTH, _LENGTH, _LAST_LENGTH)[:ndim]


def _kinds_of(spec: Spec) -> list[str]:
    return [kind for kind in _KINDS if any(fnmatchcase(kind.format(0), rule.match) for rule in spec.rules)]


@st.composite
def _specs(draw: st.DrawFn) -> Spec:
    axes = draw(st.lists(st.sampled_from(_AXES), min_size=1, max_size=3, unique=True))
    mesh = {axis: draw(st.sampled_from(_SIZES)) for axis in axes}
    if not 2 <= math.prod(mesh.values()) <= 12:
        mesh = {"dp": 2, "tp": 4}
    stages = draw(st.sampled_from((1, 1, 1, 2)))
    kinds = draw(st.lists(st.sampled_from(sorted(_KINDS)), min_size=1, max_size=5, unique=True))
    rules = tuple(_rule(draw, kind, mesh, stages) for kind in kinds)
    if draw(st.booleans()):
        rules = (*rules, Rule("*", {}))
    return Spec(mesh, rules, stages)


def _rule(draw: st.DrawFn, kind: str, mesh: dict[str, int], stages: int) -> Rule:
    split: dict[int, tuple[str, ...]] = {}
    left = list(mesh)
    for dim in range(_KINDS[kind]):
        axes = draw(st.lists(st.sampled_from(left), max_size=2, unique=True)) if left else []
        length = _LAST_LENGTH if dim == 2 else _LENGTH
        if axes and length % math.prod(mesh[axis] for axis in axes) == 0:
            split[dim] = tuple(axes)
            left = [axis for axis in left if axis not in axes]
    optimizer: tuple[str, ...] = ()
    if left and draw(st.integers(0, 3)) == 0:
        cut = math.prod(mesh[axis] for axis in (*split.get(0, ()), *left))
        optimizer = tuple(left) if _LENGTH % cut == 0 else ()
    home = draw(st.sampled_from([None, *((stage,) for stage in range(stages))])) if stages > 1 else None
    return Rule(kind.replace("{}", "*"), split, optimizer, home)


def _typo(draw: st.DrawFn, spec: Spec) -> Spec:
    """One letter of a pattern too many, too few, or another."""
    number = draw(st.integers(0, len(spec.rules) - 1))
    text = spec.rules[number].match
    place = draw(st.integers(0, len(text) - 1))
    letter = draw(st.sampled_from("aw*01."))
    changed = draw(
        st.sampled_from(
            [
                text[:place] + text[place + 1 :],
                text[:place] + letter + text[place:],
                text[:place] + letter + text[place + 1 :],
            ]
        )
    )
    return _with_rule(spec, number, replace(spec.rules[number], match=changed or "x"))


def _swapped_mesh(draw: st.DrawFn, spec: Spec) -> Spec:
    return replace(spec, mesh=dict(draw(st.permutations(list(spec.mesh.items())))))


def _swapped_split(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    axes = [axis for axes in spec.rules[number].split.values() for axis in axes]
    other = dict(zip(axes, draw(st.permutations(axes))))
    split = {dim: tuple(other[axis] for axis in axes) for dim, axes in spec.rules[number].split.items()}
    return _with_rule(spec, number, replace(spec.rules[number], split=split))


def _dropped_axis(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    rule = spec.rules[number]
    uses = [(dim, axis) for dim, axes in rule.split.items() for axis in axes]
    if not uses:
        return _with_rule(spec, number, replace(rule, optimizer=()))
    dim, axis = draw(st.sampled_from(uses))
    split = {**rule.split, dim: tuple(other for other in rule.split[dim] if other != axis)}
    return _with_rule(spec, number, replace(rule, split={d: axes for d, axes in split.items() if axes}, optimizer=()))


def _added_axis(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    rule = spec.rules[number]
    used = {axis for axes in rule.split.values() for axis in axes}
    free = [axis for axis in spec.mesh if axis not in used]
    if not free:
        return spec
    dim = draw(st.integers(0, 1))
    split = {**rule.split, dim: (*rule.split.get(dim, ()), draw(st.sampled_from(free)))}
    return _with_rule(spec, number, replace(rule, split=split, optimizer=()))


def _added_optimizer(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    rule = spec.rules[number]
    used = {axis for axes in rule.split.values() for axis in axes}
    return _with_rule(spec, number, replace(rule, optimizer=tuple(axis for axis in spec.mesh if axis not in used)))


def _another_mesh(draw: st.DrawFn, spec: Spec) -> Spec:
    ranks = math.prod(spec.mesh.values())
    factors = [sizes for sizes in itertools.product(range(1, 13), repeat=len(spec.mesh)) if math.prod(sizes) == ranks]
    return replace(spec, mesh=dict(zip(spec.mesh, draw(st.sampled_from(factors)))))


def _more_ranks(draw: st.DrawFn, spec: Spec) -> Spec:
    axis = draw(st.sampled_from(sorted(spec.mesh)))
    return replace(spec, mesh={**spec.mesh, axis: spec.mesh[axis] + draw(st.integers(1, 2))})


def _another_net(draw: st.DrawFn, spec: Spec) -> Spec:
    return replace(
        spec, rules=tuple(replace(rule, match=f"net.{rule.match}" if rule.match != "*" else "*") for rule in spec.rules)
    )


def _lost_rule(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    rules = spec.rules[:number] + spec.rules[number + 1 :]
    return replace(spec, rules=rules or (Rule("*", {}),))


def _another_order(draw: st.DrawFn, spec: Spec) -> Spec:
    return replace(spec, rules=tuple(draw(st.permutations(spec.rules))))


def _other_stages(draw: st.DrawFn, spec: Spec) -> Spec:
    number = draw(st.integers(0, len(spec.rules) - 1))
    stage = draw(st.integers(0, spec.stages - 1))
    return _with_rule(spec, number, replace(spec.rules[number], stages=(stage,)))


def _with_rule(spec: Spec, number: int, rule: Rule) -> Spec:
    return replace(spec, rules=(*spec.rules[:number], rule, *spec.rules[number + 1 :]))


_SLIPS = {
    "typo": _typo,
    "mesh swapped": _swapped_mesh,
    "split swapped": _swapped_split,
    "axis dropped": _dropped_axis,
    "axis added": _added_axis,
    "optimizer added": _added_optimizer,
    "another mesh": _another_mesh,
    "more ranks": _more_ranks,
    "another net": _another_net,
    "rule lost": _lost_rule,
    "rules in another order": _another_order,
    "another stage": _other_stages,
}


def outcome(slip: Slip) -> str:
    """Transform by the wrong spec; return "right", "wrong", or "refused"."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_ranks(slip.right.shards(slip.tensors), folder / "src")
        (folder / "src.toml").write_text(slip.wrong.text())
        (folder / "dst.toml").write_text(slip.target.text())
        specs = folder / "src.toml", folder / "dst.toml"
        try:
            reshard_mpi.transform_checkpoints(folder / "src", folder / "dst", "c_", *specs)
        except ReshardError as error:
            assert error.exit_code == 3, error
            return "refused"
        right = all(
            read_shard(folder / "dst" / f"rank_{rank}" / f"c_{rank}.ckpt") == as_read(arrays)
            for rank, arrays in slip.target.shards(slip.tensors).items()
        )
    return "right" if right else "wrong"


def contradictions(spec: Spec, shards: dict[int, Tensors]) -> Iterator[str]:
    """Yield what in the bytes of the shards contradicts a spec, found by comparing all with all."""
    stage_size = spec.world_size // spec.stages
    names = dict.fromkeys(name for arrays in shards.values() for name in arrays)
    for name in names:
        ndim = next(arrays[name].ndim for arrays in shards.values() if name in arrays)
        layout = spec.layout(name, ndim)
        if layout is None:
            copies = [arrays[name] for arrays in shards.values() if name in arrays]
            if not all(np.array_equal(copies[0], other) for other in copies):
                yield f"{name} is unlisted and differs"
            continue
        if any(name in shards[rank] and not rank_holds(layout, rank) for rank in shards if rank < spec.world_size):
            yield f"{name} lies in stages that the spec does not give it"
        for first, second in itertools.combinations(range(spec.world_size), 2):
            if first // stage_size != second // stage_size or not all(
                name in shards.get(r, {}) for r in (first, second)
            ):
                continue
            equal = np.array_equal(shards[first][name], shards[second][name])
            if (_part(layout, first) == _part(layout, second)) != equal:
                should = "different parts" if equal else "the same"
                yield f"ranks {first} and {second} should hold {should} of {name}"


@functools.cache
def _part(layout: RawLayout, rank: int) -> bytes:
    """Return what tells one part of a tensor from another, whatever its size: found on one just large enough."""
    cuts = [math.prod(layout.dev_matrix[-1 - axis] for axis in axes if axis != -1) for axes in layout.tensor_map]
    shape = (cuts[0] * max(layout.opt_size, 1), *cuts[1:])
    return _indices(layout, shape, rank).tobytes()


@functools.cache
def _indices(layout: RawLayout, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Return which elements of a tensor a rank holds."""
    return slice_for_rank(np.arange(math.prod(shape)).reshape(shape), layout, rank)

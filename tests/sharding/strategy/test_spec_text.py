"""A strategy as a TOML spec: read back, it places every name as before; or it is refused, and rightly."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sharding.strategy.strategy_examples import NAMES, placements, whole_strategies
from support.cases import Case, cases
from support.checkpoints import write_strategy
from support.command_line import done, refused
from support.conversions import Conversion, assert_right
from support.examples import few, many
from support.oracle import rank_holds, slice_for_rank

from reshard_mpi.errors import StrategyError
from reshard_mpi.sharding import strategy_files as strategies
from reshard_mpi.sharding import strategy_table, toml_spec
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.spec_text import spec_text
from reshard_mpi.sharding.strategy import Strategy

DATA = Path(os.environ.get("RESHARD_MPI_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
REAL = [DATA / "mindformers_gpt2" / f"strategy_{ranks}_npus.ckpt" for ranks in (4, 8)]
REAL += [*sorted((DATA / "mindspore_guide").glob("*.ckpt")), DATA / "mindspore_guide" / "pipeline8"]


def held(strategy: Strategy, name: str) -> list[object]:
    """Return for every rank which slice of each dimension of a tensor it holds, which piece of that, and the sizes."""
    pieces: list[object] = []
    for rank in range(strategy.world_size):
        found = [p for p in strategy.find(name) if strategy.stage_of(rank) in p.stages]
        pieces.append([piece(placement, rank) for placement in found])
    return pieces


def piece(placement: Placement, rank: int) -> object:
    index, part = placement.piece(rank).slices, placement.piece(rank).part
    cuts = [(slice_, placement.slices(dim)) for dim, slice_ in enumerate(index)]
    while cuts and cuts[-1] == (0, 1):
        cuts.pop()
    return cuts, part, placement.optimizer, placement.sizes, placement.ceil


def assert_same(strategy: Strategy, names: set[str]) -> str:
    text = spec_text(strategy)
    read = toml_spec.parse(text, "")
    assert (read.world_size, read.stages) == (strategy.world_size, strategy.stages)
    for name in {*strategy.parameters, *names}:
        assert held(read, name) == held(strategy, name), name
        assert read.followed(name) == strategy.followed(name)
    return text


@given(whole_strategies(), st.sets(NAMES, max_size=5))
@many(150)
def test_every_name_is_placed_as_before(strategy: Strategy, others: set[str]) -> None:
    names = {*others, *(f"{prefix}.{name}" for name in strategy.parameters for prefix in ("moments", "a.1"))}
    try:
        assert_same(strategy, names)
    except StrategyError as error:
        ways = [held(strategy, name) for name in strategy.parameters]
        differ = any(len({str(piece) for piece in way if piece}) > 1 for way in ways)
        assert ("in different ways" in error.problem and differ) or not is_sayable(strategy), error


@given(st.data(), st.sampled_from([4, 6, 8, 12]))
@many(100)
def test_what_is_refused_cannot_be_said_over_any_mesh(data: st.DataObject, ranks: int) -> None:
    parameters = {name: (data.draw(placements(ranks)),) for name in "abc"}
    strategy = Strategy(ranks, 1, parameters)
    try:
        spec_text(strategy)
    except StrategyError:
        assert not is_sayable(strategy)
    else:
        assert is_sayable(strategy)


def is_sayable(strategy: Strategy) -> bool:
    """Tell by trying everything whether any one mesh, as fine as can be, does for all placements."""
    listed = [placement for placements in strategy.parameters.values() for placement in placements]
    return any(
        all(any(same(placement, other) for other in everything(mesh, placement)) for placement in listed)
        for mesh in set(itertools.permutations(primes(strategy.stage_size)))
    )


def primes(number: int) -> list[int]:
    factor = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [] if factor is None else [factor, *primes(number // factor)]


def everything(mesh: tuple[int, ...], like: Placement) -> list[Placement]:
    """Return all placements of as many dimensions over `mesh` whose optimizer cuts over the last of the free axes."""
    found = []
    for count in range(len(mesh) + 1):
        for axes in itertools.permutations(range(len(mesh)), count):
            free = [axis for axis in range(len(mesh)) if axis not in axes]
            suffixes = {int(np.prod([mesh[axis] for axis in free[first:]])) for first in range(len(free) + 1)}
            if like.optimizer not in suffixes:
                continue
            for ends in itertools.combinations_with_replacement(range(count + 1), max(len(like.split) - 1, 0)):
                bounds = (0, *ends, count)
                split = [axes[low:high] for low, high in itertools.pairwise(bounds)] if like.split else []
                if like.split or not count:
                    found.append(Placement(mesh or (1,), tuple(split), like.optimizer))
    return found


def same(placement: Placement, other: Placement) -> bool:
    ranks = range(placement.stage_size)
    return all(piece(placement, rank)[:2] == piece(other, rank)[:2] for rank in ranks)  # type: ignore[index]


@given(case=cases(empty=False, dtypes=[np.dtype(np.int64)]))
@pytest.mark.parametrize("kind", ["protobuf", "json"])
def test_every_rank_holds_what_mindspore_means(tmp_path_factory: pytest.TempPathFactory, kind: str, case: Case) -> None:
    side = case.src
    assume(all(any(stage in layout.stages for layout in side.listed.values()) for stage in range(side.stages)))
    shapes = {name: array.shape for name, array in case.tensors.items()}
    folder = tmp_path_factory.mktemp("strategy") / "files"
    try:
        path = write_strategy(side, folder, shapes=shapes if kind == "json" else None)
        spec = toml_spec.parse(spec_text(strategies.load(str(path))), "")
    except (StrategyError, ValueError):
        assume(False)
    for name, layout in side.layouts.items():
        found = spec.find(name)
        assert bool(found) == (name not in side.unlisted)
        for rank in range(side.world_size if found else 0):
            here = [placement for placement in found if rank // side.stage_size in placement.stages]
            assert bool(here) == rank_holds(layout, rank)
            for placement in here:
                whole = case.tensors[name]
                box = Layout(placement, whole.shape).box(rank)
                part = whole[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]
                np.testing.assert_array_equal(part, slice_for_rank(whole, layout, rank))


@pytest.mark.skipif(not DATA.is_dir(), reason="no samples under RESHARD_MPI_SHARED_DATA or ../shared/data")
@pytest.mark.parametrize("path", few(1, REAL), ids=lambda path: path.name)
def test_real_strategies(path: Path) -> None:
    strategy = strategies.load(str(path))
    text = assert_same(strategy, {f"other.{name}" for name in strategy.parameters})
    assert text.count("[[parameter]]") <= len(strategy.parameters)


SPEC = """stages = 2
mesh = { dp = 2, tp = 4, one = 1 }

[[parameter]]
match = "a b.*"
split = { 1 = ["tp", "dp"], 2 = ["one"] }
stage = [0]
optional = true

[[parameter]]
match = '\\u00e9"\\'
split = { 0 = ["tp"], 1 = ["dp"] }
sizes = "ceil"

[[parameter]]
match = "uneven[0-9]"
split = { 0 = ["dp"] }
sizes = { 0 = [3, 5] }
optimizer = ["tp"]

[[parameter]]
match = "*"
optimizer = ["dp", "tp"]
"""


def test_a_spec_comes_back_as_it_was() -> None:
    meant = toml_spec.parse(SPEC, "")
    read = toml_spec.parse(spec_text(meant), "")
    assert read == meant and read.axes == meant.axes and read.required_rules == meant.required_rules


def test_a_spec_that_shards_carry() -> None:
    meant = toml_spec.parse(SPEC.replace("a b.*", "net.*"), "")
    names = {"net.w": (0,), "net.b": (0,), "other": (0, 1), "uneven3": (1,)}
    carried = strategy_table.loads(strategy_table.dumps(meant), "")
    assert_same(carried, set(names))


HALVES, THIRDS = Placement((2, 3), ((0,),)), Placement((3, 2), ((0,),))


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (Strategy(6, 1, {"a": (HALVES,), "b": (THIRDS,)}), "the meshes cannot be made one"),
        (Strategy(12, 1, {"a": (Placement((2, 2, 3), ((1,),), 2),)}), "the optimizer cut does not go over whole axes"),
        (Strategy(6, 1, {"a": (Placement((6,), ((0,),), expanded_shape=(6,)),)}), "how 'a' is placed: a nested layout"),
        (
            Strategy(4, 1, {"a": (Placement((4,), ((0,),), ceil=True),), "b": (Placement((2, 2), ((1,),)),)}),
            "how 'a' is placed: a cut by ceiling division",
        ),
        (
            Strategy(12, 2, {"a": (HALVES, HALVES.with_stages((1,))), "b": (HALVES, THIRDS.with_stages((1,)))}),
            "the meshes cannot be made one",
        ),
        (
            Strategy(12, 2, {"a": (HALVES, Placement((2, 3), ((1,),), stages=(1,)))}),
            "stages hold 'a' in different ways",
        ),
        (Strategy(6, 1, {"x" * n: (HALVES,) for n in range(1, 1100)}), "too many patterns of names for a spec"),
        (Strategy(6, 1, {".a" * 70: (HALVES,)}), "too many dots"),
        (
            Strategy(6, 1, {"a": (Placement((6,), ((0,),), open_ended=True, whole_scalars=True),)}),
            "'a' is cut unless it is a scalar",
        ),
    ],
)
def test_what_no_spec_can_say(strategy: Strategy, says: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(says)):
        spec_text(strategy)


def test_ways_that_differ_in_nothing_but_their_meshes_are_one() -> None:
    shared = (Placement((6,)), Placement((2, 3), stages=(1,)))
    text = assert_same(Strategy(12, 2, {"a": shared, "b": (HALVES,)}), set())
    assert text.count("match = ") == 2 and text.count("stage = ") == 1


def test_the_spec_converts_as_the_files_do(c: Conversion, tmp_path: Path) -> None:
    for option, path in (("src", c.src_strategy), ("dst", c.dst_strategy)):
        finished = done("inspect", "--toml", path)
        (tmp_path / f"{option}.toml").write_text(finished.out)
    specs = [f"--{option}-strategy={tmp_path / option}.toml" for option in ("src", "dst")]
    done("transform", c.src, c.dst, *specs)
    assert_right(c)
    hdf5 = str(tmp_path / "hdf5")
    done("transform", c.src, hdf5, *specs, "--to", "hdf5")
    assert 'match = "w"' in done("inspect", "--toml", hdf5).out
    assert "the shards do not say how they are sharded" in refused("inspect", "--toml", c.src)
    for arguments in (["--json"], ["--rank", "0"], ["w"]):
        assert "--toml" in refused("inspect", "--toml", c.src_strategy, *arguments, code=2)
    assert "is not there" in refused("inspect", "--toml", tmp_path / "nothing")

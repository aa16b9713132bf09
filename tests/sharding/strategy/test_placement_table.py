"""The text that carries a whole strategy inside a shard."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategy_examples import whole_strategies

from reshard_mpi.errors import LayoutError, ReshardError, StrategyError
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.sharding.strategy_table import dumps, loads

EXAMPLE = Strategy(
    8,
    2,
    {
        "b": (Placement((2, 2), ((1,), ()), 2, ((0, (3, 9)),), (1,)),),
        "a": (Placement((2, 2), ((0,), (1,), ()), expanded_shape=(2, 4, 8)), Placement((4,), stages=(1,))),
    },
    (("*", Placement((4,), ((), (0,)), stages=(0, 1), open_ended=True)),),
)
GOLDEN = (
    '{"version":1,"world_size":8,"stages":2,"placements":[{"mesh":[2,2],"split":[[0],[1],[]],"expanded_shape":[2,4,8]},'
    '{"mesh":[4],"stages":[1]},{"mesh":[2,2],"split":[[1],[]],"optimizer":2,"sizes":[[0,[3,9]]],"stages":[1]},'
    '{"mesh":[4],"split":[[],[0]],"stages":[0,1],"open_ended":true}],"parameters":{"a":[0,1],"b":[2]},"rules":[["*",3]]}'
)


def test_rules_that_leave_scalars_whole() -> None:
    rule = Placement((4,), ((0,),), open_ended=True, whole_scalars=True)
    made = Strategy(4, 1, {}, (("*", rule),))
    assert loads(dumps(made), "a shard") == made
    for wrong in ('"whole_scalars":1', '"whole_scalars":true,"open_ended":false'):
        text = dumps(made).replace('"open_ended":true,"whole_scalars":true', wrong)
        with pytest.raises(StrategyError, match="whole_scalars"):
            loads(text, "a shard")


def test_rules_that_cut_by_ceiling_division() -> None:
    made = Strategy(4, 1, {"w": (Placement((2, 2), ((), (0,)), ceil=True),)})
    assert loads(dumps(made), "a shard") == made
    with pytest.raises(StrategyError, match="ceil"):
        loads(dumps(made).replace('"ceil":true', '"ceil":"yes"'), "a shard")
    with pytest.raises(LayoutError, match="ceiling division"):
        loads(dumps(made).replace('"ceil":true', '"ceil":true,"optimizer":2'), "a shard")


def test_golden() -> None:
    assert dumps(EXAMPLE) == GOLDEN
    assert loads(GOLDEN, "a shard") == EXAMPLE
    assert loads(GOLDEN, "a shard").origin == "a shard"


@given(whole_strategies(), st.randoms(use_true_random=False))
def test_round_trip_whatever_the_order(strategy: Strategy, random: Any) -> None:
    text = dumps(strategy)
    assert loads(text, "") == strategy
    names = list(strategy.parameters)
    random.shuffle(names)
    shuffled = {name: strategy.parameters[name] for name in names}
    assert dumps(Strategy(strategy.world_size, strategy.stages, shuffled)) == text


def test_equal_placements_are_one_object() -> None:
    made = loads(dumps(Strategy(2, 1, {str(number): (Placement((2,)),) for number in range(9)})), "")
    assert len({id(placements[0]) for placements in made.parameters.values()}) == 1


def changed(path: str, value: object) -> str:
    content: Any = json.loads(GOLDEN)
    at = content
    *parents, last = path.split("/")
    for step in parents:
        at = at[int(step) if isinstance(at, list) else step]
    at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(content)


HOSTILE = [
    "",
    "null",
    "[]",
    "{}",
    "[" * 100_000,
    GOLDEN[:-1],
    GOLDEN.replace('"a":[0,1],', '"a":[0,1],"a":[0,1],'),
    GOLDEN.replace('"stages":2', '"stages":' + "9" * 5000),
    *(
        changed(path, value)
        for path, values in {
            "version": [2, 0, "1", True, None, [1]],
            "world_size": [0, -8, 8.0, "8", True, None, 1 << 40, 6, 4],
            "stages": [0, 3, 16, None, 2.0],
            "more": [1],
            "placements": [None, {}, 3, [], [1]],
            "parameters": [None, [], {"": [0]}, {"a": []}, {"a": 0}, {"a": [9]}, {"a": [-1]}, {"a": [0, 0]}],
            "parameters/a": [[0.0], ["0"], {"0": 0}, [[0]]],
            "rules": [None, {}, [["*"]], [["*", 9]], [["*", True]], [[1, 0]], [["", 0]], ["*0"]],
            "placements/0": [{"split": []}, {"mesh": [4], "shape": 1}],
            "placements/0/mesh": [None, 4, [], [0, 4], [-2, -2], [2.0, 2], [True, 4], [1 << 63], [1] * 1000, [4, 4]],
            "placements/0/split": [None, {}, [0], [[2], [], []], [[-1], [], []], [[0], [0], []], [[]] * 1000],
            "placements/0/expanded_shape": [[2, 4], 3, [2, 4, -8], [2, 4, 8.0], [2, 4, 1 << 70]],
            "placements/1/stages": [[], [2], [1, 1], [1, 0], 1, [0]],
            "placements/2/optimizer": [0, -1, 3, 1 << 70, "2", 2.0],
            "placements/2/sizes": [
                {},
                [0, [3, 9]],
                [[0]],
                [[0, [3]]],
                [[2, [3, 9]]],
                [[0, [3, 9]]] * 2,
                [[0, [3, -9]]],
            ],
            "placements/3/open_ended": [1, "true", None],
        }.items()
        for value in values
    ),
    changed("placements/0", {"mesh": [2, 2], "split": [[]] * 17, "expanded_shape": [1] * 17}),
    changed("placements/0", {"mesh": [2, 2], "split": [[]], "expanded_shape": [1], "open_ended": True}),
    GOLDEN.replace('"a":[0,1]', '"\\ud800":[0,1]'),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_tables(text: str) -> None:
    with pytest.raises(ReshardError) as caught:
        loads(text, "shard.h5")
    assert isinstance(caught.value, (StrategyError, LayoutError))
    assert "shard.h5" in caught.value.where
    assert len(str(caught.value)) < 1500


@given(st.text() | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        loads(text, "")

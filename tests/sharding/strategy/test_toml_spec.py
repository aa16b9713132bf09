"""The TOML spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard_mpi.errors import LayoutError, ReshardError, StrategyError
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.toml_spec import parse, place_of_rule

MESH = "mesh = { dp = 2, tp = 4 }\n"


def placement_of(rule: str, head: str = MESH) -> Placement:
    return parse(f'{head}[[parameter]]\nmatch = "*"\n{rule}', "spec.toml").rules[0][1]


LISTED = """
[mesh]
tp = 2
[[parameter]]
match = ["*.q", "*.k", "*.q"]
split = { 0 = ["tp"] }
[[parameter]]
match = ["head", "*"]
optional = true
"""


def test_a_rule_for_several_patterns(tmp_path: Path) -> None:
    made = parse(LISTED, "spec.toml")
    assert [glob for glob, _ in made.rules] == ["*.q", "*.k", "head", "*"]
    assert made.rules[0][1] == made.rules[1][1] and made.find("a.k")[0].is_cut and not made.find("head")[0].is_cut
    assert made.required_rules == {"*.q", "*.k"}
    path = tmp_path / "spec.toml"
    path.write_text(LISTED)
    assert [place_of_rule(str(path), rule).removeprefix(f"{path}, ") for rule in range(4)] == [
        *["line 4, [[parameter]] 1"] * 2,
        *["line 7, [[parameter]] 2"] * 2,
    ]


@pytest.mark.parametrize("match", ["[]", "['a', 1]", "['']", "[['a']]", "1", repr([f"a{n}" for n in range(1025)])])
def test_what_is_no_pattern_and_no_list_of_patterns(match: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(f"{MESH}[[parameter]]\nmatch = {match}\n", "spec.toml")
    assert caught.value.where.startswith("spec.toml, [[parameter]] 1")


def test_all_patterns_together_are_no_more_than_rules_may_be() -> None:
    entries = (f"[[parameter]]\nmatch = {[f'{word}{n}' for n in range(1000)]}\n" for word in ("a", "b"))
    with pytest.raises(StrategyError, match="parameter"):
        parse(f"{MESH}{''.join(entries)}", "spec.toml")


def test_a_rule_fits_tensors_of_any_further_dimensions() -> None:
    made = placement_of('split = { 1 = ["tp"] }\noptimizer = ["dp"]')
    assert Layout(made, (4, 8)).box(6) == Box((2, 4), (4, 6))
    assert Layout(made, (4, 8, 3)).box(6) == Box((2, 4, 0), (4, 6, 3))


def test_a_rule_for_all_tensors_cuts_all_but_scalars() -> None:
    made = placement_of('split = { 0 = ["dp"] }')
    assert made.whole_scalars
    assert Layout(made, ()).box(6) == Box((), ())
    assert not placement_of("").whole_scalars
    assert placement_of('optimizer = ["dp", "tp"]').whole_scalars
    (only_some,) = parse(MESH + '[[parameter]]\nmatch = "w*"\nsplit = { 0 = ["dp"] }', "").find("w")
    with pytest.raises(LayoutError):
        Layout(only_some, ())


def test_uneven_sizes() -> None:
    made = placement_of('split = { 0 = ["dp"] }\nsizes = { 0 = [3, 9] }')
    assert [Layout(made, (12, 5)).box(rank).start for rank in (0, 4)] == [(0, 0), (3, 0)]


def test_no_match_is_not_listed() -> None:
    assert parse(MESH + '[[parameter]]\nmatch = "a"', "").find("b") == ()


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("", 1),
        ("optimizer = []", 1),
        ('optimizer = ["dp", "one", "tp"]', 8),
        ('optimizer = ["dp", "tp"]', 8),
        ('optimizer = ["tp"]', 4),
        ('optimizer = ["one"]', 1),
        ('split = { 0 = ["tp"] }\noptimizer = ["dp"]', 2),
    ],
)
def test_optimizer(rule: str, pieces: int) -> None:
    assert placement_of(rule, "mesh = { dp = 2, one = 1, tp = 4 }\n").optimizer == pieces


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ('optimizer = ["dp"]', "dp, tp"),
        ('optimizer = ["tp", "dp"]', "dp, tp"),
        ('optimizer = ["tp", "tp"]', "dp, tp"),
        ('split = { 1 = ["tp"] }\noptimizer = ["tp"]', "(dp)"),
        ('split = { 1 = ["tp", "dp"] }\noptimizer = ["dp"]', "there are none"),
    ],
)
def test_optimizer_axes_that_pieces_do_not_go_round_over(rule: str, named: str) -> None:
    with pytest.raises(StrategyError, match="cannot go over these axes") as caught:
        placement_of(rule)
    assert named in caught.value.expected
    assert caught.value.where == "spec.toml, [[parameter]] 1 ('*')"


@pytest.mark.parametrize(
    "rule",
    [
        'splits = { 1 = ["tp"] }',
        "split = 1",
        'split = { 1 = "tp" }',
        'split = { 1 = ["xp"] }',
        'split = { 1 = [["tp"]] }',
        'split = { 1 = ["tp"], 2 = ["tp"] }',
        'split = { -1 = ["tp"] }',
        'split = { x = ["tp"] }',
        'split = { 64 = ["tp"] }',
        'split = { 999999999999999999999 = ["tp"] }',
        'split = { 0 = ["dp"] }\nsizes = { 0 = [3] }',
        'split = { 0 = ["dp"] }\nsizes = { 0 = [3, -9] }',
        'split = { 0 = ["dp"] }\nsizes = { 0 = [3, 9.0] }',
        'split = { 0 = ["dp"] }\nsizes = { 0 = [3, true] }',
        "sizes = { 0 = [3, 9] }",
        "sizes = { 1 = [3] }",
        'optimizer = "dp"',
        "optimizer = [0]",
        "stage = 1",
        "stage = -1",
        "stage = []",
        "stage = [0, 0]",
        "stage = true",
        "match = 'b'",
    ],
)
def test_wrong_rules(rule: str) -> None:
    with pytest.raises(ReshardError) as caught:
        placement_of(rule)
    assert isinstance(caught.value, (StrategyError, LayoutError))
    assert "spec.toml" in caught.value.where
    assert caught.value.expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mesh",
        "mesh = 3",
        MESH,
        'mesh = {}\n[[parameter]]\nmatch = "*"',
        'mesh = { dp = 0 }\n[[parameter]]\nmatch = "*"',
        'mesh = { dp = 2.0 }\n[[parameter]]\nmatch = "*"',
        "mesh = { dp = 0x" + "f" * 5000 + ' }\n[[parameter]]\nmatch = "*"',
        "mesh = { dp = " + "9" * 5000 + ' }\n[[parameter]]\nmatch = "*"',
        'mesh = { a = 16777216, b = 2 }\n[[parameter]]\nmatch = "*"',
        MESH + 'stages = 0\n[[parameter]]\nmatch = "*"',
        MESH + 'rules = 0\n[[parameter]]\nmatch = "*"',
        MESH + MESH + '[[parameter]]\nmatch = "*"',
        MESH + "[parameter]\nmatch = '*'",
        MESH + "[[parameter]]\nmatch = ''",
        MESH + "[[parameter]]\nmatch = 1",
        MESH + "[[parameter]]",
        MESH + "parameter = [1]",
        "mesh = " + "[" * 100_000,
        "# " + "x" * (1 << 20),
    ],
)
def test_wrong_specs(text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text, "spec.toml")
    assert "spec.toml" in caught.value.where
    assert len(str(caught.value)) < 1000

"""The page of the guide on maps: every example in it can be read, and the program shows it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
from support.command_line import refused, run_here

import reshard_mpi
from reshard_mpi.mapping.map_file import described_maps, parse_rules, read_rules, shipped_maps

PAGE = (Path(reshard_mpi.__file__).parent / "guide" / "maps.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2}
CONFIG_OF_ALL = CONFIG | {
    "vocab_size": 12,
    "num_hidden_layers": 2,
    "tensor_model_parallel_size": 2,
    "make_vocab_size_divisible_by": 4,
}


def examples() -> list[str]:
    """Return the indented examples of the page that are entries of a map."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.MULTILINE)
    texts = [textwrap.dedent(block) for block in blocks if "[[map]]" in block]
    return [f"[[map]]{entry}" for text in texts for entry in text.partition("[axes]")[2].split("[[map]]")[1:]] + [
        f"[[map]]{entry}" for text in texts if "[axes]" not in text for entry in text.split("[[map]]")[1:]
    ]


@pytest.mark.parametrize("text", examples())
def test_every_example_of_the_guide_is_a_map(text: str) -> None:
    parse_rules(text, "guide", CONFIG)


def test_there_are_examples_of_everything() -> None:
    text = "".join(examples())
    assert all(
        word in text
        for word in (
            "eq =",
            "copy =",
            "pads =",
            "drop =",
            "fill =",
            "side =",
            "state =",
            "count =",
            "number =",
            "caution =",
        )
    )


def test_the_example_of_the_readme_is_a_map() -> None:
    (example,) = (text for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "[[map]]" in text)
    rules = parse_rules(example, "README.md", CONFIG)
    assert rules.axes == {"g": 2, "r": 4}


@pytest.mark.slow
def test_the_program_shows_the_guide_and_its_maps(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG_OF_ALL))
    assert "help maps" in run_here("help").out
    shown = run_here("help", "maps")
    assert shown.code == 0 and shown.out.startswith("# Maps")
    for name, description in described_maps().items():
        assert description and f"{name} " in shown.out and description in shown.out
        printed, (rules, _) = (
            parse_rules(run_here("help", name).out, name, CONFIG_OF_ALL),
            read_rules(name, str(config)),
        )
        assert [rule.equation.text for rule in printed.equations] == [rule.equation.text for rule in rules.equations]
        assert printed.axes == rules.axes
        assert run_here("help", name).out.startswith(shipped_maps()[name].read_text().partition("\n")[0])
    assert "no such page" in refused("help", "nothing", code=2)


@pytest.mark.parametrize("name", described_maps())
def test_every_map_that_comes_with_the_program_can_be_read(name: str, tmp_path: Path) -> None:
    text = (Path(reshard_mpi.__file__).parent / "mapping" / "maps" / f"{name}.toml").read_text()
    axes = text.partition("[axes]")[2].partition("[[map]]")[0]
    assert set(re.findall(r"[a-z_]{4,}", re.sub("#.*", "", axes))) <= CONFIG_OF_ALL.keys()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG_OF_ALL))
    rules, _ = read_rules(name, str(config))
    assert rules.equations and not rules.usual

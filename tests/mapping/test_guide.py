"""The page of the guide on maps: every example in it can be read, and the program shows it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from support.command_line import refused, run_here

import reshard_mpi
from reshard_mpi.mapping.map_file import described_maps, read_rules, shipped_maps
from reshard_mpi.mapping.map_text import parse_rules

PAGE = (Path(reshard_mpi.__file__).parent / "guide" / "maps.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2}


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


def test_the_program_shows_the_guide_and_its_maps() -> None:
    assert "help maps" in run_here("help").out
    shown = run_here("help", "maps")
    assert shown.code == 0 and shown.out.startswith("# Maps")
    for name, description in described_maps().items():
        assert description and f"{name} " in shown.out and description in shown.out
        assert run_here("help", name).out == shipped_maps()[name].read_text()
    assert "no such page" in refused("help", "nothing", code=2)


@pytest.mark.parametrize("name", described_maps())
def test_every_map_that_comes_with_the_program_can_be_read(name: str, tmp_path: Path) -> None:
    text = (Path(reshard_mpi.__file__).parent / "mapping" / "maps" / f"{name}.toml").read_text()
    keys = set(re.findall(r"[a-z_]{4,}", " ".join(re.findall(r'^\w+ = "(.*)"$', text.partition("[[map]]")[0], re.M))))
    config = tmp_path / "config.json"
    config.write_text("{" + ", ".join(f'"{key}": 12' for key in keys) + "}")
    rules, _ = read_rules(name, str(config))
    assert rules.equations

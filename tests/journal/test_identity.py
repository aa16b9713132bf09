"""What a run is known by: other settings make another run, and a command can be made of them again."""

from __future__ import annotations

import json
import shlex

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.conversions import Conversion

from reshard_mpi.journal.run_records import RunIdentity, joined_words

words = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=4)


@given(words)
def test_values_of_a_repeated_option_can_be_told_apart(values: list[str]) -> None:
    assert shlex.split(joined_words(values)) == values


def test_globs_are_recorded_as_they_are() -> None:
    assert joined_words(["w*", "layers.[0-9].?", "*=fp16"]) == "w* layers.[0-9].? *=fp16"


def test_the_command_has_each_value_again() -> None:
    facts = {"source": "src", "include": joined_words(["a b", "c*"])}
    assert RunIdentity(facts).command("dst") == "reshard-mpi transform src dst --include 'a b' --include 'c*'"


def test_names_in_records_stay(c: Conversion) -> None:
    """A run of an earlier version goes on only if its settings have the same names and values as now."""
    given = ("--from", "ckpt", "--src-files", "4", "--select", "*", "--map", "{p*} <=> {p*}", "--forward")
    given += (
        "--accumulated",
        "mean",
        "--dtype",
        "*=fp64",
        "--include",
        "*",
        "--exclude",
        "global_step",
        "--verify",
        "--crc",
    )
    c.done("transform", "--rank", "0", *given)
    record = json.loads((c.dst / ".reshard_mpi" / "run.json").read_text())
    files = {"src_strategy", "dst_strategy", "map"}
    values = {"prefix": "checkpoint_", "to": "ckpt", "unlisted": "follow", "strict": False, "crc": True}
    values |= {"sums_in_shards": False, "target_ranks": 2, "from": "ckpt", "src_files": 4, "accumulated": "mean"}
    values |= {"direction": "forward", "dtype": "*=fp64", "include": "*", "exclude": "global_step", "select": "*"}
    others = {"source", "chosen", "digest", *files, *(f"{name}_file" for name in files)}
    assert {name: value for name, value in record.items() if name not in others} == values
    assert others <= record.keys()


def test_two_names_are_not_one_with_a_space(c: Conversion) -> None:
    for rank in range(4):
        c.rewrite(rank, {"a": np.array(1), "b c": np.array(2), "a b": np.array(3), "c": np.array(4)})
    first, second = ([f"--include={name}" for name in ("w", *names)] for names in (("a", "b c"), ("a b", "c")))
    c.done("transform", *first)
    c.done("transform", *first, "--resume")
    assert "another run" in c.refused("transform", *second, "--resume")

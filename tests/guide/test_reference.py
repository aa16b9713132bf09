"""What the guide lists is what the program has: keys, options, formats, types, exit codes, figures, tests."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest
from support.pages import GUIDE, README, ROOT, blocks

import reshard_mpi
from reshard_mpi import errors, formats
from reshard_mpi.cli import arguments
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import NEST, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import PackingOptions
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.processes import governor, host, leases, ledger_folder
from reshard_mpi.sharding import strategy_table, toml_spec
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import unsharded
from reshard_mpi.text import MIB

PAGES = [README, *sorted(GUIDE.glob("*.md"))]
# Of the command line itself, and those of other programs.
_OTHERS = {"--help", "--array", "--dependency", "--kill-on-invalid-dep", "--mpi", "--nodes", "--ntasks", "--parsable"}
_OTHERS |= {"--mem", "--nproc-per-node", "--wrap", "--cc"}
_OTHERS |= {"--array-properties", "--job-definition", "--job-name", "--job-queue", "--retry-strategy"}


def table_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of a page, without its first line."""
    section = page.partition(f"## {heading}\n")[2]
    rows = re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (action for action in arguments.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def told_on(page: str) -> set[str]:
    """Return the options that a page names, short ones in marks of code."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) | set(re.findall(r"`(-[a-z])\b", page))


@pytest.mark.parametrize(
    ("heading", "keys"), [("Keys of the file", toml_spec.SPEC_KEYS), ("Keys of a rule", toml_spec.RULE_KEYS)]
)
def test_the_page_of_the_spec_has_the_keys_that_its_reader_accepts(heading: str, keys: tuple[str, ...]) -> None:
    rows = table_of((GUIDE / "toml.md").read_text(), heading)
    assert sorted(row[0] for row in rows) == sorted(f"`{key}`" for key in keys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_spec_on_a_page_can_be_read(page: Path) -> None:
    texts = [block.text for block in blocks(page.read_text()) if block.language == "toml"]
    texts += re.findall(r"<<'END'\n(mesh = .*?)END\n", page.read_text(), re.DOTALL)
    for text in texts:
        if "[[map]]" not in text:
            toml_spec.parse(text, page.name)


def test_what_the_page_of_the_spec_says_of_ranks() -> None:
    examples = [block.text for block in blocks((GUIDE / "toml.md").read_text())]
    first = toml_spec.parse(examples[0], "")
    assert (first.world_size, first.stages) == (16, 2)
    (down,) = first.find("layers.3.down.weight")
    assert down.piece(13).slices == (0, 1) and down.piece(13).part == 1 and first.stage_of(13) == 1
    rows = toml_spec.parse(examples[1], "").find("w")[0]
    assert [rows.piece(rank).slices for rank in range(4)] == [(0,), (1,), (2,), (3,)]


def test_the_page_of_the_options_has_those_of_the_commands() -> None:
    """Each option of `transform` and `plan`, by any of its names, and of `inspect`; no other."""
    told = told_on((GUIDE / "options.md").read_text())
    known = parsers()
    actions = [*known["transform"]._actions, *known["plan"]._actions]
    untold = [
        action.option_strings for action in actions if action.option_strings and not told & {*action.option_strings}
    ]
    assert [names for names in untold if "--help" not in names] == []
    assert told <= {"--help"}.union(*(options_of(known[name]) for name in ("transform", "plan", "inspect")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_on_a_page_is_one(page: Path) -> None:
    told = {option for option in told_on(page.read_text()) if option.startswith("--")}
    known = set().union(*map(options_of, parsers().values()))
    assert told - known <= _OTHERS


def test_every_command_is_told() -> None:
    page = "\n".join(path.read_text() for path in PAGES)
    for command in parsers():
        assert f"reshard-mpi {command}" in page or f"`{command}" in page, command


@pytest.mark.parametrize("page", [README, GUIDE / "formats.md"], ids=["README", "formats"])
def test_the_table_of_formats_has_all_of_them(page: Path) -> None:
    text = page.read_text()
    rows = table_of(text if page == README else f"## \n{text}", "Formats" if page == README else "")
    names = {name: row for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row[0])}
    assert set(names) == set(formats.names())
    written = {name for name, row in names.items() if row[2] != "read" and not row[2].startswith("only read")}
    assert written == set(formats.targets())


def plain_spec(dtype: DType) -> ShardSpec:
    """Return a shard with one tensor of a type."""
    identity = ShardIdentity(0, 1, strategy_table.dumps(unsharded()))
    return ShardSpec(identity, [TensorSpec("t", dtype, (2,), Box((0,), (2,)))], {})


def packed_spec(format_name: str, dtype: DType) -> ShardSpec:
    """Return the last of the files of a whole training that has a tensor of a type.

    DeepSpeed keeps it beside the model, which is of one type; Megatron keeps there no tensors.
    """
    module = formats.packing_by_name(format_name)
    assert module is not None
    weights = dict.fromkeys(("model.w", "optimizer.state.w.exp_avg"), TensorType(BY_NAME["float32"], (2,)))
    kinds = {**weights, "t" if format_name == "deepspeed" else "model.t": TensorType(dtype, (2,))}
    groups = '[{"dict":[["lr",0.5],["params",["w"]]]}]'
    state = '{"dict":[["w",{"dict":[]}]]}'
    nest = (
        f'{{"dict":[["model",{{"dict":[]}}],["optimizer",{{"dict":[["state",{state}],["param_groups",{groups}]]}}]]}}'
    )
    packed = module.packed(kinds, {NEST: nest}, {}, PackingOptions())
    specs = [TensorSpec(part.name, kinds[part.source].dtype, part.box.shape, part.box) for part in packed.files[-1]]
    return ShardSpec(ShardIdentity(len(packed.files) - 1, len(packed.files), ""), specs, packed.strings)


def refused_types(format_name: str, *, crc: bool = False) -> set[str]:
    """Return the types of which a format refuses tensors that come from another one. crc: with a checksum."""
    refused = set(formats.info(format_name).types_own_loader_refuses)
    for name, dtype in BY_NAME.items():
        try:
            spec = packed_spec(format_name, dtype) if formats.info(format_name).packs else plain_spec(dtype)
            formats.by_name(format_name).size_at_most_bytes(spec, crc=crc)
        except errors.TargetError:
            refused.add(name)
    return refused


def types_in(cell: str) -> set[str]:
    return {word for word in re.findall(r"\w+", cell) if word in BY_NAME}


def test_what_formats_cannot_hold() -> None:
    rows = table_of((GUIDE / "formats.md").read_text(), "What each can hold")
    assert {row[0] for row in rows} == {f"`{name}`" for name in formats.targets()}
    for name, types, texts, crc in rows:
        traits = formats.info(name.strip("`"))
        refused = refused_types(name.strip("`"))
        assert types_in(types) == refused
        assert (texts == "kept") is traits.keeps_strings
        assert crc.startswith("yes") is traits.has_crc
        if traits.has_crc:
            assert types_in(crc) == refused_types(name.strip("`"), crc=True) - refused


def test_the_exit_codes() -> None:
    rows = table_of(f"## \n{(GUIDE / 'problems.md').read_text()}", "")
    told = {int(code) for row in rows for code in row[0].split(",")}
    classes = [getattr(errors, name) for name in reshard_mpi.__all__ if name.endswith("Error")]
    assert told == {0, 1, 130, 143} | {kind.exit_code for kind in classes}


def test_the_ten_likeliest_messages_are_there() -> None:
    page = (GUIDE / "problems.md").read_text()
    assert re.findall(r"^\*\*(\d+)\. ", page, re.MULTILINE) == [str(number) for number in range(1, 11)]
    refusing = [block for block in blocks(page) if block.mark.startswith("exit ")]
    shown = [
        block for block in blocks(page) if block.text.startswith(("reshard-mpi: error:", "...reshard-mpi: error:"))
    ]
    assert len(refusing) == len(shown) == 10


def test_variables_of_the_environment() -> None:
    told = set(re.findall(r"RESHARD_MPI_[A-Z_]+", "\n".join(path.read_text() for path in PAGES)))
    assert told == {host.HOST_VARIABLE, governor.MEMORY_VARIABLE, ledger_folder.STATE_VARIABLE}


def test_what_the_page_on_memory_says_of_the_first_lease() -> None:
    assert f"{leases.BASE_BYTES // MIB} MiB at first" in (GUIDE / "memory.md").read_text()


def test_the_names_for_authors_of_formats_are_where_the_page_says() -> None:
    page = (GUIDE / "adding_a_format.md").read_text()
    rows = [(row[0].strip("`"), row[1]) for row in table_of(page, "Where the names are")]
    of_structure = " ".join(
        re.findall(r"^\| (`.*?) \|", page.partition("| of `structure`")[2].partition("\n\n")[0], re.MULTILINE)
    )
    for module, names in rows:
        told = re.findall(r"`(\w+)", of_structure if module.endswith(".structure") else names)
        assert told and [name for name in told if not hasattr(import_module(module), name)] == []


def test_every_fact_of_a_format_is_told() -> None:
    facts = {
        name
        for row in table_of((GUIDE / "format_facts.md").read_text(), "All facts")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    assert facts == set(FormatInfo._fields)


def test_every_test_that_holds_a_promise_exists() -> None:
    paths = re.findall(r"`(tests/[^`]+)`", (GUIDE / "promises.md").read_text())
    assert len(paths) > 30
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = table_of(README.read_text(), "Why not with what your framework has")
    for row in rows:
        ours, others = (re.findall(r"([\d.]+) (s|MiB)", cell) for cell in row[1:3])
        lines = [line for line in results.splitlines() if line.startswith("|")]
        assert any(all(f"{number}" in line for number, _ in ours + others) for line in lines), row


def test_the_package_lists_its_functions() -> None:
    functions = [name for name in reshard_mpi.__all__ if not name.endswith("Error")]
    assert [name for name in functions if name not in (reshard_mpi.__doc__ or "")] == []

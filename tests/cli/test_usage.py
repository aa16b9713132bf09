"""Wrong usage is answered in two lines: what is wrong and what was meant, and where to look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.checkpoints import flip_bits
from support.command_line import done, refused, run_apart, run_here
from support.conversions import assert_right, make
from support.examples import few
from support.full_checkpoints import floats, source_of

import reshard_mpi
from reshard_mpi.cli.arguments import parser


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["transfrom", "a", "b"], "no such command: 'transfrom'; did you mean 'transform'?"),
        (["frobnicate"], "no such command: 'frobnicate'"),
        (["--verson"], "no such option: --verson; did you mean '--version'?"),
        (["--verson", "transform"], "no such option: --verson; did you mean '--version'?"),
        (["transform", "a", "b", "--resum"], "no such option: --resum; did you mean '--resume'?"),
        (["transform", "--resum"], "no such option: --resum; did you mean '--resume'?"),
        (["transform", "a", "b", "--resume=yes"], "argument --resume: ignored explicit argument 'yes'"),
        (
            ["transform", "a", "b", "--dst-stratgy", "f"],
            "no such option: --dst-stratgy; did you mean '--dst-strategy'?",
        ),
        (["transform", "a", "b", "--dst-stratgy=f"], "no such option: --dst-stratgy; did you mean '--dst-strategy'?"),
        (["transform", "a", "b", "-x"], "no such option: -x"),
        (["transform", "a", "b", "c", "d"], "too many arguments: 'c', 'd'"),
        (["transform", "a", "b", "--", "--resume"], "too many arguments: '--resume'"),
        (["diff", "a\x1b[31m", "b", "c"], "too many arguments: 'c'"),
        (["transform", "a", "b", "--to=hdf"], "got 'hdf'; did you mean 'hdf5'?"),
        (["transform", "a", "b", "--from", "safetensor"], "got 'safetensor'; did you mean 'safetensors'?"),
        (["transform", "a", "b", "--unlisted", "Drop"], "expected follow, replicate or drop, got 'Drop'; did you mean"),
        (["transform", "a", "b", "--to=pt"], "got 'pt'; did you mean 'torch'?"),
        (["transform", "a", "b", "--to", "HuggingFace"], "got 'HuggingFace'; did you mean 'hf'?"),
        (["transform", "a", "b", "--from", ".distcp"], "got '.distcp'; did you mean 'dcp'?"),
        (
            ["transform", "a", "b", "--strip-prefix", "model."],
            "no such option: --strip-prefix; did you mean --map 'PREFIX{p*} <=> {p*}'?",
        ),
        (["plan", "a", "b", "--rename=a:b"], "no such option: --rename; did you mean --map 'OLD <=> NEW'?"),
        (["ranks", "0", "--rename=a:b"], "no such option: --rename"),
        (["transform", "a", "b", "--to", "hf", "--to", "dcp"], "argument --to: given twice, with 'hf' and with 'dcp'"),
        (["diff", "a", "b", "--from=hf", "--from", "dcp"], "argument --from: given twice, with 'hf' and with 'dcp'"),
        (["plan", "a", "b", "--config", "x", "--config", "y"], "argument --config: given twice, with 'x' and with 'y'"),
        (["verify", "a", "b", "--like", "x", "--like", "y"], "argument --like: given twice"),
        (["ranks", "0", "--src-strategy", "x", "--src-strategy", "y"], "argument --src-strategy: given twice"),
        (["plan", "a", "b", "--dst-strategy", "x", "--dst-strategy", "y"], "argument --dst-strategy: given twice"),
        (["plan", "a", "b", "--part", "0/2", "--part", "1/2"], "argument --part: given twice"),
        (
            ["transform", "a", "gs://bucket/x"],
            "argument DST: expected a path, or s3://BUCKET/PREFIX, got the URL 'gs://bucket/x'",
        ),
        (["inspect", "file:///a"], "argument PATH: expected a path, or s3://BUCKET/PREFIX, got the URL 'file:///a'"),
        (
            ["transform", "a", "b", "--map", "https://a/b.toml"],
            "argument --map: expected a path, or s3://BUCKET/PREFIX, got the URL",
        ),
        (["transform", "a", "b", "--map", ""], "argument --map: expected a path, a name or an equation, got ''"),
        (["verify", "a", "--replicas", "check"], "argument --replicas: expected any or sample, got 'check'"),
    ],
)
def test_what_was_meant(arguments: list[str], says: str) -> None:
    finished = run_here(*arguments)
    first, second = finished.err.splitlines()
    assert finished.code == 2 and finished.out == "" and says in first, finished
    command = " ".join(["reshard-mpi", *arguments[:1]]) if "argument" in first or "transform:" in first else ""
    assert first.startswith(f"{command or 'reshard-mpi'}") and ": error: " in first
    assert second == f"  what to do: {first.partition(':')[0]} --help"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["inspect", "a", "--json", "b"], ("a", ["b"])),
        (["inspect", "--json", "a", "--rank", "0", "b", "c"], ("a", ["b", "c"])),
        (["inspect", "a", "--rank", "0"], ("a", [])),
        (["verify", "a", "--select", "x", "b", "-q"], ("a", "b")),
        (["verify", "a", "--select", "x"], ("a", None)),
        (["verify", "--select", "x", "a", "b"], ("a", "b")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_may_be_left_out_may_stand_behind_options(arguments: list[str], given: tuple[str, object]) -> None:
    options = parser().parse_args(arguments)
    assert (options.source, getattr(options, "others" if arguments[0] == "inspect" else "target")) == given


def test_the_same_twice_and_what_only_says_how_it_goes_may_be_given_again() -> None:
    asked = ("transform", "a", "b", "--to", "hf", "--to=hf", "--like", "c", "--like", "c")
    options = parser().parse_args([*asked, "--jobs", "1", "--jobs", "2", "--memory", "1G", "--memory", "2G"])
    assert (options.to, options.like, options.jobs, options.memory) == ("hf", "c", 2, "2G")


def test_a_folder_whose_name_is_like_a_url_is_named_from_here(tmp_path: Path) -> None:
    with pytest.raises(reshard_mpi.ReshardError, match="target is a URL"):
        reshard_mpi.transform("src", "gs://bucket/x")
    with pytest.raises(reshard_mpi.ReshardError, match="source is a URL"):
        reshard_mpi.load_rank(0, "gs://bucket/x")
    source = source_of(tmp_path, {"w": floats(2)})
    done("transform", source, f"{tmp_path}/s3://bucket")


@pytest.mark.parametrize(("word", "page"), [("hf", "formats"), ("FSDP", "strategies"), ("safetensors", "formats")])
def test_a_page_that_tells_of_a_word(word: str, page: str) -> None:
    assert f"no such page; {page!r} tells of it" in refused("help", word, code=2)
    assert "tells of it" not in run_here("help", "qwertyuiop").err


def test_a_target_that_is_called_like_a_file_is_said_to_be_a_folder(tmp_path: Path) -> None:
    source, path = source_of(tmp_path, {"w": floats(2)}), tmp_path / "one.pt"
    finished = run_here("transform", source, f"{path}/", "--to", "torch")
    assert f"{path} is a folder, in which the targets are written: {path}/rank_0/checkpoint_0.pt" in finished.err
    assert (path / "rank_0" / "checkpoint_0.pt").is_file()
    assert "is a folder" not in run_here("plan", source, tmp_path / "dst", "--to", "torch").err


def test_a_topic_and_a_map_that_were_meant(tmp_path: Path) -> None:
    assert "no such page; did you mean 'maps'?" in refused("help", "map", code=2)
    assert "did you mean 'hf-llama-megatron'?" in make(tmp_path).refused("plan", "--map", "hf-lama-megatron")


def test_names_that_nobody_should_see_raw() -> None:
    said = refused("trans\x1b[31mform\n", code=2)
    assert "\x1b" not in said and said.count("\n") == 2


def test_a_rank_that_the_launcher_does_not_end_speaks_too() -> None:
    """It may be the only one that is refused; where rank 0 is as well, the launcher has ended it before."""
    launched = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    finished = run_apart("transform", "--resum", env=launched)
    assert finished.code == 2 and finished.err.count("no such option: --resum") == 1, finished


@pytest.mark.parametrize(
    ("text", "ranks"), [("3", [3]), ("0-3,8", [0, 1, 2, 3, 8]), ("5-5", [5]), ("2,0-2", [2, 0, 1, 2]), ("007", [7])]
)
@pytest.mark.parametrize("command", ["transform", "plan", "verify", "inspect"])
def test_lists_of_ranks(command: str, text: str, ranks: list[int]) -> None:
    assert parser().parse_args([command, "a", "b", "--rank", text]).rank == ranks
    assert parser().parse_args([command, "a", "b", f"--rank={text}", "--rank", "9"]).rank == [*ranks, 9]


@pytest.mark.slow
def test_some_ranks_are_made_and_verified(tmp_path: Path) -> None:
    c = make(tmp_path, "hdf5")
    c.done("transform", "--rank", "0-1,1", "--verify", "--jobs", "1")
    assert_right(c, (0, 1))
    strategies = ["--src-strategy", str(c.src_strategy), "--dst-strategy", str(c.dst_strategy)]
    pair = ["verify", str(c.src), str(c.dst), *strategies, "--jobs", "1"]
    damaged = next((c.dst / "rank_1").glob("*.h5"))
    flip_bits(damaged, next(iter(reshard_mpi.inspect(damaged)["tensors"].values()))["ranges"][0][0])
    for arguments in (pair, ["verify", str(c.dst), "--jobs", "1"]):
        assert "target rank 1: 'b'" in refused(*arguments, code=4)
        assert "verified 1 shard," in done(*arguments, "--rank", "0").out
        assert "target rank 1: 'b'" in refused(*arguments, "--rank", "0-1", code=4)
        finished = run_here(*arguments, "--rank", "1-2")
        assert finished.code in (2, 3) and "rank" in finished.err, finished
    reshard_mpi.verify(c.dst, rank=[0])
    reshard_mpi.verify(c.src, c.dst, c.src_strategy, c.dst_strategy, rank=range(1))
    for ranks in ([1], None):
        with pytest.raises(reshard_mpi.DamageError):
            reshard_mpi.verify(c.dst, rank=ranks)
    with pytest.raises(reshard_mpi.SourceError, match="no shard of this rank"):
        reshard_mpi.verify(c.dst, rank=[-1])
    with pytest.raises(reshard_mpi.UsageError, match="rank names no rank"):
        reshard_mpi.verify(c.dst, rank=[])


@pytest.mark.parametrize("columns", few(1, ["60", "200", "0", "none"]))
def test_the_parser_of_one_command_is_that_of_all(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    (every,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    for command, full in every.items():
        (alone,) = (action.choices for action in parser([command, "a"])._actions if isinstance(action.choices, dict))
        assert list(alone) == [command] and alone[command].format_help() == full.format_help()
        width = max(map(len, full.format_help().splitlines()))
        assert width <= (max(int(columns), 80) if columns.isdecimal() else 80)
    assert "--version" in parser(["--version", "plan"]).format_help()

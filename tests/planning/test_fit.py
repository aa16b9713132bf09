"""A strategy is held against the checkpoint: what the shards contradict is refused before anything is written."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from support.checkpoints import as_read, read_shard, write_ranks, write_shard
from support.command_line import CommandLine, done, run_apart, run_here
from support.conversions import listing
from support.examples import few, few_cases, many, one_at_a_time
from support.launch import MPI, by_one_mpi
from support.wrong_specs import Rule, Slip, Spec, contradictions, outcome, slips

import reshard_mpi
from reshard_mpi.checkpoints import compare_samples
from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.engine.open_files import Files
from reshard_mpi.engine.read import excerpt
from reshard_mpi.errors import DisagreementError, StrategyError
from reshard_mpi.formats.locations import ByteRange, LibraryRead
from reshard_mpi.formats.tensor_table import TensorEntry
from reshard_mpi.planning.comparison_choice import MAX_PAIRS, PLACE_ELEMENTS, places, rank_pairs
from reshard_mpi.planning.strategy_check import SampleFindings
from reshard_mpi.runs.planner import Planner
from reshard_mpi.sharding import strategy_files
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy, unsharded

MESH = {"dp": 2, "tp": 4}
COLUMNS, ROWS, WHOLE = {1: ("tp",)}, {0: ("tp",)}, {}
RIGHT = Spec(
    MESH,
    (
        Rule("layers.*.qkv", ROWS),
        Rule("layers.*.out", COLUMNS),
        Rule("embedding", ROWS, optimizer=("dp",)),
        Rule("*", WHOLE),
    ),
)
TARGET = Spec({"n": 2}, (Rule("layers.*", {0: ("n",)}), Rule("*", {})))


def tensors(layers: int = 3) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (32, 8), "norm": (16,), "head": (8, 8)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.qkv": (16, 8), f"layers.{layer}.out": (8, 16)}
    return {name: noise.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


class Checkpoint(CommandLine):
    """Shards by a right spec, in a folder, and runs by another one."""

    def __init__(self, folder: Path, spec: Spec = RIGHT, whole: Mapping[str, np.ndarray] | None = None) -> None:
        self.folder, self.src, self.dst = folder, folder / "src", folder / "dst"
        self.tensors = dict(tensors() if whole is None else whole)
        self.shards = spec.shards(self.tensors)
        write_ranks(self.shards, self.src)

    def shard(self, rank: int) -> Path:
        return self.src / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"

    def rewrite(self, rank: int, changes: Mapping[str, np.ndarray]) -> None:
        self.shards[rank] |= changes
        write_shard(self.shards[rank], self.shard(rank))

    def arguments(
        self, spec: Spec = RIGHT, *options: str, command: str = "transform", target: Spec = TARGET
    ) -> list[str]:
        for name, side in (("src.toml", spec), ("dst.toml", target)):
            (self.folder / name).write_text(side.text())
        strategies = ["--src-strategy", str(self.folder / "src.toml"), "--dst-strategy", str(self.folder / "dst.toml")]
        jobs = ["--jobs", "1"] if command in ("transform", "verify") and "--jobs" not in options else []
        return [command, str(self.src), str(self.dst), *strategies, *options, *jobs]

    def assert_right(self, target: Spec = TARGET) -> None:
        for rank, arrays in target.shards(self.tensors).items():
            assert read_shard(self.dst / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") == as_read(arrays)


def but(spec: Spec, number: int, **changes: object) -> Spec:
    """Return a spec with one rule changed."""
    rule = Rule(**{**{name: getattr(spec.rules[number], name) for name in Rule.__slots__}, **changes})  # type: ignore[arg-type]
    return Spec(spec.mesh, (*spec.rules[:number], rule, *spec.rules[number + 1 :]), spec.stages)


WRONG = {
    "a letter too few": (but(RIGHT, 0, match="layers.*.qk"), "'layers.*.qk'", "optional = true"),
    "replicated, but cut": (but(RIGHT, 0, split={}), "the same of .*'layers.0.qkv'", "other values"),
    "caught by the rule for all": (Spec(MESH, RIGHT.rules[1:]), "'layers.0.qkv'", "other values"),
    "some layers of a parameter": (but(RIGHT, 0, match="layers.[01].qkv"), "'layers.2.qkv'", "other values"),
    "mesh swapped": (Spec({"tp": 4, "dp": 2}, RIGHT.rules), "mesh tp=4 dp=2", "other values"),
    "another mesh": (Spec({"dp": 4, "tp": 2}, RIGHT.rules), "mesh dp=4 tp=2", "other values"),
    "too few ways": (but(RIGHT, 2, optimizer=()), "'embedding'", "other values"),
    "too many ways": (but(RIGHT, 1, split={1: ("dp", "tp")}), "different parts of .*'layers.0.out'", "the same values"),
    "too many ways by the optimizer": (but(RIGHT, 0, optimizer=("dp",)), "different parts", "the same values"),
    "unlisted": (Spec(MESH, RIGHT.rules[1:3]), "does not list", "'layers.0.qkv'"),
}


@few_cases(4, ("way", "what"), one_at_a_time(["transform", "plan", "part", "function", "verify", "jobs"], WRONG))
def test_a_wrong_strategy_is_refused_and_named(tmp_path: Path, what: str, way: str) -> None:
    c = Checkpoint(tmp_path)
    spec, *patterns = WRONG[what]
    if way == "verify":
        c.done()
    before = listing(c.dst)
    if way == "function":
        _, source, target, _, src, _, dst, *_ = c.arguments(spec)
        with pytest.raises(StrategyError) as caught:
            reshard_mpi.transform_checkpoints(source, target, "checkpoint_", src, dst)
        text = str(caught.value)
    else:
        options = {"jobs": ["--jobs", "3"], "part": ["--part", "1/2"]}.get(way, [])
        command = way if way in ("plan", "verify") else "transform"
        finished = c.run(spec, *options, command=command)
        assert finished.code == 3 and finished.out == "", finished
        text = finished.err
    for pattern in (*patterns, r"src\.toml"):
        assert re.search(pattern, text), text
    assert listing(c.dst) == before


def test_a_layer_that_is_not_cut_as_the_others_are(tmp_path: Path) -> None:
    """Other layers of the same parameter fit the rule: the one that every rank has whole would come out twice."""
    whole = {name: array for name, array in tensors().items() if name.endswith("qkv") or name == "norm"}
    truth = Spec(MESH, (Rule("layers.1.qkv", WHOLE), *RIGHT.rules[:1], RIGHT.rules[-1]))
    c = Checkpoint(tmp_path, truth, whole)
    assert "different parts of 'layers.1.qkv' on ranks" in c.refused(Spec(MESH, truth.rules[1:]))
    assert not c.dst.exists()
    c.done(truth)
    c.assert_right()


def test_partial_sums_that_are_not_cut(tmp_path: Path) -> None:
    """Copies of them may differ from rank to rank, but parts of them are not the same."""
    sums = {f"accu_grads.{name}": array + 1 for name, array in tensors(1).items() if name.startswith("layers")}
    truth = Spec(MESH, (Rule("accu_grads.*", WHOLE), *RIGHT.rules))
    c = Checkpoint(tmp_path, truth, {**tensors(1), **sums})
    said = c.refused(Spec(MESH, (Rule("accu_grads.*", ROWS), *RIGHT.rules)))
    assert "different parts of 2 compared tensors ('accu_grads.layers.0." in said
    c.done(truth)
    c.assert_right(
        Spec({"n": 2}, (Rule("layers.*", {0: ("n",)}), Rule("accu_grads.layers.*", {0: ("n",)}), Rule("*", {})))
    )


@by_one_mpi
def test_by_all_ranks(tmp_path: Path, mpi: MPI) -> None:
    c = Checkpoint(tmp_path)
    finished = run_apart(*c.arguments(WRONG["mesh swapped"][0]), mpi=mpi, ranks=3)
    assert finished.code == 3 and finished.err.count("does not fit the checkpoint") == 1, finished
    assert not c.dst.exists()


def test_the_right_one(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    assert c.done(RIGHT, "--strict").warnings == []
    c.assert_right()


def test_any_trusts_a_strategy(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    c.done(WRONG["replicated, but cut"][0], "--replicas", "any")
    taken = read_shard(c.dst / "rank_0" / "checkpoint_0.ckpt")["layers.0.qkv"]
    assert taken[1] == (2, 8)  # half of what one rank has, as the strategy says


def test_what_the_checkpoint_cannot_show_is_told(tmp_path: Path) -> None:
    """Where every rank holds another part, two orders of axes are as good as each other."""
    cut = Rule("layers.*", {0: ("dp",), 1: ("tp",)})
    c = Checkpoint(tmp_path, Spec(MESH, (cut, Rule("*", WHOLE))))
    for command in ("plan", "transform"):
        finished = c.done(Spec(MESH, (cut, Rule("*", WHOLE))), command=command)
        assert finished.err.count("cannot show whether") == 1
        assert "note: no two ranks hold the same of what 'layers.*' matches" in finished.err
    spec = Spec(MESH, (*RIGHT.rules[:2], RIGHT.rules[3]))
    assert "cannot show" not in Checkpoint(tmp_path / "right", spec).done(spec, command="plan").err


def test_a_rule_for_all_is_told_as_any_other(tmp_path: Path) -> None:
    """Who shards everything alike writes no more than this, and may take the wrong dimension."""
    spec = Spec(MESH, (Rule("*", {0: ("dp", "tp")}),))
    c = Checkpoint(tmp_path, spec)
    for command in ("plan", "transform"):
        finished = c.done(spec, command=command)
        assert "note: no two ranks hold the same of what '*' matches" in finished.err, finished
        assert ("note: by rule '*', " in finished.err) == (command == "plan")


def test_what_copies_cannot_show_is_told(tmp_path: Path) -> None:
    """Two axes that cut a tensor may be exchanged: the same ranks hold the same."""
    mesh = {"dp": 2, "ep": 2, "tp": 2}
    truth, exchanged = (
        Spec(mesh, (Rule("layers.*", {0: (rows,), 1: (columns,)}), Rule("*", WHOLE)))
        for rows, columns in (("ep", "tp"), ("tp", "ep"))
    )
    c = Checkpoint(tmp_path, truth)
    for spec in (truth, exchanged):
        finished = c.done(spec, command="plan")
        assert finished.err.replace("note: by rule", "").count("note: ") == 1, finished
        assert "'layers.*' is cut over several axes, and the checkpoint cannot show which of them cuts" in finished.err


# Rules


def test_a_rule_that_may_match_nothing(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    extra = Rule("adam_m.*", ROWS)
    spec = Spec(MESH, (extra, *RIGHT.rules))
    said = c.refused(spec)
    assert "a rule of the source strategy places no tensor" in said
    assert "'adam_m.*', beside 9 tensors: " in said and not c.dst.exists()
    arguments = c.arguments(spec)
    text = (tmp_path / "src.toml").read_text()
    (tmp_path / "src.toml").write_text(text.replace('match = "adam_m.*"', 'match = "adam_m.*"\noptional = true'))
    done(*arguments)
    c.assert_right()


def test_a_rule_for_what_one_of_many_ranks_has_saved(tmp_path: Path) -> None:
    """Shards without redundancy: the names are known from all of them, so no rule is refused for what most lack."""
    ranks = 70
    spec = Spec({"dp": ranks}, (Rule("late", {}), Rule("*", {})))
    c = Checkpoint(tmp_path, spec, {name: np.arange(8, dtype=np.float32) for name in ("w", "late", "last")})
    for rank in range(ranks):
        kept = {"w", *(["late"] if rank == ranks - 2 else []), *(["last"] if rank == ranks - 1 else [])}
        c.shards[rank] = {name: array for name, array in c.shards[rank].items() if name in kept}
        c.rewrite(rank, {})
    target = Spec({"n": 1}, (Rule("*", {}),))
    c.done(spec, target=target)
    c.assert_right(target)


def test_a_rule_of_the_target(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    target = Spec({"n": 2}, (Rule("layer.*", {0: ("n",)}), Rule("*", {})))
    said = c.refused(target=target)
    assert "a rule of the target strategy places no tensor" in said
    assert "dst.toml" in said and "'layer.*', beside 9 tensors: 'layers." in said


def test_a_rule_behind_another(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    said = c.refused(Spec(MESH, (RIGHT.rules[-1], *RIGHT.rules[:-1])))
    assert "'layers.*.qkv' (and 2 more), whose tensors '*' before it takes" in said
    assert "what to do: put it before '*'" in said


def test_a_rule_that_is_there_twice(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    said = c.refused(Spec(MESH, (RIGHT.rules[0], *RIGHT.rules)))
    assert "got: 'layers.*.qkv' twice" in said
    assert "what to do: remove one of the two rules" in said


def test_optional_is_true_or_false(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('mesh = { n = 2 }\n[[parameter]]\nmatch = "w"\noptional = "yes"\n')
    with pytest.raises(StrategyError, match="optional has the wrong type"):
        reshard_mpi.rank_list_for_transform(0, tmp_path / "s.toml", None)


@pytest.mark.parametrize("rule", few(1, ["head", "h*", "*"]))
@pytest.mark.parametrize("holder", few(1, [0, 3]))
def test_shards_that_each_hold_what_others_lack(tmp_path: Path, rule: str, holder: int) -> None:
    """Saved without redundancy: `head` is on one of the ranks that should have it, `norm` on another."""
    spec = Spec({"dp": 4}, (Rule("*", {}),) if rule == "*" else (Rule(rule, {}), Rule("*", {})))
    c = Checkpoint(tmp_path, spec)
    for rank in range(4):
        for name, at in (("head", holder), ("norm", 3 - holder // 2)):
            if rank != at:
                c.shards[rank].pop(name)
        c.rewrite(rank, {})
    for options in ([], ["--rank", "0"], ["--rank", "1", "--resume"]):
        c.done(spec, *options)
        if options != ["--rank", "0"]:
            c.assert_right()
        if options != ["--rank", "1", "--resume"]:
            shutil.rmtree(c.dst)
            if options:
                c.done(spec, *options)
    loaded = reshard_mpi.load_rank(1, c.src, tmp_path / "src.toml", tmp_path / "dst.toml")
    assert set(loaded) == set(c.tensors)


def test_a_tensor_that_neither_the_first_nor_the_last_shard_holds(tmp_path: Path) -> None:
    spec = Spec({"dp": 4}, (Rule("*", {}),))
    c = Checkpoint(tmp_path, spec)
    for rank in (0, 1, 3):
        c.shards[rank].pop("head")
        c.rewrite(rank, {})
    for options in ([], ["--rank", "0"], ["--rank", "1"]):
        assert "head" in c.refused(spec, *options)
    arguments = c.arguments(spec, "--rank", "0")
    assert "add a rule for this name alone to the source strategy: match = 'head'" in run_here(*arguments).err
    named = Spec({"dp": 4}, (Rule("head", {}), Rule("*", {})))
    c.done(named)
    c.assert_right()


def test_a_task_that_sees_one_stage_only(tmp_path: Path) -> None:
    """It cannot know whether a rule is for the stages that it was not given."""
    spec = Spec({"tp": 2}, (Rule("a", {0: ("tp",)}, stages=(0,)), Rule("b", {0: ("tp",)}, stages=(1,))), stages=2)
    target = Spec({"n": 1}, spec.rules, stages=2)
    target = Spec({"n": 1}, (Rule("a", {}, stages=(0,)), Rule("b", {}, stages=(1,))), stages=2)
    whole = {name: np.arange(8, dtype=np.float32) + ord(name) for name in "ab"}
    c = Checkpoint(tmp_path, spec, whole)
    c.arguments(spec, target=target)
    files = {rank: c.shard(rank) for rank in (0, 1)}
    out = tmp_path / "out" / "rank_0" / "x_0.ckpt"
    reshard_mpi.transform_checkpoint_by_rank(0, files, out, tmp_path / "src.toml", tmp_path / "dst.toml")
    assert read_shard(out) == as_read({"a": whole["a"]})


def test_another_network(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    net = Spec(MESH, tuple(Rule(f"net.{rule.match}", rule.split) for rule in RIGHT.rules))
    assert "places no tensor of the checkpoint" in c.refused(net)


@pytest.mark.parametrize("ranks", few(1, [1, 2]))
@pytest.mark.parametrize("same", few(1, [True, False]))
@pytest.mark.parametrize("shape", [(8,), ()])
def test_a_tensor_that_other_stages_have_too(tmp_path: Path, shape: tuple[int, ...], same: bool, ranks: int) -> None:
    spec = Spec({"dp": ranks}, (Rule("a", {}, stages=(0,)), Rule("b", {}, stages=(1,))), stages=2)
    whole = {name: np.full(shape, ord(name), np.float32) for name in "ab"}
    c = Checkpoint(tmp_path, spec, whole)
    for rank in range(ranks, 2 * ranks):
        c.rewrite(rank, {"a": np.full(shape, ord("a") + (not same), np.float32)})
    target = Spec({"n": 2}, (Rule("*", {}),))
    finished = c.run(spec, target=target)
    assert finished.code == (0 if same else 3), finished
    if same:
        c.assert_right(target)
    else:
        assert "other stages hold another 'a' too" in finished.err and str(c.shard(ranks)) in finished.err


def staged(stages: int, layers: int) -> tuple[Spec, Spec, dict[str, np.ndarray]]:
    """Return a spec whose rules say nothing of stages, one that does, and tensors: layers in turn, both ends."""
    noise = np.random.default_rng(3)
    whole = {f"layers.{number}.w": noise.standard_normal((8, 4), dtype=np.float32) for number in range(layers)}
    whole |= {f"layers.{number}.bn.moving_mean": np.ones(4, "f4") for number in range(layers)}
    whole |= {
        "embedding": noise.standard_normal((8, 4), dtype=np.float32),
        "head": noise.standard_normal((4, 4), dtype=np.float32),
    }
    cut = {0: ("tp",)}
    unstaged = Spec({"dp": 2, "tp": 2}, (Rule("layers.*.w", cut), Rule("embedding", cut), Rule("*", {})), stages)
    ends = (Rule("embedding", cut, stages=(0,)), Rule("head", {}, stages=(stages - 1,)))
    homes = [(f"layers.{number}.", (number * stages // layers,)) for number in range(layers)]
    rules = [
        Rule(f"{name}{kind}", split, stages=home) for name, home in homes for kind, split in (("w", cut), ("bn*", {}))
    ]
    return unstaged, Spec(unstaged.mesh, (*rules, *ends), stages), whole


@pytest.mark.parametrize(("stages", "layers"), few(1, [(2, 4), (32, 32)]))
def test_rules_that_say_nothing_of_stages(tmp_path: Path, stages: int, layers: int) -> None:
    """Each tensor lies in one stage, which the spec leaves open; batch statistics have drifted there."""
    unstaged, right, whole = staged(stages, layers)
    c = Checkpoint(tmp_path, right, whole)
    for rank, arrays in c.shards.items():
        c.rewrite(rank, {name: array + rank for name, array in arrays.items() if name.endswith("moving_mean")})
    target = Spec({"n": 2}, (Rule("layers.*.w", {0: ("n",)}), Rule("*", {})))
    arguments = c.arguments(unstaged, target=target)
    done(*arguments)
    for name in [name for name in whole if name.endswith("moving_mean")]:
        c.tensors[name] = c.tensors[name] + next(rank for rank, arrays in c.shards.items() if name in arrays)
    held = read_shard(c.dst / "rank_0" / "checkpoint_0.ckpt")
    assert held.keys() == whole.keys()
    exact = {name for name in whole if not name.endswith("moving_mean")}
    for rank, arrays in target.shards(c.tensors).items():
        written = read_shard(c.dst / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        assert {name: written[name] for name in exact} == as_read({name: arrays[name] for name in exact})
    # By rank, from the shards that the rank list names and no others.
    for rank in range(2):
        needed = reshard_mpi.rank_list_for_transform(rank, tmp_path / "src.toml", tmp_path / "dst.toml")
        out = tmp_path / "alone" / f"rank_{rank}" / f"x_{rank}.ckpt"
        files = {source: c.shard(source) for source in needed}
        reshard_mpi.transform_checkpoint_by_rank(rank, files, out, tmp_path / "src.toml", tmp_path / "dst.toml")
        alone = read_shard(out)
        assert {name: alone[name] for name in exact} == as_read({n: target.shards(c.tensors)[rank][n] for n in exact})


@pytest.mark.parametrize("gone", [0, 1])
def test_a_stage_without_any_shard_under_rules(tmp_path: Path, gone: int) -> None:
    """What it held is unknown, as the rules do not name it."""
    unstaged, right, whole = staged(2, 4)
    c = Checkpoint(tmp_path, right, whole)
    for rank in range(4 * gone, 4 * gone + 4):
        shutil.rmtree(c.shard(rank).parent)
    target = Spec({"n": 1}, (Rule("*", {}),))
    for command in ("plan", "transform"):
        assert f"a shard of stage {gone} of the source" in c.refused(unstaged, target=target, command=command)
    files = {rank: c.shard(rank) for rank in range(8) if rank // 4 != gone}
    with pytest.raises(reshard_mpi.CoverageError, match=f"a shard of stage {gone}"):
        reshard_mpi.load_rank(0, files, tmp_path / "src.toml", tmp_path / "dst.toml")


# Copies that have drifted apart


def drifting(c: Checkpoint, name: str, change: float) -> None:
    for rank in range(8):
        whole = c.tensors[name]
        c.rewrite(
            rank, {name: (whole + rank * change * np.sin(np.arange(whole.size).reshape(whole.shape))).astype("f4")}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), [("head", 1e-3), ("bn.moving_mean", 5.0), ("bn.running_var", 5.0)])
def test_a_few_copies_that_have_drifted(tmp_path: Path, name: str, change: float) -> None:
    c = Checkpoint(
        tmp_path, whole={**tensors(), "bn.moving_mean": np.ones(8, "f4"), "bn.running_var": np.ones(8, "f4")}
    )
    drifting(c, name, change)
    for options in ([], ["--jobs", "3"]):
        finished = c.done(RIGHT, "--overwrite", *options)
        (told,) = finished.warnings
        assert told.startswith(f"copies of '{name}' differ from rank to rank")
    before = listing(c.dst)
    said = c.refused(RIGHT, "--overwrite", "--strict")
    assert f"'{name}'" in said and "have drifted apart" in said
    assert listing(c.dst) == before
    assert c.run(RIGHT, "--overwrite", "--replicas", "any").warnings == []


def test_drift_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    c = Checkpoint(tmp_path)
    drifting(c, "head", 1e-3)
    c.arguments()
    with caplog.at_level(logging.WARNING, "reshard_mpi"):
        reshard_mpi.load_rank(1, c.src, tmp_path / "src.toml", tmp_path / "dst.toml")
    assert [record.getMessage()[:24] for record in caplog.records] == ["copies of 'head' differ "]
    with pytest.raises(DisagreementError, match="have drifted apart"):
        reshard_mpi.plan(c.src, tmp_path / "src.toml", tmp_path / "dst.toml", strict=True)


def test_a_few_copies_that_have_nothing_in_common(tmp_path: Path) -> None:
    """One tensor of a rule's many that is cut in truth: it is no drift, though most of the others agree."""
    c = Checkpoint(tmp_path, whole={**tensors(), **{f"norms.{layer}": np.ones(4, "f4") for layer in range(20)}})
    noise = np.random.default_rng(1)
    for rank in range(8):
        c.rewrite(rank, {"head": noise.standard_normal((8, 8), dtype=np.float32)})
    assert "other values in 'head'" in c.refused()


def test_copies_most_of_which_have_drifted(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    for name in ("head", "norm"):
        drifting(c, name, 1e-3)
    said = c.refused()
    assert "does not fit the checkpoint" in said and "--replicas any" in said


def test_parts_that_are_the_same_by_nature(tmp_path: Path) -> None:
    """Zeros and ones tell nothing of how they are cut."""
    whole = tensors()
    moments = {f"moments.{name}": np.zeros_like(array) for name, array in whole.items() if name.startswith("layers")}
    c = Checkpoint(tmp_path, RIGHT, whole)
    for rank, arrays in c.shards.items():
        c.rewrite(
            rank, {f"moments.{name}": np.zeros_like(a) for name, a in arrays.items() if f"moments.{name}" in moments}
        )
    c.tensors |= moments
    spec = Spec(MESH, RIGHT.rules)
    c.done(spec)


EQUAL_ROWS = np.tile(np.linspace(-2, 3, 8, dtype=np.float32), (32, 1))
CUT_IN_TWO = Spec({"rank": 2}, (Rule("*", {0: ("rank",)}),))


def test_files_that_say_how_they_are_cut_are_believed(tmp_path: Path) -> None:
    """Mamba's decay rates are the same in each row, so ranks hold equal parts; its strategy is no less right."""
    whole = {"A_log": EQUAL_ROWS, "mixer": np.arange(64, dtype=np.float32).reshape(8, 8)}
    write_shard(whole, tmp_path / "model.ckpt")
    (tmp_path / "two.toml").write_text(CUT_IN_TWO.text())
    reshard_mpi.transform(tmp_path / "model.ckpt", tmp_path / "two", None, tmp_path / "two.toml", to="hdf5")
    done("transform", tmp_path / "two", tmp_path / "one", "--to", "ckpt", "--strict")
    assert read_shard(tmp_path / "one" / "rank_0" / "checkpoint_0.ckpt") == as_read(whole)


def test_a_spec_for_equal_rows_needs_to_be_taken_at_its_word(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path, CUT_IN_TWO, {"A_log": EQUAL_ROWS})
    said = c.refused(CUT_IN_TWO, target=Spec({"n": 1}, (Rule("*", {}),)))
    assert "parts that should be different are the same" in said


def test_a_shard_of_another_shape_is_no_proof_against_the_strategy(tmp_path: Path) -> None:
    spec = but(RIGHT, 2, optimizer=())  # or nobody else had what rank 5 has of the embedding
    c = Checkpoint(tmp_path, spec)
    c.rewrite(5, {"layers.0.qkv": np.zeros((3, 8), "f4")})
    said = c.refused(spec)
    assert "[3, 8]" in said and "rank_5" in said
    assert "does not fit" in said and "rank_5" in said.split("where: ")[1]


@pytest.mark.slow
def test_one_of_many_that_has_drifted_on_one_rank(tmp_path: Path) -> None:
    """Whichever rank it is: what only tells of a shard looks at few tensors, and of many ways at one of each."""
    mesh = {"a": 2, "b": 2, "c": 2}
    ways = [{}, *({dim: (axis,)} for dim in (0, 1) for axis in mesh), *({0: (a,), 1: (b,)} for a, b in ("ab", "bc"))]
    spec = Spec(mesh, tuple(Rule(f"k{number}.*", way) for number, way in enumerate(ways)))
    noise = np.random.default_rng(3)
    whole = {
        f"k{number}.{x}": noise.standard_normal((8, 8), dtype=np.float32)
        for number in range(len(ways))
        for x in "uvwxyz"
    }
    c = Checkpoint(tmp_path, spec, whole)
    drifted = whole["k0.u"] * np.float32(1.0001)
    for rank in (3, 6):
        c.rewrite(rank, {"k0.u": drifted})
        finished = c.done(spec, command="plan", target=Spec({"n": 1}, (Rule("*", {}),)))
        (told,) = finished.warnings
        assert told.startswith("copies of 'k0.u' differ from rank to rank")
        c.rewrite(rank, {"k0.u": whole["k0.u"]})


@pytest.mark.parametrize("name", few(1, ["rng_state", "Seeds1", "cuda.rng.3", "np_random", "seed"]))
def test_random_state_that_a_rule_for_all_catches(tmp_path: Path, name: str) -> None:
    c = Checkpoint(tmp_path)
    for rank in range(8):
        c.rewrite(rank, {name: np.random.default_rng(rank).integers(0, 256, 600, np.uint8)})
    finished = c.done()
    (told,) = finished.warnings
    assert told.startswith(f"copies of '{name}' differ from rank to rank")
    assert c.run(RIGHT, "--overwrite", "--strict").code == 3


@pytest.mark.parametrize("name", few(1, ["strange.weight", "grng", "randomize_weight"]))
def test_whole_numbers_of_another_name_are_no_random_state(tmp_path: Path, name: str) -> None:
    c = Checkpoint(tmp_path)
    for rank in range(8):
        c.rewrite(rank, {name: np.random.default_rng(rank).integers(0, 256, 600, np.uint8)})
    assert f"other values in '{name}'" in c.refused()


@pytest.mark.parametrize("heights", [(3, 1), (3, 1, 3, 1), (5, 4, 3)])
def test_replicated_but_cut_unevenly(tmp_path: Path, heights: tuple[int, ...]) -> None:
    """Shapes alone tell it; no shard is the odd one out, so none can be called damaged."""
    spec = Spec({"n": len(heights)}, (Rule("*", {}),))
    c = Checkpoint(tmp_path, spec, {"norm": np.arange(16, dtype=np.float32)})
    head = np.random.default_rng(4).standard_normal((5, 2), dtype=np.float32)
    for rank, height in enumerate(heights):
        c.rewrite(rank, {"head": head[:height] if height != 1 else head[3:4]})
    for command in ("plan", "transform"):
        said = c.refused(spec, command=command, target=Spec({"n": 1}, (Rule("*", {}),)))
        assert "other shapes in 'head'" in said and "src.toml" in said
    assert not c.dst.exists()


def test_a_shard_of_another_rank(tmp_path: Path) -> None:
    """Two of eight swapped: what tells it is compared even if more ways of cutting are cut over all ranks."""
    ways = [{0: ("dp", "tp")}, {1: ("dp", "tp")}, {0: ("tp", "dp")}, {1: ("tp", "dp")}]
    ways += [{0: ("dp",), 1: ("tp",)}, {0: ("tp",), 1: ("dp",)}]
    over = [({0: ("dp",)}, ("tp",)), ({0: ("tp",)}, ("dp",)), ({1: ("dp",)}, ("tp",)), ({}, ("dp", "tp"))]
    rules = [Rule(f"x{number}.*", way) for number, way in enumerate(ways)]
    rules += [Rule(f"y{number}.*", *way) for number, way in enumerate(over)]
    spec = Spec(MESH, (*rules, Rule("norm", ROWS)))
    noise = np.random.default_rng(5)
    whole = {rule.match.replace("*", "w"): noise.standard_normal((8, 8), dtype=np.float32) for rule in rules}
    whole["norm"] = noise.standard_normal(32, dtype=np.float32)
    for first, second in ((2, 5), (1, 7), (6, 7)):
        c = Checkpoint(tmp_path / f"{first}", spec, whole)
        mine, theirs = dict(c.shards[first]), dict(c.shards[second])
        c.rewrite(first, theirs)
        c.rewrite(second, mine)
        assert "'norm'" in c.refused(spec, target=Spec({"n": 1}, (Rule("*", {}),)))


@pytest.mark.parametrize("stages", [8, 16])
@pytest.mark.parametrize("name", ["embedding", "head"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_one_of_many_stages_has(stages: int, name: str, axis: int) -> None:
    """Embedding and head are in one stage each, so every step is made there; by a listing and by a rule."""
    mesh, stage = (2, 2, 2), 0 if name == "embedding" else stages - 1
    layers = {f"layers.{at}.w": (Placement(mesh, ((2,),), stages=(at,)),) for at in range(stages)}
    ends = {"embedding": (Placement(mesh, stages=(0,)),), "head": (Placement(mesh, stages=(stages - 1,)),)}
    size = 8 * stages
    step = 8 * stage, 8 * stage + (4, 2, 1)[axis]
    pairs = rank_pairs(Strategy(size, stages, {**layers, **ends}), range(size))
    assert step in {pair[:2] for pair in pairs} and len(pairs) <= MAX_PAIRS
    everywhere = tuple(range(stages))
    rules = (("layers.*", Placement(mesh, ((2,),), stages=everywhere)), ("*", Placement(mesh, stages=everywhere)))
    stages_of = {**{f"layers.{at}.w": (at,) for at in everywhere}, "embedding": (0,), "head": (stages - 1,)}
    pairs = rank_pairs(Strategy(size, stages, {}, rules).listing(stages_of), range(size))
    assert step in {pair[:2] for pair in pairs} and len(pairs) <= MAX_PAIRS


# What no strategy lists


def without_a_rule_for_all(folder: Path) -> tuple[Checkpoint, Spec]:
    """Write a checkpoint that its spec places, to which tensors are added that no rule matches."""
    spec = Spec(MESH, (Rule("layers.*.qkv", ROWS), Rule("layers.*.out", COLUMNS), Rule("[enh]*", WHOLE)))
    whole = {name: array for name, array in tensors().items() if name != "embedding"}
    return Checkpoint(folder, spec, whole), spec


def test_random_state_is_each_ranks_own(tmp_path: Path) -> None:
    c, spec = without_a_rule_for_all(tmp_path)
    for rank in range(8):
        c.rewrite(rank, {"rng": np.full(600, rank, np.uint8), "scale": np.array(rank, "f4")})
    assert "note: 'rng' differs between ranks" in c.done(spec).err


def test_a_rank_has_few_values_of_its_own(tmp_path: Path) -> None:
    """Whole numbers, small and of one dimension; but 16 of them are parts of tensors that the strategy forgot."""
    c, spec = without_a_rule_for_all(tmp_path)
    for rank in range(8):
        c.rewrite(rank, {f"x.{number}": np.arange(8, dtype=np.int32) + rank for number in range(16)})
    assert "16 compared tensors ('x." in c.refused(spec)
    c.done(spec, "--unlisted", "replicate")


@pytest.mark.slow
def test_plan_shows_what_rules_make_of_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which dimension is cut, no copies can show; but people see a shape that is not theirs."""
    c = Checkpoint(tmp_path)
    wrong = but(RIGHT, 0, split=COLUMNS)
    for spec, shape in ((RIGHT, [16, 8]), (wrong, [4, 32])):
        finished = c.run(spec, command="plan")
        line = f"by rule 'layers.*.qkv', 'layers.0.qkv' of shape [4, 8] on a rank is {shape} as a whole"
        assert finished.code == 0 and finished.err.count(f"note: {line}\n") == 1
        with caplog.at_level(logging.INFO, "reshard_mpi"):
            reshard_mpi.plan(c.src, tmp_path / "src.toml", tmp_path / "dst.toml")
        assert line in [record.getMessage() for record in caplog.records]
        caplog.clear()


@pytest.mark.parametrize("size", few(1, [1, 40_000]))
def test_parts_of_tensors_are_no_ranks_own(tmp_path: Path, size: int) -> None:
    """16 sharded tensors that the strategy forgot; large state of whole numbers as well."""
    c, spec = without_a_rule_for_all(tmp_path)
    noise = np.random.default_rng(2)
    for rank in range(8):
        forgotten = {f"x.{number}": noise.standard_normal((2, 2), dtype=np.float32) for number in range(16)}
        c.rewrite(rank, forgotten if size == 1 else {"x.0": noise.integers(0, 9, size)})
    said = c.refused(spec)
    assert "no copies of each other" in said and "'x.0'" in said
    assert "--unlisted replicate takes one rank's" in said and not c.dst.exists()
    c.done(spec, "--unlisted", "replicate")
    assert "x.0" in read_shard(c.dst / "rank_1" / "checkpoint_1.ckpt")


def test_a_forgotten_tensor_is_named_before_its_moments(tmp_path: Path) -> None:
    """Which lie before it in the files of some programs, and are cut as it is."""
    c, spec = without_a_rule_for_all(tmp_path)
    noise = np.random.default_rng(2)
    for rank in range(8):
        names = [f"adam_{kind}.x.{number}" for kind in "mv" for number in range(2)] + ["x.0", "x.1"]
        c.rewrite(rank, {name: noise.standard_normal((2, 2), dtype=np.float32) for name in names})
    assert "in 6 compared tensors ('x.0', 'x.1', 'adam_" in c.refused(spec)


@pytest.mark.parametrize("kind", few(1, [np.int8, np.uint8, np.int64, np.float32]))
def test_forgotten_tensors_of_two_dimensions(tmp_path: Path, kind: type) -> None:
    """Quantized weights, however small, and columns of one element are parts of a tensor."""
    c, spec = without_a_rule_for_all(tmp_path)
    for rank in range(8):
        shape = (1, 1) if kind is np.float32 else (4, 8)
        c.rewrite(rank, {"quantized": np.random.default_rng(rank).integers(0, 100, shape).astype(kind)})
    said = c.refused(spec)
    assert "no copies of each other" in said and "'quantized'" in said


# Ranks that are not there


def test_more_ranks_than_there_are(tmp_path: Path) -> None:
    c = Checkpoint(tmp_path)
    more = Spec({"dp": 4, "tp": 4}, (*RIGHT.rules[:2], *RIGHT.rules[3:]))
    c = Checkpoint(tmp_path / "more", Spec(MESH, more.rules))
    finished = c.done(more)
    (told,) = finished.warnings
    assert told.startswith("8 of 16 ranks are there: no shard of ranks 8, 9, 10, 11, 12, 13, 14, 15 in ")
    c.assert_right()
    fewer = Spec({"tp": 14}, (Rule("layers.*", {0: ("tp",)}), Rule("*", {})))
    assert "no source holds a part of" in c.refused(fewer, "--overwrite")


# --unlisted drop


@pytest.mark.slow
def test_state_that_only_the_rule_for_all_catches_is_dropped(tmp_path: Path) -> None:
    """Weights alone, by a spec that ends in a rule for all."""
    whole = tensors()
    state = {f"{kind}.{name}": -array for name, array in whole.items() for kind in ("adam_m", "adam_v")}
    spec = Spec(MESH, RIGHT.rules)
    c = Checkpoint(tmp_path, spec, whole)
    for rank, arrays in c.shards.items():
        c.rewrite(rank, {f"{kind}.{name}": -array for name, array in arrays.items() for kind in ("adam_m", "adam_v")})
    for command in ("plan", "transform"):
        c.done(spec, "--unlisted", "drop", command=command)
    c.assert_right()
    loaded = reshard_mpi.load_rank(0, c.src, tmp_path / "src.toml", tmp_path / "dst.toml", unlisted="drop")
    assert set(loaded) == set(whole)
    listed = Spec({"n": 2}, (Rule("layers.*", {0: ("n",)}), Rule("adam_m.*", {}), Rule("*", {})))
    c.done(spec, "--unlisted", "drop", "--overwrite", target=listed)
    c.tensors |= {name: array for name, array in state.items() if name.startswith("adam_m")}
    c.assert_right(listed)


# What a sample costs


@pytest.mark.slow
@few_cases(1, ("mesh", "stages"), one_at_a_time([(64, 32, 8), (16384,), (2048, 8), (3, 5, 7), (16383,)], [64, 4, 1]))
def test_few_of_many_shards_are_opened(mesh: tuple[int, ...], stages: int) -> None:
    size = int(np.prod(mesh)) * stages
    strategy = Strategy(size, stages, {"w": (Placement(mesh, stages=tuple(range(stages))),)})
    pairs = rank_pairs(strategy, range(size))
    assert 0 < len(pairs) <= MAX_PAIRS
    assert all(strategy.stage_of(pair.first) == strategy.stage_of(pair.second) for pair in pairs)
    if stages == 1:  # along every axis
        strides = np.cumprod((1, *mesh[:0:-1]))
        for stride, length in zip(strides, reversed(mesh)):
            assert any(
                (second - first) % stride == 0 and (second - first) // stride < length for first, second, _ in pairs
            )


def test_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ByteRange] = []
    read_into = Files.read_into

    def counting(self: Files, part: ByteRange, buffer: memoryview) -> None:
        read.append(part)
        read_into(self, part, buffer)

    monkeypatch.setattr(Files, "read_into", counting)
    whole = {
        f"layers.{number}.qkv": np.random.default_rng(number).standard_normal((64, 64), dtype=np.float32)
        for number in range(200)
    }
    spec = Spec(MESH, (Rule("layers.*.qkv", ROWS),))
    c = Checkpoint(tmp_path, spec, whole)
    c.arguments(spec)
    source = open_source(find_shards(str(c.src)), strategy_files.load(str(tmp_path / "src.toml")))
    conversion = Planner(source, unsharded())
    assert conversion.sample_findings() == SampleFindings()
    assert 0 < sum(part.length_bytes for part in read) <= 300 * 1024
    alone = {*read}
    read.clear()
    for process in range(3):
        before = len(read)
        conversion.sample_findings(process=process, processes=3)
        assert len(read) - before < len(alone)
    assert {*read} == alone


@pytest.mark.slow
def test_little_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is decoded whole to read a few elements of it."""
    spec, noise = Spec({"n": 4}, (Rule("w*", {}), Rule("x*", {0: ("n",)}))), np.random.default_rng(6)
    names = [f"{way}{layer}" for way in "wx" for layer in range(12)]
    for rank in range(4):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        with h5py.File(tmp_path / "src" / f"rank_{rank}" / f"c_{rank}.h5", "w") as file:
            for name in names:
                array = np.zeros(1 << 19, np.float32) if name[0] == "w" else np.full(1 << 19, rank, np.float32)
                array[:40] = noise.standard_normal(40) if name[0] == "x" else 7
                file.create_dataset(name, data=array, chunks=array.shape, compression="gzip", compression_opts=1)
    (tmp_path / "src.toml").write_text(spec.text())
    decoded: list[tuple[str, str]] = []

    def counting(files: Files, entry: TensorEntry, box: Box) -> bytes:
        assert isinstance(entry.source, LibraryRead)
        decoded.append((entry.source.path, entry.name))
        return excerpt(files, entry, box)

    monkeypatch.setattr(compare_samples, "excerpt", counting)
    source = open_source(find_shards(str(tmp_path / "src")), strategy_files.load(str(tmp_path / "src.toml")))
    assert Planner(source, unsharded()).sample_findings() == SampleFindings()
    assert {name[0] for _, name in decoded} == {"w", "x"}
    assert len(decoded) == len({*decoded}) <= 4 * 4  # of each shard a few, and each in one place


@pytest.mark.parametrize(
    "shape", [(), (1,), (96,), (97,), (5, 1), (1000, 1), (7, 33), (100, 3, 2), (2, 2, 4000), (1 << 40,)]
)
def test_places_are_runs_of_the_tensor(shape: tuple[int, ...]) -> None:
    boxes = places("w", shape)
    assert boxes[0].start == (0,) * len(shape) and boxes[-1].stop == shape
    for box in boxes:
        assert all(low < high <= length for low, high, length in zip(box.start, box.stop, shape))
        assert box.size <= 3 * PLACE_ELEMENTS
        if np.prod(shape, dtype=object) < 1 << 20:
            inside = np.zeros(shape, bool)
            inside[tuple(map(slice, box.start, box.stop))] = True
            places_inside = np.flatnonzero(inside)
            assert places_inside[-1] - places_inside[0] == len(places_inside) - 1


# Slips drawn at random


@pytest.mark.slow
@many(36)
@given(slip=slips())
def test_a_slip_is_refused_or_makes_no_difference(slip: Slip) -> None:
    """Wrong bytes are met with exit code 0 only where no two shards contradict the spec, whatever is compared."""
    if outcome(slip) == "wrong":
        proofs: Iterator[str] = contradictions(slip.wrong, slip.right.shards(slip.tensors))
        assert next(proofs, None) is None, slip

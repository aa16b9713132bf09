"""Settings beside tensors that each rank has of its own: what is not carried is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import safetensors_peer, torch_peer
from support.checkpoints import sample
from support.command_line import done
from support.examples import few, few_cases
from support.torch_runs import transformed

import reshard_mpi
from reshard_mpi.errors import DisagreementError
from reshard_mpi.testing.sample_tensors import ShardContents

NOTE = "the string settings beside the tensors, and how all is nested differs between ranks"


def tensor(array: Any, key: str) -> Any:
    return torch_peer.tensor(sample("", np.asarray(array)), key)


def cut(folder: Path, ranks: int) -> Path:
    path = folder / f"{ranks}.toml"
    path.write_text(f'mesh = {{ x = {ranks} }}\n[[parameter]]\nmatch = "model.w"\nsplit = {{ 0 = ["x"] }}\n')
    return path


def source(folder: Path, rates: list[float], seeds: list[int]) -> Path:
    """Save ranks with a slice of `w`, a learning rate and a tensor of their own."""
    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    for rank, (rate, seed) in enumerate(zip(rates, seeds)):
        (folder / "src" / f"rank_{rank}").mkdir(parents=True)
        part = np.array_split(whole, len(rates))[rank]
        saved = {"model": {"w": tensor(part, "0")}, "opt": {"lr": rate}, "own": tensor(np.array([seed, 9]), "1")}
        torch_peer.save(folder / "src" / f"rank_{rank}" / "x.pt", saved)
    return folder / "src"


def test_targets_of_ranks_that_agree_among_themselves_alone(tmp_path: Path) -> None:
    src = source(tmp_path, [0.1, 0.1, 0.2, 0.2], [5, 5, 5, 5])
    report = reshard_mpi.transform(src, tmp_path / "dst", cut(tmp_path, 4), cut(tmp_path, 2))
    (note,) = (note for note in report.notes if NOTE in note)
    assert note == f"{NOTE} 0, 1, 2, 3: each rank has its own; one of them was taken"


@pytest.mark.parametrize("parts", few(1, [1, 2]))
def test_tasks_that_know_nothing_of_each_other(tmp_path: Path, parts: int) -> None:
    src = source(tmp_path, [0.1, 0.1, 0.2, 0.2], [5, 5, 5, 5])
    said = []
    for part in range(parts):
        strategies = ("--src-strategy", str(cut(tmp_path, 4)), "--dst-strategy", str(cut(tmp_path, 2)))
        finished = done("transform", src, tmp_path / "dst", *strategies, "--part", f"{part}/{parts}")
        said += [line for line in finished.err.splitlines() if NOTE in line]
    assert len(said) == parts


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_as_many_ranks_as_before(tmp_path: Path, to: str) -> None:
    """Files of ranks keep each rank's own; a folder that is one checkpoint has one of them."""
    src = source(tmp_path, [0.1, 0.2], [5, 6])
    report = reshard_mpi.transform(src, tmp_path / "dst", cut(tmp_path, 2), cut(tmp_path, 2), to=to)
    assert any(NOTE in note for note in report.notes) == (to == "dcp")
    assert any("'own' differs between ranks 0, 1" in warning for warning in report.warnings) == (to == "dcp")
    if to == "dcp":
        with pytest.raises(DisagreementError, match="differ from rank to rank"):
            reshard_mpi.transform(src, tmp_path / "no", cut(tmp_path, 2), cut(tmp_path, 2), to=to, strict=True)


def test_no_note_where_all_agree(tmp_path: Path) -> None:
    src = source(tmp_path, [0.1] * 4, [5] * 4)
    for to in ("torch", "dcp", "safetensors"):
        report = reshard_mpi.transform(src, tmp_path / to, cut(tmp_path, 4), cut(tmp_path, 2), to=to)
        assert not [text for text in (*report.notes, *report.warnings) if "differs" in text]


@pytest.mark.parametrize("form", few(2, ["numbers", "names", "flat"]))
@pytest.mark.parametrize("is_cut", few(1, [False, True]))
@pytest.mark.parametrize("way", few(1, ["alike", "another rate", "shared out"]))
def test_an_optimizer_that_differs_between_ranks_of_a_stage_is_told(
    tmp_path: Path, form: str, is_cut: bool, way: str
) -> None:
    """Ranks may share out whose state each keeps, as distributed Muon does."""
    for rank in range(2):
        keys = ["w", "b"] if form != "numbers" else [0, 1]
        whole = {"w": np.arange(4, dtype=np.float32), "b": np.ones(4, np.float32)}
        model = {name: tensor(array[rank * 2 :][:2] if is_cut else array, name) for name, array in whole.items()}
        kept = [keys[rank]] if way == "shared out" else keys
        rate = 0.1 + 0.1 * rank * (way == "another rate")
        optimizer: dict[str, Any] = {
            "state": {key: {"calls": 3} for key in kept},
            "param_groups": [{"lr": rate, "params": keys}],
        }
        if form == "flat":
            optimizer = {
                **{f"state.{key}.calls": 3 for key in kept},
                **{f"param_groups.{key}.lr": rate for key in keys},
            }
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        torch_peer.save(tmp_path / "src" / f"rank_{rank}" / "x.pt", {"model": model, "optim": optimizer, "rank": 0})
    split = 'split = { 0 = ["x"] }\n' * is_cut
    (tmp_path / "two.toml").write_text(f'mesh = {{ x = 2 }}\n[[parameter]]\nmatch = "model.*"\n{split}')
    report = reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", tmp_path / "two.toml", to="torch")
    told = [note for note in report.notes if "how all is nested" in note]
    assert bool(told) == (way == "another rate" or (way == "shared out" and form == "numbers"))


def stages(folder: Path, way: str) -> Path:
    """Save two stages of a pipeline, each with a layer and its named optimizer, which differ in one more `way`."""
    for stage in range(2):
        layer = {f"l{stage}.b": tensor(np.full(4, stage, np.float32), "0")}
        state = {f"l{stage}.b": {"exp_avg": tensor(np.full(4, 9, np.float32), "1")}}
        optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.1, "params": [f"l{stage}.b"]}]}
        saved: dict[str, Any] = {"model": layer, "optim": optimizer}
        if way == "own value":
            saved["own"] = stage
        elif way == "own list":
            saved["own"] = [0.1] * (1 + stage)
        elif way == "one has more" and stage == 1:
            saved["own"] = 3.5
        elif way == "its optimizer has more" and stage == 0:
            optimizer["own"] = 3.5
        elif way == "another order" and stage == 1:
            saved = {"optim": optimizer, "model": layer}
        (folder / "src" / f"rank_{stage}").mkdir(parents=True)
        torch_peer.save(folder / "src" / f"rank_{stage}" / "x.pt", saved)
    return folder / "src"


@pytest.mark.parametrize("to", few(1, ["dcp", "torch", "full"]))
@few_cases(1, "way", ["alike", "own value", "own list", "one has more", "its optimizer has more", "another order"])
def test_stages_with_settings_of_their_own_keep_their_parameters(tmp_path: Path, to: str, way: str) -> None:
    rules = "".join(f'[[parameter]]\nmatch = "*l{stage}.b*"\nstage = {stage}\n' for stage in (0, 1))
    (tmp_path / "stages.toml").write_text(f"mesh = {{ dp = 1 }}\nstages = 2\n{rules}")
    strategy, form = tmp_path / "stages.toml", "dcp" if to == "dcp" else "torch"
    dst_strategy = None if to == "full" else strategy
    report = reshard_mpi.transform(stages(tmp_path, way), tmp_path / "dst", strategy, dst_strategy, to=form)
    is_told = any("differs" in note for note in report.notes)
    assert is_told or not (way.startswith("own") and to != "torch")
    read = transformed(tmp_path / "dst", tmp_path / "one", strategy if to == "torch" else None, to="torch")
    assert [group["params"] for group in read["optim"]["param_groups"]] == [["l0.b", "l1.b"]]
    assert read["optim"]["state"].keys() == {"l0.b", "l1.b"}
    assert way != "one has more" or read["own"] == 3.5
    assert way != "its optimizer has more" or read["optim"]["own"] == 3.5


@pytest.mark.parametrize("to", few(2, ["one", "torch", "dcp", "map"]))
@pytest.mark.parametrize("stages", few(1, [False, True]))
def test_rank_files_of_two_moments(tmp_path: Path, to: str, stages: bool) -> None:
    """A counter that is a plain number is compared as one that is a tensor is."""
    for rank in range(2):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        model = {f"l{rank if stages else 0}.b": tensor(np.full(4, rank, np.float32), "0")}
        saved = {"model": model, "iteration": 100 + rank, "data": {"epoch": rank}}
        torch_peer.save(tmp_path / "src" / f"rank_{rank}" / "x.pt", saved)
    rules = "".join(f'[[parameter]]\nmatch = "*l{stage}.b"\nstage = {stage}\n' for stage in (0, 1))
    cut = 'mesh = { x = 2 }\n[[parameter]]\nmatch = "model.*"\nsplit = { 0 = ["x"] }\n'
    strategy = tmp_path / "strategy.toml"
    strategy.write_text(f"mesh = {{ x = 1 }}\nstages = 2\n{rules}" if stages else cut)
    source, target = tmp_path / "src", tmp_path / "dst"
    options: dict[str, Any] = (
        {"map": "model.l0.b <=> model.l0.c"} if to == "map" else {"to": "dcp"} if to == "dcp" else {}
    )
    dst_strategy = None if to in ("one", "map") else strategy
    with pytest.raises(DisagreementError, match="different moments") as error:
        reshard_mpi.transform(source, target, strategy, dst_strategy, **options)
    assert "'iteration' = 100" in str(error.value) and "'iteration' = 101" in str(error.value)
    assert not target.exists()
    if to == "torch":
        with pytest.raises(DisagreementError, match="different moments"):
            reshard_mpi.plan(source, strategy, dst_strategy)


def test_texts_of_two_moments(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        content = ShardContents.of([sample("model.w", np.full((4, 2), rank, np.float32))], {"step": str(rank)})
        safetensors_peer.write(tmp_path / "src" / f"rank_{rank}" / "x.safetensors", content)
    with pytest.raises(DisagreementError, match="different moments"):
        reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", cut(tmp_path, 2))


def test_diff_says_which_settings_it_has_compared(tmp_path: Path) -> None:
    src = source(tmp_path, [0.1, 0.2], [5, 5])
    finished = done("diff", src, src, "--src-strategy", cut(tmp_path, 2), "--dst-strategy", cut(tmp_path, 2))
    assert "rank_1/x.pt differs from the one taken" in finished.err


def test_diff_says_which_tensors_it_has_compared_by_one_rank_alone(tmp_path: Path) -> None:
    src = source(tmp_path, [0.1, 0.1], [5, 6])
    strategy = str(cut(tmp_path, 2))
    finished = done("diff", src, src, "--src-strategy", strategy, "--dst-strategy", strategy)
    assert "'own' differs between ranks 0, 1" in finished.err


@pytest.mark.parametrize("command", ["transform", "diff"])
def test_settings_of_copies_that_no_target_reads(tmp_path: Path, command: str) -> None:
    """Ranks that hold the same: one is read, and that another has settings of its own is seen by the sample."""
    for rank in range(2):
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        saved = {"model": {"w": tensor(np.arange(4, dtype=np.float32), "0")}, "epoch": 3 + rank}
        torch_peer.save(tmp_path / "src" / f"rank_{rank}" / "x.pt", saved)
    (tmp_path / "dp.toml").write_text('mesh = { dp = 2 }\n[[parameter]]\nmatch = "*"\n')
    strategy = str(tmp_path / "dp.toml")
    target = str(tmp_path / ("dst" if command == "transform" else "src"))
    more = () if command == "transform" else ("--dst-strategy", strategy)
    assert f"{NOTE} 0, 1" in done(command, tmp_path / "src", target, "--src-strategy", strategy, *more).err

"""Maps that are applied one after another: what numpy makes of the tensors, one equation after the other."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import torch_peer
from support.checkpoints import TARGETS, write_ranks
from support.command_line import done, refused, run_here
from support.cut_checkpoints import DESCRIBED, KINDS, TYPES, assert_ranks, cut, in_floats, map_text
from support.equations import Case, assert_same, cases, following, kinds, made_of
from support.examples import few, many
from support.full_checkpoints import assert_held, floats, held, map_of, source_of
from support.torch_runs import array_of, stored, transformed

import reshard_mpi
from reshard_mpi import MapError, TargetError
from reshard_mpi.mapping import box_pairs, chain
from reshard_mpi.mapping.apply_rules import applied
from reshard_mpi.mapping.chain import Composition
from reshard_mpi.mapping.map_file import parse_rules
from reshard_mpi.mapping.selection import Selection

Array = np.ndarray[Any, np.dtype[Any]]


def in_float(case: Case) -> Case:
    return case._replace(left=in_floats(case.left), right=in_floats(case.right))


@pytest.mark.slow
@many(20)
@given(first=cases(), data=st.data())
def test_one_to_three_go_there_and_back_over_ranks_and_formats(first: Case, data: st.DataObject) -> None:
    chain = [first]
    for name in "mn"[: data.draw(st.integers(0, 2), "further maps")]:
        chain.append(data.draw(following(chain[-1].right, name)))
    chain = [in_float(case) for case in chain]
    left, right = chain[0].left, chain[-1].right
    one, other = cut(data.draw, left), cut(data.draw, right)
    kind = data.draw(st.sampled_from(TARGETS))
    converted = data.draw(st.sampled_from([None, *TYPES]))
    if converted is not None:
        right = {name: array.astype(TYPES[converted]) for name, array in right.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        strategy, target_strategy = folder / "one.toml", folder / "other.toml"
        strategy.write_text(one.text)
        target_strategy.write_text(other.text)
        maps = [folder / f"map{number}.toml" for number in range(len(chain))]
        for path, case in zip(maps, chain):
            path.write_text(map_text(case))
        write_ranks(one.ranks(left), folder / "start", data.draw(st.sampled_from(KINDS)))
        options: dict[str, Any] = {"map": maps, "dtype": converted or (), "forward": True}
        there = folder / "start", folder / "there", strategy, None if kind == "hf" else target_strategy
        reshard_mpi.transform(*there, to=kind, verify=True, **options)
        assert_ranks(folder / "there", kind, other, right, target_strategy)
        held = None if kind in (*DESCRIBED, "hf") else target_strategy
        reshard_mpi.verify(*there[:3], held, **options)
        reshard_mpi.diff(*there[:3], held, **options)
        back: dict[str, Any] = {"map": maps[::-1], "dtype": "fp32" if converted else (), "reverse": True}
        reshard_mpi.transform(folder / "there", folder / "back", held, strategy, to="ckpt", **back)
        if converted in (None, "fp64"):
            assert_ranks(folder / "back", "ckpt", one, left, strategy)


@given(first=cases(), data=st.data())
def test_what_they_make_of_the_first_tensors_is_told(first: Case, data: st.DataObject) -> None:
    """The boxes by which a tensor is explained are those that its elements come from."""
    chain = [first, data.draw(following(first.right, "m"))]
    mapped = [applied(parse_rules(map_text(case), "map.toml"), Selection(), kinds(case.left), True) for case in chain]
    composed = Composition().of(mapped[1].made, {tensor.name: tensor for tensor in mapped[0].made})
    assert_same(made_of(mapped[1]._replace(made=tuple(composed)), first.left), chain[1].right)


RENAMED = "app.{p*} <=> {p*}"
JOINED = "l.{n}.gate [f h], l.{n}.up [f h] <=> l.{n}.both [h (f + f)]"
TENSORS = {
    **{f"app.l.{n}.gate": floats(3, 2, first=10 * n) for n in range(2)},
    **{f"app.l.{n}.up": floats(3, 2, first=10 * n + 100) for n in range(2)},
    "app.bias": floats(4, first=1000),
}
MADE = {
    **{f"l.{n}.both": np.concatenate([TENSORS[f"app.l.{n}.gate"], TENSORS[f"app.l.{n}.up"]]).T for n in range(2)},
    "bias": TENSORS["app.bias"],
}


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the target files of a run by their names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("rank_*/*")}


def assert_like_one_run_each(source: Path, folder: Path, maps: list[Any], **options: Any) -> Path:
    """See that a run with several maps makes the files that a run for each of them makes, one after another."""
    reshard_mpi.transform(source, folder / "together", map=maps, **options)
    last = {key: options.pop(key) for key in ("like", "dtype", "exclude", "include") if key in options}
    for number, path in enumerate(maps):
        of_last = last if number == len(maps) - 1 else {}
        reshard_mpi.transform(source, folder / f"apart{number}", map=path, **options, **of_last)
        source = folder / f"apart{number}"
    together, apart = files_of(folder / "together"), files_of(source)
    assert together == apart and together
    return folder / "together"


def test_each_takes_what_the_one_before_it_has_made(tmp_path: Path) -> None:
    source = source_of(tmp_path, TENSORS)
    both = ("--map", RENAMED, "--map", JOINED)
    done("transform", source, tmp_path / "dst", *both)
    assert_held(tmp_path / "dst", MADE)
    for command in ("verify", "diff"):
        done(command, source, tmp_path / "dst", *both)
    assert "not there: 'l.0.gate'" in refused("diff", source, tmp_path / "dst", "--map", RENAMED, code=4)
    done("transform", tmp_path / "dst", tmp_path / "back", "--map", JOINED, "--map", RENAMED, "--reverse")
    assert_held(tmp_path / "back", TENSORS)


def test_the_notes_and_the_plan_speak_of_all(tmp_path: Path) -> None:
    source = source_of(tmp_path, TENSORS)
    asked = ("plan", str(source), str(tmp_path / "dst"), "--map", RENAMED, "--map", JOINED)
    shown = run_here(*asked, "-v")
    assert "app.l.0.gate, app.l.0.up, by" in shown.out and "then" in shown.out
    assert f"the map '{RENAMED}', read forward, makes 5 tensors" in shown.err
    assert f"the map '{JOINED}', read forward, makes 2 tensors" in shown.err
    assert "no equation takes" not in shown.err
    explained = run_here(*asked, "--explain", "l.1.both").out
    assert f"made of app.l.1.gate, app.l.1.up, by '{RENAMED}', then '{JOINED}'" in explained
    assert "of app.l.1.up, its dimensions in the order [1, 0]" in explained
    assert "which goes into bias" in refused(*asked, "--explain", "app.bias", code=2)


def test_every_map_must_do_something(tmp_path: Path) -> None:
    source = source_of(tmp_path, TENSORS)
    with pytest.raises(MapError) as raised:
        reshard_mpi.transform(source, tmp_path / "dst", map=[RENAMED, "nothing <=> something"])
    assert "nothing <=> something" in str(raised.value) and not (tmp_path / "dst").exists()


def test_the_direction_of_each_is_found(tmp_path: Path) -> None:
    source = source_of(tmp_path, MADE)
    reshard_mpi.transform(source, tmp_path / "dst", map=[JOINED, "wrapped.l.{p*} <=> l.{p*}"])
    expected = {name.replace("app.l.", "wrapped.l.").replace("app.", ""): array for name, array in TENSORS.items()}
    assert_held(tmp_path / "dst", expected)


def test_types_in_between_round_and_the_type_asked_for_is_that_of_the_last(tmp_path: Path) -> None:
    values = np.array([[1.001, -3.0e-3], [600.3, 7.7]], np.float32)
    source = source_of(tmp_path, {"w": values, "kept": values})
    maps = ["w [a b] <=> v [b a] : bf16", "v [a b] <=> u [(a b)] : fp32"]
    reshard_mpi.transform(source, tmp_path / "dst", map=maps, verify=True)
    rounded = values.T.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1)
    assert_held(tmp_path / "dst", {"u": rounded, "kept": values})
    reshard_mpi.verify(source, tmp_path / "dst", map=maps)
    reshard_mpi.transform(source, tmp_path / "half", map=maps, dtype="fp16", verify=True)
    assert_held(tmp_path / "half", {"u": rounded.astype(np.float16), "kept": values.astype(np.float16)})


def test_what_is_made_up_padded_left_out_and_copied_in_between(tmp_path: Path) -> None:
    first = """
    axes.v = 3
    [[map]]
    eq = "w [v h] <=> p [(v | 4) h]"
    [[map]]
    fill = { name = "ones", value = 1, shape = [4, 2], type = "float32" }
    [[map]]
    drop = "unused"
    optional = true
    [[map]]
    eq = "tied [t h] <=> in [t h], out [t h]"
    copy = true
    """
    second = """
    [[map]]
    eq = "p [v h], ones [v h] <=> all [h (v + v)] : bf16"
    [[map]]
    eq = "in [v h], out [v h] <=> ends [(v + v) h]"
    """
    tensors = {"w": floats(3, 2), "unused": floats(2), "tied": floats(2, 2, first=50)}
    maps = [map_of(tmp_path, first).rename(tmp_path / "first.toml"), map_of(tmp_path, second)]
    source = source_of(tmp_path, tensors)
    made = assert_like_one_run_each(source, tmp_path, maps, verify=True)
    padded = np.concatenate([tensors["w"], np.zeros((1, 2), np.float32), np.ones((4, 2), np.float32)])
    assert_held(
        made, {"all": padded.T.astype(ml_dtypes.bfloat16), "ends": np.concatenate([tensors["tied"], tensors["tied"]])}
    )
    different = {"all": padded.T.copy(), "ends": np.concatenate([tensors["tied"], tensors["tied"] + 1])}
    (tmp_path / "other").mkdir()
    refused = source_of(tmp_path / "other", different)
    with pytest.raises(MapError, match="they differ"):
        reshard_mpi.transform(refused, tmp_path / "no", map=maps[::-1], reverse=True)
    different = {"all": padded.T.copy(), "ends": made_ends(tensors["tied"])}
    different["all"][0, 3] = 5
    write_ranks({0: different}, tmp_path / "third", "safetensors")
    with pytest.raises(MapError, match="padding"):
        reshard_mpi.transform(tmp_path / "third", tmp_path / "no", map=maps[::-1], reverse=True)
    assert not (tmp_path / "no").exists()


def made_ends(tied: Array) -> Array:
    return np.concatenate([tied, tied])


def training(shapes: dict[str, tuple[int, ...]], *, groups_say_all: bool = True) -> dict[str, Any]:
    """Return what torch saves of a training: a model, and Adam's state by number.

    groups_say_all: else the last number has state and is in no group.
    """
    number_of = {name: number for number, name in enumerate(shapes)}
    model = {name: floats(*shape, first=100 * number_of[name]) for name, shape in shapes.items()}
    state = {
        number: {"step": stored(np.array(3, np.float32)), "exp_avg": stored(model[name] * 10 + 1)}
        for name, number in number_of.items()
    }
    group = {"lr": 0.5, "params": list(range(len(shapes) - (not groups_say_all)))}
    tensors = {name: stored(array) for name, array in model.items()}
    return {"model": tensors, "optimizer": {"state": state, "param_groups": [group]}, "epoch": 3}


TRAINED = {"q": (4, 3), "k": (2, 3), "bias": (2,), "out.weight": (2, 3)}
# What maps see as names: those of the file, but below "model" where the target is to be like another one.
JOINED_AND_TURNED = """
[[map]]
eq = "model.q [a h], model.k [b h] <=> model.qk [(a + b) h]"
[[map]]
eq = "{p*}.weight [o i] <=> {p*}.kernel [i o]"
"""


@pytest.mark.parametrize("options", few(1, [{}, {"exclude": "optimizer.*"}, {"dtype": "bf16"}]))
def test_numbered_state_follows_through_all(tmp_path: Path, options: dict[str, Any]) -> None:
    torch_peer.save(tmp_path / "source.pt", training(TRAINED))
    maps = [map_of(tmp_path, JOINED_AND_TURNED), "model.{p*} <=> model.net.{p*}"]
    made = tmp_path / "made"
    loaded = transformed(tmp_path / "source.pt", made, map=maps, forward=True, **options)
    assert [*loaded["model"]] == ["net.qk", "net.bias", "net.out.kernel"]
    if "exclude" not in options:
        assert [*loaded["optimizer"]["state"]] == [*loaded["model"]]
        joined = np.concatenate([floats(4, 3) * 10 + 1, floats(2, 3, first=100) * 10 + 1])
        if not options:
            assert np.array_equal(array_of(loaded["optimizer"]["state"]["net.qk"]["exp_avg"]), joined)


def test_the_last_is_like_another_checkpoint(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "source.pt", training(TRAINED))
    torch_peer.save(tmp_path / "like.pt", training({"net.out.kernel": (3, 2), "net.bias": (2,), "net.qk": (6, 3)}))
    maps = [map_of(tmp_path, JOINED_AND_TURNED.replace("model.", "")), "{p*} <=> net.{p*}"]
    made = tmp_path / "made"
    loaded = transformed(tmp_path / "source.pt", made, map=maps, forward=True, like=tmp_path / "like.pt", verify=True)
    assert [*loaded["model"]] == ["net.out.kernel", "net.bias", "net.qk"]
    state = {number: array_of(of_one["exp_avg"]) for number, of_one in loaded["optimizer"]["state"].items()}
    assert [*state] == [0, 1, 2] and np.array_equal(state[0], (floats(2, 3, first=300) * 10 + 1).T)
    joined = np.concatenate([floats(4, 3) * 10 + 1, floats(2, 3, first=100) * 10 + 1])
    assert np.array_equal(state[2], joined)
    back = tmp_path / "back"
    again = transformed(made, back, map=maps[::-1], reverse=True, like=tmp_path / "source.pt")
    for number, of_one in torch_peer.load(tmp_path / "source.pt")["optimizer"]["state"].items():
        assert np.array_equal(array_of(of_one["exp_avg"]), array_of(again["optimizer"]["state"][number]["exp_avg"]))


def test_state_that_is_left_out_in_the_end_need_not_follow_on_the_way(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "source.pt", training(TRAINED, groups_say_all=False))
    maps = [map_of(tmp_path, JOINED_AND_TURNED), "model.{p*} <=> {p*}"]
    with pytest.raises(MapError):
        reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "dst", map=maps, forward=True)
    reshard_mpi.transform(
        tmp_path / "source.pt", tmp_path / "dst", map=maps, forward=True, exclude="optimizer.*", to="safetensors"
    )
    assert {*held(tmp_path / "dst")} == {"qk", "bias", "out.kernel"}
    stranded = {"model.w": floats(3, 2), "exp_avg.w": floats(3, 2)}
    write_ranks({0: stranded}, tmp_path / "named", "safetensors")
    turned = ["model.w [a b] <=> model.v [b a]", "model.v <=> v"]
    with pytest.raises(MapError, match="would stay as it is"):
        reshard_mpi.transform(tmp_path / "named", tmp_path / "other", map=turned)
    reshard_mpi.transform(tmp_path / "named", tmp_path / "other", map=turned, exclude="exp_avg.*")
    assert_held(tmp_path / "other", {"v": stranded["model.w"].T})
    for further in (["exp_avg.w <=> other"], ["exp_avg.w <=> other", "other <=> more"]):
        with pytest.raises(MapError, match=r"an earlier map|matches no tensor"):
            reshard_mpi.transform(tmp_path / "named", tmp_path / "no", map=turned + further, exclude="exp_avg.*")


COUNTED = """
[[map]]
eq = "model.{p*}.weight [o i] <=> model.{p*}.kernel [i o]"
[[map]]
state = "optimizer.state.{p*}.exp_avg <=> m.{p*}"
[[map]]
[map.count]
each = "optimizer.state.{p*}.step"
beside = "optimizer.state.{p*}.exp_avg"
total = "t"
total_type = "int32"
[[map]]
number = { name = "rate", of = "lr" }
[[map]]
fill = { name = "ones", value = 1, shape = [2], type = "float32" }
"""
RENAMED_AGAIN = """
[[map]]
eq = "t <=> steps"
[[map]]
eq = "rate <=> learning_rate : bf16"
[[map]]
eq = "ones [c] <=> more [(c | 3)]"
[[map]]
eq = "m.model.{p*} <=> moment.{p*}"
"""


def test_numbers_that_are_computed_and_what_is_made_up_in_between_go_on(tmp_path: Path) -> None:
    torch_peer.save(tmp_path / "source.pt", training(TRAINED))
    maps = [map_of(tmp_path, COUNTED).rename(tmp_path / "counted.toml"), map_of(tmp_path, RENAMED_AGAIN)]
    asked: dict[str, Any] = {"to": "safetensors", "forward": True}
    reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "dst", map=maps, verify=True, **asked)
    reshard_mpi.transform(tmp_path / "source.pt", tmp_path / "first", map=maps[0], **asked)
    reshard_mpi.transform(tmp_path / "first", tmp_path / "second", map=maps[1], **asked)
    made = held(tmp_path / "dst")
    assert made["steps"] == 3 and made["learning_rate"].astype(np.float32) == 0.5
    assert made["more"].tolist() == [1, 1, 0] and "moment.q" in made and "rate" not in made
    assert_held(tmp_path / "second", made)
    both = ("--map", str(maps[0]), "--map", str(maps[1]), "--forward")
    asked_for = ("plan", str(tmp_path / "source.pt"), str(tmp_path / "none"), *both)
    assert "more float32 [3]: made up, by" in run_here(*asked_for, "-v").out
    explained = done(*asked_for, "--explain", "learning_rate")
    assert "made up, by" in explained.out and "it is in no file" in explained.out


def test_a_hole_refuses_only_what_needs_it(tmp_path: Path) -> None:
    """One of two ranks that have halves of `e` is lost, and a later map, or the user, leaves `e` out."""
    tensors = {"w": floats(4, 2), "e": floats(4, 2, first=20)}
    (tmp_path / "halves.toml").write_text('mesh.m = 2\n[[parameter]]\nmatch = "e"\nsplit = { 0 = ["m"] }\n')
    shards = {rank: {"w": tensors["w"], "e": tensors["e"][2 * rank : 2 * rank + 2]} for rank in range(2)}
    write_ranks(shards, tmp_path / "src", "safetensors")
    shutil.rmtree(tmp_path / "src" / "rank_1")
    asked: dict[str, Any] = {"src_strategy": tmp_path / "halves.toml", "unlisted": "replicate"}
    maps = ["{p*} <=> a.{p*}", "a.{p*} [x y] <=> b.{p*} [y x]"]
    reshard_mpi.transform(tmp_path / "src", tmp_path / "dst", map=maps, forward=True, exclude="b.e", **asked)
    assert_held(tmp_path / "dst", {"b.w": tensors["w"].T})
    with pytest.raises(reshard_mpi.ReshardError, match="rank 1"):
        reshard_mpi.transform(tmp_path / "src", tmp_path / "no", map=maps, forward=True, **asked)


def test_a_rank_that_gets_one_of_two_halves_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "halves.toml").write_text('mesh.m = 2\n[[parameter]]\nmatch = "*.fused"\nsplit = { 0 = ["m"] }\n')
    source = source_of(tmp_path, {"gate": floats(4, 2), "up": floats(4, 2)})
    maps = ["gate [f h], up [f h] <=> both [(f + f) h]", "both <=> l.fused"]
    report = reshard_mpi.transform(source, tmp_path / "dst", None, tmp_path / "halves.toml", map=maps)
    assert any("behind each other in l.fused" in warning for warning in report.warnings)


def test_it_goes_on_only_with_the_same_maps_in_the_same_order(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a": floats(2), "b": floats(2, first=9)})
    maps = ["a <=> c", "b <=> d"]
    reshard_mpi.transform(source, tmp_path / "dst", map=maps)
    assert reshard_mpi.transform(source, tmp_path / "dst", map=maps, resume=True).targets[0].skipped
    for others in (maps[::-1], maps[:1], [*maps, "d <=> e"]):
        with pytest.raises(TargetError):
            reshard_mpi.transform(source, tmp_path / "dst", map=others, resume=True)
    told = run_here("inspect", tmp_path / "dst", "--json").out
    assert "--map 'a <=> c' --map 'b <=> d'" in told


def test_an_equation_that_fits_both_ways_is_read_as_it_is_written(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a.w": floats(2)})
    reshard_mpi.transform(source, tmp_path / "dst", map="a.{p*} <=> {p*}")
    assert_held(tmp_path / "dst", {"w": floats(2)})
    reshard_mpi.transform(source, tmp_path / "more", map="{p*} <=> a.{p*}")
    assert_held(tmp_path / "more", {"a.a.w": floats(2)})
    with pytest.raises(MapError, match="its right side takes any name"):  # which would put `b.` before all names
        reshard_mpi.transform(source, tmp_path / "no", map="b.{p*} <=> {p*}")
    reshard_mpi.transform(source, tmp_path / "wrapped", map="b.{p*} <=> {p*}", reverse=True)
    assert_held(tmp_path / "wrapped", {"b.a.w": floats(2)})
    with pytest.raises(MapError, match="both directions"):
        reshard_mpi.transform(source, tmp_path / "no", map=map_of(tmp_path, '[[map]]\neq = "a.{p*} <=> {p*}"'))


@pytest.mark.parametrize(
    ("equation", "told"), [("a <=> b <=> c", "the end of the equation"), ("a <=>", ""), ("a [x] <=> b [y]", "'")]
)
def test_an_equation_that_is_none_is_quoted(tmp_path: Path, equation: str, told: str) -> None:
    source = source_of(tmp_path, {"a": floats(2)})
    said = refused("transform", source, tmp_path / "dst", "--map", equation)
    assert told in said and equation in said


def test_a_file_may_have_the_name_of_an_equation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a <=> b").write_text('[[map]]\neq = "a <=> c"')
    reshard_mpi.transform(source_of(tmp_path, {"a": floats(2)}), tmp_path / "dst", map="a <=> b")
    assert_held(tmp_path / "dst", {"c": floats(2)})


@pytest.mark.parametrize("maps", [5, [5], [""], ""])
def test_what_is_no_map_is_refused(tmp_path: Path, maps: Any) -> None:
    source = source_of(tmp_path, {"a": floats(2)})
    with pytest.raises(reshard_mpi.ReshardError, match="map"):
        reshard_mpi.transform(source, tmp_path / "dst", map=maps)


def test_more_text_than_a_record_holds_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a": floats(2)})
    with pytest.raises(reshard_mpi.ReshardError, match="too long together"):
        reshard_mpi.transform(source, tmp_path / "dst", map=["a <=> b", "b <=> a"] * 2500)
    assert not (tmp_path / "dst").exists()


def test_arrays_of_a_rank_go_through_all(tmp_path: Path) -> None:
    source = source_of(tmp_path, TENSORS)
    loaded = reshard_mpi.load_rank(0, source, map=[RENAMED, JOINED])
    assert all(np.array_equal(loaded[name], array) for name, array in MADE.items()) and loaded.keys() == MADE.keys()


@pytest.mark.slow
def test_cuts_that_cross_each_other_too_often_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map alone makes 75 boxes; together they would make 5,625, each of one element, where 4096 may be."""
    assert chain.MAX_PAIRS == box_pairs.MAX_PAIRS
    monkeypatch.setattr(chain, "MAX_PAIRS", 4096)
    source = source_of(tmp_path, {f"r.{n}": floats(75, first=n) for n in range(75)})
    maps = ["r.{n} [c] <=> all [n c]", "all [n c] <=> c.{c} [n]"]
    with pytest.raises(MapError, match="in several runs, with one map each"):
        reshard_mpi.transform(source, tmp_path / "dst", map=maps)
    assert_like_one_run_each(source, tmp_path, ["r.{n} [c] <=> all [n c]"])

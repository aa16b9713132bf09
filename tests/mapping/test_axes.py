"""Lengths of axes that shapes do not tell (`--axis`, [axes] with choices), and maps that include others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_shard
from support.command_line import done, refused
from support.examples import few, few_cases
from support.full_checkpoints import assert_held, floats, map_of, source_of

import reshard_mpi
from reshard_mpi import DifferenceError, MapError, TargetError, UsageError, WrongTypeError

PAD = "w [v h] <=> x [(v | m) h]"
W = floats(5, 2, first=1)
CHOICES = '[axes]\nm = ["a * b", "deep.c", 1]\n[[map]]\neq = "w [v h] <=> x [(v | m) h]"\n'


def padded(multiple: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.pad(W, ((0, -len(W) % multiple), (0, 0)))}


@pytest.mark.parametrize("axis", few(2, [{"m": 4}, "m=4", ["m=4"], [("m=4")], {"m": np.int64(4)}]))
def test_the_length_that_is_given(tmp_path: Path, axis: Any) -> None:
    reshard_mpi.transform(source_of(tmp_path, {"w": W}), tmp_path / "dst", map=PAD, axis=axis)
    assert_held(tmp_path / "dst", padded(4))


def test_several_on_the_command_line(tmp_path: Path) -> None:
    source, equation = source_of(tmp_path, {"w": floats(6, 5)}), "w [(a b) v] <=> x [(b a) (v | m)]"
    done("transform", source, tmp_path / "dst", "--map", equation, "--axis", "m=4", "--axis=a=3")
    expected = np.pad(floats(6, 5).reshape(3, 2, 5).swapaxes(0, 1).reshape(6, 5), ((0, 0), (0, 3)))
    assert_held(tmp_path / "dst", {"x": expected})
    back = ("transform", tmp_path / "dst", tmp_path / "back", "--map", equation, "--reverse", "--axis", "v=5")
    done(*back, "--axis", "b=2", "--axis", "m=8")
    assert_held(tmp_path / "back", {"w": floats(6, 5)})


def test_it_goes_before_what_the_map_says(tmp_path: Path) -> None:
    path = map_of(tmp_path, f"[axes]\nm = 2\n[[map]]\neq = '{PAD}'\n")
    reshard_mpi.transform(source_of(tmp_path, {"w": W}), tmp_path / "dst", map=path, axis={"m": 7})
    assert_held(tmp_path / "dst", padded(7))


def test_without_it_the_error_names_it(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": W, "q": floats(6)})
    with pytest.raises(MapError, match="nothing tells how long 'm' is") as error:
        reshard_mpi.plan(source, map=PAD)
    assert "--axis m=LENGTH" in str(error.value)
    with pytest.raises(MapError, match=r"does not tell how long 'a' and 'b' are.*--axis NAME=LENGTH"):
        reshard_mpi.plan(source, map="q [(a b)] <=> x [(b a)]")


def test_shapes_that_contradict_it(tmp_path: Path) -> None:
    write_shard({"x": np.pad(W, ((0, 3), (0, 0)))}, tmp_path / "x.safetensors")
    with pytest.raises(MapError, match="is 8 long, not 6") as error:
        reshard_mpi.plan(tmp_path / "x.safetensors", map=PAD, axis={"m": 3, "v": 5}, reverse=True)
    assert "--axis m=3 --axis v=5" in str(error.value)
    write_shard({"w": W}, tmp_path / "w.safetensors")
    for axis, said in (({"m": 6}, "--axis m=6 contradicts"), ({"v": 4, "m": 4}, "--axis m=4 --axis v=4")):
        with pytest.raises(MapError) as error:
            reshard_mpi.plan(tmp_path / "w.safetensors", map=PAD, axis=axis, like=tmp_path / "x.safetensors")
        assert said in str(error.value)
    plan = reshard_mpi.plan(tmp_path / "w.safetensors", map=PAD, axis={"m": 8}, like=tmp_path / "x.safetensors")
    assert plan.targets
    stacked = {f"l.{number}.w": floats(2) for number in range(3)}
    with pytest.raises(MapError, match=r"there are 3 tensors for 'l', not 2[\s\S]*--axis l=2"):
        reshard_mpi.plan(source_of(tmp_path, stacked), map="l.{l}.w [h] <=> w [l h]", axis={"l": 2})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axis": "m=0"}, "m=0"),
        ({"axis": "m=-1"}, "NAME=LENGTH"),
        ({"axis": "m"}, "NAME=LENGTH"),
        ({"axis": "m=3x"}, "NAME=LENGTH"),
        ({"axis": ["m=3", "m=4"]}, "two lengths"),
        ({"axis": {"m": 0}}, "1 or more"),
        ({"axis": {"n": 3}}, "no axis of the map"),
        ({"axis": {"m": 3}, "map": None}, "belongs to a map"),
        ({"axis": {"m": 3}, "map": "w <=> x"}, "its equations have no axes"),
    ],
)
def test_what_is_no_length(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        reshard_mpi.transform(source_of(tmp_path, {"w": W}), tmp_path / "dst", **{"map": PAD, **options})
    assert not (tmp_path / "dst").exists()


def test_what_is_no_length_in_another_type(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": W})
    for axis in ({"m": "3"}, {"m": 3.0}, [3]):
        with pytest.raises(WrongTypeError):
            reshard_mpi.plan(source, map=PAD, axis=axis)
    assert "NAME=LENGTH" in refused("plan", tmp_path / "src", "--map", PAD, "--axis", "m:3", code=2)


def test_an_axis_of_one_of_several_maps(tmp_path: Path) -> None:
    maps = ["w <=> v", "v [a b] <=> x [(a | m) b]"]
    reshard_mpi.transform(source_of(tmp_path, {"w": W}), tmp_path / "dst", map=maps, axis={"m": 4})
    assert_held(tmp_path / "dst", padded(4))


def test_records_know_it(tmp_path: Path) -> None:
    source, equation = source_of(tmp_path, {"w": W}), "w [v h] <=> x [(v | m) (h | n)]"
    given: dict[str, Any] = {"map": equation, "forward": True}
    reshard_mpi.transform(source, tmp_path / "dst", **given, axis=["m=4", "n=1"])
    again = reshard_mpi.transform(source, tmp_path / "dst", **given, axis={"n": 1, "m": 4}, resume=True)
    assert again.targets[0].skipped
    with pytest.raises(TargetError, match="--axis 'm=16 n=1'"):
        reshard_mpi.transform(source, tmp_path / "dst", **given, axis={"n": 1, "m": 16}, resume=True)
    reshard_mpi.verify(source, tmp_path / "dst")
    reshard_mpi.verify(source, tmp_path / "dst", **given, axis={"n": 1, "m": 4})
    assert "--axis m=4 --axis n=1" in done("verify", source, tmp_path / "dst").err
    with pytest.raises((UsageError, DifferenceError), match="--axis"):
        reshard_mpi.verify(source, tmp_path / "dst", **given, axis={"n": 1, "m": 16})


def configured(tmp_path: Path, **values: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path / "config.json"


@pytest.mark.parametrize(
    ("config", "multiple"),
    [({"a": 2, "b": 3}, 6), ({"a": 2, "deep": {"c": 4}}, 4), ({"a": 2, "b": None, "deep": {"c": 7}}, 7)],
)
def test_the_first_choice_whose_keys_are_there(tmp_path: Path, config: dict[str, Any], multiple: int) -> None:
    path, source = map_of(tmp_path, CHOICES), source_of(tmp_path, {"w": W})
    report = reshard_mpi.transform(source, tmp_path / "dst", map=path, config=configured(tmp_path, **config))
    assert_held(tmp_path / "dst", padded(multiple))
    assert not any("padded" in note for note in report.notes)


@pytest.mark.parametrize("config", [None, {}, {"a": 2}, {"a": None, "b": 2, "deep": 3}])
def test_the_usual_length_is_said(tmp_path: Path, config: dict[str, Any] | None) -> None:
    path, source = map_of(tmp_path, CHOICES), source_of(tmp_path, {"w": W})
    options = {} if config is None else {"config": configured(tmp_path, **config)}
    report = reshard_mpi.transform(source, tmp_path / "dst", map=path, **options)
    assert_held(tmp_path / "dst", padded(1))
    (note,) = (note for note in report.notes if "not padded" in note)
    assert "--axis m=LENGTH" in note and "a * b, or deep.c" in note and "x" in note


def test_the_usual_length_gives_way(tmp_path: Path) -> None:
    path, source = map_of(tmp_path, CHOICES), source_of(tmp_path, {"w": W})
    write_shard({"x": np.zeros((8, 2), np.float32)}, tmp_path / "like.safetensors")
    reshard_mpi.transform(source, tmp_path / "dst", map=path, like=tmp_path / "like.safetensors")
    assert_held(tmp_path / "dst", padded(8))
    reshard_mpi.transform(source, tmp_path / "other", map=path, axis={"m": 3})
    assert_held(tmp_path / "other", padded(3))
    back = reshard_mpi.transform(tmp_path / "other", tmp_path / "back", map=path, axis={"v": 5})
    assert_held(tmp_path / "back", {"w": W})
    assert not any("nothing tells" in note for note in back.notes)
    with pytest.raises(MapError, match="how much of dimension 0 of x is padding cannot be told: give 'v'"):
        reshard_mpi.plan(tmp_path / "other", map=path)


def test_a_usual_length_that_is_no_multiple(tmp_path: Path) -> None:
    path = map_of(tmp_path, "[axes]\na = ['key', 3]\n[[map]]\neq = 'w [(a b)] <=> x [(b a)]'\n")
    report = reshard_mpi.transform(source_of(tmp_path, {"w": floats(6)}), tmp_path / "dst", map=path, forward=True)
    assert_held(tmp_path / "dst", {"x": floats(6).reshape(3, 2).T.ravel()})
    assert any("made with a = 3" in note and "key" in note for note in report.notes)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ("['a']", "no key 'a'"),
        ("['a', 'b']", "no key 'a'"),
        ("['two / three', 1]", "no integer"),
        ("['a', 0]", "no length"),
        ("['two', 'a +']", None),
        ("['a', 'b +']", "cannot be computed"),
        ("[[1]]", "no length"),
        ("[]", "no length"),
        ("['text', 1]", "no integer"),
    ],
)
def test_choices_that_are_none(tmp_path: Path, choices: str, said: str | None) -> None:
    path = map_of(tmp_path, f"[axes]\nm = {choices}\n[[map]]\neq = '{PAD}'\n")
    config = configured(tmp_path, two=2, three=3, text="word")
    source = source_of(tmp_path, {"w": W})
    if said is None:
        assert reshard_mpi.plan(source, map=path, config=config).targets
        return
    with pytest.raises(MapError, match=said):
        reshard_mpi.plan(source, map=path, config=config)


def included(folder: Path, **texts: str) -> Path:
    """Write maps that are named by the arguments; return the first one."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder / f"{next(iter(texts))}.toml"


def rename(old: str, new: str) -> str:
    return f"[[map]]\neq = '{old} [a] <=> {new} [a]'\noptional = true\n"


def test_a_map_that_includes_others(tmp_path: Path) -> None:
    path = included(
        tmp_path / "maps",
        main="include = ['parts/one.toml', 'two.toml']\n[axes]\nm = 4\n" + rename("w", "first"),
        parts__one="description = 'x'\ninclude = ['deeper/three.toml']\n" + rename("w", "never") + rename("q", "one"),
        parts__deeper__three="include = ['../../two.toml']\n" + rename("r", "three"),
        two="[axes]\nm = 2\n[[map]]\neq = 's [v] <=> two [(v | m)]'\n",
    )
    tensors = {name: floats(3, first=10 * number) for number, name in enumerate("wqrs")}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=path)
    w, q, r, s = tensors.values()
    assert_held(tmp_path / "dst", {"first": w, "one": q, "three": r, "two": np.pad(s, (0, 1))})


def test_a_record_knows_what_a_map_includes(tmp_path: Path) -> None:
    path = included(tmp_path / "maps", main="include = ['two.toml']\n", two=rename("w", "one"))
    source = source_of(tmp_path, {"w": floats(3)})
    reshard_mpi.transform(source, tmp_path / "dst", map=path)
    assert reshard_mpi.transform(source, tmp_path / "dst", map=path, resume=True).targets[0].skipped
    (tmp_path / "maps" / "two.toml").write_text("# another\n" + rename("w", "one"))
    with pytest.raises(TargetError, match="as it was then"):
        reshard_mpi.transform(source, tmp_path / "dst", map=path, resume=True)


@pytest.mark.parametrize(
    ("include", "said"),
    [
        ("['none.toml']", "cannot be read"),
        ("['main.toml']", "includes itself"),
        ("['parts/one.toml']", "includes itself"),
        ("['../outside.toml']", "lies elsewhere"),
        ("['link.toml']", "lies elsewhere"),
        ("['/absolute.toml']", "lies elsewhere"),
        ("['parts']", "is no file"),
        ("'two.toml'", "include is no list"),
        ("[3]", "include is no list"),
        ("['']", "include is no list"),
        ("['empty.toml']", "no \\[\\[map\\]\\] entries"),
        ("['wrong.toml']", "no TOML"),
    ],
)
def test_includes_that_are_refused(tmp_path: Path, include: str, said: str) -> None:
    maps = tmp_path / "maps"
    path = included(maps, main=f"include = {include}\n", parts__one="include = ['../main.toml']\n", empty="", wrong="[")
    (tmp_path / "outside.toml").write_text(rename("w", "x"))
    (maps / "link.toml").symlink_to(tmp_path / "outside.toml")
    with pytest.raises(MapError, match=said) as error:
        reshard_mpi.plan(source_of(tmp_path, {"w": W}), map=path)
    assert "maps" in str(error.value)


BEHIND = (
    "[axes]\nn = {}\n[[map]]\neq = 'layer.{{=n}} [a] <=> last [a]'\n[[map]]\neq = 'layer.{{l}} [a] <=> l.{{l}} [a]'\n"
)


@few_cases(
    2,
    ("given", "config", "options", "number"),
    [
        ("3", None, {}, 3),
        ("'count'", {"count": 2}, {}, 2),
        ("'count + 1'", {"count": 0}, {}, 1),
        ("['count', 3]", None, {}, 3),
        ("['count', 3]", {"count": 1}, {}, 1),
        ("'count'", None, {"axis": {"n": 1}}, 1),
    ],
)
def test_a_length_in_a_name(
    tmp_path: Path, given: str, config: dict[str, int] | None, options: dict[str, Any], number: int
) -> None:
    """Names of it are told from others, in either direction."""
    tensors = {f"layer.{at}": floats(3, first=10 * at) for at in range(4)}
    path = included(tmp_path / "maps", main="include = ['two.toml']\n" + rename("w", "x"), two=BEHIND.format(given))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        options = {**options, "config": tmp_path / "config.json"}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=path, **options)
    made = {f"l.{at}": values for at, values in enumerate(tensors.values()) if at != number}
    assert_held(tmp_path / "dst", made | {"last": tensors[f"layer.{number}"]})
    reshard_mpi.transform(tmp_path / "dst", tmp_path / "back", map=path, **options)
    assert_held(tmp_path / "back", tensors)


@pytest.mark.parametrize("given", ["'count'", "3\nm = 4"])
def test_a_length_in_a_name_that_nothing_tells(tmp_path: Path, given: str) -> None:
    path = tmp_path / "main.toml"
    path.write_text(BEHIND.format(given).replace("{=n}", "{=n}" if "count" in given else "{=k}"))
    with pytest.raises(MapError, match=r"length of an axis that nothing tells") as error:
        reshard_mpi.plan(source_of(tmp_path, {"layer.0": W}), map=path)
    assert "--axis" in str(error.value) and "main.toml" in str(error.value)


def test_a_map_by_a_link_includes_what_is_beside_it(tmp_path: Path) -> None:
    path = included(tmp_path / "maps", main="include = ['two.toml']\n", two=rename("w", "one"))
    (tmp_path / "link.toml").symlink_to(path)
    reshard_mpi.transform(source_of(tmp_path, {"w": floats(3)}), tmp_path / "dst", map=tmp_path / "link.toml")
    assert_held(tmp_path / "dst", {"one": floats(3)})

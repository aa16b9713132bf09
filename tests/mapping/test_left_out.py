"""What a map, `--exclude` or `--unlisted drop` leaves out, what goes with it, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import read_shard, write_ranks
from support.command_line import done, refused, run_here
from support.examples import few, few_cases
from support.full_checkpoints import Tensors, assert_held, floats, held, map_of, source_of

import reshard_mpi
from reshard_mpi import MapError

DROPPED = "[[map]]\neq = 'a [x] <=> b [x]'\n[[map]]\ndrop = '{}'\noptional = true\n"


def test_a_pattern_that_a_parameter_matches_does_not_take_its_state(tmp_path: Path) -> None:
    tensors: Tensors = {"x.a": floats(2), "moments.x.a": floats(2, first=5), "x.b": floats(3), "moments.x.b": floats(3)}
    text = "[[map]]\neq = 'x.a <=> y.a'\n[[map]]\ndrop = '*x.*'\noptional = true\n"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, text))
    assert_held(tmp_path / "dst", {"y.a": tensors["x.a"], "moments.y.a": tensors["moments.x.a"]})


@pytest.mark.parametrize(
    ("dropped", "gone"),
    [("moments.*", {"moments.a", "moments.c"}), ("c", {"c", "moments.c", "ema.c", "adam_m.ema.c"})],
    ids=["named by itself", "with the state of its state"],
)
def test_which_state_is_dropped(tmp_path: Path, dropped: str, gone: set[str]) -> None:
    names = ("a", "moments.a", "c", "moments.c", "ema.c", "adam_m.ema.c")
    tensors: Tensors = {name: floats(2, first=at) for at, name in enumerate(names)}
    map_path = map_of(tmp_path, DROPPED.format(dropped))
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path)
    kept = {name: array for name, array in tensors.items() if name not in gone}
    new = {"a": "b", "moments.a": "moments.b"}
    assert_held(tmp_path / "dst", {new.get(name, name): array for name, array in kept.items()})


def test_what_must_be_zero_to_be_dropped_has_a_state_of_zeros(tmp_path: Path) -> None:
    tensors: Tensors = {"a": floats(2), "junk": np.zeros(2, np.float32), "moments.junk": np.ones(2, np.float32)}
    map_path = map_of(tmp_path, DROPPED.format("junk") + "zeros = true\n")
    with pytest.raises(MapError, match=r"moments\.junk is left out, and is not zero"):
        reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_state_of_what_is_excluded_goes_with_it(tmp_path: Path, is_mapped: bool) -> None:
    name = "b" if is_mapped else "a"
    tensors: Tensors = {"a": floats(2), "moments.a": floats(2), "optimizer.a.step": np.array(3, np.int64)}
    tensors |= {"c": floats(3), "moments.c": floats(3)}
    map_path = map_of(tmp_path, "[[map]]\neq = 'a <=> b'")
    options = ["--map", f"{map_path}"] if is_mapped else []
    source = source_of(tmp_path, tensors)
    said = done("transform", f"{source}", f"{tmp_path}/dst", *options, "--exclude", name)
    assert f"left out: {name}\n" in said.err
    assert f"whose state they are: moments.{name}, optimizer.{name}.step\n" in said.err
    assert_held(tmp_path / "dst", {"c": tensors["c"], "moments.c": tensors["moments.c"]})


def test_a_state_may_be_all_that_is_taken(tmp_path: Path) -> None:
    tensors: Tensors = {"a": floats(2), "moments.a": floats(2, first=3)}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", include="moments.*")
    assert_held(tmp_path / "dst", {"moments.a": tensors["moments.a"]})


FILLED = "[[map]]\neq = '{{p*}}.mean <=> {{p*}}.mm'\n[[map]]\ndrop = '*.cnt'\n[[map]]\nside = 'left'\n{}"
COUNT = "fill = { name = '{p*}.cnt', shape = [], type = 'int64', beside = '{p*}.%s' }\n"


def test_what_is_made_up_beside_what_is_nowhere_is_refused(tmp_path: Path) -> None:
    """Else it would count as making up what the other direction leaves out."""
    source = source_of(tmp_path, {"bn.mm": floats(3)})
    with pytest.raises(MapError, match="made nowhere") as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, FILLED.format(COUNT % "zzz")))
    assert "{p*}.zzz" in str(error.value) and "line 5, [[map]] 3" in str(error.value)
    assert not (tmp_path / "dst").exists()
    text = FILLED.format(COUNT % "zzz") + "optional = true\n"
    reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, text))
    assert_held(tmp_path / "dst", {"bn.mean": floats(3)})


def test_what_is_made_up_may_be_nowhere_with_its_equation(tmp_path: Path) -> None:
    """As where a network has no BatchNorm."""
    text = "[[map]]\neq = 'a <=> b'\n" + FILLED.format(COUNT % "mean").replace("mm'", "mm'\noptional = true")
    reshard_mpi.transform(source_of(tmp_path, {"b": floats(3)}), tmp_path / "dst", map=map_of(tmp_path, text))
    assert_held(tmp_path / "dst", {"a": floats(3)})


ONES = "[[map]]\neq = '{p*}.mean <=> {p*}.mm'\n[[map]]\nfill = { name = '{p*}.gamma', value = 1, beside = '{p*}.mm' }\n"


@pytest.mark.parametrize("way", few(1, ["exclude", "drop", "exclude, other map"]))
@pytest.mark.parametrize("begin", ["model.", "net.model."])
@pytest.mark.parametrize("is_torch", few(1, [True, False]))
def test_state_by_a_part_of_the_name_goes_with_what_is_left_out(
    tmp_path: Path, way: str, begin: str, is_torch: bool
) -> None:
    """The model is below a key, and the state goes by the names below that: all files of FSDP are so."""

    def saved(*names: str) -> Tensors:
        made: Tensors = {}
        for name in names:
            state = (f"optim.state.{name}.exp_avg", f"optim.state.{name}.step") if is_torch else (f"adam_m.{name}",)
            made |= {f"{begin}{name}": floats(3, 2)} | dict(zip(state, (floats(3, 2), floats(1))))
        return made

    tensors = saved("0.weight", "2.weight", "2.0.weight", "head.weight")
    # Another model has a parameter that is called so; one that is not there has none of these.
    tensors |= {"critic.head.weight": floats(3, 2), "adam_m.x.0.weight": floats(3, 2), "rng": floats(2)}
    out = [f"{begin}0.weight", f"{begin}head.weight"]
    text = "[[map]]\neq = 'rng <=> noise'\n" + "".join(f"[[map]]\ndrop = '{glob}'\n" for glob in out) * (way == "drop")
    options: dict[str, Any] = {} if way == "exclude" else {"map": map_of(tmp_path, text), "forward": True}
    options |= {} if way == "drop" else {"exclude": out}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", **options)
    gone = {*out, *(name for name in saved("0.weight") if not name.startswith(begin))}
    new = {} if way == "exclude" else {"rng": "noise"}
    assert_held(tmp_path / "dst", {new.get(name, name): tensors[name] for name in tensors if name not in gone})


@pytest.mark.parametrize("word", few(2, ["state", "momentum", "ema", "velocity", "prev"]))
@pytest.mark.parametrize("way", ["exclude", "drop"])
@pytest.mark.parametrize("begin", few(2, ["", "model.", "module.model."]))
def test_a_module_that_is_called_as_state_is_may_not_be_that_of_another(
    tmp_path: Path, begin: str, way: str, word: str
) -> None:
    tensors: Tensors = {f"{begin}{module}.proj.weight": floats(3, 2) for module in ("action", word)}
    tensors |= {f"{begin}fc.weight": floats(2), "noise": floats(4)}
    out = f"{begin}action.proj.weight"
    text = f"[[map]]\neq = 'noise <=> other'\n[[map]]\ndrop = '{out}'\n"
    options: dict[str, Any] = {"exclude": out} if way == "exclude" else {"map": map_of(tmp_path, text), "forward": True}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", **options)
    new = {} if way == "exclude" else {"noise": "other"}
    assert_held(tmp_path / "dst", {new.get(name, name): tensors[name] for name in tensors if name != out})


@pytest.mark.parametrize("way", ["exclude", "drop"])
@pytest.mark.parametrize("begin", few(1, ["net.", "model.action.", "action.", "model."]))
def test_what_may_be_a_module_or_state_of_another_is_refused_by_name(tmp_path: Path, begin: str, way: str) -> None:
    """Two modules of one form, or a model below a key of any name beside the moments of its parameters."""
    out, other = f"{begin}proj.weight", f"{'model.' * begin.startswith('model')}velocity.proj.weight"
    tensors: Tensors = {out: floats(3, 2), other: floats(3, 2), "noise": floats(4)}
    source = source_of(tmp_path, tensors)

    def without(*names: str) -> None:
        text = "".join(f"[[map]]\ndrop = '{name}'\n" for name in names)
        how: dict[str, Any] = (
            {"exclude": names} if way == "exclude" else {"map": map_of(tmp_path, text), "forward": True}
        )
        reshard_mpi.transform(source, tmp_path / "dst", **how)

    with pytest.raises(MapError) as refused:
        without(out)
    assert out in str(refused.value) and f"--exclude '{other}'" in str(refused.value)
    without(out, other)
    reshard_mpi.transform(source, tmp_path / "kept", include=[other, "noise"])
    assert held(tmp_path / "dst").keys() == {"noise"} and held(tmp_path / "kept").keys() == {other, "noise"}


WORDS = few(2, ["state", "step", "ema", "momentum"])


def of_two(word: str, state: str, begin: str = "") -> Tensors:
    """Return two parameters with a moment each: one has the other's name behind a word for state."""
    names = [f"{word}.proj.w", "proj.w", "rest.w"]
    moments: Tensors = {state.format(name): floats(4, 3, first=50 + at) for at, name in enumerate(names[:2])}
    return moments | {f"{begin}{name}": floats(4, 3, first=at) for at, name in enumerate(names)}


@pytest.mark.parametrize("way", few(2, ["{0} <=> z.new", "{0} [a b] <=> {0} [(a | 8) b]", "drop"]))
@few_cases(1, ("word", "state"), [*((word, "moment1.{}") for word in ("state", "momentum")), ("ema", "{}.exp_avg")])
@pytest.mark.parametrize("is_longer", few(1, [True, False]))
def test_a_parameter_with_moments_of_its_own_is_no_state_of_another(
    tmp_path: Path, word: str, state: str, way: str, is_longer: bool
) -> None:
    tensors, name = of_two(word, state), f"{word}.proj.w" if is_longer else "proj.w"
    text = f"drop = '{name}'\n[[map]]\neq = 'rest.w <=> rest.v'" if way == "drop" else f"eq = '{way.format(name)}'"
    source, map_path = source_of(tmp_path, tensors), map_of(tmp_path, f"[[map]]\n{text}\n")
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, forward=True)
    new = {"rest.w": "rest.v"} if way == "drop" else {name: "z.new", state.format(name): state.format("z.new")}
    made = {} if way == "drop" else {each: tensors[each] for each in (name, state.format(name))}
    if "|" in way:
        made = {each: np.concatenate([array, np.zeros((4, 3), np.float32)]) for each, array in made.items()}
        new = {}
    made = {each: array for each, array in tensors.items() if each not in (name, state.format(name))} | made
    assert_held(tmp_path / "dst", {new.get(each, each): array for each, array in made.items()})


@pytest.mark.parametrize("begin", ["", "model.", "net."])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("is_longer", [True, False])
def test_of_two_parameters_each_goes_with_its_own_moment(
    tmp_path: Path, begin: str, word: str, is_longer: bool
) -> None:
    tensors, name = of_two(word, "adam_m.{}", begin), f"{word}.proj.w" if is_longer else "proj.w"
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", exclude=f"{begin}{name}")
    assert held(tmp_path / "dst").keys() == tensors.keys() - {f"{begin}{name}", f"adam_m.{name}"}


def test_state_by_one_word_is_that_of_a_model_below_a_key_for_models(tmp_path: Path) -> None:
    tensors: Tensors = {
        "model.a.w": floats(3, 2),
        "velocity.a.w": floats(3, 2),
        "model.b": floats(2),
        "critic.x": floats(1),
    }
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", exclude="model.a.*")
    assert held(tmp_path / "dst").keys() == {"model.b", "critic.x"}


def test_what_is_made_up_can_be_excluded_or_taken_alone(tmp_path: Path) -> None:
    source, map_path = source_of(tmp_path, {"bn.mean": floats(3)}), map_of(tmp_path, ONES)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, exclude="*.gamma")
    assert_held(tmp_path / "dst", {"bn.mm": floats(3)})
    reshard_mpi.transform(source, tmp_path / "ones", map=map_path, include="*.gamma")
    assert_held(tmp_path / "ones", {"bn.gamma": np.ones(3, np.float32)})


def test_a_map_that_does_nothing_is_refused(tmp_path: Path) -> None:
    source, like = source_of(tmp_path, {"fc.weight": floats(4, 2)}), tmp_path / "like"
    write_ranks({0: {"fc.weight": floats(4, 2)}}, like, "safetensors")
    text = "[[map]]\neq = '{p*}.weight [v h] <=> {p*}.table [v h]'\nlike = 'needed'\n"
    with pytest.raises(MapError, match="the map does nothing"):
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, text), like=like, forward=True)
    with pytest.raises(MapError, match="in either direction") as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, text), like=like)
    assert "give the --like that" in str(error.value) and not (tmp_path / "dst").exists()


def test_a_type_for_all_settles_parts_of_different_types(tmp_path: Path) -> None:
    tensors: Tensors = {"a": floats(2), "b": floats(2, first=5).astype(np.float16)}
    source, map_path = source_of(tmp_path, tensors), map_of(tmp_path, "[[map]]\neq = 'a [x], b [y] <=> c [(x + y)]'")
    with pytest.raises(MapError, match="different types") as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    assert "or --dtype that" in str(error.value)
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, dtype="fp64")
    assert_held(tmp_path / "dst", {"c": np.array([0, 1, 5, 6], np.float64)})


def test_a_zero_below_zero_in_padding_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": np.array([1, 2, 3, -0.0], np.float32)})
    text = "[axes]\nv = 3\n[[map]]\neq = 'w [(v | 4)] <=> k [v]'"
    with pytest.raises(MapError, match="the padding of w is not zero") as error:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, text))
    assert "-0.0 at element [3]" in str(error.value) and "all bits 0" in str(error.value)


def ranks_of(folder: Path) -> tuple[Path, list[str]]:
    """Write two ranks that have values of their own, beside a tensor that is cut; return the options as well."""
    shards = {r: {"w": floats(2, 3, first=6 * r), "rng": np.array([r + 5, 77], np.int64)} for r in range(2)}
    write_ranks(shards, folder / "src", "safetensors")
    for name, parameter, dim in (("src", "w", 0), ("dst", "k", 1)):
        spec = f"mesh = {{ a = 2 }}\n[[parameter]]\nmatch = '{parameter}'\nsplit = {{ {dim} = ['a'] }}\n"
        (folder / f"{name}.toml").write_text(spec.replace("a = 2", "a = 2" if name == "src" else "a = 3"))
    map_path = map_of(folder, "[[map]]\neq = 'w [a b] <=> k [a b]'")
    strategies = ["--src-strategy", f"{folder}/src.toml", "--dst-strategy", f"{folder}/dst.toml"]
    return folder / "src", [*strategies, "--map", f"{map_path}"]


def test_what_the_target_strategy_drops_is_not_said_to_stay(tmp_path: Path) -> None:
    source, options = ranks_of(tmp_path)
    said = run_here("plan", f"{source}", f"{tmp_path}/dst", *options)
    assert "makes 1 tensor\n" in said.out + said.err
    assert "no equation takes rng" in said.out + said.err and "one of them was taken" in said.out + said.err
    assert "rng" not in done("transform", f"{source}", f"{tmp_path}/dst", *options, "--unlisted", "drop").err


def test_what_is_excluded_is_not_said_to_stay_and_not_compared(tmp_path: Path) -> None:
    source, options = ranks_of(tmp_path)
    said = done("transform", f"{source}", f"{tmp_path}/dst", *options, "--exclude", "rng")
    assert "left out: rng" in said.err and "no equation" not in said.err
    assert "each rank has its own" not in said.err


def test_verify_and_diff_say_what_they_do_not_look_at(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a": floats(2), "junk": floats(3)})
    map_path = map_of(tmp_path, DROPPED.format("junk"))
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    for command in ("verify", "diff"):
        assert "left out: junk" in done(command, f"{source}", f"{tmp_path}/dst", "--map", f"{map_path}").err, command


CUT = "mesh = {{ t = 2 }}\n[[parameter]]\nmatch = '{}'\nsplit = {{ 0 = ['t'] }}\n[[parameter]]\nmatch = '*'\n"


def half_lost(folder: Path) -> tuple[Path, list[str]]:
    """Write two ranks that have halves of `e`, the second of which is lost; return the option as well."""
    shards = {rank: {"a": floats(3), "e": floats(2, 2, first=4 * rank), "f": floats(2, 2)} for rank in range(2)}
    write_ranks(shards, folder / "src", "safetensors")
    (folder / "src/rank_1/checkpoint_1.safetensors").unlink()
    (folder / "src.toml").write_text(CUT.format("e"))
    return folder / "src", ["--src-strategy", f"{folder}/src.toml"]


@pytest.mark.parametrize("choice", few(1, [["--exclude", "e"], ["--include", "a", "--include", "f"]]))
@pytest.mark.parametrize("is_mapped", few(1, [False, True]))
def test_a_lost_shard_of_what_is_left_out_refuses_nothing(tmp_path: Path, choice: list[str], is_mapped: bool) -> None:
    source, options = half_lost(tmp_path)
    if is_mapped:
        map_path = map_of(tmp_path, "[[map]]\neq = 'f [x y] <=> f [y x]'")
        options += ["--map", f"{map_path}", "--forward"]
    assert "left out: e" in done("transform", f"{source}", f"{tmp_path}/dst", *options, *choice).err
    assert_held(tmp_path / "dst", {"a": floats(3), "f": floats(2, 2).T if is_mapped else floats(2, 2)})
    done("verify", f"{source}", f"{tmp_path}/dst", *options, *choice)


@few_cases(
    2,
    "text",
    [
        "eq = 'e [x y] <=> g [y x]'",
        "eq = 'f [x y], e [z y] <=> g [(x + z) y]'",
        "copy = true\neq = 'g <=> f, e'\n",
        "eq = 'a <=> b'\n[[map]]\ndrop = 'e'\noptional = true\nzeros = true",
        "eq = 'a <=> b'",
    ],
)
def test_a_lost_shard_of_what_is_needed_refuses_the_run(tmp_path: Path, text: str) -> None:
    source, options = half_lost(tmp_path)
    options += ["--map", f"{map_of(tmp_path, '[[map]]' + chr(10) + text)}"]
    options += ["--reverse" if "copy" in text else "--forward"]
    for command in ("transform", "plan"):
        said = run_here(command, f"{source}", f"{tmp_path}/dst", *options)
        assert said.code == 3 and "no source holds a part of 'e'" in said.err, said
    assert "shards of 1 of 2 ranks" in said.err and not (tmp_path / "dst").exists()


def test_what_is_excluded_need_not_be_alike(tmp_path: Path) -> None:
    """Two ranks differ in a tensor that no strategy lists, and that is too large to be a rank's own."""
    shards = {rank: {"e": floats(2, 2, first=4 * rank), "u": floats(40, 40, first=rank)} for rank in range(2)}
    write_ranks(shards, tmp_path / "src", "safetensors")
    (tmp_path / "src.toml").write_text(CUT.format("e").rpartition("[[parameter]]")[0])
    options = ["--src-strategy", f"{tmp_path}/src.toml"]
    assert "no copies of each other" in refused("transform", f"{tmp_path}/src", f"{tmp_path}/dst", *options)
    done("transform", f"{tmp_path}/src", f"{tmp_path}/dst", *options, "--exclude", "u")
    assert_held(tmp_path / "dst", {"e": floats(4, 2)})


STACKED = "[[map]]\neq = 'model.layers.{l}.w [a b] <=> net.w [l b a]'\n"


@few_cases(1, "state", ["optim.exp_avg.{}", "optim/exp_avg/{}", "optimizer.state.{}.exp_avg", "model.adam_m.{}"])
def test_state_named_after_a_part_of_a_parameters_name_is_no_state_that_stays(tmp_path: Path, state: str) -> None:
    """It would be that of a parameter that is no longer there as it was."""
    tensors: Tensors = {f"model.layers.{number}.w": floats(2, 3, first=number) for number in range(2)}
    states = {state.format(f"layers.{number}.w"): floats(2, 3, first=9 + number) for number in range(2)}
    source, map_path = source_of(tmp_path, tensors | states), map_of(tmp_path, STACKED)
    with pytest.raises(MapError, match=r"state of model\.layers\.0\.w would stay as it is") as caught:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_path)
    assert "map.toml" in str(caught.value) and not (tmp_path / "dst").exists()
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, include="net.*")
    assert_held(tmp_path / "dst", {"net.w": np.stack([array.T for array in tensors.values()])})


@pytest.mark.parametrize("copy", ["model_ema", "ema"])
@pytest.mark.parametrize("way", ["renamed", "turned"])
def test_state_named_after_a_part_that_a_model_and_its_copy_have_does_not_stay(
    tmp_path: Path, copy: str, way: str
) -> None:
    """Whichever of them it is of, neither is as it was."""
    tensors: Tensors = {f"{model}.{n}.w": floats(2, 3, first=n) for model in ("model", copy) for n in range(2)}
    source = source_of(tmp_path, tensors | {f"optim.state.{n}.w.exp_avg": floats(2, 3, first=9 + n) for n in range(2)})
    new = "{p*}.w [o i] <=> {p*}.kernel [o i]" if way == "renamed" else "{p*}.w [o i] <=> {p*}.w [i o]"
    map_path = map_of(tmp_path, f"[[map]]\neq = '{new}'\n")
    with pytest.raises(MapError, match=r"state of model\.0\.w would stay as it is"):
        reshard_mpi.transform(source, tmp_path / "dst", map=map_path, forward=True)
    reshard_mpi.transform(source, tmp_path / "dst", exclude="optim.*", map=map_path, forward=True)
    assert len(held(tmp_path / "dst")) == 4


@pytest.mark.parametrize(
    "state", ["optimizer.state.{}.exp_avg_sq_row", "exp_avg_sq_col.{}.moment", "exp_avg_sq_row.{}", "exp_avg_sq_row_{}"]
)
def test_state_of_another_shape_than_its_parameter_does_not_stay(tmp_path: Path, state: str) -> None:
    """As Adafactor's, of rows and of columns: it would be that of a parameter that is no longer there as it was."""
    tensors: Tensors = {f"model.layers.{number}.w": floats(2, 3, first=number) for number in range(2)}
    states = {state.format(name): floats(2) for name in tensors} | {state.format("other"): floats(2)}
    source = source_of(tmp_path, tensors | states | {"other": floats(3)})
    with pytest.raises(MapError, match=r"state of model\.layers\.0\.w would stay as it is") as caught:
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, STACKED))
    assert "map.toml" in str(caught.value) and not (tmp_path / "dst").exists()
    out = state.format("model.*")
    reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, STACKED), exclude=out)
    assert {"net.w", "other", state.format("other")} == held(tmp_path / "dst").keys()


@pytest.mark.parametrize("word", ["exp_avg", "accu_grads"])
def test_an_equation_of_parameters_does_not_turn_state_of_one_that_it_does_not_take(tmp_path: Path, word: str) -> None:
    """`{p*}` is a word for state there: nothing is before the parameter's own name."""
    source = source_of(tmp_path, {"weight": floats(2, 3), f"{word}.weight": floats(2, 3, first=9)})
    with pytest.raises(MapError, match="an equation takes state of weight for a parameter"):
        reshard_mpi.transform(source, tmp_path / "dst", map="{p*}.weight [o i] <=> {p*}.kernel [i o]", forward=True)
    turned = f"{word}.weight [o i] <=> {word}.weight [i o]"
    reshard_mpi.transform(source, tmp_path / "dst", map=turned, forward=True)  # it is about state
    assert held(tmp_path / "dst")[f"{word}.weight"].shape == (3, 2)


def test_counts_of_steps_follow_their_parameters(tmp_path: Path) -> None:
    tensors: Tensors = {"net.a": floats(2), "exp_avg.net.a": floats(2), "state_step.net.a": np.array([7], np.int64)}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map="net.{p*} <=> x.{p*}", forward=True)
    assert_held(tmp_path / "dst", {name.replace("net.", "x."): array for name, array in tensors.items()})


@pytest.mark.parametrize("is_padded", [True, False])
def test_state_of_another_shape_does_not_stay_where_padding_changes_the_parameter(
    tmp_path: Path, is_padded: bool
) -> None:
    """As Adafactor's, which has a number for each row."""
    source = source_of(tmp_path, {"emb.w": floats(4, 3), "optim.state.emb.w.row_var": floats(4, 1)})
    how: dict[str, Any] = {"map": f"emb.w [v h] <=> emb.w [(v | {8 if is_padded else 4}) h]", "forward": True}
    if is_padded:
        with pytest.raises(MapError, match=r"state of emb\.w would stay as it is"):
            reshard_mpi.transform(source, tmp_path / "dst", **how)
    else:
        reshard_mpi.transform(source, tmp_path / "dst", **how)
        assert len(held(tmp_path / "dst")) == 2


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (2, 3, 1)])
@pytest.mark.parametrize("eq", few(1, ["w [{}] <=> w [{}]", "x.w [{}] <=> w [{}]"]))
def test_sums_over_rows_that_have_the_shape_of_a_parameter_by_chance_do_not_follow_it(
    tmp_path: Path, eq: str, shape: tuple[int, ...]
) -> None:
    """Adafactor has sums over rows and over columns: of a column they are like it, and a single element."""
    name = eq.partition(" ")[0]
    sums = {"row_var": floats(*shape[:-1], 1), "col_var": floats(*shape[:-2], 1, shape[-1]), "exp_avg": floats(*shape)}
    states: Tensors = {f"optim.state.{name}.{key}": array for key, array in (sums | {"step": floats(1)}).items()}
    source = source_of(tmp_path, {name: floats(*shape)} | states)
    axes = "abc"[: len(shape)]
    how: dict[str, Any] = {"map": eq.format(" ".join(axes), " ".join(axes[::-1])), "forward": True}
    with pytest.raises(MapError, match=r"(row|col)_var"):
        reshard_mpi.transform(source, tmp_path / "dst", **how)
    for key in ("row_var", "col_var"):
        with pytest.raises(MapError, match=r"(row|col)_var"):
            reshard_mpi.transform(source, tmp_path / "dst", **how, exclude=f"*.{key}")
    reshard_mpi.transform(source, tmp_path / "dst", **how, exclude="*_var")
    assert held(tmp_path / "dst")["optim.state.w.exp_avg"].shape == shape[::-1]
    if len(shape) == 2:
        reshard_mpi.transform(source, tmp_path / "renamed", map=f"{name} <=> v", forward=True)
        assert {f"optim.state.v.{key}" for key in (*sums, "step")} < held(tmp_path / "renamed").keys()


def test_tensors_that_are_like_no_state_of_a_parameter_stay(tmp_path: Path) -> None:
    """For a lack of an optimizer's word, of the shape, or since an equation takes no such parameter."""
    tensors: Tensors = {"model.layers.0.w": floats(2, 3), "head.layers.0.w": floats(2, 3), "other.v": floats(4)}
    tensors |= {"optim.exp_avg.layers.0.w": floats(6), "optim.exp_avg.v": floats(4), "step": np.array(3, np.float32)}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_of(tmp_path, STACKED))
    kept = {name: array for name, array in tensors.items() if name != "model.layers.0.w"}
    assert_held(tmp_path / "dst", {"net.w": tensors["model.layers.0.w"].T[None], **kept})


@pytest.mark.parametrize("name", few(2, ["state.0.weight", "state.weight", "ema.weight"]))
@pytest.mark.parametrize("begin", few(1, ["", "model."]))
def test_a_module_that_is_called_as_state_is_stays_where_an_equation_turns_another(
    tmp_path: Path, begin: str, name: str
) -> None:
    own = f"{begin}fc.weight"
    tensors: Tensors = {own: floats(3, 3), f"{begin}{name}": floats(3, 3, first=9), f"{begin}norm.bias": floats(3)}
    how: dict[str, Any] = {"map": f"{own} [o i] <=> {begin}proj.kernel [i o]", "forward": True}
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", **how)
    kept = {other: array for other, array in tensors.items() if other != own}
    assert_held(tmp_path / "dst", {f"{begin}proj.kernel": tensors[own].T, **kept})


def test_state_of_a_parameter_that_stays_or_gets_another_type_alone_stays(tmp_path: Path) -> None:
    tensors: Tensors = {"model.q.w": floats(2, 3), "model.k.w": floats(2, 3, first=10)}
    tensors |= {f"optim.state.{name}.w.exp_avg": floats(2, 3, first=20) for name in ("q", "k")}
    map_path = map_of(tmp_path, "[[map]]\neq = 'model.q.w [o i] <=> model.q.w [o i] : bf16'\n")
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path, forward=True)
    assert_held(tmp_path / "dst", tensors | {"model.q.w": tensors["model.q.w"].astype(ml_dtypes.bfloat16)})
    with pytest.raises(MapError, match=r"state of model\.q\.w would stay as it is"):
        text = "[[map]]\neq = 'model.q.w [o i] <=> model.q.w [i o]'\n"
        reshard_mpi.transform(tmp_path / "src", tmp_path / "no", map=map_of(tmp_path, text), forward=True)


def test_state_of_a_parameter_that_stays_is_of_no_other_that_ends_its_name(tmp_path: Path) -> None:
    """Of a model at the root: `weight` ends the name of `up.weight`."""
    tensors: Tensors = {"q.weight": floats(4, 4), "up.weight": floats(8, 4)}
    tensors |= {"optim.state.q.weight.exp_avg": floats(4, 4, first=20)}
    tensors |= {f"optim.state.up.weight.precond_{n}": floats(8 - 4 * n, 8 - 4 * n, first=50) for n in (0, 1)}
    map_path = map_of(tmp_path, "[[map]]\neq = 'q.weight [o i] <=> q.kernel [i o]'\n")
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path)
    turned = {name.replace("q.weight", "q.kernel"): array.T for name, array in tensors.items() if "q.weight" in name}
    assert_held(tmp_path / "dst", turned | {name: array for name, array in tensors.items() if "up" in name})


def test_state_in_groups_of_hdf5_follows(tmp_path: Path) -> None:
    """Their names are joined by slashes."""
    tensors: Tensors = {"layers.0.w": floats(2, 3), "optim/exp_avg/layers.0.w": floats(2, 3, first=9)}
    map_path = map_of(tmp_path, "[[map]]\neq = 'layers.{l}.w [a b] <=> net.w [l b a]'\n")
    reshard_mpi.transform(source_of(tmp_path, tensors), tmp_path / "dst", map=map_path)
    w, state = tensors.values()
    assert_held(tmp_path / "dst", {"net.w": w.T[None], "optim/exp_avg/net.w": state.T[None]})


@pytest.mark.parametrize("state", ["moments.{}", "{}.exp_avg", "ema.{}", "optim.state.{}.exp_avg"])
@pytest.mark.parametrize(
    ("text", "new_names"),
    [
        ("a.w <=> a.v; {p*} <=> {p*}", {"a.w": "a.v", "b.w": "b.w"}),
        ("a.{p*} <=> x.{p*}; {p*}.w <=> {p*}.u", {"a.w": "x.w", "b.w": "b.u"}),
        ("{p*}.w <=> {p*}.u; b.{p*} <=> y.{p*}; b.n <=> n", {"a.w": "a.u", "b.w": "b.u", "b.n": "y.n"}),
        ("{p*} <=> net.{p*}", {"a.w": "net.a.w", "b.w": "net.b.w"}),
    ],
)
def test_state_follows_its_parameter_whatever_else_its_name_fits(
    tmp_path: Path, state: str, text: str, new_names: dict[str, str]
) -> None:
    tensors = {name: floats(2, 3, first=10 * number) for number, name in enumerate(new_names)}
    states = {state.format(name): array + 100 for name, array in tensors.items()}
    entries = "".join(
        f"[[map]]\neq = '{equation}'\n" + "optional = true\n" * (equation == "b.n <=> n")
        for equation in text.split("; ")
    )
    reshard_mpi.transform(
        source_of(tmp_path, tensors | states), tmp_path / "dst", map=map_of(tmp_path, entries), forward=True
    )
    expected = {new: tensors[name] for name, new in new_names.items()}
    assert_held(tmp_path / "dst", expected | {state.format(new): expected[new] + 100 for new in expected})


@pytest.mark.parametrize(
    ("text", "goes_along"),
    [
        ("model.a.{p*} <=> model.x.{p*}", False),
        ("model.a.{p*} <=> model.x.{p*}; {p*}.w <=> {p*}.u", False),
        ("model.a.w <=> model.a.v; {p*} <=> {p*}", False),
        ("{p*}.w <=> {p*}.u", True),
        ("model.a.w <=> model.a.v; {p*}.a.w <=> {p*}.a.v", True),
        ("model.a.w <=> model.a.v; ema.a.w <=> ema.a.v; {p*} <=> {p*}", True),
    ],
)
def test_state_with_a_part_of_its_parameters_name_goes_along_or_is_refused(
    tmp_path: Path, text: str, goes_along: bool
) -> None:
    names = ("model.a.w", "model.b.w", "ema.a.w", "ema.b.w")
    tensors = {name: floats(2, 3, first=10 * number) for number, name in enumerate(names)}
    entries = "".join(f"[[map]]\neq = '{equation}'\n" for equation in text.split("; "))
    source, path = source_of(tmp_path, tensors), map_of(tmp_path, entries)
    if goes_along:
        reshard_mpi.transform(source, tmp_path / "dst", map=path, forward=True)
        made = held(tmp_path / "dst")
        of_model, of_ema = (
            {name.removeprefix(begin) for name in made if name.startswith(begin)} for begin in ("model.", "ema.")
        )
        assert of_model == of_ema and len(made) == 4
    else:
        with pytest.raises(MapError, match=r"state of model\.a\.w"):
            reshard_mpi.transform(source, tmp_path / "dst", map=path, forward=True)


@pytest.mark.parametrize("state", ["adam_m.{}", "optim.adam_m.{}", "exp_avg.{}"])
@pytest.mark.parametrize("target", ["{p*}.kernel [i o]", "{p*}.weight [i o]", "{p*}.kernel [o i]"])
def test_state_of_a_parameter_that_no_equation_takes_is_not_taken_for_another(
    tmp_path: Path, target: str, state: str
) -> None:
    """`weight` lies in no module, so `{p*}.weight` is not its name, and is that of its state."""
    tensors: Tensors = {"weight": floats(2, 2), "fc.weight": floats(2, 2, first=5)}
    states = {state.format(name): array + 10 for name, array in tensors.items()}
    source, text = source_of(tmp_path, tensors | states), f"[[map]]\neq = '{{p*}}.weight [o i] <=> {target}'\n"
    with pytest.raises(MapError, match=r"takes state of weight for a parameter[^$]*and stay as it is"):
        reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, text), forward=True)
    both = f"[[map]]\neq = 'weight [o i] <=> {target.replace('{p*}.', '')}'\n" + text
    reshard_mpi.transform(source, tmp_path / "dst", map=map_of(tmp_path, both), forward=True)
    made = held(tmp_path / "dst")
    for name, array in tensors.items():
        new = name.replace("weight", "kernel") if "kernel" in target else name
        turned = array if "[o i]" in target else array.T
        assert np.array_equal(made[new], turned)
        assert np.array_equal(made[state.format(new)], turned + 10)


@pytest.mark.parametrize("equation", ["m.w <=> m.v", "m.w [o i] <=> m.v [i o]"])
@pytest.mark.parametrize("second", ["optim.adam_m.m.{}", "ema.exp_avg.m.{}", "adam_m.ema.m.{}"])
def test_state_of_state_that_follows_follows_it(tmp_path: Path, second: str, equation: str) -> None:
    first = second.partition(".")[2]
    names = ("m.{}", first, second)
    tensors: Tensors = {each.format("w"): floats(2, 3, first=10 * at) for at, each in enumerate(names)}
    others: Tensors = {each.format("u"): floats(2, 3, first=50) for each in names}
    source, map_path = source_of(tmp_path, tensors | others), map_of(tmp_path, f"[[map]]\neq = '{equation}'\n")
    reshard_mpi.transform(source, tmp_path / "dst", map=map_path, forward=True)
    turned = {each.format("v"): tensors[each.format("w")] for each in names}
    assert_held(
        tmp_path / "dst", others | {name: array.T if "[" in equation else array for name, array in turned.items()}
    )


_TURN = "model.{p*}.kernel [x y] <=> model.{p*}.weight [y x]"
_CUT = 'mesh = { card = 2 }\n[[parameter]]\nmatch = "model.fc.kernel"\nsplit = { 0 = ["card"] }\n'


@pytest.mark.parametrize(
    "options",
    [
        {"map": _TURN, "forward": True},
        {"map": "{p*}.kernel [x y] <=> {p*}.weight [y x]", "forward": True},
        {"map": "model.{p*} <=> net.{p*}", "forward": True},
        {"map": "model.fc.kernel [x y] <=> model.fc.weight [y x]", "forward": True},
        {"map": "{p*} <=> net.{p*}", "forward": True},
        {"exclude": "model.fc.*"},
        {"exclude": "model.fc.*", "map": "model.b.{p*} <=> model.c.{p*}", "forward": True},
        {"dst_strategy": _CUT},
        {"dst_strategy": _CUT.replace("model.", "")},
        {"dst_strategy": _CUT.replace("model.fc", "model.[a-f]?"), "unlisted": "drop"},
        {"dst_strategy": f'{_CUT.replace("model.fc", "*.fc")}[[parameter]]\nmatch = "*"\n'},
    ],
)
@pytest.mark.parametrize("state", few(1, ["optimizer.exp_avg.{}", "exp_avg.model.{}", "adam_m.model.{}", "ema.{}"]))
def test_slashes_divide_names_as_dots_do(tmp_path: Path, state: str, options: dict[str, Any]) -> None:
    """Groups of HDF5 have slashes between the parts of names."""
    kernels = {name: floats(2, 4) + number for number, name in enumerate(("fc.kernel", "b.kernel"))}
    dotted = {f"model.{name}": array for name, array in kernels.items()}
    dotted |= {state.format(name): array + 50 for name, array in kernels.items()}
    results: list[Any] = []
    for mark in (".", "/"):
        folder = tmp_path / f"{ord(mark)}"
        folder.mkdir()
        source = source_of(folder, {name.replace(".", mark): array for name, array in dotted.items()})
        asked = {key: text.replace(".", mark) if isinstance(text, str) else text for key, text in options.items()}
        if "dst_strategy" in asked:
            (folder / "cut.toml").write_text(asked["dst_strategy"])
            asked["dst_strategy"] = folder / "cut.toml"
        try:
            report = reshard_mpi.transform(source, folder / "dst", **asked)
        except reshard_mpi.ReshardError as error:
            results.append(error.problem.replace(mark, "."))
            continue
        ranks = [read_shard(Path(target.path)) for target in report.targets]
        results.append([{n.replace(mark, "."): tensor for n, tensor in own.items()} for own in ranks])
    assert results[0] == results[1]


@pytest.mark.parametrize("mark", [".", "/"])
def test_a_type_for_all_leaves_counts_in_groups(tmp_path: Path, mark: str) -> None:
    counts = {
        f"opt{mark}{key}": np.array(100_001, np.float32) for key in ("global_step", "beta1_power", "learning_rate")
    }
    source = source_of(tmp_path, counts | {f"fc{mark}w": floats(3)})
    reshard_mpi.transform(source, tmp_path / "dst", dtype="bf16")
    found = held(tmp_path / "dst")
    assert {name for name, array in found.items() if array.dtype == np.float32} == {*counts}

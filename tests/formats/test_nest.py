"""Nested dictionaries as names and one text, and back."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard_mpi.formats.manifest import NEST
from reshard_mpi.formats.nest import flatten_tree, nodes, rebuild_tree
from reshard_mpi.formats.nest.nodes import ORDERED_DICT, SET, Call, Dict, Global, Unreadable, decoded, parsed, written
from reshard_mpi.formats.nest.rebuild_tree import first_difference


class Tensor(NamedTuple):
    """A leaf."""

    number: int


def is_tensor(value: Any) -> bool:
    return type(value) is Tensor


def shown(value: Any) -> Any:
    """Return a tree in a form that can be compared: records compare by identity, and no number with itself."""
    match value:
        case Dict():
            return "dict", [(shown(key), shown(part)) for key, part in value.pairs()]
        case Call():
            items = None if value.items is None else [shown(item) for item in value.items]
            flat = None if value.flat is None else [(shown(key), shown(part)) for key, part in value.pairs()]
            made = value.function, value.is_new, shown(value.state), items, flat
            return "call", [shown(argument) for argument in value.args], made
        case float():
            return "float", value.hex() if math.isfinite(value) else str(value)
        case list() | tuple() if type(value) in (list, tuple):
            return type(value).__name__, [shown(item) for item in value]
    return type(value).__name__, value


def dictionary(**entries: Any) -> Dict:
    return Dict([part for pair in entries.items() for part in pair])


def there_and_back(root: Any) -> tuple[flatten_tree.Flattened, Any]:
    flattened = flatten_tree.flatten(root, is_tensor)
    return flattened, rebuild_tree.rebuild(dict(flattened.tensors), flattened.strings)


KEYS = st.one_of(st.sampled_from(["a", "b", "a.b", "", ".", "0", "w"]), st.integers(-2, 3), st.booleans(), st.none())
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just(Global("torch", "bfloat16")),
)


@st.composite
def trees(draw: st.DrawFn) -> Any:
    count = 0

    def tensor() -> Tensor:
        nonlocal count
        count += 1
        return Tensor(count)

    def pairs(depth: int) -> list[Any]:
        keys = draw(st.lists(KEYS, max_size=4, unique_by=lambda key: (type(key), key)))
        flat = []
        for key in keys:
            # What is under any other key has no name, so there must be no tensor in it.
            flat += [key, value(depth + 1) if type(key) in (str, int) else draw(PLAIN)]
        return flat

    def value(depth: int) -> Any:
        kind = draw(
            st.sampled_from(["tensor", "plain"] if depth > 3 else ["tensor"] * 3 + ["plain", "dict"] * 2 + MORE)
        )
        match kind:
            case "tensor":
                return tensor()
            case "plain":
                return draw(PLAIN)
            case "dict":
                return Dict(pairs(depth))
            case "list" | "tuple":
                items = [value(depth + 1) for _ in range(draw(st.integers(0, 3)))]
                return items if kind == "list" else tuple(items)
        made = Call(
            ORDERED_DICT if kind == "ordered" else Global("argparse", "Namespace"), (), is_new=kind != "ordered"
        )
        if kind == "ordered":
            made.flat = pairs(depth)
        if draw(st.booleans()):
            made.state = dictionary(**{name: value(depth + 1) for name in draw(st.sets(st.sampled_from(["s", "t.u"])))})
        return made

    return Dict(pairs(0))


MORE = ["list", "tuple", "ordered", "namespace"]


@given(root=trees(), random=st.randoms(use_true_random=False))
def test_there_and_back_is_the_identity(root: Any, random: Random) -> None:
    """In whatever order the shard has its tensors, if there is a nest."""
    try:
        flattened, again = there_and_back(root)
    except nodes.NestError as error:
        assert "the same name" in error.problem or "1 to" in error.problem
        return
    assert not flattened.left_out
    assert shown(again) == shown(root)
    if NEST in flattened.strings:
        random.shuffle(flattened.tensors)
        assert shown(rebuild_tree.rebuild(dict(flattened.tensors), flattened.strings)) == shown(root)


@given(names=st.lists(st.text(max_size=6), unique=True))
def test_orders_are_names(names: list[str]) -> None:
    text = written({"dict": []}, names)
    root, order = parsed(text)
    assert root == {"dict": []} and order is not None and [*decoded(order)] == names
    assert parsed(text).in_order(["another name", *reversed(names)]) == [*names, "another name"]


def test_names_are_joined_by_dots() -> None:
    model = Call(ORDERED_DICT, ())
    model.flat = ["layer.0.weight", Tensor(0), "layer.0.bias", Tensor(1)]
    state = Dict([0, dictionary(step=Tensor(2), exp_avg=Tensor(3)), 1, dictionary(step=Tensor(4))])
    root = dictionary(
        epoch=3, model=model, optimizer=dictionary(state=state, groups=[dictionary(lr=0.1, params=[0, 1])])
    )
    flattened, again = there_and_back(root)
    assert flattened.tensors == [
        ("model.layer.0.weight", Tensor(0)),
        ("model.layer.0.bias", Tensor(1)),
        ("optimizer.state.0.step", Tensor(2)),
        ("optimizer.state.0.exp_avg", Tensor(3)),
        ("optimizer.state.1.step", Tensor(4)),
    ]
    assert shown(again) == shown(root)
    assert json.loads(flattened.strings[NEST]) == {
        "nest": {
            "dict": [
                ["epoch", 3],
                ["model", {"call": ["collections", "OrderedDict", []], "dict": []}],
                [
                    "optimizer",
                    {
                        "dict": [
                            ["state", {"dict": [[0, {"dict": []}], [1, {"dict": []}]]}],
                            ["groups", [{"dict": [["lr", 0.1], ["params", [0, 1]]]}]],
                        ]
                    },
                ],
            ]
        },
        "order": [0, "model.layer.0.weight", 14, "bias", 0, "optimizer.state.0.step", 18, "exp_avg", 16, "1.step"],
    }


def test_a_dictionary_of_tensors_and_texts_needs_no_nest() -> None:
    root = Dict(["a.b", Tensor(0), "w", Tensor(1), "note", "text"])
    flattened, again = there_and_back(root)
    assert flattened == ([("a.b", Tensor(0)), ("w", Tensor(1))], {"note": "text"}, ())
    assert shown(again) == shown(root)


@pytest.mark.parametrize(
    "root",
    [
        Dict(["note", "text", "w", Tensor(0)]),
        Dict([NEST, "text", "w", Tensor(0)]),
        Dict(["a", dictionary(b=dictionary(c=Tensor(0))), "a.b", dictionary(d=Tensor(1))]),
        Dict(["a.b", dictionary(c=Tensor(0)), "a", dictionary(b=dictionary(d=Tensor(1)))]),
    ],
    ids=[
        "a text before tensors",
        "a text called as the nest is",
        "paths that could be another's",
        "the other way round",
    ],
)
def test_what_names_alone_do_not_tell(root: Dict) -> None:
    _, again = there_and_back(root)
    assert shown(again) == shown(root)


def test_tensors_of_another_shard_have_a_place() -> None:
    """Stages of a pipeline have the nest of one of them, and tensors of all."""
    flattened = flatten_tree.flatten(dictionary(model=dictionary(w=Tensor(0)), epoch=1), is_tensor)
    again = rebuild_tree.rebuild({"model.x": Tensor(5), "other.y": Tensor(6)}, {**flattened.strings, "note": "text"})
    expected = dictionary(model=dictionary(x=Tensor(5)), epoch=1)
    expected.flat += ["other.y", Tensor(6), "note", "text"]
    assert shown(again) == shown(expected)


@pytest.mark.slow
def test_a_very_long_list_is_left_out_and_named() -> None:
    """Such as the order in which a sampler takes its data: the rest of the file is carried."""
    long, short, words = list(range(300_000)), list(range(200_000)), "x" * (1 << 22)
    numbered = Dict([part for number in range(200_000) for part in (number, 0.5)])
    root = dictionary(
        w=Tensor(0), sampler=dictionary(order=long, at=3), short=short, words=words, list=[tuple(long), 1]
    )
    root.flat += ["numbered", numbered]
    flattened, again = there_and_back(root)
    assert flattened.left_out == (
        "sampler.order: 300000 single values, more than 262144",
        "words: a text or bytes of 4194304, more than 2097152",
        "list.0: 300000 single values, more than 262144",
        "numbered: 400000 single values, more than 262144",
    )
    assert shown(again) == shown(dictionary(w=Tensor(0), sampler=dictionary(at=3), short=short, list=[None, 1]))


@pytest.fixture
def tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nest may hold a tenth of what it otherwise may, so that what is too large is made and tried soon."""
    for name in ("MAX_CHARACTERS", "MAX_TENSORS", "MAX_VALUES"):
        monkeypatch.setattr(flatten_tree, name, getattr(flatten_tree, name) // 10)
    monkeypatch.setattr(flatten_tree, "_MOST_ITEMS", tuple(most // 10 for most in flatten_tree._MOST_ITEMS))


@pytest.mark.slow
@pytest.mark.usefixtures("tenth")
def test_many_long_lists_are_left_out_where_all_together_are_too_large() -> None:
    root = dictionary(w=Tensor(0), short=[1, 2], **{f"x{number}": list(range(20_000)) for number in range(3)})
    flattened, again = there_and_back(root)
    assert flattened.left_out == tuple(f"x{number}: 20000 single values, more than 1638" for number in range(3))
    assert shown(again) == shown(dictionary(w=Tensor(0), short=[1, 2]))


@pytest.mark.slow
@pytest.mark.usefixtures("tenth")
def test_what_is_too_large_otherwise_is_refused_with_advice() -> None:
    pairs = [(number, number) for number in range(30_000)]
    with pytest.raises(nodes.NestError, match=r"too many|too much") as caught:
        flatten_tree.flatten(dictionary(w=Tensor(0), pairs=pairs), is_tensor)
    assert "save it without what is so large" in caught.value.remedy
    tensors = [Tensor(number) for number in range(2_000)]
    flattened = flatten_tree.flatten(dictionary(pairs=[*pairs[:15_000], list(range(10_000))], all=tensors), is_tensor)
    assert len(flattened.tensors) == len(tensors) and "pairs.15000" in flattened.left_out[0]


@pytest.mark.slow
def test_a_long_list_that_is_met_again_and_again_takes_no_longer() -> None:
    long = list(range(100_000))
    root = dictionary(w=Tensor(0), lists=[long] * 100_000)
    left_out = flatten_tree.flatten(root, is_tensor).left_out
    assert left_out[0] == "lists.0: 100000 single values, more than 16384" and len(left_out) == 64


def test_what_cannot_be_carried_is_named() -> None:
    odd = Call(Global("project", "Config"), (), is_new=True)
    odd.state = dictionary(w=Tensor(7), same=[Tensor(7)])
    root = dictionary(
        config=odd, w=Tensor(0), list=[odd, 1], meta=Unreadable("a tensor without elements", is_empty=True)
    )
    root.flat += [None, [odd], (1, (2,)), 5]
    flattened, again = there_and_back(root)
    assert flattened.left_out == (
        "config: an object of project.Config, with 2 tensors in it",
        "list.0: an object of project.Config, with 2 tensors in it",
        "meta: a tensor without elements",
        "None: what is under a key that is neither text nor number",
        "(1, (2,)): what is under a key that is neither text nor number",
    )
    assert shown(again) == shown(dictionary(w=Tensor(0), list=[None, 1]))


def test_tensors_that_cannot_be_read_are_refused() -> None:
    root = dictionary(w=Tensor(0), deep=[dictionary(sparse=Unreadable("a sparse tensor"))])
    with pytest.raises(nodes.NestError, match="tensors that cannot be read") as error:
        flatten_tree.flatten(root, is_tensor)
    assert error.value.got == "deep.0.sparse: a sparse tensor"
    with pytest.raises(nodes.NestError, match="tensors that cannot be read") as error:
        flatten_tree.flatten(Dict(["w", Tensor(0), True, Tensor(1)]), is_tensor)
    assert error.value.got == "True: what is under a key that is neither text nor number"


def test_an_object_of_what_cannot_be_carried_is_left_out_as_a_whole() -> None:
    made = Call(SET, ([Tensor(0)],))
    assert flatten_tree.flatten(dictionary(w=Tensor(1), odd=made), is_tensor).left_out == (
        "odd: an object of builtins.set, with 1 tensor in it",
    )


def long_keys() -> Any:
    root: Any = Dict()
    for _ in range(90):
        root = Dict(["k" * 100_000, root])
    return root


def own_part() -> Any:
    root: list[Any] = []
    root.append(root)
    return dictionary(a=root)


def deep() -> Any:
    root: Any = Dict()
    for _ in range(500):
        root = dictionary(a=root)
    return root


def doubled() -> Any:
    part: Any = [1]
    for _ in range(60):
        part = [part, part]
    return dictionary(a=part)


def doubled_arguments() -> Any:
    part: Any = (1,)
    for _ in range(60):
        part = (part, part)
    return dictionary(a=Call(SET, (part,)))


@pytest.mark.parametrize(
    "make, problem",
    [
        (own_part, "nested too deeply"),
        (long_keys, "joined by dots are too long"),
        (deep, "nested too deeply"),
        pytest.param(doubled, "too many values|too much", marks=pytest.mark.slow),
        pytest.param(doubled_arguments, "too many values", marks=pytest.mark.slow),
        (lambda: dictionary(a=dictionary(b=Tensor(0)), **{"a.b": Tensor(1)}), "the same name"),
        (lambda: Dict(["a", 1, "a", 2]), "a key twice"),
        (lambda: Dict(["", Tensor(0)]), "1 to 4096 bytes"),
        (lambda: Dict(["n" * 5000, Tensor(0)]), "1 to 4096 bytes"),
        (lambda: dictionary(a="x" * (5 << 20)), "too long, or too many"),
        (lambda: Dict([part for at in range(140_000) for part in (str(at), "")]), "too long, or too many"),
        (lambda: Tensor(0), "no dictionary"),
        (lambda: Call(Global("project", "Model"), ()), "no dictionary"),
    ],
)
def test_trees_that_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(nodes.NestError, match=problem):
        flatten_tree.flatten(make(), is_tensor)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"float":NaN}', "no JSON"),
        ('{"call":["os","system",["true"]]}', "no plain data"),
        ('{"global":["builtins","eval"]}', "no plain data"),
        ('{"dict":[["a",{"call":["subprocess","Popen",[]],"state":{"dict":[]}}]]}', "no plain data"),
        ('{"dict":[[["a"],1]]}', "no key"),
        ('{"dict":[[{"dict":[]},1]]}', "no plain value"),
        ('{"dict":[["a",1],["a",2]]}', "key twice"),
        ('{"dict":[["w"],["w"]]}', "key twice"),
        ('{"dict":[[0,{"dict":[]}],[0,null]]}', "key twice"),
        ('{"dict":[["w",3]]}', "the place of something else"),
        ('{"dict":[["' + "k" * 5000 + '",{"dict":[]}]]}', "joined by dots are too long"),
        ('[{"tensor":null}]', "not in the shard"),
        ("[]", "no place"),
        ("7", "no place"),
        ('{"dict":[],"more":1}', "unknown value"),
        ('{"set":[]}', "unknown value"),
        ('{"bytes":"?"}', "base64"),
        ('{"float":"7ff0"}', "a number that is none"),
        ('{"float":"3ff0000000000000"}', "finite"),
        ("[" * 200 + "]" * 200, "too many values or levels"),
        ('"' + "x" * (5 << 20) + '"', "too long"),
    ],
)
def test_texts_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(nodes.NestError, match=problem):
        rebuild_tree.rebuild({"w": Tensor(0)}, {NEST: text})


def test_a_string_and_a_tensor_need_a_place_each() -> None:
    with pytest.raises(nodes.NestError, match="the place of something else"):
        rebuild_tree.rebuild({"note": Tensor(0)}, {NEST: '{"dict":[]}', "note": "text"})


@pytest.mark.parametrize("root", [["w\ud800", Tensor(0)], ["w", Tensor(0), "note", "\udfff"]], ids=["name", "text"])
def test_what_is_no_unicode_text_is_refused(root: list[Any]) -> None:
    with pytest.raises(nodes.NestError, match="no Unicode text") as error:
        flatten_tree.flatten(Dict(root), is_tensor)
    assert "other keys" in error.value.remedy


def test_a_difference_of_the_whole_has_a_name() -> None:
    assert first_difference('{"dict":[]}', '{"call":[]}') == 'the whole (not there and {"call": []})'


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[" * 100_000, "9" * 10_000, '{"dict": [5]}', '{"tuple": 5}', '{"dict": [[]]}']
)
def test_differences_of_texts_that_are_no_nests(text: str) -> None:
    assert first_difference(text, text) == ""
    for pair in ((text, '{"dict":[]}'), ('{"dict":[]}', text), (None, text)):
        assert first_difference(*pair) == "the text of a nest is damaged"


@pytest.mark.parametrize("forged", ['{"dict":[["a",{"dict":[[]]}]]}', '{"dict":[5]}', '{"tuple":3}', '{"dict":7}', "3"])
def test_what_differs_in_a_forged_text_is_shown(forged: str) -> None:
    assert first_difference('{"dict":[]}', forged) and first_difference(forged, forged) == ""


def test_a_list_without_any_of_its_tensors_is_left_out_of_its_dictionary() -> None:
    groups = [[Tensor(3)], (Tensor(4), Tensor(5))]
    root = dictionary(a=Tensor(0), means=[Tensor(1), Tensor(2)], groups=groups, more=[Tensor(6), 7], none=[])
    flattened = flatten_tree.flatten(root, is_tensor)
    leaves = {name: leaf for name, leaf in flattened.tensors if name.startswith(("a", "more"))}
    kept = rebuild_tree.rebuild(leaves, flattened.strings)
    assert dict(kept.pairs()) == {"a": Tensor(0), "more": [Tensor(6), 7], "none": []}
    for lacking in ("more.0", "means.0"):
        some = {name: leaf for name, leaf in flattened.tensors if name != lacking}
        with pytest.raises(nodes.NestError, match="a part of a list of the nest is not in the shard"):
            rebuild_tree.rebuild(some, flattened.strings)

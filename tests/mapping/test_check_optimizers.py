"""The check of optimizers that a map has made: right ones pass, and each way to spoil one is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from reshard_mpi.errors import MapError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.mapping.box_pairs import Assembly, BoxPair, TermTensor
from reshard_mpi.mapping.check_optimizers import MadeTensors, require_own_state
from reshard_mpi.mapping.optimizers import Form, Optimizer
from reshard_mpi.mapping.result import DerivedTensor
from reshard_mpi.sharding.box import Box

FLOAT = BY_NAME["float32"]
SHAPE = (4, 4)
Made = dict[str, DerivedTensor]


def optimizer(form: Form, *names: str, numbers: tuple[int, ...] = (0, 1)) -> Optimizer:
    keys = dict(zip(names, numbers)) if form is Form.NUMBERS else {}
    return Optimizer("optim.", form, [], dict.fromkeys(names, 0), {}, keys)


def made(name: str, *sources: str, turned: bool = False, shape: tuple[int, ...] = SHAPE) -> DerivedTensor:
    """Return a tensor that has its sources one above another, each as it is or turned."""
    rows = shape[0] // len(sources) if shape else 0
    pairs = []
    for place in range(len(sources)):
        to = Box((place * rows, 0), (place * rows + rows, *shape[1:])) if shape else Box((), ())
        region = Box.whole(to.shape[::-1] if turned else to.shape)
        pairs.append(BoxPair(TermTensor(place, ()), region, to, (1, 0) if turned else None))
    of = {TermTensor(place, ()): source for place, source in enumerate(sources)}
    return DerivedTensor(name, FLOAT, Assembly(shape, tuple(pairs), ()), of, "")


def state_of(parameter: str, key: str, *sources: str, turned: bool = False) -> DerivedTensor:
    return made(f"optim.state.{parameter}.{key}", *(f"optim.state.{source}.{key}" for source in sources), turned=turned)


def renamed(form: Form, *, turned: bool = False) -> tuple[Optimizer, Made]:
    """Return what a right map makes of `model.a` and `model.b`: `model.x` and `model.y`."""
    old, new = ("0", "1") if form is Form.NUMBERS else ("a", "b"), ("x", "y")
    tensors = [made(f"model.{name}", f"model.{source}", turned=turned) for name, source in zip(new, "ab")]
    tensors += [state_of(name, "exp_avg", source, turned=turned) for name, source in zip(new, old)]
    single = [state_of(name, "step", source) for name, source in zip(new, old)]
    tensors += [each._replace(assembly=made("", "", shape=()).assembly) for each in single]
    target = optimizer(Form.FLAT if form is Form.FLAT else Form.NAMES, *new)
    return target, {tensor.name: tensor for tensor in tensors}


def check(form: Form, target: Optimizer, tensors: Made, *others: str) -> None:
    """Check what is made of `model.a` and `model.b`, beside which `others` of the source are left out."""
    names = ("model.a", "model.b") if form is Form.NUMBERS else ("a", "b")
    keys = ("0", "1") if form is Form.NUMBERS else ("a", "b")
    shapes = {f"model.{name}": SHAPE for name in "ab"}
    shapes |= {f"optim.state.{key}.exp_avg": SHAPE for key in keys} | {f"optim.state.{key}.step": () for key in keys}
    shapes |= dict.fromkeys(others, SHAPE)
    inventory = {name: TensorType(FLOAT, shape) for name, shape in shapes.items()}
    sources_of = {name: frozenset(tensor.sources.values()) for name, tensor in tensors.items()}
    pairs = [(target, optimizer(form, *names))]
    require_own_state(pairs, inventory, MadeTensors(tensors, sources_of), "x.pt")


FORMS = pytest.mark.parametrize("form", [Form.NUMBERS, Form.NAMES, Form.FLAT])


@FORMS
@pytest.mark.parametrize("turned", [False, True])
def test_what_a_right_map_makes_passes(form: Form, turned: bool) -> None:
    check(form, *renamed(form, turned=turned))


@FORMS
def test_a_model_with_the_same_names_may_be_left_out(form: Form) -> None:
    check(form, *renamed(form), "ema.a", "ema.b")


@FORMS
def test_parameters_put_together_have_both_states(form: Form) -> None:
    keys = ("0", "1") if form is Form.NUMBERS else ("a", "b")
    one = [made("model.x", "model.a", "model.b", shape=(8, 4)), made("model.y", "model.b")]
    both = [f"optim.state.{key}.exp_avg" for key in keys]
    of_state = made("optim.state.x.exp_avg", *both, shape=(8, 4))
    tensors = {tensor.name: tensor for tensor in (*one[:1], of_state)}
    target = optimizer(Form.NAMES, "x")
    check(form, target, tensors)
    with pytest.raises(MapError, match="another way"):
        check(form, target, tensors | {of_state.name: made(of_state.name, *both[::-1], shape=(8, 4))})


@FORMS
def test_state_that_keeps_a_shape_its_parameter_had_is_refused(form: Form) -> None:
    keys = ("0", "1") if form is Form.NUMBERS else ("a", "b")
    states = [made(f"optim.state.{name}.exp_avg", f"optim.state.{key}.exp_avg") for name, key in zip("xy", keys)]
    parameters = [made("model.x", "model.a"), made("model.y", "model.b")]
    tensors = {tensor.name: tensor for tensor in (*parameters, *states)}
    check(form, optimizer(Form.NAMES, "x", "y"), tensors)
    flat = made("model.y", "model.b")._replace(assembly=Assembly((2, 8), parameters[1].assembly.pairs, ()))
    with pytest.raises(MapError, match=r"state of model\.y would be arranged in another way"):
        check(form, optimizer(Form.NAMES, "x", "y"), tensors | {flat.name: flat})


def _swapped(tensors: Made) -> Made:
    x, y = tensors["optim.state.x.exp_avg"], tensors["optim.state.y.exp_avg"]
    return tensors | {x.name: x._replace(sources=y.sources), y.name: y._replace(sources=x.sources)}


def _lost(tensors: Made) -> Made:
    return {name: tensor for name, tensor in tensors.items() if name != "optim.state.y.exp_avg"} | {
        "optim.state.x.other": tensors["optim.state.y.exp_avg"]._replace(name="optim.state.x.other")
    }


def _of_nobody(tensors: Made) -> Made:
    state = tensors["optim.state.y.step"]
    return {name: tensor for name, tensor in tensors.items() if name != state.name} | {
        "optim.state.z.step": state._replace(name="optim.state.z.step")
    }


def _turned_alone(tensors: Made) -> Made:
    state = tensors["optim.state.x.exp_avg"]
    return tensors | {state.name: made(state.name, *state.sources.values(), turned=True)}


def _without_parameter(tensors: Made) -> Made:
    return {name: tensor for name, tensor in tensors.items() if name != "model.y"}


def _parameters_swapped(tensors: Made) -> Made:
    return tensors | {"model.x": made("model.x", "model.b"), "model.y": made("model.y", "model.a")}


@FORMS
@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (_swapped, "which is not made of it"),
        (_lost, "which is not made of it"),
        (_of_nobody, "of no parameter"),
        (_turned_alone, "another way"),
        (_without_parameter, r"model\.b is excluded, and its state is not"),
        (_parameters_swapped, "which is not made of it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_way_to_spoil_it_is_refused(form: Form, spoiled: Callable[[Made], Made], words: str) -> None:
    target, tensors = renamed(form)
    with pytest.raises(MapError, match=words):
        check(form, target, spoiled(tensors))


@FORMS
def test_a_part_without_the_state_that_the_other_has_is_refused(form: Form) -> None:
    """`model.a` is halved; one half has its moment."""
    target, tensors = renamed(form)
    tensors["model.y"] = made("model.y", "model.a")
    for key in ("exp_avg", "step"):
        del tensors[f"optim.state.y.{key}"]
    with pytest.raises(MapError, match="without state of"):
        check(form, target, tensors)

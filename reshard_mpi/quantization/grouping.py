"""Group the tensors of a checkpoint into quantized weights and their companions (`quantized_weights`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard_mpi.errors import SourceError
from reshard_mpi.formats.tensor_table import TensorType
from reshard_mpi.groups import grouped
from reshard_mpi.quantization.layouts import FLOATS, FLOATS_8_BIT, Fit, Misfit, SchemeLayout, SchemePart, fit, layout_of
from reshard_mpi.quantization.schemes import Quantization, quantization_of
from reshard_mpi.quantization.weights import CARRIED, Companion, QuantizedWeight, Relation, Scheme

# How tensors that hold elements are called, longer names first.
_STORED = ("weight_packed", "qweight", "weight", "_blocks")
_EIGHT_BITS = FLOATS_8_BIT | {"int8", "uint8"}
# Integers that models have which are not quantized.
_POSITIONS = ("position_ids", "relative_position_index", "num_batches_tracked", "tokens_per_expert")
_STATE = ".quant_state.bitsandbytes__"


def quantized_weights(
    config: Mapping[str, Any],
    kinds: Mapping[str, TensorType],
    where: str,
    stated_shape: Callable[[str], tuple[int, ...] | None],
) -> tuple[QuantizedWeight, ...]:
    """Group the tensors of a checkpoint into quantized weights, in the order of the checkpoint.

    Args:
        config: says how it is quantized, see `quantization_config_of`.
        kinds: of all its tensors, with their whole shapes, or all with the shapes of one rank's parts.
        where: the configuration, for messages.
        stated_shape: returns the values of a `weight_shape` tensor, None if they are not known.

    Raises StrategyError if the configuration says something impossible, SourceError if it contradicts the checkpoint,
    or if a weight has no scale, or a scale no weight.
    """
    tensors = _Tensors(kinds, quantization_of(config, where))
    tails = ((max(filter(name.endswith, CARRIED), key=len), name) for name in kinds if name.endswith(CARRIED))
    carried = grouped((name.removesuffix(tail), name) for tail, name in tails)
    weights: list[QuantizedWeight] = []
    fits: dict[object, Fit] = {}  # many weights have the same shapes
    for name in kinds:
        if (found := tensors.stored_weight(name)) is None:
            continue
        stated = None if "shape" not in found.names else stated_shape(found.names["shape"])
        key = (
            found.scheme,
            stated,
            tensors.shape(name),
            *((role, tensors.shape(each)) for role, each in found.names.items()),
        )
        if key not in fits:
            fits[key] = tensors.fitted(found, stated)
        shape, grain, dims = fits[key]
        companions = [Companion(role, each, dims[role]) for role, each in found.names.items()]
        for each in carried.get(found.prefix, ()):
            companions.append(Companion("carried", each, _carried_dims(tensors.shape(each), shape[:-2])))
        weights.append(QuantizedWeight(found.weight, name, shape, found.scheme, grain, tuple(companions)))
    weights += tensors.whole_weights()
    tensors.refuse_left_over({name for weight in weights for name in weight.names})
    if any(weight.scheme.kind == "whole" for weight in weights):
        order = {name: number for number, name in enumerate(kinds)}
        weights.sort(key=lambda weight: order[weight.stored])
    return tuple(weights)


class _NamedWeight(NamedTuple):
    """The names of the tensors of a weight."""

    weight: str
    name: str  # of the tensor that holds its elements
    prefix: str  # see `_companion_names`
    scheme: Scheme
    names: Mapping[str, str]  # of its companions, by role


class _Tensors(NamedTuple):
    """The tensors of a checkpoint, and what its configuration says of their modules."""

    kinds: Mapping[str, TensorType]
    quantization: Quantization

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.kinds[name]
        return kind.shape if kind.global_shape is None else kind.global_shape

    def refused(self, problem: str, *, expected: str, got: str, remedy: str) -> SourceError:
        return SourceError(problem, expected=expected, got=got, where=self.quantization.where, remedy=remedy)

    def contradiction(self, weight: str, name: str, expected: str, got: str) -> SourceError:
        return self.refused(
            f"the configuration contradicts the quantized weight {weight}: {name}",
            expected=expected,
            got=got,
            remedy="give the config.json that belongs to this checkpoint",
        )

    def incomplete(self, problem: str, expected: str, got: str) -> SourceError:
        remedy = "copy the checkpoint again with all its files, or give the config.json that belongs to it"
        return self.refused(f"incomplete checkpoint: {problem}", expected=expected, got=got, remedy=remedy)

    def stored_weight(self, name: str) -> _NamedWeight | None:
        """Return the weight whose elements a tensor holds; None if it is no such tensor, or none that may be cut."""
        dtype = self.kinds[name].dtype.name
        tail = next((tail for tail in _STORED if name.endswith(tail)), "")
        if not tail and dtype not in _EIGHT_BITS:
            return None
        prefix = name[: len(name) - len(tail)]
        module = prefix.rstrip("._")
        scheme = self.quantization.scheme(module)
        if scheme is None or scheme.kind == "whole":
            return None
        layout = layout_of(scheme)
        # Stacked experts of transformers are called `gate_up_proj` and `gate_up_proj_scale_inv`.
        is_bare = not tail and layout.stored.names == ("weight",)
        if is_bare:
            prefix += "_"
        elif tail not in layout.stored.names:
            return None
        names = {}
        for part in layout.parts:
            for each in _companion_names(part, prefix):
                if each in self.kinds:
                    names[part.role] = each
                    break
        if is_bare and not names and (dtype not in FLOATS_8_BIT or name.endswith(("_scale", "_scale_inv"))):
            return None
        if ("scale" not in names and dtype in FLOATS) or self.quantization.leaves_out(module):
            return None
        found = _NamedWeight(name if is_bare else f"{prefix}{layout.logical_name}", name, prefix, scheme, names)
        self.check(found, layout)
        return found

    def check(self, found: _NamedWeight, layout: SchemeLayout) -> None:
        """Refuse a weight if a companion is missing, or if a tensor has another type than the scheme's."""
        weight, name, _, scheme, names = found
        dtype = self.kinds[name].dtype.name
        if dtype not in layout.stored.dtypes:
            expected = f"{_any_of(layout.stored)} ({scheme.name})"
            raise self.contradiction(weight, f"the type of {name}", expected, dtype)
        if weight != name and weight in self.kinds:
            problem, expected = f"the weight {weight} is there twice", f"{weight}, or {name}"
            raise self.refused(problem, expected=expected, got="both", remedy="take out what is not used")
        for part in layout.parts:
            if part.required and part.role not in names:
                problem = f"the weight {weight} ({scheme.name}) has no {part.role.replace('_', ' ')}"
                expected = " or ".join(_companion_names(part, found.prefix))
                raise self.incomplete(problem, expected, ", ".join((name, *names.values())))
            if part.role in names and (dtype := self.kinds[names[part.role]].dtype.name) not in part.dtypes:
                expected = f"{_any_of(part)} ({scheme.name})"
                raise self.contradiction(weight, f"the type of {names[part.role]}", expected, dtype)

    def fitted(self, found: _NamedWeight, stated: tuple[int, ...] | None) -> Fit:
        """Return how the tensors of a weight belong together. Raises SourceError if the shape of one contradicts."""
        stored, shapes = self.shape(found.name), {role: self.shape(name) for role, name in found.names.items()}
        try:
            return fit(layout_of(found.scheme), stored, shapes, stated)
        except Misfit as misfit:
            name, beside = found.names.get(misfit.role, found.name), f" beside {found.name} {list(stored)}"
            got, expected = f"{list(self.shape(name))}", f"{misfit.expected} ({_told(found.scheme)})"
            got += beside if name != found.name else ""
            raise self.contradiction(found.weight, f"the shape of {name}", expected, got) from None

    def whole_weights(self) -> Iterator[QuantizedWeight]:
        """Yield a weight for each module whose scheme is only known by name: all tensors of it together."""
        quantization = self.quantization
        if not any(scheme.kind == "whole" for scheme, _ in quantization.groups):
            return
        modules: dict[str, list[str]] = {_module(name): [] for name in self.kinds}
        for name in self.kinds:
            # bitsandbytes stores what belongs to `experts.gate_up_proj` below that name
            modules[name if name in modules else _module(name)].append(name)
        for module, names in modules.items():
            scheme = quantization.scheme(module)
            if scheme is None or scheme.kind != "whole" or not any(map(self.is_quantized, names)):
                continue
            by_size = max(names, key=lambda name: self.kinds[name].size_bytes)
            stored = next((name for name in (f"{module}.weight", module) if name in names), by_size)
            weight = module if module in names else f"{module}.weight"
            companions = tuple(
                Companion("carried", name, (None,) * len(self.shape(name))) for name in names if name != stored
            )
            shape = self.shape(stored)
            yield QuantizedWeight(weight, stored, shape, scheme, tuple(max(1, size) for size in shape), companions)

    def is_quantized(self, name: str) -> bool:
        """Tell whether a tensor shows that its module is quantized, in whatever way."""
        if name.endswith(_POSITIONS):
            return False
        return self.kinds[name].dtype.name not in FLOATS | {"bool"} or name.rpartition(".")[2] == "weight_scale"

    def refuse_left_over(self, used: set[str]) -> None:
        """Refuse tensors of quantized weights that no weight has."""
        for name in _signs(self.kinds):
            if name not in used:
                module = _module(name)
                scheme_of_it = self.quantization.scheme(module)
                told = "no group has it" if scheme_of_it is None else scheme_of_it.name
                told = "it is left out" if self.quantization.leaves_out(module) else told
                got = f"{name} of type {self.kinds[name].dtype}, which is quantized in another way"
                raise self.contradiction(name, "how it is stored", f"as the configuration says: {told}", got)
        for name in self.kinds:
            if not used and name.endswith(_PLAIN_TOO) and self.kinds[name].dtype.name in FLOATS:
                continue  # as in a model that has been dequantized, beside the configuration from before
            if name in used or (orphan := self.missing_weight(name)) is None:
                continue
            scheme, weights = orphan
            problem = f"{name} ({scheme.name}) has no weight"
            raise self.incomplete(problem, " or ".join(weights), f"{name} alone")

    def missing_weight(self, name: str) -> tuple[Scheme, tuple[str, ...]] | None:
        """Return the scheme of a companion whose weight is not there, and the names that this may have.

        None: it is no companion, or its weight is there.
        """
        tail = next((tail for tail in _COMPANIONS if name.endswith(tail)), None)
        if tail is None:
            return None
        prefix = name[: len(name) - len(tail)]
        scheme = self.quantization.scheme(prefix.rstrip("._"))
        if scheme is None or scheme.kind == "whole" or self.quantization.leaves_out(prefix.rstrip("._")):
            return None
        layout = layout_of(scheme)
        dtype = self.kinds[name].dtype.name
        is_bare = tail == "_scale_inv"
        if name.endswith(CARRIED) or not any(
            (f"weight{tail}" if is_bare else tail) in part.names and dtype in part.dtypes for part in layout.parts
        ):
            return None
        weights = (prefix,) if is_bare else tuple(f"{prefix}{each}" for each in layout.stored.names)
        found = any(weight in self.kinds for weight in (*weights, prefix.rstrip("_")))
        return None if found else (scheme, weights)


# How companions are called that only quantized weights have, longer names first.
_COMPANIONS = (
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "_scale_inv",
    "_scales",
    "qzeros",
    "scales",
    "g_idx",
)


# How tensors of plain models may end as well: GPTQ's and AWQ's.
_PLAIN_TOO = "scales"


def _companion_names(part: SchemePart, prefix: str) -> list[str]:
    """Return how a companion of a weight may be called.

    Args:
        prefix: ends in "." or is empty; or is the name of a weight, as stacked experts have it, and "_".
    """
    names = [prefix + name for name in part.names]
    return names + [prefix + name.removeprefix("weight_") for name in part.names if prefix.endswith("_")]


def _carried_dims(shape: tuple[int, ...], experts: tuple[int, ...]) -> tuple[Relation | None, ...]:
    """Return that a tensor which is only carried is the same for all parts, but goes by experts if it has all."""
    if experts and shape[: len(experts)] == experts:
        return (*(Relation(number, 1) for number in range(len(experts))), *(None,) * (len(shape) - len(experts)))
    return (None,) * len(shape)


def _any_of(part: SchemePart) -> str:
    return " or ".join(sorted(part.dtypes))


def _told(scheme: Scheme) -> str:
    rows, columns = (size or "all" for size in scheme.block)
    order = ", any order" if scheme.act_order else ""
    return f"{scheme.name}, {scheme.bits} bits, a scale for {rows} rows and {columns} columns{order}"


def _module(name: str) -> str:
    """Return the module of a tensor; what libraries add lies below its weight (`weight.absmax`, `weight._data`)."""
    module, dot, _ = name.partition(".weight.")
    return module if dot else name.rpartition(".")[0]


def looks_quantized(kinds: Mapping[str, TensorType]) -> str | None:
    """Return the name of a tensor which shows that a checkpoint is quantized; None if none does."""
    return next(_signs(kinds), None)


def _signs(kinds: Mapping[str, TensorType]) -> Iterator[str]:
    """Yield the tensors that hold a quantized weight, by their own types and by the tensors beside them."""
    for name, kind in kinds.items():
        dtype = kind.dtype.name
        if dtype in FLOATS:
            continue
        beside: tuple[tuple[str, ...], ...] = ()
        if name.endswith("qweight"):
            prefix = name[: -len("qweight")]
            beside = ((f"{prefix}qzeros", f"{prefix}scales"),)
        elif name.endswith("weight_packed"):
            beside = ((f"{name[: -len('_packed')]}_scale",),)
        elif name.endswith("_blocks") and dtype == "uint8":
            scales = f"{name[: -len('_blocks')]}_scales"
            beside = ((scales,),) if scales in kinds and kinds[scales].dtype.name == "uint8" else ()
        elif name.endswith("_weight_qdata"):
            beside = ((f"{name[: -len('_qdata')]}_scale",),)
        elif dtype in _EIGHT_BITS:
            beside = ((f"{name}_scale_inv",), (f"{name}_scale",)) if name.endswith("weight") else ()
            beside += ((f"{name}_scale_inv",),) if dtype in FLOATS_8_BIT else ()
            beside += ((f"{name[: -len('weight')]}SCB",),) if name.endswith(".weight") else ()
            if _STATE in name:
                yield name
        if any(all(each in kinds for each in names) for names in beside):
            yield name

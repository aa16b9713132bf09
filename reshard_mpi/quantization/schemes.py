"""Read from a configuration how a checkpoint's weights are quantized (`quantization_of`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from reshard_mpi.errors import StrategyError
from reshard_mpi.groups import grouped
from reshard_mpi.quantization.weights import SCHEME_TEXT, Scheme

_INTEGER_BITS, _GPTQ_BITS = (2, 3, 4, 5, 6, 8), (2, 3, 4, 8)
_REMEDY = "give the config.json that belongs to this checkpoint"
# What compressed-tensors calls the types that store one element each.
_ONE_BY_ONE = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
_MX_GROUP, _NVFP4_GROUP = 32, 16


# How closely a target fits a module, from the closest on.
_NAME, _PATTERN, _CLASS, _ANY = 1, 2, 3, 4
_CLASS_NAME = re.compile(r"[A-Z]\w*\Z")


class Targets:
    """The modules that a configuration means.

    Names of modules (their ends, and the names that they lie below, count too), patterns (`re:.*experts.*`,
    `model.layers.*`), and classes (`Linear`).
    """

    def __init__(self, targets: Iterable[str], where: str) -> None:
        self.names: set[str] = set()
        self.patterns: list[re.Pattern[str]] = []
        self.classes: set[str] = set()
        wildcards: list[str] = []
        for target in targets:
            if target.startswith("re:"):
                try:
                    self.patterns.append(re.compile(target[len("re:") :]))
                except re.error as error:
                    got, expected = f"{target}: {error}", "re: and a regular expression"
                    raise StrategyError("a target is no pattern", expected=expected, got=got, where=where) from None
            elif "*" in target:
                wildcards.append(re.escape(target).replace(r"\*", ".*"))
            elif _CLASS_NAME.match(target):
                self.classes.add(target)
            else:
                self.names.add(target)
        if wildcards:  # hundreds at times: one for each layer
            self.patterns.append(re.compile(rf"(?:{'|'.join(wildcards)})\Z"))

    def closeness(self, module: str) -> int | None:
        """Return how closely the closest target fits a module; None if none does."""
        parts = module.split(".")
        if self.names and any(
            ".".join(parts[: number + 1]) in self.names or ".".join(parts[number:]) in self.names
            for number in range(len(parts))
        ):
            return _NAME
        if any(pattern.match(module) for pattern in self.patterns):
            return _PATTERN
        # Files do not tell classes; embeddings are told by their names, all else is linear.
        is_embedding = "embed" in parts[-1] or parts[-1] in ("wte", "wpe")
        if any(name.endswith("Embedding") == is_embedding for name in self.classes):
            return _CLASS
        return None


class SchemeGroup(NamedTuple):
    """The modules that are quantized in one way. targets: None: all modules."""

    scheme: Scheme
    targets: Targets | None = None


class Quantization(NamedTuple):
    """How the modules of a checkpoint are quantized, as its configuration says."""

    method: str
    groups: tuple[SchemeGroup, ...]
    ignored: Targets  # the modules that are left out
    where: str  # the configuration, for messages

    def leaves_out(self, module: str) -> bool:
        """Tell whether the configuration leaves a module out by its name."""
        return self.ignored.closeness(module) in (_NAME, _PATTERN)

    def scheme(self, module: str) -> Scheme | None:
        """Return how a module is quantized if it is; None if no group has it. A name goes before a pattern or class."""
        found = [(_ANY if targets is None else targets.closeness(module), scheme) for scheme, targets in self.groups]
        by_closeness = grouped((closeness, scheme) for closeness, scheme in found if closeness is not None)
        if not by_closeness:
            return None
        closest, schemes = min(by_closeness.items())
        if closest == _CLASS and len(set(schemes)) > 1:
            raise StrategyError(
                f"the configuration does not tell how {module} is quantized",
                expected="groups whose targets are names or patterns, or one group of classes",
                got=f"{len(schemes)} groups of classes with different schemes",
                where=self.where,
                remedy="write the names of the modules into the targets of the groups",
            )
        return schemes[0]


def quantization_config_of(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the dictionary that says how a checkpoint is quantized; None if the values do not say that it is.

    It has a `quant_method`, which is added where a library leaves it out.

    Args:
        values: of a config.json, quantize_config.json or hf_quant_config.json, or the metadata of a file.
    """
    for key in (SCHEME_TEXT, "compression_config"):
        inner = values.get(key)
        if isinstance(inner, str):
            inner = _config_in(inner)
        if isinstance(inner, Mapping) and inner:
            # Bits and the size of a group are no sign of GPTQ here: MLX says no more either.
            method = "compressed-tensors" if "config_groups" in inner else "unknown"
            return inner if inner.get("quant_method") is not None else {**inner, "quant_method": method}
    for key in ("text_config", "llm_config"):
        inner = values.get(key)
        found = quantization_config_of(inner) if isinstance(inner, Mapping) else None
        if found is not None:
            return found
    if values.get("quant_method") is not None:
        return values
    if isinstance(values.get("config_groups"), Mapping):
        return {"quant_method": "compressed-tensors", **values}
    if isinstance(inner := values.get("quantization"), Mapping) and "quant_algo" in inner:
        return {"quant_method": "modelopt", **inner}
    if "w_bit" in values and "q_group_size" in values:
        old = {"bits": values["w_bit"], "group_size": values["q_group_size"]}
        return {"quant_method": "awq", **values, **old}
    if "bits" in values and "group_size" in values:
        return {"quant_method": "awq" if "zero_point" in values else "gptq", **values}
    # torchao's metadata: the names of the tensors, and of each what it is made of, as JSON texts
    if "tensor_names" in values and any("_type" in str(text) for text in values.values()):
        return {"quant_method": "torchao"}
    return None


def _config_in(text: str) -> Any:
    """Return the dictionary of a text that a file carries; None if it is none: then it is about something else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization:
    """Return how the modules of a checkpoint are quantized.

    A method that is not known is recognized, and what it quantizes is never cut.

    Args:
        config: see `quantization_config_of`.
        where: the configuration, for messages.

    Raises StrategyError if it says nothing of quantization, or something impossible.
    """
    values = quantization_config_of(config)
    if values is None:
        raise StrategyError(
            "the configuration does not say how the checkpoint is quantized",
            expected=f'"{SCHEME_TEXT}" in a config.json, or a quantize_config.json or hf_quant_config.json',
            got=", ".join(sorted(map(str, config))[:8]) or "nothing",
            where=where,
            remedy=_REMEDY,
        )
    settings = _Settings(values, where)
    groups, ignored = _READERS.get(settings.method, _whole_groups)(settings), list(settings.ignored)
    ignored += ["re:" + name[len("-:") :] for name in settings.mapping("dynamic") if name.startswith("-:")]
    return Quantization(settings.method, tuple(groups), Targets(ignored, where), where)


class _Settings(NamedTuple):
    """A dictionary, whose values are checked when they are asked for."""

    values: Mapping[str, Any]
    where: str

    @property
    def method(self) -> str:
        return str(self.values["quant_method"]).lower()

    @property
    def ignored(self) -> tuple[str, ...]:
        """The modules that are not quantized, as each library calls them."""
        keys = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
        return tuple(name for key in keys for name in self.texts(key))

    def refused(self, key: str, expected: str) -> StrategyError:
        problem, got = f"the quantization says something impossible: {key}", repr(self.values.get(key))[:80]
        return StrategyError(problem, expected=expected, got=got, where=self.where, remedy=_REMEDY)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            raise self.refused(key, "a list of names")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refused(key, "an object")
        return value

    def targets(self, names: Iterable[str]) -> Targets:
        return Targets(names, self.where)

    def of(self, key: str) -> _Settings:
        return _Settings(self.mapping(key), self.where)

    def text(self, *keys: str) -> str:
        """Return the first that is there, in lower case."""
        return next((str(self.values[key]).lower() for key in keys if self.values.get(key) is not None), "")

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def bits(self, key: str, allowed: tuple[int, ...]) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or value not in allowed:
            raise self.refused(key, f"one of {', '.join(map(str, allowed))}")
        return int(value)

    def group_size(self, default: int | None = None) -> int:
        """Return how many columns share a scale; 0: all of them."""
        value = default if self.values.get("group_size") is None else self.values["group_size"]
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.refused("group_size", "a number of columns, or -1 for all of them")
        return max(value, 0)

    def block(self, key: str) -> tuple[int, int]:
        value = self.values.get(key)
        match [int(size) for size in value[:32].split("x") if size.isdecimal()] if isinstance(value, str) else value:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise self.refused(key, "two numbers: of rows and of columns")


def _whole(name: str) -> Scheme:
    return Scheme(name, "whole")


def _whole_groups(settings: _Settings) -> list[SchemeGroup]:
    return [SchemeGroup(_whole(settings.method))]


def _fp8(settings: _Settings) -> list[SchemeGroup]:
    """DeepSeek's (`weight_block_size`); without that one scale a tensor. FP4 experts are not cut."""
    key = "weight_block_size"
    block = (0, 0) if settings.values.get(key) is None else settings.block(key)
    groups = [SchemeGroup(Scheme("fp8", "fp8", block=block))]
    if settings.text("expert_dtype") == "fp4":
        experts = settings.targets([r"re:(.*\.)?experts(\.|$)"])
        groups.insert(0, SchemeGroup(_whole("fp8 with fp4 experts"), experts))
    return groups


def _gptq(settings: _Settings) -> list[SchemeGroup]:
    """The modules that `dynamic` (GPTQModel) changes, with their changes, go before the rest."""
    groups = []
    for name, changes in settings.mapping("dynamic").items():
        if not name.startswith("-:"):
            own = _Settings({**settings.values, **(changes if isinstance(changes, Mapping) else {})}, settings.where)
            groups.append(SchemeGroup(_gptq_scheme(own), settings.targets(["re:" + name.removeprefix("+:")])))
    return [*groups, SchemeGroup(_gptq_scheme(settings))]


def _gptq_scheme(settings: _Settings) -> Scheme:
    layout = settings.text("checkpoint_format", "format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.flag("is_marlin_format", False):
        return _whole(f"gptq as {layout}")
    block, act_order = (1, settings.group_size()), settings.flag("desc_act", False)
    return Scheme(layout, "gptq", settings.bits("bits", _GPTQ_BITS), block, settings.flag("sym", True), act_order)


def _awq(settings: _Settings) -> list[SchemeGroup]:
    layout = settings.text("version", "format") or "gemm"
    if layout != "gemm":
        return [SchemeGroup(_whole(f"awq as {layout}"))]
    bits = settings.bits("bits", (4,))
    block = (1, settings.group_size())
    return [SchemeGroup(Scheme("awq", "awq", bits, block, not settings.flag("zero_point", True)))]


def _modelopt(settings: _Settings) -> list[SchemeGroup]:
    """Return the groups of `quantized_layers` (mixed precision), or one for all modules."""
    layers = settings.mapping("quantized_layers")
    if not layers:
        return [SchemeGroup(_modelopt_scheme(settings))]
    targets = grouped((_modelopt_scheme(settings.of("quantized_layers").of(name)), name) for name in layers)
    return [SchemeGroup(scheme, settings.targets(names)) for scheme, names in targets.items()]


def _modelopt_scheme(settings: _Settings) -> Scheme:
    algorithm = settings.text("quant_algo").upper()
    if algorithm in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"):
        return Scheme(f"modelopt {algorithm}", "nvfp4", 4, (1, settings.group_size(_NVFP4_GROUP)))
    blocks = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "MXFP8": (1, _MX_GROUP)}
    if algorithm in blocks:
        return Scheme(f"modelopt {algorithm}", "fp8", block=blocks[algorithm])
    return _whole(f"modelopt {algorithm}".strip())


def _compressed_tensors(settings: _Settings) -> list[SchemeGroup]:
    groups, presets = [], settings.of("config_groups")
    sparse = settings.of("sparsity_config").text("format") or "dense"
    for name, value in presets.values.items():
        if not isinstance(value, Mapping):  # the name of a preset
            groups.append(SchemeGroup(_whole(f"compressed-tensors {name}"), settings.targets(presets.texts(name))))
            continue
        group = presets.of(name)
        if group.values.get("weights") is None:
            continue
        layout = group.text("format") or settings.text("format")
        scheme = _whole(sparse) if sparse != "dense" else _compressed_scheme(group.of("weights"), layout)
        groups.append(SchemeGroup(scheme, settings.targets(group.texts("targets"))))
    if not groups and sparse != "dense":
        groups.append(SchemeGroup(_whole(sparse)))
    return groups


def _compressed_scheme(weights: _Settings, layout: str) -> Scheme:
    """Return the scheme of the weights of a group.

    Args:
        layout: how they are stored, as compressed-tensors calls it.
    """
    symmetric = weights.flag("symmetric", True)
    if layout == "nvfp4-pack-quantized":
        return Scheme(layout, "nvfp4", 4, (1, weights.group_size(_NVFP4_GROUP)), divides=True)
    if layout == "mxfp4-pack-quantized":
        return Scheme(layout, "mxfp4", 4, (1, weights.group_size(_MX_GROUP)))
    if layout != "pack-quantized" and layout not in _ONE_BY_ONE:
        return _whole(layout or "compressed-tensors")
    strategy = weights.text("strategy") or ("group" if weights.values.get("group_size") else "tensor")
    if strategy == "block":
        block = weights.block("block_structure")
    elif strategy == "group":
        block = (1, weights.group_size())
    elif strategy in ("channel", "tensor"):
        block = (int(strategy == "channel"), 0)
    else:
        raise weights.refused("strategy", "tensor, channel, group or block")
    if layout == "pack-quantized":
        # Up to August 2026 "group" (or true) stored which group a column is of.
        act_order = weights.text("actorder") in ("true", "group", "dynamic")
        return Scheme(layout, "packed", weights.bits("num_bits", _INTEGER_BITS), block, symmetric, act_order)
    kind = "int8" if weights.text("type") == "int" else "fp8"
    return Scheme(layout, kind, weights.bits("num_bits", (8,)), block, symmetric)


_READERS: dict[str, Callable[[_Settings], list[SchemeGroup]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: [SchemeGroup(Scheme("fbgemm_fp8", "fp8", block=(1, 0)))],
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda _: [SchemeGroup(Scheme("mxfp4", "mxfp4", 4, (1, _MX_GROUP)))],
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_fp8": _modelopt,
    "compressed-tensors": _compressed_tensors,
}

"""Hold the names and shapes of tensors against a model's definition (`Definition`, `ModelProcess`).

The definition is another checkpoint, or that of transformers: in a process of its own, it lists the tensors with which
it saves a model (`print_tensors`). Nothing but classes of transformers itself is used, and no code that a configuration
names. The model has no memory for its values (torch's `meta` device). transformers 5 keeps experts stacked in memory,
and its own conversions tell the names and shapes in files; those of version 4 are the same in both places.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard_mpi.errors import SourceError, UsageError
from reshard_mpi.filesystem.source_files import exists, first_bytes, is_file, is_folder, version_of
from reshard_mpi.mapping.tensor_kinds import TensorKind, kind_of
from reshard_mpi.processes.imports import fresh_interpreter, import_environment
from reshard_mpi.quantization.weights import SCHEME_TEXT, QuantizedWeights
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.soundness.findings import Finding, FindingKind
from reshard_mpi.text import one_line

_CONFIG = "config.json"
_PROGRAM = "from reshard_mpi.soundness.definition import print_tensors; print_tensors()"
_MOST_CONFIG_BYTES = 16 << 20
# Names of a model by which the prefix is found that its names have in a checkpoint.
_COMPARED_NAMES = 64
_TIMEOUT_SECONDS = 900
# A model of a thousand layers takes a minute, and less than 4 GiB.
_MODEL_SECONDS = 600
_MODEL_BYTES = 16 << 30
_REASON_LENGTH = 400
# A model may not be saved with these, and is loaded in the same way with and without them.
_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"\.attn\.(masked_)?bias$", r"position_ids$")
# Another model lacks at least a tenth of the tensors, and has others.
_SURPLUS_OF_ANOTHER = 10


class ModelConfig(NamedTuple):
    """The configuration of a model, as Hugging Face keeps it.

    Attributes:
        is_asked_for: whether the user has named it; else it lies beside the files, and what cannot be checked by it is
            only said.
    """

    path: Path
    values: dict[str, Any]
    is_asked_for: bool

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return str(self.values["architectures"][0])

    @property
    def is_quantized(self) -> bool:
        """Whether the model is quantized: its scales have names that no class of the model tells."""
        return SCHEME_TEXT in self.values

    def unchecked(self, quantization: QuantizedWeights | None) -> str | None:
        """Return why tensors of a quantized model are not held against it, in a sentence; None: they are.

        Args:
            quantization: the weights of the checkpoint that are known to be quantized.

        Raises SourceError in place of the sentence if the user has named the configuration.
        """
        weights = () if quantization is None else quantization.weights.values()
        if not self.is_quantized or (weights and all(stored.weight.scheme.kind != "whole" for stored in weights)):
            return None
        if not self.is_asked_for:
            return f"the tensors are not held against {self.path}, since the model is quantized"
        raise SourceError(
            "the model is quantized, so its tensors have scales that its class does not tell",
            expected="the configuration of the model in floating point",
            got=f'"{SCHEME_TEXT}"',
            where=str(self.path),
            remedy="give --like another checkpoint of the model",
        )

    @classmethod
    def named(cls, path: str) -> ModelConfig:
        """Read the configuration that a user names: a file, or the folder of `config.json`."""
        file = Path(path)
        file = file / _CONFIG if is_folder(file) else file
        values = _read(file)
        if values is None:
            raise UsageError(
                "this is no configuration of a model",
                expected='JSON with "architectures" and "model_type", as transformers writes it',
                got="no such file" if not exists(file) else "something else",
                where=str(file),
                remedy="give the folder that has the model's config.json, or that file",
            )
        return cls(file, values, True)

    @classmethod
    def beside(cls, source: str) -> ModelConfig | None:
        """Return the configuration in the folder of a checkpoint, if there is one."""
        folder = Path(source)
        file = (folder if is_folder(folder) else folder.parent) / _CONFIG
        values = _read(file)
        return None if values is None else cls(file, values, False)


def _read(file: Path) -> dict[str, Any] | None:
    """Return a model's configuration; None if the file is none."""
    try:
        if not is_file(file) or version_of(file).size_bytes > _MOST_CONFIG_BYTES:
            return None
        values = json.loads(first_bytes(file, version_of(file).size_bytes))
    except (OSError, ValueError, RecursionError):
        return None
    names = values.get("architectures") if isinstance(values, dict) else None
    is_config = isinstance(names, list) and names and isinstance(names[0], str) and "model_type" in values
    return values if is_config else None


class Definition(NamedTuple):
    """The tensors that a checkpoint should have.

    Example: `Definition("LlamaForCausalLM", {"model.norm.weight": (64,)}, tied={"lm_head.weight": "model.embed..."})`.
    """

    origin: str  # where it comes from, for people
    shapes: Mapping[str, Shape]
    optional: frozenset[str] = frozenset()  # names that need not be there
    tied: Mapping[str, str] = {}  # names of tensors that are others once more, with the names of these
    ignored: tuple[str, ...] = ()  # expressions; other tensors whose names have one may be there
    prefix: str = ""  # which names may lack, or have in addition
    is_all: bool = False  # whether it has the state of a training too; else it is about the model alone

    def findings(
        self,
        shapes: Mapping[str, Shape],
        digests: Mapping[str, object],
        place: Callable[[str], tuple[int | None, str]],
        where: str,
    ) -> Iterator[Finding]:
        """Yield findings on tensors that are missing, too much, of another shape, or unlike the one they are tied to.

        Args:
            shapes: of all tensors of the checkpoint.
            digests: of their values, by name; equal ones have equal values.
            where: the path of the checkpoint.

        Raises SourceError if the checkpoint has nothing of the definition.
        """
        own = self._own_names(shapes)
        common = [name for name in self.shapes if name in own]
        ignored = [re.compile(each) for each in self.ignored]
        surplus = [name for name in own if name not in self.shapes and not any(each.search(name) for each in ignored)]
        # A checkpoint that lacks most of a model has hardly anything else.
        lacks_most = 2 * len(common) < len(self.shapes) and _SURPLUS_OF_ANOTHER * len(surplus) > len(own)
        if lacks_most or not any(shapes[own[name]] == self.shapes[name] for name in common):
            raise self._another_model(shapes, surplus, where)
        present = {self.tied.get(name, name) for name in own} | own.keys()
        for name, shape in self.shapes.items():
            if name in own:
                got = shapes[own[name]]
                if got != shape:
                    detail = f"shape {list(got)}, and {list(shape)} in {self.origin}"
                    yield Finding(FindingKind.SHAPE, own[name], *place(own[name]), detail)
            elif name not in self.optional and self.tied.get(name, name) not in present:
                detail = f"not there, and {self.origin} has it in shape {list(shape)}"
                yield Finding(FindingKind.MISSING, name, None, where, detail)
        for name in surplus:
            detail = f"{self.origin} has no tensor of this name"
            yield Finding(FindingKind.SURPLUS, own[name], *place(own[name]), detail)
        for name, other in self.tied.items():
            first, second = digests.get(own.get(name, "")), digests.get(own.get(other, ""))
            if first is not None and second is not None and first != second:
                detail = f"its values are not those of {own[other]!r}, to which {self.origin} ties it"
                yield Finding(FindingKind.TIED, own[name], *place(own[name]), detail)

    def _own_names(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        """Return, by the names of the definition, the names that a checkpoint has for its tensors."""
        if self.is_all:
            return {name: name for name in shapes}
        weights = [name for name in shapes if kind_of(name) is TensorKind.MODEL]
        step = max(1, len(self.shapes) // _COMPARED_NAMES)
        sampled = list(self.shapes)[::step]
        ends = Counter(
            name.removesuffix(each)
            for each in sampled
            for name in weights
            if name.endswith(each) and (len(name) == len(each) or name[-len(each) - 1] == ".")
        )
        added = max(ends, key=lambda each: (ends[each], -len(each)), default="")
        own = {name.removeprefix(added): name for name in weights if name.startswith(added)}
        base = f"{self.prefix}."
        if self.prefix and not any(name in self.shapes for name in own):
            without = {f"{base}{name}": stored for name, stored in own.items()}
            with_base = {name.removeprefix(base): stored for name, stored in own.items()}
            own = max((own, without, with_base), key=lambda each: sum(name in self.shapes for name in each))
        return own

    def _another_model(self, shapes: Mapping[str, Shape], surplus: list[str], where: str) -> SourceError:
        ours, theirs = (
            next((name for name in names if of.get(name) != others.get(name)), "")
            for names, of, others in ((self.shapes, self.shapes, shapes), (surplus or shapes, shapes, self.shapes))
        )
        return SourceError(
            f"the checkpoint is of another model than {self.origin}",
            expected=f"{ours!r} of shape {list(self.shapes.get(ours, ()))} and the like",
            got=f"{theirs!r} of shape {list(shapes.get(theirs, ()))} and the like",
            where=where,
            remedy="give the model's own configuration; --map where the checkpoint has other names",
        )


class ModelProcess:
    """The process that finds the definition of a model, while the checkpoint is read."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._process = subprocess.Popen(
            fresh_interpreter(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **import_environment()},
            process_group=0,
        )
        assert self._process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            self._process.stdin as stream,
        ):  # how it has ended is told by `result`
            stream.write(json.dumps(config.values).encode())
        self._process.stdin = None

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def result(self) -> Definition | str:
        """Return the definition; or why there is none, in a sentence, for a configuration that was not asked for.

        Raises UsageError or SourceError in place of the sentence if the user has named the configuration.
        """
        config, answer = self._config, dict[str, Any]()
        try:
            text, _ = self._process.communicate(timeout=_TIMEOUT_SECONDS)
            answer = json.loads(text)
        except (subprocess.TimeoutExpired, ValueError):
            self.close()
        if "tensors" in answer:
            return Definition(
                f"{one_line(config.architecture)} of transformers {answer['version']}",
                {name: tuple(shape) for name, shape in answer["tensors"].items()},
                frozenset((*answer["optional"], *_matching(answer["unsaved"], answer["tensors"]))),
                answer["tied"],
                tuple(answer["ignored"]),
                answer["prefix"],
            )
        return self._none(answer)

    def _none(self, answer: Mapping[str, Any]) -> str:
        config = self._config
        unchecked = f"the tensors are not held against {config.path}"
        if "lacks" in answer:
            if not config.is_asked_for:
                return f"{unchecked}, which takes transformers and torch: pip install transformers torch"
            raise UsageError(
                "a model's definition is that of transformers, which cannot be imported",
                expected="transformers and torch",
                got=answer["lacks"],
                remedy="pip install transformers torch; or give --like another checkpoint of the model",
            )
        got = f"{config.architecture!r}, model_type {config.values['model_type']!r}"
        if "unknown" in answer:
            remote = ", but in code that comes with the model, and is never run" if "auto_map" in config.values else ""
            problem = f"transformers {answer['unknown']} has no such architecture{remote}"
        else:
            problem = f"transformers can make no model of it ({answer.get('fails', 'it ran out of time or memory')})"
        if not config.is_asked_for:
            return f"{unchecked}: {problem}: {got}"
        raise SourceError(
            problem,
            expected="an architecture that transformers has, and a configuration that fits it",
            got=got,
            where=str(config.path),
            remedy="update transformers, or give --like another checkpoint of the model",
        )


def _matching(expressions: list[str], names: Mapping[str, object]) -> list[str]:
    return [name for name in names if any(re.search(each, name) for each in expressions)]


def print_tensors() -> None:
    """Read a configuration from standard input, and print the model's tensors, or why there are none, as JSON.

    A process that `ModelProcess` starts does nothing else, and imports transformers.
    """
    gc.disable()  # imports make little garbage, and to look for it takes a quarter of the time
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not the answer
    resource.setrlimit(resource.RLIMIT_CPU, (_MODEL_SECONDS, _MODEL_SECONDS))
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MODEL_BYTES, _MODEL_BYTES))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    config = json.load(sys.stdin)
    try:
        found = _model_tensors(config)
    except ImportError as error:
        found = {"lacks": str(error)[:_REASON_LENGTH]}
    except Exception as error:  # a class of transformers may raise anything for a wrong configuration
        found = {"fails": f"{type(error).__name__}: {error}"[:_REASON_LENGTH]}
    json.dump(found, answer)
    answer.close()
    os._exit(0)  # an orderly end takes torch a second


def _model_tensors(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    version = transformers.__version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, kind = config["architectures"][0], config.get("model_type")
    model_class = getattr(transformers, name, None)
    if kind not in CONFIG_MAPPING or model_class is None or not hasattr(model_class, "_from_config"):
        return {"unknown": version}
    settings = CONFIG_MAPPING[kind].from_dict(config)
    settings._attn_implementation = "eager"  # others may not be installed; they have the same tensors
    with torch.device("meta"):
        model = model_class(settings)
    state = model.state_dict()
    tied = _tied(model)
    saved = _as_saved(model, state)
    once = _as_saved(model, {name: tensor for name, tensor in state.items() if name not in tied})
    return {
        "tensors": {name: list(tensor.shape) for name, tensor in saved.items()},
        "optional": [name for name in saved if name not in once],
        "tied": tied,
        "ignored": [*_ALWAYS_IGNORED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())],
        "unsaved": [str(each) for each in getattr(model, "_keys_to_ignore_on_save", None) or ()],
        "prefix": model.base_model_prefix,
        "version": version,
    }


def _tied(model: Any) -> dict[str, str]:
    """Return, for each tensor that is another one once more, the name of that."""
    known = getattr(model, "all_tied_weights_keys", None)
    if known is not None:
        return dict(known)
    owner: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = owner.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


def _as_saved(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # version 4
        return state
    return dict(revert_weight_conversion(model, state))

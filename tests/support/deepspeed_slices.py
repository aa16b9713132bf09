"""DeepSpeed's checkpoints of tensor-parallel ranks, by numpy: every parameter is cut in one of the ways that there are.

`universal_checkpoint_info` says the ways, as DeepSpeed 0.19 and Megatron-DeepSpeed write it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from support import deepspeed_peer
from support.deepspeed_peer import Array, Arrays, Content, Form, Spoil, Training

KEYS = {
    "replicated": "tp_replicated_parameter_patterns",
    "averaged": "parameter_to_average_patterns",
    "row": "parameter_with_row_parallelism_patterns",
    "halves": "parameter_with_2_sub_params_cat_dim_0",
    "vocabulary": "vocabulary_parameter_patterns",
}


class Cut(NamedTuple):
    """How a parameter is cut.

    Attributes:
        kind: one of KEYS, or "column" or "sub-parameters".
        bands: of sub-parameters: the rows of each; padding: of a vocabulary: how many rows are added.
        is_mapped: whether the info says it by a map of pieces alone.
        pattern: makes the regular expression of a name.
    """

    kind: str
    bands: tuple[int, ...] = ()
    padding: int = 0
    is_mapped: bool = False
    pattern: Callable[[str], str] = lambda name: f"^{re.escape(name)}$"


class Sliced(NamedTuple):
    """A training, what each tensor-parallel rank has of it, and what the files say of that."""

    whole: Training
    of_ranks: list[Training]
    info: Content


def _slices(array: Array, cut: Cut, ranks: int, random: np.random.Generator) -> tuple[Array, list[Array]]:
    """Return the whole array, and what each rank has of it."""
    if cut.kind == "replicated":
        return array, [array] * ranks
    if cut.kind == "averaged":
        noise = random.standard_normal((ranks, *array.shape)).astype(np.float32)
        noise[random.random(noise.shape) < 0.3] = 0  # some elements are the same on several ranks, or on all
        of_ranks = [array + own for own in noise]
        total = np.zeros(array.shape, np.float32)
        for own in of_ranks:
            total = total + own
        return np.asarray(total / np.float32(ranks)), of_ranks
    if cut.kind == "row":
        return array, np.array_split(array, ranks, axis=1)
    if cut.kind == "vocabulary":
        added = random.standard_normal((cut.padding, *array.shape[1:])).astype(array.dtype)
        return array, np.array_split(np.concatenate([array, added]), ranks)
    bands = cut.bands or (len(array),)
    if cut.kind == "halves":
        bands = (len(array) // 2,) * 2
    each = [np.array_split(band, ranks) for band in np.split(array, np.cumsum(bands)[:-1])]
    return array, [np.concatenate(own) for own in zip(*each)]


def sliced(
    training: Training, cuts: Mapping[str, Cut], ranks: int, *, seed: int = 0, version: float = 0.4, rows: int = 0
) -> Sliced:
    """Return a training cut over ranks. rows: of every vocabulary."""
    random = np.random.default_rng(seed)

    def cut(arrays: Arrays) -> tuple[Arrays, list[Arrays]]:
        both = {name: _slices(array, cuts[name], ranks, random) for name, array in arrays.items()}
        wholes = {name: whole for name, (whole, _) in both.items()}
        return wholes, [{name: own[rank] for name, (_, own) in both.items()} for rank in range(ranks)]

    groups = [cut(group) for group in training.groups]
    state = {kind: cut(arrays) for kind, arrays in training.state.items()}
    frozen, frozen_of_ranks = cut(training.frozen)
    whole = replace(
        training,
        groups=[own for own, _ in groups],
        state={kind: own for kind, (own, _) in state.items()},
        frozen=frozen,
    )
    of_ranks = [
        replace(
            training,
            groups=[own[rank] for _, own in groups],
            state={kind: own[rank] for kind, (_, own) in state.items()},
            frozen=frozen_of_ranks[rank],
        )
        for rank in range(ranks)
    ]
    info = info_of({**whole.trained, **frozen}, cuts, ranks, version)
    return Sliced(whole, of_ranks, info | ({"original_vocab_size": rows} if rows else {}))


def info_of(arrays: Arrays, cuts: Mapping[str, Cut], ranks: int, version: float) -> Content:
    """Return what the files say of the way in which parameters are cut."""
    info: Content = {"universal_checkpoint_version": version, **{key: [] for key in KEYS.values()}}
    info |= {"parameter_with_sub_params": [], "sub_param_shard_widths": {}, "affine_map": {"version": 1, "params": {}}}
    for name, array in arrays.items():
        cut = cuts[name]
        pattern = cut.pattern(name)
        if cut.is_mapped:
            info["affine_map"]["params"][pattern] = _map(array, cut, ranks)
        elif cut.kind in KEYS:
            info[KEYS[cut.kind]].append(pattern)
        elif cut.kind == "sub-parameters":
            is_counted = version < 0.4 and len(set(cut.bands)) == 1
            shape = [len(cut.bands) if is_counted else tuple(cut.bands), *[-1][: array.ndim - 1]]
            entry = {"patterns": [pattern], "shape": shape, "partition_dim": 0}
            info["parameter_with_sub_params"].append(entry)
            if version >= 0.4:
                info["sub_param_shard_widths"][pattern] = [_widths(size, ranks) for size in cut.bands]
    return info


def _widths(size: int, ranks: int) -> list[int]:
    return [len(own) for own in np.array_split(np.empty(size), ranks)]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape))]


def _map(array: Array, cut: Cut, ranks: int) -> Content:
    """Return where the pieces of all ranks lie in the whole, found by the numbers of its elements."""
    numbers = np.arange(array.size).reshape(array.shape)
    entries = {}
    for rank, own in enumerate(_slices(numbers, cut, ranks, np.random.default_rng())[1]):
        bands = [own] if cut.kind in ("replicated", "row") else []
        if not bands:
            widths = [_widths(size, ranks)[rank] for size in cut.bands or (len(array),)]
            bands = np.split(own, np.cumsum(widths)[:-1])
        rows, pieces = 0, []
        for band in bands:
            offset = rows * math.prod(array.shape[1:])
            if band.size:
                source = [int(band.reshape(-1)[0]), _strides(array.shape)]
                pieces.append({"shape": [*band.shape], "source": source, "dest": [offset, _strides(own.shape)]})
                pieces[-1]["locations"] = [rank]
            rows += len(band) if band.ndim else 0
        entries[rank] = {"shard_shape": [*own.shape], "pieces": pieces}
    return {"logical_shape": [*array.shape], "ranks": entries}


def contents(made: Sliced, form: Form) -> Iterator[tuple[str, Content]]:
    """Yield the names of all files and what they hold."""
    ranks = len(made.of_ranks)
    for rank, own in enumerate(made.of_ranks):
        for name, content in deepspeed_peer.contents(own, form):
            model_rank = int(match[1]) * ranks + rank if (match := re.search(r"mp_rank_(\d+)", name)) else 0
            name = re.sub(r"mp_rank_\d+", f"mp_rank_{model_rank:02d}", name)
            if name.startswith("layer_"):
                name = name.replace("-model_states", f"-model_{rank:02d}-model_states")
            if "mp_world_size" in content:
                content |= {"mp_world_size": max(form.stages, 1) * ranks, "universal_checkpoint_info": made.info}
            yield name, content


def write(folder: Path, made: Sliced, form: Form, spoil: Spoil = lambda name, content: None) -> Path:
    """Write a checkpoint below `folder`, with a file `latest`; return the folder of its tag."""
    return deepspeed_peer.write_files(folder, contents(made, form), spoil)


PATTERNS: list[Callable[[str], str]] = [
    lambda name: f"^{re.escape(name)}$",
    lambda name: f"{name}$",
    lambda name: re.sub(r"\d+", lambda found: rf"(?:x|{found[0]})", name) + "$",
    lambda name: f"{name[:-1]}[{name[-1]}]$",
]


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Sliced, Form]:
    """Draw a training that is cut over tensor-parallel ranks, and a form that these are laid in."""
    training, form = draw(deepspeed_peer.trainings().filter(lambda drawn: not drawn[0].experts))
    ranks, version = draw(st.integers(2, 4)), draw(st.sampled_from([0.2, 0.4]))
    cuts: dict[str, Cut] = {}
    rows = draw(st.integers(1, 5))
    for name, array in {**training.trained, **training.frozen}.items():
        kinds = ["replicated"] + ["averaged"] * (name in training.trained)
        if array.ndim:
            kinds += ["column"] + ["halves"] * (len(array) % 2 == 0)
        if array.ndim and (version >= 0.4 or len(array) % ranks == 0):
            kinds += ["sub-parameters"]
        if array.ndim > 1:
            kinds += ["row"] + ["vocabulary"] * (len(array) == rows)
        kind = draw(st.sampled_from(kinds))
        bands: tuple[int, ...] = ()
        if kind == "sub-parameters":
            first = draw(st.integers(0, len(array)))
            bands = (first, len(array) - first) if version >= 0.4 else (len(array),)
        padding = draw(st.integers(0, 3))
        own = _slices(array, Cut(kind, bands, padding), ranks, np.random.default_rng())[1]
        if form.stage == 0 and not all(part.size for part in own):
            kind = "replicated"  # without lists of shapes nothing says that a rank has none of a parameter
        cuts[name] = Cut(
            kind,
            bands if kind == "sub-parameters" else (),
            padding=padding,
            is_mapped=kind in ("replicated", "row", "column", "sub-parameters") and draw(st.booleans()),
            pattern=draw(st.sampled_from(PATTERNS)),
        )
    has_vocabulary = any(cut.kind == "vocabulary" for cut in cuts.values())
    made = sliced(training, cuts, ranks, seed=draw(st.integers(0, 99)), version=version, rows=rows * has_vocabulary)
    return made, form


def odd_info(**values: Any) -> Spoil:
    """Return what replaces entries of the info of all ranks; None takes one away."""

    def spoil(name: str, content: Content) -> None:
        if "universal_checkpoint_info" in content:
            info = content["universal_checkpoint_info"] | values
            content["universal_checkpoint_info"] = {key: own for key, own in info.items() if own is not None}

    return spoil

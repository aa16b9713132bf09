"""Read the options of `inspect`, and print elements of tensors or statistics over them (`inspect_command`).

The lines about a whole checkpoint come from `checkpoints/contents`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard_mpi.checkpoints import discovery
from reshard_mpi.checkpoints.inspection import inspect, no_such_name, strategy_as_toml
from reshard_mpi.checkpoints.source import manifests_of
from reshard_mpi.cli.arguments import reading_options, request
from reshard_mpi.cli.output import show
from reshard_mpi.errors import ReshardError, UsageError
from reshard_mpi.filesystem.source_files import is_taken
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.strategy import Pattern
from reshard_mpi.text import MIB, json_number, one_line, shortened

if TYPE_CHECKING:
    from types import EllipsisType

    from reshard_mpi.api.checkpoint import Checkpoint, SourcePart, Tensor

# Elements that JSON may have; more are for programs that read the checkpoint themselves.
_MOST_IN_JSON = 4096
# Elements that statistics take at once: 4 MiB as float64.
_BLOCK = 4 * MIB // 8
# How many elements numpy prints of each end of a dimension where it prints "..." between. Of dimensions longer than
# twice that the ends are read and one element between them, in whose place numpy then prints "...".
_EDGE = 3

_SLICE = re.compile(r"(.+)\[([0-9:,.\- ]+)\]", re.DOTALL)


def inspect_command(options: argparse.Namespace) -> None:
    """Do what `inspect` is asked for. Raises UsageError for options that do not go together."""
    from reshard_mpi.checkpoints import contents

    as_text, globs = contents.as_text, options.others
    if options.parallel_sizes:
        _show_parallel_sizes(options)
        return
    shows_values = not options.toml and (options.stats or (len(globs) == 1 and globs[0].endswith("]")))
    if shows_values and _show_values(options):
        return
    if useless := reading_options(options):
        expected = "TENSOR[SLICE] with the exact name of a tensor, --stats or --parallel-sizes"
        raise UsageError(f"{useless[0]} goes with elements of tensors", expected=expected, got="a list of tensors")
    if options.toml:
        if globs or options.rank or options.stats:
            got = "GLOB, another path, --rank or --stats"
            raise UsageError("--toml prints a strategy", expected="PATH alone", got=got)
        show(strategy_as_toml(options.source))
        return
    if len(globs) == 1 and _is_path(globs[0]):
        if options.rank:
            raise UsageError(
                "--rank goes with one checkpoint", expected="PATH, or PATH and GLOB", got="two checkpoints"
            )
        facts, as_text = contents.compare(options.source, globs[0]), contents.comparison_text
    else:
        names = globs[0] if len(globs) == 1 else globs or None
        facts = inspect(options.source, names, rank=options.rank)
    show(json.dumps(facts, indent=1) if options.json else as_text(facts))


def _show_parallel_sizes(options: argparse.Namespace) -> None:
    from reshard_mpi.api.checkpoint import opened
    from reshard_mpi.checkpoints.parallel_sizes import TensorSize, parallel_sizes, sizes_said
    from reshard_mpi.mapping.map_file import read_configuration
    from reshard_mpi.quantization.schemes import quantization_config_of

    if options.others or options.rank or options.stats or options.toml:
        expected, got = "PATH alone", "GLOB, another path, --rank, --stats or --toml"
        raise UsageError("--parallel-sizes is of whole checkpoints", expected=expected, got=got)
    asked = request(options)
    if asked.config and not asked.map and quantization_config_of(read_configuration(asked.config)[0]) is None:
        asked = asked._replace(config=None)  # it tells sizes alone
    with opened(asked, 0, check=False) as checkpoint:
        tensors = {name: TensorSize(tensor.shape, tensor.dtype.itemsize) for name, tensor in checkpoint.items()}
        quantized = {} if checkpoint.quantization is None else checkpoint.quantization.weights
        found = parallel_sizes(tensors, sizes_said(options.source, options.config, checkpoint.attrs), quantized)
    show(json.dumps(found.as_json(), indent=1) if options.json else found.as_text())


class _Choice(NamedTuple):
    """Elements of a tensor."""

    tensor: Tensor
    written: str  # the slice, as it was given
    positions: tuple[int | range, ...]  # by dimension, an index or several
    sources: tuple[SourcePart, ...]

    @classmethod
    def of(cls, tensor: Tensor, written: str) -> _Choice:
        from reshard_mpi.api.calls import positions

        index = _parsed(written, tensor.name)
        return cls(tensor, written, positions(index, tensor.shape, tensor.name), tensor.sources(index))

    @property
    def kept(self) -> tuple[range, ...]:
        return tuple(each for each in self.positions if isinstance(each, range))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.kept))

    def read(self, kept: tuple[range, ...]) -> Any:
        """Read elements at other positions of the dimensions that are kept."""
        others = iter(kept)
        return self.tensor[tuple(_as_slice(next(others)) if isinstance(p, range) else p for p in self.positions)]

    def facts(self) -> dict[str, Any]:
        return {"dtype": self.tensor.dtype.name, "shape": list(self.shape)}


def _show_values(options: argparse.Namespace) -> bool:
    """Print the elements, or the statistics, that `inspect` is asked for.

    Returns False, and prints nothing, if there is nothing to read: the argument is a glob or a path, or is missing, and
    no statistics are asked for.
    """
    globs: list[str] = options.others
    match = _SLICE.fullmatch(globs[0]) if len(globs) == 1 else None
    name, written = match.groups() if match else (None, "")
    try:
        if options.rank is not None:
            raise UsageError("--rank goes with lists of tensors", expected="elements of whole tensors", got="--rank")
        with _warnings_printed():
            from reshard_mpi.api.checkpoint import opened

            checkpoint = opened(request(options), 0)
    except ReshardError:
        if options.stats or reading_options(options) or _holds(options.source, name):
            raise
        return False
    with checkpoint:
        if name is not None and name in checkpoint:
            choices = iter([_Choice.of(checkpoint[name], written)])
        elif options.stats:
            choices = _whole_tensors(checkpoint, options.source, globs)
        elif reading_options(options):
            raise no_such_name("tensor", globs[0], checkpoint, options.source)
        else:
            return False
        (_show_statistics if options.stats else _show_elements)(choices, options)
    return True


def _is_path(word: str) -> bool:
    """Tell whether a word is the path of anything, rather than a pattern of names."""
    with suppress(OSError):
        return is_taken(word)
    return False


def _holds(path: str, name: str | None) -> bool:
    """Tell whether files of a checkpoint have a tensor of this name."""
    try:
        files = discovery.find_shards(path)
        return any(name in manifest.tensors for _, manifests in manifests_of(files) for manifest in manifests)
    except ReshardError:
        return False


def _whole_tensors(checkpoint: Checkpoint, path: str, globs: Sequence[str]) -> Iterator[_Choice]:
    if any(map(_is_path, globs)):
        raise UsageError("--stats goes with one checkpoint", expected="PATH, or PATH and GLOB", got="two checkpoints")
    patterns = [*map(Pattern, globs)]
    for pattern in patterns:
        if not any(map(pattern.matches, checkpoint)):
            raise no_such_name("tensor", pattern.text, checkpoint, path)
    names = [name for name in checkpoint if not patterns or any(pattern.matches(name) for pattern in patterns)]
    return (_Choice.of(checkpoint[name], "...") for name in names)


def _show_elements(choices: Iterator[_Choice], options: argparse.Namespace) -> None:
    (choice,) = choices
    tensor, count = choice.tensor, math.prod(choice.shape)
    if not options.json:
        files = list(dict.fromkeys(path for part in choice.sources for path in part.files))
        origin = f"  from {shortened(files, 2)}" if files else ""
        heading = one_line(f"{tensor.name}[{choice.written}]  {tensor.dtype.name} {list(choice.shape)}{origin}")
        show(f"{heading}\n{_as_numpy_prints(choice)}")
        return
    if count > _MOST_IN_JSON:
        raise UsageError(
            "these are too many elements for JSON",
            expected=f"{_MOST_IN_JSON} at most",
            got=str(count),
            where=tensor.name,
            remedy="choose fewer, add --stats, or read them in Python with reshard_mpi.open",
        )
    facts = {"kind": "values", "path": options.source, "name": tensor.name, "index": choice.written, **choice.facts()}
    values = _plain(choice.read(choice.kept))
    show(json.dumps({**facts, "sources": [part._asdict() for part in choice.sources], "values": values}))


def _as_numpy_prints(choice: _Choice) -> str:
    import numpy as np

    if math.prod(choice.shape) <= np.get_printoptions()["threshold"]:
        return str(choice.read(choice.kept))
    few = np.empty([min(length, 2 * _EDGE + 1) for length in choice.shape], choice.tensor.dtype)
    ends = [
        [(slice(_EDGE), every[:_EDGE]), (slice(_EDGE, None), every[-_EDGE - 1 :])]
        if len(every) > 2 * _EDGE
        else [(slice(None), every)]
        for every in choice.kept
    ]
    for corner in product(*ends):
        few[tuple(place for place, _ in corner)] = choice.read(tuple(positions for _, positions in corner))
    with np.printoptions(threshold=0, edgeitems=_EDGE):
        return str(few)


def _show_statistics(choices: Iterator[_Choice], options: argparse.Namespace) -> None:
    facts = {}
    for choice in choices:
        name = choice.tensor.name if choice.written == "..." else f"{choice.tensor.name}[{choice.written}]"
        facts[name] = {**choice.facts(), **_statistics(choice)}
        if not options.json:
            of = {what: _short(value) for what, value in facts[name].items()}
            numbers = "  ".join(f"{what} {of[what]}" for what in ("min", "max", "mean", "norm", "nan", "inf", "zeros"))
            show(one_line(f"{name}  {of['dtype']} {of['shape']}  {numbers}"))
    if options.json:
        show(json.dumps({"kind": "statistics", "path": options.source, "tensors": _plain(facts)}, indent=1))


def _statistics(choice: _Choice) -> dict[str, Any]:
    """Return the minimum, maximum, mean and norm of the finite elements, and counts of NaN, infinities and zeros.

    For complex elements they are those of the absolute values. The elements are read in blocks.
    """
    import numpy as np

    counts = dict.fromkeys(("nan", "inf", "zeros"), 0)
    lowest, highest = [], []
    finite, total, norm = 0, 0.0, 0.0
    for block in Box((0,) * len(choice.kept), choice.shape).blocks(_BLOCK):
        kept = tuple(every[start:stop] for every, start, stop in zip(choice.kept, block.start, block.stop))
        elements = np.ravel(choice.read(kept))
        with np.errstate(all="ignore"):  # bits that are no number, and sums beyond the largest one
            is_complex = elements.dtype.kind == "c"
            wide = np.abs(elements.astype(np.complex128)) if is_complex else elements.astype(np.float64)
            is_finite = np.isfinite(wide)
            counts["nan"] += int(np.isnan(wide).sum())
            counts["inf"] += int(np.isinf(wide).sum())
            counts["zeros"] += wide.size - int(np.count_nonzero(wide))
            numbers = wide if is_finite.all() else wide[is_finite]
            if not numbers.size:
                continue
            exact = elements if elements.dtype.kind in "iub" else numbers
            lowest.append(exact.min().item())
            highest.append(exact.max().item())
            finite += numbers.size
            total += float(numbers.sum())
            # Squares of numbers divided by the largest one are neither too large nor all too small.
            largest = max(float(np.abs(numbers).max()), np.finfo(np.float64).tiny)
            norm = math.hypot(norm, largest * float(np.linalg.norm(numbers / largest)))
    return {
        "min": min(lowest, default=None),
        "max": max(highest, default=None),
        "mean": total / finite if finite else None,
        "norm": norm,
        **counts,
    }


def _parsed(written: str, name: str) -> tuple[int | slice | EllipsisType, ...]:
    """Return the text between the brackets as an index of numpy. Raises UsageError if it is none."""
    words = written.split(",")
    if len(words) > 1 and not words[-1].strip():
        words.pop()
    try:
        return tuple(map(_bound, words))
    except (ValueError, TypeError):
        raise UsageError(
            "this is no slice", expected="such as [0], [:8, 3], [..., ::2]", got=f"[{written}]", where=name
        ) from None


def _bound(word: str) -> Any:
    if word.strip() == "...":
        return ...
    if ":" not in word:
        return int(word)
    return slice(*(int(bound) if bound.strip() else None for bound in word.split(":")))


def _as_slice(every: range) -> slice:
    return slice(every.start, None if every.stop < 0 else every.stop, every.step) if every else slice(0)


def _plain(values: Any) -> Any:
    """Return values as JSON has them: lists, numbers; texts for NaN and infinities, pairs for complex numbers."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, list):
        return list(map(_plain, values))
    if hasattr(values, "tolist"):
        is_wide = values.dtype.kind in "iubc"
        return _plain((values if is_wide else values.astype("float64")).tolist())
    if isinstance(values, complex):
        return [_plain(values.real), _plain(values.imag)]
    return json_number(values) if isinstance(values, float) else values


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


@contextmanager
def _warnings_printed() -> Iterator[None]:
    """Print the warnings that the functions for Python log, as other commands do."""
    import logging

    logger, handler = logging.getLogger("reshard_mpi"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)

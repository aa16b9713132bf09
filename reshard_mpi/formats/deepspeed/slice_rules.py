"""Read the rules by which slices of tensor-parallel ranks join, from a DeepSpeed checkpoint (`read_rules`).

Its `universal_checkpoint_info` means parameters by regular expressions that match names from their beginning. The rules
are those of deepspeed/checkpoint/ds_to_universal.py of release 0.19, in this order:

    affine_map                              where each rank's pieces lie in the whole, one by one (AutoTP, from 0.19 on)
    tp_replicated_parameter_patterns        every rank has all of it
    parameter_to_average_patterns           every rank has all of it, and the mean is taken
    parameter_with_2_sub_params_cat_dim_0   two halves, of which each rank has a part of each, joined along dimension 0
    parameter_with_sub_params               the same of sub-parameters of several widths, such as query, key and value
    parameter_with_row_parallelism_patterns along dimension 1; everything else along dimension 0
    vocabulary_parameter_patterns           of these the rows from `original_vocab_size` on are padding

What it says of parameters that stages of a pipeline share is not needed: they are listed with their copies. Since the
file may be from anywhere, an expression that Python would try in very many ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, ShardError, SourceError
from reshard_mpi.formats.deepspeed.ranks import RankStates, TagFiles
from reshard_mpi.formats.nest.nodes import Dict, Value, entry_of, text_pairs
from reshard_mpi.formats.torch.file_content import text_of
from reshard_mpi.sharding.strategy import Strategy

INFO = "universal_checkpoint_info"
REPLICATED, AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
HALVES, ROW = "parameter_with_2_sub_params_cat_dim_0", "parameter_with_row_parallelism_patterns"
VOCABULARY, SUB_PARAMETERS = "vocabulary_parameter_patterns", "parameter_with_sub_params"
UNSUPPORTED = "autotp_unsupported_parameter_patterns"
# Newer versions say the widths of sub-parameters; in older ones all ranks have the same.
_WITH_WIDTHS = 0.4
_AFFINE_VERSION = 1
_LONGEST_PATTERN, _MOST_TRIES = 1000, 10**9
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|\{\d*,?\d*\}|.", re.DOTALL)
REMEDY = "let ds_to_universal.py of DeepSpeed make a universal checkpoint of it, and give that"


class ParameterPattern(NamedTuple):
    """A regular expression. repeats, choices: how many repetitions and alternatives it has."""

    expression: re.Pattern[str]
    repeats: int
    choices: int

    def matches(self, name: str) -> bool:
        return self.expression.match(name) is not None


class SubParameters(NamedTuple):
    """Which parameters consist of several, one behind the other.

    Attributes:
        shape: of the whole as it is looked at, with -1 for any size; dim: along which they lie in it.
        widths: for each, how many indices of this dimension each rank has; empty if all have the same.
        number: how many there are.
    """

    pattern: ParameterPattern
    shape: tuple[int, ...]
    dim: int
    widths: tuple[tuple[int, ...], ...]
    number: int


class SliceRules(NamedTuple):
    """The rules by which the slices in a checkpoint join.

    Attributes:
        path: of its file; ranks: how many tensor-parallel ranks there are.
        patterns: of each kind of parameters; sub_parameters: the rules for those.
        maps: for patterns of AutoTP, where pieces lie; unsupported: why slices of such parameters do not join.
        vocabulary: how many rows are no padding.
        strategy: by which slices join instead of all of these, if the user gives one.
    """

    path: str
    ranks: int
    patterns: Mapping[str, Sequence[ParameterPattern]]
    sub_parameters: Sequence[SubParameters]
    maps: Sequence[tuple[ParameterPattern, Value]]
    unsupported: Sequence[tuple[ParameterPattern, Value]]
    vocabulary: int | None
    strategy: Strategy | None = None

    @property
    def where(self) -> str:
        """What says these rules, for errors."""
        return f"{self.path} ({INFO})" if self.strategy is None else f"{self.path} and {self.strategy.origin}"

    @property
    def remedy(self) -> str:
        return REMEDY if self.strategy is None else "give the strategy by which tensor-parallel ranks have cut it"

    def require_few_tries(self, names: Sequence[str]) -> None:
        """Raise ShardError if the expressions can be tried on these names in more ways than is reasonable."""
        longest = 1 + max(map(len, names), default=0)
        every = [pattern for patterns in self.patterns.values() for pattern in patterns]
        every += [rule.pattern for rule in self.sub_parameters]
        every += [pattern for pattern, _ in (*self.maps, *self.unsupported)]
        tries = [longest**pattern.repeats * 2**pattern.choices for pattern in every]
        if sum(tries) * len(names) > _MOST_TRIES:
            worst = every[tries.index(max(tries))].expression.pattern
            raise _unsound("regular expressions with few repetitions and alternatives", repr(worst), self.path)

    def has(self, key: str, name: str) -> bool:
        """Tell whether a parameter is of a kind. Raises ShardError if several patterns of the kind match."""
        matching = [own.expression.pattern for own in self.patterns[key] if own.matches(name)]
        if len(matching) > 1:
            raise _unsound(f"one pattern of {key} for {name!r}", ", ".join(map(repr, matching)), self.path)
        return bool(matching)


def read_rules(
    states: RankStates, files: TagFiles, ranks: int, folder: str, strategy: Strategy | None = None
) -> SliceRules:
    """Return the rules by which slices in a checkpoint of several tensor-parallel ranks join.

    Args:
        ranks: how many tensor-parallel ranks there are.
        strategy: by which these have cut parameters, if the user gives one.

    Raises ShardError if it says nothing, or what cannot be understood; DisagreementError if ranks say different things.
    """
    first = states.first
    info = first.values.get(INFO)
    what = "of" if first.module is not None else "of a pipeline with"
    if strategy is not None and strategy.world_size != ranks:
        raise SourceError(
            "the source strategy is not one of the tensor-parallel ranks of a DeepSpeed checkpoint",
            expected=f"a mesh of {ranks} ranks, without ZeRO's data-parallel ones and the stages of a pipeline",
            got=f"{strategy.world_size} ranks",
            where=f"{folder} and {strategy.origin}",
            remedy="give the strategy by which tensor-parallel ranks have cut it",
        )
    if type(info) is not Dict and strategy is None:
        raise ShardError(
            f"a DeepSpeed checkpoint {what} {ranks} tensor-parallel ranks is not read",
            expected=f"{INFO} in it, which says how slices of parameters join, or --src-strategy, which says so",
            got=f"files of several ranks with slices of the same parameters, and no {INFO}",
            where=folder,
            remedy="give a strategy of these ranks, or load it with the training's own framework, and save it whole",
        )
    if states.model_ranks % ranks:
        raise ShardError(
            f"a DeepSpeed checkpoint {what} {ranks} tensor-parallel ranks lacks stages of it, or layers",
            expected=f"files of layers of all {ranks} ranks on every stage",
            got=f"{states.model_ranks} model-parallel ranks",
            where=folder,
            remedy="copy or restore all files of one save",
        )
    if files.experts or files.expert_optimizers or first.values.get("ds_autoep_layers") is not None:
        raise ShardError(
            f"a DeepSpeed checkpoint of experts with {ranks} tensor-parallel ranks is not read",
            expected="experts of one tensor-parallel rank",
            got="slices of experts, which only their framework knows to join",
            where=folder,
            remedy="load it with the training's own framework, and save it whole",
        )
    if strategy is not None:
        return SliceRules(first.path, ranks, {}, (), (), (), None, strategy)
    assert type(info) is Dict
    for other in states.models.values():
        if text_of(other.values.get(INFO)) != text_of(info):
            raise DisagreementError(
                f"tensor-parallel ranks of a DeepSpeed checkpoint differ in {INFO}",
                expected=f"what {first.path} says",
                got="something else",
                where=other.path,
                remedy="copy or restore all files of one save",
            )
    return _rules(info, ranks, first.path)


def _rules(info: Dict, ranks: int, path: str) -> SliceRules:
    patterns = {key: _patterns(key, info.get(key), path) for key in (REPLICATED, AVERAGED, HALVES, ROW, VOCABULARY)}
    affine = info.get("affine_map")
    version = entry_of(affine, "version")
    if affine is not None and (type(version) is not int or version > _AFFINE_VERSION):
        raise _unsound(f"an affine_map of version {_AFFINE_VERSION}", repr(version), path)
    vocabulary = info.get("original_vocab_size")
    if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
        raise _unsound("a number as original_vocab_size", repr(vocabulary), path)
    return SliceRules(
        path,
        ranks,
        patterns,
        [*_all_sub_parameters(info, ranks, path)],
        [(_pattern(key, path), own) for key, own in text_pairs(entry_of(affine, "params"))],
        [(_pattern(key, path), why) for key, why in text_pairs(info.get(UNSUPPORTED))],
        vocabulary,
    )


def _all_sub_parameters(info: Dict, ranks: int, path: str) -> Iterator[SubParameters]:
    version = info.get("universal_checkpoint_version") or 0
    if type(version) not in (int, float):
        raise _unsound("a number as universal_checkpoint_version", repr(version), path)
    has_widths, by_pattern = version >= _WITH_WIDTHS, dict(text_pairs(info.get("sub_param_shard_widths")))
    entries = info.get(SUB_PARAMETERS) or []
    if type(entries) is not list:
        raise _unsound(f"a list as {SUB_PARAMETERS}", type(entries).__name__, path)
    for entry in entries:
        shape, dim = entry_of(entry, "shape"), entry_of(entry, "partition_dim")
        if type(shape) not in (list, tuple) or type(dim) is not int or not 0 <= dim < len(shape):
            raise _unsound(f"a shape and a partition_dim in each of {SUB_PARAMETERS}", f"{shape}, {dim}", path)
        sizes = shape[dim] if type(shape[dim]) is int else numbers_of(shape[dim])
        even = [(size // ranks,) * ranks for size in sizes] if type(sizes) is tuple else ()
        others = tuple(own if type(own) is int else sum(numbers_of(own) or (-1,)) for own in shape)
        for pattern in _patterns(SUB_PARAMETERS, entry_of(entry, "patterns"), path):
            text = pattern.expression.pattern
            said = by_pattern.get(text, ()) if has_widths else even
            widths = tuple(numbers_of(own) or () for own in said) if type(said) in (list, tuple) else ()
            if widths:
                is_known = sizes == tuple(map(sum, widths)) and all(len(own) == ranks for own in widths)
            else:
                is_known = not has_widths and type(sizes) is int and sizes > 0
            if not is_known:
                expected = f"the width on each of {ranks} ranks of sub-parameters of {text!r}, in all {sizes}"
                raise _unsound(expected, str(by_pattern.get(text, "no sub_param_shard_widths")), path)
            yield SubParameters(pattern, others, dim, widths, sizes if type(sizes) is int else len(widths))


def _patterns(key: str, value: Value, path: str) -> list[ParameterPattern]:
    if value is not None and type(value) is not list:
        raise _unsound(f"a list of regular expressions as {key}", type(value).__name__, path)
    return [_pattern(own, path) for own in value or []]


def _pattern(text: Value, path: str) -> ParameterPattern:
    """Return a regular expression. Raises ShardError if it is none, or one that may be tried in endless ways."""
    if type(text) is not str or len(text) > _LONGEST_PATTERN:
        raise _unsound(f"a regular expression of at most {_LONGEST_PATTERN} characters", repr(text)[:200], path)
    repeats = choices = 0
    before = ""
    for token in _TOKEN.findall(text):
        is_repeat = token in ("*", "+") or (token[0] == "{" and len(token) > 1)
        if token == "(?" or (is_repeat and before == ")") or re.fullmatch(r"\\[1-9]", token):
            raise _unsound("regular expressions without repeated groups, references and looking around", text, path)
        repeats += is_repeat
        choices += token in ("?", "|")
        before = token
    try:
        return ParameterPattern(re.compile(text), repeats, choices)
    except (re.error, OverflowError, RecursionError) as error:
        raise _unsound("a regular expression", f"{text!r}: {error}", path) from None


def _unsound(expected: str, got: str, path: str) -> ShardError:
    return ShardError(
        f"{INFO} of a DeepSpeed checkpoint cannot be understood",
        expected=expected,
        got=got[:300],
        where=path,
        remedy=REMEDY,
    )


def numbers_of(value: Value) -> tuple[int, ...] | None:
    """Return numbers from 0 on; None for anything else."""
    is_sequence = type(value) in (list, tuple)
    return tuple(value) if is_sequence and all(type(own) is int and own >= 0 for own in value) else None

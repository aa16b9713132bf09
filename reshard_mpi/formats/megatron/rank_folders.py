"""Read the folders of all ranks in Megatron's older form, and require that they are of one save (`read_ranks`).

    iter_0000003/mp_rank_01_002_003/model_optim_rng.pt   of tensor-parallel rank 1 in stage 2, with the experts' rank 3
    iter_0000003/mp_rank_01_002_003/distrib_optim.pt     the distributed optimizer's state, in flat vectors

The stage is left out where there is one stage, and the rank of experts where all ranks have the same experts. Either
file may be left out in folders that have only copies. (megatron/training/checkpointing.py of Megatron-Core 0.14 to
0.19)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard_mpi.errors import DisagreementError, ShardError
from reshard_mpi.filesystem import source_files
from reshard_mpi.formats.megatron.layers import is_expert
from reshard_mpi.formats.megatron.training_tree import not_of_one_save, plain
from reshard_mpi.formats.nest.nodes import Dict, Value, text_pairs
from reshard_mpi.formats.torch.file_content import read_content, text_of
from reshard_mpi.formats.torch.file_signature import FileSignature, same_files
from reshard_mpi.text import natural_key

MODEL_FILE, VECTOR_FILE = "model_optim_rng.pt", "distrib_optim.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?", re.ASCII)
_NEWEST_VERSION = 3
_CHUNK = re.compile(r"model\d*")
# Arguments that all ranks of a run have alike, and that say how its files are cut.
_OF_RUN = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts"),
    *("padded_vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("untie_embeddings_and_output_weights", "swiglu", "use_distributed_optimizer", "consumed_train_samples"),
)
# Values that tell one save of a run from another.
_OF_SAVE = ("iteration", "checkpoint_version", "opt_param_scheduler")


class RankPlace(NamedTuple):
    """The place of a rank: in tensor parallelism, in the pipeline, and which share of the experts it has."""

    tensor: int
    stage: int
    expert: int


class RankFiles(NamedTuple):
    """The files of one rank's folder.

    Attributes:
        path: of the file with its weights.
        values: what is in this file, by key; empty if it is not there.
        vector_path: of the file with vectors of the optimizer; vectors: what is in it, None if it is not there.
        starts: where the storages of both files begin.
        signatures: by which copies of either file are told; None if it is not there, or has none.
    """

    place: RankPlace
    path: str
    values: Mapping[str, Value]
    vector_path: str
    vectors: Value
    starts: Mapping[str, int]
    signatures: Sequence[FileSignature | None]

    @property
    def chunks(self) -> list[Value]:
        """The parts of the model in the order in which the pipeline has them."""
        keys = sorted((key for key in self.values if is_chunk(key)), key=natural_key)
        return [self.values[key] for key in keys]


class Parallelism(NamedTuple):
    """Over how many ranks a training is cut: its matrices, its layers, its experts, and the experts' matrices."""

    tensor: int
    stages: int
    experts: int
    expert_tensor: int

    def part(self, place: RankPlace, *, is_expert: bool) -> int:
        """Return which part of a matrix the rank at a place has."""
        return place.tensor % self.parts(is_expert=is_expert)

    def parts(self, *, is_expert: bool) -> int:
        """Return in how many parts matrices are cut."""
        return self.expert_tensor if is_expert else self.tensor


class LegacyRanks(NamedTuple):
    """The contents of all ranks' files.

    Attributes:
        ranks: in the order of their stages, so that layers come in order.
        args: the arguments of the run.
    """

    ranks: Sequence[RankFiles]
    args: Mapping[str, Value]
    parallelism: Parallelism

    @property
    def first(self) -> RankFiles:
        """The rank whose values stand for all of the run."""
        return next(rank for rank in self.ranks if rank.values)


def is_chunk(key: str) -> bool:
    """Tell whether a key of a rank's file means a part of the model."""
    return _CHUNK.fullmatch(key) is not None


def files_of_ranks(folder: str) -> tuple[str, ...]:
    """Return the paths of the files of all ranks. Raises ShardError if there are none."""
    files = [
        str(Path(folder, name, file))
        for name in _folders(source_files.names(folder))
        for file in (MODEL_FILE, VECTOR_FILE)
        if source_files.is_file(Path(folder, name, file))
    ]
    if not files:
        raise _lost(f"{MODEL_FILE} in every folder mp_rank_*", "none", folder)
    return tuple(files)


def read_ranks(folder: str) -> LegacyRanks:
    """Read the files of all ranks. Raises ShardError if one is missing or not sound, or they are not of one save."""
    names = _folders(source_files.names(folder))
    files = [_read(str(Path(folder, name))) for name in names]
    first = next((rank for rank in files if rank.values), None)
    if first is None:
        raise _lost(f"{MODEL_FILE} in every folder mp_rank_*", "none", folder)
    _require_version(first)
    args = dict(text_pairs(plain(first.values.get("args"))))
    parallelism = _parallelism(args, first.path)
    placed = [rank._replace(place=_place(name, parallelism, folder)) for name, rank in zip(names, files)]
    _require_all(placed, parallelism, folder)
    _require_one_save(placed, args, parallelism)
    _require_own_files(placed)
    ordered = sorted(placed, key=lambda rank: (rank.place.stage, rank.place.expert, rank.place.tensor))
    return LegacyRanks(ordered, args, parallelism)


def _folders(names: Iterable[str]) -> list[str]:
    return sorted(filter(RANK_FOLDER.fullmatch, names), key=natural_key)


def _read(folder: str) -> RankFiles:
    paths = str(Path(folder, MODEL_FILE)), str(Path(folder, VECTOR_FILE))
    contents = [read_content(path, "Megatron") if source_files.is_file(path) else None for path in paths]
    roots = [None if content is None else content.root for content in contents]
    if contents[0] is not None and type(roots[0]) is not Dict:
        raise ShardError(
            "a file of a Megatron checkpoint is none that Megatron writes",
            expected="a dictionary with the parts of the model, arguments and settings",
            got=type(roots[0]).__name__,
            where=paths[0],
        )
    starts = {key: start for content in contents if content is not None for key, start in content.starts.items()}
    signatures = [None if content is None else content.signature for content in contents]
    return RankFiles(RankPlace(0, 0, 0), paths[0], dict(text_pairs(roots[0])), paths[1], roots[1], starts, signatures)


def _require_version(first: RankFiles) -> None:
    """Raise ShardError for a checkpoint of a release that is not read."""
    version = first.values.get("checkpoint_version")
    names = [name for chunk in first.chunks for name, _ in text_pairs(chunk)]
    nested = [name for name in names if name in ("language_model", "word_embeddings_for_head")]
    is_new = (type(version) is int or type(version) is float) and version >= _NEWEST_VERSION
    if not is_new or nested:
        raise ShardError(
            "a Megatron checkpoint is of a release that is not read",
            expected=f"checkpoint_version {_NEWEST_VERSION}.0, and a model of Megatron-Core",
            got=f"the model of a release before Megatron-Core, with {nested[0]!r}"
            if is_new
            else f"checkpoint_version {version}",
            where=first.path,
            remedy="load it with its Megatron, and save it with one that has Megatron-Core 0.14 or later",
        )


def _parallelism(args: Mapping[str, Value], path: str) -> Parallelism:
    """Return the sizes that the arguments of a run say. Raises ShardError if they do not."""

    def size(key: str, otherwise: int | None) -> int:
        value = args.get(key)
        value = otherwise if value is None else value
        if type(value) is not int or value < 1:
            raise ShardError(
                "the arguments in a Megatron checkpoint do not say how it is cut",
                expected=f"args.{key}, a number from 1 on",
                got=repr(args.get(key))[:80] if args else "no args",
                where=path,
            )
        return value

    tensor = size("tensor_model_parallel_size", None)
    expert_tensor = size("expert_tensor_parallel_size", tensor)
    if tensor % expert_tensor:
        raise ShardError(
            "a Megatron checkpoint has its experts cut over more ranks than it has folders for",
            expected=f"expert_tensor_parallel_size that divides {tensor}, the tensor_model_parallel_size",
            got=str(expert_tensor),
            where=path,
            remedy="save it with --ckpt-format torch_dist",
        )
    stages, experts = size("pipeline_model_parallel_size", 1), size("expert_model_parallel_size", 1)
    return Parallelism(tensor, stages, experts, expert_tensor)


def _place(name: str, parallelism: Parallelism, folder: str) -> RankPlace:
    """Return the place that a folder's name says. Raises ShardError if there is none of this name."""
    match = RANK_FOLDER.fullmatch(name)
    assert match is not None
    first, *others = (int(number) for number in match.groups() if number is not None)
    kinds = [parallelism.stages > 1, parallelism.experts > 1]
    if len(others) == sum(kinds):
        numbers = iter(others)
        place = RankPlace(first, *(next(numbers) if is_named else 0 for is_named in kinds))
        sizes = parallelism.tensor, parallelism.stages, parallelism.experts
        if all(number < size for number, size in zip(place, sizes)):
            return place
    raise ShardError(
        "a folder of a Megatron checkpoint is of no rank of it",
        expected=f"mp_rank_TENSOR{'_STAGE' * kinds[0]}{'_EXPERTS' * kinds[1]} of {_sizes(parallelism)}, as args say",
        got=name,
        where=folder,
        remedy="remove what is of another save",
    )


def _sizes(parallelism: Parallelism) -> str:
    tensor, stages, experts, _ = parallelism
    return f"{tensor} tensor-parallel ranks, {stages} stages and {experts} shares of experts"


def _require_all(ranks: Sequence[RankFiles], parallelism: Parallelism, folder: str) -> None:
    """Raise ShardError unless each part of the model is in the folder of some rank."""
    lying = [rank.place for rank in ranks if rank.values]
    for stage in range(parallelism.stages):
        own = [place for place in lying if place.stage == stage]
        dense = {place.tensor for place in own}
        of_experts = {(parallelism.part(place, is_expert=True), place.expert) for place in own}
        lost = next((part for part in range(parallelism.tensor) if part not in dense), None)
        shares = ((part, share) for part in range(parallelism.expert_tensor) for share in range(parallelism.experts))
        lost_share = next((share for part, share in shares if (part, share) not in of_experts), None)
        if lost is not None or lost_share is not None:
            what = f"tensor-parallel rank {lost}" if lost is not None else f"share {lost_share} of the experts"
            expected = f"{MODEL_FILE} of {_sizes(parallelism)}, as args say"
            raise _lost(expected, f"none of {what} in stage {stage}", folder)


def _lost(expected: str, got: str, folder: str) -> ShardError:
    return ShardError(
        "files of ranks of a Megatron checkpoint are missing",
        expected=expected,
        got=got,
        where=folder,
        remedy="copy or restore all files of one save",
    )


def _require_one_save(ranks: Sequence[RankFiles], args: Mapping[str, Value], parallelism: Parallelism) -> None:
    """Raise DisagreementError if ranks' files are of several saves, or lie in folders of other ranks."""
    first, *others = (rank for rank in ranks if rank.values)
    numbers: dict[RankPlace, int] = {}
    for rank in (first, *others):
        own = dict(text_pairs(plain(rank.values.get("args"))))
        pairs = [(f"args.{key}", args.get(key), own.get(key)) for key in _OF_RUN]
        pairs += [(key, first.values.get(key), rank.values.get(key)) for key in _OF_SAVE]
        for key, expected, got in pairs:
            if text_of(expected) != text_of(got):
                says = f"{key}: {_shown(expected)}, as {first.path} says"
                raise not_of_one_save(says, _shown(got), rank.path)
        if type(own.get("rank")) is int:
            numbers[rank.place] = own["rank"]
    _require_own_places(numbers, args, parallelism, str(Path(first.path).parent.parent))


def _shown(value: Value) -> str:
    return text_of(value)[:200] if type(value) in (list, tuple, Dict) else repr(value)[:200]


def _require_own_places(
    numbers: Mapping[RankPlace, int], args: Mapping[str, Value], parallelism: Parallelism, folder: str
) -> None:
    """Raise DisagreementError if a file says that it is of another rank than its folder.

    What converts checkpoints saves one number for all of them; a number that only some have is of a copied file. Ranks
    are numbered by tensor parallelism first, then by experts, and by stages last, or before data parallelism (option
    --use-tp-pp-dp-mapping). (megatron/core/parallel_state.py of Megatron-Core 0.19, class RankGenerator)
    """
    if len(set(numbers.values())) == 1 < len(numbers):
        return
    for place, number in numbers.items():
        stage = _stage_of(number, args, parallelism)
        expert = number // parallelism.expert_tensor % parallelism.experts
        said = RankPlace(number % parallelism.tensor, place.stage if stage is None else stage, expert)
        if said != place:
            raise DisagreementError(
                "a file of a Megatron checkpoint is of another rank than its folder",
                expected=f"that of tensor-parallel rank {place.tensor}, stage {place.stage}, share {place.expert} of"
                " the experts",
                got=f"args.rank {number}, which is at {said.tensor}, {said.stage}, {said.expert}",
                where=folder,
                remedy="give folders the names that Megatron has given them",
            )


def _stage_of(number: int, args: Mapping[str, Value], parallelism: Parallelism) -> int | None:
    """Return the stage of a rank of this number; None if the arguments of its run do not tell."""
    world, context = args.get("world_size"), args.get("context_parallel_size", 1)
    if not args.get("use_tp_pp_dp_mapping"):
        per_stage = world // parallelism.stages if type(world) is int else 0
        return number // per_stage if per_stage else None
    if type(context) is not int or context < 1 or parallelism.experts > 1:
        return None
    return number // (parallelism.tensor * context) % parallelism.stages


def _require_own_files(ranks: Sequence[RankFiles]) -> None:
    """Raise DisagreementError if two ranks have the same file.

    Ranks of one stage that share out experts have the same where the stage has none.
    """
    held: dict[tuple[int, ...], tuple[RankFiles, FileSignature]] = {}
    for rank in ranks:
        for own in filter(None, rank.signatures):
            other, signature = held.setdefault(own.sums, (rank, own))
            is_alike = other.place[:2] == rank.place[:2] and not (other is not rank and _has_experts(rank))
            if not is_alike and own.is_of_copy(signature):
                raise same_files("Megatron", signature.path, own.path)


def _has_experts(rank: RankFiles) -> bool:
    return any(is_expert(name) for chunk in rank.chunks for name, _ in text_pairs(chunk))

"""Tell of DeepSpeed files that are of another save or rank (`warnings_of_other_saves`, `require_own_slices`).

A folder may keep layers, experts or parameters of a model that was larger before, and a rank's files may be copies of
another rank's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from reshard_mpi.errors import ShardError
from reshard_mpi.formats.deepspeed.parameters import OF_EXPERT, TIED
from reshard_mpi.formats.deepspeed.rank_files import ModelStates
from reshard_mpi.formats.deepspeed.ranks import Ranks, RankStates, bytes_of, require_own_files
from reshard_mpi.formats.deepspeed.training_tree import DeepSpeedTraining
from reshard_mpi.formats.dtypes import numbers
from reshard_mpi.formats.nest.nodes import Value
from reshard_mpi.formats.structure import step_in_name
from reshard_mpi.formats.torch.file_content import HeldTensor, TensorPieces
from reshard_mpi.text import counted


def warnings_of_other_saves(states: RankStates, training: DeepSpeedTraining, folder: str) -> tuple[str, ...]:
    """Return warnings of files that seem to be of another save."""
    return (*_of_another_step(states.first, folder), *_of_another_count(states), *_of_another_save(states, training))


def _of_another_step(first: ModelStates, folder: str) -> Iterator[str]:
    """Yield a warning if a folder with DeepSpeed's own name for it says another step than its files.

    Megatron-DeepSpeed and others name folders by counters of their own, which may begin anew: so it is no error.
    """
    named, steps = step_in_name(folder, "global_step", 1, "_universal"), first.values.get("global_steps")
    if named is not None and type(steps) is int and steps != named:
        yield (
            f"{folder} is named after step {named}, and {Path(first.path).name} is of global_steps {steps}:"
            " unless the training has named it by a counter of its own, some of its files are of another save"
        )


def _of_another_count(states: RankStates) -> Iterator[str]:
    """Yield a warning if optimizers of stage 3, which have the weights, count other steps than the model's files do.

    A training that has gone on without its optimizer counts anew: so it is no error. What this program has written of
    a source without `global_steps` says 0.
    """
    steps, skipped = (states.first.values.get(key, 0) for key in ("global_steps", "skipped_steps"))
    if not states.is_sliced or type(steps) is not int or type(skipped) is not int or steps == 0:
        return
    for share in states.optimizers.values():
        for group in share.groups:
            step = group.of_all.get("step", group.values.get("step"))
            counted_steps = [*numbers(bytes_of(step), step.dtype)] if type(step) is HeldTensor else [step]
            if step is not None and counted_steps != [steps - skipped]:
                yield (
                    f"{Path(share.path).name} counts {counted_steps[0]} steps, and {Path(states.first.path).name} is of"
                    f" global_steps {steps}, skipped_steps {skipped}: unless the training has loaded no optimizer, the"
                    " files are of two saves"
                )
                return


def _of_another_save(states: RankStates, training: DeepSpeedTraining) -> Iterator[str]:
    """Yield a warning if files of layers, of experts or of parameters have tensors that no list of the save has."""
    listed = {*training.trained, *training.frozen}
    listed.update(name for model in states.models.values() for name in (*model.shared, *model.buffers))
    strays = [name for name in training.frozen if name not in training.weights]
    if training.trained and states.first.shapes is not None:
        strays += _stray_tensors(training.weights, listed, is_pipeline=states.first.module is None)
    if strays:
        yield (
            f"{counted(len(strays), 'tensor')} in files of their own, such as {min(strays)!r}, are in no list of"
            " parameters or buffers: unless the training has made them so, these files are of another save"
        )


def _stray_tensors(weights: Mapping[str, Value], listed: Collection[str], *, is_pipeline: bool) -> list[str]:
    """Return the names of tensors in files of layers or experts that no list of a save has: of another one, it seems.

    Args:
        listed: the names of parameters that are trained or not, of buffers, and of what is shared.
    """
    tied = {name.split(".", 2)[2] for name in listed if name.startswith(TIED) and name.count(".") > 1}
    return [
        name
        for name, own in weights.items()
        if type(own) is TensorPieces
        and name not in listed
        and (is_pipeline or OF_EXPERT.fullmatch(name))
        and name.partition(".")[2] not in tied
    ]


def each_once(tensors: Iterable[tuple[str, Value]], folder: str) -> dict[str, Value]:
    """Return tensors by name. Raises ShardError if files of a folder have one of them twice."""
    found: dict[str, Value] = {}
    for name, value in tensors:
        if name in found:
            raise ShardError(
                "two files of a DeepSpeed checkpoint have the same tensor",
                expected="each of them in one file of layers or experts",
                got=f"{name!r} in two",
                where=folder,
                remedy="remove the files of the other save",
            )
        found[name] = value
    return found


def require_own_slices(
    states: RankStates, stages: Sequence[Sequence[str]], first: DeepSpeedTraining, whole: DeepSpeedTraining
) -> None:
    """Raise DisagreementError if two tensor-parallel ranks of a stage have one file though its tensors are cut.

    Ranks may have nothing of the tensors that are cut, where these have fewer rows than there are ranks.

    Args:
        stages: the names of the parameters that each stage trains.
        first, whole: the training of the first of these ranks, and of all.
    """

    def cut(slices: Mapping[str, Value], joined: Mapping[str, Value], names: Iterable[str]) -> list[str]:
        return [name for name in names if getattr(slices[name], "shape", ()) != getattr(joined[name], "shape", ())]

    def with_slices(names: Collection[str], ranks: Iterable[int]) -> list[int]:
        shapes = {rank: _shapes(states.models[Ranks(0, rank)]) for rank in ranks}
        return [rank for rank, own in shapes.items() if any(0 not in own.get(name, ()) for name in names)]

    parts = states.model_ranks // len(stages)
    for stage, names in enumerate(stages):
        if trained := cut(first.trained, whole.trained, names):
            ranks = range(stage * parts, (stage + 1) * parts)
            require_own_files(states.shares(rank) for rank in with_slices(trained, ranks))
    if weights := cut(first.weights, whole.weights, first.weights):
        require_own_files([states.models[Ranks(0, rank)]] for rank in with_slices(weights, range(states.model_ranks)))


def _shapes(model: ModelStates) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a rank's slices of tensors, as far as its file says them."""
    of_parameters = {name: shape for group in model.shapes or () for name, shape in group.items()}
    tensors = {name: own.shape for name, own in (model.module or {}).items() if type(own) is HeldTensor}
    return {**tensors, **of_parameters, **model.frozen}

"""Tell the kind of a tensor by its name (`kind_of`), and its layer, expert and kin (`layer_of`, `kin_of`).

Only the name is looked at, so it is a guess where a framework lets users choose names. Wrong guesses change what is
counted, and what is compared with what, but never a byte that is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

# Longer names are no names of state.
_MAX_PARTS = 48
PART = re.compile("[^./]+")
# torch's key for what an optimizer has of each parameter.
STATE_KEY = "state"
# Words in the names of step counters of parameters.
COUNTS = frozenset(("step", "state_step"))
_COUNTS_OF_RUNS = frozenset(
    (
        *("_step_count", "current_iterator_step", "epoch", "epoch_num", "global_step", "global_steps", "iteration"),
        *("last_epoch", "last_overflow_iterator_step", "step_num"),
    )
)
_ALL_COUNTS = COUNTS | _COUNTS_OF_RUNS
# Copies of weights in float32, from which an optimizer goes on.
_COPIES = frozenset(("fp32_param", "main_param", "master", "master_param"))
# What Megatron calls such a copy, behind `state.`
_COPY_BEHIND_STATE = "param"
# Words for state that parts of models may have for names too: they count only at the beginning of a name.
_WEAK = frozenset(("accum", "ax", "ema", "master", "prev", STATE_KEY, "stat", "step", "sum"))
# These and others that a module is likely to have for its name.
MODULE_WORDS = _WEAK | {"moment", "momentum", "velocity"}
_NO_MOMENTS = frozenset(("accu_grads", "ema", "grad_sum", "param_groups"))
# Words that frameworks have in the names of what optimizers and training keep of a parameter.
STATE_WORDS = frozenset(
    (
        *_COPIES,
        *_WEAK,
        *_NO_MOMENTS,
        *("acc_delta", "accum_update", "accumulator", "adam_m", "adam_v", "exp_avg", "exp_avg_diff", "exp_avg_sq"),
        *("exp_avg_sq_col", "exp_avg_sq_row", "exp_inf", "grad_avg", "lamb_m", "lamb_v", "max_exp_avg_sq", "mean_grad"),
        *("mean_square", "moment"),
        *("moment1", "moment2", "moments", "momentum", "momentum_buf", "momentum_buffer", "optim", "optim_state"),
        *("optimizer", "optimizer_state", "optimizer_states", "square_avg", "state_step", "step_size", "velocity"),
        "vhat",
    )
)
_SURE = STATE_WORDS - _WEAK
# Keys of models in trainings.
OF_MODEL = frozenset(("language_model", "model", "model_state_dict", "module", "network", "state_dict"))
# First words of what belongs neither to a model nor to a parameter, and the last one of what torch calls a module's
# own state.
_OF_RUN = frozenset(
    (
        *("args", "beta1_power", "beta2_power", "callbacks", "client_state", "ds_config", "extra_state"),
        *("grad_scaler", "learning_rate", "loops", "loss_scale", "lr_scheduler", "lr_schedulers"),
        *("opt_param_scheduler", "random_states", "rerun_state_machine", "rng", "rng_state", "scale_sense"),
        *("scaler", "scheduler"),
    )
)
_EXTRA_STATE = "_extra_state"

_LAYER = re.compile(r"(?:^|[./])(?:\w*layers?|\w*blocks?|h)[._/]?(\d{1,9})(?=[./]|$)", re.ASCII)
_EXPERT = re.compile(r"(?:^|[./])\w*experts?[._/]?(\d{1,9})(?=[./]|$)", re.ASCII)


class TensorKind(StrEnum):
    """The kind of a tensor, or of a value beside tensors, in a training's state."""

    MODEL = "model"  # weights and buffers
    COPY = "copy"  # a copy of a weight in float32, from which the optimizer goes on
    MOMENT = "moment"  # what an optimizer keeps of a parameter besides
    STEP = "step"  # a count of steps, of a parameter or of the run
    OTHER = "other"  # gradients, averages of weights, random states, settings, schedulers

    @property
    def branch(self) -> str:
        """The part of a training's state that has it: model, optimizer or other."""
        return self if self in (TensorKind.MODEL, TensorKind.OTHER) else "optimizer"


def kind_of(name: str) -> TensorKind:
    """Return the kind of a tensor: of `moments.w` and `optimizer.state.w.exp_avg` MOMENT, of `w` MODEL.

    A last word that is an optimizer's tells it, else the first word that is an optimizer's or a model's:
    `exp_avg.model.w` is a moment, `model.ema.w` the model's.
    """
    parts = parts_of(name) or (name,)
    first, last = parts[0], parts[-1]
    is_count = last in _ALL_COUNTS
    if first in _OF_RUN or last == _EXTRA_STATE:
        return TensorKind.STEP if is_count else TensorKind.OTHER
    if len(parts) == 1 or not _is_state(parts):
        return TensorKind.STEP if is_count and len(parts) == 1 else TensorKind.MODEL
    if is_count or first in COUNTS:
        return TensorKind.STEP
    if not _NO_MOMENTS.isdisjoint(parts):
        return TensorKind.OTHER
    is_copy = not _COPIES.isdisjoint(parts) or (STATE_KEY, _COPY_BEHIND_STATE) in pairwise(parts)
    return TensorKind.COPY if is_copy else TensorKind.MOMENT


def _is_state(parts: Sequence[str]) -> bool:
    if parts[0] in STATE_WORDS | COUNTS or parts[-1] in _SURE:
        return True
    words = _SURE | {STATE_KEY} if parts[-1] in COUNTS else _SURE  # an optimizer may have any key
    return next((word for word in parts if word in OF_MODEL or word in words), None) in words


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is of: 3 of `model.layers.3.w`, `h.3.w` and `layer3.w`."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor is of: 7 of `model.layers.3.mlp.experts.7.w`."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def kin_of(name: str) -> str:
    """Return a name with stars in place of its layer and expert: all tensors that have it alike are kin.

    Of `model.layers.3.mlp.experts.7.w` it is `model.layers.*.mlp.experts.*.w`.
    """
    for pattern in (_EXPERT, _LAYER):
        found = pattern.search(name)
        if found is not None:
            name = f"{name[: found.start(1)]}*{name[found.end(1) :]}"
    return name


def parts_of(name: str) -> tuple[str, ...]:
    """Return what dots, and the slashes of groups, divide a name into; nothing for a name of too many parts."""
    parts = tuple(PART.findall(name))
    return parts if len(parts) <= _MAX_PARTS else ()

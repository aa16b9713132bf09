"""Know the parts of tensors' names, and the words for state in them (`parts_of`, `is_named_as_state`).

Frameworks name what an optimizer or a training keeps of a parameter after that, with words of their own around its
name: `moments.w`, `adam_m.w`, `optimizer.state.w.exp_avg`.
"""

from __future__ import annotations

import re

# Longer names are no names of state.
_MAX_PARTS = 48
PART = re.compile("[^./]+")
# torch's key for what an optimizer has of each parameter.
STATE_KEY = "state"
# Copies of weights in float32, from which an optimizer goes on.
COPIES = frozenset(("fp32_param", "main_param", "master", "master_param"))
# Words for state that parts of models may have for names too: they count only at the beginning of a name.
WEAK = frozenset(("accum", "ax", "ema", "master", "prev", STATE_KEY, "stat", "step", "sum"))
# These and others that a module is likely to have for its name.
MODULE_WORDS = WEAK | {"moment", "momentum", "velocity"}
NO_MOMENTS = frozenset(("accu_grads", "ema", "grad_sum", "param_groups"))
# Words that frameworks have in the names of what optimizers and training keep of a parameter.
STATE_WORDS = frozenset(
    (
        *COPIES,
        *WEAK,
        *NO_MOMENTS,
        *("acc_delta", "accum_update", "accumulator", "adam_m", "adam_v", "exp_avg", "exp_avg_diff", "exp_avg_sq"),
        *("exp_avg_sq_col", "exp_avg_sq_row", "exp_inf", "grad_avg", "lamb_m", "lamb_v", "max_exp_avg_sq", "mean_grad"),
        *("mean_square", "moment"),
        *("moment1", "moment2", "moments", "momentum", "momentum_buf", "momentum_buffer", "optim", "optim_state"),
        *("optimizer", "optimizer_state", "optimizer_states", "square_avg", "state_step", "step_size", "velocity"),
        "vhat",
    )
)
SURE = STATE_WORDS - WEAK


def parts_of(name: str) -> tuple[str, ...]:
    """Return what dots, and the slashes of groups, divide a name into; nothing for a name of too many parts."""
    parts = tuple(PART.findall(name))
    return parts if len(parts) <= _MAX_PARTS else ()


def dotted(name: str) -> str:
    """Return a name with dots for the slashes of groups; texts around a part of it are compared so."""
    return name.replace("/", ".")


def is_numbered_state(name: str, base: str) -> bool:
    """Tell whether the end of a name is the number and the key of torch's state: `optimizer.state.1.step`."""
    return base[:1].isdecimal() and dotted(name).endswith(f".{STATE_KEY}.{dotted(base)}")


def is_named_as_state(name: str, base: str) -> bool:
    """Tell whether a name is a parameter's name behind words that include an optimizer's."""
    before, _, rest = dotted(name).rpartition(f".{dotted(base)}")
    return not rest and not STATE_WORDS.isdisjoint(parts_of(before))

"""List the tensors with which transformers saves a model: the process that imports it (`main`).

Nothing but classes of transformers itself is used, and no code that a configuration names. The model has no memory for
its values (torch's `meta` device). transformers 5 keeps experts stacked in memory, and its own conversions
tell the names and shapes in files; those of version 4 are the same in both places.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from typing import Any

# A model of a thousand layers takes a minute, and less than 4 GiB.
_MOST_SECONDS = 600
_MOST_BYTES = 16 << 30
_MOST_TEXT = 400
# A model may not be saved with these, and is loaded in the same way with and without them.
_ALWAYS_IGNORED = (r"rotary_emb\.inv_freq", r"\.attn\.(masked_)?bias$", r"position_ids$")


def main() -> None:
    """Read a configuration from standard input, and print the model's tensors, or why there are none, as JSON."""
    gc.disable()  # imports make little garbage, and to look for it takes a quarter of the time
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not the answer
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    config = json.load(sys.stdin)
    try:
        found = _tensors(config)
    except ImportError as error:
        found = {"lacks": str(error)[:_MOST_TEXT]}
    except Exception as error:  # a class of transformers may raise anything for a wrong configuration
        found = {"fails": f"{type(error).__name__}: {error}"[:_MOST_TEXT]}
    json.dump(found, answer)
    answer.close()
    os._exit(0)  # an orderly end takes torch a second


def _tensors(config: dict[str, Any]) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()

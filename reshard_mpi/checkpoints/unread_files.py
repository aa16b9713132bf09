"""Files that lie beside those of a checkpoint and are not read (`left_out_of_folder`).

A folder that is read as one checkpoint may hold more of the same save: settings, the state of schedulers, tensors in
another form. So every file in it is read, or named, or one of those that are known to be no part of a checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from reshard_mpi.journal.records import STATE

# What people and programs put beside checkpoints: descriptions, tokenizers, settings of programs, logs, locks.
_NO_STATE = re.compile(
    r".*\.(?:json|jsonl|txt|md|rst|html|pdf|py|sh|ya?ml|toml|cfg|conf|ini|log|out|err|csv|tsv|jinja|model|tiktoken|vocab"
    r"|bpe|spm|png|jpe?g|gif|svg|webp|mp4|lock|pid|sha256|md5|sbatch|ipynb"
    r"|meta|mindir|ir|dot|pb|prototxt)"
    r"|(?:README|LICEN[CS]E|NOTICE|COPYING|AUTHORS|Makefile|Dockerfile|latest|latest_universal|done|_?SUCCESS)"
    r"|events\.out\.tfevents\..*|training_args\.bin",
    re.IGNORECASE,
)
# The same weights once more, as Hugging Face's repositories have them for other programs.
_SAME_WEIGHTS = re.compile(
    r"(?:pytorch_model|tf_model|flax_model|rust_model)(?:-\d+-of-\d+)?\.(?:bin|h5|msgpack|ot)|.*\.(?:onnx|gguf|tflite)"
)
# Folders that are other saves of the same run, or none at all.
_OTHER_SAVES = re.compile(r"checkpoint-\d+|__pycache__|wandb|mlruns|tensorboard|runs|logs?")
_SAID = {
    "common.pt": "Megatron's settings: arguments, iteration, scheduler, the optimizer's groups",
    "train_state.pt": "Megatron Bridge's step and consumed samples",
}
# So many entries of a folder in a folder are looked at, and so many files are named.
_MAX_LOOKED_AT, _MAX_NAMED = 256, 8


def left_out_of_folder(folder: str, read: Collection[str], is_taken: Callable[[str], bool] = lambda _: False) -> str:
    """Return in words which files and folders in a folder are not read with the checkpoint in it; empty if none.

    read: the names in the folder of which something is read. is_taken: tells of further names that they were chosen
    among, so that nothing is to be said of them.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return ""
    names = [
        entry.name + "/" * entry.is_dir() + (f" ({_SAID[entry.name]})" if entry.name in _SAID else "")
        for entry in entries
        if entry.name not in read and not is_taken(entry.name) and _may_hold_state(entry)
    ]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _may_hold_state(entry: os.DirEntry[str]) -> bool:
    """Tell whether a file or folder may belong to a checkpoint, for all that its name says."""
    if entry.name.startswith("."):
        return False
    try:
        if entry.is_dir():
            return not _OTHER_SAVES.fullmatch(entry.name) and _folder_may_hold_state(entry.path)
        return entry.is_file() and _is_state(entry.name) and not _is_empty(entry)
    except OSError:
        return True


def _is_state(name: str) -> bool:
    return not (name.startswith(".") or _NO_STATE.fullmatch(name) or _SAME_WEIGHTS.fullmatch(name))


def _is_empty(entry: os.DirEntry[str]) -> bool:
    return entry.stat().st_size == 0


def _folder_may_hold_state(folder: str) -> bool:
    """Tell whether any file in a folder may hold state, as far as it is looked into.

    One with the records of a run holds the targets of that.
    """
    if Path(folder, STATE).exists():
        return False
    looked_at = 0
    for _, folders, files in os.walk(folder):
        looked_at += len(folders) + len(files)
        if any(map(_is_state, files)) or looked_at > _MAX_LOOKED_AT:
            return True
        folders[:] = [name for name in folders if not name.startswith(".")]
    return False

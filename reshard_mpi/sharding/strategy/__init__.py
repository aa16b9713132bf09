"""Read strategies: MindSpore's files or a TOML spec (`load`).

`strategy_files` tells the form of a file, `mindspore_protobuf`, `mindspore_json` and `toml_spec` read one, and
`mindspore_layouts` makes placements of MindSpore's. `merge` merges files of stages, `table` keeps placements in shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard_mpi.errors import StrategyError

if TYPE_CHECKING:
    from reshard_mpi.sharding.placement import Strategy
    from reshard_mpi.sharding.strategy.mindspore_json import StageFile
    from reshard_mpi.sharding.strategy.strategy_files import StrategyFile

__all__ = ["digest", "load"]


def load(path: str) -> Strategy:
    """Read a strategy: a file (MindSpore's protobuf or JSON, a TOML spec), or a folder of them, which are merged.

    Files are told apart by their contents. In a folder, files of one stage must agree, the stages run from 0 without a
    gap, and files that are no strategies are passed over. Raises StrategyError, or LayoutError for a layout that
    cannot be; both name the file and the parameter.
    """
    from reshard_mpi.sharding.strategy.mindspore_layouts import to_strategy
    from reshard_mpi.sharding.strategy.strategy_files import StrategyForm, decode, distinct, look_all, text_of

    files = distinct(look_all(path))
    first = next(files)
    if first.kind is StrategyForm.TOML:
        from reshard_mpi.sharding.strategy.toml import parse

        if next(files, None) is not None:
            raise _not_alone(first, path)
        return parse(text_of(first), str(first.path))

    def stage_files() -> Iterator[StageFile]:
        yield decode(first)
        for file in files:
            if file.kind is StrategyForm.TOML:
                raise _not_alone(file, path)
            yield decode(file)

    return to_strategy(stage_files(), path)


def _not_alone(spec: StrategyFile, path: str) -> StrategyError:
    return StrategyError(
        "a TOML spec is the whole strategy, but it is not alone",
        expected="one TOML spec, or MindSpore strategy files",
        got=f"{spec.path.name} among others",
        where=path,
        remedy="give the file itself instead of the folder",
    )


def digest(path: str) -> str:
    """Return the SHA-256 (hexadecimal) of a strategy file's bytes; of a folder, of its strategy files' names and bytes.

    Raises StrategyError where `load` finds no strategy file.
    """
    from pathlib import Path

    from reshard_mpi.sharding.strategy.strategy_files import look_all

    sha256 = hashlib.sha256()
    in_folder = Path(path).is_dir()
    for file in look_all(path):
        if in_folder:
            name = file.path.name.encode("utf-8", "surrogateescape")
            sha256.update(b"%d %s %d " % (len(name), name, file.path.stat().st_size))
        for block in file.blocks():
            sha256.update(block)
    return sha256.hexdigest()

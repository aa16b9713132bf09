"""Strategies: what a checkpoint's strategy files or its TOML spec say about who holds what.

`load` reads any of them; `merge`, `table`, `mindspore` and `stages` hold the rest. The protobuf library is loaded only
when a protobuf file is met.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from reshard_mpi.errors import StrategyError

if TYPE_CHECKING:
    from reshard_mpi.sharding.placement import Strategy
    from reshard_mpi.sharding.strategy.mindspore import StageFile

__all__ = ["digest", "load"]


def load(path: str) -> Strategy:
    """Read a strategy: a file (MindSpore's protobuf or JSON, a TOML spec), or a folder of them, merged by itself.

    Kinds are told by their contents. In a folder, files of one stage must agree and count once, the stages run from 0
    without a gap, and files that are no strategies are passed over. Raises StrategyError, or LayoutError for a layout
    that cannot be; both name the file and the parameter.
    """
    from reshard_mpi.sharding.strategy.files import Kind, decode, distinct, look_all, text_of
    from reshard_mpi.sharding.strategy.stages import to_strategy

    specs = []

    def stage_files() -> Iterator[StageFile]:
        for at, file in enumerate(distinct(look_all(path))):
            if file.kind is Kind.TOML:
                specs.append(file)
            else:
                yield decode(file)
            if specs and at:
                raise StrategyError(
                    "a TOML spec is the whole strategy, but it is not alone",
                    expected="one TOML spec, or MindSpore strategy files",
                    got=f"{specs[0].path.name} among others",
                    where=path,
                    remedy="give the file itself instead of the folder",
                )

    files = stage_files()
    first = next(files, None)
    if first is None:
        from reshard_mpi.sharding.strategy.toml import parse

        return parse(text_of(specs[0]), str(specs[0].path))
    return to_strategy((file for part in ([first], files) for file in part), path)


def digest(path: str) -> str:
    """Return the SHA-256 (hexadecimal) of a strategy file's bytes; of a folder, of its strategy files' names and bytes.

    Raises StrategyError where `load` finds no strategy file.
    """
    from pathlib import Path

    from reshard_mpi.sharding.strategy.files import look_all

    found = hashlib.sha256()
    in_folder = Path(path).is_dir()
    for file in look_all(path):
        if in_folder:
            name = file.path.name.encode("utf-8", "surrogateescape")
            found.update(b"%d %s %d " % (len(name), name, file.path.stat().st_size))
        for block in file.blocks():
            found.update(block)
    return found.hexdigest()

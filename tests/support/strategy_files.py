"""MindSpore's strategy files: of one stage, and one of all stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reshard_mpi.sharding.mindspore_json import StageFile, encode_json
from reshard_mpi.sharding.mindspore_layouts import merged_stages, to_stage_files
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf
from reshard_mpi.sharding.placement import Shape
from reshard_mpi.sharding.strategy import Strategy


def write_stage_file(path: Path, file: StageFile) -> None:
    """Write a strategy file: as JSON where the path ends so, else as protobuf."""
    path.write_bytes(encode_json(file) if path.suffix == ".json" else encode_protobuf(file))


def to_merged_file(strategy: Strategy, shapes: Mapping[str, Shape] | None = None) -> StageFile:
    """Return the contents of one merged MindSpore strategy file; a single stage gets no prefix where it needs none."""
    files = to_stage_files(strategy, shapes)
    if len(files) == 1 and merged_stages(files[0]) is None:
        return files[0]
    layouts = {f"{stage}-{name}": layout for stage, file in enumerate(files) for name, layout in file.layouts.items()}
    return StageFile(layouts, tuple(item for file in files for item in file.items))

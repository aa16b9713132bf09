"""Merge the strategies of pipeline stages into one file (`merge`)."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from reshard_mpi.errors import ReshardError, StrategyError, TargetError
from reshard_mpi.filesystem.paths import described, is_file_or_nothing, is_object_path
from reshard_mpi.sharding.mindspore_json import StageFile, encode_json, parse_json, place
from reshard_mpi.sharding.mindspore_layouts import by_stage, merged_stages, stage_unknown, to_placement
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf, merge_protobuf
from reshard_mpi.sharding.strategy_files import StrategyFile, StrategyForm, decode, distinct, look, look_all, text_of


def merge(sources: str | Sequence[str], out: str) -> None:
    """Merge the strategy files of all pipeline stages into `out`, names prefixed `<stage>-`.

    Args:
        sources: a folder, or files; several files of one stage must agree.
        out: the file to write, protobuf, or JSON if its name ends in .json or all sources are JSON. It appears complete
            or not at all, in the place of nothing, of an empty file or of an earlier merge.

    Raises StrategyError for sources that do not belong together or are merged already, TargetError if `out` cannot be
    written, or something else is in its place.
    """
    paths = [sources] if isinstance(sources, str) else list(sources)
    target = Path(out)
    if not target.name:
        raise TargetError("the merged strategy needs a file name", got=repr(out), remedy="give the path of a file")
    if not is_file_or_nothing(target):
        raise TargetError(
            "the merged strategy cannot be written",
            expected="a file in its place, or nothing",
            got=described(target),
            where=out,
            remedy="choose another name",
        )
    if target.exists() and target.stat().st_size and not _is_merged(target):
        raise TargetError(
            "the merged strategy would replace a file that is no merged strategy",
            expected="a new file, or the result of an earlier merge",
            got="another file, perhaps one of the stages",
            where=out,
            remedy="name the sources first and a new file last",
        )
    files = chain.from_iterable(_read_sources(path, target) for path in paths)
    stages = by_stage(_stage_contents(files), ", ".join(paths[:3]))
    chosen = [look(stage.path) for stage in stages]
    kinds = {file.kind for file in chosen}
    if kinds == {StrategyForm.JSON}:
        data = _merge_json(chosen)
    elif kinds == {StrategyForm.PROTOBUF} and target.suffix != ".json":
        data = merge_protobuf(file.read() for file in chosen)
    else:
        data = _convert(stages, chosen, target)
    _write(target, data)


def _read_sources(path: str, target: Path) -> Iterator[StrategyFile]:
    # The result of an earlier merge into the same folder is no source of this one.
    is_local = not is_object_path(path)
    return (file for file in look_all(path) if not (is_local and target.exists() and file.path.samefile(target)))


def _is_merged(path: Path) -> bool:
    """Tell whether a file is the result of a merge."""
    try:
        return merged_stages(decode(look(str(path)))) is not None
    except ReshardError:  # it is no strategy
        return False


def _stage_contents(files: Iterable[StrategyFile]) -> Iterator[StageFile]:
    """Yield the files' contents. Raises StrategyError for a spec, a merged file, or one without its stage."""
    for file in distinct(files):
        path = str(file.path)
        if file.kind is StrategyForm.TOML:
            raise StrategyError("a TOML spec cannot be merged", expected="MindSpore strategy files", where=path)
        stage = decode(file)
        if merged_stages(stage) is not None:
            raise StrategyError(
                "the strategy is merged already",
                expected="files of one stage each",
                got=f"names such as {next(iter(stage.layouts))!r}",
                where=path,
                remedy="use it as it is, or take it out of the folder",
            )
        if stage.stage is None:
            raise stage_unknown(path)
        yield stage


def _merge_json(files: Sequence[StrategyFile]) -> bytes:
    items: dict[str, object] = {}
    layouts: dict[str, object] = {}
    for number, file in enumerate(files):
        content = parse_json(text_of(file), str(file.path))
        items.update(content["parallel_strategy_item"])
        layouts.update({f"{number}-{name}": layout for name, layout in content["parallel_layout_item"].items()})
    merged = {"current_stage": 1, "parallel_strategy_item": items, "parallel_layout_item": layouts}
    return json.dumps(merged).encode()


def _convert(stages: Sequence[StageFile], files: Sequence[StrategyFile], target: Path) -> bytes:
    """Return the merged strategy of stages that are read from `files`, in the format that the ending of `target` says.

    Raises StrategyError for a layout that would mean something else in that format.
    """
    merged = StageFile(
        {f"{number}-{name}": layout for number, stage in enumerate(stages) for name, layout in stage.layouts.items()},
        tuple(item for stage in stages for item in stage.items),
        str(target),
    )
    if target.suffix == ".json":
        return encode_json(merged)
    for stage, file in zip(stages, files):
        for name, layout in stage.layouts.items():
            where = place(stage.path, name)
            if file.kind is StrategyForm.JSON and to_placement(layout, where).expanded_shape is not None:
                raise StrategyError(
                    "a layout of a JSON file may be a nested one written out, which protobuf could not tell apart",
                    got=f"tensor_map {[list(axes) for axes in layout.tensor_map]}, tensor_shape {layout.tensor_shape}",
                    where=where,
                    remedy="give the output a name that ends in .json, or give all stages as protobuf files",
                )
    return encode_protobuf(merged)


def _write(target: Path, data: bytes) -> None:
    target = Path(os.path.realpath(target))  # a link, as /dev/stdout is one, stays; the file it leads to is replaced
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    except OSError as error:
        raise TargetError(
            "the merged strategy cannot be written",
            got=str(error),
            where=str(target),
            remedy="choose another path, or make this one writable",
        ) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)

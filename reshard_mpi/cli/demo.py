"""Reshard the network of MindSpore's tutorial from 8 ranks to 4, and check it (`run_demo`)."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from reshard_mpi import formats
from reshard_mpi.errors import DisagreementError, TargetError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.processes.comm import Comm
from reshard_mpi.runs.outcome import Outcome, agreed
from reshard_mpi.runs.progress import Progress
from reshard_mpi.runs.request import Request, Task
from reshard_mpi.sharding.box import Box
from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.mindspore_layouts import to_stage_files
from reshard_mpi.sharding.mindspore_protobuf import encode_protobuf
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, contents_of, write
from reshard_mpi.text import format_bytes, format_rate

Float32Array = np.ndarray[Any, np.dtype[np.float32]]
Float32Arrays = Mapping[str, Float32Array]

_SRC_STRATEGY, _DST_STRATEGY = "src_strategy.ckpt", "dst_strategy.ckpt"
_MADE = ("src", "dst", _SRC_STRATEGY, _DST_STRATEGY)
_SHAPES = {
    "layer1.weight": (784, 512),
    "layer1.bias": (512,),
    "layer2.weight": (512, 512),
    "layer2.bias": (512,),
    "layer3.weight": (512, 10),
    "layer3.bias": (10,),
}
# MatMul is input (rows, in) x weight (in, out). On 8 ranks layer1 is cut ((2,1),(1,2)), rows by 2 and out by 2, and
# layer3 ((2,2),(2,1)), rows by 2 and in by 2. As MindSpore compiles it, both weights go by the mesh's middle axis.
_SOURCE = {"layer1.weight": Placement((2, 2, 2), ((), (1,))), "layer3.weight": Placement((2, 2, 2), ((1,), ()))}
_SOURCE_OTHERS = Placement((8,))
# 4 ranks, optimizer sharding: what ranks would hold alike is cut once more along dimension 0, if that divides.
# layer1 ((1,4),(4,1)): in by 4. layer3 ((2,2),(2,1)): rows by 2, in by 2.
_TARGET = {
    "layer1.weight": Placement((4,), ((0,), ())),
    "layer1.bias": Placement((4,), ((),), optimizer=4),
    "layer2.weight": Placement((4,), ((), ()), optimizer=4),
    "layer2.bias": Placement((4,), ((),), optimizer=4),
    "layer3.weight": Placement((2, 2), ((1,), ()), optimizer=2),
    "layer3.bias": Placement((4,), ((),)),
}


def run_demo(folder: str | None, comm: Comm) -> str:
    """Make the checkpoint, reshard and check it; return an account. The processes of `comm` share the targets.

    Args:
        folder: where to leave the files; None for a temporary one.

    Raises TargetError if `folder` has a demo already, DisagreementError if any element is not where it should be.
    """
    with _shared_folder(folder, comm) as base:
        tensors = _tensors()
        agreed(lambda: _write_source(base, tensors) if comm.rank == 0 else None, comm)
        begin = time.monotonic()
        outcome = Task.CONVERT.run(_request(base), comm, Progress())
        seconds = time.monotonic() - begin
        outcome.raise_failures()
        problems = comm.allgather(_check(outcome, tensors, comm))
        for problem in problems:
            if problem:
                raise DisagreementError(
                    "the demo's result is wrong",
                    expected="every slice bit-exact",
                    got=problem,
                    remedy="report it, with the file system, the MPI and the versions that were used",
                )
        return _account(base, outcome, seconds, comm, is_kept=folder is not None)


@contextmanager
def _shared_folder(folder: str | None, comm: Comm) -> Iterator[Path]:
    """Yield one folder for all processes; a temporary one is removed by rank 0 at the end."""
    base_name = None
    if comm.rank == 0:
        base_name = folder or tempfile.mkdtemp(prefix="reshard-mpi-demo-")
    base = Path(comm.allgather(base_name)[0] or "")
    present = comm.allgather(folder is not None and any(os.path.lexists(base / name) for name in _MADE))
    if any(present):
        raise TargetError(
            "the folder has a demo already",
            expected="a new folder",
            got=f"one of {', '.join(_MADE)} in it",
            where=str(base),
            remedy="choose another folder, or remove these from this one",
        )
    try:
        yield base
        comm.allgather(None)
    finally:
        if folder is None and comm.rank == 0:
            shutil.rmtree(base, ignore_errors=True)


def _strategies() -> tuple[Strategy, Strategy]:
    mesh = _SOURCE_OTHERS.mesh
    source = {name: _SOURCE.get(name, Placement(mesh, ((),) * len(shape))) for name, shape in _SHAPES.items()}
    both = []
    for ranks, placements in ((8, source), (4, _TARGET)):
        named = {name: (placement,) for name, placement in placements.items()}
        momentum = {f"moments.{name}": placement for name, placement in named.items()}
        both.append(Strategy(ranks, 1, {**named, **momentum}))
    return both[0], both[1]


def _tensors() -> Float32Arrays:
    """Return the whole tensors, the same on every process."""
    random = np.random.default_rng(2)
    return {
        prefix + name: random.standard_normal(shape, np.float32)
        for prefix in ("", "moments.")
        for name, shape in _SHAPES.items()
    }


def _write_source(base: Path, tensors: Float32Arrays) -> None:
    source, target = _strategies()
    base.mkdir(parents=True, exist_ok=True)
    shapes = {name: array.shape for name, array in tensors.items()}
    for name, strategy in ((_SRC_STRATEGY, source), (_DST_STRATEGY, target)):
        (base / name).write_bytes(encode_protobuf(to_stage_files(strategy, shapes)[0]))
    for rank in range(source.world_size):
        layouts = {name: Layout(source.find(name)[0], array.shape) for name, array in tensors.items()}
        slices = ((name, _cut(array, layouts[name].box(rank))) for name, array in tensors.items())
        contents = ShardContents.of(
            SampleTensor(name, BY_NAME["float32"], cut.shape, cut.tobytes()) for name, cut in slices
        )
        path = base / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        path.parent.mkdir(parents=True)
        write(formats.by_name(formats.DEFAULT), str(path), contents)


def _request(base: Path) -> Request:
    return Request(
        source=str(base / "src"),
        target=str(base / "dst"),
        src_strategy=str(base / _SRC_STRATEGY),
        dst_strategy=str(base / _DST_STRATEGY),
        prefix=formats.DEFAULT_PREFIX,
        strict=True,
    )


def _check(outcome: Outcome, tensors: Float32Arrays, comm: Comm) -> str:
    """Compare this process's share of the written shards with the whole tensors; return the first error, or ""."""
    for report in outcome.targets[comm.rank :: comm.size]:
        contents = contents_of(formats.by_name(formats.DEFAULT).locate(report.path))
        if set(contents.tensors) != set(tensors):
            return f"rank {report.rank} holds {sorted(contents.tensors)}"
        for name, tensor in contents.tensors.items():
            if tensor.content != _expected(name.removeprefix("moments."), tensors[name], report.rank).tobytes():
                return f"{name!r} of target rank {report.rank} in {report.path}"
    return ""


def _expected(name: str, whole: Float32Array, rank: int) -> Float32Array:
    """Return the correct contents of target rank `rank`, cut by hand, so that the check shares no code with the
    product.
    """
    if name == "layer3.bias":
        return whole
    if name == "layer3.weight":  # in by 2 over the ranks' last bit, then the optimizer by 2 over their first
        half, quarter = whole.shape[0] // 2, whole.shape[0] // 4
        start = rank % 2 * half + rank // 2 * quarter
        return whole[start : start + quarter]
    height = whole.shape[0] // 4
    return whole[rank * height : (rank + 1) * height]


def _cut(array: Float32Array, box: Box) -> Float32Array:
    return array[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]


def _account(base: Path, outcome: Outcome, seconds: float, comm: Comm, *, is_kept: bool) -> str:
    written_bytes = sum(target.written_bytes for target in outcome.targets)
    slices = len(outcome.targets) * 2 * len(_SHAPES)
    processes = "1 process" if comm.size == 1 else f"{comm.size} MPI processes"
    lines = [
        "demo: a 3-layer network with momentum, saved by 8 ranks (layer1 cut ((2,1),(1,2)), layer3 ((2,2),(2,1))),",
        "      resharded for 4 ranks (layer1 ((1,4),(4,1)), layer3 ((2,2),(2,1)), optimizer sharding on)",
        *(
            f"  target {target.rank}: {format_bytes(target.written_bytes)} from source ranks"
            f" {', '.join(map(str, target.read_ranks))}"
            for target in outcome.targets
        ),
        f"{processes} wrote {format_bytes(written_bytes)} in {seconds:.3f} s ({format_rate(written_bytes, seconds)});"
        f" all {slices} slices are bit-exact",
    ]
    if is_kept:
        lines.append(f"its files: {base}/src, {base}/dst, {base / _SRC_STRATEGY}, {base / _DST_STRATEGY}")
    return "\n".join(lines)

"""torch's distributed checkpoint: load into the target's mesh, save again, in processes that talk over gloo."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import Checkpoint
from benchmarks.interpreters import lacks
from benchmarks.measure import PROGRAMS, ROOT, Measured, Run, last_json, measure, settle
from reshard_mpi.sharding.placement import Placement
from reshard_mpi.sharding.strategy import Strategy

# As torch's own launcher sets it: the processes share the cores already.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Dcp:
    """`dcp.load` and `dcp.save`, as a whole command; inner_seconds is that of the two calls, between barriers.

    Its own source, the same tensors saved by as many processes as the other has shards, is made by the first run.
    """

    checkpoint: Checkpoint
    output: Path
    interpreter: str

    @property
    def name(self) -> str:
        return f"torch DCP load + save, {self.processes} processes"

    def missing(self) -> str | None:
        return lacks(self.interpreter, "torch", "--torch")

    def make_source(self) -> None:
        """Have the source made, if it is not there."""
        if not self.source.exists():
            self.measure("save", self.checkpoint.resharding.source.world_size, self.source)

    def run(self) -> Run:
        self.make_source()
        shutil.rmtree(self.output, ignore_errors=True)
        settle(self.checkpoint.folder)
        measured = self.measure("reshard", self.processes, self.source, str(self.output))
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])

    @property
    def source(self) -> Path:
        return self.checkpoint.folder / "src_dcp"

    @property
    def processes(self) -> int:
        """As many as there are targets: each loads what it is to hold."""
        target = self.checkpoint.resharding.target
        return target.world_size if target else 1

    def measure(self, task: str, ranks: int, source: Path, *more: str) -> Measured:
        """Run a task of the program in so many processes. more: its last argument, if it has one more."""
        spec = self.checkpoint.folder / "dcp.json"
        spec.write_text(json.dumps(self._spec()))
        rendezvous = self.checkpoint.folder / f"rendezvous_{uuid.uuid4().hex}"
        program = [self.interpreter, str(PROGRAMS / "torch_dcp.py"), task, str(spec)]
        rest = [str(rendezvous), str(source), *more]
        environment = {**_ONE_THREAD, "PYTHONPATH": str(ROOT)}
        return measure([[*program, str(rank), *rest] for rank in range(ranks)], environment)

    def _spec(self) -> Mapping[str, Any]:
        target = self.checkpoint.resharding.target
        assert target is not None
        return {
            "tensors": self.checkpoint.shapes,
            "source": side_of(self.checkpoint.resharding.source),
            "target": side_of(target),
        }


@dataclass(frozen=True, slots=True)
class DcpLoad:
    """`dcp.load` of `source` into the target's mesh; inner_seconds is that of the call, between barriers.

    reader: the class of the storage reader; "Reader" is ours.
    """

    dcp: Dcp
    source: Path
    reader: str

    @property
    def name(self) -> str:
        return f"dcp.load by {'our ' if self.reader == 'Reader' else ''}{self.reader}"

    def missing(self) -> str | None:
        return self.dcp.missing()

    def run(self) -> Run:
        settle(self.source.parent)
        measured = self.dcp.measure("load", self.dcp.processes, self.source, self.reader)
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])


def side_of(strategy: Strategy) -> Mapping[str, Any]:
    """Return a strategy over data x tensor parallel ranks in torch's terms.

    Its axes cut a dimension in their order; MindSpore's optimizer sharding, over the data axis, comes last.
    """
    placements = {name: held[0] for name, held in strategy.parameters.items()}
    data, tensor = next(iter(placements.values())).mesh
    return {
        "mesh": [[at * tensor + column for at in range(data)] for column in range(tensor)],
        "placements": {name: _cuts(placement) for name, placement in placements.items()},
    }


def _cuts(placement: Placement) -> list[int | None]:
    """Return which tensor dimension each mesh axis cuts, the last axis first; None: none."""
    cut = {axis: dim for dim, axes in enumerate(placement.split) for axis in axes}
    rest = 0 if placement.optimizer > 1 else None
    return [cut.get(axis, rest) for axis in reversed(range(len(placement.mesh)))]

"""What verifying costs: a transform that verifies beside one that does not, and the summing of pieces by itself."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkpoint import generate, source_bytes
from benchmarks.interleave import Comparison, warmed_up
from benchmarks.machine import describe
from benchmarks.measure import Run, last_json
from benchmarks.measure import measure as measure_commands
from benchmarks.network import shapes, with_optimizer_sharding
from benchmarks.peers.ours import Transform
from benchmarks.results import GB, Results
from benchmarks.rows import Clock, Question, alone, answer, largest_process
from benchmarks.targets import SMALL_MB
from benchmarks.workplace import workplace
from reshard_mpi import formats
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.manifest import ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import reserve_file
from reshard_mpi.sharding.box import Box

_BLOCK_BYTES = 1 << 20
# Pieces of a float32 tensor: whole rows, and columns that make runs of 512 bytes. With the transform at 735 MB they
# have as many bytes as are to be summed in a second: 1.5 GB and 0.4 GB.
_COLUMNS = 1024
_RUN_COLUMNS = 128
_CONTIGUOUS_SHARE = 1500 / SMALL_MB
_COLUMNS_SHARE = 400 / SMALL_MB


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one shard holds, and the file it is in; inner_seconds is the time of the sum alone."""

    path: Path
    shape: tuple[int, int]
    box: Box

    @property
    def size_bytes(self) -> int:
        return 4 * self.box.size

    def write(self) -> None:
        """Make the shard."""
        module = formats.by_name("ckpt")
        spec = TensorSpec("w", BY_NAME["float32"], self.shape, self.box)
        shard = reserve_file(module, str(self.path), ShardSpec(ShardIdentity(0, 1, ""), (spec,), {}))
        noise = os.urandom(_BLOCK_BYTES)
        with self.path.open("r+b") as stream:
            for part in shard.tensors["w"].source.ranges:  # type: ignore[union-attr]
                stream.seek(part.offset_bytes)
                for at in range(0, part.length_bytes, _BLOCK_BYTES):
                    stream.write(noise[: part.length_bytes - at])

    def run(self) -> Run:
        place = json.dumps([self.shape, self.box.start, self.box.stop])
        measured = measure_commands([[sys.executable, "-m", "benchmarks.programs.sum_pieces", str(self.path), place]])
        return replace(measured.run, inner_seconds=last_json(measured.stdout)["seconds"])


def measure(megabytes: int, pairs: int, folder: Path | None) -> Results:
    """Measure all of it. megabytes: of the transform, and the size of the larger piece."""
    network = shapes(megabytes)
    resharding = with_optimizer_sharding(network)
    rows_held = int(_CONTIGUOUS_SHARE * megabytes * 1e6) // (4 * _COLUMNS)
    rows_cut = int(_COLUMNS_SHARE * megabytes * 1e6) // (4 * _RUN_COLUMNS)
    needed_bytes = 2 * source_bytes(network, resharding.source) + 4 * megabytes * 1_000_000
    with workplace(folder, needed_bytes) as place:
        machine = describe(place)
        questions = []
        for kind in ("ckpt", "hdf5"):
            (place / kind).mkdir()
            made = generate(place / kind, network, resharding, kind)
            plain = Transform(made, place / "dst", 2)
            comparison = Comparison(Transform(made, plain.output, 2, options=("--verify",)), plain)
            what = f"{made.size_bytes / 1e6:.0f} MB .{kind}, transform --verify"
            questions.append(Question(comparison, f"verify.{kind}", what, megabytes))
        rows = answer(questions, pairs)
        runs = [run for question in questions for run in question.comparison.our_runs]
        contiguous, columns = Box((0, 0), (rows_held, _COLUMNS)), Box((0, 128), (rows_cut, 128 + _RUN_COLUMNS))
        for key, what, piece in (
            ("verify.contiguous", "one run", Piece(place / "run.ckpt", (2 * rows_held, _COLUMNS), contiguous)),
            ("verify.columns", "runs of 512 bytes", Piece(place / "columns.ckpt", (rows_cut, _COLUMNS), columns)),
        ):
            piece.write()
            taken = warmed_up(piece.run, pairs)
            text = f"sum of {piece.size_bytes / GB:.2f} GB, {what}"
            rows.append(alone(key, text, "one process", taken, Clock.INNER, megabytes))
            runs += taken
    return Results("verification", machine, pairs, [*rows, largest_process("verify.memory", runs)])

"""What is to be reached: every row of every benchmark, with the figure by which it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from benchmarks.spread import Spread

MIB = 1 << 20
SMALL_MB = 735
LARGE_MB = 4295  # 4 GiB
COLUMNS_MB = 2400
QUANTIZED_MB = 2000


class Figure(Enum):
    """Which figure of a row is judged; the value says in words what it is."""

    FASTER = "x faster"  # seconds of the peer / ours
    TIME = "x its time"  # seconds, ours / the peer's
    SMALLER = "x less memory"  # peak memory of the peer / ours
    SECONDS = "s"
    PEAK = "MiB"

    @property
    def is_better_when_more(self) -> bool:
        return self in (Figure.FASTER, Figure.SMALLER)


@dataclass(frozen=True, slots=True)
class Target:
    """The figure of a row and the bound it must keep (None: shown, not judged).

    Peaks in bytes, all else in seconds or as a quotient. megabytes: the size for which the bound is meant.
    """

    figure: Figure
    bound: float | None = None
    megabytes: int | None = None

    def is_reached(self, figure: Spread, megabytes: int | None) -> bool | None:
        """Judge the median; None where there is no bound, or it is meant for another size."""
        if self.bound is None or (self.megabytes is not None and self.megabytes != megabytes):
            return None
        return figure.median >= self.bound if self.figure.is_better_when_more else figure.median <= self.bound

    def as_text(self) -> str:
        if self.bound is None:
            return "-"
        bound = self.bound / MIB if self.figure is Figure.PEAK else self.bound
        least_or_most = "at least" if self.figure.is_better_when_more else "at most"
        size = f" at {self.megabytes} MB" if self.megabytes is not None else ""
        return f"{least_or_most} {bound:g}{' ' if self.figure in _UNITS else ''}{self.figure.value}{size}"


_UNITS = (Figure.SECONDS, Figure.PEAK)

TARGETS = {
    # conversion
    "cp.ckpt": Target(Figure.TIME, 1.4, LARGE_MB),
    "cp.hdf5": Target(Figure.TIME, 1.4, LARGE_MB),
    "cp.columns": Target(Figure.TIME, 1.25, COLUMNS_MB),
    "mindspore.jobs": Target(Figure.FASTER, 20, SMALL_MB),
    "mindspore.mpirun": Target(Figure.FASTER, 15, SMALL_MB),
    "mindspore.memory": Target(Figure.SMALLER, 15, SMALL_MB),
    "mindspore.by_rank": Target(Figure.FASTER),
    "torch.api": Target(Figure.FASTER, 3, SMALL_MB),
    "torch.command": Target(Figure.FASTER, 8, SMALL_MB),
    "sharing": Target(Figure.FASTER, 20),
    "conversion.memory": Target(Figure.PEAK, 200 * MIB),
    # scaling
    "scaling.engine": Target(Figure.FASTER, 1.7, LARGE_MB),
    "scaling.command": Target(Figure.FASTER, 1.5, LARGE_MB),
    "scaling.memory": Target(Figure.PEAK, 200 * MIB),
    # verification
    "verify.ckpt": Target(Figure.TIME, 2.0, SMALL_MB),
    "verify.hdf5": Target(Figure.TIME, 2.0, SMALL_MB),
    "verify.contiguous": Target(Figure.SECONDS, 1.0, SMALL_MB),
    "verify.columns": Target(Figure.SECONDS, 1.0, SMALL_MB),
    "verify.memory": Target(Figure.PEAK, 200 * MIB),
    # audit
    "audit.values": Target(Figure.TIME, 3.0, LARGE_MB),
    "audit.values.cpu": Target(Figure.TIME),
    "audit.same": Target(Figure.TIME, 3.0, LARGE_MB),
    "audit.fp32": Target(Figure.TIME, 1.5, LARGE_MB),
    "audit.bf16": Target(Figure.TIME, 2.5, LARGE_MB),
    "audit.experts": Target(Figure.SECONDS, 10.0),
    "audit.experts.memory": Target(Figure.PEAK, 200 * MIB),
    "audit.memory": Target(Figure.PEAK, 100 * MIB),
    # planning
    "ranks.64": Target(Figure.SECONDS),
    "ranks.1024": Target(Figure.SECONDS),
    "ranks.4096": Target(Figure.SECONDS, 0.050),
    "ranks.16384": Target(Figure.SECONDS),
    "ranks.growth": Target(Figure.TIME, 1.1),
    "ranks.large": Target(Figure.SECONDS, 0.800),
    "ranks.large.memory": Target(Figure.PEAK, 300 * MIB),
    "plan.4096": Target(Figure.SECONDS, 0.020),
    "plan.large": Target(Figure.SECONDS, 0.350),
    # forms of checkpoints
    "forms.safetensors": Target(Figure.FASTER, 15, SMALL_MB),
    "forms.safetensors.memory": Target(Figure.SMALLER, 40, SMALL_MB),
    "forms.hf": Target(Figure.FASTER, 3, SMALL_MB),
    "forms.hf.cpu": Target(Figure.FASTER, 2, SMALL_MB),
    "forms.dcp": Target(Figure.FASTER, 8, SMALL_MB),
    "forms.dcp.call": Target(Figure.FASTER, 3, SMALL_MB),
    "forms.torch": Target(Figure.FASTER, 5, SMALL_MB),
    "forms.torch.memory": Target(Figure.SMALLER),
    "forms.cp.safetensors": Target(Figure.TIME, 1.5, LARGE_MB),
    "forms.cp.hf": Target(Figure.TIME, 1.5, LARGE_MB),
    "forms.cp.torch": Target(Figure.TIME, 1.5, LARGE_MB),
    "forms.cp.dcp": Target(Figure.TIME, 1.5, LARGE_MB),
    "forms.memory": Target(Figure.PEAK, 200 * MIB),
    # maps
    "maps.regrouped": Target(Figure.TIME, 1.3, LARGE_MB),
    "maps.turned": Target(Figure.TIME, 2.5, LARGE_MB),
    "maps.cast": Target(Figure.TIME, 1.3, LARGE_MB),
    "maps.plan": Target(Figure.SECONDS, 5.0),
    "maps.plan.memory": Target(Figure.PEAK, 200 * MIB),
    "maps.compile": Target(Figure.SECONDS, 0.5),
    "maps.memory": Target(Figure.PEAK, 200 * MIB),
    # many tensors
    "tensors.ckpt": Target(Figure.SECONDS, 1.5),
    "tensors.torch": Target(Figure.FASTER, 20),
    "tensors.growth": Target(Figure.TIME, 5.5),
    "tensors.to_hdf5": Target(Figure.SECONDS, 3.0),
    "tensors.from_hdf5": Target(Figure.SECONDS, 3.0),
    "tensors.to_safetensors": Target(Figure.SECONDS, 3.0),
    "tensors.from_safetensors": Target(Figure.SECONDS, 3.0),
    "tensors.to_torch": Target(Figure.SECONDS, 3.0),
    "tensors.from_torch": Target(Figure.SECONDS, 3.0),
    "tensors.to_hf": Target(Figure.SECONDS, 3.0),
    "tensors.from_hf": Target(Figure.SECONDS, 3.0),
    "tensors.to_dcp": Target(Figure.SECONDS, 6.0),
    "tensors.from_dcp": Target(Figure.SECONDS, 6.0),
    "tensors.piece": Target(Figure.SECONDS, 0.25),
    "tensors.memory": Target(Figure.PEAK, 200 * MIB),
    # open
    "open.dcp": Target(Figure.TIME, 1.0, SMALL_MB),
    "open.dcp.memory": Target(Figure.SMALLER, 1.0, SMALL_MB),
    "open.hf": Target(Figure.TIME, 1.0, SMALL_MB),
    "open.rows": Target(Figure.TIME, 1.3),
    "open.64.ckpt": Target(Figure.SECONDS, 0.050),
    "open.64.safetensors": Target(Figure.SECONDS, 0.050),
    "open.many.ckpt": Target(Figure.SECONDS, 0.150),
    "open.many.safetensors": Target(Figure.SECONDS, 0.150),
    "open.many.hdf5": Target(Figure.SECONDS, 0.150),
    "open.many.dcp": Target(Figure.SECONDS, 1.0),
    "open.memory": Target(Figure.PEAK, 60 * MIB),
    # DeepSpeed
    "deepspeed.fp32": Target(Figure.FASTER, 5, SMALL_MB),
    "deepspeed.fp32.cpu": Target(Figure.FASTER),
    "deepspeed.fp32.memory": Target(Figure.SMALLER, 10, SMALL_MB),
    "deepspeed.ranks": Target(Figure.FASTER, 5, SMALL_MB),
    "deepspeed.ranks.cpu": Target(Figure.FASTER),
    "deepspeed.ranks.memory": Target(Figure.SMALLER),
    "deepspeed.memory": Target(Figure.PEAK, 200 * MIB),
    # Megatron
    "megatron.weights": Target(Figure.FASTER, 4, SMALL_MB),
    "megatron.weights.cpu": Target(Figure.FASTER),
    "megatron.weights.memory": Target(Figure.SMALLER),
    "megatron.buckets": Target(Figure.TIME, 2.5, SMALL_MB),
    "megatron.memory": Target(Figure.PEAK, 200 * MIB),
    "megatron.items": Target(Figure.SECONDS, 5.0),
    "megatron.items.memory": Target(Figure.PEAK, 300 * MIB),
    # quantized
    "quantized.fp8": Target(Figure.FASTER, 2, QUANTIZED_MB),
    "quantized.fp8.cpu": Target(Figure.FASTER),
    "quantized.fp8.memory": Target(Figure.SMALLER, 10, QUANTIZED_MB),
    "quantized.memory": Target(Figure.PEAK, 200 * MIB),
    # start-up
    "startup.help": Target(Figure.SECONDS, 0.15),
    "startup.import": Target(Figure.SECONDS),
    "startup.jobs1": Target(Figure.SECONDS),
    "startup.jobs2": Target(Figure.SECONDS),
    "startup.memory": Target(Figure.PEAK, 200 * MIB),
}

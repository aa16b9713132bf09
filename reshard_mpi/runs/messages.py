"""Define the messages between the processes of a run (`PlanReport`, `FillReport`)."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard_mpi.filesystem.folders import FileIdentity
from reshard_mpi.runs.outcome import Outcome, merge

if TYPE_CHECKING:  # this module is loaded early, before memory for the engine has been asked for
    from reshard_mpi.formats.manifest import Manifest
    from reshard_mpi.journal.target_records import TensorSum
    from reshard_mpi.planning.rank_plan import RankPlan, SharedFact, StageDigest
    from reshard_mpi.planning.replicas import ReplicaGroup
    from reshard_mpi.planning.source_flaws import Differing, PrefixDigest, UnusableShard
    from reshard_mpi.planning.strategy_check import Drift
    from reshard_mpi.planning.tensor_names import Sums
    from reshard_mpi.runs.outcome import Overflow
    from reshard_mpi.runs.preflight import SpaceNeed


class Reserved(NamedTuple):
    """A target that several processes are going to fill: its file exists, with everything but the payloads."""

    rank: int
    packed: bytes  # its manifest, compressed, since each process gets it of all targets and needs few
    identity: FileIdentity  # of the file

    @classmethod
    def of(cls, rank: int, manifest: Manifest, identity: FileIdentity) -> Reserved:
        return cls(rank, zlib.compress(pickle.dumps(manifest), level=1), identity)

    def manifest(self) -> Manifest:
        """Return the manifest of the file, with the place of each tensor."""
        manifest: Manifest = pickle.loads(zlib.decompress(self.packed))
        return manifest


class Filled(NamedTuple):
    """One process's share of a target that has been filled."""

    rank: int
    requested_bytes: int
    mapped_bytes: int
    seconds: float
    waited_seconds: float
    overflows: tuple[Overflow, ...] = ()


class Verified(NamedTuple):
    """One process's share of a target that has been read back and compared with its sources. sums: of the tensors."""

    rank: int
    sums: tuple[TensorSum, ...]
    waited_seconds: float


class Totals(NamedTuple):
    """How much is to be written: payload bytes, and targets. ready: how many targets are complete already."""

    size_bytes: int = 0
    targets: int = 0
    ready: int = 0


class PlanReport(NamedTuple):
    """A process's plans, sent to all others before anything is written."""

    outcome: Outcome = Outcome()  # notes, warnings, and failures that refuse the run
    # shared_facts, held, prefix_digests: what targets must have in common (see `RankPlan`)
    shared_facts: tuple[SharedFact, ...] = ()
    held: tuple[StageDigest, ...] = ()
    prefix_digests: tuple[PrefixDigest, ...] = ()
    differing: tuple[Differing, ...] = ()  # what shards do not hold alike
    alike: tuple[ReplicaGroup, ...] = ()  # copies that must be the same
    space_needs: tuple[SpaceNeed, ...] = ()
    due: Totals = Totals()  # what it leads the writing of
    sums: tuple[Sums, ...] = ()  # the accumulated gradients of its targets

    @classmethod
    def of(cls, plan: RankPlan) -> PlanReport:
        """Return what there is to tell of the plan of one target."""
        held, differences = (plan.held,), (plan.prefix_digests, plan.differing, plan.alike)
        return cls(Outcome.of(plan), plan.shared_facts, held, *differences, sums=plan.sums)

    def joined(self, others: Iterable[PlanReport]) -> PlanReport:
        """Join this and the `others`; of digests of the same, the first is kept."""
        parts = [self, *others]
        merged = merge(parts)
        held = {(digest.stage, digest.digest): digest for digest in reversed(merged.held)}
        prefix_digests = {(digest.name, digest.digest): digest for digest in reversed(merged.prefix_digests)}
        return merged._replace(
            outcome=self.outcome.joined(part.outcome for part in parts[1:]),
            held=tuple(held.values()),
            prefix_digests=tuple(prefix_digests.values()),
            due=Totals(*map(sum, zip(*(part.due for part in parts)))),
        )


class ComparisonReport(NamedTuple):
    """The result of comparing copies in one process."""

    lost: tuple[UnusableShard, ...]  # source shards that could not be read
    drift: Drift  # tensors that differ from rank to rank


class FillReport(NamedTuple):
    """A process's results on shared targets so far. outcome: with its failures."""

    outcome: Outcome = Outcome()
    reserved: tuple[Reserved, ...] = ()
    filled: tuple[Filled, ...] = ()
    verified: tuple[Verified, ...] = ()

    def joined(self, others: Iterable[FillReport]) -> FillReport:
        """Return this and the `others`, of the same process, as one."""
        parts = [self, *others]
        return merge(parts)._replace(outcome=self.outcome.joined(part.outcome for part in parts[1:]))


R = TypeVar("R", PlanReport, FillReport)


def record_of(kind: type[R], value: R | Outcome) -> R:
    """Return `value` as a record of `kind`; an outcome, of a process that failed or died, as a record of that alone."""
    return kind(value) if isinstance(value, Outcome) else value

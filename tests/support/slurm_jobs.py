"""Jobs of the tests' SLURM cluster, and the batch scripts that the project ships."""

from __future__ import annotations

from pathlib import Path

from support.conversions import Conversion
from support.launch import MPI
from support.oracle import RawLayout
from support.slurm import Task

TARGETS = {"w": RawLayout((8,), (0, -1)), "b": RawLayout((8,), (0,))}
COMPLETED = Task("COMPLETED", 0, 0)
PLUGINS = {"mpich": "pmi2", "openmpi": "pmix"}
# The nodes share one network address, on which Open MPI does not look for others unless it is told to.
LOOPBACK = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_coll": "^han,adapt"}


def rank_environment(mpi: MPI) -> dict[str, str]:
    """Return what srun needs in the environment to start ranks of `mpi`."""
    return {**mpi.environment, **LOOPBACK, "SLURM_MPI_TYPE": PLUGINS[mpi.name]}


LAUNCH = Path(__file__).parents[2] / "launch"


def operands(c: Conversion) -> list[str]:
    """Return source, target and strategies of a conversion, as the scripts take them."""
    return c.arguments("plan")[1:]

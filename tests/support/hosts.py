"""Two hosts on one machine: MPI starts its ranks over a stand-in for ssh that gives every host a name of its own.

What MPI has a host run is run here, in namespaces in which the machine has that host's name and a shared memory that
no other host sees. It goes with the last process of the host, whatever that leaves behind.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launch import MPI

# Done in a host's own namespaces, with its name as the first word.
_BECOME = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs none /dev/shm'
# Called as ssh is: options, a host, and words that its shell is to make a command of.
_SSH = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec unshare --uts --mount sh -c '{_BECOME} && exec sh -c "$*"' "$host" "$@"
"""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts that one MPI implementation can start ranks on. ssh: the program that stands in for ssh."""

    mpi: MPI
    names: tuple[str, ...]
    ssh: Path

    def command(self, per_host: int, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the command line that runs `argv` on `per_host` ranks of every host, those of the first one first."""
        names, ranks = ",".join(self.names), str(per_host * len(self.names))
        if self.mpi.name == "mpich":
            environment: dict[str, str] = {}
            options = ["-localhost", "localhost", "-launcher", "ssh", "-launcher-exec", str(self.ssh)]
            options += ["-hosts", names, "-ppn", str(per_host)]
        else:
            # No network fabrics, but TCP between the hosts. Collectives that look for hosts hang where they share one.
            environment = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_coll": "^han,adapt"}
            slots = ",".join(f"{name}:{per_host}" for name in self.names)
            options = ["--prtemca", "plm_ssh_agent", str(self.ssh), "--host", slots]
            options += ["--map-by", f"ppr:{per_host}:node:oversubscribe"]
        variables = [f"{name}={value}" for name, value in {**self.mpi.environment, **environment}.items()]
        launcher = ["env", *variables, str(self.mpi.launcher), *options, "-n", ranks]
        return launcher + [os.fspath(part) for part in argv]


def make_hosts(mpi: MPI, folder: Path, *names: str) -> Hosts:
    """Return hosts of these names, or skip the test where this user may not have them. folder: for their program."""
    if problem := _why_not():
        pytest.skip(f"no simulated hosts: {problem}")
    if mpi.name == "openmpi" and mpi.launcher.name != "ompirun_wrapper":
        pytest.skip("simulated hosts are for Open MPI 5")
    ssh = folder / "stand_in_for_ssh"
    ssh.write_text(_SSH)
    ssh.chmod(0o755)
    return Hosts(mpi, names, ssh)


def _why_not() -> str:
    """Return what keeps this user from having simulated hosts; nothing if they are permitted."""
    try:
        tried = subprocess.run(
            ["unshare", "--uts", "--mount", "sh", "-c", _BECOME, "node-a"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""

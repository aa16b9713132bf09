"""What a host is called. Processes of one host share its memory, and may fill a file together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Names this host, if its own name will not do.
HOST_VARIABLE = "RESHARD_MPI_HOST"
# Drawn anew whenever a kernel starts: two machines never have the same one, the containers of one machine have.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DIGITS = 8


class Identity(NamedTuple):
    """Identifies the host of a process.

    kernel: the random number that its kernel has drawn at its start; empty if it has none.
    """

    name: str
    kernel: str

    @classmethod
    def local(cls, environment: Mapping[str, str]) -> Identity:
        """Return the identity of the host of this process."""
        try:
            kernel = _BOOT_ID.read_text().strip().replace("-", "")
        except OSError:
            kernel = ""
        return cls(host_name(environment), kernel)


def host_name(environment: Mapping[str, str]) -> str:
    """Return the name of this host: that in `RESHARD_MPI_HOST`, else its own."""
    return environment.get(HOST_VARIABLE) or os.uname().nodename


def distinct_names(identities: Sequence[Identity]) -> list[str]:
    """Return a name for the host of each identity: the same for one host, and different for different hosts.

    If hosts share a name, the number that their kernels have drawn is added: `node#1a2b3c4d`.
    """
    kernels: dict[str, set[str]] = {}
    for identity in identities:
        kernels.setdefault(identity.name, set()).add(identity.kernel)
    return [
        name if len(kernels[name]) == 1 else f"{name}#{kernel[:_DIGITS] or 'unknown'}" for name, kernel in identities
    ]

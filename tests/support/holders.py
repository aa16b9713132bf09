"""Processes that take a lease, hold it and give it back as a test tells them; run as a program, this is one of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from reshard_mpi.processes import governor as governing
from reshard_mpi.processes.governor import Allowance, Governor, open_governor
from reshard_mpi.text import Say

TIMEOUT_SECONDS = 300.0


class Holder:
    """A process that wants a lease of `size_bytes`, and uses `used_bytes` of memory while it has it."""

    def __init__(
        self,
        state: Path,
        size_bytes: int,
        *,
        memory: str = "unlimited",
        max_active: int | None = None,
        used_bytes: int = 0,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        arguments = [memory, str(max_active or 0), str(size_bytes), str(used_bytes)]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RESHARD_MPI_STATE_DIR": str(state), **(env or {})},
        )
        self._said = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> str:
        """Return the next line the process says."""
        assert self.process.stdout is not None
        while b"\n" not in self._said:
            ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)
            assert ready, "the process says nothing"
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, "the process has ended"
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def expect(self, expected: str) -> Self:
        """Wait for the process to say this, passing over what it says of waiting."""
        while (line := self.read()) != expected:
            assert line.startswith("waits: "), line
        return self

    def let_go(self) -> None:
        """Have the process give its lease back and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT_SECONDS) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def ended(*holders: Holder) -> Iterator[None]:
    """Kill what is left of these in the end."""
    try:
        yield
    finally:
        for holder in holders:
            holder.kill()
            for stream in (holder.process.stdin, holder.process.stdout):
                if stream is not None:
                    stream.close()


def until(condition: object, what: str) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def leased(governor: Governor, size_bytes: int, purpose: str, say: Say) -> Iterator[float]:
    """Hold a lease of `size_bytes` as long as the block lasts; yields the seconds waited."""
    lease = governor.take(size_bytes, purpose, say)
    try:
        yield lease.waited_seconds
    finally:
        lease.give_back()


def main(memory: str, max_active: str, size_bytes: str, used_bytes: str) -> None:
    """Take a lease, say so, and hold it until standard input is closed."""
    governing._FIRST_NOTICE_SECONDS = 0.0
    governor = open_governor(Allowance.of(memory, int(max_active) or None, {}), os.environ)
    with leased(governor, int(size_bytes), f"process {os.getpid()}", lambda text: say(f"waits: {text}")):
        memory_in_use = b"\1" * int(used_bytes)
        say("holds")
        sys.stdin.read()
        del memory_in_use


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The size of the stack that this process may use."""

from __future__ import annotations

import resource

from reshard_mpi.errors import UsageError
from reshard_mpi.units import KIB, MIB, format_bytes

# With 128 KiB Python 3.11 crashes on deeply nested lists in a file before it notices how deep they are; with less than
# 96 KiB it does not even start this program.
MIN_STACK_BYTES = MIB


def require_stack() -> None:
    """Raise the limit on the stack to what Python needs. Raises UsageError if the user may not."""
    allowed_bytes, most_bytes = resource.getrlimit(resource.RLIMIT_STACK)
    if allowed_bytes == resource.RLIM_INFINITY or allowed_bytes >= MIN_STACK_BYTES:
        return
    if most_bytes != resource.RLIM_INFINITY and most_bytes < MIN_STACK_BYTES:
        raise UsageError(
            "the limit on the size of the stack is too low for Python",
            expected=f"{format_bytes(MIN_STACK_BYTES)} or more",
            got=format_bytes(most_bytes),
            remedy=f"ulimit -s {8 * MIB // KIB}, as is usual, in a shell in which it has not been lowered for good",
        )
    resource.setrlimit(resource.RLIMIT_STACK, (MIN_STACK_BYTES, most_bytes))

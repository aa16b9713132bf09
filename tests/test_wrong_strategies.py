"""A spec with one slip in it is refused by name, or the result is right: never wrong bytes with exit code 0."""

from __future__ import annotations

import tempfile
from pathlib import Path

from checkpoints import as_read, read_shard
from hypothesis import event, given, settings
from wrong_specs import Slip, contradictions, slips, write

import reshard_mpi
from reshard_mpi.errors import ReshardError


def outcome(slip: Slip, folder: Path) -> str:
    """Transform by the wrong spec; return "right", "wrong", or "refused"."""
    shards = slip.right.shards(slip.tensors)
    write(shards, folder / "src")
    (folder / "src.toml").write_text(slip.wrong.text())
    (folder / "dst.toml").write_text(slip.target.text())
    try:
        reshard_mpi.transform_checkpoints(
            folder / "src", folder / "dst", "c_", folder / "src.toml", folder / "dst.toml"
        )
    except ReshardError as error:
        assert error.exit_code == 3, error
        return "refused"
    expected = slip.target.shards(slip.tensors)
    right = all(
        read_shard(folder / "dst" / f"rank_{rank}" / f"c_{rank}.ckpt") == as_read(arrays)
        for rank, arrays in expected.items()
    )
    return "right" if right else "wrong"


@settings(max_examples=150)
@given(slip=slips())
def test_a_slip_is_refused_or_makes_no_difference(slip: Slip) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = outcome(slip, Path(name))
    if found == "wrong":
        proofs = list(contradictions(slip.wrong, slip.right.shards(slip.tensors)))
        assert not proofs, f"{slip.what}: exit code 0 and wrong bytes, though {proofs[0]}"
        event(f"{slip.what}: wrong, and no byte says so")
    else:
        event(f"{slip.what}: {found}")

"""The commands of the guide's page on buckets, word for word but for the bucket's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.object_servers import Bucket, names, upload
from support.pages import GUIDE, block_run_by
from support.processes import run_command


@pytest.mark.slow
def test_the_commands_of_the_page(moto: Bucket, tmp_path: Path) -> None:
    program = f"{sys.executable} -m reshard_mpi"
    commands = block_run_by((GUIDE / "buckets.md").read_text(), "test_the_commands_of_the_page")
    commands = commands.replace("s3://models/", f"{moto.url}/").replace("reshard-mpi ", f"{program} ")
    run_command(["bash", "-c", f"{program} demo made"], cwd=tmp_path, check=True)
    upload(tmp_path / "made", moto / "run")
    run_command(["bash", "-e", "-c", commands], cwd=tmp_path, check=True)
    assert "four/reshard.json" in names(moto.url)
    assert (tmp_path / "one_file" / "rank_0" / "checkpoint_0.pt").exists()

"""Which object store a command asks: `--s3-endpoint`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import run_apart, run_here
from support.conversions import Conversion, make, shards
from support.full_checkpoints import floats, source_of
from support.launch import MPI
from support.object_servers import Bucket, upload

from reshard_mpi.cli.arguments import commands_of, parser

NOWHERE = "http://127.0.0.1:1"


def test_every_command_that_takes_an_address_can_be_told() -> None:
    told = {
        name for name, command in commands_of(parser()).items() if "--s3-endpoint" in command._option_string_actions
    }
    assert told == set(commands_of(parser())) - {"governor", "help", "completion", "demo"}


@pytest.mark.parametrize("word", ["minio:9000", "http://", "s3://b", "http://a b", "https://a?b", ""])
def test_what_is_no_address_of_a_server(word: str, tmp_path: Path) -> None:
    finished = run_here("transform", "s3://bucket/a", tmp_path / "out", f"--s3-endpoint={word}")
    assert finished.code == 2 and "--s3-endpoint" in finished.err and "https://HOST" in finished.err


@pytest.mark.parametrize("jobs", [1, 2])
def test_it_goes_before_the_environment(moto: Bucket, c: Conversion, tmp_path: Path, jobs: int) -> None:
    upload(tmp_path, moto / "c")
    words = [moto / "c/src", tmp_path / "out", "--src-strategy", moto / "c/src_strategy", "--jobs", str(jobs)]
    words += ["--dst-strategy", c.dst_strategy, "--s3-endpoint", moto.server.endpoint]
    run_apart("transform", *words, env={"AWS_ENDPOINT_URL_S3": NOWHERE}, check=True)
    c.done()
    assert shards(c.dst) == shards(tmp_path / "out")


def test_ranks_of_mpi_are_told(moto: Bucket, tmp_path: Path, mpi: MPI) -> None:
    make(tmp_path)
    upload(tmp_path, moto / "c")
    words = [moto / "c/src", tmp_path / "out", "--src-strategy", moto / "c/src_strategy"]
    words += ["--s3-endpoint", moto.server.endpoint]
    run_apart("transform", *words, mpi=mpi, env={"AWS_ENDPOINT_URL_S3": NOWHERE}, check=True)


@pytest.mark.parametrize("runner", ["slurm", "kubernetes"])
def test_scripts_have_it(moto: Bucket, tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(source_of(tmp_path, {"w": floats(8)}), moto / "src")
    (tmp_path / "s.toml").write_text('mesh = { d = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["d"] }\n')
    words = [moto / "src", tmp_path / "out", "--dst-strategy", tmp_path / "s.toml", "--script", runner]
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)  # which is put back
    script = run_here("plan", *words, "--s3-endpoint", moto.server.endpoint).out
    assert f"--s3-endpoint={moto.server.endpoint}" in script and f"transform {moto / 'src'} " in script
    assert "s3:/" not in script.replace("s3://", "")
    if runner == "kubernetes":
        assert script.count("mountPath") == 1  # of the target

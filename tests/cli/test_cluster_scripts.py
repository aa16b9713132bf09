"""`plan --script`: scripts and manifests that are right as text, and do what a serial run does when they are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from support import deepspeed_peer, megatron_peer
from support.cases import Side
from support.checkpoints import read_shard
from support.command_line import COMMAND, done
from support.conversions import DST_LAYOUTS, Conversion, listing, make, shards, write_conversion
from support.oracle import RawLayout
from support.processes import Finished, run_command

from reshard_mpi.cli import arguments
from reshard_mpi.cli.cluster_scripts import cluster_script
from reshard_mpi.options import OPTIONS
from reshard_mpi.runs.plan_command import Plan, RankSummary
from reshard_mpi.runs.request import Request
from reshard_mpi.text import MIB


def staged(folder: Path, kind: str = "ckpt") -> Conversion:
    """Write a checkpoint of 2 ranks to be made one of 3 stages, the last of which holds the most."""
    tensors = {
        "a": np.arange(4, dtype=np.float32),
        "b": np.arange(64, dtype=np.float32).reshape(8, 8),
        "c": np.arange(1024, dtype=np.float32).reshape(32, 32),
    }
    source = Side(2, 1, {name: RawLayout((2,), (0,) + (-1,) * (array.ndim - 1)) for name, array in tensors.items()})
    cut = {"a": (0,), "b": (0, -1), "c": (-1, 0)}
    target = Side(6, 3, {name: RawLayout((2,), cut[name], stages=(number,)) for number, name in enumerate(tensors)})
    return write_conversion(folder, kind, source, target, tensors)


def script_of(c: Conversion, *options: str) -> str:
    return c.done("plan", "--script", "slurm", *options).out


def settings(script: str) -> dict[str, str]:
    """Return what #SBATCH lines say, as far as sbatch reads: to the first command."""
    settings_found = {}
    for line in script.splitlines():
        if not line.startswith("#") and line.strip():
            break
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            settings_found[name] = value
    return settings_found


def run_elsewhere(folder: Path, command: list[str], task: dict[str, str], *, program: str | None = None) -> Finished:
    """Run a command of a task in another folder, with `program` (Python) or else the real thing as `reshard-mpi`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "elsewhere").mkdir(exist_ok=True)
    stub = folder / "bin" / "reshard-mpi"
    words = COMMAND if program is None else [sys.executable, "-c", program]
    stub.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **task}
    return run_command(command, env=env, cwd=folder / "elsewhere")


def run_script(folder: Path, script: str, task: int, *, program: str | None = None) -> Finished:
    """Run a task of the script."""
    (folder / "job.sbatch").write_bytes(os.fsencode(script))
    command = ["bash", str(folder / "job.sbatch")]
    return run_elsewhere(folder, command, {"SLURM_ARRAY_TASK_ID": str(task)}, program=program)


def words_of(folder: Path, script: str, task: int = 0) -> list[str]:
    """Return the words that the script starts reshard-mpi with."""
    say = "import os, sys; open('words', 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    finished = run_script(folder, script, task, program=say)
    assert finished.code == 0 and finished.err == "", finished
    return os.fsdecode((folder / "elsewhere" / "words").read_bytes()).split("\0")


def options_of(words: list[str]) -> dict[str, object]:
    return {name: value for name, value in vars(arguments.parser().parse_args(words)).items() if name != "command"}


# As text


def test_settings(c: Conversion, tmp_path: Path) -> None:
    script = script_of(c)
    planned = json.loads(c.run("plan", "--json").out)
    assert script.startswith("#!/bin/bash\n")
    assert settings(script) == {
        "job-name": "reshard",
        "array": "0-1",
        "cpus-per-task": "1",
        "mem": f"{-(-planned['peak_bytes'] // MIB) + 64}M",
        "time": "00:11:00",
        "requeue": "",
        "open-mode": "append",
        "output": "reshard_%A_%a.log",
    }
    assert script.count("\nexec ") == 1 and script.endswith('--part "$SLURM_ARRAY_TASK_ID/2" --resume --jobs 1\n')
    assert f"--wrap 'reshard-mpi commit {c.dst}'\n" in script
    assert "2 targets, of which 2 with 392 B were still to be made." in script
    assert not list(tmp_path.glob("dst"))


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_it_is_clean_for_bash_and_shellcheck(c: Conversion, tmp_path: Path, options: list[str]) -> None:
    odd = tmp_path / 'it\'s a "checkpoint" # 1'
    c.src.rename(odd)
    path = tmp_path / "job.sbatch"
    path.write_text(script_of(c.but(src=odd, dst=odd / "dst"), *options))
    assert run_command(["bash", "-n", str(path)]).code == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    finished = run_command(["shellcheck", str(path)])
    assert finished.code == 0, finished


@pytest.mark.slow
def test_odd_paths_arrive_as_they_are(c: Conversion, tmp_path: Path) -> None:
    odd = os.fsdecode(b'it\'s "$HOME" `touch hacked` \\ a\ntouch hacked\n#\xff')
    c.src.rename(tmp_path / odd)
    words = ["plan", odd, f"../{tmp_path.name}/-{odd}", "--sbatch", f"--prefix=-{odd[-3:]} ", "--select", "*"]
    words += ["--src-strategy", str(c.src_strategy), "--dst-strategy", f"./{c.dst_strategy.relative_to(tmp_path)}"]
    assert run_command(["bash", "-c", shlex.join([*COMMAND, *words]) + " > out"], cwd=tmp_path).code == 0
    found = words_of(tmp_path, os.fsdecode((tmp_path / "out").read_bytes()))
    assert found[:3] == ["transform", f"{tmp_path}/{odd}", f"{tmp_path}/../{tmp_path.name}/-{odd}"]
    assert f"--prefix=-{odd[-3:]} " in found and "--select=*" in found
    assert f"--dst-strategy={c.dst_strategy}" in found
    assert not list(tmp_path.rglob("hacked"))


# What is passed on


def flags(command: str) -> set[str]:
    """Return the options of a command, as its parser knows them."""
    actions = arguments.commands_of(arguments.parser())[command]._actions
    return {flag for action in actions for flag in action.option_strings} - {"-h", "--help"}


PASSED_ON = {option.flag for option in OPTIONS.values() if option.is_of_transform and not option.is_of_task}


def test_no_option_of_transform_is_forgotten() -> None:
    own = {*("--rank", "--part", "--resume", "--jobs", "--report", "--progress", "-q", "--quiet", "-v", "--verbose")}
    assert flags("transform") == PASSED_ON | own | {"--s3-endpoint"}  # which is passed on as well
    assert flags("plan") >= PASSED_ON


# Besides the strategies, which are always given here.
GIVEN = (
    *(
        "--prefix=net ",
        "--select=check*",
        "--from=ckpt",
        "--src-files=4",
        "--to=hdf5",
        "--unlisted=replicate",
        "--strict",
        "--overwrite",
        "--single-writer",
    ),
    *("--memory=64G", "--max-active=3", "--verify", "--crc", "--replicas=check", "--accumulated=mean"),
)


MAPPED = ("--map", "--config", "--axis", "--like", "--forward", "--reverse", "--dtype", "--include", "--exclude")


@pytest.mark.parametrize("direction", ["--forward", "--reverse"])
def test_what_becomes_of_tensors_is_passed_on(c: Conversion, tmp_path: Path, direction: str) -> None:
    (tmp_path / "map.toml").write_text('[[map]]\neq = "{p*} <=> {p*}"\n')
    (tmp_path / "config.json").write_text("{}")
    given = (
        *(f"--map={tmp_path / 'map.toml'}", f"--config={tmp_path / 'config.json'}", direction, "--dtype=fp64"),
        *("--dtype=*=fp32", "--include=*", "--include=w*", "--exclude=global*"),
    )
    options = options_of(words_of(tmp_path, script_of(c, *given)))
    assert options == options_of(c.arguments("transform", *given, "--resume", "--part", "0/2"))


def test_the_checkpoint_that_the_target_is_to_be_like_and_lengths_of_axes_are_passed_on(tmp_path: Path) -> None:
    asked = Request("src", "dst", map=(f"{tmp_path}/map.toml",), like="like it", axis=("m=4", "n=2"))
    script = cluster_script("slurm", asked, Plan((), "a source"), 2)
    assert f"--like='{Path('like it').absolute()}'" in script
    assert "--axis=m=4" in script and "--axis=n=2" in script


@pytest.mark.parametrize("given", GIVEN)
def test_an_option_is_passed_on(c: Conversion, tmp_path: Path, given: str) -> None:
    again = [] if given == "--overwrite" else ["--resume"]
    options = options_of(words_of(tmp_path, script_of(c, given)))
    assert options == options_of(c.arguments("transform", given, *again, "--part", "0/2"))


@pytest.mark.parametrize(
    ("given", "files"), [(("--to=hf", "--max-shard-size=140"), 3), (("--to=megatron", "--core-version=0.18"), 1)]
)
def test_what_files_are_like_is_passed_on(tmp_path: Path, given: tuple[str, ...], files: int) -> None:
    c = make(tmp_path).but(dst_strategy=None)
    found = options_of(words_of(tmp_path, script_of(c, *given)))
    assert found == options_of(c.arguments("transform", *given, "--resume", "--part", f"0/{files}"))


def test_the_ranks_that_files_are_packed_for_are_passed_on(tmp_path: Path) -> None:
    deepspeed_peer.write(tmp_path / "save", deepspeed_peer.training({"w": (3, 4)}), deepspeed_peer.Form())
    assert_passed_on(tmp_path, "--to=deepspeed", "--dp=3", "--zero-stage=3", parts=6)


@pytest.mark.slow
def test_the_ranks_that_share_out_experts_are_passed_on(tmp_path: Path) -> None:
    megatron_peer.write(tmp_path / "save", megatron_peer.gpt(experts=4), megatron_peer.Form("fully_reshardable"))
    assert_passed_on(tmp_path, "--to=megatron", "--ep=2", parts=1)


def assert_passed_on(folder: Path, *options: str, parts: int) -> None:
    """Check that the command in a script of so many tasks has the options that were given."""
    given = ("transform", str(folder / "save"), str(folder / "out"), *options)
    script = done("plan", "--sbatch", *given[1:]).out
    assert options_of(words_of(folder, script)) == options_of([*given, "--jobs=1", "--resume", "--part", f"0/{parts}"])


def test_every_option_that_is_passed_on_is_tried() -> None:
    tried = {given.partition("=")[0] for given in GIVEN} | {
        "--src-strategy",
        "--dst-strategy",
        "--max-shard-size",
        "--dp",
        "--zero-stage",
        "--ep",
        "--core-version",
        *MAPPED,
    }
    assert tried == PASSED_ON


@pytest.mark.parametrize("options", [["--rank", "0"], ["--part", "0/2"], ["--json"], ["--resume", "--overwrite"]])
def test_wrong_usage(c: Conversion, options: list[str]) -> None:
    finished = c.run("plan", "--sbatch", *options)
    assert finished.code == 2 and finished.out == "" and options[0] in finished.err


def test_notes_do_not_get_into_the_script(c: Conversion) -> None:
    c = c.but(dst_strategy=c.strategy("more", {**DST_LAYOUTS, "never.saved": RawLayout((2,), (0,))}))
    finished = c.done("plan", "--sbatch")
    assert "never.saved" in finished.err and "never.saved" not in finished.out
    c.shard(3).write_bytes(b"")
    finished = c.done("plan", "--sbatch")
    assert "rank 3 cannot be used" in finished.err and "rank 3" not in finished.out
    c.shard(1).write_bytes(b"")
    finished = c.run("plan", "--sbatch")
    assert finished.code == 3 and finished.out == ""


def test_what_is_complete_is_not_counted(c: Conversion) -> None:
    for made, left in ((["--rank", "1"], 1), (["--resume"], 0)):
        c.done("transform", *made)
        script = script_of(c)
        assert f"2 targets, of which {left} with {196 * left} B were still to be made." in script
        assert settings(script)["array"] == "0-1"
    assert settings(script)["mem"] == "128M"
    script = script_of(c, "--overwrite")
    assert "of which 2 with" in script and "--resume" not in script and "is skipped" not in script
    assert c.run("plan", "--sbatch", "--unlisted", "drop").code == 3  # another run


def plan_of(sizes: list[int], peak_bytes: int) -> Plan:
    targets = (RankSummary(rank, (0,), 1, 1, size, size, peak_bytes, (), ()) for rank, size in enumerate(sizes))
    return Plan(tuple(targets), "a checkpoint")


REQUEST = Request("s", "d", prefix="net", resume=True)


def test_as_many_tasks_as_targets_up_to_what_slurm_takes() -> None:
    script = cluster_script("slurm", REQUEST, plan_of([1] * 1000, 100 * MIB + 1), 1000)
    assert settings(script)["array"] == "0-999" and "Task R makes target rank R." in script
    assert settings(script)["mem"] == "165M"
    script = cluster_script("slurm", REQUEST, plan_of([1] * 1001, 100 * MIB), 1001)
    assert settings(script)["array"] == "0-999" and '--part "$SLURM_ARRAY_TASK_ID/1000"' in script
    assert "There are 1000 tasks, since SLURM by default takes no more than 1001" in script
    assert settings(script)["mem"] == "164M"


@pytest.mark.parametrize(
    ("sizes", "time"),
    [
        ([1], "00:11:00"),
        ([1200 * MIB, 5], "00:11:00"),
        ([1200 * MIB + 1, 5], "00:12:00"),
        ([200 * 1200 * MIB], "03:30:00"),
        ([20_000 * 1200 * MIB], "333:30:00"),
        ([1200 * MIB] * 2500, "00:14:00"),  # 2.5 and the largest: a task may have 3
    ],
)
def test_time(sizes: list[int], time: str) -> None:
    assert settings(cluster_script("slurm", REQUEST, plan_of(sizes, MIB), len(sizes)))["time"] == time


# As it runs


@pytest.mark.slow
def test_part_i_of_as_many_parts_as_targets_is_target_rank_i(tmp_path: Path) -> None:
    """However much each of them holds: the last stage's targets are the largest."""
    c = staged(tmp_path)
    for parts, order in ((6, (3, 0, 5, 1, 4, 2)), (9, (8, 2, 7, 5))):
        dst = c.but(dst=tmp_path / f"dst_{parts}")
        for part in order:
            assert dst.done("transform", "--part", f"{part}/{parts}").out.startswith(f"wrote {int(part < 6)} shard")
            if part < 6:
                assert read_shard(dst.written(part)) == c.expected(part)
        assert len(list(dst.dst.glob("rank_*/*"))) == sum(part < 6 for part in order)


@pytest.mark.slow
def test_its_tasks_do_what_a_serial_run_does(tmp_path: Path) -> None:
    c = staged(tmp_path, "hdf5")
    c = c.but(dst=tmp_path / 'it\'s "out"')
    whole = c.but(dst=tmp_path / "whole")
    whole.done()
    script = script_of(c)
    assert settings(script)["array"] == "0-5"
    for task in (5, 0, 3, 1, 2):
        assert run_script(tmp_path, script, task).code == 0
        assert c.written(task).exists()
    commit = commit_command(script)
    assert commit_by(commit, tmp_path).code == 4
    assert run_script(tmp_path, script, 4).code == 0
    assert run_script(tmp_path, script, 4).code == 0  # requeued
    finished = commit_by(commit, tmp_path)
    assert finished.code == 0 and finished.out.startswith("committed 6 targets"), finished
    assert shards(c.dst) == shards(whole.dst)
    assert (c.dst / "reshard.json").read_bytes() == (whole.dst / "reshard.json").read_bytes()
    assert not listing(tmp_path / "elsewhere")


def commit_command(script: str) -> str:
    """Return the command of the dependent task: what the shell makes of the last words of the line that submits it."""
    (line,) = re.findall(r"^# +(sbatch --dependency=.*)$", script, re.MULTILINE)
    words = shlex.split(line)
    assert words[:3] == ["sbatch", "--dependency=afterok:$job", "--kill-on-invalid-dep=yes"] and words[3] == "--wrap"
    return words[4]


def commit_by(command: str, folder: Path) -> Finished:
    return run_command(["bash", "-c", command], env={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"})


# Kubernetes


def manifest_of(c: Conversion, *options: str) -> dict[str, Any]:
    manifest = yaml.safe_load(c.done("plan", "--script", "kubernetes", *options).out)
    schema = json.loads((Path(__file__).parents[1] / "support/kubernetes_job.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    assert isinstance(manifest, dict)
    return manifest


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def mounts_of(manifest: dict[str, Any]) -> dict[str, bool]:
    """Return the mounted folders, each with whether it may be written to."""
    return {mount["mountPath"]: not mount.get("readOnly", False) for mount in container_of(manifest)["volumeMounts"]}


def run_index(folder: Path, manifest: dict[str, Any], index: int) -> Finished:
    """Run the command of an index. In it Kubernetes puts the variable for `$(NAME)`, and `$` for `$$`."""
    variables = {"JOB_COMPLETION_INDEX": str(index)}

    def expanded(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    command = [re.sub(r"\$\$|\$\((\w+)\)", expanded, word) for word in container_of(manifest)["command"]]
    return run_elsewhere(folder, command, variables)


def test_a_manifest_says_what_the_plan_says(c: Conversion, tmp_path: Path) -> None:
    manifest = manifest_of(c)
    planned = json.loads(c.run("plan", "--json").out)
    spec = manifest["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    memory = f"{-(-planned['peak_bytes'] // MIB) + 64}Mi"
    resources = container_of(manifest)["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (memory, memory)
    *_, for_ever = spec["podFailurePolicy"]["rules"]
    assert for_ever["onExitCodes"] == {"containerName": "main", "operator": "In", "values": [2, 3, 5]}
    assert mounts_of(manifest) == {str(tmp_path): True}  # the target lies beside the source and the strategies
    assert {volume["name"] for volume in spec["template"]["spec"]["volumes"]} == {"folder-0"}


def test_each_folder_is_mounted_and_only_the_target_may_be_written_to(c: Conversion, tmp_path: Path) -> None:
    for folder in ("data", "plans", "made/out"):
        (tmp_path / folder).mkdir(parents=True)
    strategies = [tmp_path / "plans" / name for name in ("from.ckpt", "to.ckpt")]
    for strategy, path in zip((c.src_strategy, c.dst_strategy), strategies):
        assert strategy is not None
        strategy.rename(path)
    source = c.src.rename(tmp_path / 'data/it\'s "1"')
    (tmp_path / "map.toml").write_text('[[map]]\neq = "{p*} <=> {p*}"\n')
    apart = c.but(src=source, dst=tmp_path / "made/out", src_strategy=strategies[0], dst_strategy=strategies[1])
    expected = {str(source): False, str(tmp_path / "plans"): False, str(tmp_path / "made"): True}
    assert mounts_of(manifest_of(apart)) == expected
    assert mounts_of(manifest_of(apart, "--forward", "--map", str(tmp_path / "map.toml"))) == {str(tmp_path): True}


def test_a_map_that_comes_with_the_program_is_known_by_its_name(c: Conversion) -> None:
    manifest = yaml.safe_load(
        cluster_script("kubernetes", Request(str(c.src), str(c.dst), map=("hf-llama-megatron",)), Plan((), "a"), 2)
    )
    assert "--map=hf-llama-megatron " in container_of(manifest)["command"][2]
    assert all("reshard_mpi" not in folder for folder in mounts_of(manifest))


@pytest.mark.slow
def test_its_indexes_do_what_a_serial_run_does(tmp_path: Path) -> None:
    c = staged(tmp_path, "ckpt")
    c = c.but(dst=tmp_path / 'it\'s "out"')
    whole = c.but(dst=tmp_path / "whole")
    whole.done()
    manifest = manifest_of(c)
    for index in (5, 0, 3, 1, 2):
        finished = run_index(tmp_path, manifest, index)
        assert finished.code == 0, finished
        assert f"this is task {index} of 6, counted from 0, as JOB_COMPLETION_INDEX says" in finished.err
        assert c.written(index).exists()
    assert run_index(tmp_path, manifest, 6).code == 2
    assert run_index(tmp_path, manifest, 4).code == 0
    assert run_index(tmp_path, manifest, 4).code == 0  # tried again when all is done
    assert shards(c.dst) == shards(whole.dst)
    assert (c.dst / "reshard.json").read_bytes() == (whole.dst / "reshard.json").read_bytes()


def test_what_kubernetes_would_replace_arrives_as_it_is(c: Conversion, tmp_path: Path) -> None:
    own = c.but(dst=tmp_path / "out$$7$(JOB_COMPLETION_INDEX)$$(JOB_COMPLETION_INDEX)")
    finished = run_index(tmp_path, manifest_of(own), 0)
    assert finished.code == 0 and own.written(0).exists(), finished


@pytest.mark.slow
def test_two_last_tasks_at_once_commit_all(tmp_path: Path) -> None:
    c = staged(tmp_path)
    whole = c.but(dst=tmp_path / "whole")
    whole.done()
    for turn in range(4):
        own = c.but(dst=tmp_path / f"dst_{turn}")
        own.done("transform", "--rank", "0-3")
        words = [own.arguments("transform", "--part", f"{part}/6", "--resume", "--jobs", "1") for part in (4, 5)]
        tasks = [subprocess.Popen([*COMMAND, *own_words], stderr=subprocess.PIPE, text=True) for own_words in words]
        for task in tasks:
            assert "Traceback" not in task.communicate()[1]
            assert task.returncode == 0
        assert (own.dst / "reshard.json").read_bytes() == (whole.dst / "reshard.json").read_bytes()
        assert shards(own.dst) == shards(whole.dst)


@pytest.mark.parametrize("name", ["a:b", "a\nb", "a\udcffb"])
def test_what_kubernetes_cannot_mount_is_refused(c: Conversion, tmp_path: Path, name: str) -> None:
    finished = c.but(src=c.src.rename(tmp_path / name), dst=tmp_path / "out/put").run("plan", "--script", "kubernetes")
    assert finished.code == 2 and "Kubernetes cannot mount" in finished.err and not finished.out

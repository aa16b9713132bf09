"""Where leases are kept: a folder that is this user's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reshard_mpi.errors import ReshardError
from reshard_mpi.processes import ledger_folder
from reshard_mpi.processes.ledger_folder import find_place, make_place, why_private

TMPFS = "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw"


def test_own_folder_is_made_for_this_user_only(tmp_path: Path) -> None:
    place = find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "a" / "b"), "RESHARD_MPI_HOST": "node/1"})
    folder = place.folder
    assert folder == tmp_path / "a" / "b" / "node_1" and not (tmp_path / "a").exists()
    make_place(place)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "a" / "b"), "RESHARD_MPI_HOST": ".."}).folder.name == "_"


def test_default_is_shared_memory_for_user_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_folder, "_SHARED", (tmp_path / "none", tmp_path))
    assert find_place({}).folder == tmp_path / f"reshard_mpi-{os.geteuid()}" / os.uname().nodename


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "real")
    with pytest.raises(ReshardError) as error:
        find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "state")})
    assert error.value.got == "a symbolic link" and error.value.exit_code == 3
    assert list((tmp_path / "real").iterdir()) == []


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o770)
    with pytest.raises(ReshardError, match="not this user's alone") as error:
        find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "state")})
    assert "0770" in error.value.got and str(tmp_path / "state") in error.value.where


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ReshardError) as error:
        find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "state")})
    assert error.value.got == f"a folder of user {os.getuid()}"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(ReshardError) as error:
        find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "state")})
    assert error.value.got == "a file"


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReshardError) as error:
        find_place({"RESHARD_MPI_STATE_DIR": str(tmp_path / "file" / "state")})
    assert "--memory unlimited" in error.value.remedy


@pytest.mark.parametrize(
    ("folder", "mount", "job", "private"),
    [
        ("/dev/shm/reshard_mpi-0", TMPFS, "5", False),
        # job_container/tmpfs
        ("/tmp/reshard_mpi-0", "99 24 8:1 /containers/5/.5 /tmp rw - ext4 /dev/sda1 rw", "5", True),
        ("/dev/shm/reshard_mpi-0", "99 24 8:1 /containers/5/.5 /tmp rw - ext4 /dev/sda1 rw", "5", True),
        ("/tmp/reshard_mpi-0", "99 24 8:1 /containers/5/.5 /tmp rw - ext4 /dev/sda1 rw", "6", False),
        ("/home/user/state", "99 24 8:1 /containers/5/.5 /tmp rw - ext4 /dev/sda1 rw", "5", False),
        # a subvolume
        ("/tmp/reshard_mpi-0", "99 24 8:1 /@tmp /tmp rw - btrfs /dev/sda1 rw", "5", False),
        # PrivateTmp, and pam_namespace
        (
            "/tmp/reshard_mpi-0",
            "99 24 8:1 /tmp/systemd-private-1a-x.service/tmp /tmp rw - ext4 /dev/sda1 rw",
            None,
            True,
        ),
        ("/tmp/reshard_mpi-0", "99 24 8:1 /tmp.inst/user /tmp rw - ext4 /dev/sda1 rw", None, True),
        ("/srv/state", "99 24 8:1 /tmp.inst/user /tmp rw - ext4 /dev/sda1 rw", None, False),
    ],
)
def test_a_place_private_to_a_job_is_recognised(folder: str, mount: str, job: str | None, private: bool) -> None:
    assert bool(why_private(Path(folder), [TMPFS, mount], job)) == private

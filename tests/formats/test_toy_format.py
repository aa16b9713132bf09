"""What a new format costs: one module with its facts. Once registered it does whatever the others do."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import as_read, flip_bits, read_shard
from support.command_line import done, refused
from support.conversions import Conversion, make
from support.toys import registered_toys
from toy_package import toy_folder, toy_format

from reshard_mpi import formats
from reshard_mpi.errors import ShardError
from reshard_mpi.journal import commit

__all__ = ["registered_toys"]


@pytest.mark.parametrize(
    "head",
    [
        *("", "1", "[]", "{}", "[[], [], []]", '[[["w"]], {}]', '[[[1, "int8", []]], {}]', '[[["w", "int3", []]], {}]'),
        *('[[["w", "int8", [-1]]], {}]', '[[["w", "int8", [1.0]]], {}]', '[[["w", "int8", [true]]], {}]'),
        *(
            '[[["", "int8", [0]]], {}]',
            '[[["w", "int8", [0]], ["w", "int8", [0]]], {}]',
            '[[], {"note": 1}]',
            "[" * 5000,
        ),
        *(
            '[[["w", "int8", [0]]], {"w": ""}]',
            '[[["\\ud800", "int8", [0]]], {}]',
            '[[["w", [], [0]]], {}]',
            "[[], []]",
        ),
        *(
            f'[[["w", "int8", {[0] * 33}]], {{}}]',
            f'[[["{"n" * 4097}", "int8", [0]]], {{}}]',
            f"[[], {{}}]{' ' * (1 << 20)}",
        ),
    ],
)
def test_heads_that_say_what_cannot_be(tmp_path: Path, head: str) -> None:
    """Their checksum is right, as whoever means harm would have it."""
    content = head.encode()
    path = tmp_path / "a.toy"
    path.write_bytes(b"TOY1" + struct.pack("<QI", len(content), zlib.crc32(content)) + content)
    with pytest.raises(ShardError):
        toy_format.locate(str(path))


@pytest.mark.usefixtures("registered_toys")
def test_there_and_back(c: Conversion, tmp_path: Path) -> None:
    toys = c.but(dst=tmp_path / "toys", options=("--prefix", "t"))
    toys.done("transform", "--to", "toy", "--verify")
    assert [path.name for path in sorted(toys.dst.glob("rank_*/*"))] == ["t0.toy", "t1.toy"]
    toys.but(options=()).done("verify", "--jobs", "1")
    done("verify", toys.dst, "--jobs", "1")
    done("inspect", toys.dst, "--json")
    back = c.but(src=toys.dst, src_strategy=c.dst_strategy, dst_strategy=c.src_strategy)
    back.done("transform", "--to", "ckpt")
    for rank in range(4):
        (path,) = (c.dst / f"rank_{rank}").iterdir()
        assert read_shard(path) == as_read(c.arrays(rank))
    made = [path.stat().st_ino for path in sorted(toys.dst.glob("rank_*/*"))]
    toys.done("transform", "--to", "toy", "--resume", "--verify")
    assert [path.stat().st_ino for path in sorted(toys.dst.glob("rank_*/*"))] == made


@pytest.mark.usefixtures("registered_toys")
def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    assert "--crc is for targets in ckpt" in make(tmp_path).refused("transform", "--to", "toy", "--crc", code=2)


@pytest.mark.usefixtures("registered_toys")
def test_a_damaged_file_of_a_folder_is_found(c: Conversion) -> None:
    toys = c.but(dst=c.folder / "toys", options=("--prefix", ""))
    toys.done("transform", "--to", "toys", "--verify")
    assert sorted(path.name for path in toys.dst.glob("*.toypart")) == ["part-1-of-2.toypart", "part-2-of-2.toypart"]
    whole = toys.but(options=(), dst_strategy=None)
    whole.done("verify", "--jobs", "1")
    part = toys.dst / "part-1-of-2.toypart"
    flip_bits(part, -1)
    assert str(part) in whole.refused("verify", "--jobs", "1", code=4)
    assert str(part) in refused("verify", toys.dst, "--jobs", "1", code=4)


def test_the_latest_folder_by_a_pointer_of_the_format(c: Conversion, tmp_path: Path) -> None:
    formats.register(toy_format.INFO)
    formats.register(toy_folder.INFO._replace(pointer_files=("newest",)))
    try:
        toys = c.but(dst=tmp_path / "saves" / "step 5", options=())
        toys.done("transform", "--to", "toys")
        (tmp_path / "saves" / "newest").write_text("step 5\n")
        said = done("transform", tmp_path / "saves", tmp_path / "out", "--to", "ckpt", "--jobs", "1").err
        assert "step 5 of" in said and "the latest as newest says" in said
        (tmp_path / "saves" / "newest").write_text("../saves/step 5")
        said = refused("transform", tmp_path / "saves", tmp_path / "out", "--to", "ckpt", "--jobs", "1")
        assert "does not lead to one" in said
    finally:
        formats.unregister("toy")
        formats.unregister("toys")


BEFORE = "toys.names.json"


@pytest.fixture
def registered_with_two_index_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register folders of toys whose index is two files, which the format returns in another order than its facts."""
    write = toy_folder.index_contents
    monkeypatch.setattr(toy_folder, "index_contents", lambda held: {**write(held), BEFORE: b"[]"})
    formats.register(toy_folder.INFO._replace(before_index=(BEFORE,)))
    yield
    formats.unregister("toys")


@pytest.mark.slow
@pytest.mark.usefixtures("registered_with_two_index_files")
def test_an_index_of_two_files(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = c.but(dst=c.folder / "toys", options=("--prefix", ""))
    published = []
    publish = commit.publish_bytes
    monkeypatch.setattr(commit, "publish_bytes", lambda *args: published.append(args[1]) or publish(*args))
    toys.done("transform", "--to", "toys", "--verify")
    assert published == [BEFORE, toy_folder.INDEX]
    both = [toys.dst / name for name in published]
    contents = [path.read_bytes() for path in both]
    for path, content in zip(both, contents):
        path.write_bytes(content + b" ")
        assert "index of a checkpoint is not what was committed" in refused("verify", toys.dst, "--jobs", "1", code=4)
        toys.done("transform", "--to", "toys", "--resume")
        assert [path.read_bytes() for path in both] == contents
        path.unlink()
        toys.done("transform", "--to", "toys", "--resume")
        assert [path.read_bytes() for path in both] == contents
    (toys.dst / "part-1-of-2.toypart").unlink()
    toys.done("transform", "--to", "toys", "--rank", "1", "--overwrite")
    assert not any(path.exists() for path in both)
    other = toys.but(dst=c.folder / "others")
    other.dst.mkdir()
    (other.dst / BEFORE).write_bytes(b"of somebody")
    assert BEFORE in other.refused("transform", "--to", "toys")
    assert (other.dst / BEFORE).read_bytes() == b"of somebody"


@pytest.mark.usefixtures("registered_toys")
def test_folders_that_are_two_checkpoints(c: Conversion) -> None:
    toys = c.but(dst=c.folder / "toys", options=("--prefix", ""))
    toys.done("transform", "--to", "toys")
    back = c.but(src=toys.dst, src_strategy=None, dst_strategy=c.src_strategy)
    (toys.dst / "rank_0").mkdir()
    back.done("transform", "--to", "ckpt")
    (toys.dst / "rank_0" / "net.ckpt").write_bytes(b"")
    assert "two checkpoints lie together" in back.refused("transform", "--to", "ckpt")


@pytest.mark.usefixtures("registered_toys")
def test_a_folder_whose_file_does_not_fit_its_checksum(c: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = c.but(dst=c.folder / "toys", options=("--prefix", ""))
    toys.done("transform", "--to", "toys")

    def check_crc(path: str, on_bytes: object = None) -> bool:
        raise ShardError("a file does not fit its checksum", where=path)

    monkeypatch.setattr(toy_folder, "check_crc", check_crc)
    back = c.but(src=toys.dst, src_strategy=None, dst_strategy=c.src_strategy)
    assert "does not fit its checksum" in back.refused("transform", "--to", "ckpt", "--verify")
    assert "two of the loose files" in back.refused("plan", "--select", "*.toypart")

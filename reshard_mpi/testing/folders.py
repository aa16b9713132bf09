"""Test a format of folders by a saved checkpoint, and by spoiled ones (`FolderConformance`).

The author of a format subclasses `FolderConformance` beside `CheckpointConformance`: that one reads random checkpoints,
this one a small one, and everything that may be wrong with it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import reshard_mpi
from reshard_mpi import formats
from reshard_mpi.checkpoints.discovery import find_shards
from reshard_mpi.checkpoints.opening import open_source
from reshard_mpi.errors import ReshardError, ShardError, SourceError, UsageError
from reshard_mpi.formats.dtypes import BY_NAME
from reshard_mpi.formats.protocol import FolderFormat
from reshard_mpi.formats.structure import is_file_name
from reshard_mpi.testing.checkpoints import ArraysByName, FormatUnderTest
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, write

# Names of files in an index that lead out of its folder, or to no file.
OUTSIDE = ("../a{}", "/tmp/a{}", "b/../../a{}", "./a{}", "a//b{}", "", "..", "a\0{}")


Spoil = Callable[[Path], object]


class Refusal(NamedTuple):
    """A way to spoil a sound folder, and the refusal that follows."""

    spoil: Spoil
    says: str | tuple[str, ...]  # parts of the message
    error: type[ReshardError] = ShardError


def lost(file: str) -> Spoil:
    """Return a function that removes a file of a folder."""
    return lambda folder: (folder / file).unlink()


def cut_short(file: str, by_bytes: int = 1) -> Spoil:
    """Return a function that takes bytes from the end of a file of a folder."""
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - by_bytes)


def written(file: str, content: bytes) -> Spoil:
    """Return a function that writes a file of a folder."""
    return lambda folder: (folder / file).write_bytes(content)


class FolderConformance(FormatUnderTest):
    """The tests of a format of folders. Subclasses define `info`, `save`, and the attributes that fit the format."""

    # How many files were saved, where nothing in the folder tells.
    src_files: int | None = None
    # The name of the index that is spoiled; empty if there is none.
    index: str = ""
    # Contents of an index that are refused by its path: bytes, or functions that make many.
    damaged_indices: Mapping[str, Any] = {}
    # Spoiled folders, by a name for each: as the fields of `Refusal`.
    wrong: Mapping[str, tuple[Any, ...]] = {}
    # What is said of a file that is given by itself; empty if such a file is read.
    alone: str = ""
    # Whether names of written files begin with the user's `--prefix`; False if the format's own program fixes them.
    uses_prefix: bool = True

    def save(self, folder: Path) -> ArraysByName:
        """Write a small checkpoint as its program does, or copy one, to a new folder; return its arrays."""
        raise NotImplementedError

    def lead_outside(self, folder: Path, file: str) -> str:
        """Have the index say that a tensor lies in `file`; return a part of the refusal."""
        raise NotImplementedError

    def rewritten(self, facts: Any) -> Any:
        """Return the facts of an index in JSON in another order; with further ones where others may add some."""
        if isinstance(facts, dict):
            return {name: self.rewritten(value) for name, value in reversed(facts.items())}
        return list(map(self.rewritten, facts)) if isinstance(facts, list) else facts

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Make a test of each case that a subclass lists."""
        has_index = bool(cls.index) and cls.lead_outside is not FolderConformance.lead_outside
        cases: Mapping[str, Mapping[str, Any]] = {
            "case": cls.wrong,
            "content": cls.damaged_indices,
            "outside": {repr(name): name for name in OUTSIDE if has_index},
            "to": {name: name for name in formats.targets() if not formats.info(name).packs},
        }
        for name in cases.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, cases[name].values(), ids=list(cases[name]))

    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[Path, ArraysByName]:
        folder = tmp_path / "saved"
        folder.mkdir()
        return folder, self.save(folder)

    @property
    def module(self) -> FolderFormat:
        """The module under test."""
        module = self.info.load_folder()
        assert module is not None
        return module

    def test_what_is_saved_is_read(self, saved: tuple[Path, ArraysByName]) -> None:
        folder, arrays = saved
        self._assert_holds(folder, arrays)
        files = find_shards(str(folder), src_files=self.src_files)
        assert files.is_folder and files.format == self.info.name
        counted = f"{len(files.shards)} file{'s' * (len(files.shards) > 1)}, {len(arrays)} tensor"
        assert open_source(files, None).summary_text.startswith(f"{formats.title(self.info.name)}, {counted}")
        assert reshard_mpi.inspect(folder)["format"] == self.info.name

    def test_it_becomes_every_other_form(self, saved: tuple[Path, ArraysByName], tmp_path: Path, to: str) -> None:
        folder, arrays = saved
        out = tmp_path / "out"
        reshard_mpi.transform(folder, out, to=to, src_files=self.src_files, verify=True)
        reshard_mpi.verify(folder, out, src_files=self.src_files)
        found = reshard_mpi.load_rank(0, out)
        assert _bytes_of(found) == _bytes_of(arrays)

    def test_a_run_is_resumed(self, saved: tuple[Path, ArraysByName], tmp_path: Path) -> None:
        folder, arrays = saved
        for _ in range(2):
            reshard_mpi.transform(folder, tmp_path / "out", to="dcp", src_files=self.src_files, resume=True)
            assert _bytes_of(reshard_mpi.load_rank(0, tmp_path / "out")) == _bytes_of(arrays)
            (tmp_path / "out" / "__0_0.distcp").unlink()

    def test_it_is_written_if_it_can_be(self, saved: tuple[Path, ArraysByName], tmp_path: Path) -> None:
        folder, arrays = saved
        if self.info.is_target:
            reshard_mpi.transform(folder, tmp_path / "out", to=self.info.name, src_files=self.src_files, verify=True)
            assert _bytes_of(reshard_mpi.load_rank(0, tmp_path / "out")) == _bytes_of(arrays)
            return
        with pytest.raises(UsageError, match="only read"):
            reshard_mpi.transform(folder, tmp_path / "out", to=self.info.name, src_files=self.src_files)
        assert not (tmp_path / "out").exists()

    def test_texts_are_written(self, tmp_path: Path) -> None:
        if not (self.info.is_target and self.info.keeps_strings):
            pytest.skip("none are written")
        tensors = [SampleTensor.random(name, BY_NAME["float32"], (4, 2)) for name in ("a", "b")]
        texts = {"note": "line\né 层", "empty": ""}
        write(formats.by_name("ckpt"), str(tmp_path / "in.ckpt"), ShardContents.of(tensors, texts))
        (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["x"] }\n')
        for number, strategy in enumerate((None, tmp_path / "two.toml")):
            out = tmp_path / str(number)
            reshard_mpi.transform(tmp_path / "in.ckpt", out, to=self.info.name, dst_strategy=strategy, verify=True)
            held = reshard_mpi.load_rank(0, out)
            assert {name: text for name, text in held.items() if isinstance(text, str)} == texts
            assert {name: array.tobytes() for name, array in held.items() if not isinstance(array, str)} == {
                tensor.name: tensor.content for tensor in tensors
            }

    def test_names_of_written_files(self) -> None:
        if not self.info.is_target:
            pytest.skip("none are written")
        for targets in (1, 2, 11):
            for prefix in ("", "my_", "other-"):
                names = [self.module.file_name(rank, targets, prefix) for rank in range(targets)]
                assert len({*names}) == targets and all(map(is_file_name, names))
                assert all(name.endswith(self.info.suffixes) for name in names)
                assert all(name.startswith(prefix) for name in names) or not self.uses_prefix

    def test_the_index_is_there_when_all_files_are(self, saved: tuple[Path, ArraysByName], tmp_path: Path) -> None:
        """Targets are made one by one, as by the tasks of an array; the index goes before one of them is made anew."""
        folder, arrays = saved
        if not (self.info.is_target and self.info.index_names()):
            pytest.skip("no index is written")
        out, strategy = tmp_path / "out", tmp_path / "two.toml"
        strategy.write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\n')
        cut: Mapping[str, Any] = {"max_shard_size": 1} if self.info.split_by_size else {"dst_strategy": strategy}
        convert = partial(reshard_mpi.transform, folder, out, to=self.info.name, src_files=self.src_files, **cut)
        index = [out / name for name in self.info.index_names()]
        ranks = len(convert().targets)
        contents = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert ranks > 1 and all(path.name in contents for path in index)
        shutil.rmtree(out)
        for rank in reversed(range(ranks)):
            assert not any(path.exists() for path in index)
            convert(rank=rank)
        (first,) = convert(rank=0, resume=True).targets
        for lost_file in index:
            lost_file.unlink()
            convert(resume=True)
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == contents
        assert _bytes_of(reshard_mpi.load_rank(0, out)) == _bytes_of(arrays)
        Path(first.path).unlink()
        convert(rank=ranks - 1, overwrite=True)
        assert not any(lost_file.exists() for lost_file in index)

    def test_what_is_wrong_is_refused(self, saved: tuple[Path, ArraysByName], case: tuple[Any, ...]) -> None:
        folder, _ = saved
        refusal = Refusal(*case)
        refusal.spoil(folder)
        self._require_refused(folder, refusal.says, refusal.error)

    def test_a_strategy_is_refused(self, saved: tuple[Path, ArraysByName], tmp_path: Path) -> None:
        """Its index alone says where everything lies."""
        (tmp_path / "two.toml").write_text('mesh = { x = 2 }\n[[parameter]]\nmatch = "*"\n')
        with pytest.raises(SourceError, match="lists its own pieces"):
            reshard_mpi.load_rank(0, saved[0], tmp_path / "two.toml", src_files=self.src_files)

    def test_an_index_that_leads_outside(self, saved: tuple[Path, ArraysByName], outside: str) -> None:
        folder, _ = saved
        says = self.lead_outside(folder, outside.format(self.info.suffixes[0]))
        self._require_refused(folder, says, ShardError)

    def test_an_index_that_is_damaged(self, tmp_path: Path, content: Any) -> None:
        path = tmp_path / self.index
        path.write_bytes(content() if callable(content) else content)
        with pytest.raises(ShardError) as caught:
            self.module.files_of(str(tmp_path))
        assert str(path) in caught.value.where

    def test_an_index_is_read_however_it_is_written(self, saved: tuple[Path, ArraysByName]) -> None:
        folder, arrays = saved
        path = folder / self.index
        if not path.name.endswith(".json"):
            pytest.skip("there is one way to write it")
        facts = json.loads(path.read_text())
        for said in (facts, self.rewritten(facts)):
            for text in _texts(said):
                path.write_text(text)
                self._assert_holds(folder, arrays)

    def test_a_part_by_itself(self, saved: tuple[Path, ArraysByName], tmp_path: Path) -> None:
        """It may hold slices, so it is no checkpoint, however it is named."""
        folder, _ = saved
        if not self.alone:
            pytest.skip("a file by itself is read")
        path = Path(find_shards(str(folder), src_files=self.src_files).shards[-1])
        for source, select, name in (
            (path, None, None),
            (folder, path.name, None),
            (folder, path.name, formats.name_of(path.name)),
        ):
            with pytest.raises(ReshardError, match=self.alone):
                reshard_mpi.transform(source, tmp_path / "out", select=select, source_format=name)
        with pytest.raises(ReshardError, match=self.alone):
            reshard_mpi.load_rank(0, {0: path})
        assert not (tmp_path / "out").exists()

    def _assert_holds(self, folder: Path, arrays: ArraysByName) -> None:
        assert _bytes_of(reshard_mpi.load_rank(0, folder, src_files=self.src_files)) == _bytes_of(arrays)

    def _require_refused(self, folder: Path, says: str | tuple[str, ...], error: type[ReshardError]) -> None:
        """Require that a folder is refused with these words, and that nothing is written."""
        with pytest.raises(error) as caught:
            reshard_mpi.load_rank(0, folder, src_files=self.src_files)
        parts = (says,) if isinstance(says, str) else says
        assert [part for part in (*parts, str(folder)) if part not in str(caught.value)] == [], caught.value
        out = folder.with_name("out")
        with pytest.raises(ReshardError) as again:
            reshard_mpi.transform(folder, out, to="ckpt", src_files=self.src_files)
        assert caught.value.problem in again.value.problem and not os.path.lexists(out)


def _bytes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return arrays in a form that can be compared, without strings."""
    held = ((name, array) for name, array in arrays.items() if isinstance(array, np.ndarray))
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in held}


def _texts(facts: Any) -> Iterator[str]:
    for indent in (None, 1, 4):
        for separators in ((",", ":"), (", ", ": "), (" ,\n", "\t:\r ")):
            yield json.dumps(facts, indent=indent, separators=separators)

"""Test a format module by a second way to read and write (`FormatConformance`).

The author of a format subclasses `FormatConformance`, gives its `FormatInfo`, and two functions that write and read
shards without the module under test (with the format's own library). All tests are inherited.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard_mpi.errors import ReshardError, ShardError, TargetError, UsageError
from reshard_mpi.formats.dtypes import BY_NAME, DType
from reshard_mpi.formats.manifest import Manifest, ShardIdentity, ShardSpec, TensorSpec
from reshard_mpi.formats.protocol import Format, reserve_file, seal_file
from reshard_mpi.formats.registry import FormatInfo
from reshard_mpi.sharding.box import Box
from reshard_mpi.testing import example_contents, sample_tensors
from reshard_mpi.testing.example_contents import IMPOSSIBLE, ODD_NAMES, SLICES, TYPES_AND_SHAPES, some_contents
from reshard_mpi.testing.sample_tensors import SampleTensor, ShardContents, require_possible

# Bytes that damage a structure: digits of numbers in text are likelier than others.
_DAMAGE = st.one_of(st.integers(0, 255), st.sampled_from(b"0123456789.-,"))

# Subclasses run the same tests, which hypothesis calls differing executors; and each example writes files.
_inherited = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


class FormatConformance:
    """The tests of a format. Subclasses define `info`, `write_independently` and `read_independently`.

    They set the other attributes if the format does not have these properties.
    """

    info: FormatInfo
    # Whether a file that was cut off exactly between two tensors is refused.
    counts_itself: bool = True
    # Whether tensors are written in the order in which they are given.
    keeps_order: bool = True
    # The names of types that are refused.
    cannot_hold: frozenset[str] = frozenset()
    # Whether a format that describes itself writes rank and strategy; False if it only reads them.
    writes_identity: bool = True

    @property
    def module(self) -> Format:
        """The module under test."""
        return self.info.load()

    def write_independently(self, path: Path, contents: ShardContents) -> None:
        """Write a shard without the code under test."""
        raise NotImplementedError

    def read_independently(self, path: Path) -> ShardContents:
        """Read a shard, in the order of its tensors, without the code under test."""
        raise NotImplementedError

    def sound_again(self, content: bytes) -> bytes:
        """Return a damaged file with checksums of its structure made to fit, so that the damage is not hidden."""
        return content

    # Reading

    @pytest.mark.parametrize("dtype, shape", TYPES_AND_SHAPES, ids=str)
    def test_reads_every_type_and_shape(self, tmp_path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
        if dtype.name in self.cannot_hold:
            return
        contents = ShardContents.of([SampleTensor.random("w", dtype, shape)])
        self.write_independently(self._path(tmp_path), contents)
        manifest = self.module.locate(str(self._path(tmp_path)))
        assert sample_tensors.contents_of(manifest) == contents
        assert manifest.format == self.info.name

    @_inherited
    @given(contents=example_contents.contents())
    def test_reads_what_others_write(self, contents: ShardContents) -> None:
        contents = self._holdable(contents)
        with self._scratch() as path:
            self.write_independently(path, contents)
            self._assert_same(sample_tensors.contents_of(self.module.locate(str(path))), contents)

    @_inherited
    @given(
        contents=example_contents.contents(), flips=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=2)
    )
    def test_knowing_another_shard_makes_no_difference(
        self, contents: ShardContents, flips: list[tuple[int, int]]
    ) -> None:
        contents = self._holdable(contents)
        with self._scratch() as path:
            sample_tensors.write(self.module, str(path), contents)
            like, other = self.module.locate(str(path)), path.with_name(f"other{path.suffix}")
            content = bytearray(path.read_bytes())
            for offset, byte in flips:
                content[offset % len(content)] = byte
            other.write_bytes(content)
            try:
                expected = self.module.locate(str(other))
            except ShardError as error:
                with pytest.raises(ShardError) as caught:
                    self.module.locate(str(other), like)
                assert str(caught.value) == str(error)
            else:
                assert self.module.locate(str(other), like) == expected

    # Writing

    @pytest.mark.parametrize("dtype, shape", TYPES_AND_SHAPES, ids=str)
    def test_writes_every_type_and_shape(self, tmp_path: Path, dtype: DType, shape: tuple[int, ...]) -> None:
        contents = ShardContents.of([SampleTensor.random("w", dtype, shape)])
        if dtype.name in self.cannot_hold:
            self._require_refused(tmp_path, contents, dtype.name)
            return
        sample_tensors.write(self.module, str(self._path(tmp_path)), contents)
        assert self.read_independently(self._path(tmp_path)) == contents

    @_inherited
    @given(contents=example_contents.contents())
    def test_both_routes_read_what_is_written_and_is_no_larger_than_said(self, contents: ShardContents) -> None:
        contents = self._holdable(contents)
        with self._scratch() as path:
            written = sample_tensors.write(self.module, str(path), contents)
            assert path.stat().st_size <= self.module.size_at_most_bytes(sample_tensors.spec_of(contents))
            self._assert_same(self.read_independently(path), contents)
            located = self.module.locate(str(path))
            self._assert_same(sample_tensors.contents_of(located), contents)
            assert [e.source for e in located.tensors.values()] == [e.source for e in written.tensors.values()]

    def test_odd_names(self, tmp_path: Path) -> None:
        tensors = [SampleTensor.random(name, BY_NAME["float32"], (2, 2)) for name in ODD_NAMES]
        # A name that is also the folder of another.
        tensors += [SampleTensor.random(name, BY_NAME["int8"], (3,)) for name in ("a", "a/b", "a/b/c/d", "%2E")]
        contents = self._holdable(ShardContents.of(tensors, {"note/of.": "x"}))
        sample_tensors.write(self.module, str(self._path(tmp_path)), contents)
        self._assert_same(self.read_independently(self._path(tmp_path)), contents)
        self._assert_same(sample_tensors.contents_of(self.module.locate(str(self._path(tmp_path)))), contents)

    def test_keeps_the_order_of_tensors(self, tmp_path: Path) -> None:
        names = ["z", "a/2", "m", "a/1", "b", "a", "a/3", *(f"layer.{i}" for i in range(30, 0, -1))]
        contents = ShardContents.of(SampleTensor.random(name, BY_NAME["int16"], (2,)) for name in names)
        written = sample_tensors.write(self.module, str(self._path(tmp_path)), contents)
        assert list(written.tensors) == names
        assert list(self.module.locate(str(self._path(tmp_path))).tensors) == names

    @pytest.mark.parametrize("text", ["", "plain", "é 层 🜁", "line\n", "x" * 100_000, "nul\0inside"])
    def test_strings(self, tmp_path: Path, text: str) -> None:
        if not self.info.keeps_strings:
            return
        contents = ShardContents.of([SampleTensor.random("w", BY_NAME["float32"], (2,))], {"note": text})
        sample_tensors.write(self.module, str(self._path(tmp_path)), contents)
        assert sample_tensors.contents_of(self.module.locate(str(self._path(tmp_path)))) == contents
        assert self.read_independently(self._path(tmp_path)) == contents

    def test_a_shard_of_nothing(self, tmp_path: Path) -> None:
        sample_tensors.write(self.module, str(self._path(tmp_path)), ShardContents({}))
        manifest = self.module.locate(str(self._path(tmp_path)))
        assert not manifest.tensors and not manifest.strings

    def test_the_same_spec_gives_the_same_bytes(self, tmp_path: Path) -> None:
        contents = some_contents()
        first, second = tmp_path / "one" / self._name, tmp_path / "another, of other length" / self._name
        for path in (first, second):
            if path is second:
                time.sleep(1.01 - time.time() % 1)  # until the next second: a time stamp in the file would differ
            path.parent.mkdir()
            sample_tensors.write(self.module, str(path), contents)
        assert first.read_bytes() == second.read_bytes()

    def test_ranges_are_disjoint_and_in_the_file(self, tmp_path: Path) -> None:
        path = self._path(tmp_path)
        manifest = reserve_file(self.module, str(path), sample_tensors.spec_of(some_contents()))
        ranges = sample_tensors.all_ranges(manifest)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
        assert ranges[0][0] >= 0 and ranges[-1][1] <= path.stat().st_size

    def test_payloads_do_not_touch_the_structure(self, tmp_path: Path) -> None:
        contents = some_contents()
        path = self._path(tmp_path)
        before = reserve_file(self.module, str(path), sample_tensors.spec_of(contents))
        size_bytes = path.stat().st_size
        full = [SampleTensor(t.name, t.dtype, t.shape, b"\xff" * len(t.content)) for t in contents.tensors.values()]
        sample_tensors.fill(before, ShardContents.of(full))
        after = self.module.locate(str(path))
        assert [e.source for e in after.tensors.values()] == [e.source for e in before.tensors.values()]
        assert path.stat().st_size == size_bytes

    def test_a_huge_tensor_costs_nothing_to_reserve_and_locate(self, tmp_path: Path) -> None:
        path = self._path(tmp_path)
        huge = TensorSpec("w", BY_NAME["bfloat16"], (1 << 20, 1 << 14), Box.whole((1 << 20, 1 << 14)))
        reserve_file(self.module, str(path), ShardSpec(ShardIdentity(0, 1, ""), (huge,), {}))
        assert self.module.locate(str(path)).tensors["w"].size_bytes == 32 << 30
        assert path.stat().st_blocks * 512 < 8 << 20

    def test_an_existing_file_is_left_alone(self, tmp_path: Path) -> None:
        path = self._path(tmp_path)
        path.write_bytes(b"precious")
        with pytest.raises((FileExistsError, ReshardError)):
            reserve_file(self.module, str(path), sample_tensors.spec_of(some_contents()))
        assert path.read_bytes() == b"precious"

    @pytest.mark.parametrize("name", ["", "\ud800", "n" * 100_000], ids=["empty", "no Unicode", "too long"])
    def test_a_name_that_cannot_be_kept_is_refused(self, tmp_path: Path, name: str) -> None:
        tensor = TensorSpec(name, BY_NAME["int8"], (1,), Box.whole((1,)))
        with pytest.raises(ReshardError):
            reserve_file(self.module, str(self._path(tmp_path)), ShardSpec(ShardIdentity(0, 1, ""), (tensor,), {}))
        assert not list(tmp_path.iterdir())

    def test_a_name_given_twice_is_refused(self, tmp_path: Path) -> None:
        spec = sample_tensors.spec_of(some_contents())
        name = spec.tensors[0].name
        as_tensor = ShardSpec(spec.identity, (*spec.tensors, spec.tensors[0]), {})
        as_string = ShardSpec(spec.identity, spec.tensors, {name: "text"})
        for twice in (as_tensor, as_string) if self.info.keeps_strings else (as_tensor,):
            with pytest.raises(ReshardError):
                reserve_file(self.module, str(self._path(tmp_path)), twice)
        assert not list(tmp_path.iterdir())

    # What the facts of the format promise

    def test_rank_strategy_and_places_are_kept(self, tmp_path: Path) -> None:
        if not (self.info.describes_itself and self.writes_identity):
            return
        identity = ShardIdentity(2, 3, "any text \n é 层 " * 5000)
        spec = ShardSpec(identity, SLICES, {})
        reserved = reserve_file(self.module, str(self._path(tmp_path)), spec)
        seal_file(self.module, str(self._path(tmp_path)))
        for manifest in (reserved, self.module.locate(str(self._path(tmp_path)))):
            assert manifest.identity == identity
            places = [(entry.box, entry.global_shape) for entry in manifest.tensors.values()]
            assert places == [(tensor.box, tensor.global_shape) for tensor in SLICES]

    @pytest.mark.parametrize("with_sums", [False, True], ids=["none are given", "they are given"])
    def test_sums_are_kept_where_they_are_given(self, tmp_path: Path, *, with_sums: bool) -> None:
        contents, path = self._holdable(some_contents()), self._path(tmp_path)
        sums = {name: 0xFFFFFFFF - 257 * number for number, name in enumerate(contents.tensors)} if with_sums else {}
        spec = sample_tensors.spec_of(contents)._replace(with_sums=with_sums)
        sample_tensors.fill(reserve_file(self.module, str(path), spec), contents)
        seal_file(self.module, str(path), sums)
        assert self.module.stored_sums(str(path)) == (sums if self.info.keeps_sums else {})
        self._assert_same(sample_tensors.contents_of(self.module.locate(str(path))), contents)

    def test_a_checksum_of_the_file_is_made_or_refused(self, tmp_path: Path) -> None:
        path, contents = self._path(tmp_path), ShardContents.of([some_contents().tensors["layer/bias"]])
        spec = sample_tensors.spec_of(contents)
        manifest = sample_tensors.write(self.module, str(path), contents)
        if not self.info.has_crc:
            assert not self.module.check_crc(str(path))
            with pytest.raises(UsageError):
                seal_file(self.module, str(path), crc=True)
            return
        path.unlink()
        sample_tensors.fill(reserve_file(self.module, str(path), spec), contents)
        seal_file(self.module, str(path), crc=True)
        counts: list[int] = []
        assert self.module.check_crc(str(path), counts.append)
        size_bytes = path.stat().st_size
        assert manifest.tensors["layer/bias"].size_bytes <= sum(counts) <= size_bytes
        assert size_bytes <= self.module.size_at_most_bytes(spec, crc=True)
        self._assert_same(sample_tensors.contents_of(self.module.locate(str(path))), contents)
        self._assert_same(self.read_independently(path), contents)
        (start, _), *_ = sample_tensors.all_ranges(self.module.locate(str(path)))
        content = bytearray(path.read_bytes())
        content[start] ^= 1
        path.write_bytes(content)
        with pytest.raises(ShardError, match=self._name):
            self.module.check_crc(str(path))

    def test_what_is_not_as_written_is_not_read_back(self, tmp_path: Path) -> None:
        """Every change of the structure is noticed that a reader would notice."""
        path = self._path(tmp_path)
        meant = sample_tensors.write(self.module, str(path), self._holdable(some_contents()))
        self.module.read_back(meant)
        content, before = path.read_bytes(), self.module.locate(str(path))
        outside = sample_tensors.outside(sample_tensors.all_ranges(meant), len(content))
        assert outside, "nothing but payloads"
        for offset in outside[:: max(1, len(outside) // 300)]:
            damaged = bytearray(content)
            damaged[offset] ^= 1
            path.write_bytes(self.sound_again(bytes(damaged)))
            try:
                after = self.module.locate(str(path))
                is_noticed = after[:5] != before[:5]
            except ShardError:
                is_noticed = True
            if is_noticed:
                with pytest.raises(ShardError):
                    self.module.read_back(meant)
        path.unlink()
        sample_tensors.write(self.module, str(path), ShardContents({}))
        with pytest.raises(ShardError, match=self._name):
            self.module.read_back(meant)

    # Files that are no sound shards

    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path / "missing", tmp_path, Path("/dev/null"), Path("a\0b")):
            with pytest.raises(ShardError):
                self.module.locate(str(path))

    @pytest.mark.parametrize(
        "content", [b"", b"\0", b"\0" * 5000, b"text\n", b"\x80\x02}q\0.", b"PK\x03\x04" + b"\0" * 100]
    )
    def test_what_is_no_checkpoint_is_refused(self, tmp_path: Path, content: bytes) -> None:
        self._path(tmp_path).write_bytes(content)
        with pytest.raises(ShardError, match=self._name):
            self.module.locate(str(self._path(tmp_path)))

    def test_truncation_is_refused_wherever_it_falls(self, tmp_path: Path) -> None:
        path, content, whole = self._sound_file(tmp_path)
        cuts = range(len(content)) if len(content) < 4000 else {*range(0, len(content), 37), len(content) - 1}
        for length in cuts:
            path.write_bytes(content[:length])
            try:
                manifest = self.module.locate(str(path))
            except ShardError:
                continue
            assert not self.counts_itself, f"cut at {length} of {len(content)} is not seen"
            assert len(manifest.tensors) + len(manifest.strings) < len(whole.tensors) + len(whole.strings)

    def test_what_follows_the_end_is_refused(self, tmp_path: Path) -> None:
        path, content, _ = self._sound_file(tmp_path)
        for extra in (b"\0", b"\n", b"x" * 17, b"\0" * 4096, content):
            path.write_bytes(content + extra)
            with pytest.raises(ShardError, match=self._name):
                self.module.locate(str(path))

    @_inherited
    @given(data=st.data())
    def test_damage_is_refused_or_harmless(self, data: st.DataObject) -> None:
        with self._scratch() as path:
            path, content, whole = self._sound_file(path.parent)
            outside = sample_tensors.outside(sample_tensors.all_ranges(whole), len(content))
            damaged = bytearray(content)
            for offset in data.draw(st.lists(st.sampled_from(outside), min_size=1, max_size=4)):
                damaged[offset] = data.draw(_DAMAGE)
            path.write_bytes(self.sound_again(bytes(damaged)))
            self._require_refused_or_sound(path)

    @pytest.mark.parametrize("name", IMPOSSIBLE)
    def test_what_cannot_be_is_refused(self, tmp_path: Path, name: str) -> None:
        """The second way to write is given it; what that does not write either cannot be tried."""
        first, last = (SampleTensor(side, BY_NAME["int8"], (6,), b"123456") for side in ("first", "last"))
        for tensors in ([first, IMPOSSIBLE[name], last], [first, last, IMPOSSIBLE[name]]):
            self._try_impossible(tmp_path, ShardContents.of(tensors))

    def test_a_name_that_comes_twice_is_refused(self, tmp_path: Path) -> None:
        tensor = SampleTensor("w", BY_NAME["int8"], (6,), b"123456")
        self._try_impossible(tmp_path, ShardContents({"one": tensor, "another": tensor}))

    def _try_impossible(self, folder: Path, contents: ShardContents) -> None:
        """Require that contents that cannot be are refused, if the second way to write takes them."""
        self._path(folder).unlink(missing_ok=True)
        try:
            self.write_independently(self._path(folder), contents)
        except Exception:  # of whatever library it is
            pytest.skip("it cannot be written")
        self._require_refused_or_sound(self._path(folder))

    def _require_refused_or_sound(self, path: Path) -> None:
        """Require that a file is refused, or that its tensors, texts and identity are possible ones."""
        try:
            manifest = self.module.locate(str(path))
            sample_tensors.contents_of(manifest)
        except ShardError:
            return
        require_possible(manifest, path.stat().st_size)

    def _holdable(self, contents: ShardContents) -> ShardContents:
        """Return the contents without the parts that the format cannot hold."""
        tensors = contents.tensors.values()
        kept = {tensor.name: tensor for tensor in tensors if tensor.dtype.name not in self.cannot_hold}
        return ShardContents(kept, contents.strings if self.info.keeps_strings else {})

    def _require_refused(self, folder: Path, contents: ShardContents, named: str) -> None:
        """Require that `size_at_most_bytes` and `reserve` refuse the contents, with the type's name in the error."""
        spec = sample_tensors.spec_of(contents)
        with pytest.raises(TargetError, match=f"'w'[^\0]*{named}"):
            self.module.size_at_most_bytes(spec)
        with pytest.raises(TargetError, match=f"'w'[^\0]*{named}"):
            reserve_file(self.module, str(self._path(folder)), spec)
        assert not list(folder.iterdir())

    def _assert_same(self, actual: ShardContents, expected: ShardContents) -> None:
        assert actual == expected
        if self.keeps_order:
            assert list(actual.tensors) == list(expected.tensors), "the order of tensors differs"

    @property
    def _name(self) -> str:
        return "shard" + self.info.suffixes[0]

    def _path(self, folder: Path) -> Path:
        return folder / self._name

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield self._path(Path(folder))

    def _sound_file(self, folder: Path) -> tuple[Path, bytes, Manifest]:
        path = self._path(folder)
        self.write_independently(path, some_contents())
        content = path.read_bytes()
        manifest = self.module.locate(str(path))
        path.chmod(0o600)
        return path, content, manifest

"""Open checkpoints: slices of tensors are those that numpy takes of the whole, whatever form they have."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import safetensors_peer, torch_peer
from support.checkpoints import sample, write_ranks
from support.conversions import Conversion
from support.cut_checkpoints import Array, Draw, cut
from support.examples import few, many
from support.processes import run_command

import reshard_mpi
from reshard_mpi import api
from reshard_mpi.engine import regions
from reshard_mpi.errors import DisagreementError, ReshardError, ShardError, UsageError
from reshard_mpi.testing.sample_tensors import ShardContents

FORMS = ("ckpt", "hdf5", "safetensors", "torch", "hf", "dcp")
DTYPES = (np.float32, np.float16, np.int64, np.uint8, np.bool_, ml_dtypes.bfloat16)
TURNED = "[[map]]\neq = '{p*}.w [a b] <=> {p*}.kernel [b a]'\noptional = true\n"
STORED = settings(many(15), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@st.composite
def whole_tensors(draw: Draw) -> dict[str, Array]:
    tensors = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 6, 12, 24]), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        random = np.random.default_rng(number)  # so that no parts of it are alike
        tensors[f"layers.{number}.w"] = random.integers(0, 256, shape).astype(dtype)
    tensors["step"] = np.array(draw(st.integers(0, 9)), np.int64)
    return tensors


def indices(draw: Draw, shape: tuple[int, ...]) -> Any:
    """Draw an index of an array: integers, and slices of any steps, of which some or all may be left out."""
    every: list[Any] = []
    for length in shape:
        bound = st.none() | st.integers(-length - 2, length + 2)
        step = st.none() | st.sampled_from([1, 2, 3, 7, -1, -2])
        every.append(
            draw(st.integers(-length, length - 1) | st.builds(slice, bound, bound, step))
            if draw(st.booleans())
            else slice(None)
        )
    way = draw(st.sampled_from(["all", "fewer", "ellipsis"]))
    if way == "fewer":
        every = every[: draw(st.integers(0, len(every)))]
    if way == "ellipsis":
        first = draw(st.integers(0, len(every)))
        every[first : first + draw(st.integers(0, 2))] = [...]
    return every[0] if len(every) == 1 and draw(st.booleans()) else tuple(every)


def written(draw: Draw, folder: Path, tensors: dict[str, Array], form: str) -> tuple[Path, Path | None]:
    """Write tensors, cut in a way that is drawn; return the checkpoint, and its strategy if it needs one."""
    cuts = cut(draw, tensors)
    (folder / "strategy.toml").write_text(cuts.text)
    if form in ("ckpt", "hdf5", "safetensors"):
        write_ranks(cuts.ranks(tensors), folder / "src", form)
        return folder / "src", folder / "strategy.toml"
    write_ranks({0: tensors}, folder / "one", "safetensors")
    strategy = None if form == "hf" else folder / "strategy.toml"
    reshard_mpi.transform(folder / "one", folder / "src", None, strategy, to=form)
    return folder / "src", None if form in ("hf", "dcp") else strategy


@pytest.mark.parametrize("form", few(1, FORMS))
@STORED
@given(tensors=whole_tensors(), data=st.data())
def test_slices_are_those_of_numpy(form: str, tensors: dict[str, Array], data: st.DataObject) -> None:
    draw = data.draw
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, strategy = written(draw, folder, tensors, form)
        options: dict[str, Any] = {"check": draw(st.booleans())}
        if any(array.ndim == 2 for array in tensors.values()) and draw(st.booleans()):
            (folder / "map.toml").write_text(TURNED)
            options |= {"map": folder / "map.toml", "forward": True}
            turned = {name for name, array in tensors.items() if array.ndim == 2}
            tensors = {
                name.replace(".w", ".kernel") if name in turned else name: array.T if name in turned else array
                for name, array in tensors.items()
            }
        if draw(st.booleans()):
            options["dtype"] = "*=fp64"
            floats = ("float32", "float16", "bfloat16")
            tensors = {n: a.astype(np.float64) if a.dtype.name in floats else a for n, a in tensors.items()}
        with reshard_mpi.open(source, src_strategy=strategy, **options) as checkpoint:
            assert checkpoint.keys() == tensors.keys() and len(checkpoint) == len(tensors)
            for name, array in tensors.items():
                tensor = checkpoint[name]
                assert (tensor.shape, tensor.dtype, tensor.nbytes) == (array.shape, array.dtype, array.nbytes)
                index = indices(draw, array.shape)
                assert same(tensor[index], array[index]), (name, index)
                assert same(np.asarray(tensor), array)


def same(left: Any, right: Any) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


W = np.arange(24 * 40, dtype=np.float32).reshape(24, 40)


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of two halves of `w`, and its strategy."""
    write_ranks({rank: {"w": W[12 * rank :][:12], "b": W[0]} for rank in (0, 1)}, tmp_path / "src", "safetensors")
    strategy = tmp_path / "strategy.toml"
    strategy.write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["a"] }\n')
    return tmp_path / "src", strategy


PLACES = {
    "row-major": lambda: np.zeros((6, 8), np.float32),
    "part of a wider array": lambda: np.zeros((20, 30), np.float32)[3:9, 5:13],
    "every other row": lambda: np.zeros((12, 8), np.float32)[::2],
    "every other column": lambda: np.zeros((6, 16), np.float32)[:, ::2],
    "columns first": lambda: np.zeros((8, 6), np.float32).T,
    "from behind": lambda: np.zeros((6, 8), np.float32)[::-1, ::-1],
}


@pytest.mark.parametrize("box", [np.s_[9:15, 4:12], np.s_[0:24:4, 0:40:5], np.s_[9:15, -8:]], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_memory_of_the_caller(halves: tuple[Path, Path], place: str, box: Any) -> None:
    """What lies around it is left as it is."""
    source, strategy = halves
    array = PLACES[place]()
    base = array if array.base is None else array.base
    with reshard_mpi.open(source, src_strategy=strategy) as checkpoint:
        checkpoint["w"].read_into(array, box)
    assert (array == W[box]).all()
    assert base.sum() == W[box].sum()


def test_the_last_row_of_a_wider_array_may_end_its_memory(halves: tuple[Path, Path]) -> None:
    memory = np.zeros(5 * 50 + 40, np.float32)
    array = np.lib.stride_tricks.as_strided(memory, (6, 40), (200, 4))
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        checkpoint["w"].read_into(array, np.s_[9:15])
    assert (array == W[9:15]).all()


WRONG_ARRAYS = {
    "of another shape": lambda: np.zeros((24, 39), np.float32),
    "of another type": lambda: np.zeros((24, 40), np.float64),
    "read-only": lambda: np.broadcast_to(np.zeros(40, np.float32), (24, 40)),
    "in which elements share memory": lambda: np.lib.stride_tricks.as_strided(
        np.zeros(100, np.float32), (24, 40), (4, 4)
    ),
    "a list": lambda: [[0.0] * 40] * 24,
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_wrong_arrays_are_refused(halves: tuple[Path, Path], kind: str) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint, pytest.raises(UsageError):
        checkpoint["w"].read_into(WRONG_ARRAYS[kind]())


def test_numpy_says_whether_it_wants_a_copy(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        tensor = checkpoint["w"]
        assert np.array_equal(tensor.__array__(copy=True), tensor[...])
        with pytest.raises(UsageError, match="read into a new array"):
            tensor.__array__(copy=False)


@pytest.mark.parametrize("index", [24, -25, (0, 40), (0, 0, 0), "a", 1.0, True, None, [0, 1], slice("a"), (..., ...)])
def test_wrong_indices_are_refused(halves: tuple[Path, Path], index: Any) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        with pytest.raises(UsageError) as error:
            checkpoint["w"][index]
        assert isinstance(error.value, IndexError) == (index in (24, -25, (0, 40), (0, 0, 0)))


def test_a_name_that_is_none(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        with pytest.raises(KeyError) as error:
            checkpoint["v"]
        assert isinstance(error.value, ReshardError) and "'w'" in str(error.value)
        assert "v" not in checkpoint and checkpoint.get("v") is None


def test_a_closed_checkpoint(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        tensor = checkpoint["w"]
        assert tensor[0, 1] == 1
    with pytest.raises(UsageError, match="closed"):
        tensor[0]


# What becomes of the source


@pytest.mark.parametrize("wrong", ["a strategy of three ranks", "another cut", "a missing shard", "unlike copies"])
def test_what_is_wrong_is_refused_as_a_run_does(halves: tuple[Path, Path], tmp_path: Path, wrong: str) -> None:
    source, strategy = halves
    if wrong == "a strategy of three ranks":
        strategy.write_text(strategy.read_text().replace("2", "3"))
    elif wrong == "another cut":
        shutil.rmtree(source)
        noise = np.random.default_rng(1).standard_normal((2, 64, 64), np.float32)
        write_ranks({rank: {"w": noise[rank]} for rank in (0, 1)}, source, "safetensors")
        strategy.write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "w"\n')  # says that both hold the same
        reshard_mpi.open(source, src_strategy=strategy, check=False).close()
    elif wrong == "a missing shard":
        (source / "rank_1" / "checkpoint_1.safetensors").unlink()
    else:
        shutil.rmtree(source)
        steps = {rank: {"w": W[12 * rank :][:12], "step": np.array(rank)} for rank in (0, 1)}
        write_ranks(steps, source, "safetensors")
    with pytest.raises(ReshardError) as by_run:
        reshard_mpi.transform(source, tmp_path / "dst", strategy)
    with pytest.raises(ReshardError) as by_open:
        reshard_mpi.open(source, src_strategy=strategy)
    said = str(by_run.value).replace("target rank 0: ", "")
    assert (type(by_open.value), str(by_open.value)) == (type(by_run.value), said)


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("how", ["cut short", "replaced", "written to", "removed"])
def test_a_file_that_changes_is_refused_when_it_is_read(halves: tuple[Path, Path], how: str, was_read: bool) -> None:
    source, strategy = halves
    path = source / "rank_1" / "checkpoint_1.safetensors"
    with reshard_mpi.open(source, src_strategy=strategy) as checkpoint:
        if was_read:
            assert (checkpoint["w"][...] == W).all()
        content = path.read_bytes()
        if how == "written to":
            with path.open("r+b") as stream:
                stream.write(content)
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
            if how != "removed":
                path.write_bytes(content[: -4 if how == "cut short" else None])
        with pytest.raises((ShardError, DisagreementError)) as error:
            checkpoint["w"][20]
        assert str(path) in str(error.value)
        assert (checkpoint["w"][3] == W[3]).all()  # the other file is as it was


# Processes and threads


def test_threads_read_at_the_same_time(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint, ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda number: checkpoint["w"][number % 24], range(400)))
    assert all((row == W[number % 24]).all() for number, row in enumerate(rows))


@pytest.mark.parametrize("form", few(1, FORMS))
def test_a_forked_child_goes_on(tmp_path: Path, form: str) -> None:
    write_ranks({0: {"w": W}}, tmp_path / "one", "safetensors")
    reshard_mpi.transform(tmp_path / "one", tmp_path / "src", to=form)
    with reshard_mpi.open(tmp_path / "src") as checkpoint:
        assert checkpoint["w"][1, 1] == W[1, 1]
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os._exit(0 if (checkpoint["w"][2:] == W[2:]).all() else 1)
            os._exit(2)
        assert (checkpoint["w"][...] == W).all()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pickle_opens_it_again(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1], dtype="fp64") as checkpoint:
        text = pickle.dumps(checkpoint["w"])
    assert same(pickle.loads(text)[3:5], W[3:5].astype(np.float64))
    path = halves[0] / "rank_0" / "checkpoint_0.safetensors"
    os.utime(path, ns=(1, 1))
    api.checkpoint._origin_again.cache_clear()
    with pytest.raises(DisagreementError, match="another one than was opened"):
        pickle.loads(text)


# What is no tensor, and where tensors come from


def test_where_a_box_comes_from(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        parts = checkpoint.sources("w", np.s_[10:14, 3])
        assert [(part.rank, part.start, part.stop) for part in parts] == [(0, (10, 3), (12, 4)), (1, (12, 3), (14, 4))]
        assert [Path(part.files[0]).name for part in parts] == ["checkpoint_0.safetensors", "checkpoint_1.safetensors"]
        assert len(checkpoint.sources("b")) == 1 and checkpoint.sources("w", np.s_[3:3]) == ()


def test_one_rank_of_another_split_is_what_load_rank_returns(c: Conversion) -> None:
    loaded = reshard_mpi.load_rank(1, c.src, c.src_strategy, c.dst_strategy)
    assert {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in loaded.items()}.keys() == c.expected(1).keys()


SETTINGS = {
    "step": 3,
    "rate": 0.25,
    "names": ["a", "b"],
    "pair": (1, None),
    "nothing": {},
    "deep": {"list": [{"x": True}, 2.5], 7: "seven"},
}


@pytest.mark.parametrize("form", ["torch", "safetensors", "dcp", "ckpt"])
def test_what_is_no_tensor(tmp_path: Path, form: str) -> None:
    """Also after a conversion to a format that keeps it as a text."""
    w, moment = (torch_peer.tensor(sample("", np.arange(6, dtype=np.float32)), key) for key in ("0", "1"))
    state = {"state": {0: {"exp_avg": moment, "kind": "adam"}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch_peer.save(tmp_path / "x.pt", {"model": {"w": w}, "optimizer": state, "list": [w, 4], **SETTINGS})
    source = tmp_path / "x.pt"
    if form != "torch":
        reshard_mpi.transform(source, tmp_path / "dst", to=form)
        source = tmp_path / "dst"
    with reshard_mpi.open(source) as checkpoint:
        assert {"model.w", "optimizer.state.0.exp_avg"} <= checkpoint.keys()
        assert checkpoint.attrs == {
            "model": {},
            "optimizer": {"state": {0: {"kind": "adam"}}, "param_groups": [{"lr": 0.5, "params": [0]}]},
            "list": [None, 4],
            **SETTINGS,
        }


def test_texts_beside_tensors(tmp_path: Path) -> None:
    contents = ShardContents.of([sample("w", W)], {"learning_rate": "0.5"})
    safetensors_peer.write(tmp_path / "m.safetensors", contents)
    with reshard_mpi.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.attrs == {"learning_rate": "0.5"} == checkpoint.texts


# How much is read


@pytest.mark.parametrize(
    "index", [np.s_[5], np.s_[3:200:16], np.s_[:, 1024:2048], np.s_[:, 8:16], np.s_[7:9, 5:7], np.s_[...]], ids=str
)
def test_only_what_is_asked_for_is_read(tmp_path: Path, index: Any) -> None:
    """Long runs, and short ones that lie 16 KiB apart."""
    wide = np.arange(256 * 4096, dtype=np.float32).reshape(256, 4096)
    write_ranks({0: {"w": wide}}, tmp_path / "src", "safetensors")
    with reshard_mpi.open(tmp_path / "src") as checkpoint:
        taken = checkpoint["w"][index]
        assert same(taken, wide[index])
        (files,) = checkpoint.reader._idle
        assert files.traffic.requested_bytes == taken.nbytes
        assert not files.traffic.mapped_bytes


@pytest.mark.parametrize("first", [0, 1, 1023])
def test_what_lies_beside_a_large_array_stays(tmp_path: Path, first: int) -> None:
    """The kernel is asked for the memory of large arrays before they are filled, wherever these begin."""
    large = np.arange(300_000, dtype=np.float32)
    write_ranks({0: {"w": large}}, tmp_path / "src", "safetensors")
    memory = np.full(first + large.size + 3000, 7, np.float32)
    with (
        reshard_mpi.open(tmp_path / "src") as checkpoint,
        mock.patch.object(regions, "populate", wraps=regions.populate) as populated,
    ):
        checkpoint["w"].read_into(memory[first : first + large.size])
        assert checkpoint["w"][5] == 5
    populated.assert_called_once_with(memory[first:].ctypes.data, large.nbytes)
    assert same(memory[first : first + large.size], large)
    assert (memory[:first] == 7).all() and (memory[first + large.size :] == 7).all()


def test_short_runs_that_lie_close_are_read_with_what_lies_between(tmp_path: Path) -> None:
    narrow = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64)
    write_ranks({0: {"w": narrow}}, tmp_path / "src", "safetensors")
    with reshard_mpi.open(tmp_path / "src") as checkpoint:
        assert same(checkpoint["w"][100:200, 3:5], narrow[100:200, 3:5])
        (files,) = checkpoint.reader._idle
        assert files.traffic.mapped_bytes <= 100 * narrow.strides[0] + 2 * 4096


def test_pickles_that_are_loaded_are_closed_by_themselves(halves: tuple[Path, Path]) -> None:
    with reshard_mpi.open(halves[0], src_strategy=halves[1]) as checkpoint:
        text = pickle.dumps(checkpoint)
    with pickle.loads(text) as one:
        assert one["w"][0, 1] == 1
    with pickle.loads(text) as two, pickle.loads(text) as three:
        two.close()
        assert three["w"][0, 1] == 1


def test_a_file_that_was_not_there_is_not_read(tmp_path: Path) -> None:
    """Another one may come into its place."""
    write_ranks({0: {"w": W, "v": W + 1}}, tmp_path / "one", "safetensors")
    reshard_mpi.transform(tmp_path / "one", tmp_path / "src", to="hf", max_shard_size=W.nbytes + 100)
    first, second = sorted((tmp_path / "src").glob("*.safetensors"))
    content = second.read_bytes()
    second.unlink()
    with contextlib.suppress(ReshardError), reshard_mpi.open(tmp_path / "src", check=False) as checkpoint:
        second.write_bytes(content)
        for name in checkpoint:
            with contextlib.suppress(ReshardError):
                tensor = checkpoint[name][...]
                assert str(second) not in checkpoint.sources(name)[0].files and tensor.shape == W.shape
    assert first.exists()


@pytest.mark.slow
def test_a_checkpoint_that_is_forgotten_leaves_no_file_open(halves: tuple[Path, Path]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert reshard_mpi.open(halves[0], src_strategy=halves[1])["w"][20, 0] == W[20, 0]
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_checkpoint_may_be_open_when_python_ends(halves: tuple[Path, Path]) -> None:
    """What an early module keeps goes late, when other modules are empty."""
    source, strategy = map(str, halves)
    program = (
        "import os, reshard_mpi\n"
        f"os.kept = reshard_mpi.open({source!r}, src_strategy={strategy!r})\n"
        "next(iter(os.kept.values()))[...]\n"
    )
    finished = run_command([sys.executable, "-c", program])
    assert (finished.code, finished.out, finished.err) == (0, "", "")


def test_another_working_folder(halves: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(halves[0].parent)
    with reshard_mpi.open("src", src_strategy="strategy.toml") as checkpoint:
        text = pickle.dumps(checkpoint["w"])
        monkeypatch.chdir("/")
        assert (checkpoint["w"][20] == W[20]).all() and (pickle.loads(text)[20] == W[20]).all()


def test_elements_that_are_too_large_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_ranks({0: {"w": np.array([1e6, 1, 2], np.float32)}}, tmp_path / "src", "safetensors")
    with (
        caplog.at_level("WARNING", "reshard_mpi"),
        reshard_mpi.open(tmp_path / "src", dtype="fp16", check=False) as checkpoint,
    ):
        assert checkpoint["w"][1:].tolist() == [1, 2] and not caplog.records
        assert checkpoint["w"][0] == np.inf
    assert [record.getMessage() for record in caplog.records] == [
        "1 element of 'w' is too large for float16 and became infinite"
    ]


def test_a_pickle_is_of_the_checkpoint_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the newest of several by then, nor of what another map makes of it."""
    write_ranks({0: {"w": W}}, tmp_path / "src", "safetensors")
    link, map_file = tmp_path / "latest", tmp_path / "map.toml"
    link.symlink_to("src")
    map_file.write_text("[[map]]\neq = 'w [a b] <=> v [a b]'\n")
    with reshard_mpi.open(link, map=map_file, forward=True) as checkpoint:
        text = pickle.dumps(checkpoint["v"])
    assert (pickle.loads(text)[2] == W[2]).all()
    api.checkpoint._origin_again.cache_clear()
    map_file.write_text("[[map]]\neq = 'w [a b] <=> v [b a]'\n")
    with pytest.raises(DisagreementError, match="another one than was opened"):
        pickle.loads(text)
    map_file.write_text("[[map]]\neq = 'w [a b] <=> v [a b]'\n")
    write_ranks({0: {"w": W + 1}}, tmp_path / "other", "safetensors")
    link.unlink()
    link.symlink_to("other")
    with pytest.raises(DisagreementError, match="another one than was opened"):
        pickle.loads(text)


def test_steps_of_a_tensor_that_is_turned_are_read_together(tmp_path: Path) -> None:
    write_ranks({0: {"w": W}}, tmp_path / "src", "safetensors")
    turned = "w [a b] <=> w [b a]"
    with reshard_mpi.open(tmp_path / "src", map=turned, forward=True) as checkpoint:
        assert same(checkpoint["w"][::3, 1::2], W.T[::3, 1::2])
        (files,) = checkpoint.reader._idle
        assert files.traffic.requested_bytes <= W.nbytes

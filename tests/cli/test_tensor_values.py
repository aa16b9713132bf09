"""Elements that `inspect` prints are those of numpy, as are its statistics; what is no slice stays a glob or a path."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.checkpoints import write_ranks
from support.command_line import done, measure_apart, refused, run_apart, run_here
from support.cut_checkpoints import Array
from support.processes import measure_peak
from test_open import FORMS, STORED, indices, whole_tensors, written

from reshard_mpi.text import MIB

W = np.arange(24 * 40, dtype=np.float32).reshape(24, 40)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A checkpoint of one file."""
    write_ranks({0: {"layers.0.w": W, "step": np.array(7)}}, tmp_path / "one", "safetensors")
    return tmp_path / "one"


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of two halves of `w`, and its strategy."""
    write_ranks({rank: {"w": W[12 * rank :][:12]} for rank in (0, 1)}, tmp_path / "src", "safetensors")
    strategy = tmp_path / "strategy.toml"
    strategy.write_text('mesh = { a = 2 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["a"] }\n')
    return tmp_path / "src", strategy


def text_of(index: Any) -> str:
    """Return an index as it is typed."""
    if isinstance(index, tuple):
        return ", ".join(map(text_of, index)) or "..."
    if isinstance(index, slice):
        bounds = ["" if bound is None else str(bound) for bound in (index.start, index.stop, index.step)]
        return ":".join(bounds if bounds[2] else bounds[:2])
    return "..." if index is ... else str(index)


def number_of(value: Any) -> Any:
    """Return a value of JSON as a number, or lists of them."""
    return list(map(number_of, value)) if isinstance(value, list) else float(value)


@pytest.mark.slow
@STORED
@given(form=st.sampled_from(FORMS), tensors=whole_tensors(), data=st.data())
def test_elements_are_those_of_numpy(form: str, tensors: dict[str, Array], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, strategy = written(data.draw, Path(temporary), tensors, form)
        options = [] if strategy is None else ["--src-strategy", str(strategy), "--replicas", "any"]
        for name, array in tensors.items():
            index = indices(data.draw, array.shape)
            expected = array[index] if index != () else array[...]
            argument = f"{name}[{text_of(index)}]"
            heading, shown = done("inspect", source, argument, *options).out.split("\n", 1)
            assert shown == str(expected) + "\n"
            assert heading.startswith(f"{argument}  {array.dtype.name} {list(expected.shape)}")
            assert (str(source) in heading) == bool(expected.size)
            if expected.size <= 4096:
                facts = json.loads(done("inspect", source, argument, "--json", *options).out)
                values = np.array(number_of(facts["values"])).reshape(facts["shape"]).astype(facts["dtype"])
                assert values.tobytes() == expected.tobytes() and facts["shape"] == list(expected.shape)
                assert all(Path(path).exists() for part in facts["sources"] for path in part["files"])


NINES = "9" * 5000  # which Python makes no number of
NUMBERS = npst.array_shapes(max_dims=3, max_side=9).flatmap(
    lambda shape: st.sampled_from(["f2", "f4", "f8", "i8", "u8", "i1", "?"]).flatmap(
        lambda dtype: npst.arrays(dtype, shape, elements=npst.from_dtype(np.dtype(dtype)) | st.just(0))
    )
)


@STORED
@given(array=NUMBERS, block=st.integers(1, 30), data=st.data())
def test_statistics_are_those_of_numpy(array: Array, block: int, data: st.DataObject) -> None:
    """However many elements are taken at once; 0, NaN and infinities are drawn often."""
    index = indices(data.draw, array.shape)
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard_mpi.cli.inspect_command._BLOCK", block)
        write_ranks({0: {"w": array}}, Path(temporary), "safetensors")
        argument = f"w[{text_of(index)}]"
        facts = json.loads(done("inspect", temporary, argument, "--stats", "--json").out)
    (found,) = facts["tensors"].values()
    check_statistics(found, array[index] if index != () else array)


def check_statistics(found: dict[str, Any], chosen: Any) -> None:
    chosen = np.asarray(chosen)
    with np.errstate(all="ignore"):
        wide = chosen.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        assert found["shape"] == list(chosen.shape)
        assert found["nan"] == np.isnan(wide).sum() and found["inf"] == np.isinf(wide).sum()
        assert found["zeros"] == (wide == 0).sum()
        if not finite.size:
            assert found["min"] is found["max"] is found["mean"] is None and found["norm"] == 0
            return
        exact = chosen if chosen.dtype.kind in "iub" else finite
        assert (found["min"], found["max"]) == (exact.min(), exact.max())
        # Sums of numbers of unlike signs are as exact as their largest ones.
        size = float(np.abs(finite).mean())
        if math.isfinite(size):
            assert math.isclose(float(found["mean"]), finite.mean(), rel_tol=1e-9, abs_tol=1e-12 * size)
        assert math.isclose(float(found["norm"]), math.hypot(*finite), rel_tol=1e-9, abs_tol=1e-300)


def test_statistics_of_several_tensors(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).standard_normal((300, 70))
    noise[3, 4:9], noise[:2, 0], noise[7] = np.nan, -np.inf, 0
    tensors = {
        "layers.0.w": noise.astype(np.float32),
        "layers.1.w": noise.astype(ml_dtypes.bfloat16),
        "layers.1.count": np.array([[2**63 - 1, -5]]),
        "mask": np.array([True, False, False]),
        "empty": np.zeros((0, 4), np.float16),
    }
    write_ranks({0: tensors}, tmp_path, "safetensors")
    facts = json.loads(done("inspect", tmp_path, "--stats", "--json").out)
    assert facts["kind"] == "statistics" and list(facts["tensors"]) == list(tensors)
    for name, found in facts["tensors"].items():
        assert found["dtype"] == tensors[name].dtype.name
        check_statistics(found, tensors[name])
    assert facts["tensors"]["layers.1.count"]["max"] == 2**63 - 1
    assert facts["tensors"]["mask"]["min"] is False
    lines = done("inspect", tmp_path, "--stats", "layers.1.*").out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["layers.1.w", "layers.1.count"]
    assert lines[1] == (
        "layers.1.count  int64 [1, 2]  min -5  max 9223372036854775807  mean 4.61169e+18  norm 9.22337e+18"
        "  nan 0  inf 0  zeros 0"
    )
    assert "min -  max -  mean -  norm 0" in done("inspect", tmp_path, "empty", "--stats").out


@pytest.mark.parametrize("scale", [1e300, 1e-300, 5e-324])
def test_a_norm_whose_squares_are_no_numbers(tmp_path: Path, scale: float) -> None:
    write_ranks({0: {"w": np.full(16, scale)}}, tmp_path, "safetensors")
    facts = json.loads(done("inspect", tmp_path, "w", "--stats", "--json").out)
    assert facts["tensors"]["w"]["norm"] == pytest.approx(4 * scale, rel=1e-9)


def test_complex_elements(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.array([3 + 4j, 0, complex(np.inf, np.nan)], np.complex64)}}, tmp_path, "ckpt")
    facts = json.loads(done("inspect", tmp_path, "w[:]", "--json").out)
    assert facts["values"] == [[3, 4], [0, 0], ["Infinity", "NaN"]]
    found = json.loads(done("inspect", tmp_path, "w", "--stats", "--json").out)["tensors"]["w"]
    assert (found["max"], found["norm"], found["inf"], found["zeros"]) == (5, 5, 1, 1)


def test_what_is_no_number_in_json(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.array([[1.5, np.nan], [np.inf, -np.inf]], ml_dtypes.bfloat16)}}, tmp_path, "safetensors")
    facts = json.loads(done("inspect", tmp_path, "w[...]", "--json").out)
    assert facts["values"] == [[1.5, "NaN"], ["Infinity", "-Infinity"]]


def test_what_a_map_and_types_make(halves: tuple[Path, Path]) -> None:
    source, strategy = halves
    said = [source, "--src-strategy", strategy, "--map", "w [a b] <=> v [b a]", "--dtype", "bf16"]
    shown = done("inspect", *said, "v[3, 10:14]").out
    files = [source / f"rank_{rank}" / f"checkpoint_{rank}.safetensors" for rank in (0, 1)]
    assert shown.splitlines() == [f"v[3, 10:14]  bfloat16 [4]  from {files[0]}, {files[1]}", "[404 444 484 524]"]
    assert "  bfloat16 [40, 24]  min 0  max 960  " in done("inspect", *said, "--stats").out
    assert "did you mean 'v'?" in refused("inspect", *said, "V[3]")


def test_warnings_are_printed(halves: tuple[Path, Path]) -> None:
    source, strategy = halves
    shutil.rmtree(source)
    shards = {rank: {"w": W[12 * rank :][:12], "g_idx": np.arange(8) + 8 * rank} for rank in (0, 1)}
    write_ranks(shards, source, "safetensors")
    for _ in range(2):
        finished = done("inspect", source, "w[0, :2]", "--src-strategy", strategy)
        assert finished.err.startswith("warning: 'g_idx' differs between ranks 0, 1"), finished
        assert finished.err.count("warning") == 1 and finished.out.endswith("\n[0. 1.]\n")


def test_ranks_without_a_strategy_are_refused_as_a_run_does(halves: tuple[Path, Path], tmp_path: Path) -> None:
    said = refused("transform", halves[0], tmp_path / "dst")
    assert "give --src-strategy" in said
    assert refused("inspect", halves[0], "w[0]") == said
    assert refused("inspect", halves[0], "--stats") == said
    assert "ranks 0-1" in done("inspect", halves[0], "[w]").out  # a glob


@pytest.mark.parametrize("names", ["layers.[0-9].w", "layers.0.[w]", "layers.?.w"])
def test_what_is_no_slice_of_a_tensor_is_a_glob(one: Path, names: str) -> None:
    assert done("inspect", one, names).out.splitlines()[1] == "  layers.0.w  float32 [24, 40]  3.75 KiB"
    assert "layers.0.w  float32 [24, 40]  min 0  max 959" in done("inspect", one, names, "--stats").out


def test_a_glob_in_numbers(tmp_path: Path) -> None:
    """`w.[01]` is both: a slice if there is a tensor `w.`, else a glob."""
    for tensors, first in (({"w.0": W, "w.1": W}, "checkpoint: 1 rank"), ({"w.": W, "w.0": W}, "w.[01]  float32 [40]")):
        write_ranks({0: tensors}, tmp_path / str(len(first)), "safetensors")
        assert done("inspect", tmp_path / str(len(first)), "w.[01]").out.startswith(first)


def test_a_path_that_ends_as_a_slice(one: Path, tmp_path: Path) -> None:
    other = tmp_path / "two[0]"
    write_ranks({0: {"layers.0.w": W}}, other, "safetensors")
    assert done("inspect", one, other).out.startswith("---")
    assert "--stats goes with one checkpoint" in refused("inspect", one, other, "--stats", code=2)


@pytest.mark.parametrize(
    ("argument", "said", "code"),
    [
        ("layers.0.w[24]", "expected: -24 to 23", 2),
        ("layers.0.w[0, 0, 0]", "an index has too many dimensions", 2),
        ("layers.0.w[..., ...]", "expected: integers, slices and one `...`", 2),
        ("layers.0.w[::0]", "a slice has a wrong bound", 2),
        ("step[0]", "an index has too many dimensions", 2),
        *((f"layers.0.w[{text}]", "this is no slice", 2) for text in ("1:2:3:4", "-", "1 2", "..", ",0", ":,,", NINES)),
        ("layer.0.w[3, 4]", "did you mean 'layers.0.w'?", 3),
        ("nothing[0]", "no tensor has a name like this", 3),
    ],
    ids=lambda value: str(value)[:25],
)  # fmt: skip
def test_wrong_slices(one: Path, argument: str, said: str, code: int) -> None:
    assert said in refused("inspect", one, argument, code=code)


def test_too_many_elements_for_json(tmp_path: Path) -> None:
    write_ranks({0: {"w": np.zeros((4097, 3))}}, tmp_path, "safetensors")
    said = refused("inspect", tmp_path, "w[:, 0]", "--json", code=2)
    assert "got: 4097" in said and "add --stats" in said
    assert len(json.loads(done("inspect", tmp_path, "w[1:, 0]", "--json").out)["values"]) == 4096


@pytest.mark.parametrize(
    "arguments",
    [["--dtype", "bf16"], ["layers.*", "--map", "w <=> v"], ["--exclude", "a"], ["--from", "hf"], ["--forward"]],
    ids=" ".join,
)
def test_options_that_lists_do_not_use(one: Path, arguments: list[str]) -> None:
    option = next(argument for argument in arguments if argument.startswith("--"))
    assert f"{option} goes with elements of tensors" in refused("inspect", one, *arguments, code=2)


def test_ranks_and_strategies_have_no_elements(one: Path, halves: tuple[Path, Path]) -> None:
    assert "--rank goes with lists" in refused("inspect", one, "step[...]", "--rank", "0", code=2)
    assert "--rank goes with lists" in refused("inspect", one, "--stats", "--rank", "0", code=2)
    assert "float32" in done("inspect", one, "layers.0.[w]", "--rank", "0").out
    assert "--toml prints a strategy" in refused("inspect", halves[1], "--toml", "--stats", code=2)
    assert run_here("inspect", halves[1], "--stats").code == 3
    assert len(done("inspect", halves[1], "[w]").out.splitlines()) == 3


def test_totals_by_type(one: Path) -> None:
    shown = done("inspect", one, "*").out.splitlines()
    assert shown[-1].endswith("1 float32 (960 elements, 3.75 KiB), 1 int64 (1 element, 8 B)")


def test_a_file_that_is_cut_short(one: Path) -> None:
    path = one / "rank_0" / "checkpoint_0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "checkpoint_0.safetensors" in refused("inspect", one, "layers.0.w[-1]")


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of a tensor of 200 MB: also where steps are taken, and if there is more than one line can show."""
    array = np.zeros((50, 1_000_000), np.float32)
    array[-1, -1] = 3
    write_ranks({0: {"w": array, "b": W}}, tmp_path, "safetensors")
    least = measure_apart("inspect", tmp_path, "b[0, :3]").peak_rss_bytes
    last = "[0. 0. 0. ... 0. 0. 3.]"
    for *arguments, shown in (
        ["w", "--stats", "max 3  "],
        ["w[:, ::-3]", "--stats", "max 3  "],
        ["w[...]", f"{last}]\n"],
        ["w[::-1, 1:]", f"\n[{last}\n"],
    ):
        measured = measure_apart("inspect", tmp_path, *arguments)
        assert measured.code == 0 and shown in measured.out, measured
        print(f"{arguments}: {(measured.peak_rss_bytes - least) / MIB:.0f} MiB more than for three elements")
        assert measured.peak_rss_bytes < least + 60 * MIB


@pytest.mark.slow
def test_lists_load_no_numpy(one: Path) -> None:
    import sys

    code = (
        "import sys\nfrom reshard_mpi.cli.commands import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print('numpy' in sys.modules, 'reshard_mpi.api' in sys.modules)"
    )
    shown = measure_peak([sys.executable, "-c", code, "inspect", one, "layers.*"]).out
    assert shown.splitlines()[-1] == "False False"
    assert run_apart("inspect", one, "step[...]", check=True).out.splitlines()[1] == "7"

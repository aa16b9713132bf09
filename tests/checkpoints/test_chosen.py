"""What the files of a checkpoint are called together, to tell whether two runs read the same."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard_mpi.checkpoints.opening import chosen_files, moments_of
from reshard_mpi.checkpoints.shard_files import ShardFiles
from reshard_mpi.journal.run_records import glob_of


def of(*names: str, ranks: tuple[int, ...] = ()) -> ShardFiles:
    """Return shards with these names in rank folders: of ranks 0, 1 and so on, or of others."""
    by_rank = dict(zip(ranks or range(len(names)), names, strict=True))
    return ShardFiles("src", "ckpt", {rank: (f"src/rank_{rank}/{name}",) for rank, name in by_rank.items()})


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (["net-1_100.ckpt"] * 3, "net-1_100.ckpt"),
        ([f"net_rank_{rank}-1_2.ckpt" for rank in range(3)], "net_rank_<rank>-1_2.ckpt"),
        ([f"checkpoint_{rank}.ckpt" for rank in range(3)], "checkpoint_<rank>.ckpt"),
        ([f"net-3_{rank}.ckpt" for rank in range(4)], "net-3_<rank>.ckpt"),
        ([f"llama2_7b_rank_{rank}-1_2.ckpt" for rank in range(8)], "llama2_7b_rank_<rank>-1_2.ckpt"),
        (["step_2.ckpt"] * 4, "step_2.ckpt"),
        (["no ending"], "no ending"),
    ],
)
def test_what_all_ranks_call_it(names: list[str], called: str) -> None:
    assert chosen_files(of(*names)) == called
    if len(names) > 1:  # also if ranks are missing
        assert chosen_files(of(*names[1:], ranks=tuple(range(1, len(names))))) == called


def test_names_with_nothing_in_common() -> None:
    called = chosen_files(of("a.ckpt", "b.ckpt"))
    assert called.startswith("a.ckpt and 1 more, sha256:")
    others = [of("a.ckpt", "c.ckpt"), of("b.ckpt", "a.ckpt"), of("a.ckpt", "b.ckpt", ranks=(0, 2))]
    assert called not in map(chosen_files, others)
    loose = ShardFiles("src", "hf", {0: ("src/a.safetensors", "src/b.safetensors")}, is_folder=True)
    more = loose._replace(by_rank={0: (*loose.by_rank[0], "src/c.safetensors")})
    assert chosen_files(loose) != chosen_files(more)
    assert glob_of(called) is None and chosen_files(ShardFiles("src", "hf", {0: ()}, is_folder=True))


NAMES = st.text(st.sampled_from("ab-_019[*?."), min_size=1, max_size=8)


@given(st.data(), st.integers(1, 4))
def test_other_files_are_called_otherwise(data: st.DataObject, ranks: int) -> None:
    first, second = (data.draw(st.lists(NAMES, min_size=ranks, max_size=ranks)) for _ in range(2))
    assume(first != second)
    assert chosen_files(of(*first)) != chosen_files(of(*second))


@given(NAMES, st.integers(1, 12))
def test_the_glob_of_a_choice_matches_its_files(stem: str, ranks: int) -> None:
    files = of(*(f"{stem}_{rank}-1_7.ckpt" for rank in range(ranks)))
    pattern = glob_of(chosen_files(files))
    assert pattern is not None
    assert all(fnmatchcase(path.rpartition("/")[2], pattern) for (path,) in files.by_rank.values())


def test_a_folder_that_is_the_latest_of_several_is_agreed_on_too() -> None:
    assert [moment.name for moment in moments_of(of("a.ckpt"))] == ["chosen files"]
    latest = of("a.ckpt")._replace(latest="iteration_00000200")
    assert [moment.value for moment in moments_of(latest)] == ["a.ckpt", "iteration_00000200"]

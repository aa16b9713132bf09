"""What a rank holds by a file's bytes, against the oracle that knows MindSpore's rules only."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given
from support.cases import Case, Side, cases
from support.oracle import RawLayout as OracleLayout
from support.oracle import slice_for_rank

from reshard_mpi.sharding.layout import Layout
from reshard_mpi.sharding.mindspore_json import RawLayout, StageFile, StrategyItem, decode_json, encode_json
from reshard_mpi.sharding.mindspore_layouts import to_strategy
from reshard_mpi.sharding.mindspore_protobuf import decode_protobuf, encode_protobuf
from reshard_mpi.sharding.strategy import Strategy


def raw(layout: OracleLayout, shape: tuple[int, ...]) -> RawLayout:
    sizes = layout.split_sizes or ()
    return RawLayout(
        layout.dev_matrix,
        tuple(entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map),
        layout.opt_size,
        int(layout.opt_size != 0),
        tuple(map(int, sizes)),
        tuple(accumulate(map(int, sizes), initial=0))[:-1],
        tensor_shape=shape,
    )


def files(side: Side, tensors: dict[str, np.ndarray]) -> list[StageFile]:
    return [
        StageFile(
            {name: raw(held, tensors[name].shape) for name, held in side.listed.items() if stage in held.stages},
            (StrategyItem("MatMul", stage),),
        )
        for stage in range(side.stages)
    ]


def check(strategy: Strategy, side: Side, tensors: dict[str, np.ndarray]) -> None:
    assert (strategy.world_size, strategy.stages) == (side.world_size, side.stages)
    assert set(strategy.parameters) == set(side.listed)
    for name, held in side.listed.items():
        whole = tensors[name]
        for rank in range(side.world_size):
            stage = rank // side.stage_size
            placements = [found for found in strategy.find(name) if stage in found.stages]
            assert len(placements) == (stage in held.stages)
            for placement in placements:
                box = Layout(placement, whole.shape).box(rank)
                part = whole[tuple(slice(low, high) for low, high in zip(box.start, box.stop))]
                np.testing.assert_array_equal(part, slice_for_rank(whole, held, rank))


@given(case=cases(empty=False, dtypes=[np.dtype(np.int64)]))
@pytest.mark.parametrize("kind", ["protobuf", "json"])
def test_every_rank_holds_what_mindspore_means(kind: str, case: Case) -> None:
    for side in (case.src, case.dst):
        tensors = case.tensors
        stage_files = files(side, tensors)
        if not all(file.layouts for file in stage_files):
            continue
        if kind == "json":
            # JSON writes a nested map as factors of the shape, and uneven slices have none.
            listed = side.listed.values()
            assume(not any(held.split_sizes and len(np.atleast_1d(held.tensor_map[0])) > 1 for held in listed))
            read = [decode_json(encode_json(file).decode(), "") for file in stage_files]
        else:
            read = [decode_protobuf(encode_protobuf(file), "") for file in stage_files]
        check(to_strategy(read, ""), side, tensors)

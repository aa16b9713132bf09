"""The oracle against MindSpore itself, in what MindSpore is known to do right."""

import numpy as np
import pytest
from hypothesis import given
from support.cases import cases
from support.oracle import rank_holds, slice_for_rank

pytestmark = pytest.mark.mindspore


@given(
    case=cases(nested=False, optimizer=False, uneven=False, empty=False, unlisted=False, dtypes=[np.dtype(np.int64)])
)
def test_model_split(mindspore, case):
    from mindspore.parallel._tensor import _load_tensor

    for side in (case.src, case.dst):
        for name, layout in side.layouts.items():
            whole = case.tensors[name]
            if whole.ndim == 0:
                continue  # MindSpore leaves scalars alone
            for rank in range(side.world_size):
                if rank_holds(layout, rank):
                    local_rank = rank % side.stage_size
                    theirs = _load_tensor(
                        mindspore.Tensor(whole), layout.dev_matrix, layout.tensor_map, rank_id=local_rank
                    )
                    np.testing.assert_array_equal(slice_for_rank(whole, layout, rank), theirs)

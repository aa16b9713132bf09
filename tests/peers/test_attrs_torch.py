"""Values beside tensors, as Python and numpy pickle them, in `attrs` of an open checkpoint."""

from __future__ import annotations

import argparse
import collections
import pathlib
from pathlib import Path

import numpy as np
import pytest

import reshard_mpi

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def test_plain_values(tmp_path: Path) -> None:
    namespace = argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/a/b"))
    values = {
        "double": (np.float64(2.5), 2.5),
        "whole": (np.int32(-7), -7),
        "counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
        "default": (collections.defaultdict(list, {"x": [1]}), {"x": [1]}),
        "namespace": (namespace, {"lr": 0.1, "path": "/a/b"}),
        "set": ({1, 2}, {1, 2}),
        "bytes": (bytearray(b"xy"), bytearray(b"xy")),
        "size": (torch.Size([2, 3]), (2, 3)),
        "dtype": (torch.bfloat16, "torch.bfloat16"),
        "ordered": (collections.OrderedDict(a=1), {"a": 1}),
        "queue": (collections.deque([1, 2], maxlen=5), [1, 2]),
        "nested": ([{"a": (torch.ones(1), None)}], [{"a": (None, None)}]),
    }
    torch.save({"w": torch.ones(2), **{name: saved for name, (saved, _) in values.items()}}, tmp_path / "x.pt")
    with reshard_mpi.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.attrs == {name: plain for name, (_, plain) in values.items()}
    torch.save({"w": torch.ones(2), "day": np.datetime64("2020-01-01"), "range": range(3)}, tmp_path / "y.pt")
    with reshard_mpi.open(tmp_path / "y.pt") as checkpoint:
        assert checkpoint.attrs["day"]["class"] == "numpy._core.multiarray.scalar"
        assert checkpoint.attrs["range"] == {"class": "builtins.range", "args": [0, 3, 1], "state": None}

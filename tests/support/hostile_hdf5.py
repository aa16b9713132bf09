"""What HDF5 files can be made to hold that leads out of them, or has no end."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np


def external_link(file: h5py.File, secret: Path) -> None:
    file["w"] = h5py.ExternalLink(str(secret), "/w")


def soft_link_through_an_external_one(file: h5py.File, secret: Path) -> None:
    file["a/x"] = h5py.ExternalLink(str(secret), "/")
    file["w"] = h5py.SoftLink("/a/x/w")


def external_storage(file: h5py.File, secret: Path) -> None:
    file.create_dataset("w", shape=(4,), dtype="f4", external=[(str(secret), 0, 16)])


def virtual_dataset(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(shape=(4, 6), dtype="f4")
    layout[:] = h5py.VirtualSource(str(secret), "w", shape=(4, 6))
    file.create_virtual_dataset("w", layout)


def groups_that_share_members(file: h5py.File) -> None:
    """2^40 names from 80 links."""
    inner = file.create_group("g0")
    inner["w"] = np.zeros(3)
    for depth in range(1, 41):
        outer = file.create_group(f"g{depth}")
        outer["a"] = outer["b"] = inner
        inner = outer


def soft_links_that_multiply(file: h5py.File) -> None:
    file["s0"] = h5py.SoftLink("/")
    for depth in range(1, 15):
        file[f"s{depth}"] = h5py.SoftLink("/".join(["", *[f"s{depth - 1}"] * 30]))

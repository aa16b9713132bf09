"""Keeping libraries from starting threads: they would be of no use here, and processes share the cores already."""

from __future__ import annotations

from collections.abc import Mapping

ONE_THREAD: Mapping[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

"""Curves of throughput as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.results import Results


def lacks_matplotlib() -> str | None:
    """Return why nothing can be drawn; None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install '.[bench]', or pip install matplotlib"
    return None


def draw(results: Results, path: Path) -> None:
    """Draw the curves of `results` into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for curve in results.curves:
        axes.plot(*zip(*curve.points), marker="o", label=curve.label)
    ticks = sorted({x for curve in results.curves for x, _ in curve.points})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(results.x_label)
    axes.set_ylabel("GB of tensors per second")
    axes.set_title(f"reshard-mpi: {results.benchmark}")
    axes.grid(alpha=0.3)
    if results.curves:
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)

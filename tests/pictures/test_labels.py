"""What is written into pictures: names that tell apart, and texts that are neither cut off nor written over others."""

from __future__ import annotations

from itertools import combinations
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import many

from reshard_mpi.pictures.figures import DrawnBlock, DrawnMove, Feed, Figures, Flow, Panel, Shards, TensorCut
from reshard_mpi.pictures.matrix import matrix_scene
from reshard_mpi.pictures.scene import (
    Rectangle,
    Scene,
    TextLine,
    area_of,
    files_as_shards,
    rank_colours,
    tensor_labels,
    text_width,
)
from reshard_mpi.pictures.tensor_cuts import cut_scene
from reshard_mpi.sharding.box import Box

LLAMA = "model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("paths", "names", "short"),
    [
        (["/a/__0_0.distcp", "/a/__1_0.distcp"], ["__0_0.distcp", "__1_0.distcp"], ["0", "1"]),
        (["m/model-00001-of-00002.x", "m/model-00002-of-00002.x"], None, ["00001", "00002"]),
        (["/a/model.safetensors"], ["model.safetensors"], ["model.safetensors"]),
        (["/a/x/w.pt", "/a/y/w.pt"], ["x/w.pt", "y/w.pt"], ["x", "y"]),
        (["/a/w.pt", "/a/w.w.pt"], ["w.pt", "w.w.pt"], ["w.pt", "w.w.pt"]),
        (["/a/_.pt", "/a/__.pt"], ["_.pt", "__.pt"], ["_.pt", "__.pt"]),
        ([], [], []),
    ],
)
def test_files_are_called_by_what_they_differ_in(paths: list[str], names: list[str] | None, short: list[str]) -> None:
    shards = files_as_shards(len(paths), dict(enumerate(paths)))
    assert list(shards.names.values()) == (names if names is not None else [Path(path).name for path in paths])
    assert list(shards.short_names.values()) == short


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([f"{LLAMA}{letter}_proj.weight" for letter in "qkv"], ["q_proj", "k_proj", "v_proj"]),
        (["m.0.experts.0.w1", "m.0.experts.1.w1"], ["experts.0", "experts.1"]),
        (["w"], ["w"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["gate.w", "up.w"], ["gate", "up"]),
        (["", "x"], ["", "x"]),
    ],
)
def test_tensors_are_called_by_what_they_differ_in(names: list[str], short: list[str]) -> None:
    assert tensor_labels(names) == short


@given(names=st.lists(st.text(st.sampled_from("ab.01_"), max_size=12), unique=True, max_size=6))
def test_short_names_tell_apart(names: list[str]) -> None:
    paths = [f"/a/x{name}" for name in names]
    assert len(set(files_as_shards(len(names), dict(enumerate(paths))).short_names.values())) == len(set(paths))


def test_no_letter_is_wider_than_is_reckoned() -> None:
    fonts = pytest.importorskip("matplotlib.font_manager")
    drawn = pytest.importorskip("matplotlib.textpath").TextToPath()
    for weight, bold in (("normal", False), ("bold", True)):
        font = fonts.FontProperties(family="DejaVu Sans", weight=weight, size=100)
        for letter in filter(str.isprintable, map(chr, [*range(33, 0x180), *range(0x391, 0x450)])):
            width, _, _ = drawn.get_text_width_height_descent(letter, font, ismath=False)
            assert width <= text_width(letter, 100, bold=bold) + 1, letter


def fused(tensors: list[str], rows: int, columns: int, dim: int, sources: Shards, ranks: int) -> Figures:
    """Return figures of tensors that are put behind each other along a dimension, and cut over ranks there."""
    length = (rows, columns)[dim]
    of_rank = ceil(length * len(tensors) / ranks)
    whole = Box.whole((rows, columns))

    def along(start: int, stop: int) -> Box:
        """Return the box of both tensors' sizes that has these indices along the dimension."""
        return Box((start, 0), (stop, columns)) if dim == 0 else Box((0, start), (rows, stop))

    panels, moves = [], []
    for number, name in enumerate(tensors):
        holder = number % sources.total
        if number < 4:
            blocks = (DrawnBlock(whole, whole, 1, (holder,), 1),)
            panels.append(Panel(name, "float32", (rows, columns), (0, 1), (1, 1), blocks, 1))
        panel = number if number < 4 else None
        for rank in range(ranks):
            start, stop = max(number * length, rank * of_rank), min((number + 1) * length, (rank + 1) * of_rank)
            if start < stop:
                taken = along(start - number * length, stop - number * length)
                moves.append(DrawnMove(rank, along(start, stop), holder, panel, taken, "file", 4, name))
    all_long = length * len(tensors)
    shape = (all_long, columns) if dim == 0 else (rows, all_long)
    boxes = [along(min(rank * of_rank, all_long), min((rank + 1) * of_rank, all_long)) for rank in range(ranks)]
    blocks = tuple(DrawnBlock(box, box, 1, (rank,), 1, rank) for rank, box in enumerate(boxes) if box.size)
    target = Panel("fused." + "x" * (rows % 90), "float32", shape, (0, 1), (1, 1), blocks, len(blocks))
    cut = TensorCut(
        (target.name,), 1, 4 * rows * columns, tuple(panels), max(0, len(tensors) - 4), target, tuple(moves)
    )
    feeds = tuple(Feed(number % sources.total, number % ranks, 1, 1 << number % 50) for number in range(ranks))
    files = {rank: f"dst/rank_{rank}" for rank in range(ranks)}
    flow = Flow(sources, Shards(ranks, "rank", files), tuple(range(ranks)), feeds)
    return Figures("a/source", "a/target", flow, (cut,))


@st.composite
def drawings(draw: st.DrawFn) -> Figures:
    total = draw(st.integers(1, 70))
    begin = draw(st.text(st.sampled_from("Wi-_.0"), max_size=60))
    if draw(st.booleans()):
        sources = files_as_shards(total, {number: f"/a/{begin}{number:05}.x" for number in range(total)})
    else:
        sources = Shards(total, "rank", {})
    end = draw(st.sampled_from(["", ".weight", ".W" * 50]))
    tensors = [f"{begin}t.{number}{end}" for number in range(draw(st.integers(1, 12)))]
    lengths = st.sampled_from([1, 2, 3, 17, 256, 4096, 10_000_000])
    return fused(tensors, draw(lengths), draw(lengths), draw(st.integers(0, 1)), sources, draw(st.integers(1, 12)))


@many(100)
@given(drawn=drawings())
def test_no_text_is_cut_off_or_written_over_another(drawn: Figures) -> None:
    for scene in (matrix_scene(drawn), cut_scene(drawn.cuts[0], drawn)):
        assert_can_be_read(scene)


def assert_can_be_read(scene: Scene) -> None:
    texts = [(item.text, area_of(item)) for item in scene.items if isinstance(item, TextLine)]
    for text, area in texts:
        assert area.x >= 0 and area.x + area.width <= scene.width + 0.01, (text, area, scene.width)
        assert area.y >= 0 and area.y + area.height <= scene.height + 0.01, (text, area, scene.height)
    for (text, area), (other, of_other) in combinations(texts, 2):
        assert not area.meets(of_other), (text, area, other, of_other)
    for item in scene.items:
        if isinstance(item, Rectangle):
            assert item.x >= 0 and item.x + item.width <= scene.width + 0.01
            assert item.y >= 0 and item.y + item.height <= scene.height + 0.01


def test_the_stripes_of_a_fused_tensor_are_labelled_with_their_tensors() -> None:
    tensors = [f"{LLAMA}{letter}_proj.weight" for letter in "qkv"]
    sources = files_as_shards(2, {0: "/a/model-00001-of-00002.safetensors", 1: "/a/model-00002-of-00002.safetensors"})
    drawn = fused(tensors, 64, 128, 0, sources, 1)
    scene = cut_scene(drawn.cuts[0], drawn)
    texts = [item for item in scene.items if isinstance(item, TextLine)]
    stripes = [item for item in scene.items if isinstance(item, Rectangle) and item.key == "move"]
    assert len(stripes) == 3 and len({stripe.fill for stripe in stripes}) == 3
    for stripe, label in zip(stripes, ("q_proj", "k_proj", "v_proj")):
        (text,) = (text for text in texts if text.text == label)
        area = area_of(text)
        assert stripe.x <= area.x and area.x + area.width <= stripe.x + stripe.width
        assert stripe.y <= area.y and area.y + area.height <= stripe.y + stripe.height
    said = {text.text for text in texts}
    assert {*tensors, "source tensor"} <= said  # what the colours are
    assert "float32 [64, 128]: whole, in model-00002-of-00002.safetensors" in said
    assert not any("file 0" in text for text in said)
    narrow = fused([f"{LLAMA}{letter}_projection.weight" for letter in "qkv"], 640, 30, 1, sources, 1)
    upright = [item for item in cut_scene(narrow.cuts[0], narrow).items if isinstance(item, TextLine) and item.turned]
    assert {"q_projection", "k_projection", "v_projection"} <= {text.text for text in upright}


def test_the_colours_of_many_tensors_are_in_the_order_of_the_target() -> None:
    drawn = fused([f"m.experts.{number}.w1" for number in range(24)], 8, 16, 0, files_as_shards(1, {0: "/a/w.x"}), 2)
    scene = cut_scene(drawn.cuts[0], drawn)
    stripes = [item for item in scene.items if isinstance(item, Rectangle) and item.key == "move"]
    by_place = [stripe.fill for stripe in sorted(stripes, key=lambda stripe: stripe.y)]
    assert by_place == list(rank_colours(range(24)).values())
    texts = [item.text for item in scene.items if isinstance(item, TextLine)]
    assert "source tensors experts.0 to experts.23, in their order" in texts
    assert {f"experts.{number}" for number in range(24)} <= set(texts)

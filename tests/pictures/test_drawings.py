"""Drawings of figures: well-formed whatever the names, bounded whatever the sizes, and saying what they leave out."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import few_cases

from reshard_mpi.errors import UsageError
from reshard_mpi.pictures.figures import DrawnBlock, DrawnMove, Feed, Figures, Flow, Panel, Shards, TensorCut
from reshard_mpi.pictures.matrix import matrix_scene
from reshard_mpi.pictures.pages import page_of
from reshard_mpi.pictures.scene import (
    Scene,
    TextLine,
    amount_colour,
    fitted,
    on,
    png_of,
    rank_colours,
    svg_of,
    text_width,
)
from reshard_mpi.pictures.tensor_cuts import cut_scene
from reshard_mpi.sharding.box import Box

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "</title><img src=x onerror=alert(1)>",
    "]]>&lt;\"'`${source}",
    "\x1b[2J\x00\u202e\udcff\u2028",
    "$x^2$ \\frac",
    "a" * 5000,
    "",
)


def panel(name: str, shape: tuple[int, ...], *boxes: Box, copies: int = 1) -> Panel:
    blocks = tuple(DrawnBlock(box, box, 1, (number,), copies, number) for number, box in enumerate(boxes))
    return Panel(name, "float32", shape, tuple(range(len(shape)))[:2], (1,) * len(shape), blocks, len(blocks))


def cut(name: str, shape: tuple[int, ...] = (4, 4), count: int = 1) -> TensorCut:
    box = Box.whole(shape)
    moves = (DrawnMove(0, box, 0, 0, box, f"/files/{name}", box.size * 4),) if box.size else ()
    side = panel(name, shape, box)
    return TensorCut((name,), count, box.size * 4 * count, (side,), 0, side, moves)


def figures(*cuts: TensorCut, sources: int = 2, targets: int = 2, name: str = "src") -> Figures:
    feeds = tuple(Feed(rank % sources, rank, 1, 64 + rank) for rank in range(targets))
    files = {rank: f"{name}/rank_{rank}" for rank in range(max(sources, targets))}
    flow = Flow(Shards(sources, "rank", files), Shards(targets, "rank", files), tuple(range(targets)), feeds)
    return Figures(name, name, flow, cuts)


class Elements(HTMLParser):
    """Collects the elements of a page, and the texts of its scripts by their type."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self.attributes: list[tuple[str, str]] = []
        self._type: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._type = dict(attrs).get("type") or "" if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._type is not None:
            self.scripts[self._type] = self.scripts.get(self._type, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._type = None


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_in_every_form(name: str) -> None:
    drawn = figures(cut(name), name=name)
    for scene in (matrix_scene(drawn), cut_scene(drawn.cuts[0], drawn)):
        root = ElementTree.fromstring(svg_of(scene).encode())
        assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {"svg", "title", "rect", "text"}
    assert png_of(cut_scene(drawn.cuts[0], drawn)).startswith(b"\x89PNG")
    page = page_of(drawn)
    found = Elements(page)
    assert found.tags.count("script") == 2 and "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    data = json.loads(found.scripts["application/json"])
    assert data["cuts"][0]["names"] and len(data["cuts"][0]["names"][0]) <= 410
    assert "window.hacked" not in found.scripts[""]
    page.encode()  # no half of a surrogate pair


@given(name=st.text(), file=st.text())
def test_any_name_is_well_formed(name: str, file: str) -> None:
    drawn = figures(cut(name), name=file)
    ElementTree.fromstring(svg_of(cut_scene(drawn.cuts[0], drawn)).encode())
    found = Elements(page_of(drawn))
    assert found.tags.count("script") == 2
    json.loads(found.scripts["application/json"])


def test_a_page_needs_nothing_else() -> None:
    page = page_of(figures(cut("w")))
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.search(r"<(?:link|script|img)[^>]*(?:href|src)=\"(?!data:,)", page)
    assert " style=" not in page  # its policy would not let it be


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.slow if number > 0 else ())
        for number, shape in enumerate(
            [(3, 4, 5), (), (0, 5), (0,), (7,), (5, 0), (1, 1), (1000000, 2), (2, 1000000), (2, 3, 4, 5, 6), (0,) * 5]
        )
    ],
)
def test_every_shape_is_drawn(shape: tuple[int, ...]) -> None:
    drawn = figures(cut("w", shape))
    scene = cut_scene(drawn.cuts[0], drawn)
    texts = [item.text for item in scene.items if isinstance(item, TextLine)]
    assert (("no elements" in texts) == (0 in shape)) and png_of(scene)
    if len(shape) > 2:
        assert f"Of {len(shape)} dimensions two are drawn: 0 down, 1 across." in texts
    assert_within(scene)


def assert_within(scene: Scene) -> None:
    """See that nothing is drawn outside of the drawing."""
    for item in scene.items:
        assert 0 <= item.x <= scene.width and 0 <= item.y <= scene.height + 0.01
        if isinstance(item, TextLine) and item.anchor == "start" and not item.turned:
            assert item.x + text_width(item.text, item.size) * 0.9 <= scene.width + 1, item


@few_cases(2, ("sources", "targets"), [(1, 1), (1, 64), (64, 1), (8, 8), (64, 64), (3, 17), (16384, 16384)])
def test_a_matrix_of_any_size_fits_its_picture(sources: int, targets: int) -> None:
    drawn = figures(sources=sources, targets=targets, name="a/long/path" * 30)
    scene = matrix_scene(drawn)
    assert_within(scene)
    assert scene.width < 900 and scene.height < 900
    assert len(svg_of(scene)) < 2_000_000


def test_dimensions_that_are_cut_and_not_drawn_are_told() -> None:
    side = panel("w", (4, 4, 4), Box.whole((4, 4, 2)))._replace(cuts=(1, 1, 2))
    drawn = figures(cut("w", (4, 4, 4))._replace(target=side))
    texts = [item.text for item in cut_scene(drawn.cuts[0], drawn).items if isinstance(item, TextLine)]
    assert "The target cuts dimension 2 too, into 2: what is drawn is where its index is 0." in texts


def test_a_sample_is_called_one() -> None:
    drawn = figures(targets=500)
    drawn = drawn._replace(flow=drawn.flow._replace(planned=tuple(range(0, 500, 5))))
    texts = " ".join(item.text for item in matrix_scene(drawn).items if isinstance(item, TextLine))
    assert "A sample: 100 of 500 targets have been planned" in texts and "(a sample)" in texts
    assert "100 of 500 targets planned" in page_of(drawn)


@pytest.mark.slow
def test_a_page_of_very_many_tensors_is_bounded_and_says_what_is_left_out() -> None:
    names = tuple(f"model.layers.{number}.{'x' * 200}" for number in range(500))
    boxes = [Box((row, column), (row + 1, column + 1)) for row in range(16) for column in range(16)]
    side = panel(names[0], (16, 16), *boxes)
    moves = tuple(DrawnMove(number, box, number, 0, box, "file" * 30, 4) for number, box in enumerate(boxes)) * 7
    large = TensorCut(names, 1000, 1 << 40, (side,), 0, side, moves, 12345)
    drawn = figures(*[large] * 100, sources=300, targets=300)._replace(further=7, further_tensors=70)
    page = page_of(drawn)
    assert len(page) < 20_000_000
    left_out = re.search(r"<p>(\d+) more kinds of tensors \((\d+) tensors\) are not in this page", page)
    assert left_out is not None and int(left_out[2]) == 1000 * (int(left_out[1]) - 7) + 70
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert all(entry["moreMoves"] == 12345 + len(moves) - len(entry["moves"]) for entry in data["cuts"])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"reshard-mpi\[plot\]"):
        png_of(matrix_scene(figures()))


@pytest.mark.slow
def test_a_png_is_as_large_as_its_drawing() -> None:
    image = pytest.importorskip("matplotlib.image")
    scene = matrix_scene(figures())
    height, width, _ = image.imread(BytesIO(png_of(scene))).shape
    assert (width, height) == (int(scene.width * 200 / 72), int(scene.height * 200 / 72))


@pytest.mark.parametrize("count", [1, 2, 8, 9, 300])
def test_ranks_have_colours_of_their_own(count: int) -> None:
    colours = rank_colours(range(0, 3 * count, 3))
    assert list(colours) == list(range(0, 3 * count, 3)) and len(set(colours.values())) >= min(count, 128)
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours.values())


@given(fraction=st.floats(0, 1))
def test_text_can_be_read_on_every_shade(fraction: float) -> None:
    ground = amount_colour(fraction)
    assert contrast(ground, on(ground)) > 3


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@given(text=st.text(max_size=60), width=st.floats(0, 400))
def test_a_text_fits_or_is_left_out(text: str, width: float) -> None:
    kept = fitted(text, width, 10)
    assert kept.isprintable() and (text_width(kept, 10) <= width or not kept)

"""The page of a plan in a real browser: it works by mouse, and its console shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import Page, browser
from support.checkpoints import write_shard
from support.command_line import done
from support.conversions import make

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.xdist_group("a browser")]

# Returns the elements that are not within the page, or not within what they are in, to the pixel.
CUT_OFF = """
const found = [];
const width = document.documentElement.clientWidth;
for (const item of document.querySelectorAll("body *")) {
  const box = item.getBoundingClientRect();
  if (!box.width || !box.height || ["TITLE", "SCRIPT", "OPTION"].includes(item.tagName.toUpperCase())) continue;
  const around = item.parentElement.getBoundingClientRect();
  const outer = item.parentElement === document.body ? { left: 0, right: width } : around;
  if (box.left < outer.left - 1 || box.right > Math.min(outer.right, width) + 1) {
    found.push([item.tagName, item.textContent.slice(0, 60), box.left, box.right, outer.left, outer.right]);
  }
  const scrolls = item instanceof HTMLElement && item.clientWidth && item.scrollWidth > item.clientWidth + 1;
  if (scrolls) found.push([item.tagName, "scrolls"]);
}
if (document.documentElement.scrollWidth > width) found.push(["page", document.documentElement.scrollWidth]);
return found;
"""
FUSED = """
[[map]]
eq = '''model.layers.{l}.attention.q.weight [a b], model.layers.{l}.attention.k.weight [a b],
        model.layers.{l}.attention.v.weight [a b] <=> model.layers.{l}.attention.qkv.weight [(a + a + a) b]'''
"""
THREE = 'mesh = { x = 3 }\n[[parameter]]\nmatch = "*"\nsplit = { 0 = ["x"] }\nsizes = "ceil"\n'
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


def draw(path: Path, *arguments: str | Path) -> Path:
    done("plan", *map(str, arguments), "--plot", path)
    return path


def test_a_rank_and_a_tensor_are_clicked(tmp_path: Path, page: Page) -> None:
    conversion = make(tmp_path)
    page.open(draw(tmp_path / "plan.html", *conversion.arguments("plan")[1:]))
    assert page.text("h1") == "A plan of reshard-mpi"

    page.click("#matrix text[data-key='column 1']")
    assert page.text("#chosen") == "target rank 1"
    rows = page.rows("#feeds")
    assert page.text("#told").startswith(f"reads {len(rows)} sources: ") and len(rows) == 2
    assert {row[1] for row in rows} == {"1"}
    assert all(row[4] == str(conversion.shard(int(row[0]))) for row in rows)
    assert {row[5] for row in rows} == {str(conversion.written(1))}

    page.click("#matrix text[data-key='row 0']")
    assert page.text("#chosen") == "source rank 0" and "feeds 1 target: " in page.text("#told")
    page.click("#matrix text[data-key='cell 1 0']")
    assert page.text("#chosen") == "source rank 1 to target rank 0"
    page.click("#matrix rect[data-key='row 3']")  # the mark beside it, which rows without a number have too
    assert page.text("#chosen") == "source rank 3"

    page.type("#search", "moments")
    assert page.text("#names").split() == ["moments.w"]
    page.click("#names button")
    assert "How both sides cut" in page.text("#cut svg")
    assert page.text("#tensor").startswith("What moments.w is made of")
    moves = page.rows("#moves")
    assert [(row[0], row[1]) for row in moves][:2] == [("0", "[0:4, 0:2]"), ("0", "[0:4, 2:4]")]
    assert page.complaints() == []


def test_a_hostile_name_is_shown_and_not_run(tmp_path: Path, page: Page) -> None:
    (tmp_path / "src").mkdir()
    write_shard({HOSTILE: np.zeros((4, 4), np.float32)}, tmp_path / "src" / "net.safetensors")
    page.open(draw(tmp_path / "plan.html", tmp_path / "src", tmp_path / "dst"))
    assert page.text("#names") == HOSTILE
    page.click("#names button")
    assert page.text("#tensor") == f"What {HOSTILE} is made of"
    assert page.run("return window.hacked;") is None
    assert page.run("return document.images.length + document.scripts.length;") == 2
    assert page.complaints() == []


def test_a_script_of_others_would_not_run(tmp_path: Path, page: Page) -> None:
    conversion = make(tmp_path)
    path = draw(tmp_path / "plan.html", *conversion.arguments("plan")[1:])
    path.write_text(path.read_text().replace("</main>", "</main><script>window.hacked = 1</script>"))
    page.open(path)
    assert page.run("return window.hacked;") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints())


def test_many_targets_in_groups(tmp_path: Path, page: Page) -> None:
    (tmp_path / "src").mkdir()
    write_shard({"w": np.zeros((4096, 2), np.float32)}, tmp_path / "src" / "net.safetensors")
    (tmp_path / "dst.toml").write_text('mesh = { x = 4096 }\n[[parameter]]\nmatch = "w"\nsplit = { 0 = ["x"] }\n')
    arguments = (tmp_path / "src", tmp_path / "dst", "--dst-strategy", tmp_path / "dst.toml")
    page.open(draw(tmp_path / "plan.html", *arguments))
    assert "128 of 4096 targets planned" in page.text("header")
    page.click("#matrix rect[data-key='column 5']")
    assert page.text("#chosen") == "target ranks 320-383"
    assert len(page.rows("#feeds")) == 2
    assert "4096 pieces" in page.text("#cut svg")
    assert page.complaints() == []


@pytest.mark.parametrize("width", [700, 900, 1099, 1100, 1500])
def test_nothing_is_cut_off(tmp_path: Path, page: Page, width: int) -> None:
    folder = tmp_path / ("a_long_name_of_a_folder_" * 4)
    folder.mkdir()
    for number in range(3):
        tensors = {f"model.layers.{number}.attention.{part}.weight": np.ones((64, 32)) for part in "qkv"}
        tensors |= {f"W{'M' * 150}.{number}": np.ones((7, 9)), f"layers.{number}.bias": np.ones(100_000)}
        write_shard(tensors, folder / f"model-{number + 1:05}-of-00003.safetensors")
    (tmp_path / "map.toml").write_text(FUSED)
    (tmp_path / "dst.toml").write_text(THREE)
    options = ("--map", tmp_path / "map.toml", "--dst-strategy", tmp_path / "dst.toml")
    path = draw(tmp_path / "plan.html", folder, tmp_path / "dst", *options)
    page.resize(width, 1000)
    try:
        page.open(path)
        page.click("#matrix text[data-key='row 0']")
        assert page.text("#chosen") == "source model-00001-of-00003.safetensors"
        for name in ("qkv", "WMM", "bias"):
            page.type("#search", name)
            page.click("#names button")
            assert page.run(CUT_OFF) == []
    finally:
        page.resize(1500, 1400)
    assert page.complaints() == []

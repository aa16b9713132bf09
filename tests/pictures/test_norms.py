"""The page of an audit: a point for each tensor, what was found marked, names escaped, clicked in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import Page, browser
from support.command_line import refused, run_here
from support.whole_checkpoints import save, weights

from reshard_mpi.errors import UsageError
from reshard_mpi.pictures.pages import Mark, TensorNorm, norms_page

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def spoiled(folder: Path) -> Path:
    tensors = weights()
    tensors["model.layers.1.experts.2.w1.weight"][1, 1] = np.nan
    tensors["model.embed_tokens.weight"][5:7] = 0
    return save(folder, {**tensors, HOSTILE: np.full((3, 2), np.inf, np.float32)})


def drawn(path: Path, source: Path) -> str:
    finished = run_here("audit", source, "--plot", path, "--jobs", "1")
    assert finished.code == 4
    return path.read_text()


def test_every_tensor_is_a_point_and_names_are_text(tmp_path: Path) -> None:
    text = drawn(tmp_path / "audit.html", spoiled(tmp_path / "src"))
    assert len(re.findall("<circle ", text)) == len(weights()) + 1
    assert len(re.findall('class="error"', text)) == 2 and len(re.findall('class="note"', text)) == 1
    assert HOSTILE not in text and text.count("<script") == 2 and "<img" not in text
    assert not re.search(r"(?:src|href)=.?(?:https?:|//)", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert HOSTILE in data["names"] and len(data["told"]) == len(data["found"]) == len(data["names"])


@pytest.mark.slow
def test_a_large_checkpoint_is_a_page_of_bounded_size() -> None:
    norms = [TensorNorm(f"layers.{at % 90}.experts.{at // 90}.w", 1.0 + at, "float32 [2]") for at in range(90_000)]
    norms += [TensorNorm(f"part{chr(97 + at % 26)}{chr(97 + at // 26)}.w", 0.0, "float32 [2]") for at in range(600)]
    marks = [Mark("error", "zero", norm.name, "all are zero") for norm in norms[1::30]]
    text = norms_page("src", "many", norms, marks)
    assert len(text) < 2_000_000 and "more findings are not in this page" in text
    assert "more kinds of tensors are not in this page" in text and "tensors are drawn" in text
    assert norms_page("src", "none", [], []).count("<circle") == 0


def test_pages_alone_are_drawn(tmp_path: Path) -> None:
    source = save(tmp_path / "src", weights())
    for name in ("audit.png", "audit", "src"):
        refused("audit", source, "--plot", tmp_path / name, code=UsageError.exit_code)
    assert not (tmp_path / "audit.png").exists()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.xdist_group("a browser")
def test_points_and_findings_are_clicked(tmp_path: Path, page: Page) -> None:
    path = tmp_path / "audit.html"
    drawn(path, spoiled(tmp_path / "src"))
    page.open(path)
    assert page.text("h1") == "An audit of reshard-mpi"
    rows = page.rows("#findings")
    assert [row[1] for row in rows] == ["nan", "infinite", "rows"] and rows[1][2] == HOSTILE
    for number, (severity, kind, name, detail) in enumerate(rows):
        page.click(f"#findings tr:nth-child({number + 1}) button")
        assert page.text("#chosen") == name and page.text("#found") == f"{severity}: {kind}: {detail}"
        assert page.text("#told").startswith("norm ")
    page.click("circle.error")
    assert page.text("#found").startswith("error: ")
    page.click("svg[aria-label$='q_proj.weight'] circle:not([class])")
    assert page.text("#found") == "" and page.text("#chosen") in weights()
    assert page.complaints() == []

"""The reference on the site: each public name stands on one page, and each page is there."""

import re
from pathlib import Path

import forall
import forall.extend
import forall.random
import forall.testing

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
TORCHS = {"functionalize", "rearrange", "replace_all_batch_norm_modules_"}  # rows of a table
MADE_BY_THE_BUILD = {
    "index.md",
    "tutorials/index.md",
    "about/changelog.md",
    "about/contributing.md",
    "reference/benchmarks.md",
    "reference/errors.md",
    "reference/benchmarks_gpu.md",
}


def list_public_names() -> list[str]:
    names = [f"forall.{name}" for name in {*forall.__all__} - {"config"} - TORCHS]
    names += [f"forall.random.{name}" for name in forall.random.__all__]
    for module in (forall.extend, forall.testing):
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    return sorted([*names, "forall._core.config.Config"])


def test_each_public_name_stands_on_one_page():
    pages = sorted((DOCS / "reference").glob("*.md"))
    assert sorted(x for page in pages for x in SHOWN.findall(page.read_text())) == (
        list_public_names()
    )


def test_names_that_are_torchs_own_are_told_of():
    page = (DOCS / "reference" / "tools.md").read_text()
    assert {*re.findall(r"^\| `forall\.(\w+)` \|", page, re.MULTILINE)} == TORCHS


def test_each_page_is_in_the_navigation_and_there():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert listed == there | MADE_BY_THE_BUILD

"""Adds pages that are files elsewhere in the repository, and shows formulas without a script.

A link in such a file is relative to the file, so that it works where the repository is browsed. For
the site it is made relative to the page. Formulas (``$x^2$``) become MathML. Code with prompts is
marked as such, so that it can be copied without them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[2]
# The pages of the site that are made of files of the repository.
PAGES = {
    "index.md": "README.md",
    "about/changelog.md": "CHANGELOG.md",
    "about/contributing.md": "CONTRIBUTING.md",
    "reference/errors.md": "src/forall/errors.md",
    "reference/benchmarks.md": "benchmarks/results.md",
    "reference/benchmarks_gpu.md": "benchmarks/results_h100.md",
}
# How much a page weighs in the search, where it is not 1: pages of records come after those that
# explain, and what is for contributors after what is for users.
_WEIGHTS = {
    "getting_started.md": 2.0,
    "guides/control_flow.md": 2.0,
    "reference/vmap.md": 2.0,
    "about/": 0.5,
    "architecture/": 0.5,
    "about/changelog.md": 0.1,
    "reference/benchmarks": 0.1,
    "reference/clients.md": 0.1,
    "reference/coverage.md": 0.1,
    "reference/limitations.md": 0.1,
}
_PICTURES = {
    f"reference/{name}": f"benchmarks/{name}" for name in ("results.png", "divergence.png")
}
_PLACES = {source: page for page, source in (PAGES | _PICTURES).items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_PROMPTED = re.compile(r"^( *```)python(?=\n *>>> )", re.MULTILINE)
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_PATH = re.compile(r"<code>\w+/[\w/.]*</code>")
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}


def _place_of(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it does not have it."""
    if path in _PLACES:
        return _PLACES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _move_links(text: str, source: str, page: str) -> str:
    """Make links relative to the page; a link to what the site lacks becomes its text."""

    def move(m: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / m[2])
        if not (ROOT / target).exists():
            return m[0]
        place = _place_of(target)
        if place is None:  # the source file's path stands in the text
            return f"]({_NOWHERE})"
        return f"{m[1]}{os.path.relpath(place, PurePosixPath(page).parent)}{m[3] or ''})"

    text = _LINK.sub(move, text)
    return re.sub(rf"\[([^\[\]]*)\]\({_NOWHERE}\)", r"\1", text)


_NOWHERE = "nowhere-on-the-site"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and the pictures on them."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        text = _move_links((ROOT / source).read_text(), source, page)
        files.append(File.generated(config, page, content=text))
    for page, source in _PICTURES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Move links from a page in docs to files outside it, and mark code that has prompts."""
    path = page.file.src_uri
    weights = [weight for start, weight in _WEIGHTS.items() if path.startswith(start)]
    if weights:
        page.meta["search"] = {"boost": min(weights)}
    markdown = _PROMPTED.sub(r"\1pycon", markdown)
    return markdown if path in PAGES else _move_links(markdown, f"docs/{path}", path)


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers show without a script; let paths in tables wrap."""

    def turn(m: re.Match[str]) -> str:
        text = re.sub("&(?:lt|gt|amp);", lambda e: _ENTITIES[e[0]], m[3])
        return convert(text, display="inline" if m[2] == "(" else "block")

    def wrap(cell: re.Match[str]) -> str:
        return _PATH.sub(lambda path: re.sub(r"(?<=\w)[/_](?=\w)", r"\g<0><wbr>", path[0]), cell[0])

    return _CELL.sub(wrap, _FORMULA.sub(turn, html))

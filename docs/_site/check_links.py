"""Checks each link of the built site: the file is there, and the place in it.

Links to other hosts are counted, not followed: the check needs no network.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[2] / "build" / "site"


class _Page(HTMLParser):
    """The links of a page, and the places in it that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [x for x in (given.get("href"), given.get("src")) if x]
        self.places |= {x for x in (given.get("id"), given.get("name")) if x}


@cache
def _read(path: Path) -> _Page:
    return _Page(path.read_text())


def find_dead_links() -> tuple[list[str], int]:
    """Return the links that lead nowhere, and how many links there are within the site."""
    dead, count = [], 0
    for page in sorted(SITE.rglob("*.html")):
        if page.name == "404.html":  # its links are those of the site's root
            continue
        for link in _read(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.exists():
                dead.append(f"{page.relative_to(SITE)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                place = unquote(parts.fragment)
                if place not in _read(target).places:
                    dead.append(f"{page.relative_to(SITE)}: {link}")
    return dead, count


if __name__ == "__main__":
    dead, count = find_dead_links()
    print("\n".join(dead) or f"{count} links within the site, none dead")
    sys.exit(bool(dead))

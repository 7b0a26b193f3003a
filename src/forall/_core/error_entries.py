"""The entries of `errors.md`: cause and cure of each error, under the key that its note names.

`python -m forall explain KEY` prints an entry, and the site has a page of all.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "errors.md"


class ErrorEntry(NamedTuple):
    """An entry of `errors.md`: the text below a heading of the third level, which is the key."""

    key: str
    text: str  # in Markdown

    def format_plain(self) -> str:
        """Format the entry for a terminal: links become their text, and marks of code are left out.

        >>> print(ErrorEntry("key", "See [pages](a.md).").format_plain())
        key
        <BLANKLINE>
        See pages.
        """
        text = _LINK.sub(r"\1", _FENCE.sub("", self.text))
        return f"{self.key}\n\n{text.strip()}"


_ENTRY = re.compile(r"^### (\S+)\n+(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\[]+)\](?:\([^)]+\)|\[[^\]]+\])")


def read_entries() -> dict[str, ErrorEntry]:
    """Return all entries by their keys."""
    found = _ENTRY.findall(FILE.read_text(encoding="utf-8"))
    return {key: ErrorEntry(key, text.strip()) for key, text in found}


def find_entries(words: str) -> list[ErrorEntry]:
    """Return the entry with this key; else those with a similar key, or with these words."""
    entries = read_entries()
    if words in entries:
        return [entries[words]]
    close = get_close_matches(words, entries)
    wanted = " ".join(words.lower().split())
    said = [k for k, e in entries.items() if wanted in " ".join(e.text.lower().split())]
    return [entries[k] for k in dict.fromkeys([*said, *close])]

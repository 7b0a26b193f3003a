"""The page of errors lists messages as they are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = re.findall(
    r"^```text\n(.+)\n```$", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE
)
# A message in the source may be split over several strings.
SOURCE = re.sub(
    r"\"\s*\n\s*f?\"", "", "".join(p.read_text() for p in (ROOT / "src/forall").rglob("*.py"))
)


@pytest.mark.parametrize("line", LINES)
def test_the_text_after_the_call_is_in_the_source(line):
    text = line.partition(": ")[2].partition(": ")[2]
    parts = [part.strip(" .") for part in re.split(r"\.\.\.|max_steps=", text)]
    parts = [part for part in parts if len(part) > 14]
    assert parts
    for part in parts:  # words at its start or end may be what the call fills in
        assert any(part[i : i + 15] in SOURCE for i in range(len(part) - 14)), part


def test_the_page_has_the_most_met():
    assert len(LINES) >= 18

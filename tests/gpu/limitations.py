"""The table of what torch.func cannot do: each row has to be as the loop."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from gpu.checks import Check, Skipped, assert_same, brief, default_device


def checks(device: torch.device) -> list[Check]:
    with default_device(device):
        from limits import limitations as table

    def of(text: str, row: Callable) -> Callable[[], str]:
        def run() -> str:
            with default_device(device):
                truth = table.answer(row, table.THE_LOOP)
                if isinstance(truth, Exception):
                    raise Skipped(f"the loop raises {type(truth).__name__}: {brief(truth)}")
                found = table.answer(row, table.OURS)
            if isinstance(found, Exception):
                if is_an_error_in_readme(table, text):
                    return "an error, as the table says"
                raise found
            way = ""
            if isinstance(found, table.Slow):
                found, way = found.value, found.way
            assert_same(found, truth)
            return way

        return run

    return [Check(text, of(text, row)) for text, row in table.ROWS.items()]


def is_an_error_in_readme(table: ModuleType, text: str) -> bool:
    """Whether the last cell of this row quotes an error."""
    rows = (line.split(" | ") for line in table.PAGE.read_text().splitlines())
    cells = next((r for r in rows if r[0].removeprefix("| ") == text), [""])
    return cells[-1].startswith("`")

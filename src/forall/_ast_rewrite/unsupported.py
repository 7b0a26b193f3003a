"""What cannot be converted, and why."""

from __future__ import annotations

import ast
from typing import NamedTuple


class Refused(NamedTuple):
    """A function that stays as it is. ``place`` is ``file:line`` of what stands in the way."""

    reason: str
    place: str
    is_internal: bool = False  # an error of the conversion


class CannotConvert(Exception):  # noqa: N818 - says what happened
    """Raised where a construct is met that cannot be converted."""

    def __init__(self, reason: str, node: ast.AST | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = getattr(node, "lineno", None)

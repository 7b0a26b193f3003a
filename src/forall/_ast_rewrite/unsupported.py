"""Reasons why a function cannot be converted."""

from __future__ import annotations

import ast
from typing import NamedTuple


class Refusal(NamedTuple):
    """The reason why a function is not converted; ``place`` is ``file:line`` of its cause."""

    reason: str
    place: str
    is_internal: bool = False  # an error of the conversion


class CannotConvert(Exception):  # noqa: N818 - says what happened
    """Signal a construct that cannot be converted."""

    def __init__(self, reason: str, node: ast.AST | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = getattr(node, "lineno", None)

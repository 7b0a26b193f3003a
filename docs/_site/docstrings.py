"""Lets the reference show the section "Example:" of a docstring as code, as it is meant."""

from __future__ import annotations

from typing import Any

import griffe


class ShowExamples(griffe.Extension):
    """Names the section as griffe knows it, which takes the singular for a note."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one function or class, as griffe has read it."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = text.replace("\nExample:\n", "\nExamples:\n")

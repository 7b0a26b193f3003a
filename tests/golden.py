"""The exact text of an error, written where it is tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent

import pytest


@contextmanager
def refused(error: type[Exception], text: str) -> Iterator[None]:
    """The body raises this very type of error with this very text."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert str(caught.value) == dedent(text).strip()

"""The exact text of an error, written where it is tested, and its entry in `errors.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent

import pytest

from forall._compat.documented_error import NOTE
from forall._core.error_entries import ErrorEntry, read_entries

ENTRIES = read_entries()


@contextmanager
def refused(error: type[Exception], text: str) -> Iterator[None]:
    """The body raises this very type of error with this very text, which its entry shows."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert str(caught.value) == dedent(text).strip()
    assert shows(entry_of(caught.value), str(caught.value))


def entry_of(error: BaseException) -> ErrorEntry:
    """The entry that the error names, once."""
    (note,) = [note for note in getattr(error, "__notes__", []) if note.startswith(NOTE)]
    return ENTRIES[note.removeprefix(NOTE)]


def messages_of(entry: ErrorEntry) -> list[str]:
    """The first lines of the messages that an entry shows, with ``...`` for what differs."""
    blocks = re.findall(r"^```text\n(.*?)^```", entry.text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def cause_of(message: str) -> str:
    """The first line of a message, without the type of the error and the call of a transform."""
    line = re.sub(r"^\w*(Error|Warning): ", "", message.strip().splitlines()[0])
    called = re.match(r"[\w.\0]+(\(.*\)| = \.\.\.)?: ", line)
    return line[called.end() :] if called else line


def shows(entry: ErrorEntry, message: str) -> bool:
    """Does a line of the entry stand for this message?"""
    return any(
        re.fullmatch(re.escape(cause_of(line)).replace(r"\.\.\.", ".*"), cause_of(message))
        for line in messages_of(entry)
    )

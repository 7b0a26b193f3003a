"""Names and docstrings are in the field's words, and one name has one meaning.

`python tests/counts.py relative bare functions classes bases` lists what a test finds.
"""

from functools import cache

import pytest

import counts

# Public functions that are named by a participle alone.
PUBLIC = {
    "_api.stacked:stacked",
    "_api.torch_func_patch:installed",
    "_core.config:Config.parting",  # its earlier name
} | {f"_api.explained_call:ExplainedCall.{name}" for name in ("converted", "refused", "again")}

# Earlier names of what users see: a field of `forall.config`, and one of a report of `explain`.
FIELDS = {"parting", "partings"}

# Words that a reader would have to learn, and the terms to use instead.
TERMS = {
    "ledger": "mutation log",
    "world": "active set",
    "unmade": "lazy",
    "factored": "lazy product",
    "border": "boundary",
    "verb": "transform",
    "room": "package",
    "floor": "layer",
    "door": "public module",
    "peel": "record on the value",
    "anew": "fresh, recompute",
    "told": "notify, options",
    "heard": "listener",
    "apart": "diverged, disjoint, per group",
    "parting": "divergence",
    "parted": "diverged",
    "lifted": "lift",
    "dressed": "wrapped",
    "bare": "raw",
}


def test_docstrings_say_what_is_done_or_returned():
    assert counts.relative_docstrings() == []


def test_functions_are_named_by_what_they_do():
    assert set(counts.bare_names()) == PUBLIC


def test_one_class_name_is_one_class():
    assert counts.shared_class_names() == {}


def test_few_function_names_are_in_several_modules():
    assert len(counts.shared_function_names()) <= 10


def test_file_names_are_in_one_package():
    assert counts.shared_base_names() == {}


@cache
def words() -> dict[str, set[str]]:
    """Every word in a name of a file, function, method or class, and those names."""
    names = {m.base for m in counts.modules()}
    for m in counts.modules():
        names |= {qualified.rsplit(".", 1)[-1] for qualified, _ in counts.functions(m)}
        names |= set(counts.class_names(m))
    found: dict[str, set[str]] = {}
    for name in names - FIELDS:
        for word in name.lower().split("_"):
            found.setdefault(word, set()).add(name)
    return found


@pytest.mark.parametrize("word", TERMS)
def test_names_use_the_fields_term(word):
    assert word not in words(), f"use {TERMS[word]}"

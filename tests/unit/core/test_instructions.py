"""The instructions of code are read alike in each Python: none does the work of two."""

import random
from types import CodeType

import pytest
import torch

from forall import vmap
from forall._api.execution.side_effect_free import _read_code
from forall._api.execution.transform_decorator import describe_replay
from forall._core.code_table import walk_codes
from forall._core.python_state import find_attributes_read, instructions_of
from forall._jit.guards.attribute_names import SKIPPED_OPS, find_text_lookups
from forall._jit.guards.module_names import find_dotted_names
from oracle import same

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
MANY = "\n".join(f"  n{i} = {i + 300}.5" for i in range(300))  # their numbers need EXTENDED_ARG


def _compile(text: str) -> CodeType:
    """The code of the function ``t`` in a text, perhaps within another function."""
    (whole,) = (c for c in walk_codes(compile(text, "text", "exec")) if c.co_name == "t")
    return whole


def _read_locals(code: CodeType) -> list[tuple[str, object]]:
    return [(i.opname, i.argval) for i in instructions_of(code) if "_FAST" in i.opname]


def test_two_variables_are_loaded_and_stored_one_by_one():
    code = _compile("def t(a, b):\n c, d = a, b\n for e in c: e + d, a * b\n return (c, d)")
    found = _read_locals(code)
    assert {name for name, _ in found} == {"LOAD_FAST", "STORE_FAST"}
    loaded = [value for name, value in found if name == "LOAD_FAST"]
    assert loaded == ["a", "b", "c", "e", "d", "a", "b", "c", "d"]
    assert sorted(str(v) for name, v in found if name == "STORE_FAST") == ["c", "d", "e"]


def test_a_variable_that_may_be_unbound_is_loaded():
    code = _compile("def t(a):\n if a: b = 1\n return b")
    assert ("LOAD_FAST", "b") in _read_locals(code)


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("def t(x):\n return lambda: x", ["x"]),
        ("def t(x, y):\n def g(a=x): return x, y, a\n return g, (x, y)", ["x", "y"]),
        ("def t(x, y):\n return (x,), lambda: 1, (lambda: y)", ["y"]),
        ("def t(x):\n class A:\n  def g(self): return x\n return A", ["x"]),
        (f"def t(x, y):\n if 1:\n{MANY}\n def g(): return x, n299\n return g, y", ["n299", "x"]),
        ("def t(x):\n def g(a: x, *, k=x) -> x: return a\n return g, x", None),
        ("def t(x):\n return (i for i in [x] if x), x", ["x"]),
    ],
)
def test_a_cell_that_a_closure_gets_is_no_variable_that_is_read(text, cells):
    code = _compile(text)
    found = [i.argval for i in instructions_of(code) if i.opname == "LOAD_CLOSURE"]
    if cells is None:  # annotations are a function of their own from Python 3.14 on
        assert set(found) <= {"x"}
    else:
        assert found == cells


def test_attributes_that_a_function_within_reads_of_an_object():
    text = "def out(me):\n def t(x):\n  return x * me.a + (lambda y: y * me.b)(x)\n return t"
    assert find_attributes_read(_compile(text), "me") == ("a", "b")
    text = "def out(me):\n def t(x):\n  return x * me.a + (lambda y: y * hash(me))(x)\n return t"
    assert find_attributes_read(_compile(text), "me") is None


@pytest.mark.parametrize("default", ["0", "255", "256", "-1", "None", "1.5", "()", "True", "x"])
def test_a_text_that_names_an_attribute(default):
    code = _compile(f"def t(x):\n return getattr(x, 'a', {default}) + getattr(x.y, 'b')")
    assert find_text_lookups(instructions_of(code)) == ({"a", "b"}, False)


def test_a_module_in_a_variable_that_is_stored_or_loaded_with_another():
    text = "def t(x, m):\n return [m.sin(i) for i in x], x, m.cos(x)\n"
    code = _compile(text)
    found = [
        name
        for c in walk_codes(code)
        for name, _ in find_dotted_names(
            [i for i in instructions_of(c) if i.opname not in SKIPPED_OPS], {"m"}
        )
    ]
    assert found.count(["m", "sin"]) == found.count(["m", "cos"]) == 1
    assert ["", "sin"] not in found


CALLS = {
    "f(1, 2)": 2,
    "f(1)(2, 3)": 1,
    "f(1, k=2)": 2,
    "f(*x)": float("inf"),
    "f(1, *x, k=3)": float("inf"),
    "with f(1, 2): pass": 2,
    "with f(1) as a, g(f(1, 2, 3)): pass": 3,
    "with f(): pass": 0,
    "for a in f(1, 2): pass": 2,
    "assert f(1, 2), g(1)": 2,
    "raise f(1, 2)": 2,
    "return all(f(1, 2) for a in x)": 2,
    "return all(a for a in f(1, 2))": 2,
    "return f'{f(1)!r:>{f(1, 2, 3)}}'": 3,
    "match f(1, 2):\n  case 1: pass": 2,
    "return f(1) < f(1, 2) < f()": 2,
    "return -f(1, 2), +f(1)": 2,
    "return [*f(1, 2), *f(1)]": 2,
    "return f": float("inf"),
}


@pytest.mark.parametrize("text", CALLS)
def test_the_most_arguments_of_a_call(text):
    counts = {}
    for code in walk_codes(_compile(f"def t(x):\n {text}")):
        read = _read_code(code)
        assert read is not None
        for (name, _), count in read.ways.items():
            counts[name] = max(counts.get(name, 0), count)
    assert counts["f"] == CALLS[text]


def by_import(x):
    import random as r

    return sum([x * r.random() for _ in range(1)])


@pytest.mark.filterwarnings("ignore:.*functions of the module random draw")
def test_a_module_that_is_imported_inside_is_seen():
    f = vmap(by_import)
    for n in range(24):
        random.seed(n)
        found = f(X)
        random.seed(n)
        assert same(found, X * random.random())
    assert "random" in describe_replay(f)

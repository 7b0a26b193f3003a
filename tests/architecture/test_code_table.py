"""What is known of code goes with the code."""

from __future__ import annotations

import gc

from forall._core.code_table import CodeSet, CodeTable


def make_code():
    namespace: dict = {}
    exec("def f(x):\n    return x + 1\n", namespace)  # noqa: S102 - code of its own each time
    return namespace["f"].__code__


def test_equal_code_is_told_apart():
    table: CodeTable[int] = CodeTable()
    first, second = make_code(), make_code()
    assert first == second
    table[first] = 1
    assert table[first] == table.get(first) == table.get(first, 2) == 1
    assert first in table
    assert second not in table
    assert table.get(second) is None
    assert table.get(second, 2) == 2
    assert table.setdefault(second, 3) == table.setdefault(second, 4) == 3


def test_an_entry_goes_with_its_code():
    table: CodeTable[object] = CodeTable()
    some = CodeSet()
    code = make_code()
    key = id(code)
    table[code] = object()
    some.add(code)
    some.add(code)
    assert key in table._kept
    del code
    gc.collect()
    assert not table._kept
    assert not some._kept


def test_nothing_is_known_of_none():
    assert None not in CodeSet()

"""What the cases change of their module is put back after each."""

import pytest

import jit.cases as home


@pytest.fixture(autouse=True)
def globals_as_before():
    before = {n: getattr(home, n) for n in ("SCALE", "WEIGHT", "helper")}
    table, factor = list(home.HOME.table["a"]), home.HOME.factor
    yield
    for n, value in before.items():
        setattr(home, n, value)
    home.HOME.table["a"][:], home.HOME.factor = table, factor

"""Budgets: a file of at most 400 lines, a function of at most 40 besides its docstring."""

from statistics import median

import pytest

from source import ROOT, files, functions, lines_of

FILE, MEDIAN, FUNCTION = 400, 150, 40

# More, and why. An entry that is no longer needed fails.
LONGER_FILES: dict[str, tuple[int, str]] = {}
LONGER_FUNCTIONS: dict[tuple[str, str], tuple[int, str]] = {}


def length(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


@pytest.mark.parametrize("path", files())
def test_a_file_can_be_read_in_one_sitting(path):
    assert length(path) <= LONGER_FILES.get(path, (FILE, ""))[0]


def test_most_files_are_short():
    assert median(length(path) for path in files()) <= MEDIAN


@pytest.mark.parametrize("path", files())
def test_a_function_fits_on_a_screen(path):
    long = {
        f.name: lines_of(f)
        for f in functions(files()[path])
        if lines_of(f) > LONGER_FUNCTIONS.get((path, f.name), (FUNCTION, ""))[0]
    }
    assert not long


@pytest.mark.parametrize("path", LONGER_FILES)
def test_a_longer_file_is_still_longer(path):
    assert length(path) > FILE


@pytest.mark.parametrize(("path", "name"), LONGER_FUNCTIONS)
def test_a_longer_function_is_still_longer(path, name):
    assert any(f.name == name and lines_of(f) > FUNCTION for f in functions(files()[path]))

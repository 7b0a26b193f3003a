"""The README's table of limitations says what is so."""

from limits import limitations


def test_the_readme_has_the_table_that_running_both_gives():
    page = limitations.README.read_text()
    assert limitations.placed(page) == page, "run `make limitations`"


def test_what_is_lifted_is_the_loops():
    _, _, *rows = limitations.table().splitlines()
    lifted = [row for row in rows if row.endswith(("| as the loop |", "at a time |"))]
    assert len(rows) >= 45
    assert len(rows) - len(lifted) <= 9  # a shared tensor overwritten, randomness, and values asked for

"""The page on the limits of torch.func says what is so."""

from limits import limitations


def test_the_readme_has_the_table_that_running_both_gives():
    page = limitations.PAGE.read_text()
    assert limitations.placed(page) == page, "run `make limitations`"


# Decided so. What is not named here is as in the loop.
OPEN = (
    "overwrites a tensor from outside",
    "draws random numbers, without a word",
)


def test_all_rows_but_these_are_lifted():
    _, _, *rows = limitations.table().splitlines()
    lifted = [row.endswith(("| as the loop |", "at a time |", "in groups |")) for row in rows]
    assert lifted == [not row.startswith(tuple(f"| {text}" for text in OPEN)) for row in rows]

"""Entries that forall does not map, and why. Strict: one that is mapped after all has to go.

The first ones ask for something that depends on the values of one example: how large the result is,
or a Python number. Where there is no example at all, there is none to ask.
"""

ROWS = "of no examples: as many rows as there are nonzero entries"

# (entry, word) -> why that word is an error, or a loop of which no case is right.
GAPS: dict[tuple[str, str], str] = {}

"""Entries that forall does not map, and why. Strict: one that is mapped after all has to go."""

GAPS: dict[str, str] = {}

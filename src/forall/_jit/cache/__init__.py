"""The calls that are kept for replay, by their keys."""

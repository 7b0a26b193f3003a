"""Executors of a recorded program."""

"""Conditions under which a recorded program may answer a call."""

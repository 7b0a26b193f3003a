"""Calls and operators that need no wrapper around what they make."""

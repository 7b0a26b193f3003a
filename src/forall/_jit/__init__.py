"""Calls recorded as straight lines of operators, cleaned, and written as Python."""

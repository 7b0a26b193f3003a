"""The examples that are active where control flow diverges, and levels for them alone."""

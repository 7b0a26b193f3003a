"""Makers of batching rules: from what an operator does to a rule for all examples."""

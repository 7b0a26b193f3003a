"""Strategies for running a mapped function: all examples together, in groups, or in a loop."""

"""Stateless random numbers: a draw is a function of its key, and of nothing else."""

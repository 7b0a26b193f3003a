"""Rewrites of a recorded program that keep its results."""

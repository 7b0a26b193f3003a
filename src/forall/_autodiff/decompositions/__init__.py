"""Kernels of torch in operators whose derivatives hold at any order."""

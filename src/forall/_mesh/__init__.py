"""Axes over several processes: what ranks say to each other, in which order, and what if one fails.

The engine is `torch.distributed`, which is imported with the first mesh.
"""

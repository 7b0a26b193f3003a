"""In-place writes under vmap: their log, how they reach the user's tensors, how they are undone."""

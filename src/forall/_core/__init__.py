"""Floor 1: nouns that everyone shares, without opinions."""

"""Floor 4: the public verbs. Each checks its arguments, flattens trees, enters a level and leaves it."""

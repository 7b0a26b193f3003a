"""Floor 4: the public verbs. Each checks its arguments, flattens trees, enters and leaves."""

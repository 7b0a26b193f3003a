"""Floor 2: what vmap means. `Batched` values, the level that makes them, the rules for them."""

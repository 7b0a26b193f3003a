"""The meaning of `vmap`: `Batched` values, the level that makes them, the rules for them."""

"""The meaning of `vmap`: `BatchedTensor` values, the level that makes them, the rules for them."""

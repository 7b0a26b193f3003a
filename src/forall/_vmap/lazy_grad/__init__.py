"""Per-example gradients of shared tensors that are not computed until someone reads them."""

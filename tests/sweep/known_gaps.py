"""Entries that forall does not map, and why. Strict: one that is mapped after all has to go.

All of them ask for something that depends on the values of one example: how large the result is,
or a Python number. Examples that run as one have no single answer to that.
"""

GAPS: dict[str, str] = {
    "allclose": "returns a Python bool",
    "argwhere": "as many rows as there are nonzero entries",
    "equal": "returns a Python bool",
    "item": "returns a Python number",
    "masked_select": "as long as the mask has entries",
    "nn.functional.gaussian_nll_loss": "asks in Python whether any variance is negative",
    "nn.functional.one_hot": "without num_classes, as wide as the largest value",
    "nonzero": "as many rows as there are nonzero entries",
    "repeat_interleave": "as long as the repeats, when they are a tensor, add up to",
    "tensor_split": "the places of the cuts, when they are a tensor, are read as Python numbers",
    "unique": "as long as there are distinct values",
    "unique_consecutive": "as long as there are runs",
}

"""Entries that forall does not map, and why. Strict: one that is mapped after all has to go.

All of them ask for something that depends on the values of one example: how large the result is,
or a Python number. Where there is no example at all, there is none to ask.
"""

GAPS: dict[str, str] = {
    "argwhere": "of no examples: as many rows as there are nonzero entries",
    "item": "of no examples: returns a Python number",
    "nn.functional.gaussian_nll_loss": "of no examples: asks whether any variance is negative",
    "nonzero": "of no examples: as many rows as there are nonzero entries",
    "tensor_split": "of no examples: the places of the cuts are read as Python numbers",
    "unique": "of no examples: as long as there are distinct values",
    "unique_consecutive": "of no examples: as long as there are runs",
}

"""Generators of the device that the tests run on: torch refuses those of another."""

import torch

HERE = torch.get_default_device()  # in which a function under test makes one itself


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)

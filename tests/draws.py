"""Generators of the device that the tests run on: torch refuses those of another."""

import torch

HERE = torch.get_default_device()  # in which a function under test makes one itself


def get_default_generator() -> torch.Generator:
    """Return the generator that draws take from, where no device and no generator is named."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)

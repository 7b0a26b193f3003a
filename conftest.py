"""Names that every doctest may use, in `src/forall`, README.md and docs."""

from typing import Any

import pytest
import torch

import forall


@pytest.fixture(autouse=True)
def names_of_doctests(doctest_namespace: dict[str, Any]) -> None:
    torch.set_printoptions(profile="default")  # a doctest that prints more digits spoils no other
    doctest_namespace.update(torch=torch, forall=forall)

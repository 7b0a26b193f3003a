"""Composable function transforms for PyTorch."""

from forall._batching import rules as _rules
from forall._core.errors import PerformanceWarning
from forall._transforms.grad import grad, grad_and_value
from forall._transforms.jvp import jvp
from forall._transforms.vmap import vmap

del _rules
__all__ = ["PerformanceWarning", "grad", "grad_and_value", "jvp", "vmap"]

"""Composable function transforms for PyTorch."""

from torch.func import (
    functional_call,
    functionalize,
    rearrange,
    replace_all_batch_norm_modules_,
)

from forall import random as random
from forall._batching import rules as _rules
from forall._core.errors import PerformanceWarning
from forall._transforms import captured as _captured
from forall._transforms import functions as _functions
from forall._transforms.grad import grad, grad_and_value
from forall._transforms.jacobian import hessian, jacfwd, jacrev
from forall._transforms.jvp import jvp
from forall._transforms.linearize import linearize
from forall._transforms.modules import stack_module_state
from forall._transforms.second import hessian_diag, hvp, laplacian
from forall._transforms.stacked import stacked
from forall._transforms.unwrap import debug_unwrap
from forall._transforms.vjp import vjp
from forall._transforms.vmap import vmap

_functions.install()
_captured.install()
del _captured, _functions, _rules
__all__ = [
    "PerformanceWarning",
    "debug_unwrap",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "hessian_diag",
    "hvp",
    "jacfwd",
    "jacrev",
    "jvp",
    "laplacian",
    "linearize",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "stack_module_state",
    "stacked",
    "vjp",
    "vmap",
]

"""Composable function transforms for PyTorch."""

from torch.func import functionalize, replace_all_batch_norm_modules_

from forall._core.loading import without_collector as _without_collector
from forall._torch.versions import rearrange
from forall._torch.versions import warn_if_untested as _warn_if_untested

_warn_if_untested()
with _without_collector():
    from forall import random as random
    from forall._batching import rules as _rules
    from forall._control import torchs as _torchs
    from forall._control.associative_scan import associative_scan
    from forall._control.cond import cond, switch
    from forall._control.scan import map, scan  # noqa: A004 - the name that it has in JAX
    from forall._control.while_loop import fori_loop, while_loop
    from forall._core.config import now as config
    from forall._core.errors import PerformanceWarning
    from forall._lanes import wiring as _wiring
    from forall._transforms import captured as _captured
    from forall._transforms import copies as _copies
    from forall._transforms import functions as _functions
    from forall._transforms.chunking import Chunks
    from forall._transforms.explain import Explanation, explain
    from forall._transforms.grad import grad, grad_and_value
    from forall._transforms.installed import install, installed, uninstall
    from forall._transforms.jacobian import hessian, jacfwd, jacrev
    from forall._transforms.jit import jit
    from forall._transforms.jvp import jvp
    from forall._transforms.linearize import linearize
    from forall._transforms.modules import functional_call, stack_module_state
    from forall._transforms.norms import per_example_grad_norm
    from forall._transforms.second import hessian_diag, hvp, laplacian
    from forall._transforms.shorter import jacobian
    from forall._transforms.stacked import stacked
    from forall._transforms.unwrap import debug_unwrap
    from forall._transforms.vjp import vjp
    from forall._transforms.vmap import vmap

    _functions.install()
    _captured.install()
    _copies.install()
    _torchs.install()
del _captured, _copies, _functions, _wiring, _rules, _torchs
del _warn_if_untested, _without_collector
__all__ = [
    "Chunks",
    "Explanation",
    "PerformanceWarning",
    "associative_scan",
    "cond",
    "config",
    "debug_unwrap",
    "explain",
    "fori_loop",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "hessian_diag",
    "hvp",
    "install",
    "installed",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jit",
    "jvp",
    "laplacian",
    "linearize",
    "map",
    "per_example_grad_norm",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "scan",
    "stack_module_state",
    "stacked",
    "switch",
    "uninstall",
    "vjp",
    "vmap",
    "while_loop",
]

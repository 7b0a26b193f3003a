"""Composable function transforms for PyTorch."""

from torch.func import functionalize, replace_all_batch_norm_modules_

from forall._compat.versions import rearrange
from forall._compat.versions import warn_if_untested as _warn_if_untested
from forall._core.import_time import pause_gc as _without_collector

__version__ = "0.1.0"

_warn_if_untested()
with _without_collector():
    from forall import random as random
    from forall._api import autograd_function as _functions
    from forall._api import captured_grad as _captured
    from forall._api import deepcopy as _copies
    from forall._api.chunk_size import Chunks
    from forall._api.collectives import (
        all_gather,
        all_to_all,
        axis_index,
        axis_size,
        pmax,
        pmean,
        pmin,
        ppermute,
        psum,
        psum_scatter,
    )
    from forall._api.debug_unwrap import debug_unwrap
    from forall._api.explain import Explanation, explain
    from forall._api.functional_call import functional_call, stack_module_state
    from forall._api.grad import grad, grad_and_value
    from forall._api.jacobian import hessian, jacfwd, jacobian, jacrev
    from forall._api.jit import jit
    from forall._api.jvp import jvp
    from forall._api.linearize import linearize
    from forall._api.per_example_grad_norm import per_example_grad_norm
    from forall._api.second_order import hessian_diag, hvp, laplacian
    from forall._api.shard_map import axes, shard_map
    from forall._api.stacked import stacked
    from forall._api.torch_func_patch import install, installed, uninstall
    from forall._api.vjp import vjp
    from forall._api.vmap import vmap
    from forall._auto_replay import replayed_calls as _replay
    from forall._autodiff.decompositions import graph_nodes as _nodes
    from forall._control_flow import hop_overrides as _torchs
    from forall._control_flow.associative_scan import associative_scan
    from forall._control_flow.cond import cond, switch
    from forall._control_flow.scan import map, scan  # noqa: A004 - the name that it has in JAX
    from forall._control_flow.while_loop import fori_loop, while_loop
    from forall._core.config import now as config
    from forall._core.errors import AxisError, PerformanceWarning, RankError
    from forall._divergence import install as _wiring
    from forall._vmap import rules as _rules

    _functions.install_functions()
    _captured.install_autograd_calls()
    _copies.install_deepcopy()
    _torchs.install_control_flow()
    _replay.install()
del _captured, _copies, _functions, _replay, _wiring, _nodes, _rules, _torchs
del _warn_if_untested, _without_collector
__all__ = [
    "AxisError",
    "Chunks",
    "Explanation",
    "PerformanceWarning",
    "RankError",
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axes",
    "axis_index",
    "axis_size",
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
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "scan",
    "shard_map",
    "stack_module_state",
    "stacked",
    "switch",
    "uninstall",
    "vjp",
    "vmap",
    "while_loop",
]

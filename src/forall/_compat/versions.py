"""Differences between the releases of torch that forall runs on.

Code that depends on the release, or on a name that some releases lack, is in this file. forall
replaces some functions of torch. At import it checks that torch still calls each of them: if not,
the import raises, where results would be wrong later.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import handle_torch_function, has_torch_function, is_tensor_like
from torch.utils import checkpoint

from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import ModuleType

try:
    from torch.func import rearrange
except ImportError:  # before 2.13
    from functorch.einops import rearrange  # noqa: F401 - forall hands it on

OLDEST, NEWEST = (2, 10), (2, 15)  # that the tests have run on


def get_release() -> tuple[int, int]:
    """Return torch's release, as in (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def warn_if_untested() -> None:
    """Warn if torch is newer than any release that the tests have run on."""
    if get_release() <= NEWEST:
        return
    warnings.warn(
        f"forall: torch {torch.__version__} is newer than those that forall was tested on "
        f"({_name_tested_releases()}).\n"
        "Where torch has changed what it keeps private, results may differ from the loop's. Report "
        "such a result as an issue, with what `python -m torch.utils.collect_env` prints.",
        stacklevel=3,  # from here by `import forall` to the user's line
    )


def _name_tested_releases() -> str:
    low, high = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{low} to {high}"


def find_existing(names: Iterable[str]) -> tuple[Any, ...]:
    """Return the ATen operators of these names, as in "mm.default", that this torch has."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(torch.ops.aten, packet, None), overload, None))
    return tuple(op for op in found if op is not None)


# Forward formulas that are wrong in this release: since 2.15 that of a determinant raises if the
# matrix is singular.
WRONG_FORMULAS = frozenset(
    find_existing(["_linalg_det.default"] if get_release() >= (2, 15) else [])
)

# Pointwise operators that torch's tags name only since 2.12; `ldexp` since 2.11.
UNTAGGED_POINTWISE = frozenset(
    find_existing(
        [
            "_conj_physical.default",
            "celu_.default",
            "elu_.default",
            "hardsigmoid_.default",
            "hardtanh_.default",
            "ldexp.Tensor",
            "leaky_relu.default",
            "leaky_relu_.default",
            "selu_.default",
        ]
    )
)

# The derivative of `torch.clamp` by numbers, where an entry equals its bound: 1, and 0 since 2.14.
HAS_BOUNDS_WITHIN = get_release() < (2, 14)


# `torch.autograd.Function.apply` as torch has it, to be called with the class first. It is written
# in Python up to 2.13 and in C since.
_apply = torch.autograd.Function.__dict__["apply"]
apply_users = getattr(_apply, "__func__", _apply)


def apply_without_binding(function: Any, *args: Any) -> Any:
    """Apply a Function whose forward has no defaults: binding these takes longer than the rest."""
    if torch._C._are_functorch_transforms_active() or not hasattr(_apply, "__func__"):
        return apply_users(function, *args)
    alive = torch._C._functorch.unwrap_if_dead  # for wrappers of a torch.func call that has ended
    return super(torch.autograd.Function, function).apply(
        *[alive(a) if isinstance(a, torch.Tensor) else a for a in args]
    )


# The methods that the engine calls for a Function's backward; "apply_boxed" since 2.13.
BACKWARDS = tuple(n for n in ("apply", "apply_boxed") if hasattr(BackwardCFunction, n))

# Functions of torch's state that some releases lack: the first exists since 2.11.
LATER_QUESTIONS = tuple(
    getattr(module, name)
    for module, name in [(torch.xpu, "is_current_stream_capturing")]
    if hasattr(module, name)
)

# Getters and setters of the dtype that a leaf's gradient gets; the second exists since 2.15.
GRAD_DTYPE_CALLS = frozenset(
    call
    for name in ("grad_dtype", "_has_grad_dtype_override")
    if hasattr(torch.Tensor, name)
    for call in (getattr(torch.Tensor, name).__get__, getattr(torch.Tensor, name).__set__)
)


def count_compiled_frames(compiler: ModuleType, start: int) -> int:
    """Start to count compiled frames at ``start``, or stop if it is -1.

    Return the count until now. Before 2.12 torch has no count, and the result is 0.
    """
    count = getattr(compiler, "set_fullgraph_compiled_frame_count", None)
    return 0 if count is None else count(start)


def require_called(name: str, module: ModuleType, *callers: str) -> None:
    """Raise unless one of these functions of a module calls torch's function of this name.

    Raises:
        ImportError: if they call another function, so that forall's replacement would never run.
    """
    functions = (inspect.unwrap(getattr(module, caller)) for caller in callers)
    if not any(name in function.__code__.co_names for function in functions):
        raise _make_release_error(f"{module.__name__}.{callers[0]} does not call {name}")


def _make_release_error(what: str) -> ImportError:
    return documented_error(ImportError, "torch-release")(
        f"forall: this release of torch is not known, and derivatives could come out wrong.\n"
        f"    torch   {torch.__version__}, where {what}\n"
        f"Install a torch that forall was tested on, from {_name_tested_releases()}."
    )


def ask_overrides_of_backward(torchs: Callable) -> Callable:
    """Return `torch.autograd.backward`, which asks function modes and classes of tensors first.

    Releases that do not yet ask them, as they do for `torch.autograd.grad`, would accumulate the
    gradients of one example in a tensor that all examples share.
    """
    if "has_torch_function" in inspect.unwrap(torchs).__code__.co_names:
        return torchs

    @functools.wraps(torchs)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> Any:
        groups = [x if isinstance(x, (list, tuple)) else (x,) for x in (tensors, inputs)]
        given = tuple(t for group in groups for t in group if is_tensor_like(t))
        how = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        if grad_variables is not None:  # torch warns that it is deprecated
            how["grad_variables"] = grad_variables
        if has_torch_function(given):
            return handle_torch_function(backward, given, tensors, grad_tensors=grad_tensors, **how)
        return torchs(tensors, grad_tensors, **how)

    return backward


# Before any other module of forall takes the function for a key.
torch.autograd.backward = ask_overrides_of_backward(torch.autograd.backward)


def wrap_checkpoints(begin: Callable) -> None:
    """Let ``begin(function, preserve, start)`` create the generator that runs around a checkpoint.

    ``start(other)`` creates torch's own generator, for another function in ``function``'s place.
    """
    new, old = (f"_checkpoint_without_reentrant_generator{end}" for end in ("_impl", ""))
    if hasattr(checkpoint, new):
        require_called(new, checkpoint, "checkpoint", "_checkpoint_impl")
        setattr(checkpoint, new, _wrap_tuple_generator(getattr(checkpoint, new), begin))
    else:
        require_called(old, checkpoint, "checkpoint")
        setattr(checkpoint, old, _wrap_star_generator(getattr(checkpoint, old), begin))


def _wrap_tuple_generator(torchs: Callable, begin: Callable) -> Callable:
    """Wrap the generator of 2.14 and later, to which arguments are passed as a tuple and a dict.

    It calls ``begin`` as `wrap_checkpoints` says.
    """

    @functools.wraps(torchs)
    def generator(
        function: Callable,
        args: tuple,
        kwargs: dict,
        *,
        preserve_rng_state: bool = True,
        **how: Any,
    ) -> Any:
        def start(other: Callable) -> Generator:
            return torchs(other, args, kwargs, preserve_rng_state=preserve_rng_state, **how)

        return begin(function, preserve_rng_state, start)

    return generator


def _wrap_star_generator(torchs: Callable, begin: Callable) -> Callable:
    """Wrap the generator of releases before 2.14, where the arguments follow the settings."""

    @functools.wraps(torchs)
    def generator(function: Callable, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        return begin(function, preserve, lambda other: torchs(other, preserve, *args, **kwargs))

    return generator

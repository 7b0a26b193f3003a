"""torch's control-flow operators, which forall's replace inside transforms."""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch._higher_order_ops
import torch.nn.attention.flex_attention as flex

from forall._compat import functorch_interop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_redirected: set[str] = set()


def _choose_by_context(torchs: Callable, ours: Callable) -> Callable:
    """Return a function that is ``ours`` inside transforms of forall, and torch's elsewhere."""

    @functools.wraps(torchs)
    def either(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not functorch_interop.is_running_transform():
            return torchs(*args, **kwargs)
        return ours(*args, **kwargs)

    return either


def redirect(ours: Callable) -> None:
    """Replace torch's operator of the same name by ``ours`` inside transforms of forall, once."""
    name = ours.__name__
    if name in _redirected:
        return
    _redirected.add(name)
    torchs = getattr(torch._higher_order_ops, name)
    either = _choose_by_context(torchs, ours)
    own = sys.modules[f"torch._higher_order_ops.{name}"]  # the function of this name hides it
    for module in (own, torch._higher_order_ops, torch):
        if getattr(module, name, None) is torchs:
            setattr(module, name, either)


def redirect_flex_attention(attention: Callable, helpers: dict[str, Callable]) -> None:
    """Replace FlexAttention's operator, and private functions beside it, inside transforms, once.

    Users have imported the public function by name; it looks up the private ones with each call.
    """
    if "flex_attention" in _redirected:
        return
    _redirected.add("flex_attention")
    operator = type(flex.flex_attention_hop)
    operator.__call__ = _choose_by_context(operator.__call__, lambda _self, *args: attention(*args))
    own = {"_validate_device": _allow_devices, "setup_compilation_env": _run_uncompiled}
    for name, ours in {**helpers, **own}.items():
        if hasattr(flex, name):
            setattr(flex, name, _choose_by_context(getattr(flex, name), ours))


@contextmanager
def _run_uncompiled() -> Iterator[str]:
    """Make FlexAttention run its operator as it is, also before the compiler has been loaded."""
    import_module("torch._dynamo.eval_frame")  # takes seconds, so it is not imported earlier
    with functorch_interop.run_eagerly():
        yield "eager"


def _allow_devices(*_: torch.Tensor) -> None:
    """Accept all devices, where torch's check refuses derivatives on a CPU for its own operator."""


def is_identity_score(score_mod: Callable) -> bool:
    """Return True for FlexAttention's default score_mod."""
    return score_mod is getattr(flex, "_identity", None)


def masks_nothing(mask_mod: Callable) -> bool:
    """Return True for the mask_mod of a mask that is not given."""
    return mask_mod is getattr(flex, "noop_mask", None)

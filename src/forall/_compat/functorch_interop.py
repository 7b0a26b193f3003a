"""Interoperation with torch.func and Dynamo: torch's own transforms run inside one another.

Inside an active transform of torch.func, forall's transforms would not see its tensors, which gives
silent zeros; so torch's own run in their place. The other way round, torch.func inside forall needs
nothing: its wrappers lie on values of levels, and its operators reach the levels. Dynamo does not
trace or compile forall's engine.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.func
from torch.autograd import forward_ad

from forall._compat import exception_safety
from forall._compat.dispatch_state import in_torch_func, is_dynamo_loaded, refuse_inside_linearize
from forall._compat.private_api import count_dispatch_modes, pop_mode, push_mode
from forall._compat.versions import count_compiled_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._compat.private_api import DispatchMode


def must_hand_over() -> bool:
    """Return True if torch's own transforms must run instead of forall's."""
    if torch.compiler.is_dynamo_compiling():
        return _is_in_torch_func()
    if in_torch_func():
        return True
    if forward_ad._current_level >= 0:
        refuse_inside_linearize()
    return False


def _is_in_torch_func() -> bool:
    """Return True inside a transform of torch.func, which Dynamo enters while it traces."""
    return in_torch_func()


vars(_is_in_torch_func)["_dynamo_marked_constant"] = True  # Dynamo calls it, and uses the result


# As they are at import: `forall.install` may rebind these names later.
OWN = {name: f for name, f in vars(torch.func).items() if callable(f)}


def call_torch_func(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of torch.func's transform of this name."""
    return OWN[name](*args, **kwargs)


def vmap_with_named_dims(
    func: Callable, in_dims: tuple, out_dims: Any, randomness: str, chunk_size: Any
) -> Callable:
    """Return torch.func.vmap with dims for keyword arguments too: ``in_dims`` is (args, kwargs)."""

    def call_unpacked(args: tuple, kwargs: dict) -> Any:
        return func(*args, **kwargs)

    mapped = call_torch_func(
        "vmap", call_unpacked, in_dims, out_dims, randomness, chunk_size=chunk_size
    )
    return lambda *args, **kwargs: mapped(args, kwargs)


def linearize_by_jvp(func: Callable, *primals: Any) -> tuple[Any, Callable]:
    """Linearize a function by torch.func.jvp, which is right under every transform.

    torch.func.linearize's own program is constant in the point of linearisation, and Dynamo cannot
    trace it.
    """

    def jvp_fn(*tangents: Any) -> Any:
        return call_torch_func("jvp", func, primals, tangents)[1]

    return func(*primals), jvp_fn


class _EagerState(exception_safety.RestoredState):
    depth = 0
    callback: Any = None  # Dynamo's callback before the outermost call


_eager = _EagerState.make_instance(idle=True)


def is_running_transform() -> bool:
    """Return True while a transform of forall runs a function."""
    return _eager.depth > 0


class run_eagerly:
    """A block in which functions run as plain Python, also those that torch.compile wraps.

    Dynamo would compile forall's handlers along with the user's function, or make one autograd node
    of it, which no level could look into. All of this is state of the thread.
    """

    __slots__ = ("callback", "counted")

    def __enter__(self) -> None:
        _eager.depth += 1
        self.callback = None
        self.counted = 0
        if "torch._dynamo" in sys.modules and is_dynamo_loaded():
            compiler = sys.modules["torch._dynamo.eval_frame"]
            self.callback = compiler.set_eval_frame(None)
            if _eager.depth == 1:
                _eager.callback = self.callback
            # While frames are counted, fullgraph=True does not check how many it compiled.
            self.counted = count_compiled_frames(compiler, 0)
            if compiler._callback_from_stance is not _callback_from_stance:
                _install_callback(compiler)

    def __exit__(self, *_: object) -> None:
        _eager.depth -= 1
        if self.counted < 0:
            count_compiled_frames(sys.modules["torch._dynamo.eval_frame"], -1)
        if _eager.depth == 0:
            _eager.callback = None
        if self.callback is not None:
            sys.modules["torch._dynamo.eval_frame"].set_eval_frame(self.callback)


def is_dynamo_listening() -> bool:
    """Return True if Dynamo would compile the next Python function that is called."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def exclude_from_dynamo(func: Callable) -> Callable:
    """Wrap ``func``, which runs forall's engine, so that Dynamo neither traces nor compiles it."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_listening():
            return func(*args, **kwargs)
        with run_eagerly():
            return func(*args, **kwargs)

    # torch.compiler.disable sets this; importing that takes a second.
    vars(run)["_torchdynamo_disable"] = True
    return run


def _restore_callback(_left: list, _level: int) -> None:
    """Restore Dynamo's callback, if there was one before the outermost transform."""
    if _eager.callback is not None:
        sys.modules["torch._dynamo.eval_frame"].set_eval_frame(_eager.callback)


exception_safety.PUT_BACK.append(_restore_callback)


def push_mode_for_compiler(mode: DispatchMode) -> bool:
    """Push a mode; the mode's own entry, which takes longer, also informs Dynamo, if it may run.

    Return True if the mode was entered so.
    """
    tells = _eager.depth == 0 and is_dynamo_loaded()
    if tells:
        mode.__enter__()
    else:
        push_mode(mode)
    return tells


def pop_mode_for_compiler(mode: DispatchMode, told: bool) -> None:
    """Pop the mode that `push_mode_for_compiler` pushed; see `DispatchMode`."""
    if told:
        mode.__exit__(None, None, None)
    elif count_dispatch_modes():
        pop_mode(None)


_torchs: list[Any] = []


def _callback_from_stance(callback: Any) -> Any:
    """Return the compiler that a compiled function runs under, or None; replaces torch's own."""
    return None if _eager.depth else _torchs[0](callback)


def _install_callback(compiler: Any) -> None:
    _torchs[:] = [compiler._callback_from_stance]
    compiler._callback_from_stance = _callback_from_stance

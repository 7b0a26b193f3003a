"""An exception between any two instructions leaves all state as it was before the call.

A KeyboardInterrupt comes where it will. Here one is raised at an instruction of our own code, or
of the function, that a tracer has counted; then all that a level sets is compared with what it was,
and the next calls with what they gave before. Run as a module, this goes through every instruction.
"""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from forall._compat import functorch_interop
from forall._core import levels
from forall._divergence.thread_state import thread
from forall._vmap import function_mode
from oracle import difference
from state import state

D = torch.float64
X = torch.randn(3, 2, dtype=D, generator=make_generator(0))
W = torch.randn(2, 2, dtype=D, generator=make_generator(1))
PLACES = int(os.environ.get("FORALL_INTERRUPTS", "12"))  # of each call that are tried
OURS = str(Path(forall.__file__).parent)


class Interrupt(KeyboardInterrupt):
    """One that nobody else raises."""


def net(x: torch.Tensor) -> torch.Tensor:
    return (W @ x).tanh().sum()


def parted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x * 2


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(2, dtype=D) * 0 + x


CALLS: dict[str, Callable[[], Any]] = {
    "vmap": lambda: vmap(lambda x: (W @ x).sin() + x[0])(X),
    "nested": lambda: vmap(vmap(lambda x: x.exp() * W[0, 0]))(X),
    "grad": lambda: grad(net)(X[0]),
    "vmap of grad": lambda: vmap(grad(net))(X),
    "vjp": lambda: vjp(net, X[0])[1](torch.ones((), dtype=D)),
    "jvp": lambda: jvp(net, (X[0],), (X[1],)),
    "linearize": lambda: linearize(net, X[0])[1](X[1]),
    "jacrev": lambda: jacrev(lambda x: (W @ x).sin())(X[0]),
    "jacfwd": lambda: jacfwd(lambda x: (W @ x).sin())(X[0]),
    "hessian": lambda: hessian(net)(X[0]),
    "vmap of jvp": lambda: vmap(lambda x: jvp(net, (x,), (x,)))(X),
    "parted": lambda: vmap(parted)(X),
    "parted gradients": lambda: vmap(grad(lambda x: parted(x).sum()))(X),
    "drawn": lambda: vmap(drawn, randomness="different")(X),
    "jit": lambda: jit(lambda x: vmap(grad(net))(x))(X),
    "without history": lambda: torch.no_grad()(lambda: grad(net)(X[0]))(),
    "in inference mode": lambda: torch.inference_mode()(lambda: grad(net)(X[0]) * 1)(),
}


def everything() -> dict[str, Any]:
    """All that is of this thread, or of the process, and that a call sets."""
    return {
        **state(),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "stack": {k: v for k, v in vars(levels.stack).items() if k != "ever_parted"},
        "eager": functorch_interop.is_running_transform(),
        "converted": (thread.top, thread.runs, thread.diverged, thread.loose, thread.entered),
        "forward": forward_ad._current_level,
        "traced": sys.gettrace(),
    }


class Tracer:
    """Raises at one instruction of our own code, counted from the beginning of the call."""

    def __init__(self, at: int = -1, code: CodeType | None = None) -> None:
        self.at = at
        self.code = code  # whose instructions count, or all of ours
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) and name != __file__:
            return None
        if self.code is not None and frame.f_code is not self.code:
            return None
        frame.f_trace = self.met  # before, or Python 3.13 tells of none the first time
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.met

    def met(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise Interrupt
        return self.met


def count(f: Callable, code: CodeType | None = None) -> int:
    tracer = Tracer(code=code)
    sys._getframe().f_trace_opcodes = True  # before, or Python 3.12 tells of none the first time
    sys.settrace(tracer)
    try:
        f()
    finally:
        sys.settrace(None)
        sys._getframe().f_trace_opcodes = False
    return tracer.seen


def interrupted(f: Callable, at: int, code: CodeType | None = None) -> bool:
    """Call ``f``, which is interrupted at an instruction, if it comes to that."""
    sys.settrace(Tracer(at, code))
    try:
        f()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def told(result: Any) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def check(name: str, places: list[int], code: CodeType | None = None) -> list[str]:
    """What is other than before, after an interrupt at each of these places."""
    f = CALLS[name]
    found = []
    expected = told(f())
    before = everything()
    for at in places:
        interrupted(f, at, code)
        after = everything()
        wrong = [k for k in before if before[k] != after[k]]
        plain = type(torch.ones(2) + 1) is torch.Tensor
        again = None if wrong or not plain else difference(told(f()), expected)
        if wrong or not plain or again:
            found.append(f"at {at}: {wrong} {again}")
            break
    return found


@pytest.mark.counted
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_leaves_all_as_it_was(name):
    forall.config.replay = False
    f = CALLS[name]
    f()
    n = count(f)
    assert n > 100
    r = random.Random(name)
    found = check(name, sorted(r.sample(range(1, n + 1), min(PLACES, n))))
    assert not found, found


@pytest.mark.counted
@pytest.mark.parametrize("name", ["nested", "vmap of grad"])
def test_an_interrupt_while_a_call_passes_outer_levels_is_what_is_raised(name):
    forall.config.replay = False
    f, code = CALLS[name], function_mode._call_past_outer_levels.__code__
    f()
    n = count(f, code)
    assert n > 20
    found = check(name, [*range(1, n + 1)], code)
    assert not found, found


@pytest.mark.counted
@pytest.mark.parametrize("name", ["vmap of grad", "hessian", "jit"])
def test_an_interrupt_while_modes_are_taken_off_is_what_is_raised(name):
    forall.config.replay = False
    f, code = CALLS[name], levels.run_outside.__enter__.__code__
    f()
    n = count(f, code)
    assert n > 20
    found = check(name, [*range(1, n + 1)], code)
    assert not found, found


if __name__ == "__main__":
    forall.config.replay = False
    for name in sys.argv[1:] or CALLS:
        CALLS[name]()
        n = count(CALLS[name])
        r = random.Random(name)
        places = sorted(r.sample(range(1, n + 1), min(PLACES, n)))
        print(name, n, check(name, places), flush=True)

"""The table of torch.func's limitations, from running each row in torch.func, forall and the loop.

As a script it writes the table into docs/reference/limitations.md: `make limitations`.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import forall
from forall import random

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it
from oracle import difference, loop

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limitations.md"
MARKS = ("<!-- limitations: begin -->", "<!-- limitations: end -->")
WIDTH = 110

# --- three engines ------------------------------------------------------------------------------


def _grad(f: Callable, **_: Any) -> Callable:
    def run(x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return run


def _jvp(f: Callable, primals: tuple, tangents: tuple) -> tuple:
    return torch.autograd.functional.jvp(f, primals, tangents)


THE_LOOP = SimpleNamespace(
    vmap=lambda f, in_dims=0, randomness=None, chunk_size=None: loop(f, in_dims),
    grad=_grad,
    jvp=_jvp,
    jacrev=lambda f: lambda x: torch.autograd.functional.jacobian(f, x),
    jacfwd=lambda f, chunk_size=None: lambda x: torch.autograd.functional.jacobian(f, x),
    hessian=lambda f, chunk_size=None: lambda x: torch.autograd.functional.hessian(f, x),
    all_of=torch.stack,
    draws=None,
)
TORCHS = SimpleNamespace(
    **{n: getattr(torch.func, n) for n in ("vmap", "grad", "jvp", "jacrev", "jacfwd", "hessian")},
    all_of=lambda kept: kept[0] * 1,
    draws="different",
)
OURS = SimpleNamespace(
    **{n: getattr(forall, n) for n in ("vmap", "grad", "jvp", "jacrev", "jacfwd", "hessian")},
    all_of=lambda kept: forall.stacked(kept[0]),
    draws=random.key(0),
)

# --- the rows -----------------------------------------------------------------------------------

ROWS: dict[str, Callable[[Any], Any]] = {}
OF_ONE = torch.tensor([0.5, 1.0, 2.0])
XS = torch.tensor([[0.5, 1.0, 2.0], [1.5, -1.0, 3.0], [2.5, 4.0, -2.0], [0.1, 0.2, 0.3]])


def row(text: str) -> Callable[[Callable], Callable]:
    def enter(f: Callable) -> Callable:
        assert text not in ROWS
        ROWS[text] = f
        return f

    return enter


def layer() -> nn.Linear:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    made = nn.Linear(3, 2)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return made


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


@row("calls `torch.autograd.grad`")
def _(verbs):
    def force(x):
        x = x.requires_grad_()
        return torch.autograd.grad((x**3).sum(), x)[0]

    return verbs.vmap(force)(XS.clone())


@row("calls `torch.autograd.grad` for a tensor that it captures")
def _(verbs):
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    return verbs.vmap(lambda x: torch.autograd.grad((w * w * x).sum(), w)[0])(XS)


@row("calls `torch.autograd.grad` through history from before the call")
def _(verbs):
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = w.sin() * w
    return verbs.vmap(lambda x: torch.autograd.grad((y * x).exp().sum(), w, retain_graph=True)[0])(
        XS
    )


@row("calls `.backward()` and reads `.grad`")
def _(verbs):
    def f(x):
        p = torch.ones(3, requires_grad=True)
        (p * p * x).sum().backward()
        return p.grad

    return verbs.vmap(f)(XS)


@row("calls `torch.autograd.functional.jacobian`")
def _(verbs):
    return verbs.vmap(lambda x: torch.autograd.functional.jacobian(torch.exp, x))(XS)


@row("runs an optimizer of `torch.optim`")
def _(verbs):
    def fit(x):
        p = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.Adam([p], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((p - x) ** 2).sum().backward()
            optimizer.step()
        return p.detach()

    return verbs.vmap(fit)(XS)


@row("has a tensor hook (`register_hook`) or retains a gradient (`retain_grad`)")
def _(verbs):
    def f(x):
        y = x.requires_grad_() * 2
        y.retain_grad()
        y.register_hook(lambda g: g * 3)
        y.pow(2).sum().backward()
        return x.grad + y.grad

    return verbs.vmap(f)(XS.clone())


@row("uses an `autograd.Function` without `setup_context`")
def _(verbs):
    return verbs.vmap(verbs.grad(lambda x: Square.apply(x).sum()))(XS)


@row("uses an `autograd.Function` without a `vmap` rule")
def _(verbs):
    return verbs.vmap(verbs.grad(lambda x: Cube.apply(x).sum()))(XS)


@row("uses an `autograd.Function` without a `jvp`, in forward mode")
def _(verbs):
    return verbs.jvp(Cube.apply, (OF_ONE,), (OF_ONE,))


@row("uses an operator of `torch.library.custom_op` with `register_autograd`")
def _(verbs):
    return verbs.vmap(verbs.grad(lambda x: doubled(x).sum()))(XS)


@torch.library.custom_op("limitations::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy(force=True) * 2)


doubled.register_autograd(lambda ctx, g: g * 2)


@row("recomputes by `torch.utils.checkpoint`")
def _(verbs):
    m = layer()
    return verbs.grad(lambda x: checkpoint(m, x, use_reentrant=False).sin().sum())(OF_ONE)


@row("saves tensors elsewhere (`save_on_cpu`, `saved_tensors_hooks`)")
def _(verbs):
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return x.exp().sum()

    return verbs.grad(f)(OF_ONE)


@row("calls a module with a full backward hook")
def _(verbs):
    m = layer()
    m.register_full_backward_hook(lambda _m, given, _g: (given[0] * 2,))
    return verbs.vmap(verbs.grad(lambda x: m(x).sum()))(XS)


@row("holds a part constant by `no_grad`, in forward mode")
def _(verbs):
    def f(x):
        with torch.no_grad():
            y = x * x
        return x + y

    return verbs.jacfwd(f)(OF_ONE)


@row("writes an example's number into `torch.zeros(...)`")
def _(verbs):
    def f(x):
        out = torch.zeros(3, 3)
        out[0] = x
        out.diagonal().copy_(x)
        return out

    return verbs.vmap(f)(XS)


@row("sums up into `torch.zeros(())`")
def _(verbs):
    def f(x):
        total = torch.zeros(())
        for v in x:
            total += v
        return total

    return verbs.vmap(f)(XS)


@row("builds `torch.tensor([...])` of an example's numbers")
def _(verbs):
    return verbs.vmap(lambda x: torch.tensor([[0.0, -x[2]], [x[2], 0.0]]))(XS)


@row("builds `torch.full(shape, number)` of an example's number")
def _(verbs):
    return verbs.vmap(lambda x: torch.full((3,), x[0]))(XS)


@row("has `out=`")
def _(verbs):
    def f(x):
        y = torch.empty_like(x)
        torch.sin(x, out=y)
        return y

    return verbs.vmap(f)(XS)


@row("adds to a tensor from outside")
def _(verbs):
    total = torch.zeros(3)
    verbs.vmap(lambda x: (total.add_(x), x)[1])(XS)
    return total * 1


@row("overwrites a tensor from outside with an example's data")
def _(verbs):
    last = torch.zeros(3)
    verbs.vmap(lambda x: (last.copy_(x), x)[1])(XS)
    return last * 1


@row("has a `BatchNorm` in training mode, under `vmap`")
def _(verbs):
    m = nn.BatchNorm1d(3)
    out = verbs.vmap(m)(torch.stack([XS, XS * 2]))
    return out, dict(m.state_dict())


@row("has a `BatchNorm` in training mode, under `jacrev`")
def _(verbs):
    m = nn.BatchNorm1d(3)
    return verbs.jacrev(m)(XS), dict(m.state_dict())


@row("has an `InstanceNorm` with running statistics")
def _(verbs):
    m = nn.InstanceNorm1d(2, track_running_stats=True)
    return verbs.vmap(m)(torch.stack([XS[:2], XS[2:]]))


@row("stacks modules inside a transform (`stack_module_state`)")
def _(verbs):
    ms = [layer(), layer()]

    def f(x):
        p, _ = torch.func.stack_module_state(ms)
        return verbs.vmap(lambda w, b: torch.nn.functional.linear(x, w, b))(p["weight"], p["bias"])

    return verbs.jvp(f, (OF_ONE,), (OF_ONE,))


@row("leaves a value in a hook, a list or an attribute, to be used after the call")
def _(verbs):
    m, kept = layer(), []
    m.register_forward_hook(lambda _m, _i, out: kept.append(out))
    verbs.vmap(m)(XS)
    return verbs.all_of(kept)


@row("calls numpy's functions: `np.sin(x)`")
def _(verbs):
    return verbs.vmap(lambda x: torch.as_tensor(np.sin(x)))(XS)


@row("calls `copy.deepcopy`")
def _(verbs):
    return verbs.vmap(lambda x: copy.deepcopy(x) + 1)(XS)


@row("returns numbers, strings or None beside tensors")
def _(verbs):
    return verbs.vmap(lambda x: {"y": x.sin(), "n": 42, "tag": "a", "none": None})(XS)


@row("gets a mapped argument by keyword: `in_dims={'x': 0, 'w': 0}`")
def _(verbs):
    if verbs is THE_LOOP:
        return XS * XS.sin()
    return verbs.vmap(lambda x, *, w: x * w, in_dims={"x": 0, "w": 0})(XS, w=XS.sin())


@row("has a large Hessian: `hessian(f, chunk_size=n)`")
def _(verbs):
    return verbs.hessian(lambda x: x.prod(), chunk_size=2)(OF_ONE)


@row("has an integer or a number among the leaves that `grad` is taken for")
def _(verbs):
    leaves = {"w": OF_ONE, "i": torch.arange(3), "k": 2.0}
    if verbs is THE_LOOP:
        return {"w": torch.arange(3) * 2.0, "i": None, "k": None}
    return verbs.grad(lambda d: (d["w"] * d["i"] * d["k"]).sum())(leaves)


@row("mixes dtypes where one example has no dims: `torch.where(x > 0, x, y)`")
def _(verbs):
    return verbs.vmap(lambda x, y: torch.where(x > 0, x, y))(XS, torch.ones(4, dtype=torch.float64))


@row("runs a `Linear` under autocast")
def _(verbs):
    m = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return verbs.vmap(m)(XS)


@row("is given a tensor subclass, and has results of its type")
def _(verbs):
    return type(verbs.vmap(torch.sin)(XS.as_subclass(Tagged))).__name__


class Tagged(Tensor):
    pass


@row("draws random numbers, without a word about `randomness`")
def _(verbs):
    return verbs.vmap(lambda x: x + torch.rand(3) * 0)(XS)


@row("draws twice, and is to draw the same for every `chunk_size`")
def _(verbs):
    def f(x):
        return (x + torch.randn(3)) * torch.rand(3)

    drawn = []
    for chunk_size in (None, 2):
        torch.manual_seed(0)
        drawn.append(verbs.vmap(f, randomness=verbs.draws, chunk_size=chunk_size)(XS))
    return torch.equal(*drawn)


@row("draws into a tensor that it made: `torch.zeros(3).normal_()`")
def _(verbs):
    def f(x):
        return x + torch.zeros(3).uniform_() * 0

    return verbs.vmap(f, randomness="different")(XS)


@row("branches on an example's values: `if x[1] > 0:`")
def _(verbs):
    return verbs.vmap(lambda x: x if x[1] > 0 else -x)(XS)


@row("loops until an example is done: `while x.norm() > 1:`")
def _(verbs):
    def f(x):
        while x.norm() > 1:
            x = x / 2
        return x

    return verbs.vmap(f)(XS)


@row("reads a number: `x[0].item()`, `float(x[0])`, `f'{x[0]:.2f}'`")
def _(verbs):
    return verbs.vmap(lambda x: x * x[0].item())(XS)


@row("slices at a place that is an example's number: `x[i : i + 2]`")
def _(verbs):
    return verbs.vmap(lambda x, i: x[i : i + 2])(XS, torch.tensor([0, 1, 0, 1]))


@row("selects by a mask: `x[x > 0]`")
def _(verbs):
    return verbs.vmap(lambda x: x[x > 0].sum())(XS)


@row("calls `nonzero`, `unique`, `repeat_interleave` of an example's counts")
def _(verbs):
    def f(x):
        above = x > 0
        places = above.nonzero().sum()
        return places + x.clamp(min=0).unique().sum() + x.repeat_interleave(above.long()).sum()

    return verbs.vmap(f)(XS)


@row("catches the error of one example: `try: cholesky(a)`")
def _(verbs):
    def f(a):
        try:
            return torch.linalg.cholesky(a)
        except torch.linalg.LinAlgError:
            return torch.zeros_like(a)

    return verbs.vmap(f)(torch.stack([torch.eye(2), -torch.eye(2)]))


# --- the table ----------------------------------------------------------------------------------


class Slow(NamedTuple):
    """A value that was found in a slow way, with a warning."""

    value: Any
    way: str


def answer(run: Callable[[Any], Any], verbs: Any) -> Any:
    """What a row gives under one engine: a value or an error."""
    torch.manual_seed(0)
    strategy, forall.config.strategy = forall.config.strategy, "together"  # what else is measured
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            value = run(verbs)
        except Exception as error:
            return error
        finally:
            forall.config.strategy = strategy
    slow = [str(w.message) for w in told if w.category is forall.PerformanceWarning]
    if not slow:
        return value
    in_groups = all("ran in groups" in text for text in slow)
    return Slow(value, "in groups" if in_groups else "one example at a time")


def said(error: Exception) -> str:
    """An error in one line: its type and the beginning of its text."""
    text = " ".join(str(error).split()).replace("`", "'").replace("|", "/")
    text = text.split(". ")[0].removesuffix(".")
    if len(text) > WIDTH:
        text = text[:WIDTH].rsplit(" ", 1)[0] + " ..."
    return f"`{type(error).__name__}: {text}`"


def told(value: Any, truth: Any) -> str:
    """One cell."""
    if isinstance(value, Exception):
        return said(value)
    way = f", {value.way}" if isinstance(value, Slow) else ""
    found = difference(value.value if isinstance(value, Slow) else value, truth)
    if found is None:
        return f"as the loop{way}"
    kind = "another dtype than" if found.startswith("dtype") else "other values than"
    return f"**{kind} the loop**, without a word"


def table() -> str:
    lines = ["| your function ... | `torch.func` | forall |", "|---|---|---|"]
    for text, run in ROWS.items():
        truth = answer(run, THE_LOOP)
        if isinstance(truth, Exception):
            raise truth
        cells = (told(answer(run, verbs), truth) for verbs in (TORCHS, OURS))
        lines.append(f"| {' | '.join((text, *cells))} |")
    return "\n".join(lines)


def placed(page: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(placed(PAGE.read_text()))

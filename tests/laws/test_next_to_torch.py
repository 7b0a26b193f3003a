"""forall next to torch's own transforms: the right number or a clear error, never a wrong one.

Every word over the transforms of both libraries is applied to w * sin(x)^2, whose derivatives
and rescalings are sums of sinusoids again, so each word has a closed form.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.functional as AF
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import forall

# torch's forward mode compiles some of its formulas with torch.jit, which torch itself deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

LIBRARIES = {"forall": forall, "torch": torch.func}
VERBS = ("vmap", "grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")
DIRECTION = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
POINT = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
WEIGHT = torch.tensor([1.3, 0.4, -0.6], dtype=torch.float64)

Word = tuple[tuple[str, str], ...]


def applied(library: str, verb: str, h: Callable) -> Callable:
    """An elementwise function out of an elementwise ``h``, by one transform."""
    lib: Any = LIBRARIES[library]
    along = DIRECTION
    if verb == "vmap":
        return lambda x: lib.vmap(h)(torch.stack([x, 2 * x])).sum(0)
    if verb == "grad":
        return lib.grad(lambda x: h(x).sum())
    if verb == "vjp":
        return lambda x: lib.vjp(h, x)[1](along)[0]
    if verb == "jvp":
        return lambda x: lib.jvp(h, (x,), (along,))[1]
    if verb == "linearize":
        return lambda x: lib.linearize(h, x)[1](along)
    if verb == "hessian":
        derivative = lib.hessian(lambda x: h(x).sum())
    else:
        derivative = getattr(lib, verb)(h)
    return lambda x: derivative(x).sum(-1)


class Waves:
    """The closed form: a sum of factor * sin(rate * x + phase), each factor a vector."""

    def __init__(self, terms: list[tuple[Tensor, int, int]]) -> None:
        self.terms = terms

    def after(self, verb: str) -> Waves:
        if verb == "vmap":
            return Waves([(c, r * n, p) for c, r, p in self.terms for n in (1, 2)])
        by = {"vjp": DIRECTION, "jvp": DIRECTION, "linearize": DIRECTION}.get(verb, 1.0)
        once = Waves([(c * r * by, r, p + 1) for c, r, p in self.terms])
        return once.after("grad") if verb == "hessian" else once

    def at(self, x: Tensor) -> Tensor:
        waves = [c * torch.sin(r * x + p * math.pi / 2) for c, r, p in self.terms]
        return torch.stack(waves).sum(0)


def truth(verbs: tuple[str, ...], weight: Tensor) -> Waves:
    """``verbs`` outermost first, of weight * sin(x)^2 = weight / 2 * (1 - cos(2 x))."""
    out = Waves([(weight / 2, 0, 1), (-weight / 2, 2, 1)])
    for verb in reversed(verbs):
        out = out.after(verb)
    return out


def composed(word: Word, weight: Tensor) -> Callable:
    """The same by the transforms themselves; ``weight`` is captured."""

    def h(x: Tensor) -> Tensor:
        return weight * x.sin() * x.sin()

    for library, verb in reversed(word):
        h = applied(library, verb, h)
    return h


def wave(x: Tensor) -> Tensor:
    return WEIGHT * x.sin() * x.sin()


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-9)


def check(word: Word, *, differentiated: bool) -> None:
    """One word's value; with ``differentiated`` also gradients for point and weight, outside."""
    verbs = tuple(verb for _, verb in word)
    x = POINT.clone().requires_grad_(differentiated)
    w = WEIGHT.clone().requires_grad_(differentiated)
    y = composed(word, w)(x)
    close(y, truth(verbs, WEIGHT).at(POINT))
    if differentiated:
        gx, gw = torch.autograd.grad(y.sum(), (x, w), allow_unused=False)
        close(gx, truth(("grad", *verbs), WEIGHT).at(POINT))
        close(gw, truth(verbs, torch.ones_like(WEIGHT)).at(POINT))
    else:
        assert not y.requires_grad


def pairs(first: str, second: str) -> list[Word]:
    return [((first, a), (second, b)) for a in VERBS for b in VERBS]


def sandwiches(bread: str, filling: str) -> list[Word]:
    some = ("vmap", "grad", "jvp", "jacrev")
    return [((bread, a), (filling, b), (bread, c)) for a, b, c in itertools.product(some, repeat=3)]


def spelled(word: Word) -> str:
    return "∘".join(f"{library}.{verb}" for library, verb in word)


both = pytest.mark.parametrize("differentiated", [False, True], ids=["", "gradients-outside"])


@both
@pytest.mark.parametrize("word", pairs("forall", "torch") + pairs("torch", "forall"), ids=spelled)
def test_every_pair_is_right_or_says_why_not(word, differentiated):
    if ("torch", "linearize") in word:  # what it returns is constant in the point
        with pytest.raises(NotImplementedError, match=r"Use forall\.linearize instead"):
            check(word, differentiated=differentiated)
    else:
        check(word, differentiated=differentiated)


@both
@pytest.mark.parametrize(
    "word", sandwiches("forall", "torch") + sandwiches("torch", "forall"), ids=spelled
)
def test_every_sandwich_is_right(word, differentiated):
    check(word, differentiated=differentiated)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")  # torch's own
def test_torch_linearize_alone_is_left_alone():
    value, program = torch.func.linearize(torch.sin, POINT)
    close(value, POINT.sin())
    close(program(DIRECTION), POINT.cos() * DIRECTION)


# --- arguments of a transform that is handed over


def product(x, y):
    return (x * y).sum(), (x, y)


ROWS = torch.stack([POINT, 2 * POINT])


def test_handing_over_keeps_argnums_and_aux():
    gradients, aux = torch.func.vmap(forall.grad(product, argnums=(1, 0), has_aux=True))(
        ROWS, -ROWS
    )
    for ours, theirs in zip((*gradients, *aux), (ROWS, -ROWS, ROWS, -ROWS), strict=True):
        close(ours, theirs)


def test_handing_over_keeps_names_in_in_dims():
    def sub(a, b, c=0.0):
        return a - b + c

    def one(row):
        return forall.vmap(sub, in_dims={"b": 0, "c": 0})(1.0, row, c=row)

    close(torch.func.vmap(one)(ROWS), torch.ones_like(ROWS))


@pytest.mark.parametrize("verb", ["jacrev", "jacfwd", "hessian"])
def test_handing_over_takes_chunk_size(verb):
    def f(x):
        return x.sin().sum() if verb == "hessian" else x.sin()

    derivative = getattr(forall, verb)(f, chunk_size=2)
    want = -ROWS.sin() if verb == "hessian" else ROWS.cos()
    close(torch.func.vmap(derivative)(ROWS), torch.diag_embed(want))


def test_handing_over_linearize_runs_under_every_transform():
    def f(x):
        return forall.linearize(torch.sin, x)[1](DIRECTION)

    close(torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(ROWS), -ROWS.sin() * DIRECTION)


# --- functions that one library returns, called inside the other


@pytest.mark.parametrize(("maker", "caller"), [("forall", "torch"), ("torch", "forall")])
@pytest.mark.parametrize("verb", ["vmap", "grad", "jvp"])
def test_a_pull_back_is_called_inside_the_other(maker, caller, verb):
    _, pull = LIBRARIES[maker].vjp(lambda x: x.sin() * x, POINT)
    derivative = POINT.cos() * POINT + POINT.sin()
    lib: Any = LIBRARIES[caller]
    if verb == "vmap":
        close(lib.vmap(lambda c: pull(c)[0])(torch.eye(3).double()), derivative.diag())
    elif verb == "grad":
        close(lib.grad(lambda c: pull(c)[0].sum())(DIRECTION), derivative)
    else:
        out = lib.jvp(lambda c: pull(c)[0], (DIRECTION,), (DIRECTION,))[1]
        close(out, derivative * DIRECTION)


def test_a_replayed_pull_back_inside_torch_func(monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    derivative = POINT.cos() * POINT + POINT.sin()
    for _ in range(6):
        _, pull = forall.vjp(lambda x: x.sin() * x, POINT)
        found = torch.func.grad(lambda c, pull=pull: pull(c)[0].square().sum())(DIRECTION)
        close(found, 2 * derivative.square() * DIRECTION)


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("way", [forall.vmap, forall.jit, forall.grad])
def test_a_value_that_torch_func_has_left_is_reached(way, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    left = []
    torch.func.vmap(lambda x: (left.append(x), x * 2)[1])(torch.ones(3, 2))

    def f(x, value=None):
        return (x * len(left)).sum()

    g = way(f) if way is not forall.vmap else forall.vmap(f, in_dims=(0, None))
    for _ in range(9):
        expected = torch.ones(3) if way is forall.grad else torch.tensor(3.0)
        x = torch.ones(3, 1) if way is forall.vmap else torch.ones(3)
        close(g(x, left[0]), torch.ones(3) if way is forall.vmap else expected)
        if way is not forall.vmap:
            close(g(x), expected)


def test_a_pull_back_from_outside_both_is_refused():
    _, pull = forall.vjp(torch.sin, POINT)

    def f(x):
        return torch.func.vmap(lambda c: pull(c * x)[0])(torch.eye(3).double())

    with pytest.raises(NotImplementedError, match="Use forall's transform"):
        forall.vmap(f)(ROWS)


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * x * w

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004 - torch's signature
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        x, w = ctx.saved_tensors
        return 2 * grads[0] * x * w, grads[0] * x * x


def test_custom_functions_under_both():
    w = WEIGHT.clone().requires_grad_()

    def f(x):
        return Square.apply(x, w).sum()

    out = forall.vmap(torch.func.grad(f))(ROWS)
    close(out, 2 * ROWS * WEIGHT)
    close(torch.autograd.grad(out.sum(), w)[0], 2 * ROWS.sum(0))
    close(torch.func.vmap(forall.grad(f))(ROWS), 2 * ROWS * WEIGHT)
    tangent = forall.jvp(torch.func.grad(f), (POINT,), (DIRECTION,))[1]
    close(tangent, 2 * WEIGHT * DIRECTION)


# --- torch.autograd.forward_ad and torch.autograd.functional


def pushed(f: Callable, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, DIRECTION.expand_as(x))))[1]


@both
@pytest.mark.parametrize("verb", [v for v in VERBS if v != "hessian"])
def test_dual_levels_inside(verb, differentiated):
    x = POINT.clone().requires_grad_(differentiated)
    w = WEIGHT.clone().requires_grad_(differentiated)
    y = applied("forall", verb, lambda x: pushed(lambda x: w * x.sin() * x.sin(), x))(x)
    verbs = (verb, "jvp")
    close(y, truth(verbs, WEIGHT).at(POINT))
    if differentiated:
        gx, gw = torch.autograd.grad(y.sum(), (x, w))
        close(gx, truth(("grad", *verbs), WEIGHT).at(POINT))
        close(gw, truth(verbs, torch.ones_like(WEIGHT)).at(POINT))


@pytest.mark.parametrize("verb", ["vmap", "grad", "vjp", "jacrev"])
def test_dual_levels_outside(verb):
    f = applied("forall", verb, lambda x: WEIGHT * x.sin() * x.sin())
    close(pushed(f, POINT), truth(("jvp", verb), WEIGHT).at(POINT))
    if verb == "grad":
        rows = pushed(forall.vmap(f), ROWS)
        close(rows, torch.stack([truth(("jvp", verb), WEIGHT).at(r) for r in ROWS]))


@pytest.mark.parametrize("verb", ["jvp", "jacfwd", "hessian", "linearize"])
def test_forward_mode_inside_a_dual_level_is_refused(verb):
    f = applied("forall", verb, torch.sin)
    with pytest.raises(NotImplementedError, match=r"Use forall\.jvp for the outer derivative"):
        pushed(f, POINT)
    close(forall.jvp(torch.sin, (POINT,), (DIRECTION,))[1], POINT.cos() * DIRECTION)


FUNCTIONAL = {
    "jacobian": lambda f, x, **how: AF.jacobian(f, x, **how).sum(-1),
    "vjp": lambda f, x, **how: AF.vjp(f, x, DIRECTION, **how)[1],
    "jvp": lambda f, x, **how: AF.jvp(f, x, DIRECTION, **how)[1],
    "hessian": lambda f, x, **how: AF.hessian(lambda x: f(x).sum(), x, **how).sum(-1),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("verb", ["vmap", "grad", "vjp", "jacrev"])
def test_autograd_functional_inside(verb, name):
    f = applied("forall", verb, lambda x: FUNCTIONAL[name](wave, x, create_graph=True))
    verbs = {"jacobian": ("grad",), "hessian": ("hessian",)}.get(name, ("jvp",))
    close(f(POINT), truth((verb, *verbs), WEIGHT).at(POINT))


@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.parametrize("verb", VERBS)
def test_autograd_functional_outside(verb, name):
    out = FUNCTIONAL[name](applied("forall", verb, wave), POINT)
    verbs = {"jacobian": ("grad",), "hessian": ("hessian",)}.get(name, ("jvp",))
    close(out, truth((*verbs, verb), WEIGHT).at(POINT))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_torchs_own_vmap_around_ours_is_right_or_refused(strategy, verb):
    """What vectorize=True and is_grads_batched=True run is neither torch.func nor ours."""
    f = applied("forall", verb, wave)

    def run():
        rows: Any = AF.jacobian(f, POINT, vectorize=True, strategy=strategy)
        return rows.sum(-1)

    if verb in {"vmap", "jacfwd", "hessian"} or (strategy, verb) in {
        ("forward-mode", "jvp"),
        ("forward-mode", "linearize"),
        ("forward-mode", "jacrev"),
    }:
        with pytest.raises(NotImplementedError, match="Use forall"):
            run()
    else:
        close(run(), truth(("grad", verb), WEIGHT).at(POINT))


# --- tracing and compiling


def test_make_fx_gives_a_flat_graph():
    flat = make_fx(forall.vmap(forall.grad(lambda x: wave(x).sum())))(ROWS)
    names = {str(n.target) for n in flat.graph.nodes if n.op == "call_function"}
    assert "aten.cos.default" in names
    assert all(name.startswith("aten.") for name in names)
    other = ROWS + 1
    close(flat(other), WEIGHT * (2 * other).sin())


def test_functionalize_inside_and_outside():
    def f(x):
        return x.clone().mul_(x).sin_()

    close(torch.func.functionalize(forall.vmap(f))(ROWS), (ROWS * ROWS).sin())
    close(forall.vmap(torch.func.functionalize(f))(ROWS), (ROWS * ROWS).sin())


# torch reads its own .grad_fn, warns about its own deprecations and so on while it compiles
compiles = pytest.mark.filterwarnings("ignore::Warning:torch")


def compiled(f: Callable) -> Callable:
    return torch.compile(f, backend="eager", fullgraph=True)


@compiles
@pytest.mark.parametrize("verb", VERBS)
def test_compiled_transforms(verb):
    torch.compiler.reset()
    f = compiled(applied("forall", verb, wave))
    for x in (POINT, POINT + 1):
        close(f(x), truth((verb,), WEIGHT).at(x))


@compiles
@pytest.mark.parametrize("verb", VERBS)
def test_compiled_functions_inside(verb):
    torch.compiler.reset()
    f = compiled(wave)
    for _ in range(2):
        close(applied("forall", verb, f)(POINT), truth((verb,), WEIGHT).at(POINT))
        close(f(POINT), wave(POINT))
    twice = applied("forall", "grad", applied("forall", verb, f))
    close(twice(POINT), truth(("grad", verb), WEIGHT).at(POINT))


@compiles
def test_compiled_functions_inside_run_eagerly_in_this_thread_alone():
    torch.compiler.reset()
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    f = torch.compile(wave, backend=backend)
    forall.vmap(f)(ROWS)
    assert not calls
    errors: list[Exception] = []

    def elsewhere():
        try:
            close(f(POINT), wave(POINT))
        except Exception as error:  # shown in the thread that waits
            errors.append(error)

    def one(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return f(x)

    close(forall.vmap(one)(ROWS), wave(ROWS))
    assert not errors
    assert len(calls) == 1


@compiles
def test_transforms_in_a_compiled_function_take_its_names():
    def f(row):
        return forall.vmap(lambda a, b: a - b, in_dims={"b": 0})(1.0, row)

    torch.compiler.reset()
    close(torch.compile(f, backend="eager")(POINT), 1.0 - POINT)


def test_no_transform_loads_the_compiler():
    code = (
        "import sys, torch, forall\n"
        "f = lambda x: x.sin().sum()\n"
        "forall.vmap(forall.grad(f))(torch.ones(2, 3))\n"
        "forall.hessian(f)(torch.ones(3))\n"
        "forall.linearize(f, torch.ones(3))[1](torch.ones(3))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# --- threads


def test_threads_share_the_one_forward_level():
    """Eight threads differentiate at once; none sees another's tangents or ends its level."""
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        x = POINT + seed
        words = [("jvp",), ("hessian",), ("vmap", "grad"), ("jacfwd", "jvp"), ("linearize",)]
        try:
            start.wait()
            for i in range(10):
                verbs = words[(seed + i) % len(words)]
                word = tuple(("forall", verb) for verb in verbs)
                close(composed(word, WEIGHT)(x), truth(verbs, WEIGHT).at(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert forward_ad._current_level == -1


# --- what torch.func wraps itself -----------------------------------------------------------------

PRIMALS = {
    "vjp": lambda h, w, x: torch.func.vjp(lambda w: h(w, x), w)[1](torch.ones_like(x))[0],
    "grad": lambda h, w, x: torch.func.grad(lambda w: h(w, x).sum())(w),
    "jacrev": lambda h, w, x: torch.func.jacrev(lambda w: h(w, x))(w),
    "jacfwd": lambda h, w, x: torch.func.jacfwd(lambda w: h(w, x))(w),
    "hessian": lambda h, w, x: torch.func.hessian(lambda w: h(w, x).sum())(w),
    "jvp": lambda h, w, x: torch.func.jvp(lambda w: h(w, x), (w,), (x,))[1],
    "vmap": lambda h, w, x: torch.func.vmap(lambda w: h(w, x))(torch.stack([w, 2 * w])),
    "pulled through it": lambda h, w, x: torch.func.vjp(lambda w: h(w, w), w)[1](x)[0],
}


@pytest.mark.parametrize("captured", ["leaf", "computed", "cloned inside"])
@pytest.mark.parametrize("name", PRIMALS)
def test_torchs_transform_of_a_captured_tensor_is_the_loops_or_an_error(name, captured):
    leaf = WEIGHT.clone().requires_grad_()
    w = leaf * 1 if captured == "computed" else leaf
    xs = torch.stack([POINT, 2 * POINT])

    def f(x):
        inside = w.clone() if captured == "cloned inside" else w
        return PRIMALS[name](lambda w, x: (w * x).sin(), inside, x)

    def derivative(ys):
        return torch.autograd.grad(ys.square().sum(), leaf, retain_graph=True)[0]

    truth = derivative(torch.stack([f(x) for x in xs]))
    try:
        found = derivative(forall.vmap(f)(xs))
    except NotImplementedError as error:
        refused = str(error)
    else:
        assert type(found) is Tensor
        torch.testing.assert_close(found, truth)
        return
    assert captured != "cloned inside"
    assert "could not be shared" in refused

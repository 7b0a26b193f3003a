"""Everything of torch.autograd works inside a mapped function, whoever takes the derivative.

The gradient may be taken outside (``.backward()`` on what vmap gave), inside (``grad`` or
``.backward()`` under vmap), or both. Custom backwards and hooks are wrong on purpose, so that one
that is skipped shows.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from draws import make_generator
from forall import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from oracle import check_vmap, difference

D = torch.float64
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D)


def seeded(*shape):
    generator = make_generator(sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


class OldStyle(torch.autograd.Function):
    """3 x w; both derivatives are wrong on purpose."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return 3 * x * w

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * 100 * w, g * w * 7


class WithSetupContext(torch.autograd.Function):
    """3 x w; both derivatives are wrong on purpose."""

    @staticmethod
    def forward(x, w):
        return 3 * x * w

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004 - torch names it
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * 10 * w, g * x * 7


class TwoResults(torch.autograd.Function):
    """Two results, of which one may go unused, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x * factor, x + 1

    @staticmethod
    def backward(ctx, g, h):
        parts = [p for p in (g, None if h is None else h * 5) if p is not None]
        return sum(parts) * ctx.factor, None


def hooked(a, w):
    h = a * w
    h.register_hook(lambda g: g * 10)
    return (h * w).sum()


def hook_on_a_view(a, w):
    h = (a * w)[1:]
    h.register_hook(lambda g: g * g + 1)
    return h.sin().sum()


def hook_on_a_node(a, w):
    h = a * w
    h.grad_fn.register_hook(
        lambda inputs, outputs: tuple(None if g is None else g * 3 for g in inputs)
    )
    return h.sin().sum()


def prehook_on_a_node(a, w):
    h = a * w
    h.grad_fn.register_prehook(lambda gs: tuple(g * 3 for g in gs))
    return h.sin().sum()


def packed(a, w):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t * 3):
        h = (a * w).sin()
    return h.sum()


def two_results(a, w):
    first, second = TwoResults.apply(a * w, 4)
    return (first * second).sum()


def one_of_two_results(a, w):
    return TwoResults.apply(a * w, 4)[0].sum()


def written_in_place(a, w):
    b = torch.zeros(3, dtype=D)
    b[0] = a[0] * w[1]
    b[1:] = a[1:].sin() * w[:2]
    return (b * b).sum()


def forked(a, w):
    """no_grad cuts one of two paths."""
    with torch.no_grad():
        scale = (a * w).sum()
    return (a * scale * w).sum()


def detached(a, w):
    return (a.detach() * a * w + a * w.detach()).sum()


CASES = {
    "operators": lambda a, w: (a * a * w).sin().sum(),
    "old-style Function": lambda a, w: OldStyle.apply(a * a, w).sum(),
    "Function with setup_context": lambda a, w: WithSetupContext.apply(a * a, w).sum(),
    "Function of two results": two_results,
    "Function with an unused result": one_of_two_results,
    "hook on a tensor": hooked,
    "hook on a view": hook_on_a_view,
    "hook on a node": hook_on_a_node,
    "prehook on a node": prehook_on_a_node,
    "saved-tensor hooks": packed,
    "checkpoint": lambda a, w: checkpoint(
        lambda a: (a * w).sin() * w, a, use_reentrant=False
    ).sum(),
    "reentrant checkpoint": lambda a, w: checkpoint(
        lambda a: (a * w).sin() * w, a * 1, use_reentrant=True
    ).sum(),
    "checkpoint of a Function": lambda a, w: checkpoint(
        lambda a: OldStyle.apply(a.sin(), w), a, use_reentrant=False
    ).sum(),
    "captured non-leaf": lambda a, w: (a * (w * 2).sin()).sum(),
    "writes in place": written_in_place,
    "no_grad on one path": forked,
    "detach on one path": detached,
}

# Torch's reentrant checkpoint does not work with torch.autograd.grad.
ONCE = {"reentrant checkpoint"}


def torch_grad(f):
    def gradient(x):
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    return gradient


def looped(f):
    return lambda xs: torch.stack([f(x) for x in xs])


def after_backward(mapped, x, w, x_requires_grad=True):
    """Values, what the call itself left on the captured leaf, and the gradients taken outside."""
    x, w = x.clone().requires_grad_(x_requires_grad), w.clone().requires_grad_()
    y = mapped(w)(x)
    left = [None if t.grad is None else t.grad.clone() for t in (x, w)]
    if y.requires_grad:
        (y.movedim(0, -1) * WEIGHTS).sum().backward()
    return [y.detach(), *left, x.grad, w.grad]


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_taken_outside_equals_the_loops(case):
    f, x, w = CASES[case], seeded(4, 3), seeded(3)
    mine = after_backward(lambda w: vmap(lambda a: f(a, w)), x, w)
    truth = after_backward(lambda w: looped(lambda a: f(a, w)), x, w)
    assert difference(mine, truth) is None


# Torch's reentrant checkpoint needs an argument that requires grad.
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"reentrant checkpoint"}))
def test_a_gradient_of_captured_tensors_alone_equals_the_loops(case):
    f, x, w = CASES[case], seeded(4, 3), seeded(3)
    mine = after_backward(lambda w: vmap(lambda a: f(a, w)), x, w, x_requires_grad=False)
    truth = after_backward(lambda w: looped(lambda a: f(a, w)), x, w, x_requires_grad=False)
    assert difference(mine, truth) is None


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_taken_outside_two_maps_equals_the_loops(case):
    f, x, w = CASES[case], seeded(4, 2, 3), seeded(3)
    mine = after_backward(lambda w: vmap(vmap(lambda a: f(a, w))), x, w)
    truth = after_backward(lambda w: looped(looped(lambda a: f(a, w))), x, w)
    assert difference(mine, truth) is None


@pytest.mark.parametrize("case", sorted(CASES.keys() - ONCE))
def test_a_gradient_taken_inside_and_again_outside_equals_the_loops(case):
    f, x, w = CASES[case], seeded(4, 3), seeded(3)
    mine = after_backward(lambda w: vmap(grad(lambda a: f(a, w))), x, w)
    truth = after_backward(lambda w: looped(torch_grad(lambda a: f(a, w))), x, w)
    assert difference(mine, truth) is None


@pytest.mark.parametrize("case", sorted(CASES.keys() - ONCE))
def test_a_gradient_of_a_map_equals_the_loops(case):
    f, x, w = CASES[case], seeded(4, 3), seeded(3)
    mine = grad(lambda w: vmap(lambda a: f(a, w))(x).sin().sum())(w)
    truth = torch_grad(lambda w: looped(lambda a: f(a, w))(x).sin().sum())(w)
    assert difference(mine, truth) is None


@pytest.mark.parametrize("case", sorted(CASES.keys() - ONCE))
def test_per_example_gradients_equal_the_loops(case):
    f, x, w = CASES[case], seeded(4, 3), seeded(3)
    mine = vmap(grad(f, (0, 1)), (0, None))(x, w)
    truth = looped_pairs(f, x, w)
    assert difference(mine, truth) is None


def looped_pairs(f, x, w):
    rows = []
    for a in x:
        a, v = a.clone().requires_grad_(), w.clone().requires_grad_()
        rows.append(torch.autograd.grad(f(a, v), (a, v)))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


# --- torch.autograd.grad and .backward() inside -----------------------------------------------

INNER = {
    "with respect to the mapped argument": lambda a, w: torch.autograd.grad(
        (a**3 * w).sum(), a, create_graph=True
    )[0].sum(),
    "with respect to a captured leaf": lambda a, w: (
        torch.autograd.grad((a**3 * w * w).sum(), w, create_graph=True)[0].pow(2).sum()
    ),
    "with respect to both": lambda a, w: sum(
        g.sin().sum() for g in torch.autograd.grad((a**3 * w * w).sum(), (a, w), create_graph=True)
    ),
    "with respect to a tensor made inside": lambda a, w: second_of_inner(a * w),
    "through a Function": lambda a, w: torch.autograd.grad(
        OldStyle.apply(a * a, w).sum(), a, create_graph=True
    )[0].sum(),
}


def second_of_inner(h):
    return torch.autograd.grad(h.pow(4).sum(), h, create_graph=True)[0].sum()


@pytest.mark.parametrize("case", INNER)
def test_torch_autograd_grad_inside_equals_the_loops(case):
    f, x, w = INNER[case], seeded(4, 3), seeded(3)
    mine = after_backward(lambda w: vmap(lambda a: f(a, w)), x, w)
    truth = after_backward(lambda w: looped(lambda a: f(a, w)), x, w)
    assert difference(mine, truth) is None


def test_backward_inside_leaves_on_a_captured_leaf_what_the_loop_leaves():
    def f(a, w):
        (a.detach() * w).sin().sum().backward()
        return (a * a).sum()

    x, w = seeded(4, 3), seeded(3)
    mine = after_backward(lambda w: vmap(lambda a: f(a, w)), x, w)
    truth = after_backward(lambda w: looped(lambda a: f(a, w)), x, w)
    assert mine[2] is not None
    assert difference(mine, truth) is None
    w.requires_grad_()
    vmap(lambda a: f(a, w))(x)
    assert type(w.grad) is torch.Tensor


def test_backward_inside_adds_to_the_grad_that_was_there():
    w = seeded(3).requires_grad_()
    w.grad = torch.ones(3, dtype=D)
    before = w.grad
    x = seeded(4, 3)
    vmap(lambda a: ((a * w).sum().backward(), a)[1])(x)
    assert difference(w.grad, 1 + x.sum(0)) is None
    assert w.grad is before


def test_backward_inside_two_maps_leaves_the_sum_over_both():
    w = seeded(3).requires_grad_()
    x = seeded(4, 2, 3)
    vmap(vmap(lambda a: ((a * w * w).sum().backward(), a)[1]))(x)
    assert difference(w.grad, (2 * x * w.detach()).sum((0, 1))) is None
    assert type(w.grad) is torch.Tensor


def test_backward_inside_on_a_leaf_made_inside_reaches_each_example():
    def f(a):
        leaf = a.detach().clone().requires_grad_()
        (leaf**3).sum().backward()
        return leaf.grad

    check_vmap(f, (seeded(4, 3),))
    check_vmap(vmap(f), (seeded(2, 4, 3),))


def test_a_parameter_made_inside_can_be_trained_inside():
    def f(target):
        p = nn.Parameter(torch.zeros(3, dtype=D))
        optimizer = torch.optim.SGD([p], lr=0.25)
        for _ in range(3):
            optimizer.zero_grad()
            ((p - target) ** 2).sum().backward()
            optimizer.step()
        return p.detach()

    x = seeded(4, 3)
    assert difference(vmap(f)(x), x * (1 - 0.5**3)) is None


def test_backward_inside_reaches_a_leaf_of_the_map_around():
    def outer(xs, w):
        leaf = w.detach().clone().requires_grad_()
        mapped_inside(leaf, xs)
        return leaf.grad

    def mapped_inside(leaf, xs):
        for _ in range(2):
            vmap(lambda a: ((a * leaf * leaf).sum().backward(), a)[1])(xs)

    x, w = seeded(4, 2, 3), seeded(4, 3)
    assert difference(vmap(outer)(x, w), 4 * x.sum(1) * w) is None


def test_retain_grad_inside_keeps_each_examples_gradient():
    def f(a):
        leaf = a.detach().requires_grad_()
        h = leaf * 3
        h.retain_grad()
        (h**2).sum().backward()
        return h.grad

    x = seeded(4, 3)
    assert difference(vmap(f)(x), 6 * x) is None


def test_the_gradient_is_a_hook_away_inside_grad():
    seen = []

    def f(a):
        h = a * 3
        h.register_hook(seen.append)
        return (h**2).sum()

    def both(a):
        g = grad(f)(a)
        return g, seen.pop()

    x = seeded(4, 3)
    assert difference(vmap(both)(x), (18 * x, 6 * x)) is None


# --- modules -------------------------------------------------------------------------------------


@pytest.mark.impure("its hooks count backward passes, and recording makes one")
def test_module_hooks_run_for_every_derivative():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    calls = []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda m, args, out: torch.add(out, 1))
    model[1].register_full_backward_hook(lambda m, gi, go: calls.append(1) or (gi[0] * 10,))
    x = seeded(4, 3)

    def run(mapped):
        model.zero_grad()
        xs = x.clone().requires_grad_()
        y = mapped(lambda a: model(a).sum())(xs)
        (y * WEIGHTS).sum().backward()
        return [y.detach(), xs.grad, *[p.grad for p in model.parameters()]]

    mine = run(vmap)
    assert len(calls) == 1
    assert difference(mine, run(looped)) is None


def test_per_example_gradients_of_a_module_honour_its_hooks():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 10,))
    x = seeded(4, 3)
    params = {k: p.detach() for k, p in model.named_parameters()}
    mine = vmap(grad(lambda p, a: functional_call(model, p, (a,)).sum()), (None, 0))(params, x)
    rows = []
    for a in x:
        model.zero_grad()
        model(a).sum().backward()
        rows.append({k: p.grad.clone() for k, p in model.named_parameters()})
    truth = {k: torch.stack([r[k] for r in rows]) for k in params}
    assert difference(mine, truth) is None


# --- grad modes --------------------------------------------------------------------------------


def half_blind(x):
    """x^2 of which no_grad hides one factor: its derivative is x."""
    with torch.no_grad():
        hidden = x * 1
    return (x * hidden).sum(-1)


@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_no_grad_inside_is_honoured_by_both_modes(jacobian):
    x = seeded(3)
    assert difference(jacobian(half_blind)(x), x) is None
    assert difference(vmap(jacobian(half_blind))(seeded(4, 3)), seeded(4, 3)) is None


def test_no_grad_inside_is_honoured_by_jvp_and_vjp():
    x, t = seeded(3), torch.ones(3, dtype=D)
    assert difference(jvp(half_blind, (x,), (t,))[1], x.sum()) is None
    assert difference(vjp(half_blind, x)[1](torch.tensor(1.0, dtype=D))[0], x) is None


@pytest.mark.parametrize("verb", [jacrev, jacfwd])
def test_no_grad_over_all_of_f_gives_zeros(verb):
    @torch.no_grad()
    def f(x):
        return x * x

    assert difference(verb(f)(seeded(3)), torch.zeros(3, 3, dtype=D)) is None


def test_a_derivative_ignores_no_grad_outside_it():
    x = seeded(3)
    with torch.no_grad():
        found = (
            grad(lambda x: (x**3).sum())(x),
            torch.diagonal(hessian(lambda x: (x**3).sum())(x)),
            jvp(lambda x: x**3, (x,), (torch.ones(3, dtype=D),))[1],
            vjp(lambda x: x**3, x)[1](torch.ones(3, dtype=D))[0],
            torch.diagonal(jacrev(lambda x: x**3)(x)),
            torch.diagonal(jacfwd(lambda x: x**3)(x)),
            vmap(grad(lambda a: a**3))(x),
        )
    truth = (3 * x**2, 6 * x, *[3 * x**2] * 5)
    assert difference(found, truth) is None
    assert not any(t.requires_grad for t in found)


def test_a_result_under_no_grad_requires_no_grad():
    w = seeded(3).requires_grad_()
    with torch.no_grad():
        y = vmap(lambda a: a * w)(seeded(4, 3))
        g = vmap(grad(lambda a: (a * a * w).sum()))(seeded(4, 3))
        value = grad_and_value(lambda a: (a * w).sum())(seeded(3))
        pushed = jvp(lambda a: a * w, (seeded(3),), (seeded(3),))
    assert not any(t.requires_grad for t in (y, g, *value, *pushed))


def test_grad_between_no_grad_and_no_grad_differentiates_what_is_between():
    def f(x):
        with torch.no_grad():
            inner = grad(lambda y: (y * y * x).sum())(x)
        return (inner * x).sum()

    x = seeded(3)
    assert difference(grad(f)(x), 2 * x * x) is None


def test_enable_grad_inside_no_grad_inside_records_again():
    def f(x):
        with torch.no_grad():
            hidden = x * 1
            with torch.enable_grad():
                seen = x * 1
        return (hidden * seen).sum()

    x = seeded(4, 3)
    assert difference(vmap(grad(f))(x), x) is None


# --- what a mapped function shows of itself -------------------------------------------------------


def test_requires_grad_inside_is_what_the_loop_sees():
    seen = []

    def f(a, b):
        seen.append((a.requires_grad, b.requires_grad, (a * b).requires_grad, a.is_leaf))
        return a * b

    x, y = seeded(4, 3).requires_grad_(), seeded(4, 3)
    vmap(f)(x, y)
    looped_once = f(x[0], y[0])
    assert looped_once.requires_grad
    assert seen[0] == seen[1]


def test_a_gradient_reaches_only_what_was_asked():
    w = seeded(3).requires_grad_()
    x = seeded(4, 3).requires_grad_()
    vmap(grad(lambda a: (a * a * w).sum()))(x)
    assert w.grad is None
    assert x.grad is None


def test_saved_tensors_hooks_outside_see_a_mapped_call():
    """A hook that offloads what autograd saves gets it back, and nothing else changes."""
    x, w = seeded(4, 3), seeded(3)

    def run(mapped):
        def inside(w):
            def call(xs):
                with torch.autograd.graph.save_on_cpu():
                    return mapped(lambda a: (a * w).sin().sum() * a.exp().sum())(xs)

            return call

        return after_backward(inside, x, w)

    assert difference(run(vmap), run(looped)) is None


def test_writing_over_what_backward_needs_is_the_loops_error():
    def f(a):
        h = a.exp()
        y = h.sin()
        h.add_(1)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(f)(seeded(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(grad(f))(seeded(4, 3))

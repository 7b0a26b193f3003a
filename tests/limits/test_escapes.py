"""What is left of a value when the call that it belongs to is over, against the loop."""

import copy

import pytest
import torch
from torch import nn

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, stacked, vjp, vmap
from oracle import difference, loop

D = torch.float64


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=make_generator(3))


X = numbers(5, 3)


def kept_by(run, f, *args):
    """What the function leaves behind, together with its result."""
    kept = []

    def g(*inner):
        kept.append(f(*inner))
        return inner[0]

    run(g)(*args)
    return kept


def in_loop(f, xs):
    return torch.stack(kept_by(loop, f, xs))


# --- the stack of what was kept ---------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 2,
        lambda x: x,
        lambda x: x[1:],
        lambda x: x.sum(),
        lambda x: x.outer(x).mT,
        lambda x: torch.ones(2, dtype=D),
        lambda x: torch.zeros(3, dtype=D).copy_(x),
        lambda x: x > 0,
        lambda x: x.conj() * 1j,
    ],
)
def test_the_stack_is_what_the_loop_keeps(f):
    (kept,) = kept_by(vmap, f, X)
    assert difference(stacked(kept), in_loop(f, X)) is None


@pytest.mark.parametrize("place", [0, 1, -1])
def test_the_stack_comes_first_wherever_the_argument_has_its_examples(place):
    (kept,) = kept_by(lambda g: vmap(g, in_dims=place), lambda x: x * 2, X.movedim(0, place))
    assert difference(stacked(kept), 2 * X) is None


def test_a_forward_hook_collects_activations():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).double()
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out))
    vmap(model)(X)
    (mine,) = seen
    seen.clear()
    loop(model)(X)
    truth = torch.stack(seen)
    weight = model[0].weight
    assert difference(stacked(mine), truth) is None
    assert (
        difference(
            torch.autograd.grad(stacked(mine).sin().sum(), weight),
            torch.autograd.grad(truth.sin().sum(), weight),
        )
        is None
    )


def test_a_value_kept_from_an_inner_call_has_the_axes_of_both():
    xs = numbers(2, 5, 3)
    kept = []
    vmap(vmap(lambda x: (kept.append(x.cos()), x)[1]))(xs)
    assert difference(stacked(kept[0]), xs.cos()) is None


def test_a_value_of_an_inner_call_that_is_over_is_a_stack_for_the_outer_one():
    xs = numbers(2, 5, 3)

    def f(rows):
        kept = []
        vmap(lambda x: (kept.append(x * x), x)[1])(rows)
        return stacked(kept[0]).sum(0) if isinstance(kept[0], torch.Tensor) else None

    assert difference(vmap(f)(xs), (xs * xs).sum(1)) is None


def test_the_stack_inside_a_call_is_shared_by_the_examples_and_has_derivatives():
    def centred(xs):
        return vmap(lambda x: (x - stacked(x).mean(0)) ** 3)(xs).sum()

    assert difference(grad(centred)(X), grad(lambda xs: ((xs - xs.mean(0)) ** 3).sum())(X)) is None


@pytest.mark.parametrize("order", ["grad inside", "grad outside"])
def test_a_gradient_that_a_tensor_hook_kept(order):
    kept = []

    def f(x):
        h = x.sin()
        h.register_hook(lambda g: kept.append(g))
        return (h * h).sum()

    if order == "grad inside":
        vmap(grad(f))(X)
    else:
        grad(lambda xs: vmap(f)(xs).sum())(X)
    assert difference(stacked(kept[0]), 2 * X.sin()) is None


def test_an_ordinary_tensor_is_its_own_stack():
    assert stacked(X) is X


def test_what_is_no_tensor_has_no_stack():
    with pytest.raises(TypeError, match="no tensor"):
        stacked([X])


# --- one value for all examples -----------------------------------------------------------------


def test_a_table_made_in_the_call_goes_on_as_an_ordinary_tensor():
    cache = {}

    def f(x):
        if "table" not in cache:
            cache["table"] = torch.arange(3, dtype=D) * 2
        return x * cache["table"]

    first = vmap(f)(X)
    table = cache["table"]
    assert type(table + 0) is torch.Tensor
    assert difference(table + 0, torch.arange(3, dtype=D) * 2) is None
    assert difference(vmap(f)(X), first) is None
    assert difference(f(X[0]), first[0]) is None
    assert difference(grad(lambda t: (t * cache["table"]).sum())(X[0]), table + 0) is None


@pytest.mark.parametrize("use", ["grad", "backward", "in another vmap"])
def test_the_derivative_of_a_shared_value_counts_once_as_in_the_loop(use):
    def run(mapped):
        w = torch.tensor([2.0, 3.0, 4.0], dtype=D, requires_grad=True)
        kept = []

        def f(x):
            if not kept:
                kept.append(w * w)
            return x * kept[0]

        out = mapped(f)(X)
        if use == "grad":
            found = torch.autograd.grad((kept[0] * 3).sum(), w, retain_graph=True)[0]
        elif use == "backward":
            (kept[0].sum() + out.sum()).backward()
            found = w.grad
        else:
            again = mapped(lambda x: (x * kept[0]).sum())(X)
            found = torch.autograd.grad(again.sum(), w)[0]
        return found.clone()

    assert difference(run(vmap), run(loop)) is None


# --- values of examples -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t[0],
        lambda t: torch.cat([t, t]),
        lambda t: t.add_(1),
        lambda t: t.sum().backward(),
        lambda t: torch.autograd.grad(t.sum(), [X]),
        lambda t: t.numpy(),
        lambda t: t.detach(),
        lambda t: copy.deepcopy(t),
        lambda t: vmap(lambda x: x * t)(X),
        lambda t: vmap(lambda x: t)(X),
        lambda t: jvp(lambda x: x * t, (X[0],), (X[0],)),
        lambda t: grad(lambda x: (x * t).sum())(X[0]),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_one_value_per_example_is_refused_after_the_call(use, recorded):
    (kept,) = kept_by(vmap, lambda x: x * 2, X.clone().requires_grad_(recorded))
    with pytest.raises(RuntimeError, match=r"used after the call|deepcopy"):
        use(kept)
    assert difference(stacked(kept), 2 * X) is None


def test_what_is_asked_of_it_without_its_values_is_answered():
    (kept,) = kept_by(vmap, lambda x: x * 2, X)
    assert kept.shape == (3,)
    assert kept.dtype == D
    assert not kept.requires_grad
    assert "float64[3]" in repr(kept)
    assert {kept: 1}[kept] == 1


def test_backward_hooks_and_recomputation_act_after_the_call():
    """They meet values of a level that has ended, and by right."""
    seen = []
    xs = X.clone().requires_grad_()

    def f(x):
        h = torch.utils.checkpoint.checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False)
        h.register_hook(lambda g: seen.append((g * 2).sum()) or g * 3)
        return h.sum()

    vmap(f)(xs).sum().backward()
    assert difference(xs.grad, 6 * X * (X * X).cos()) is None
    assert difference(stacked(seen[0]), torch.full((5,), 6.0, dtype=D)) is None


# --- grad, vjp and jvp --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        lambda g: grad(lambda x: g(x).sum()),
        lambda g: lambda x: vjp(g, x)[1](x),
        lambda g: lambda x: jvp(g, (x,), (x,)),
        lambda g: lambda x: jvp(grad(lambda y: g(y).sum()), (x,), (x,)),
        lambda g: lambda x: grad(lambda y: jvp(g, (y,), (y,))[1].sum())(x),
        lambda g: lambda x: forall.linearize(g, x)[1](x),
        jacrev,
    ],
)
def test_a_value_kept_from_a_derivative_is_an_ordinary_tensor(transform):
    kept = []
    transform(lambda x: (kept.append(x * x), x.sin())[1])(X[0])
    out = kept[0].detach() + 1
    assert type(out) is torch.Tensor
    assert difference(out, X[0] ** 2 + 1) is None


@pytest.mark.parametrize("transform", [jacfwd, hessian])
def test_a_value_kept_from_many_columns_has_a_stack(transform):
    kept = []
    f = (lambda x: x.sin()) if transform is jacfwd else (lambda x: x.sin().sum())
    transform(lambda x: (kept.append(x * x), f(x))[1])(X[0])
    assert difference(stacked(kept[0]).reshape(-1, 3)[0], X[0] ** 2) is None


def test_what_backward_leaves_inside_a_jvp_is_an_ordinary_gradient():
    w = torch.ones(3, dtype=D, requires_grad=True)
    jvp(lambda x: ((x * w * w).sum().backward(), x)[1], (X[0],), (X[0],))
    assert type(w.grad) is torch.Tensor
    assert difference(w.grad, 2 * X[0]) is None


def test_a_value_kept_from_a_jvp_keeps_its_history():
    w = torch.ones(3, dtype=D, requires_grad=True)
    kept = []
    jvp(lambda x: (kept.append(x * w), x)[1], (X[0],), (X[0],))
    (kept[0] * 2).sum().backward()
    assert difference(w.grad, 2 * X[0]) is None
    kept.clear()

    def outer(x):
        jvp(lambda y: (kept.append(y * y), y)[1], (x,), (X[1],))
        return (kept.pop() * 3).sum()

    assert difference(grad(outer)(X[0]), 6 * X[0]) is None


def test_a_history_leads_to_what_is_captured_and_to_the_argument():
    w = torch.ones(3, dtype=D, requires_grad=True)

    def outer(x):
        kept = []
        jvp(lambda y: (kept.append(y * w), y)[1], (x,), (X[1],))
        return (kept.pop() * 3).sum()

    assert difference(grad(outer)(X[0]), torch.full((3,), 3.0, dtype=D)) is None
    assert difference(torch.autograd.grad(outer(X[0]), w)[0], 3 * X[0]) is None


def test_numbers_of_examples_that_the_function_has_kept_are_stacked():
    kept = []
    vmap(lambda x: kept.append(x.sum().item()) or x)(X)
    assert difference(stacked(kept[0]), X.flatten(1).sum(1).double()) is None
    kept.clear()
    vmap(vmap(lambda x: kept.append((x > 0).sum().item()) or x))(X.expand(2, *X.shape))
    assert stacked(kept[0]).tolist() == 2 * [(X > 0).flatten(1).sum(1).tolist()]


def test_a_number_inside_is_stacked_for_all():
    def ranks(x):
        return x.sum() * 0 + (stacked(x.sum().item()) < x.sum()).sum()

    assert sorted(vmap(ranks)(X).tolist()) == list(range(len(X)))

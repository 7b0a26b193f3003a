"""Programs that people write and bring to function transforms, as they are, against the loop."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from by_groups import EXPECTED
from draws import make_generator
from forall import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    stacked,
    vjp,
    vmap,
)
from forall import random as keyed
from limits.limitations import Square
from oracle import difference, loop

D = torch.float64


def numbers(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.rand(*shape, dtype=D, generator=make_generator(seed)) + 0.5


def same(a, b):
    found = difference(a, b)
    assert found is None, found


def made(module: nn.Module) -> nn.Module:
    """The module with weights that do not depend on what ran before."""
    generator = make_generator(11)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return module.to(D)


def keeps_the_law(f, *args, in_dims=0):
    """The loop's results, and what the loop leaves in the arguments."""
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    same(vmap(f, in_dims=in_dims)(*mine), loop(f, in_dims)(*theirs))
    same(mine, theirs)


def keeps_the_law_with_gradients(f, x):
    """The results, and their derivatives taken inside and outside of vmap."""
    keeps_the_law(f, x)
    keeps_the_law(lambda x: grad(lambda x: f(x).pow(2).sum())(x), x)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    vmap(f)(mine).pow(2).sum().backward()
    loop(f)(theirs).pow(2).sum().backward()
    same(mine.grad, theirs.grad)


# --- writing in place ---------------------------------------------------------------------------


def companion(p):
    """The matrix whose eigenvalues are the roots of a polynomial."""
    c = torch.zeros(3, 3, dtype=D)
    c[1:, :-1] = torch.eye(2)
    c[:, -1] = -p[:-1] / p[-1]
    return c


def entry_by_entry(x):
    h = torch.zeros(2, 2, dtype=D)
    h[0, 0] = x[0]
    h[1, 0] = h[0, 1] = x[1] * x[2]
    return h


TABLE = torch.eye(3, dtype=D)


def into_a_copied_table(x):
    m = TABLE.clone()
    m[0, 1] = x[0]
    m[2] *= x[1:].sum()
    return m


def summed_up(x):
    s = torch.zeros((), dtype=D)
    for i in range(3):
        s += x[i]
    return s


@pytest.mark.parametrize("f", [companion, entry_by_entry, into_a_copied_table, summed_up])
def test_a_tensor_made_inside_takes_an_examples_numbers(f):
    keeps_the_law_with_gradients(f, numbers(5, 4) if f is companion else numbers(5, 3))


def test_a_captured_buffer_that_is_only_added_to_holds_the_loops_sum():
    buffer = torch.zeros(3)
    vmap(lambda x: (buffer.add_(x), x)[1])(torch.ones(4, 3))
    same(buffer, torch.full((3,), 4.0))


def test_a_captured_table_written_at_a_mapped_place_is_the_loops_or_a_clear_error():
    out, x = torch.zeros(4, 2, dtype=D), numbers(4, 2)
    with pytest.raises(RuntimeError, match="in_dims"):
        vmap(lambda i, x: (out.__setitem__(i, x), x)[1])(torch.arange(4), x)
    same(out, torch.zeros(4, 2, dtype=D))
    vmap(lambda row, x: (row.copy_(x), x)[1])(out, x)  # the cure: the table is mapped too
    same(out, x)


# --- torch.autograd inside ----------------------------------------------------------------------


def force(x):
    x = x.requires_grad_()
    energy = (x**3).sum() + x.prod()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_forces_from_an_energy_are_mapped_and_differentiated_again():
    x = numbers(4, 3)
    keeps_the_law(force, x)
    keeps_the_law(jacrev(force), x)
    keeps_the_law(jacfwd(force), x)
    curvature = hessian(lambda x: (x**3).sum() + x.prod())(x[0])
    same(jacrev(force)(x[0].clone()), curvature)
    same(jacfwd(force)(x[0].clone()), curvature)


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.1, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1, momentum=0.5, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, 0.5),
    "Adamax": lambda ps: torch.optim.Adamax(ps, 0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, 0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, 0.1),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.1),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
    "Adam, foreach": lambda ps: torch.optim.Adam(ps, 0.1, foreach=True),
}


def fitted(optimizer, steps=7):
    def fit(x):
        p = torch.zeros(3, dtype=D, requires_grad=True)
        o = optimizer([p])
        for _ in range(steps):
            o.zero_grad()
            ((p - x) ** 2).sum().backward()
            o.step()
        return p.detach()

    return fit


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_inside_has_a_state_for_each_example(name):
    keeps_the_law(fitted(OPTIMIZERS[name]), numbers(4, 3))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimizer_inside_two_maps(name):
    f, x = fitted(OPTIMIZERS[name]), numbers(2, 3, 3)
    same(vmap(vmap(f))(x), loop(loop(f))(x))


def test_gradients_clipped_and_rates_scheduled():
    def fit(x):
        p = torch.zeros(3, dtype=D, requires_grad=True)
        o = torch.optim.SGD([p], 0.5)
        schedule = torch.optim.lr_scheduler.StepLR(o, 2, 0.1)
        for _ in range(5):
            o.zero_grad()
            ((p - x) ** 4).sum().backward()
            nn.utils.clip_grad_norm_([p], 0.7)
            o.step()
            schedule.step()
        return p.detach()

    keeps_the_law(fit, numbers(4, 3) * 3)


FUNCTIONAL = {
    "jacobian": lambda x: torch.autograd.functional.jacobian(torch.exp, x),
    "hessian": lambda x: torch.autograd.functional.hessian(lambda x: x.prod(), x),
    "jvp": lambda x: torch.autograd.functional.jvp(torch.sin, x, x.cos())[1],
    "vjp": lambda x: torch.autograd.functional.vjp(torch.sin, x, x.cos())[1],
    "hvp": lambda x: torch.autograd.functional.hvp(lambda x: x.prod(), x, x.cos())[1],
    "vhp": lambda x: torch.autograd.functional.vhp(lambda x: x.prod(), x, x.cos())[1],
    "jacobian, vectorized": lambda x: torch.autograd.functional.jacobian(
        torch.exp, x, vectorize=True
    ),
    "jacobian, forward": lambda x: torch.autograd.functional.jacobian(
        torch.exp, x, vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_torch_autograd_functional_inside(name):
    keeps_the_law(FUNCTIONAL[name], numbers(4, 3))


# --- inner loops that are learned through -------------------------------------------------------


def adapted(model, steps, optimizer):
    """The loss on one half of a task after some steps of a stock optimizer on the other."""

    def run(x, y):
        inner = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
        o = optimizer(list(inner.values()))
        for _ in range(steps):
            o.zero_grad()
            F.mse_loss(functional_call(model, inner, (x[:3],)), y[:3]).backward()
            o.step()
        return F.mse_loss(functional_call(model, inner, (x[3:],)), y[3:])

    return run


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_each_task_adapts_a_model_of_its_own(name):
    model = made(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    run = adapted(model, 4, OPTIMIZERS[name])
    tasks = numbers(5, 6, 2), numbers(5, 6, 1, seed=6)
    same(
        vmap(lambda x, y: run(x, y).detach())(*tasks), loop(lambda x, y: run(x, y).detach())(*tasks)
    )


def outer_loss(p, x, y):
    """Two gradient steps by hand on one half of the task, the loss on the other."""

    def inner_loss(p):
        return ((x[:3] @ p["w"] + p["b"] - y[:3]) ** 2).mean()

    for _ in range(2):
        g = grad(inner_loss)(p)
        p = {k: p[k] - 0.1 * g[k] for k in p}
    return ((x[3:] @ p["w"] + p["b"] - y[3:]) ** 2).mean()


def test_learning_to_learn_is_differentiated_through_the_inner_steps():
    p = {"w": numbers(2, seed=8), "b": numbers(1, seed=9)}
    tasks = numbers(5, 6, 2), numbers(5, 6, seed=6)
    keeps_the_law(grad(outer_loss), p, *tasks, in_dims=(None, 0, 0))
    mine = grad(lambda p: vmap(outer_loss, (None, 0, 0))(p, *tasks).mean())(p)
    same(mine, grad(lambda p: loop(outer_loss, (None, 0, 0))(p, *tasks).mean())(p))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_learning_to_learn_with_a_stock_optimizer_that_is_differentiable(name):
    kind = {
        "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, differentiable=True),
        "Adam": lambda ps: torch.optim.Adam(ps, 0.1, differentiable=True),
    }[name]

    def after_two_steps(w, x, y):
        inner = w * 1
        o = kind([inner.requires_grad_() if inner.is_leaf else inner])
        for _ in range(2):
            loss = ((x[:3] @ inner - y[:3]) ** 2).mean()
            (inner.grad,) = torch.autograd.grad(loss, inner, create_graph=True)
            o.step()
        return ((x[3:] @ inner - y[3:]) ** 2).mean()

    w, tasks = numbers(2, seed=8), (numbers(5, 6, 2), numbers(5, 6, seed=6))
    mine, theirs = (w.clone().requires_grad_() for _ in range(2))
    vmap(after_two_steps, (None, 0, 0))(mine, *tasks).sum().backward()
    loop(after_two_steps, (None, 0, 0))(theirs, *tasks).sum().backward()
    same(mine.grad, theirs.grad)
    keeps_the_law(grad(after_two_steps), w, *tasks, in_dims=(None, 0, 0))


# --- state of modules ---------------------------------------------------------------------------


@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_a_jacobian_of_batch_norm_updates_the_statistics_once(jacobian):
    mine, theirs = (nn.BatchNorm2d(3).to(D) for _ in range(2))
    x = numbers(2, 3, 2, 2)
    same(jacobian(mine)(x), torch.autograd.functional.jacobian(lambda x: theirs(x), x))
    assert mine.num_batches_tracked == 1
    once = nn.BatchNorm2d(3).to(D)
    once(x)
    same(dict(mine.state_dict()), dict(once.state_dict()))


def test_batch_norm_is_updated_by_each_example_in_turn():
    mine, theirs, x = nn.BatchNorm1d(3).to(D), nn.BatchNorm1d(3).to(D), numbers(4, 5, 3)
    same(vmap(mine)(x), loop(theirs)(x))
    same(dict(mine.state_dict()), dict(theirs.state_dict()))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += x.mean()
        return x


def test_a_buffer_that_adds_up_holds_the_loops_sum():
    counting = Counting()
    same(vmap(counting)(torch.ones(4, 3)), torch.ones(4, 3))
    assert counting.count == 4


# --- functions of other people ------------------------------------------------------------------


class ThroughNumpy(torch.autograd.Function):
    """Its forward leaves torch, its backward has a factor that the forward has not."""

    @staticmethod
    def forward(ctx, x, power):
        ctx.x, ctx.power = x, power
        return x.clone().pow_(power)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.power * ctx.x ** (ctx.power - 1) * g, None


FUNCTIONS = {
    "squared": lambda x: Square.apply(x).sum(),
    "twice": lambda x: Square.apply(Square.apply(x)).sum(),
    "a derivative of its own": lambda x: ThroughNumpy.apply(x, 3).sum(),
}
WAYS = {
    "call": lambda f: f,
    "grad": grad,
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones((), dtype=D))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "linearize": lambda f: lambda x: linearize(f, x)[1](x.cos()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).sum()),
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x.cos(),))[1]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_older_form_under_every_transform(name, way):
    keeps_the_law(WAYS[way](FUNCTIONS[name]), numbers(4, 3))


def test_the_backward_that_was_written_is_the_one_that_runs():
    x = numbers(4)
    same(vmap(grad(Square.apply))(x), 2 * x)
    same(jacfwd(Square.apply)(x), (2 * x).diag())
    same(vmap(grad(FUNCTIONS["a derivative of its own"]))(x), 9 * x**2)
    same(jacfwd(FUNCTIONS["a derivative of its own"])(x), 9 * x**2)


@pytest.mark.parametrize("way", ["grad", "vjp", "jacrev", "hessian", "jvp", "jacfwd"])
def test_a_full_backward_hook_of_a_module(way):
    m = made(nn.Linear(3, 2))
    seen = []
    m.register_full_backward_hook(lambda _m, gi, go: seen.append((gi[0].shape, go[0].shape)))
    keeps_the_law(WAYS[way](lambda x: m(x).pow(3).sum()), numbers(4, 3))
    if way == "grad":
        assert set(seen) == {(torch.Size([3]), torch.Size([2]))}


def test_a_full_backward_hook_that_changes_the_gradient():
    m = made(nn.Linear(3, 2))
    m.register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 2,))
    keeps_the_law(grad(lambda x: m(x).pow(3).sum()), numbers(4, 3))


# --- checkpoints and saved tensors --------------------------------------------------------------

LAYER = made(nn.Linear(3, 4))
PARAMETERS = {k: v.detach() for k, v in LAYER.named_parameters()}


def checkpointed(p, x):
    run = lambda x: functional_call(LAYER, p, (x,)).sin()  # noqa: E731
    return checkpoint(run, x, use_reentrant=False).pow(2).sum()


def saved_elsewhere(p, x):
    with torch.autograd.graph.save_on_cpu():
        return functional_call(LAYER, p, (x,)).exp().sum()


def packed(p, x):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: [t * 2], lambda t: t[0] / 2)
    with hooks:
        return functional_call(LAYER, p, (x,)).exp().sum()


SAVING = [checkpointed, saved_elsewhere, packed]


@pytest.mark.parametrize("f", SAVING)
def test_gradients_of_each_example_where_less_is_saved(f):
    x = numbers(5, 3)
    keeps_the_law(grad(f), PARAMETERS, x, in_dims=(None, 0))
    keeps_the_law(grad_and_value(f, argnums=(0, 1)), PARAMETERS, x, in_dims=(None, 0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", SAVING)
def test_every_transform_where_less_is_saved(f, way):
    keeps_the_law(WAYS[way](lambda x: f(PARAMETERS, x)), numbers(3, 3))


# --- memory of Jacobians ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 6, 100])
def test_a_chunk_size_changes_memory_and_nothing_else(chunk_size):
    x = numbers(6)
    cubes = lambda x: x.pow(3).sum() * x[0]  # noqa: E731
    same(hessian(cubes, chunk_size=chunk_size)(x), hessian(cubes)(x))
    same(jacfwd(torch.exp, chunk_size=chunk_size)(x), x.exp().diag())
    same(jacrev(torch.exp, chunk_size=chunk_size)(x), x.exp().diag())
    xs = numbers(3, 6)
    same(vmap(hessian(cubes, chunk_size=chunk_size), chunk_size=2)(xs), loop(hessian(cubes))(xs))


# --- randomness ---------------------------------------------------------------------------------


def noisy(x):
    return (x + torch.randn(3)) * torch.rand(3)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_draws_of_a_key_do_not_depend_on_chunks(chunk_size):
    key, x = keyed.key(0), torch.zeros(4, 3)
    whole = vmap(noisy, randomness=key)(x)
    same(vmap(noisy, randomness=key, chunk_size=chunk_size)(x), whole)
    rows = []
    for i, row in enumerate(x):
        with keyed.scope(key, i):
            rows.append(noisy(row))
    same(whole, torch.stack(rows))


def test_dropout_under_forward_mode_with_a_key():
    x = torch.ones(4)
    result = jacfwd(lambda x: F.dropout(x, 0.5), randomness="same")(x)
    assert ((result == 0) | (result == 2 * torch.eye(4))).all()
    with pytest.raises(RuntimeError, match="randomness"):
        jacfwd(lambda x: F.dropout(x, 0.5))(x)


# --- autocast -----------------------------------------------------------------------------------

AUTOCAST = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 6),
        nn.Bilinear(4, 4, 2),
        nn.LayerNorm(4),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(-1)),
        nn.GRUCell(4, 3),
        nn.MultiheadAttention(4, 2),
        nn.Conv1d(1, 2, 3),
    ],
)
def test_autocast_casts_as_for_one_example(module, dtype):
    shape = (5, 1, 4) if isinstance(module, (nn.Conv1d, nn.MultiheadAttention)) else (5, 4)
    x = numbers(*shape).float()

    def f(x):
        many = isinstance(module, (nn.MultiheadAttention, nn.Bilinear))
        return module(*[x] * (2 + isinstance(module, nn.MultiheadAttention))) if many else module(x)

    with torch.autocast("cpu", dtype=dtype):
        mine, theirs = vmap(f)(x), loop(f)(x)
    # Inside one operator torch may round to half precision and back, or not.
    assert difference(mine, theirs, working=dtype) is None


def test_autocast_inside_the_function():
    m, x = made(nn.Linear(4, 6)).float(), numbers(5, 4).float()

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x)

    keeps_the_law(f, x)
    keeps_the_law(grad(lambda x: f(x).sum()), x)
    keeps_the_law(lambda x: jvp(f, (x,), (x,)), x)


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "rms norm": lambda: nn.RMSNorm(4),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(0, (2, 4)), nn.InstanceNorm1d(4), nn.Flatten(0, 1)
    ),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("name", NORMS)
def test_vectors_pulled_back_through_norms_under_autocast(name, dtype):
    n = nn.Sequential(nn.Linear(4, 4), NORMS[name](), nn.Linear(4, 1))
    x = numbers(8, 4).float()
    n(x)
    with torch.autocast("cpu", dtype=dtype):
        out = n(x).squeeze(1)
    weights = list(n.parameters())
    pulled = lambda v: torch.autograd.grad(out, weights, v, retain_graph=True)  # noqa: E731
    eye = torch.eye(8, dtype=out.dtype)
    assert difference(vmap(pulled)(eye), loop(pulled)(eye), working=dtype) is None


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("name", ["layer norm", "rms norm", "batch norm"])
def test_gradients_of_each_example_through_norms_under_autocast(name, dtype):
    n = nn.Sequential(nn.Linear(4, 4), NORMS[name](), nn.Linear(4, 1)).eval()
    x = numbers(8, 2, 4).float()
    p = {k: v.detach() for k, v in n.named_parameters()}

    def loss(p, x):
        with torch.autocast("cpu", dtype=dtype):
            return functional_call(n, p, (x,)).float().pow(2).sum()

    mine = vmap(grad(loss), (None, 0))(p, x)
    theirs = loop(grad(loss), (None, 0))(p, x)
    assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in theirs.items()}
    for k in p:  # what was computed in half precision is right to half precision
        assert difference(mine[k], theirs[k], working=dtype) is None


def test_linearize_under_autocast():
    m, x = made(nn.Linear(4, 6)).float(), numbers(4).float()
    with torch.autocast("cpu", dtype=torch.float16):
        out, push = linearize(m, x)
        same((out, push(x)), jvp(m, (x,), (x,)))


# --- no_grad ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_forward_and_reverse_mode_agree_on_what_is_held_constant(how):
    a, b = made(nn.Linear(3, 2)), made(nn.Linear(3, 2))

    def f(x):
        if how == "detach":
            return b(x) + a(x).detach()
        with torch.no_grad():
            y = a(x)
        return b(x) + y

    x = numbers(3)
    for derivative in (
        jacrev(f)(x),
        jacfwd(f)(x),
        torch.stack([jvp(f, (x,), (e,))[1] for e in torch.eye(3, dtype=D)], 1),
    ):
        same(derivative, b.weight.detach())
    same(hessian(lambda x: f(x).pow(2).sum())(x), 2 * b.weight.detach().mT @ b.weight.detach())
    keeps_the_law(jacfwd(f), numbers(4, 3))


# --- values that are kept -----------------------------------------------------------------------


def test_activations_that_a_hook_collected():
    linear = made(nn.Linear(3, 4))
    m, kept = nn.Sequential(linear, nn.ReLU()), []
    linear.register_forward_hook(lambda _m, _i, out: kept.append(out))
    x = numbers(5, 3)
    vmap(m)(x)
    assert stacked(kept[0]).shape == (5, 4)
    same(stacked(kept[0]), loop(linear)(x))


def test_activations_kept_as_an_attribute_and_used_in_a_loss():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made(nn.Linear(3, 4))

        def forward(self, x):
            self.last = self.inner(x).tanh()
            return self.last.sum()

    m, x = Keeping(), numbers(5, 3)
    out = vmap(m)(x)
    (out.sum() + stacked(m.last).pow(2).sum()).backward()
    mine = m.inner.weight.grad
    m.inner.weight.grad = None
    for row in x:
        (m(row) + m.last.pow(2).sum()).backward()
    same(mine, m.inner.weight.grad)


# --- several results, and results that are no tensors -------------------------------------------


def test_value_gradient_hessian_and_aux_come_from_one_call():
    x, calls = numbers(3), []
    f = lambda x: (calls.append(0), (x.pow(3).sum(), x))[1]  # noqa: E731
    h, (g, y, aux) = hessian(f, has_aux=True, return_value=True)(x)
    same((h, g, y, aux), ((6 * x).diag(), 3 * x**2, x.pow(3).sum(), x))
    assert len(calls) == 1


def test_a_result_may_hold_numbers_strings_and_none():
    f = lambda x: {"y": x.sin(), "n": 42, "tag": "a", "none": None}  # noqa: E731
    keeps_the_law(f, numbers(4, 3))
    result = vmap(f)(numbers(4, 3))
    same(result["n"], torch.full((4,), 42))
    assert (result["tag"], result["none"]) == ("a", None)


def test_a_gradient_that_is_none_is_a_result():
    def f(x, y):
        x, y = x.requires_grad_(), y.requires_grad_()
        return torch.autograd.grad(x.sin().sum(), (x, y), allow_unused=True)

    keeps_the_law(f, numbers(4, 3), numbers(4, 2))


# --- tensors built from numbers of an example ---------------------------------------------------


def skew(w):
    return torch.tensor([[0.0, -w[2], w[1]], [w[2], 0.0, -w[0]], [-w[1], w[0], 0.0]])


BUILT = {
    "skew": skew,
    "a vector": lambda w: torch.tensor([w[0], 2.0, w[1]]),
    "with a dtype": lambda w: torch.tensor([w[0], w[1]], dtype=torch.float32),
    "full": lambda w: torch.full((3,), w[0]),
    "full_like": lambda w: torch.full_like(w, w[1]),
    "new_full": lambda w: w.new_full((2, 2), w[1]),
    "new_tensor": lambda w: w.new_tensor([w[1], 1.0]),
    "as_tensor": lambda w: torch.as_tensor([w[0], w[1] * 2]),
    "scalar_tensor": lambda w: torch.tensor(w[0]),
    "linspace": lambda w: torch.linspace(0, w[0], 5),
    "arange scaled": lambda w: torch.arange(3) * w[0],
    "stack": lambda w: torch.stack([w[0], torch.zeros((), dtype=D), w[1]]),
    "complex": lambda w: torch.complex(w[0], w[1]),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", BUILT)
def test_a_tensor_built_from_an_examples_numbers(name):
    keeps_the_law(BUILT[name], numbers(4, 3))
    f, x = BUILT[name], numbers(2, 4, 3)
    same(vmap(vmap(f))(x), loop(loop(f))(x))


@pytest.mark.parametrize("f", [lambda e: torch.arange(0, 3, e), lambda e: torch.zeros(e.int())])
@EXPECTED
def test_a_length_that_is_an_examples_number(f):
    lengths = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match=r"example 1   \[2\]"):
        vmap(f)(lengths)
    with pytest.raises(RuntimeError, match="test_user_asks"):
        vmap(f, divergence="error")(lengths)
    same(vmap(lambda e: f(e).sum())(lengths), loop(lambda e: f(e).sum())(lengths))


# --- layers that are given one example ----------------------------------------------------------


def test_a_layer_that_wants_a_batch_is_told_which_axis_is_missing():
    layer = nn.BatchNorm2d(3, track_running_stats=False)
    with pytest.raises(ValueError, match=r"expected 4D input \(got 3D input\)") as caught:
        vmap(layer)(torch.randn(4, 3, 8, 8))
    assert "unsqueeze(0)" in "\n".join(caught.value.__notes__)
    x = numbers(4, 3, 8, 8).float()
    same(
        vmap(lambda x: layer(x.unsqueeze(0)))(x),
        loop(lambda x: layer(x.unsqueeze(0)))(x),
    )


# --- stacks of modules --------------------------------------------------------------------------


def test_modules_stacked_inside_a_transform():
    heads = [made(nn.Linear(3, 3)) for _ in range(2)]

    def f(x):
        p, _ = stack_module_state(heads)
        return vmap(lambda p: functional_call(heads[0], p, (x,)))(p)

    x, v = numbers(3), numbers(3, seed=6)
    truth = lambda x: torch.stack([h(x) for h in heads])  # noqa: E731
    same(jvp(f, (x,), (v,)), jvp(truth, (x,), (v,)))
    same(jacrev(f)(x), jacrev(truth)(x))
    same(vmap(f)(numbers(4, 3)), loop(truth)(numbers(4, 3)))


def test_gradients_reach_the_modules_that_were_stacked():
    mine = [made(nn.Linear(3, 3)) for _ in range(2)]
    theirs, x = copy.deepcopy(mine), numbers(3)
    p, _ = stack_module_state(mine, detach=False)
    vmap(lambda p: functional_call(mine[0], p, (x,)))(p).pow(2).sum().backward()
    for h in theirs:
        h(x).pow(2).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        same([p.grad for p in a.parameters()], [p.grad for p in b.parameters()])


def test_the_gradient_of_an_intermediate_value_is_retained():
    def f(x):
        x = x.requires_grad_()
        y = x * 2
        y.retain_grad()
        y.pow(3).sum().backward()
        return y.grad + x.grad

    keeps_the_law(f, numbers(4, 3))


# --- operators of other people ------------------------------------------------------------------


@torch.library.custom_op("asks::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: float) -> torch.Tensor:
    return torch.from_numpy(x.numpy(force=True) * y)


scaled.register_autograd(
    lambda ctx, g: (g * ctx.y, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "y", inputs[1]),
)


@torch.library.custom_op("asks::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy(force=True) ** 3)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


cubed.register_autograd(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g, setup_context=_save)


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["scaled", "cubed"])
def test_an_operator_with_a_derivative_and_no_rule(name, way):
    f = {"scaled": lambda z: scaled(z, 3.0).sum(), "cubed": lambda z: cubed(z).sum()}[name]
    keeps_the_law(WAYS[way](f), numbers(4, 3))


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_an_operator_with_a_derivative_and_its_numbers():
    x = numbers(4, 3)
    same(vmap(grad(lambda z: scaled(z, 3.0).sum()))(x), torch.full_like(x, 3))
    same(vmap(grad(lambda z: cubed(z).sum()))(x), 3 * x**2)
    same(vmap(hessian(lambda z: cubed(z).sum()))(x), torch.diag_embed(6 * x))


# --- keyword arguments --------------------------------------------------------------------------


def test_keyword_arguments_are_whole_unless_in_dims_names_them():
    f = lambda x, *, w: x * w  # noqa: E731
    x, w = numbers(3, 3), numbers(3, 3, seed=6)
    same(vmap(f)(x, w=w), torch.stack([row * w for row in x]))
    same(vmap(f, in_dims={"x": 0, "w": 0})(x, w=w), x * w)
    same(vmap(f, in_dims={"x": 0, "w": 1})(x, w=w), x * w.mT)


# --- dtypes -------------------------------------------------------------------------------------

PROMOTED = {
    "where": lambda x, y: torch.where(x > 0, x, y),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "add": lambda x, y: x + y,
    "maximum": torch.maximum,
    "lerp of a weight": lambda x, y: torch.lerp(x, x * 2, y.to(x.dtype)),
    "addcmul": lambda x, y: x.mul(y).add(y),
    "cat": lambda x, y: torch.cat([x, y[None]]),
    "stack": lambda x, y: x * torch.stack([y, y]).sum(),
    "result_type": lambda x, y: torch.zeros((), dtype=torch.result_type(x, y)),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_an_example_without_dims_does_not_promote_one_with(name):
    keeps_the_law(PROMOTED[name], torch.ones(3, 4), torch.ones(3, dtype=D))


# --- messages -----------------------------------------------------------------------------------

DIVERGING = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "and": lambda x: x if x[0] > 0 and x[1] > 0 else -x,
    "not": lambda x: x * (not x[0] > 0),
    "item": lambda x: x[0].item(),
    "a slice": lambda x: x[: x[0].int()],
    "a list": lambda x: [1.0, 2.0][x[0].int()] * x,
    "range": lambda x: sum(x for _ in range(x[0].int())),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
}
OF_BOTH_SIGNS = torch.tensor([[1.5, 1.0, -0.2], [-0.1, -1.5, 0.3], [0.2, 0.0, 0.4]], dtype=D)


@pytest.mark.parametrize("name", DIVERGING)
def test_examples_that_part_give_what_the_loop_gives(name):
    def f(x):
        return torch.as_tensor(DIVERGING[name](x), dtype=D).sum()

    same(vmap(f)(OF_BOTH_SIGNS), loop(f)(OF_BOTH_SIGNS))


@pytest.mark.parametrize("name", DIVERGING)
def test_what_is_refused_is_refused_at_the_users_line_with_a_way_out(name):
    f, line = DIVERGING[name], inspect.getsourcelines(DIVERGING[name])[1]
    with pytest.raises(RuntimeError, match="vmap") as caught:
        vmap(f, divergence="error")(OF_BOTH_SIGNS)
    text = str(caught.value)
    assert f"test_user_asks.py:{line}" in text
    assert "functorch" not in text
    assert "http" not in text


# --- out= ---------------------------------------------------------------------------------------


def into_its_like(x):
    y = torch.empty_like(x)
    torch.sin(x, out=y)
    return y


def test_out_is_written_to():
    keeps_the_law(into_its_like, numbers(4, 3))
    keeps_the_law(lambda x: torch.sin(x, out=torch.empty(3, dtype=D)), numbers(4, 3))


# --- what grad accepts --------------------------------------------------------------------------


def test_leaves_without_a_derivative_get_none():
    d = {"w": numbers(3), "i": torch.arange(3), "k": 2.0}
    f = lambda d: (d["w"] * d["i"] * d["k"]).sum()  # noqa: E731
    same(grad(f)(d), {"w": torch.arange(3) * 2.0 * torch.ones(3, dtype=D), "i": None, "k": None})


def test_arguments_are_named():
    f = lambda x, *, w: (x * w**2).sum()  # noqa: E731
    x, w = numbers(3), numbers(3, seed=6)
    same(grad(f, argnames="w")(x, w=w), 2 * x * w)


# --- subclasses ---------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A type of its own, and torch's own way to keep it."""


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Tagged, Counted])
def test_a_subclass_that_computes_as_a_tensor_has_the_loops_numbers(kind):
    f, x = lambda x: x.sin() + x[0], numbers(4, 3)
    mine, theirs = vmap(f)(x.as_subclass(kind)), loop(f)(x.as_subclass(kind))
    same(mine.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))
    assert type(mine) is type(theirs) is kind
    mine = vmap(grad(lambda x: f(x).sum()))(x.as_subclass(kind))
    same(mine.as_subclass(torch.Tensor), vmap(grad(lambda x: f(x).sum()))(x))


def test_a_subclass_that_is_captured_keeps_its_numbers():
    w = numbers(3).as_subclass(Tagged)
    mine = vmap(lambda x: x * w)(numbers(4, 3))
    assert type(mine) is Tagged
    same(mine.as_subclass(torch.Tensor), numbers(4, 3) * w.as_subclass(torch.Tensor))


class CosForSin(torch.Tensor):
    """Its sine is a cosine, and what is computed from it is of its kind."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.sin, torch.Tensor.sin):
            func = torch.cos
        return super().__torch_function__(func, types, args, kwargs or {})


class QuietCosForSin(CosForSin):
    """What is computed from it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.sin, torch.Tensor.sin):
            func = torch.cos
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_captured_subclass_says_what_its_calls_mean():
    c = torch.tensor([0.3, 0.7]).as_subclass(QuietCosForSin)
    w = torch.tensor([1.5, -0.5], requires_grad=True)
    xs = torch.arange(6.0).reshape(3, 2)

    def f(x):
        return torch.sin(c) * w + torch.mul(c, x)

    mine, theirs = vmap(f)(xs), loop(f)(xs)
    same(mine, theirs)
    same(torch.autograd.grad(mine.sum(), w), torch.autograd.grad(theirs.sum(), w))


def test_a_gradient_is_that_of_the_subclass():
    c = torch.tensor([0.3, 0.7]).as_subclass(CosForSin)
    found = grad(lambda x: torch.sin(x).sum())(c)
    same(torch.Tensor.as_subclass(found, torch.Tensor), -c.as_subclass(torch.Tensor).sin())


@pytest.mark.parametrize("kind", [CosForSin, QuietCosForSin])
@pytest.mark.parametrize(
    "call",
    [
        lambda c, xs, mapped: mapped(lambda x: torch.sin(c) + x)(xs),
        lambda c, xs, mapped: mapped(lambda x: torch.sin(c * x).sin())(xs),
        lambda c, xs, mapped: mapped(torch.sin)(xs.as_subclass(type(c))),
        lambda c, xs, mapped: mapped(lambda x: (x * c).sin().sum())(xs.as_subclass(type(c))),
        lambda c, xs, mapped: mapped(mapped(lambda x: torch.sin(x)))(xs.as_subclass(type(c))),
    ],
)
def test_examples_of_a_subclass_mean_what_it_says(call, kind):
    c = torch.tensor([0.3, 0.7]).as_subclass(kind)
    xs = torch.arange(6.0).reshape(3, 2)

    def looped(f):
        return lambda xs: torch.stack([f(xs[i]) for i in range(len(xs))])

    mine, theirs = call(c, xs, vmap), call(c, xs, looped)
    assert type(mine) is type(theirs)
    same(torch.Tensor.as_subclass(mine, torch.Tensor), theirs.as_subclass(torch.Tensor))


def test_forward_mode_asks_a_subclass_with_a_meaning_of_its_own():
    c = torch.tensor([0.3, 0.7]).as_subclass(CosForSin)
    value, slope = jvp(torch.sin, (c,), (torch.ones(2),))
    assert type(value) is CosForSin
    same(value.as_subclass(torch.Tensor), c.as_subclass(torch.Tensor).cos())
    same(slope, -c.as_subclass(torch.Tensor).sin())

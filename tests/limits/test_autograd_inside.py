"""torch.autograd inside every transform: each is the loop of plain torch.autograd.

Hooks are wrong on purpose, so that one that is skipped shows.
"""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional
from torch.autograd.graph import Node, register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from limits.words import FORWARD, OUTSIDE, WORDS, D, outcome
from oracle import difference

# --- torch.autograd.grad --------------------------------------------------------------------------


def own(a, w):
    """A leaf of the function's own, with the values of what it was given."""
    return (a * w).detach().clone().requires_grad_()


def recorded(a, w):
    """No leaf, and it requires grad whatever the transforms around do."""
    return a * w + torch.zeros(3, dtype=D, requires_grad=True)


def grad_of_own_leaf(a, w):
    p = own(a, w)
    (g,) = torch.autograd.grad((p**3 * a).sum(), p, create_graph=True)
    return g * w


def grad_twice(a, w):
    p = own(a, w)
    (g,) = torch.autograd.grad((p.exp() * a * w).sum(), p, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), p, create_graph=True)
    return h + g


def grad_between(a, w):
    h = recorded(a, w)
    (g,) = torch.autograd.grad((h.sin() * a).sum(), h, create_graph=True)
    return g * g


def grad_without_graph(a, w):
    h = recorded(a, w)
    (g,) = torch.autograd.grad((h.sin() * a).sum(), h, retain_graph=True)
    return g * a + h


def grad_unused(a, w):
    p, q = own(a, w), own(a, w)
    g, none = torch.autograd.grad((p * a).square().sum(), (p, q), allow_unused=True)
    assert none is None
    return g * a


def grad_materialized(a, w):
    p, q = own(a, w), own(a, w)
    y = (p * a).square().sum()
    g, zeros = torch.autograd.grad(y, (p, q), materialize_grads=True, create_graph=True)
    return g + zeros


def grad_outputs(a, w):
    p = own(a, w)
    ys = (p * a, p.sin() * w)
    (g,) = torch.autograd.grad(ys, p, grad_outputs=(a, w * a), create_graph=True)
    return g


def grad_of_cotangent(a, w):
    """The pull-back differentiated in its cotangent: a push-forward by two pull-backs."""
    p = own(a, w)
    v = torch.zeros(3, dtype=D, requires_grad=True)
    (g,) = torch.autograd.grad(p.sin(), p, v, create_graph=True)
    (push,) = torch.autograd.grad(g, v, a, create_graph=True)
    return push


def grads_retained(a, w):
    p = own(a, w)
    y = (p * p * a).sum()
    (g,) = torch.autograd.grad(y, p, retain_graph=True)
    (h,) = torch.autograd.grad(y, p)
    return g + h * a


def grad_batched(a, w):
    p = own(a, w)
    rows = torch.eye(3, dtype=D)
    (j,) = torch.autograd.grad(p.sin() * p.sum(), p, rows, is_grads_batched=True)
    return j @ a


def grad_set_enabled(a, w):
    with torch.no_grad():
        cut = a * w
        with torch.set_grad_enabled(True):
            p = cut.detach().requires_grad_()
            (g,) = torch.autograd.grad((p**3).sum(), p)
    with torch.enable_grad():
        return cut * a + g * a


def unreached(a, w):
    """What does not lie in the graph is an error, caught here."""
    p = own(a, w)
    try:
        torch.autograd.grad((a * w * p).sum(), own(a, w))
    except RuntimeError as error:
        assert "not have been used in the graph" in str(error)  # noqa: PT017 - in the function under test
        return a * w
    raise AssertionError


def freed(a, w):
    p = own(a, w)
    y = p.sin().sum()
    torch.autograd.grad(y, p)
    try:
        torch.autograd.grad(y, p)
    except RuntimeError as error:
        assert "backward through the graph a second time" in str(error)  # noqa: PT017 - in the function under test
        return a * w
    raise AssertionError


# --- backward, .grad ------------------------------------------------------------------------------


def backward(a, w):
    p = own(a, w)
    (p**3).sum().backward()
    return p.grad * a


def backward_twice(a, w):
    p = own(a, w)
    y = (p**3).sum()
    y.backward(retain_graph=True)
    y.backward()
    return p.grad * a


def backward_with_gradient(a, w):
    p = own(a, w)
    (p**3).backward(gradient=(a * w).detach())
    return p.grad * a


def backward_with_inputs(a, w):
    p, q = own(a, w), own(a, w)
    (p**3 * q).sum().backward(inputs=[q])
    assert p.grad is None
    return q.grad * a


def backward_with_graph(a, w):
    p = own(a, w)
    torch.autograd.backward((p**3).sum(), create_graph=True, inputs=[p])
    g = p.grad
    p.grad = None
    (h,) = torch.autograd.grad(g.sum(), p)
    return h * a


def backward_of_two(a, w):
    p, q = own(a, w), own(a, w)
    torch.autograd.backward([(p * q).sum(), (p**2).sum()], [None, torch.tensor(2.0, dtype=D)])
    return p.grad * a + q.grad


def grad_written(a, w):
    p = own(a, w)
    p.grad = torch.ones_like(p)
    (p * p).sum().backward()
    p.grad.mul_(2)
    g = p.grad
    p.grad = None
    (p * 3).sum().backward()
    return (g + p.grad) * a  # pyright: ignore[reportOperatorIssue]


def grad_zeroed(a, w):
    module = nn.Module()
    module.weight = nn.Parameter((a * w).detach().clone())
    for _ in range(2):
        module.zero_grad(set_to_none=False)
        (module.weight**2).sum().backward()
    return module.weight.grad * a


def retained(a, w):
    p = own(a, w)
    h = p.sin()
    h.retain_grad()
    assert h.retains_grad
    (h**3).sum().backward()
    return h.grad * a + p.grad


def requires_grad_switched(a, w):
    p = (a * w).detach()
    assert p.is_leaf
    p.requires_grad_()
    (p * p).sum().backward()
    g = p.grad
    p.requires_grad_(False)
    assert not (p * 2).requires_grad
    p.requires_grad = True
    return g * a + (p * a).detach() * w


def data_stepped(a, w):
    p = own(a, w)
    for _ in range(2):
        p.grad = None
        (p.sin() * p).sum().backward()
        p.data.sub_(p.grad, alpha=0.1)
    return p.detach() * a


def clipped(a, w):
    p = own(a, w)
    (p**3).sum().backward()
    norm = nn.utils.clip_grad_norm_([p], 0.5)
    nn.utils.clip_grad_value_([p], 0.3)
    return p.grad * a + norm


def left_on_captured(a, w):
    """A captured leaf is left with what one call of the function leaves there."""
    if w.requires_grad and w.is_leaf:
        (a.detach() * w).sin().sum().backward()
    return a * w


def left_twice_on_captured(a, w):
    if w.requires_grad and w.is_leaf:
        (a.detach() + w).backward(gradient=2 * a.detach())
        (a.detach() * w * w).sum().backward(inputs=[w])
    return a * w


# --- hooks ----------------------------------------------------------------------------------------


def hooked(a, w):
    h = a * w
    if h.requires_grad:
        h.register_hook(lambda g: g * 10)
    return h.sin()


def watched(a, w):
    h = a * w
    if h.requires_grad:
        h.register_hook(lambda g: None)
        h.register_hook(lambda g: g * 1)
    return h.sin()


def hook_with_captured(a, w):
    """What a hook does is the user's code as well: what it captures has a history there."""
    p = own(a, w)
    h = p * 2
    h.register_hook(lambda g: g * w + a)
    (g,) = torch.autograd.grad(h.sin().sum(), p, create_graph=True)
    return g


def hook_removed(a, w):
    p = own(a, w)
    handle = p.register_hook(lambda g: g * 10)
    p.register_hook(lambda g: g + 1)
    handle.remove()
    (p**2).sum().backward()
    return p.grad * a


def hook_after_accumulation(a, w):
    p = own(a, w)

    def step(leaf):
        with torch.no_grad():
            leaf -= 0.1 * leaf.grad
        leaf.grad = None

    p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        (p**2 * p.sin()).sum().backward()
    assert p.grad is None
    return p.detach() * a


def hook_on_nodes(a, w):
    h = a * w
    if isinstance(h.grad_fn, Node):
        h.grad_fn.register_hook(lambda gi, go: tuple(None if g is None else g * 3 for g in gi))
        h.grad_fn.register_prehook(lambda gs: tuple(g * 2 for g in gs))
    return h.sin()


def hook_on_several(a, w):
    p, q = own(a, w), own(a, w)
    seen = []
    register_multi_grad_hook((p, q), lambda gs: seen.extend(gs))
    (p.sin() * q * q).sum().backward()
    return (seen[0] + 2 * seen[1]) * a


def hook_on_any(a, w):
    p, q = own(a, w), own(a, w)
    seen = []
    register_multi_grad_hook((p, q), seen.append, mode="any")
    (p.sin() * q * q).sum().backward(inputs=[q])
    return sum(seen) * a


def hook_keeps(a, w):
    p = own(a, w)
    h, seen = p * 3, []
    h.register_hook(seen.append)
    (h**2).sum().backward()
    return seen[0] * a + p.grad


# --- torch.autograd.functional --------------------------------------------------------------------


def quartic(w):
    return lambda p: (p**3 * w).sum() * p.sin()


def summed(w):
    return lambda p: (p**3 * w).sum() * p.sin().sum()


def functional_jacobian(a, w):
    return functional.jacobian(quartic(w), recorded(a, w), create_graph=True) @ a


def functional_jacobian_cut(a, w):
    return functional.jacobian(quartic(w), (a * w).detach()) @ a


def functional_jacobian_of_two(a, w):
    j = functional.jacobian(
        lambda p, q: p.sin() * q, (recorded(a, w), recorded(a, w + 1)), create_graph=True
    )
    return j[0] @ a + j[1] @ w


def functional_hessian(a, w):
    return functional.hessian(summed(w), recorded(a, w), create_graph=True) @ a


def functional_vjp(a, w):
    y, g = functional.vjp(quartic(w), recorded(a, w), recorded(a, 1), create_graph=True)
    return y + g


def functional_jvp(a, w):
    y, t = functional.jvp(quartic(w), recorded(a, w), recorded(a, 1), create_graph=True)
    return y * t  # pyright: ignore[reportOperatorIssue]


def functional_hvp(a, w):
    return functional.hvp(summed(w), recorded(a, w), recorded(a, 1), create_graph=True)[1]


def functional_vhp(a, w):
    return functional.vhp(summed(w), recorded(a, w), recorded(a, 1), create_graph=True)[1]


def functional_jacobian_vectorized(a, w):
    return functional.jacobian(quartic(w), (a * w).detach(), vectorize=True) @ a


def functional_jacobian_forward(a, w):
    j = functional.jacobian(quartic(w), (a * w).detach(), vectorize=True, strategy="forward-mode")
    return j @ a


def functional_hessian_vectorized(a, w):
    return functional.hessian(summed(w), (a * w).detach(), vectorize=True) @ a


# --- forward mode ---------------------------------------------------------------------------------


def dual(a, w):
    with forward_ad.dual_level():
        y = forward_ad.make_dual(a, w * 1).sin() * a * w
        primal, tangent = forward_ad.unpack_dual(y)
    return primal + tangent  # pyright: ignore[reportOperatorIssue]


def dual_over_backward(a, w):
    """Forward over reverse, both torch's own: a Hessian times a vector."""
    with forward_ad.dual_level():
        p = forward_ad.make_dual(own(a, w), (a * w).detach())
        (g,) = torch.autograd.grad((p.sin() * p).sum(), p, create_graph=True)
        return forward_ad.unpack_dual(g).tangent.detach() * a


# --- saved tensors, checkpoints -------------------------------------------------------------------


def packed(a, w):
    with saved_tensors_hooks(lambda t: t * 2, lambda t: t * 3):
        h = (a * w).sin() * a
    return h


def packed_twice(a, w):
    with saved_tensors_hooks(lambda t: t * 2, lambda t: t * 3):
        h = (a * w).sin()
        with saved_tensors_hooks(lambda t: (t, 5), lambda pair: pair[0] * pair[1]):
            h = h * h.exp()
    return h


def packed_away(a, w):
    with saved_tensors_hooks(lambda t: t * 2, lambda t: t * 0.5):
        return (a * w).sin().exp() * a


def on_cpu(a, w):
    with save_on_cpu():
        return (a * w).sin() * a.exp()


def checkpointed(a, w):
    return checkpoint(lambda a: (a * w).sin() * w, a, use_reentrant=False)


def checkpointed_twice(a, w):
    def inner(h):
        return h.sin() * w

    def outer(h):
        return checkpoint(inner, h * a, use_reentrant=False).exp()

    return checkpoint(outer, a, use_reentrant=False)


def checkpointed_reentrant(a, w):
    p = own(a, w)
    y = checkpoint(lambda p: (p * w).sin() * p, p, use_reentrant=True)
    y.sum().backward()
    return p.grad * a


def checkpointed_and_trained(a, w):
    p = own(a, w)
    checkpoint(lambda p: (p * w.detach()).sin() * p, p, use_reentrant=False).sum().backward()
    return p.grad * a


# --- modules --------------------------------------------------------------------------------------


def a_module():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for n, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-1, 1 + n, p.numel(), dtype=D).reshape(p.shape))
    return module.requires_grad_(False)


MODULE = a_module()


def module_hooked(a, w):
    handles = [
        MODULE[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 10 + go[0],)),
        MODULE[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,)),
    ]
    y = MODULE(a * w)
    for handle in handles:
        handle.remove()
    return y


def module_watched(a, w):
    seen = []
    handle = MODULE[1].register_full_backward_hook(lambda m, gi, go: seen.append(go))
    y = MODULE(a * w)
    handle.remove()
    return y


def module_trained(a, w):
    module = copy.deepcopy(MODULE).requires_grad_()
    seen = []
    module[1].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0]))
    module((a * w).detach()[None]).sin().sum().backward()
    return module[0].weight.grad @ a + seen[0][0]


# --- modes ----------------------------------------------------------------------------------------


def anomalous(a, w):
    with torch.autograd.detect_anomaly(check_nan=False):
        p = own(a, w)
        (p**3 * p.sin()).sum().backward()
    return p.grad * a


def inferred(a, w):
    with torch.inference_mode():
        cut = a * w
    return cut * 2


def inferred_off(a, w):
    with torch.inference_mode(), torch.inference_mode(False):
        p = torch.ones(3, dtype=D, requires_grad=True)
        (p**3).sum().backward()
    return p.grad * a * w


def set_off(a, w):
    torch.set_grad_enabled(False)
    try:
        cut = a * w
    finally:
        torch.set_grad_enabled(True)
    return cut * a * w


@torch.no_grad()
def cut_by_decorator(a):
    return a.exp()


def decorated(a, w):
    return cut_by_decorator(a * w) * a


CASES = {
    f.__name__: f
    for f in (
        grad_of_own_leaf, grad_twice, grad_between, grad_without_graph, grad_unused,
        grad_materialized, grad_outputs, grad_of_cotangent, grads_retained, grad_batched,
        grad_set_enabled, unreached, freed, backward, backward_twice, backward_with_gradient,
        backward_with_inputs, backward_with_graph, backward_of_two, grad_written, grad_zeroed,
        retained, requires_grad_switched, data_stepped, clipped,
        left_on_captured, left_twice_on_captured, watched, hook_with_captured,
        hook_removed, hook_after_accumulation, hook_on_several, hook_on_any, hook_keeps,
        functional_jacobian, functional_jacobian_cut, functional_jacobian_of_two,
        functional_hessian, functional_vjp, functional_jvp, functional_hvp, functional_vhp,
        functional_jacobian_vectorized, functional_jacobian_forward,
        functional_hessian_vectorized, dual, dual_over_backward, packed_away, on_cpu,
        checkpointed, checkpointed_twice, checkpointed_reentrant, checkpointed_and_trained,
        module_watched, module_trained, anomalous, inferred, inferred_off, set_off, decorated,
    )
}  # fmt: skip

# Their hooks change the derivative of reverse mode, which forward mode does not hear of.
CHANGED = {f.__name__: f for f in (hooked, hook_on_nodes, packed, packed_twice, module_hooked)}
REVERSE = [word for word in WORDS if not FORWARD & {*word.split()}]

# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "SGD with Nesterov": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "Adam with amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "Adam, foreach": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5, foreach=True),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
}


def trained(make, schedule=None):
    def f(a, w):
        p = own(a, w)
        q = own(a, w)[:2].detach().requires_grad_()
        optimizer = make([p, q])
        scheduler = schedule(optimizer) if schedule else None
        for _ in range(3):
            optimizer.zero_grad()
            (p.sin() * p).sum().add((q * q * p[:2]).sum()).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
        return torch.cat([p, q]).detach()[:3] * a + q.detach().sum()

    return f


def closure_of(a, w):
    p = own(a, w)
    optimizer = torch.optim.SGD([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p.sin() * p).sum()
        loss.backward()
        return loss

    return optimizer.step(closure).detach() * a + p.detach()


def groups_of(a, w):
    p, q = own(a, w), own(a, w)
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.5}, {"params": [q]}], lr=0.1)
    (p.sin() * q).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return (p * q).detach() * a + p.grad


TRAINED = {
    **{name: trained(make) for name, make in OPTIMIZERS.items()},
    **{
        name: trained(OPTIMIZERS["SGD with momentum"], schedule)
        for name, schedule in {
            "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
            "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3),
            "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 5),
            "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
        }.items()
    },
    "a closure": closure_of,
    "groups": groups_of,
}


def check(word, f, outside):
    there = WORDS[word]
    mine = outcome(there.ours, f, there.shape, outside)
    assert difference(mine, outcome(there.truth, f, there.shape, outside)) is None


@pytest.mark.sweep(8)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_autograd_inside_is_the_loops(case, word):
    for outside in OUTSIDE:
        if not (case in LOOP_REFUSES and outside == "a non-leaf"):
            check(word, CASES[case], outside)


# A reentrant checkpoint goes back through what its function captured, once for each example.
LOOP_REFUSES = {"checkpointed_reentrant"}


@pytest.mark.parametrize("word", REVERSE)
@pytest.mark.parametrize("case", CHANGED)
def test_hooks_that_change_a_derivative_change_ours(case, word):
    for outside in OUTSIDE:
        check(word, CHANGED[case], outside)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.filterwarnings("ignore:vmap. aten._fused_:UserWarning")
def test_an_optimizer_inside_has_a_state_for_each_example(case, word):
    check(word, TRAINED[case], "a leaf")

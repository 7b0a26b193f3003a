"""A result has history where the same derivative by torch.autograd leads to a tensor from outside.

A word is a nesting of transforms of a function of one to three arguments, each a number or a tree
of two. The truth is the same word of ``torch.autograd.grad``, in which each call differentiates
with respect to a variable of its own: such a variable is nobody's when the call is over, so what
leads to nothing else has no history.

Run as a module, this compares every word of up to three transforms.
"""

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import forall
from forall import grad, grad_and_value, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from forall._compat.autograd_graph import iterate_nodes
from oracle import difference

D = torch.float64
SCALES = (1.0, 0.7)


# --- functions of numbers --------------------------------------------------------------------


def entangled(*xs: Any) -> torch.Tensor:
    """Each derivative of it depends on each argument."""
    product = torch.ones((), dtype=D)
    for i, x in enumerate(tree_leaves(xs)):
        product = product * (x + 0.1 * i)
    return product.sin() * product.exp()


def of_low_degree(*xs: Any) -> torch.Tensor:
    """Some derivatives of it do not depend on some arguments."""
    leaves = tree_leaves(xs)
    value = leaves[0] * leaves[0]
    for i, x in enumerate(leaves[1:]):
        value = value * x if i % 2 == 0 else value + x**3
    return value


FUNCTIONS = {"entangled": entangled, "of low degree": of_low_degree}


# --- words ------------------------------------------------------------------------------------


class Letter(NamedTuple):
    verb: str
    argnums: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.verb + "".join(map(str, self.argnums))


def total(tree: Any) -> torch.Tensor:
    return sum(
        ((i + 1) * x.sum() for i, x in enumerate(tree_leaves(tree))), torch.zeros((), dtype=D)
    )


def moved(f: Callable, argnums: tuple, args: tuple) -> tuple[Callable, tuple]:
    """The function of the arguments at ``argnums`` alone, and these."""

    def of_some(*some: Any) -> Any:
        given = dict(zip(argnums, some, strict=True))
        return f(*(given.get(i, x) for i, x in enumerate(args)))

    return of_some, tuple(args[i] for i in argnums)


def directions(tree: Any) -> Any:
    return tree_map(lambda x: torch.full_like(x.detach(), 0.5), tree)


def by_vjp(f: Callable, argnums: tuple) -> Callable:
    def pulled(*args: Any) -> Any:
        y, pull = vjp(*_call(moved(f, argnums, args)))
        return pull(torch.ones_like(y))

    return pulled


def by_jvp(f: Callable, argnums: tuple) -> Callable:
    def pushed(*args: Any) -> Any:
        of_some, some = moved(f, argnums, args)
        return jvp(of_some, some, directions(some))[1]

    return pushed


def by_linearize(f: Callable, argnums: tuple) -> Callable:
    def pushed(*args: Any) -> Any:
        of_some, some = moved(f, argnums, args)
        return linearize(of_some, *some)[1](*directions(some))

    return pushed


def _call(pair: tuple[Callable, tuple]) -> tuple:
    return pair[0], *pair[1]


def mapped(f: Callable, _: tuple) -> Callable:
    def of_all(*args: Any) -> Any:
        return vmap(f)(*tree_map(lambda x: torch.stack([x * s for s in SCALES]), args))

    return of_all


OURS = {
    "grad": grad,
    "grad_and_value": grad_and_value,
    "vjp": by_vjp,
    "jvp": by_jvp,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "linearize": by_linearize,
    "vmap": mapped,
}
FORWARD = {"jvp", "jacfwd", "linearize"}


def true_gradient(f: Callable, argnums: tuple, args: tuple) -> tuple[Any, Any]:
    """The gradients of a scalar function by torch.autograd, as a tuple of trees; its value."""

    def variable(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()

    some = tree_map(variable, [args[i] for i in argnums])
    given = dict(zip(argnums, some, strict=True))
    y = f(*(given.get(i, x) for i, x in enumerate(args)))
    leaves = tree_leaves(some)
    if not y.requires_grad:
        return tree_map(torch.zeros_like, some), y
    found = iter(torch.autograd.grad(y, leaves, create_graph=True, materialize_grads=True))
    return tree_map(lambda _: next(found), some), y


def truth(letter: Letter, f: Callable) -> Callable:
    if letter.verb == "vmap":

        def looped(*args: Any) -> Any:
            rows = [f(*tree_map(lambda x, s=s: x * s, args)) for s in SCALES]
            return tree_map(lambda *xs: torch.stack(xs), *rows)

        return looped

    def derivative(*args: Any) -> Any:
        found, y = true_gradient(f, letter.argnums, args)
        if letter.verb in ("jvp", "linearize"):
            some = [args[i] for i in letter.argnums]
            pairs = zip(tree_leaves(found), tree_leaves(directions(some)), strict=True)
            return sum((g * t for g, t in pairs), torch.zeros((), dtype=D))
        return (found, y) if letter.verb == "grad_and_value" else found

    return derivative


def spelt(word: tuple[Letter, ...], f: Callable, *, ours: bool) -> Callable:
    """The word's transforms around ``f``, the last letter innermost."""
    for i, letter in enumerate(reversed(word)):
        inner = f if i == 0 else summed(f)
        f = OURS[letter.verb](inner, letter.argnums) if ours else truth(letter, inner)
    return f


def summed(f: Callable) -> Callable:
    return lambda *args: total(f(*args))


# --- the law ----------------------------------------------------------------------------------


def reached(t: torch.Tensor) -> set[int]:
    """The leaves that a tensor's graph leads to."""
    if t.requires_grad and t.grad_fn is None:
        return {id(t)}
    return {id(n.variable) for n in iterate_nodes([t]) if type(n).__name__ == "AccumulateGrad"}


def arguments(kinds: tuple[str, ...]) -> tuple:
    """Numbers, or trees of two; those of a kind with a star require grad."""
    fill = itertools.count()

    def number(kind: str) -> torch.Tensor:
        return torch.tensor(0.4 + 0.3 * next(fill), dtype=D).requires_grad_("*" in kind)

    return tuple(
        {"u": number(kind), "v": number(kind)} if "tree" in kind else number(kind) for kind in kinds
    )


def check(word: tuple[Letter, ...], name: str, kinds: tuple[str, ...], replay: bool) -> None:
    calls = 4 if replay else 1
    forall.config.replay = replay
    mine = spelt(word, FUNCTIONS[name], ours=True)
    true = spelt(word, FUNCTIONS[name], ours=False)
    args = arguments(kinds)
    outside = [x for x in tree_leaves(args) if x.requires_grad]
    expected = tree_leaves(true(*args))
    for _ in range(calls):
        found = tree_leaves(mine(*args))
        bare = [x.detach().reshape(-1) for x in found], [x.detach().reshape(-1) for x in expected]
        assert difference(*bare) is None, difference(*bare)
        for x, y in zip(found, expected, strict=True):
            check_history(x, y, outside, exact=not FORWARD & {letter.verb for letter in word})
    if not outside:
        jitted = tree_leaves(jit(mine)(*args))
        assert not any(x.requires_grad for x in jitted)


def check_history(x: torch.Tensor, y: torch.Tensor, outside: list, exact: bool) -> None:
    """``x`` has history where it leads outside, and its derivatives there are those of ``y``.

    Forward mode computes with other operators, so a derivative that is zero may lead there or not.
    """
    ids = {*map(id, outside)}
    assert x.requires_grad == bool(reached(x) & ids), "history that leads to nothing outside"
    if exact:
        assert x.requires_grad == bool(reached(y) & ids)
    assert not x.requires_grad or x.grad_fn is not None
    if not ids:
        return
    pair = []
    for t in (x, y):
        leads = bool(reached(t) & ids)
        given = (
            torch.autograd.grad(t.sum(), outside, retain_graph=True, materialize_grads=True)
            if leads
            else tuple(map(torch.zeros_like, outside))
        )
        pair.append(given)
    found = difference(*pair)
    assert found is None, found


def letters(n: int) -> list[Letter]:
    """Of ``n`` arguments: each verb, for each choice of arguments in any order."""
    choices = [c for k in range(1, n + 1) for c in itertools.permutations(range(n), k)]
    return [Letter("vmap"), *(Letter(v, c) for v in OURS if v != "vmap" for c in choices)]


def words(n: int, length: int) -> list[tuple[Letter, ...]]:
    found = itertools.product(letters(n), repeat=length)
    return [w for w in found if any(letter.verb != "vmap" for letter in w)]


KINDS = ("number", "number*", "tree", "tree*")


def some(count: int) -> list[tuple]:
    """A sample of words, with a function, kinds of arguments and whether calls are replayed."""
    r = random.Random(5)
    found = []
    for i in range(count):
        n = 1 + i % 3
        word = tuple(r.choice(letters(n)) for _ in range(r.choice((2, 3))))
        plain = r.random() < 0.6
        kinds = tuple(r.choice(KINDS[::2] if plain else KINDS) for _ in range(n))
        found.append((word, r.choice([*FUNCTIONS]), kinds, r.random() < 0.3))
    return found


def shown(case: tuple) -> str:
    word, name, kinds, replay = case
    return f"{'.'.join(map(str, word))} {name} {','.join(kinds)}{' replayed' if replay else ''}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", some(140), ids=shown)
def test_a_result_has_history_where_the_loops_leads_outside(case):
    check(*case)


class Cube(torch.autograd.Function):
    """A Function whose tangent is made of its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


class Derived(torch.autograd.Function):
    """A Function whose backward takes a derivative itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * x * y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        (g,) = gradients
        return grad(lambda x, y: (x * x * y * g).sum(), (0, 1))(*ctx.saved_tensors)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (3,))


def attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(x[None, None] * y, y[None, None], x[None, None])


def hooked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * x * y
    if h.requires_grad:
        h.register_hook(lambda g: g * y)
    return h


def once_more(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    again: Any = torch.utils.checkpoint.checkpoint
    return again(lambda x, y: (x * x * y).sin(), x, y, use_reentrant=False)


ODD = {
    "function": lambda x, y: (Cube.apply(x) * y).sum(),  # pyright: ignore[reportOptionalOperand]
    "function of both": lambda x, y: Derived.apply(x, y).sin().sum(),  # pyright: ignore[reportOptionalMemberAccess]
    "layer norm": lambda x, y: normalised(x * y).pow(3).sum(),
    "attention": lambda x, y: attended(x, y).square().sum(),
    "hook": lambda x, y: hooked(x, y).sum(),
    "checkpoint": lambda x, y: once_more(x, y).sum(),
    "eigenvalues": lambda x, y: torch.linalg.eigvalsh(x.outer(x) + y.diag()).square().sum(),
}

X, Y = torch.tensor([0.3, -0.7, 1.1], dtype=D), torch.tensor([1.2, 0.4, -0.5], dtype=D)
ONES = torch.ones(3, dtype=D)


def mixed(f: Callable, g: Callable) -> dict[str, Callable]:
    """Second derivatives of ``f``, whose gradient in the first argument is summed by ``g``."""

    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return g(grad(f)(x, y))

    def slope(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return jvp(lambda x: f(x, y), (x,), (ONES,))[1]

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple:
        return torch.stack([x, x * 2]), torch.stack([y, y * 2])

    return {
        "grad of grad": grad(gradient, 1),
        "grad of jvp": grad(slope, 1),
        "jvp of grad": lambda x, y: jvp(lambda y: grad(f)(x, y), (y,), (ONES,)),
        "linearize of grad": lambda x, y: linearize(lambda y: grad(f)(x, y), y)[1](ONES),
        "jacfwd of jacrev": jacfwd(jacrev(f), 1),
        "jacrev of jacrev": jacrev(jacrev(f), 1),
        "jacrev of jacfwd": jacrev(jacfwd(f), 1),
        "hessian": forall.hessian(f, (0, 1)),
        "vmap of grad of grad": lambda x, y: vmap(grad(gradient, 1))(*both(x, y)),
        "grad of vmap of grad": grad(lambda x, y: vmap(gradient)(*both(x, y)).sum(), 1),
        "grad of vmap of what is shared": grad(
            lambda x, y: vmap(gradient, (0, None))(both(x, y)[0], y).sum(), 1
        ),
    }


@pytest.mark.parametrize("name", ODD)
def test_a_second_derivative_of_plain_tensors_has_no_history(name):
    for word, derivative in mixed(ODD[name], lambda g: g.sin().sum()).items():
        for _ in range(3):  # the third is replayed, where it can be
            for t in tree_leaves(derivative(X, Y)):
                assert not t.requires_grad, word


def test_a_step_along_a_penalised_gradient_makes_no_longer_graphs():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    p = {k: v.detach() for k, v in net.double().named_parameters()}

    def value(p: dict, x: torch.Tensor) -> torch.Tensor:
        return forall.functional_call(net, p, (x,)).sum()

    penalty = grad(lambda p, x: grad(value, 1)(p, x).square().sum())
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    for _ in range(5):
        x = X.clone().requires_grad_()
        y = torch.func.functional_call(net, leaves, (x,)).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        found = torch.autograd.grad(
            slope.square().sum(), [*leaves.values()], materialize_grads=True
        )
        step = penalty(p, X)
        assert difference(step, dict(zip(p, found, strict=True))) is None
        p = {k: v - 0.1 * step[k] for k, v in p.items()}
        assert not any(v.requires_grad for v in p.values())
        pairs = zip(leaves.items(), found, strict=True)
        leaves = {k: (v - 0.1 * g).detach().requires_grad_() for (k, v), g in pairs}


def test_a_pull_back_from_before_the_call_has_no_history_of_its_own():
    for f in (lambda x: x.sin() * Y, lambda x: grad(lambda y: (y * y * Y * x).sum())(X)):
        _, pull = vjp(f, X)
        slope = grad(lambda c, pull=pull: pull(c)[0].sin().sum())(ONES)
        assert not slope.requires_grad
        assert slope.numpy() is not None
        assert not jacrev(lambda c, pull=pull: pull(c)[0].sin())(ONES).requires_grad


def test_of_several_results_of_a_pull_back_those_that_lead_outside_have_history():
    _, pull = vjp(lambda x, y: (x.sin() * Y, y.cos()), X, X)
    first, second = pull((ONES.clone().requires_grad_(), ONES))
    assert first.requires_grad
    assert not second.requires_grad


def test_a_variable_that_the_user_has_kept_is_one_from_outside():
    kept: list[torch.Tensor] = []
    grad(lambda x: (kept.append(x), x.sin().sum())[1])(X)
    found = grad(lambda y: (y * kept[0]).sum())(Y)
    assert difference(torch.autograd.grad(found.sum(), kept[0])[0], ONES) is None


def main(seed: int, most: int) -> None:
    """Compare words in a random order, every one of them if there is time."""
    r = random.Random(seed)
    every = [(n, w) for n in (1, 2, 3) for k in (1, 2, 3) for w in words(n, k)]
    r.shuffle(every)
    failed = 0
    for i, (n, word) in enumerate(every[:most]):
        kinds = tuple(r.choice(KINDS) for _ in range(n))
        case = word, r.choice([*FUNCTIONS]), kinds, r.random() < 0.3
        try:
            check(*case)
        except Exception as error:
            failed += 1
            print(shown(case), type(error).__name__, str(error)[:300], flush=True)
        if i % 100 == 99:
            print(i + 1, "of", len(every), "failed", failed, flush=True)


if __name__ == "__main__":
    main(*(int(a) for a in (*sys.argv[1:], 0, 10**9)[:2]))

"""At degenerate points a call, a mapped, a recorded and a replayed one agree: numbers and errors.

Torch's formulas look at values (is any zero, is a matrix singular) and take another way where they
meet a mode or a subclass. (Determinants have a law of their own.) Run as a module, this looks at
every function, point and entry of op_db.
"""

import random
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from draws import make_generator
from forall import config, grad, jit, vmap
from laws.test_second_derivatives_agree import OPS, problems

D = torch.float64

W = torch.arange(9.0, dtype=D).view(3, 3).cos()
A = torch.randn(3, 3, dtype=D, generator=make_generator(0))
FIRST = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]])
ZEROS = torch.tensor([[0.0, 1, 1], [1, 0, 1], [1, 1, 1]], dtype=D)

# Functions of a matrix, each of which torch derives by what it finds in the numbers.
FUNCTIONS = {
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, W),
    "lstsq": lambda x: torch.linalg.lstsq(x, W)[0],
    "pinv": torch.linalg.pinv,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T),
    "qr": lambda x: torch.linalg.qr(x)[1].square(),
    "matrix_exp": torch.linalg.matrix_exp,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, 3),
    "eigvals": lambda x: torch.linalg.eig(x)[0].abs(),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.T),
    "eigenvectors": lambda x: torch.linalg.eigh(x + x.T)[1].square(),
    "svdvals": torch.linalg.svdvals,
    "singular vectors": lambda x: torch.linalg.svd(x)[0].square(),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "spectral norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=1),
    "largest entry": lambda x: x.norm(float("inf")),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, W),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "std": lambda x: x.std(1),
    "a variable power": lambda x: x.abs() ** (x + 1),
    "power 0": lambda x: x**0,
    "power 1.5": lambda x: x**1.5,
    "square root": lambda x: x.abs().sqrt(),
    "atan2": lambda x: torch.atan2(x, x * 2),
    "hypot": lambda x: torch.hypot(x, x * W),
    "sinc": torch.sinc,
    "xlogy": lambda x: torch.xlogy(x, x.abs()),
    "logsumexp": lambda x: x.logsumexp(1),
    "logaddexp": lambda x: torch.logaddexp(x, x.T),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1)[0],
    "median": lambda x: x.median(),
    "sort": lambda x: x.sort(1)[0],
    "masked_fill": lambda x: x.masked_fill(x == 0, 2) * x,
    "remainder": lambda x: torch.remainder(x, W),
    "scatter_reduce": lambda x: torch.zeros(3, 3, dtype=D).scatter_reduce(
        0, FIRST, x, "prod", include_self=False
    ),
    "masked.prod": lambda x: torch.masked.prod(x, mask=x != 1),
}
MATRICES = {
    "any": A,
    "zeros": torch.zeros_like(A),
    "ones": torch.ones_like(A),
    "the identity": torch.eye(3, dtype=D),
    "a column of zeros": A.index_fill(1, torch.tensor([0]), 0),
    "two zeros": A * ZEROS,
    "of rank one": A[:, :1] @ A[:1],
    "two equal rows": A[[0, 0, 1]],
}
POINTS = {
    "as it is": lambda x: x,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "one zero": lambda x: x.index_fill(-1, torch.tensor([0]), 0) if x.numel() and x.dim() else x,
}


def by_autograd(f, order):
    def slope(*xs):
        xs = [x.detach().clone().requires_grad_() for x in xs]
        gs = torch.autograd.grad(f(*xs), xs, create_graph=order == 2, allow_unused=True)
        gs = [torch.zeros_like(x) if g is None else g for g, x in zip(gs, xs, strict=True)]
        if order == 2:
            terms = zip(map(_real, gs), map(_real, xs), strict=True)
            total = sum((g * x.cos().detach()).sum() for g, x in terms)
            if not total.requires_grad:
                return [torch.zeros_like(x) for x in xs]
            gs = torch.autograd.grad(total, xs, allow_unused=True)
            gs = [torch.zeros_like(x) if g is None else g for g, x in zip(gs, xs, strict=True)]
        return [g.detach() for g in gs]

    return slope


def _real(x):
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def slope(f, n, order):
    first = grad(f, argnums=tuple(range(n)))
    if order == 1:
        return first

    def along(*xs):
        weights = [_real(x).cos() for x in xs]
        return lambda *ys: sum(
            (_real(g) * w.detach()).sum() for g, w in zip(first(*ys), weights, strict=True)
        )

    return lambda *xs: grad(along(*(x.detach() for x in xs)), argnums=tuple(range(n)))(*xs)


def outcome(f, *xs):
    try:
        return list(f(*xs))
    except Exception as error:
        return type(error)


def stacked(f):
    return lambda *xs: [y[0] for y in vmap(f)(*(torch.stack([x, x]) for x in xs))]


def repeated(f):
    def last(*xs):
        return [f(*xs) for _ in range(5)][-1]

    return last


WAYS = {"grad": lambda f: f, "vmap": stacked, "jit": lambda f: repeated(jit(f)), "replay": repeated}


def disagreements(f, xs, orders=(1,)):
    for order in orders:
        truth = outcome(by_autograd(f, order), *xs)
        for name, way in WAYS.items():
            found = outcome(way(slope(f, len(xs), order)), *xs)
            if isinstance(truth, type) or isinstance(found, type):
                if found is not truth:
                    yield order, name, truth, found
            elif not all(
                torch.allclose(a, b, 1e-6, 1e-7, equal_nan=True)
                for a, b in zip(found, truth, strict=True)
            ):
                yield order, name, truth, found


def check(name, orders=(1,), count=1):
    for f, xs in problems(OPS[name], count):
        for point, at in POINTS.items():
            moved = tuple(at(x) for x in xs)
            for found in disagreements(f, moved, orders):
                yield point, *found


def weighted(f):
    def total(x):
        y = f(x)
        return (y * torch.arange(1.0, y.numel() + 1, dtype=D).view(y.shape).cos()).sum()

    return total


def place(name):
    """Three of the matrices, others for each function."""
    drawn = random.Random(name).sample(sorted(MATRICES), 3)
    return [MATRICES[k] for k in drawn]


# Where eigenvalues are equal, or a matrix is singular, but for a rounding error, their derivatives
# are that error's inverse, or any vectors of a plane: torch's own then differ between processors.
OF_DISTINCT = {"inv", "eigenvectors", "singular vectors"}


def is_decided_by_rounding(f, x, order):
    """Whether torch's own derivative changes as the last bits of its argument do."""
    torch.manual_seed(0)
    bits = 1 + 2.0**-52 * torch.randint(-2, 3, x.shape).to(D)
    found = [outcome(by_autograd(f, order), y) for y in (x, x * bits)]
    if any(isinstance(y, type) for y in found):
        return found[0] is not found[1]
    return not all(torch.allclose(a, b, 1e-6, 1e-7) for a, b in zip(*found, strict=True))


RANDOM = ("bernoulli", "cauchy", "dropout", "exponential", "fractional", "geometric")
RANDOM += ("log_normal", "multinomial", "normal", "pca_lowrank", "rrelu", "svd_lowrank", "uniform")
SURE = sorted(name for name in OPS if not any(word in name for word in RANDOM))
DRAWN = sorted(random.Random(1).sample(SURE, 12))


@pytest.mark.sweep(2)
@pytest.mark.counted
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_derivatives_are_those_of_plain_torch_in_each_way(name, monkeypatch):
    monkeypatch.setattr(config, "patience", 0)
    f = weighted(FUNCTIONS[name])
    for x in place(name):
        for order in (1, 2):
            if name not in OF_DISTINCT or not is_decided_by_rounding(f, x, order):
                assert not list(disagreements(f, (x,), (order,)))


@pytest.mark.counted
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN)
def test_gradients_of_an_operators_samples_are_those_of_plain_torch(name, monkeypatch):
    monkeypatch.setattr(config, "patience", 0)
    assert not list(check(name))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    config.patience = 0
    for name in sys.argv[1:] or FUNCTIONS:
        for at, x in MATRICES.items() if name in FUNCTIONS else ():
            for found in disagreements(weighted(FUNCTIONS[name]), (x,), (1, 2)):
                print(name, at, *found, flush=True)
    for name in sys.argv[1:] or SURE:
        try:
            for found in check(name, (1, 2), 2) if name in SURE else ():
                print(name, *(str(x)[:150].replace("\n", " ") for x in found), flush=True)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:200].replace("\n", " "), flush=True)

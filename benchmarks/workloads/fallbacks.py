"""Operators that torch.func calls once per example, in 64 examples: a row for each of them.

`ROWS` maps what is called to a function of one example and the examples' shapes. The loop over the
examples stands third, in place of a program by hand: it says what mapping is worth at all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from registry import FALLBACKS, REPLAYED, Contestants, contest, looped, workload

EXAMPLES = 64
aten = torch.ops.aten
special = torch.special

Make = Callable[[], torch.Tensor]


class Row(NamedTuple):
    """A function of one example, how to make the stacks of its arguments, and what is taken of it.

    Attributes:
        of: its value, its gradient in the first argument, or its tangent along the arguments.
    """

    f: Callable
    stacks: tuple[Make, ...]
    of: str = "value"


def normal(*shape: int) -> Make:
    return lambda: torch.randn(EXAMPLES, *shape)


def uniform(*shape: int) -> Make:
    return lambda: torch.rand(EXAMPLES, *shape)


def whole(high: int, *shape: int) -> Make:
    return lambda: torch.randint(high, (EXAMPLES, *shape))


def order(n: int) -> Make:
    return lambda: torch.rand(EXAMPLES, n).argsort(1)


def signs(*shape: int) -> Make:
    return lambda: torch.randint(2, (EXAMPLES, *shape)) * 2.0 - 1


def halves(*shape: int) -> Make:
    """Masks half of which is true, in every example alike many."""
    return lambda: torch.rand(EXAMPLES, *shape).flatten(1).argsort(1).view(-1, *shape) % 2 == 0


def definite(n: int) -> Make:
    def make() -> torch.Tensor:
        a = torch.randn(EXAMPLES, n, n)
        return a @ a.mT + torch.eye(n)

    return make


def edges(n: int) -> Make:
    return lambda: torch.randn(EXAMPLES, n).sort(1)[0]


def made(f: Callable[[], torch.Tensor]) -> Make:
    """One tensor for all examples, in a stack."""
    return lambda: f().expand(EXAMPLES, *f().shape).clone()


def both(name: str, f: Callable, *stacks: Make) -> dict[str, Row]:
    """The value, and the gradient."""
    return {name: Row(f, stacks), f"{name}-grad": Row(f, stacks, "gradient")}


def ctc(x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([12, 12]), torch.tensor([4, 3])
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2, 3, 1], [2, 2, 4, 1]]), *lengths)


SIGNS = torch.tensor([1.0, -1.0]).repeat(8)
BAGS = torch.tensor([0, 3, 5])
LENGTHS = torch.tensor([3, 1, 4])
WINDOW = torch.hann_window(16)

LOSSES = {
    **both("ctc_loss", ctc, normal(12, 2, 6)),
    "kl_div": Row(partial(F.kl_div, reduction="sum"), (normal(8, 4), uniform(8, 4))),
    "margin_ranking_loss": Row(F.margin_ranking_loss, (normal(16), normal(16), signs(16))),
    **both("multi_margin_loss", F.multi_margin_loss, normal(8, 5), whole(5, 8)),
    **both("multilabel_margin_loss", F.multilabel_margin_loss, normal(8, 5), whole(5, 8, 5)),
    **both("soft_margin_loss", F.soft_margin_loss, normal(16), signs(16)),
    "soft_margin_loss-jvp": Row(lambda x: F.soft_margin_loss(x, SIGNS), (normal(16),), "tangent"),
    "triplet_margin_loss": Row(F.triplet_margin_loss, (normal(8, 4), normal(8, 4), normal(8, 4))),
}
TABLES = {
    **both("embedding", lambda w, i: F.embedding(i, w), normal(10, 8), whole(10, 8)),
    **both(
        "embedding_bag",
        lambda w, i: F.embedding_bag(i, w, BAGS),
        normal(10, 8),
        whole(10, 8),
    ),
    "embedding_bag-own-weights-grad": Row(
        lambda p, w, i: F.embedding_bag(i, w, BAGS, per_sample_weights=p, mode="sum"),
        (uniform(8), normal(10, 8), whole(10, 8)),
        "gradient",
    ),
    "embedding_renorm_": Row(
        lambda w, i: F.embedding(i, w.clone(), max_norm=1.0), (normal(10, 8), whole(10, 8))
    ),
    "index_reduce": Row(
        lambda x, y: x.index_reduce(0, LENGTHS, y, "prod"), (normal(8, 4), normal(3, 4))
    ),
    **both("put", lambda x, y, i: x.put(i, y), normal(4, 4), normal(8), order(8)),
    **both("take", torch.take, normal(4, 4), whole(16, 8)),
    **both(
        "masked_scatter", lambda x, y, m: x.masked_scatter(m, y), *[normal(4, 4)] * 2, halves(4, 4)
    ),
    "masked_fill-tensor": Row(
        lambda x, y, m: x.masked_fill(m, y), (normal(4, 4), normal(), halves(4, 4))
    ),
    "argwhere": Row(torch.argwhere, (halves(4, 4),)),
    "nonzero_static": Row(lambda x: torch.nonzero_static(x, size=8), (halves(4, 4),)),
    "repeat_interleave": Row(
        lambda x, n: x.repeat_interleave(n, output_size=24),
        (normal(16), made(lambda: torch.arange(16) % 4)),
    ),
    **both("segment_reduce", lambda x: torch.segment_reduce(x, "sum", lengths=LENGTHS), uniform(8)),
}
COUNTS = {
    "bincount": Row(lambda i: torch.bincount(i, minlength=8), (whole(8, 32),)),
    "histc": Row(lambda x: torch.histc(x, 8, -2, 2), (normal(64),)),
    "histogram-count": Row(lambda x: torch.histogram(x, 8).hist, (normal(64),)),
    "histogram-edges": Row(lambda x, e: torch.histogram(x, e).hist, (normal(64), edges(9))),
    "isclose": Row(lambda x, y: torch.isclose(x, y).int(), (normal(16), normal(16))),
    "isin": Row(lambda x, y: torch.isin(x, y).int(), (whole(64, 16), whole(64, 16))),
    "quantile": Row(lambda x: x.quantile(0.3), (normal(32),)),
    "quantile-tensor": Row(torch.quantile, (normal(32), uniform(4))),
    "nanquantile": Row(lambda x: x.nanquantile(0.3), (normal(32),)),
    "nanquantile-tensor": Row(torch.nanquantile, (normal(32), uniform(4))),
}
MATRICES = {
    **both("bilinear", F.bilinear, normal(8, 4), normal(8, 5), normal(3, 4, 5)),
    **both("pdist", F.pdist, normal(8, 4)),
    **both("attention", F.scaled_dot_product_attention, *[normal(1, 2, 8, 16)] * 3),
    "ldl_solve": Row(
        lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), b),
        (definite(4), normal(4, 2)),
    ),
    "lu": Row(lambda a: torch.linalg.lu(a).L, (normal(4, 4),)),
    "lu_solve": Row(
        lambda a, b: torch.lu_solve(b, *torch.linalg.lu_factor(a)), (normal(4, 4), normal(4, 2))
    ),
    **both("ormqr", torch.ormqr, normal(4, 4), normal(4), normal(4, 2)),
    "tensorsolve": Row(
        lambda a, b: torch.linalg.tensorsolve(a.view(2, 2, 4), b), (definite(4), normal(2, 2))
    ),
    "tril_": Row(lambda x: x.clone().tril_(), (normal(8, 8),)),
    "diagflat": Row(torch.diagflat, (normal(8),)),
    "renorm": Row(lambda x: x.renorm(2, 0, 1.0), (normal(8, 4),)),
}
IMAGES = {
    **{
        name: row
        for rank in (1, 2, 3)
        for name, row in both(
            f"upsample_nearest_exact{rank}d",
            partial(F.interpolate, scale_factor=2, mode="nearest-exact"),
            normal(2, 3, *(4,) * rank),
        ).items()
    },
    **both(
        "fractional_max_pool2d",
        lambda x, r: F.fractional_max_pool2d(x, 2, 3, _random_samples=r),
        normal(2, 3, 8, 8),
        uniform(2, 3, 2),
    ),
    **both(
        "fractional_max_pool3d",
        lambda x, r: F.fractional_max_pool3d(x, 2, 3, _random_samples=r),
        normal(2, 3, 8, 8, 8),
        uniform(2, 3, 3),
    ),
    **both(
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        normal(1, 3, 8, 8),
    ),
    **both(
        "max_unpool3d",
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
        normal(1, 3, 4, 4, 4),
    ),
    "unfold-grad": Row(lambda x: x.unfold(0, 4, 2), (normal(32),), "gradient"),
}
SIGNALS = {
    "ihfft2": Row(torch.fft.ihfft2, (normal(8, 8),)),
    "ihfftn": Row(torch.fft.ihfftn, (normal(8, 8),)),
    "stft": Row(
        lambda x: torch.view_as_real(x.stft(16, window=WINDOW, return_complex=True)), (normal(64),)
    ),
    "istft": Row(lambda x: torch.view_as_complex(x).istft(16, window=WINDOW), (normal(9, 8, 2),)),
}
POINTWISE = {
    "addcmul_": Row(lambda x, y: x.clone().addcmul_(y, y), (normal(16), normal(16))),
    "lerp_": Row(lambda x, y, w: x.clone().lerp_(y, w), (normal(16), normal(16), uniform(16))),
    "fill": Row(lambda x: torch.fill(x, 2.0), (normal(16),)),
    "chalf": Row(lambda x: torch.view_as_real(x.chalf()).float(), (normal(16),)),
    "glu-jvp": Row(F.glu, (normal(16),), "tangent"),
    "log_ndtr": Row(special.log_ndtr, (normal(16),)),
    "airy_ai": Row(special.airy_ai, (normal(16),)),
    **{
        name: Row(getattr(special, name), (uniform(16), whole(5, 16)))
        for name in (
            *(f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"),
            "hermite_polynomial_h",
            "hermite_polynomial_he",
            "laguerre_polynomial_l",
            "legendre_polynomial_p",
        )
    },
    "permute_copy": Row(lambda x: torch.permute_copy(x, (1, 0)), (normal(4, 8),)),
    "squeeze_copy": Row(torch.squeeze_copy, (normal(4, 1, 8),)),
    "squeeze_copy-dim": Row(lambda x: torch.squeeze_copy(x, 1), (normal(4, 1, 8),)),
    "t_copy": Row(torch.t_copy, (normal(4, 8),)),
    "transpose_copy": Row(lambda x: torch.transpose_copy(x, 0, 1), (normal(4, 8),)),
    "unsqueeze_copy": Row(lambda x: torch.unsqueeze_copy(x, 1), (normal(4, 8),)),
}
ROWS = {**LOSSES, **TABLES, **COUNTS, **MATRICES, **IMAGES, **SIGNALS, **POINTWISE}


# Why a row takes more than 0.3 of torch.func's time.
KERNELS = {
    *("ctc_loss", "ctc_loss-grad", "histogram-count", "fractional_max_pool3d"),
    "fractional_max_pool3d-grad",
    *("upsample_nearest_exact3d", "upsample_nearest_exact3d-grad"),
}
SHAPES = {"argwhere", "bincount"}


def reason(name: str) -> str:
    """What keeps this row above its limit."""
    if name in KERNELS:
        return "; above the limit, the operators on the stacks are most of the time"
    if name in SHAPES:
        return "; above the limit, its shape depends on values, so no call is replayed"
    return ""


def taken(api: Any, row: Row) -> Callable:
    """The function of one example whose value, gradient or tangent is wanted."""
    f = row.f  # of the rest, which makes numbers, no function is to reach anything
    if row.of == "gradient":
        return api.grad(lambda *args: f(*args).square().sum())
    if row.of == "tangent":
        return lambda *args: api.jvp(f, args, args)[1]
    return f


def build(row: Row, _device: torch.device) -> Contestants:
    """On the CPU wherever the others run: some of these operators have no kernel elsewhere."""
    stacks = tuple(make() for make in row.stacks)
    alone = looped(taken(torch.func, row), stacks, range(EXAMPLES))

    def transformed(api: Any) -> Callable[[], Any]:
        mapped = api.vmap(taken(api, row))
        return lambda: mapped(*stacks)

    return contest(transformed, alone)


for _name, _row in ROWS.items():
    workload(
        f"{FALLBACKS}{_name}",
        f"{_row.of} of `{_name}`, which torch.func maps by a loop{reason(_name)}",
        names=("forall", "torch.func", "loop"),
        limits={(REPLAYED, 1): 0.3},
    )(partial(build, _row))

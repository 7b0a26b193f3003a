"""Torch's own operators that draw, written with the functions of `forall.random`.

Each is a function of a key and of the operator's arguments. They consist of ordinary operators, so
the rules of a `vmap` level give every example its own draw.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._compat.op_schema import find_functional, get_facts
from forall._compat.shapes import broadcast_shapes
from forall._core.errors import format_columns
from forall._core.half_precision import to_float32
from forall._random import rejection
from forall._random.continuous import draw_unit, gumbel, normal, uniform
from forall._random.discrete import draw_below, permutation
from forall._random.keys import draw_bits, split_words
from forall._random.threefry import make_counters

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
aten = torch.ops.aten

# By the name of the operator: overloads differ in defaults, generators and whether they write.
NEW: dict[str, Callable] = {}
FILL: dict[str, Callable] = {}
OTHER: dict[str, Callable] = {}


def has_draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """True if this call draws: attention without dropout does not, though its operator may."""
    if _find_table(func) is not None:
        return True
    return probability(func, args, kwargs) != 0


def probability(func: Any, args: tuple, kwargs: dict) -> float:
    for i, name in enumerate(get_facts(func).names):
        if name in {"dropout_p", "dropout", "p"}:
            return args[i] if i < len(args) else kwargs.get(name, 0)
    return 1  # it draws, and does not say how to turn that off


def run_with_key(key: Tensor, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator with draws from ``key``, including its writes to arguments."""
    fact = get_facts(func)
    args = tuple(a for a in args if not isinstance(a, torch.Generator))
    kwargs = {k: a for k, a in kwargs.items() if k != "generator"}
    if fact.out_names:
        return _draw_into_out(key, func, args, kwargs)
    home = _find_table(func)
    if home is None:
        raise _make_no_keyed_form_error(func)
    name = func.overloadpacket.__name__
    if home is NEW:
        return _draw_new(key, name, func, args, kwargs)
    if home is OTHER:
        return OTHER[name](key, *args, **kwargs)
    x, *given = args
    drawn = FILL[name.removesuffix("_")](key.to(x.device), x.shape, x.dtype, *given, **kwargs)
    return x.copy_(drawn) if fact.mutates else drawn.to(x.dtype)


def _draw_into_out(key: Tensor, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator with ``out=``, which is resized to the result's shape."""
    name = func.overloadpacket.__name__
    out = kwargs[get_facts(func).out_names[0]]
    if _find_table(func) is NEW:
        drawn = _draw_new(key, name, func, args, {"dtype": out.dtype, "device": out.device})
    else:
        drawn = run_with_key(key, find_functional(func), args, {})
    if out.shape != drawn.shape:
        out.resize_(drawn.shape)
    return out.copy_(drawn)


def _find_table(func: Any) -> dict | None:
    name = func.overloadpacket.__name__
    if name == "normal" and func._overloadname.startswith("float_float"):
        return NEW
    if name in OTHER:
        return OTHER
    if name in NEW:
        return NEW
    return FILL if name.removesuffix("_") in FILL else None


def _make_no_keyed_form_error(func: Any) -> NotImplementedError:
    rows = [("operator", str(func)), ("asked for", "draws that depend on a key")]
    return documented_error(NotImplementedError, "no-keyed-draw")(
        f"{func.overloadpacket.__name__} draws inside a kernel that takes no keys.\n"
        f"{format_columns(rows)}\n"
        "For attention use torch.nn.attention.sdpa_kernel(SDPBackend.MATH); else turn off its "
        "dropout, or draw with torch.rand."
    )


# --- new tensors ---------------------------------------------------------------------------------


def _draw_new(key: Tensor, name: str, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Draw a new tensor of a size, or of the size of the first argument."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if name.endswith("_like"):
        x, *given = args
        size, dtype, device = x.shape, dtype or x.dtype, device or x.device
    elif name == "randperm":
        given, size, dtype = args, (), dtype or torch.int64
    else:
        *given, size = args
        dtype = dtype or (torch.int64 if name == "randint" else torch.get_default_dtype())
    return NEW[name](key.to(device or "cpu"), tuple(size), dtype, *given)


def _rand(key: Tensor, size: tuple, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(uniform(key, (*size, 2), dtype.to_real()))
    return uniform(key, size, dtype)


def _randint(key: Tensor, size: tuple, dtype: torch.dtype, *bounds: Any) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    if not isinstance(high, Tensor):
        _check_argument(
            low < high, f"random_ expects 'from' to be less than 'to', but got {low} >= {high}"
        )
        _check_argument(high - low < 1 << 63, "randint of 2**63 numbers and more has no keyed form")
        high = torch.full((), high, device=key.device)
    return (draw_below(key, size, high - low) + low).to(dtype)


def _randperm(key: Tensor, size: tuple, dtype: torch.dtype, n: int) -> Tensor:
    return permutation(key, n).to(dtype)


def _randn(key: Tensor, size: tuple, dtype: torch.dtype, mean: float = 0, std: float = 1) -> Tensor:
    return _normal(key, size, dtype, mean, std)


NEW |= {
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "normal": _randn,
    "randint": _randint,
    "randint_like": _randint,
    "randperm": _randperm,
}


# --- in place ------------------------------------------------------------------------------------


def _check_argument(holds: bool, otherwise: str) -> None:
    """Raise torch's own error for an argument unless a condition holds."""
    if not holds:
        raise RuntimeError(otherwise)


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _normal(key: Tensor, size: Any, dtype: torch.dtype, mean: float = 0, std: float = 1) -> Tensor:
    _check_argument(std >= 0, f"normal expects std >= 0.0, but found std {std}")
    z = normal(key, size, dtype if dtype.is_complex else _working_dtype(dtype))
    return (z if (mean, std) == (0, 1) else z * std + mean).to(dtype)


def _uniform(key: Tensor, size: Any, dtype: torch.dtype, low: float = 0, high: float = 1) -> Tensor:
    _check_argument(
        low <= high, f"uniform_ expects to return a [from, to) range, but found {low} > {high}"
    )
    return uniform(key, size, dtype, float(low), float(high))


def _exponential(key: Tensor, size: Any, dtype: torch.dtype, lambd: float = 1) -> Tensor:
    _check_argument(lambd > 0, f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    working = _working_dtype(dtype)
    e = -torch.log1p(-draw_unit("exponential_", key, size, working))
    return e.clamp(min=torch.finfo(working).eps / 2) / lambd  # never 0: its logarithm is asked for


def _geometric(key: Tensor, size: Any, dtype: torch.dtype, p: float) -> Tensor:
    _check_argument(0 < p < 1, f"geometric_ expects p to be in (0, 1), but got p={p}")
    u = draw_unit("geometric_", key, size, _working_dtype(dtype))
    return (torch.log1p(-u) / math.log1p(-p)).ceil().clamp(min=1)


def _cauchy(
    key: Tensor, size: Any, dtype: torch.dtype, median: float = 0, sigma: float = 1
) -> Tensor:
    _check_argument(sigma > 0, f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    u = draw_unit("cauchy_", key, size, _working_dtype(dtype))
    return torch.tan((u - 0.5) * math.pi) * sigma + median


def _log_normal(
    key: Tensor, size: Any, dtype: torch.dtype, mean: float = 1, std: float = 2
) -> Tensor:
    _check_argument(std > 0, f"log_normal_ expects std > 0.0, but found std={std}")
    return torch.exp(_normal(key, size, _working_dtype(dtype), mean, std))


def _random(key: Tensor, size: Any, dtype: torch.dtype, *bounds: Any) -> Tensor:
    """Draw integers, by default up to the largest below which the dtype holds all integers."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds, None)[:2]
    if high is None:
        if dtype is torch.int64 and low == 0:
            return draw_bits("random_", key, size, 64) & 0x7FFFFFFFFFFFFFFF
        high = 2 if dtype is torch.bool else _greatest(dtype) + 1
    return _randint(key, tuple(size), torch.int64, low, high)


def _greatest(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def _bernoulli(key: Tensor, size: Any, dtype: torch.dtype, p: Any = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        return draw_unit("bernoulli_", key, size, _working_dtype(p.dtype)) < p.to(key.device)
    _check_argument(0 <= p <= 1, f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return draw_unit("bernoulli_", key, size, torch.float32) < p


FILL |= {
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal,
    "exponential": _exponential,
    "geometric": _geometric,
    "cauchy": _cauchy,
    "log_normal": _log_normal,
    "random": _random,
    "bernoulli": _bernoulli,
}


# --- with parameters -----------------------------------------------------------------------------


def _normal_of(key: Tensor, mean: Any, std: Any = 1.0) -> Tensor:
    """Draw ``mean + std * z``, in the dtype of the mean, or of std if the mean is a number."""
    head = mean if isinstance(mean, Tensor) else std
    given = [a.shape for a in (mean, std) if isinstance(a, Tensor)]
    if not isinstance(std, Tensor):
        _check_argument(std >= 0, f"normal expects std >= 0.0, but found std {std}")
    dtype = head.dtype if head.dtype.is_complex else _working_dtype(head.dtype)
    z = normal(key.to(head.device), broadcast_shapes(*given), dtype)
    return (z * std + mean).to(head.dtype)


def _bernoulli_of(key: Tensor, x: Tensor, p: Any = None) -> Tensor:
    """Draw Bernoulli numbers. ``x`` is the probabilities, or with ``p`` gives the shape only."""
    return _bernoulli(key.to(x.device), x.shape, x.dtype, x if p is None else p).to(x.dtype)


def _make_entrywise(operator: Callable) -> Callable:
    def draw_(key: Tensor, x: Tensor, *rest: Any) -> Tensor:
        shape = broadcast_shapes(x.shape, *(r.shape for r in rest if isinstance(r, Tensor)))
        place = make_counters(shape, x.device)[1]
        return operator(*split_words("draw", key.to(x.device)), place, x, *rest)

    return draw_


def _gamma(key: Tensor, alpha: Tensor) -> Tensor:
    return _make_entrywise(rejection.gamma_operator)(key, to_float32(alpha), False).to(alpha.dtype)


def _dirichlet(key: Tensor, alpha: Tensor) -> Tensor:
    log = _make_entrywise(rejection.gamma_operator)(key, to_float32(alpha), True)
    return torch.softmax(log, -1).to(alpha.dtype)


def _multinomial(key: Tensor, p: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    log, lead = to_float32(p).log(), p.shape[:-1]
    key = key.to(p.device)
    if replacement:
        noise = gumbel(key, (*lead, num_samples, p.shape[-1]), log.dtype)
        return (log.unsqueeze(-2) + noise).argmax(-1)
    _check_argument(
        num_samples <= p.shape[-1],
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )
    return (log + gumbel(key, p.shape, log.dtype)).topk(num_samples, -1).indices


def _dropout(key: Tensor, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Return (x * mask / (1 - p), mask); evaluation draws nothing."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _bernoulli(key.to(x.device), x.shape, x.dtype, 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _fused_dropout(key: Tensor, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Run dropout where ``p`` is the probability to keep an entry."""
    out, mask = _dropout(key, x, 1 - p, True)
    return out, mask.to(torch.uint8)


def _leaky(
    key: Tensor,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
) -> Tensor:
    """Run rrelu, and write the slope of each negative entry to ``noise``; evaluation draws none."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    drawn = uniform(key.to(x.device), x.shape, x.dtype, float(lower), float(upper))
    slopes = torch.where(x <= 0, drawn, 1.0)
    noise.copy_(slopes)
    return x * slopes


def _leaky_functional(key: Tensor, x: Tensor, noise: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    noise = noise.clone()
    return _leaky(key, x, noise, *rest), noise


def _leaky_in_place(key: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.copy_(_leaky(key, x, *rest))


OTHER |= {
    "normal": _normal_of,
    "bernoulli": _bernoulli_of,
    "multinomial": _multinomial,
    "poisson": _make_entrywise(rejection.poisson_operator),
    "binomial": _make_entrywise(rejection.binomial_operator),
    "_standard_gamma": _gamma,
    "_sample_dirichlet": _dirichlet,
    "native_dropout": _dropout,
    "_fused_dropout": _fused_dropout,
    "rrelu_with_noise": _leaky,
    "rrelu_with_noise_": _leaky_in_place,
    "rrelu_with_noise_functional": _leaky_functional,
}

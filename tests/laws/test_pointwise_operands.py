"""Pointwise operators promote, broadcast and lay out as in the loop, on every way to the stacks.

Operators, dtypes, ranks, kinds of operands and ways are drawn at random from a fixed seed. An
example of rank 0 promotes less than its stack would, and a tensor that all examples share must not
broadcast over them.
"""

import operator
import random
import warnings

import pytest
import torch

from draws import make_generator
from forall import vmap

SIZE = 3  # of the batch, and of one dim of the examples: a mistaken broadcast fits
DIMS = (2, 3, 4)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.complex32: 2e-3,
}
# Halves come out of these as in the loop, to the bit.
EXACT = {"add", "sub", "mul", "div", "true_divide", "floor_divide", "a + b", "a * b", "a / b"}
UNARY = """
    neg abs exp sin sqrt sigmoid relu isnan logical_not bitwise_not sign floor reciprocal square
    isfinite angle erf trunc sgn
"""
BINARY = """
    add sub mul div floor_divide remainder fmod pow maximum minimum atan2 lt ge eq ne logical_and
    logical_xor bitwise_and bitwise_xor bitwise_left_shift copysign hypot xlogy nextafter
    float_power rsub gcd true_divide fmax heaviside ldexp isclose logaddexp
"""
TERNARY = "where lerp addcmul addcdiv clamp"
OPERATORS = {
    **{name: (1, getattr(torch, name)) for name in UNARY.split()},
    **{name: (2, getattr(torch, name)) for name in BINARY.split()},
    **{name: (3, getattr(torch, name)) for name in TERNARY.split()},
    "-a": (1, operator.neg),
    "a + b": (2, lambda a, b: a + b),
    "a - b": (2, lambda a, b: a - b),
    "a * b": (2, lambda a, b: a * b),
    "a / b": (2, lambda a, b: a / b),
    "a // b": (2, lambda a, b: a // b),
    "a % b": (2, lambda a, b: a % b),
    "a ** b": (2, lambda a, b: a**b),
    "a < b": (2, lambda a, b: a < b),
    "a == b": (2, lambda a, b: a == b),
    "a & b": (2, lambda a, b: a & b),
    "a ^ b": (2, lambda a, b: a ^ b),
    "a * b + a": (2, lambda a, b: a * b + a),
    "a - b * a": (2, lambda a, b: a - b * a),
    "a.exp() * b": (2, lambda a, b: (a + b).exp() * b),
}
KINDS = ("mapped", "unranked", "fewer", "rank0", "rank1", "rank2", "int", "float", "bool", "number")
WEIGHTS = (3, 1, 1, 1, 1, 1, 1, 1, 1, 1)


# --- ways ----------------------------------------------------------------------------------------


def call_once(op, given, _flag):
    return op(*given)


def call_in_branches(op, given, flag):
    if flag > 0:
        out = op(*given)
    else:
        out = op(*given)
    return out


def call_on_one_side(op, given, flag):
    out = op(*given)
    if flag > 0:
        out = op(*given).clone()
    return out


def write_in_place(op, given, _flag):
    out = given[0].clone()
    getattr(out, f"{op.__name__}_")(*given[1:])
    return out


def write_into_out(op, given, _flag):
    shape = op(*given)
    return op(*given, out=torch.empty_like(shape, memory_format=torch.contiguous_format))


def differentiate(op, given, _flag):
    x = given[0].detach().requires_grad_()
    out = op(x, *given[1:])
    out = torch.view_as_real(out) if out.is_complex() else out
    return torch.autograd.grad(out.double().sum(), x)[0]


def copy_operands(given):
    """Copies, of the level: of an operand that all examples share, there is one for all."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in given]


def call_on_copies(op, given, _flag):
    return op(*copy_operands(given))


def differentiate_copies(op, given, flag):
    return differentiate(op, copy_operands(given), flag)


WAYS = (
    call_once,
    call_on_copies,
    differentiate_copies,
    call_in_branches,
    call_on_one_side,
    write_in_place,
    write_into_out,
    differentiate,
)


# --- draws ---------------------------------------------------------------------------------------


def draw_values(shape, dtype, rng):
    generator = make_generator(rng.randrange(2**31))
    v = torch.randint(-4, 5, shape, generator=generator).double()
    v = v + torch.randint(0, 8, shape, generator=generator) / 7
    if dtype is torch.bool:
        return v > 0.3
    if dtype.is_complex:
        return torch.complex(v, v * 0.5 + 1).to(dtype)
    return (v.abs() if dtype is torch.uint8 else v).to(dtype)


def draw_operand(kind, dtype, rank, rng):
    """Return an argument and its in_dim: an axis, None, or "number" for Python's ``.item()``."""
    if kind in ("mapped", "unranked", "fewer"):
        rank = {"mapped": rank, "unranked": 0}.get(kind, rng.randint(0, rank))
        axis = rng.randint(0, rank) if rng.random() < 0.4 else 0
        v = draw_values((SIZE, *DIMS[3 - rank :]), dtype, rng).movedim(0, axis)
        return (v.contiguous() if rng.random() < 0.5 else v), axis
    if kind.startswith("rank"):
        return draw_values(DIMS[3 - int(kind[-1]) :], dtype, rng), None
    if kind == "number":
        return draw_values((SIZE,), rng.choice([torch.float64, torch.int64]), rng), "number"
    numbers = {"int": (0, 1, 2, -3), "float": (0.5, -1.7, 2.0, 0.1), "bool": (True,)}
    return rng.choice(numbers[kind]), None


def draw_operands(name, rng):
    count, _ = OPERATORS[name]
    rank = rng.randint(0, 3)
    dtypes = [rng.choice(DTYPES) for _ in range(count)]
    if rng.random() < 0.5:
        dtypes = dtypes[:1] * count
    kinds = rng.choices(KINDS, WEIGHTS, k=count)
    if (
        name == "clamp"
    ):  # torch takes a tensor of rank 0 for a number beside a number, ours does not
        kinds[2] = kinds[1]
    if not any(kind in ("mapped", "unranked", "number") for kind in kinds):
        kinds[0] = "mapped"
    drawn = [draw_operand(k, d, rank, rng) for k, d in zip(kinds, dtypes, strict=True)]
    return [a for a, _ in drawn], [axis for _, axis in drawn]


# --- the law -------------------------------------------------------------------------------------


def find_difference(name, way, rng):
    """Return the first difference between a call under vmap and the loop, in words."""
    args, axes = draw_operands(name, rng)
    flags = torch.tensor([1.0, -1.0, 1.0])
    layouts = []

    def f(*given):
        *given, flag = given
        given = [a.item() if axis == "number" else a for a, axis in zip(given, axes, strict=True)]
        out = way(OPERATORS[name][1], given, flag)
        layouts.append((tuple(out.shape), out.dtype, list_strides(out)))
        return out

    in_dims = (*(0 if axis == "number" else axis for axis in axes), 0)
    try:
        truth = [f(*pick_example((*args, flags), in_dims, i)) for i in range(SIZE)]
    except (TypeError, AttributeError):  # that a number of each example may stand for a tensor
        return None
    except (RuntimeError, NotImplementedError) as error:
        truth = error
    layout = layouts[-1] if layouts else None
    told = [getattr(a, "dtype", a) for a in args], [getattr(a, "shape", ()) for a in args], axes
    try:
        found = vmap(f, in_dims)(*args, flags)
    except Exception as error:
        return None if isinstance(truth, Exception) else f"{told}: {error!r}"
    if isinstance(truth, Exception):
        return f"{told}: no error, where the loop raises {truth!r}"
    if layouts[-1] != layout:
        return f"{told}: {layouts[-1]} instead of {layout}"
    truth = torch.stack(truth)
    if found.dtype is not truth.dtype or not are_equal(name, found, truth):
        return f"{told}: {found} instead of {truth}"
    return None


def pick_example(args, in_dims, i):
    return [a if d is None else a.select(d, i).clone() for a, d in zip(args, in_dims, strict=True)]


def list_strides(out):
    return [stride for stride, n in zip(out.stride(), out.shape, strict=True) if n > 1]


def are_equal(name, found, truth):
    if found.dtype is torch.complex32:
        found, truth = found.to(torch.complex64), truth.to(torch.complex64)
    tolerance = TOLERANCE.get(found.dtype, 0)
    if found.dtype in (torch.float16, torch.bfloat16) and name in EXACT:
        tolerance = 0
    return torch.allclose(found, truth, rtol=tolerance, atol=tolerance, equal_nan=True)


def has_way(name, way):
    if way is write_in_place:
        return hasattr(torch.Tensor, f"{name}_") and name != "abs"  # torch refuses complex ones
    return way is not write_into_out or name in (UNARY + BINARY + TERNARY).split()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(36))
def test_pointwise_operands_equal_the_loop(seed):
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about complex halves and resized outputs
        for name in OPERATORS:
            way = rng.choice([w for w in WAYS if has_way(name, w)])
            found = find_difference(name, way, rng)
            assert found is None, f"{name}, {way.__name__}: {found}"

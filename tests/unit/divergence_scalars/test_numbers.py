"""A Number is the Python number of each example: Python itself is the oracle."""

import math
import operator
import random
import struct
from typing import Any

import pytest
import torch

from forall import vmap
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import BatchedScalar, read_scalar
from forall._divergence.scalar_math import BUILTINS, MATH

INTS = [0, 1, -1, 2, 3, -7, 10, 63, 64, 255, 2**31, -(2**53) - 1, 2**53 + 1, 2**62, 2**63 - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, -2.5, 0.1, 1e-300, 5e-324, 1e300, -1e17, 2.0**53]
FLOATS += [math.pi, math.inf, -math.inf, math.nan, 7.0, -3.0, 1e16, 2.0**63]
COMPLEX = [0j, 1j, 1 + 2j, -0.5 - 1e3j]
POOLS = {
    int: [*INTS, -(2**63), *range(-5, 20)],
    float: [*FLOATS, *(i / 7 for i in range(-20, 20))],
    bool: [True, False],
    complex: COMPLEX,
}
BINARY = [getattr(operator, n) for n in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]]
BINARY += [
    getattr(operator, n)
    for n in ["lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "lshift", "rshift"]
]
BINARY += [divmod, math.fmod, math.atan2, math.hypot, math.copysign, math.gcd, math.pow]
UNARY = [operator.neg, operator.pos, abs, operator.invert, round, math.floor, math.ceil]
UNARY += [math.trunc, math.sqrt, math.exp, math.log, math.sin, math.tanh, math.isnan, math.lgamma]
UNARY += [math.atanh, math.isqrt, math.modf, math.frexp, math.degrees, math.log1p, math.gamma]
# Of ~True, which is -2 as ever, Python 3.12 and later say that they will take it away
PYTHON_WARNS = pytest.mark.filterwarnings("ignore:Bitwise inversion '~' on bool")


def ours(f: Any) -> Any:
    """The function with its batched meaning where math's own would part the lanes."""
    return MATH.get(f, f)


def is_same(got, want):
    if type(got) is not type(want):
        return False
    if type(got) is tuple:
        return len(got) == len(want) and all(map(is_same, got, want))
    if type(got) is complex:
        return is_same(got.real, want.real) and is_same(got.imag, want.imag)
    if type(got) is not float:
        return got == want
    if math.isnan(got) or math.isnan(want):
        return math.isnan(got) and math.isnan(want)
    return struct.pack("d", got) == struct.pack("d", want)


def lanes_of(got, ref):
    """What every lane has of a result, in the loop's order."""
    if type(got) is tuple:
        return list(zip(*(lanes_of(g, ref) for g in got), strict=True))
    if type(got) is not BatchedScalar:
        return [got] * scalar_storage.read_values(ref).numel()
    levels = scalar_storage.find_batched_levels(ref)[::-1]
    return (
        scalar_storage.order_by_levels(
            scalar_storage.broadcast_values([got.tensor, ref])[0], levels
        )
        .flatten()
        .tolist()
    )


def loop(f, *lanes):
    """Python's results, or the error of the first lane that fails."""
    results = []
    for values in zip(*lanes, strict=True):
        try:
            results.append(f(*values))
        except Exception as error:
            return error
    return results


def kinds_of(result):
    return tuple(map(kinds_of, result)) if type(result) is tuple else type(result)


def too_large(result):
    if type(result) is tuple:
        return any(map(too_large, result))
    return type(result) is int and not -(2**63) <= result < 2**63


def check(f: Any, operands, ref, parted):
    """One call on Numbers against the loop; what came out, if it may be used further."""
    want = loop(f, *(lanes_of(n, ref) for n in operands))
    told = (f, operands, want)
    if isinstance(want, Exception):
        with pytest.raises(type(want)) as caught:
            ours(f)(*operands)
        # 1j < n asks n > 1j: the message of that is Python's too, the other way round.
        if type(want) is not TypeError:
            assert str(caught.value) == str(want), told
        return None
    if len({kinds_of(w) for w in want}) > 1:
        with pytest.raises(parted):
            ours(f)(*operands)
        return None
    if any(map(too_large, want)):
        with pytest.raises(OverflowError, match="64 bits"):
            ours(f)(*operands)
        return None
    got = ours(f)(*operands)
    for g, w in zip(lanes_of(got, ref), want, strict=True):
        assert is_same(g, w), (*told, g, w)
    return got if type(got) is BatchedScalar else None


def draw(rng, size):
    kind = rng.choice([int, int, float, float, float, bool, complex])
    pool = POOLS[kind]
    if rng.random() < 0.5 and kind is not complex:
        pool = [v for v in pool if 0 < v < 100] or pool
    return torch.tensor(
        [rng.choice(pool) for _ in range(size)],
        dtype={int: torch.int64, float: torch.float64, bool: torch.bool}.get(
            kind, torch.complex128
        ),
    )


def constant(rng):
    return rng.choice([0, 1, 2, -1, 3, 0.5, 2.0, -0.0, True, 10**20, math.inf, 1j, 7, 0.1])


def never_ends(f, n):
    """An int of more bits than there is memory."""
    most = abs(max(n.bounds, key=abs)) if type(n) is BatchedScalar else abs(n)
    return f in {operator.pow, operator.lshift} and most > 1000


def explore(numbers, ref, rng, parted, steps=60):
    """Grow random expressions, one operator at a time."""
    pool = list(numbers)
    for _ in range(steps):
        if rng.random() < 0.3:
            f, operands = rng.choice(UNARY), [rng.choice(pool)]
        else:
            f, operands = rng.choice(BINARY), [rng.choice(pool), rng.choice(pool)]
            if rng.random() < 0.4:
                operands[rng.randrange(2)] = constant(rng)
        if not any(type(n) is BatchedScalar for n in operands) or never_ends(f, operands[-1]):
            continue
        found = check(f, operands, ref, parted)
        if found is not None:
            pool.append(found)


@PYTHON_WARNS
@pytest.mark.parametrize("seed", range(40))
def test_random_expressions_are_pythons(seed, parted):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 5, 40])

    def f(*xs):
        explore([read_scalar(x) for x in xs], xs[0], rng, parted)
        return xs[0]

    vmap(f)(*(draw(rng, size) for _ in range(5)))


@PYTHON_WARNS
@pytest.mark.parametrize("seed", range(15))
def test_random_expressions_over_two_levels(seed, parted):
    rng = random.Random(1000 + seed)

    def f(x, y, z):
        explore([read_scalar(t) for t in (x, y, z)], z, rng, parted, steps=30)
        return z

    inner = vmap(f, in_dims=(None, 0, 0))
    xs, ys, zs = draw(rng, 3), draw(rng, 4), draw(rng, 12).reshape(4, 3)
    vmap(inner, in_dims=(0, None, 1))(xs, ys, zs)


def each(values, f, dtype=None):
    """Run f on the Number of these values, and give what it returns."""
    kept = []

    def g(x):
        kept.append(f(read_scalar(x)))
        return x

    kind = max(map(type, values), key=[bool, int, float, complex].index)
    wide = {float: torch.float64, complex: torch.complex128}.get(kind)
    vmap(g)(torch.tensor(values, dtype=dtype or wide))
    return kept[0]


def of(got):
    return scalar_storage.read_values(got.tensor).tolist()


def test_a_float32_is_the_double_that_item_gives():
    n = each([0.1, 0.2], lambda n: n, torch.float32)
    assert of(n) == [torch.tensor(v).item() for v in (0.1, 0.2)]
    assert n.kind is float


def test_the_number_stays_when_the_tensor_is_written_to():
    def f(x):
        n = read_scalar(x)
        x.mul_(10)
        return x + n

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert vmap(f)(x).tolist() == [11.0, 22.0]


@pytest.mark.parametrize("kind", [int, float, bool, complex])
def test_isinstance_tells_the_type_of_each_examples_number(kind):
    values = [kind(0), kind(1)]
    assert each(values, lambda n: isinstance(n, kind), torch.tensor(values[0]).dtype)
    assert not each(values, lambda n: isinstance(n, (str, torch.Tensor)))


def test_a_division_by_zero_names_the_example():
    with pytest.raises(ZeroDivisionError) as caught:
        each([1.0, 0.0, 0.0], lambda n: 1 / n)
    assert "example 1 of 3" in caught.value.__notes__[0]
    assert "lambda n: 1 / n" in caught.value.__notes__[0]


def test_an_int_that_grows_beyond_64_bits_is_an_error():
    with pytest.raises(OverflowError, match=r"value +18446744073709551616"):
        each([2**31, 2**32], lambda n: n * n)


def test_where_one_number_is_needed_the_lanes_part(parted):
    asks = [bool, float, int, complex, hash, range, math.sqrt, list(range(9)).__getitem__]
    for ask in asks:
        with pytest.raises(parted):
            each([0, 1], ask)


def test_numbers_that_agree_are_one_number():
    assert each([3, 3], lambda n: list(range(n))) == [0, 1, 2]
    assert each([3, 3], lambda n: {3: "three"}[n]) == "three"
    assert each([0.5, 0.5], lambda n: bool(math.sqrt(n) == math.sqrt(0.5))) is True
    assert each([2, 3], lambda n: bool(n)) is True
    assert each([2.1, 2.9], int) == 2
    assert each([0.0, -0.0], lambda n: n == 0).concretize() is True


def test_zeros_of_two_signs_do_not_agree(parted):
    with pytest.raises(parted):
        each([0.0, -0.0], float)


def test_a_float_is_no_index():
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        each([1.0, 2.0], range)


def test_a_text_is_that_of_each_examples_number(parted):
    assert each([1.0, 1.0], "{:.2f}".format) == "1.00"
    assert each([1.5, 1.5], str) == "1.5"
    for text in (str, "{:.2f}".format, "{}".format, lambda n: f"{n:>8}", lambda n: f"{n}"):
        with pytest.raises(parted):
            each([1.0, 2.5], text)


def test_a_text_is_data():
    lengths = vmap(lambda x: len(f"{x.item():d}") + len(str(x.item())) * 10)
    assert lengths(torch.tensor([1, 22, 333])).tolist() == [11, 22, 33]
    lengths = vmap(lambda x: len(f"{x:.1f}") + len(format(x, "")) * 10)
    xs = torch.tensor([1.5, 22.0])
    assert lengths(xs).tolist() == [len(f"{x:.1f}") + len(format(x, "")) * 10 for x in xs]


def test_repr_parts_nothing_and_shows_all():
    assert each([1.0, 2.5], repr) == "Number(float, one for each of 2 examples: 1.0, 2.5)"
    assert each(list(range(20)), repr).endswith("6, 7, ...)")


def test_methods_and_attributes_are_those_of_each_number():
    assert of(each([1.5, 2.0], lambda n: n.is_integer())) == [False, True]
    assert of(each([5, 1024], lambda n: n.bit_length())) == [3, 11]
    assert [of(p) for p in each([0.5, 3.0], lambda n: n.as_integer_ratio())] == [[1, 3], [2, 1]]
    assert of(each([1 + 2j, 3j], lambda n: n.imag)) == [2.0, 3.0]
    assert of(each([1 + 2j, 3j], lambda n: n.conjugate())) == [1 - 2j, -3j]
    assert of(each([5, 6], lambda n: n.numerator)) == [5, 6]
    with pytest.raises(AttributeError):
        each([5, 6], lambda n: n.item)


@pytest.mark.parametrize("ndigits", [0, 2, -1])
def test_round_to_digits(ndigits):
    values = [2.675, 15.0, -0.5, 1e22, 25.5]
    assert of(each(values, lambda n: round(n, ndigits))) == [round(v, ndigits) for v in values]


def test_strangers_get_their_say(parted):
    assert each([1, 2], lambda n: n == "a") is False
    with pytest.raises(TypeError):
        each([1, 2], lambda n: n + "a")
    with pytest.raises(parted):
        each([1, 2], lambda n: [0] * n)
    assert of(each([1, 2], lambda n: pow(n, 3, 5))) == [1, 3]


# --- the tables for converted code


def test_the_tables_leave_ordinary_arguments_alone():
    assert MATH[math.sqrt](4) == 2.0
    assert MATH[math.floor](2.5) == 2
    assert BUILTINS[int]("12") == 12
    assert BUILTINS[max]([1, 3, 2], key=lambda v: -v) == 1
    assert BUILTINS[sum]([[1], [2]], []) == [1, 2]
    assert BUILTINS[bool]() is False
    assert BUILTINS[float](True) == 1.0


@pytest.mark.parametrize("kind", [int, float, bool, complex])
def test_conversions_part_nothing(kind):
    values = [0.0, 2.9, -3.5]
    got = each(values, BUILTINS[kind])
    assert got.kind is kind
    assert of(got) == [kind(v) for v in values]


def test_a_tensor_is_read_where_a_number_is_wanted():
    def f(x):
        n = BUILTINS[float](x)
        assert n.kind is float
        assert of(MATH[math.sqrt](x)) == [1.0, 2.0]
        return x * n

    assert vmap(f)(torch.tensor([1.0, 4.0])).tolist() == [1.0, 16.0]


@pytest.mark.parametrize("f", [min, max])
def test_extremes(f):
    values = [0.5, 1.5, math.nan, -1.0]
    for rest in ([1.0], [1.0, 0.25], [1.25]):
        for order in (lambda n, r: (n, *r), lambda n, r: (*r, n)):
            want = [f(order(v, rest)) for v in values]
            got = each(values, lambda n, o=order, r=rest: BUILTINS[f](*o(n, r)))
            assert all(map(is_same, of(got), want))
            got = each(values, lambda n, o=order, r=rest: BUILTINS[f](list(o(n, r))))
            assert all(map(is_same, of(got), want))


def test_the_larger_of_an_int_and_a_float_is_a_float_where_lanes_take_both():
    assert of(each([-0.5, 1.5], lambda n: BUILTINS[max](n, 0))) == [0.0, 1.5]
    assert each([-0.5, -1.5], lambda n: BUILTINS[max](n, 0)) == 0
    assert of(each([1, 5], lambda n: BUILTINS[min](n, 3))) == [1, 3]


def test_sum_is_pythons_to_the_last_bit():
    values = [0.1, 0.2, 0.3]
    want = [sum([v, 0.7, 1e16, v, -1e16]) for v in values]
    assert of(each(values, lambda n: BUILTINS[sum]([n, 0.7, 1e16, n, -1e16]))) == want


def test_math_on_several_numbers():
    values = [0.1, 0.2, 3.0]
    assert of(each(values, lambda n: MATH[math.fsum]([n, 1.0, n]))) == [
        math.fsum([v, 1.0, v]) for v in values
    ]
    assert of(each(values, lambda n: MATH[math.isclose](n, 0.2, rel_tol=n))) == [
        math.isclose(v, 0.2, rel_tol=v) for v in values
    ]
    assert of(each(values, lambda n: MATH[math.log](n, 3))) == [math.log(v, 3) for v in values]
    assert of(each([3, 5], lambda n: MATH[math.factorial](n))) == [6, 120]


def test_a_number_that_is_returned_has_the_dtype_that_torch_gives_a_python_number():
    for dtype in (torch.float64, torch.float32, torch.complex128, torch.complex64, torch.int32):
        x = torch.tensor([1, 2]).to(dtype)
        found = vmap(lambda x: x.item())(x)
        torch.testing.assert_close(found, torch.tensor([v.item() for v in x]))

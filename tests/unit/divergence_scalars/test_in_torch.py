"""A Number among torch's arguments is what Python's number is there: the loop is the oracle."""

import operator

import pytest
import torch

from forall import vmap
from forall._divergence import scalar_factories  # noqa: F401 - enters torch.tensor and its like
from forall._divergence.batched_scalar import read_scalar
from oracle import loop

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES += [torch.uint8, torch.bool, torch.complex64]
FLOATS = torch.tensor([0.1, 2.0, 1.7], dtype=torch.float64)
INTS = torch.tensor([1, 3, 2])
BOOLS = torch.tensor([True, False, True])
MASK = torch.tensor([True, False, True, False])


def data(dtype, shape):
    x = torch.tensor([0.3, 1.0, 2.6, 5.0])[: 4 if shape else 1].reshape(shape)
    return x.to(dtype)


def same_as_loop(f, ns, parted, near=False):
    """f(n) with the Number of each example, against n.item() on plain tensors."""

    def ours(n):
        got = read_scalar(n)
        assert hasattr(got, "tensor")  # in converted code type(got) is that of one example
        return f(got)

    try:
        want = loop(lambda n: f(n.item()))(ns)
    except Exception as error:
        with pytest.raises((type(error), parted)):
            vmap(ours)(ns)
        return
    got = vmap(ours)(ns)
    assert got.dtype == want.dtype
    if near and (want.is_floating_point() or want.is_complex()):
        torch.testing.assert_close(got, want, equal_nan=True)
    else:
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), (got, want)


OPERATORS = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and_",
    "or_",
    "xor",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4,), ()], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_promote_as_with_pythons_numbers(name, dtype, shape, parted):
    op = getattr(operator, name)
    for ns in (FLOATS, INTS, BOOLS):
        if name == "pow" and dtype is torch.bool and ns is BOOLS:
            continue  # torch has it for Python's number alone, so the lanes diverge
        for f in (lambda n: op(data(dtype, shape), n), lambda n: op(n, data(dtype, shape))):
            same_as_loop(f, ns, parted, near=name == "pow")


def x4(dtype=torch.float32):
    return data(dtype, (4,))


CALLS = {
    "add": lambda n: torch.add(x4(), n),
    "add by name": lambda n: torch.add(x4(), other=n),
    "sub alpha": lambda n: torch.sub(x4(), n, alpha=2),
    "div": lambda n: torch.div(x4(), n, rounding_mode="floor"),
    "clamp min": lambda n: x4().clamp(min=n),
    "clamp both": lambda n: torch.clamp(x4(), n, 2.5),
    "clamp ints": lambda n: x4(torch.int64).clamp(max=n),
    "full": lambda n: torch.full((3,), n),
    "full dtype": lambda n: torch.full((3,), n, dtype=torch.float64),
    "full_like": lambda n: torch.full_like(x4(), n),
    "new_full": lambda n: x4().new_full((2,), n),
    "tensor": lambda n: torch.tensor([n, 2.0]),
    "tensor of ints": lambda n: torch.tensor([n, 2]),
    "tensor nested": lambda n: torch.tensor([[n, 1], [n + 1, n]]),
    "tensor alone": lambda n: torch.tensor(n),
    "tensor dtype": lambda n: torch.tensor([n, 0.1], dtype=torch.float64),
    "tensor into ints": lambda n: torch.tensor([n, 3], dtype=torch.int32),
    "as_tensor": lambda n: torch.as_tensor(n),
    "as_tensor list": lambda n: torch.as_tensor([n], dtype=torch.float64),
    "new_tensor": lambda n: x4().new_tensor([n, 1.0]),
    "scalar_tensor": lambda n: torch.scalar_tensor(n),
    "masked_fill": lambda n: x4().masked_fill(MASK, n),
    "masked_fill ints": lambda n: x4(torch.int64).masked_fill(MASK, n),
    "where first": lambda n: torch.where(MASK, n, x4()),
    "where last": lambda n: torch.where(MASK, x4(torch.int64), n),
    "where numbers": lambda n: torch.where(MASK, n, 2.5),
    "where method": lambda n: x4().where(MASK, n),
    "fill_": lambda n: torch.empty(3).fill_(n),
    "set item": lambda n: x4().index_fill(0, torch.tensor([1]), n),
    "in place": lambda n: x4().mul_(n).add_(n),
    "in place half": lambda n: x4(torch.float16).mul_(n),
    "lerp": lambda n: torch.lerp(x4(), x4() + 1, n),
    "linspace": lambda n: torch.linspace(0, n, 4),
    "rsub": lambda n: torch.rsub(x4(), n),
    "pow of scalar": lambda n: torch.pow(n, x4()),
    "comparison": lambda n: torch.gt(x4(), n),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ns", [FLOATS, INTS], ids=["float", "int"])
def test_calls_that_need_no_parting(name, ns, parted):
    same_as_loop(CALLS[name], ns, parted, near=name in {"linspace", "pow of scalar"})


def assigned(n):
    x = x4()
    x[1] = n
    x[2:] = n
    return x


def assigned_at(n):
    x = x4()
    x[n] = 9.0
    x[n - 1] = n
    return x


PLACES = {
    "x[n]": lambda n: x4()[n],
    "x[-n]": lambda n: x4()[-n],
    "x[n, :]": lambda n: torch.arange(12.0).reshape(4, 3)[n, :],
    "x[:, n - 1]": lambda n: torch.arange(12.0).reshape(4, 3)[:, n - 1],
    "x[n] = m": assigned_at,
    "x[1] = n": assigned,
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name, parted):
    same_as_loop(PLACES[name], INTS, parted)


def test_sizes_and_other_arguments_part(parted):
    for f in (
        lambda n: torch.zeros(n),
        lambda n: torch.zeros((n, 2)),
        lambda n: torch.arange(n),
        lambda n: x4()[n:],
        lambda n: torch.add(x4(), x4(), alpha=n),
        lambda n: torch.full((n,), 1.0),
    ):
        with pytest.raises(parted):
            vmap(lambda x, f=f: f(read_scalar(x)))(INTS)


def test_a_number_too_large_for_the_dtype_is_left_to_torch(parted):
    with pytest.raises(parted):
        vmap(lambda x: torch.empty(2, dtype=torch.int32).fill_(read_scalar(x)))(
            torch.tensor([1, 2**40])
        )


def test_a_negative_power_of_ints_is_left_to_torch(parted):
    with pytest.raises(parted):
        vmap(lambda x: x4(torch.int64) ** read_scalar(x))(torch.tensor([1, -1]))


def test_derivatives_see_the_number_as_a_constant(parted):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    ns = torch.tensor([2.0, 3.0, 5.0])
    vmap(lambda n: (w * read_scalar(n)).sum() + n)(ns).sum().backward()
    assert w.grad.tolist() == [10.0, 10.0]


def test_numpys_functions_answer_for_all_examples(parted):
    np = pytest.importorskip("numpy")
    kept = []

    def f(x):
        n = read_scalar(x)
        kept.extend([np.sqrt(n), np.float64(2) * n, n - np.float64(1), np.maximum(n, 1.5)])
        with pytest.raises(parted):
            np.asarray([n])
        with pytest.raises(parted):
            _ = np.ones(2) * n
        return x

    vmap(f)(torch.tensor([1.0, 4.0]))
    assert [k.tensor.value.tolist() for k in kept] == [[1, 2], [2, 8], [0, 3], [1.5, 4]]

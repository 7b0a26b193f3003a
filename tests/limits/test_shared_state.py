"""Writes into tensors from before the call: what the loop leaves, or an error."""

import pytest
import torch

from draws import make_generator
from forall import grad, jacfwd, jacrev, jvp, vmap
from oracle import difference, loop

D = torch.float64


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=make_generator(5))


X = numbers(4, 3)
YS = numbers(2, 3)
PLACES = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0]])


def keeps_the_law(f, *buffers, args=(X,), in_dims=0, **options):
    """The results, and what is in the buffers after it, are the loop's."""
    mine, theirs = [b.clone() for b in buffers], [b.clone() for b in buffers]
    truth = loop(lambda *a: f(*theirs, *a), in_dims)(*args)
    result = vmap(lambda *a: f(*mine, *a), in_dims=in_dims, **options)(*args)
    assert difference((result, mine), (truth, theirs)) is None


def zeros(*shape):
    return torch.zeros(*shape, dtype=D)


def ones(*shape):
    return torch.ones(*shape, dtype=D)


def writing(method, *args, **kwargs):
    def f(buffer, x):
        getattr(buffer, method)(*(a(x) if callable(a) else a for a in args), **kwargs)
        return x * 2

    return f


def itself(x):
    return x


# --- what adds up ------------------------------------------------------------------------------

SUMS = {
    "add_": (writing("add_", itself), zeros(3)),
    "add_ of alpha": (writing("add_", itself, alpha=-2), ones(3)),
    "add_ of a number of each example": (writing("add_", lambda x: x[0]), ones(3)),
    "sub_": (writing("sub_", itself), ones(2, 3)),
    "addcmul_": (writing("addcmul_", itself, itself, value=3), ones(3)),
    "addcdiv_": (writing("addcdiv_", itself, lambda x: x.exp()), ones(3)),
    "addmv_": (writing("addmv_", ones(2, 3), itself, alpha=2), ones(2)),
    "addr_": (writing("addr_", itself, itself), ones(3, 3)),
    "addmm_": (writing("addmm_", lambda x: x[:, None], lambda x: x[None]), ones(3, 3)),
    "addmm_ of beta": (
        writing("addmm_", lambda x: x[:, None], lambda x: x[None], beta=0.5, alpha=2),
        ones(3, 3),
    ),
    "baddbmm_": (
        writing("baddbmm_", lambda x: x.expand(2, 3)[..., None], lambda x: x.expand(2, 1, 3)),
        ones(2, 3, 3),
    ),
    "addbmm_": (
        writing("addbmm_", lambda x: x.expand(2, 3)[..., None], lambda x: x.expand(2, 1, 3)),
        ones(3, 3),
    ),
    "index_add_ of shared places": (
        writing("index_add_", 0, torch.tensor([0, 2, 0]), itself, alpha=3),
        ones(3),
    ),
    "index_add_ into columns": (
        writing("index_add_", -1, torch.tensor([1]), lambda x: x[:2, None]),
        ones(2, 3),
    ),
    "scatter_reduce_": (
        writing("scatter_reduce_", 0, torch.tensor([0, 0, 2]), itself, "sum"),
        ones(3),
    ),
    "mul_ by what is shared": (writing("mul_", 0.5), ones(3)),
    "mul_ by a tensor": (writing("mul_", torch.arange(3.0)), ones(3)),
    "div_": (writing("div_", 3), ones(3)),
    "lerp_": (writing("lerp_", itself, 0.1), ones(3)),
    "a copy of what is shared": (writing("copy_", ones(3)), zeros(3)),
    "fill_": (writing("fill_", 2.0), zeros(3)),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_adds_up_leaves_what_the_loop_leaves(name):
    f, buffer = SUMS[name]
    keeps_the_law(f, buffer)
    keeps_the_law(f, buffer, args=(X.t(),), in_dims=1)
    keeps_the_law(f, buffer, chunk_size=3)
    keeps_the_law(f, buffer, args=(X[:1],))


BY_PLACE = {
    "index_add_": lambda b, x, i: b.index_add_(0, i, x[:2]),
    "index_add_ of rows": lambda b, x, i: b.index_add_(0, i, x.expand(2, 3)),
    "scatter_add_": lambda b, x, i: b.scatter_add_(0, i, x),
    "scatter_add_ of rows": lambda b, x, i: b.scatter_add_(1, i.expand(3, 2), x[:, None] * x[:2]),
    "index_put_": lambda b, x, i: b.index_put_((i,), x[:2], accumulate=True),
    "index_put_ of rows": lambda b, x, i: b.index_put_((i,), x, accumulate=True),
    "index_put_ of pairs": lambda b, x, i: b.index_put_(
        (i, torch.tensor([0, 2])), x[:2], accumulate=True
    ),
    "index_put_ in shared places": lambda b, x, i: b.index_put_(
        (torch.tensor([0, 2]),), x[:2], accumulate=True
    ),
    "index_put_ of a number": lambda b, x, i: b.index_put_((i,), x[0], accumulate=True),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_sums_at_each_examples_own_places(name):
    def f(buffer, x, i):
        BY_PLACE[name](buffer, x, i)
        return x

    of_rows = "row" in name or "pair" in name
    keeps_the_law(f, ones(3, 3) if of_rows else ones(3), args=(X, PLACES))


COUNTERS = {
    "int64": (torch.int64, lambda b, x: b.add_(1)),
    "int8 that wraps around": (torch.int8, lambda b, x: b.add_(100)),
    "uint8 that is subtracted from": (torch.uint8, lambda b, x: b.sub_(1)),
    "int32 product that wraps around": (torch.int32, lambda b, x: b.mul_(70000)),
    "int8 of two kinds of step": (torch.int8, lambda b, x: b.mul_(3).add_(2)),
    "float32": (torch.float32, lambda b, x: b.add_(0.25)),
    "float32 of two kinds of step": (torch.float32, lambda b, x: b.add_(1).mul_(0.5)),
    "bool": (torch.bool, lambda b, x: b.logical_or_(x.sum() > 0)),
    "bool that is added to": (torch.bool, lambda b, x: b.add_(x[0] > 0)),
    "int64 that counts": (torch.int64, lambda b, x: b.add_((x > 0).sum())),
    "int16 of float places": (torch.int16, lambda b, x: b.add_((x * 100).to(torch.int64).sum())),
    "float32 from float64": (torch.float32, lambda b, x: b.add_(x.sum())),
    "float32 from float16": (torch.float32, lambda b, x: b.add_((x * 9000).half().sum())),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_of_every_kind(name):
    dtype, count = COUNTERS[name]
    f = lambda b, x: (count(b, x), x)[1]  # noqa: E731
    if name == "float32 of two kinds of step":
        with pytest.raises(RuntimeError, match="written to otherwise"):
            keeps_the_law(f, torch.ones((), dtype=dtype))
    else:
        keeps_the_law(f, torch.ones((), dtype=dtype))


def test_a_moving_average():
    def f(average, x):
        average.mul_(0.9).add_(x, alpha=0.1)
        average.mul_(0.5).add_(x.exp())
        return x

    keeps_the_law(f, ones(3))


def test_writes_through_views_and_operators_of_python():
    def f(a, b, x):
        a[0] += x.sum()
        a[1:] -= x[1:]
        b.diagonal().add_(x)
        b.t()[0] += x
        return x

    keeps_the_law(f, ones(3), ones(3, 3))


def test_the_result_may_be_the_tensor_itself():
    buffer = torch.zeros(3)
    out = vmap(lambda x: buffer.add_(x))(torch.ones(4, 3))
    assert torch.equal(buffer, torch.full((3,), 4.0))
    assert torch.equal(out, torch.full((4, 3), 4.0))  # the loop stacks one tensor four times


def test_data_may_change_after_it_was_added():
    def f(buffer, x):
        y = x * 2
        buffer.add_(y)
        y.zero_()
        return y

    keeps_the_law(f, ones(3))


def test_no_examples_leave_nothing():
    buffer, other, count = torch.ones(3), torch.ones(3), torch.zeros((), dtype=torch.int64)
    vmap(lambda x: (buffer.add_(x), count.add_(1), other.fill_(2))[0])(torch.ones(0, 3))
    assert torch.equal(buffer, torch.ones(3))
    assert torch.equal(other, torch.ones(3))
    assert count == 0


def test_a_call_that_fails_has_added_nothing():
    buffer = torch.zeros(3)

    def f(x):
        buffer.add_(x)
        raise KeyError

    with pytest.raises(KeyError):
        vmap(f)(torch.ones(4, 3))
    assert not buffer.any()


# --- nested ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "add",
    [
        lambda b, x, y: b.add_(x * y),
        lambda b, x, y: b.add_(x),
        lambda b, x, y: b.add_(y),
        lambda b, x, y: b.add_(1),
        lambda b, x, y: b.mul_(0.5).add_(x + y),
    ],
)
def test_nested(add):
    def inner(b, x, y):
        add(b, x, y)
        return y * 2

    mine, theirs = ones(3), ones(3)
    vmap(lambda x: vmap(lambda y: inner(mine, x, y))(YS))(X)
    loop(lambda x: loop(lambda y: inner(theirs, x, y))(YS))(X)
    assert difference(mine, theirs) is None


def test_a_sum_over_inner_examples_in_a_tensor_of_the_outer_one():
    def f(x):
        total = torch.zeros(3, dtype=D)
        vmap(lambda y: total.add_(x * y))(YS)
        return total * 2

    assert difference(vmap(f)(X), loop(lambda x: 2 * x * YS.sum(0))(X)) is None


def test_a_custom_functions_backward_may_add_up_too():
    count, total = torch.zeros((), dtype=torch.int64), zeros(3)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, g):
            count.add_(1)
            total.add_(g.detach())
            return g * 2

    found = vmap(grad(lambda x: (Double.apply(x) * x.detach()).sum()))(X)
    assert difference((found, total), (2 * X, X.sum(0))) is None
    assert count == 4


# --- with derivatives --------------------------------------------------------------------------


def gradients(run, f, buffer_of):
    w = numbers(3).requires_grad_()
    x = X.clone().requires_grad_()
    buffer = buffer_of(w)
    out = run(lambda x: f(buffer, w, x))(x)
    (buffer * torch.arange(1, 4) + out.sin()).sum().backward()
    return buffer.detach(), out.detach(), w.grad, x.grad


@pytest.mark.parametrize("buffer", ["plain", "computed"])
@pytest.mark.parametrize(
    "add",
    [
        lambda b, w, x: b.add_(x * x),
        lambda b, w, x: b.add_(w * w),
        lambda b, w, x: b.add_(w * x, alpha=2).sub_(x),
        lambda b, w, x: b.addcmul_(w, x),
        lambda b, w, x: b.index_add_(0, torch.tensor([0, 2, 0]), x * w),
    ],
)
def test_gradients_reach_what_was_added(add, buffer):
    def f(b, w, x):
        add(b, w, x)
        return x * w

    buffer_of = (lambda w: zeros(3)) if buffer == "plain" else (lambda w: w * 2)
    assert difference(gradients(vmap, f, buffer_of), gradients(loop, f, buffer_of)) is None


def test_a_gradient_through_a_sum_over_inner_examples():
    def f(x):
        total = torch.zeros(3, dtype=D)
        vmap(lambda y: total.add_(x * x * y))(YS)
        return total.sum()

    assert difference(vmap(grad(f))(X), 2 * X * YS.sum(0)) is None


def test_a_tangent_through_a_sum_over_inner_examples():
    def f(x):
        total = torch.zeros(3, dtype=D)
        vmap(lambda y: total.add_(x * x * y))(YS)
        return total

    out, tangent = jvp(f, (X[0],), (X[1],))
    s = YS.sum(0)
    assert difference((out, tangent), (X[0] ** 2 * s, 2 * X[0] * X[1] * s)) is None


@pytest.mark.parametrize("verb", [grad, jacrev, jacfwd])
def test_a_derivative_calls_its_function_once(verb):
    count, seen = torch.zeros((), dtype=torch.int64), torch.zeros(3)

    def f(x):
        count.add_(1)
        seen.mul_(2).add_(torch.ones(3))
        return (x * count).sum()

    assert difference(verb(f)(X[0]), ones(3)) is None
    assert count == 1
    assert torch.equal(seen, torch.ones(3))
    vmap(verb(lambda x: (count.add_(1), x.sum())[1]))(X)
    assert count == 5


@pytest.mark.parametrize("first", [lambda w: None, lambda w: setattr(w, "grad", None)])
def test_the_sum_of_gradients_is_not_taken_for_one(first):
    w = ones(3).requires_grad_()

    def f(x):
        first(w)
        (w * x).sum().backward()
        assert w.grad is not None
        return w.grad * 2

    with pytest.raises(RuntimeError, match="sum over all examples"):
        vmap(f)(X)
    w.grad = None
    vmap(lambda x: (w * x).sum().backward())(X)
    assert difference(w.grad, X.sum(0)) is None


WITH_A_DERIVATIVE = {
    "an average": lambda b, w, x: b.mul_(0.9).add_(x),
    "a copy": lambda b, w, x: b.copy_(w),
    "a leaf": lambda b, w, x: w.add_(x),
}


@pytest.mark.parametrize("name", WITH_A_DERIVATIVE)
def test_a_write_whose_derivative_would_be_another_is_an_error(name):
    w, buffer = numbers(3).requires_grad_(), zeros(3)
    with pytest.raises(RuntimeError):
        vmap(lambda x: (WITH_A_DERIVATIVE[name](buffer, w, x), x)[1])(X.clone().requires_grad_())
    assert not buffer.any()


# --- what would be another number --------------------------------------------------------------

REFUSED = {
    "read after it was added to": lambda b, x: (b.add_(x), x + b)[1],
    "a view read after it was added to": lambda b, x: (b.add_(x), x + b[:1])[1],
    "read through a view made before": lambda b, x: (v := b[1:], b.add_(x), v * 2)[2],
    "read before it is added to": lambda b, x: (x + b, b.add_(x))[0],
    "a view read before it is added to": lambda b, x: (x + b[0], b[1:].add_(x[1:]))[0],
    "its number read": lambda b, x: (b.add_(1), x * b[0].item())[1],
    "its numbers as a list": lambda b, x: (b.add_(1), x * b.tolist()[0])[1],
    "its numbers as an array": lambda b, x: (b.add_(1), x * float(b.numpy()[0]))[1],
    "a view's numbers as a list": lambda b, x: (b.add_(1), x * b[:2].tolist()[0])[1],
    "added to itself": lambda b, x: (b.add_(b), x)[1],
    "a counter read": lambda b, x: (b.add_(1), x * b)[1],
    "overwritten by each example": lambda b, x: (b.copy_(x), x)[1],
    "set to zero, then added to": lambda b, x: (b.zero_(), b.add_(x), x)[2],
    "added to, then set to zero": lambda b, x: (b.add_(x), b.zero_(), x)[2],
    "read, then overwritten": lambda b, x: (x * b, b.fill_(2))[0],
    "read, then out": lambda b, x: (x * b, torch.add(b, 1, out=b))[0],
    "multiplied by each example": lambda b, x: (b.mul_(x), x)[1],
    "added to, then multiplied": lambda b, x: (b.add_(x), b.mul_(2), x)[2],
    "multiplied here and added to there": lambda b, x: (b[:2].mul_(2), b.add_(x), x)[2],
    "clamped, then turned positive": lambda b, x: (b.clamp_max_(-1), b.abs_(), x)[2],
    "sine of itself": lambda b, x: (b.sin_(), x)[1],
    "read inside": lambda b, x: (b.add_(x), vmap(lambda y: y * b)(x[:, None]))[1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_another_example_would_see_is_an_error(name):
    buffer = ones(3)
    with pytest.raises(RuntimeError, match=r"^vmap: "):
        vmap(lambda x: REFUSED[name](buffer, x))(X)


def test_what_is_overwritten_as_a_whole_may_be_used_as_the_functions_own():
    def f(scratch, x):
        scratch.copy_(torch.arange(3))
        scratch.add_(1)
        y = x * scratch
        scratch.mul_(2)
        return y + scratch

    keeps_the_law(f, ones(3))


def test_asking_for_its_shape_is_no_read():
    def f(b, x):
        y = torch.zeros_like(b) + b.new_ones(3)
        b.add_(x)
        return y + torch.empty_like(b).fill_(len(b))

    keeps_the_law(f, ones(3))


# --- mapped arguments --------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "write",
    [
        lambda x, y: x.add_(y),
        lambda x, y: x[0].mul_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.t().fill_(y),
        lambda x, y: torch.mul(x, y, out=x),
    ],
)
def test_the_caller_sees_what_is_written_into_a_mapped_argument(axis, write):
    mine, theirs = numbers(3, 4, 2), numbers(3, 4, 2)
    ys = torch.arange(1.0, 1 + mine.shape[axis], dtype=D)
    f = lambda x, y: write(x, y) * 1  # noqa: E731
    result = vmap(f, in_dims=(axis, 0))(mine, ys)
    truth = loop(f, (axis, 0))(theirs, ys)
    assert difference((result, mine), (truth, theirs)) is None


def test_the_parts_of_a_stack_that_overlap_cannot_be_written_to():
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        vmap(lambda x: x.add_(1))(torch.zeros(3).expand(4, 3))


@pytest.mark.parametrize(
    "f",
    [
        lambda xs, x: x.mul_(2) + xs.sum(),
        lambda xs, x: xs.sum() + x.mul_(2),
        lambda xs, x: (xs[0].add_(x), x)[1],
        lambda xs, x: (xs.fill_(1), x * 1)[1],
    ],
)
def test_a_mapped_argument_that_is_captured_too(f):
    xs = ones(4, 3)
    with pytest.raises(RuntimeError, match=r"^vmap: .* that the function has "):
        vmap(lambda x: f(xs, x))(xs)

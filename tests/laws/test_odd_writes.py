"""What torch answers in a way of its own, in place above all, next to the loop over examples."""

import pytest
import torch

import forall
from oracle import difference

D = torch.float64


def draw(*shape):
    return torch.randn(*shape, dtype=D)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_the_derivative_in_the_value_of_index_fill(dim, in_place):
    """Examples differ in how many places there are."""
    x, value = draw(3, 4, 4), draw(3)
    index = torch.tensor([[0, 1, 2], [3, 3, 0], [1, 1, 1]])

    def f(x, index, value):
        x = x.clone()
        return (x.index_fill_ if in_place else x.index_fill)(dim, index, value)

    def each(x, value):
        return torch.stack([f(*one) for one in zip(x, index, value, strict=True)])

    weights = draw(3, 4, 4)
    leaves = [t.clone().requires_grad_() for t in (x, value)]
    truth = torch.autograd.grad((each(*leaves) * weights).sum(), leaves)
    value_and_pull = forall.vjp(lambda x, v: forall.vmap(f)(x, index, v), x, value)
    assert difference(value_and_pull[1](weights), truth) is None
    scalars = forall.vmap(forall.grad(lambda x, i, v, w: (f(x, i, v) * w).sum(), argnums=(0, 2)))
    assert difference(scalars(x, index, value, weights), truth) is None


def test_index_fill_of_a_number():
    f = lambda x, i, v: x.clone().index_fill(0, i, v)  # noqa: E731
    x, value, index = draw(3), draw(3), torch.zeros(3, 1, dtype=torch.int64)
    found = forall.vjp(lambda v: forall.vmap(f)(x, index, v), value)
    assert difference((found[0], found[1](x)), (value, (x,))) is None


def test_baddbmm_of_integers_takes_its_factors_as_integers():
    x, a, b = torch.arange(72).view(3, 3, 2, 2, 2)
    f = lambda *one: torch.baddbmm(*one, beta=1.7, alpha=2.6)  # noqa: E731
    truth = torch.stack([f(*one) for one in zip(x, a, b, strict=True)])
    assert difference(forall.vmap(f)(x, a, b), truth) is None


def test_baddbmm_of_a_bias_that_is_mapped_and_not_used():
    x, a, b = draw(3, 2, 2, 2), draw(2, 2, 2), draw(2, 2, 2)
    found = forall.vmap(lambda x: torch.baddbmm(x, a, b, beta=0))(x)
    assert difference(found, torch.bmm(a, b).expand(3, 2, 2, 2)) is None


def test_addbmm_takes_the_shape_of_its_result():
    x, a, b = draw(3, 1), draw(3, 2, 5, 4), draw(3, 2, 4, 6)
    found = forall.vmap(lambda x, a, b: x.clone().addbmm_(a, b))(x, a, b)
    truth = torch.stack([torch.addbmm(*one) for one in zip(x, a, b, strict=True)])
    assert difference(found, truth) is None
    with pytest.raises(RuntimeError, match="would resize"):
        forall.vmap(torch.Tensor.addbmm_)(x, a, b)


def test_a_shared_tensor_takes_the_size_that_all_examples_have():
    x = torch.zeros(2, 2)
    forall.vmap(lambda y: x.resize_as_(y).sum())(draw(3, 3))
    assert x.shape == (3,)


def onto_itself(q):
    q[1] = q[1].reshape(1, 2)


def added_to_itself(q):
    q[1].add_(q[1].reshape(1, 2))


def a_slice_onto_itself(q):
    q[1:2] = q[1].t().reshape(1, 1, 2)


def at_most_itself(q):
    q[1].clamp_(max=q[1].t().reshape(1, 2))


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize(
    "write", [onto_itself, added_to_itself, a_slice_onto_itself, at_most_itself]
)
def test_what_is_written_is_a_view_of_the_same_memory(write, chunk_size, many):
    """A stack of one example has an axis more, which may have another stride in each view."""

    def f(x):
        q = torch.zeros(3, 1, 2, dtype=D)
        q[0], q[1] = x, 2 * x
        write(q)
        return q

    x = draw(many, 1, 2)
    for axis in (0, 1):
        found = forall.vmap(f, axis, chunk_size=chunk_size)(x.movedim(0, axis).contiguous())
        assert difference(found, torch.stack([f(one) for one in x])) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.index_put_((x > 0,), x.sum()),
        lambda y, x: torch.index_put_(y, [x > 0], x[0] * 2),
        lambda y, x: y.index_put_((x > 0,), x.sum()).mul_(2),
        lambda y, x: y.unsqueeze(-1).index_put_((x > 0,), x[:1]),
    ],
)
def test_one_value_at_the_places_of_a_mask_has_a_derivative_outside(write):
    def f(x):
        y = x * 1
        write(y, x)
        return (y * y).sum()

    xs = torch.tensor([[1.0, -2.0, 3.0], [-1.0, -2.0, 3.0]], dtype=torch.float64)
    wanted = torch.stack([forall.grad(f)(x) for x in xs])
    assert difference(forall.vmap(forall.grad(f))(xs), wanted) is None
    assert difference(forall.grad(lambda xs: forall.vmap(f)(xs).sum())(xs), wanted) is None


@pytest.mark.parametrize("way", ["hessian", "jacfwd of jacrev of vmap", "jacfwd twice"])
@pytest.mark.parametrize("shape", [(4,), (6,), (2, 2), (3, 2)])
def test_second_derivatives_of_masked_scatter_in_the_source(shape, way):
    """The source is of a shape of its own."""
    mask = torch.tensor([[True, False], [True, True]])

    def f(x):
        y = (x.flatten()[:4] ** 2).view(2, 2).clone()
        y.masked_scatter_(mask, x.sin() * x)
        return (y**3).sum()

    x = draw(*shape)
    truth = torch.autograd.functional.hessian(f, x)
    if way == "hessian":
        found = forall.hessian(f)(x)
    elif way == "jacfwd twice":
        found = forall.jacfwd(forall.jacfwd(f))(x)
    else:
        found = forall.jacfwd(forall.jacrev(lambda x: forall.vmap(f)(x[None])[0]))(x)
    assert difference(found, truth) is None

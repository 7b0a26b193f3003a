"""Transforms beside torch.distributed: a group of one process shows what levels do with it.

A collective of torch.distributed within a level is an error: it would answer for all examples
at once, or read memory that a wrapper does not have. Around and beside levels all is as ever.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore"),  # of torch.distributed's own collectives in autograd
]


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHARED = torch.ones(3)


def reduces_in_place(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def reduces_what_it_makes(x):
    c = torch.ones(3)
    dist.all_reduce(c)
    return x * c


def reduces_what_it_captures(x):
    dist.all_reduce(SHARED)
    return x * SHARED


def gathers(x):
    outs = [torch.empty_like(x)]
    dist.all_gather(outs, x)
    return outs[0]


def broadcasts(x):
    y = x * 1
    dist.broadcast(y, 0)
    return y


def reduces_functionally(x):
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(x, "sum", dist.group.WORLD) * 2


def gathers_functionally(x):
    import torch.distributed._functional_collectives as functional

    return functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))


COLLECTIVES = [
    reduces_in_place,
    reduces_what_it_makes,
    reduces_what_it_captures,
    gathers,
    broadcasts,
    reduces_functionally,
    gathers_functionally,
]
X = torch.arange(1.0, 13.0).reshape(4, 3)
UNDER_A_LEVEL = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of vmap": lambda f: vmap(vmap(f))(X[None]),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(X),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(X),
    "jvp": lambda f: jvp(f, (X[0],), (X[1],)),
    "jacfwd": lambda f: jacfwd(f)(X[0]),
    "linearize": lambda f: linearize(f, X[0]),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(X[0]),
}


# The operator, the user's line, and the cure.
REFUSED = r"c10d.* communicates between processes.*\n    at   .*py:[^$]*forall\.psum\(x, 'b'\)"


@pytest.mark.parametrize("f", COLLECTIVES)
@pytest.mark.parametrize("transform", UNDER_A_LEVEL)
def test_a_collective_under_a_level_is_an_error(f, transform):
    with pytest.raises(RuntimeError, match=REFUSED):
        UNDER_A_LEVEL[transform](f)
    assert torch.equal(vmap(torch.sin)(X), X.sin())  # nothing is left behind


@pytest.mark.parametrize("f", COLLECTIVES)
def test_a_collective_under_jit_runs_with_each_call(f, monkeypatch):
    calls = []
    for name in ("all_reduce", "all_gather", "broadcast"):
        plain = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *a, plain=plain, **k: (calls.append(1), plain(*a, **k))
        )
    fast = jit(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = [fast(X[0]) for _ in range(6)]
    assert all(torch.equal(y, f(X[0])) for y in got)
    if "functionally" not in f.__name__:
        assert len(calls) == 12


def test_a_collective_under_grad_alone_is_as_in_autograd():
    import torch.distributed.nn.functional as differentiable

    got = grad(lambda x: (differentiable.all_reduce(x) ** 2).sum())(X[0])
    assert torch.equal(got, 2 * X[0])


# --- DTensor ------------------------------------------------------------------------------------


def distributed(x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])


def test_results_of_dtensors_are_dtensors_with_memory():
    from torch.distributed.tensor import DTensor

    x = distributed(X)
    value, pull = vjp(lambda x: (x * x).sum(1), x)
    for out, want in (
        (value, (X * X).sum(1)),
        (pull(torch.ones_like(value))[0], 2 * X),
        (grad(lambda x: (x**3).sum())(x), 3 * X**2),
        (vmap(lambda r: (r * r).sum())(x), (X * X).sum(1)),
    ):
        assert isinstance(out, DTensor)
        assert torch.equal(out.full_tensor(), want)


def test_the_gradient_through_a_local_map_of_vmap_is_a_dtensor():
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import local_map

    x = distributed(X)
    f = local_map(
        lambda xs: vmap(lambda r: (r**3).sum())(xs),
        out_placements=[Shard(0)],
        in_placements=([Shard(0)],),
        device_mesh=x.device_mesh,
    )
    out = grad(lambda x: torch.sum(f(x)))(x)
    assert isinstance(out, DTensor)
    assert torch.equal(out.full_tensor(), 3 * X**2)


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
def test_a_jacobian_of_a_dtensor_is_right_or_an_error(transform):
    x = distributed(X)
    try:
        out = transform(lambda x: (x * x).sum(1))(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return  # torch's DTensor does not mix with examples of its cotangents
    want = transform(lambda x: (x * x).sum(1))(X)
    assert torch.equal(out.full_tensor(), want)


# --- FSDP2 --------------------------------------------------------------------------------------


def networks():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    sharded = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded)
    return plain, sharded


@pytest.mark.parametrize(
    "transform",
    [
        lambda m: vmap(lambda x: m(x[None])[0, 0])(X),
        lambda m: vmap(grad(lambda x: m(x[None])[0, 0]))(X),
        lambda m: jacrev(m)(X),
        lambda m: jvp(m, (X,), (X,))[1],
        lambda m: grad(lambda x: m(x).sum())(X),
    ],
    ids=["vmap", "vmap of grad", "jacrev", "jvp", "grad"],
)
def test_a_module_under_fsdp2_is_the_module(transform):
    plain, sharded = networks()
    want, got = transform(plain), transform(sharded)
    torch.testing.assert_close(got, want)


def test_gradients_of_parameters_under_fsdp2_are_those_of_the_module():
    plain, sharded = networks()
    for m in (plain, sharded):
        vmap(lambda x, m=m: m(x[None])[0, 0])(X).sum().backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)

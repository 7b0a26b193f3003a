"""Pointwise operators on large tensors, run in blocks: each bit is that of the call as it is."""

from __future__ import annotations

import random

import pytest
import torch

from forall import grad, jit, vmap
from forall._jit.passes import tiling

UNARY = [
    torch.sin,
    torch.exp,
    torch.tanh,
    torch.sigmoid,
    torch.nn.functional.gelu,
    torch.nn.functional.silu,
    torch.erf,
    torch.log1p,
    torch.sqrt,
    torch.neg,
    lambda a: a.clamp(-0.5, 2),
    lambda a: a**3,
    lambda a: a * 0.3 + 1,
    lambda a: torch.where(a > 0, a, a * 0.1),
    lambda a: a.round(decimals=1),
]
BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.div,
    torch.maximum,
    torch.atan2,
    torch.hypot,
    lambda a, b: a.abs() ** b,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3),
    lambda a, b: torch.add(a, b, alpha=2),
    lambda a, b: torch.addcmul(a, b, b, value=0.5),
    lambda a, b: a.to(torch.float64) * b,
    lambda a, b: (a < b) * a,
]


def list_inner(a):
    """All dims but the first."""
    return tuple(range(1, a.dim()))


# Between groups: what reads them whole, changes their shape, or writes into memory.
OTHERS = [
    lambda a: a - a.mean(),
    lambda a: a / (a.abs().sum(-1, keepdim=True) + 1),
    lambda a: a.flip(0),
    lambda a: a.softmax(-1),
    lambda a: a.reshape(-1).reshape(a.shape),
    lambda a: a.clone().mul_(2),
    lambda a: torch.cat([a[:1] * 2, a[1:]]),
    lambda a: a.cumsum(0).tanh(),
    lambda a: a + a.square().sum(list_inner(a), keepdim=True) if a.dim() > 1 else a,
    lambda a: a / (a * 2).sum(list_inner(a)).view(-1, *[1] * (a.dim() - 1)) if a.dim() > 1 else a,
    lambda a: a * (a * 3).sum(0, keepdim=True),
    lambda a: a + a.exp().sum(-a.dim()),
]
SHAPES = [(80, 64), (77, 64), (1, 5003), (3, 2000), (100, 7, 8), (4100,), (256, 20), (5, 1100)]
SHAPES += [(8, 512), (4, 8, 128), (2, 256, 9)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So small that the tensors of a test have many of them."""
    monkeypatch.setattr(tiling, "_BLOCK_ENTRIES", 1024)
    monkeypatch.setattr(tiling, "_COLUMN_ENTRIES", 4096)
    monkeypatch.setattr(tiling, "_LARGE", 1024)
    monkeypatch.setattr(tiling, "_WORTH", 1)
    monkeypatch.setattr(tiling, "_LEAST_SPARED", 1)
    monkeypatch.setattr(tiling, "_SMALL", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pieces(monkeypatch):
    """How many pieces were made."""
    made = []
    there = tiling._make_tiled_node

    def counted(*args):
        made.append(there(*args))
        return made[-1]

    monkeypatch.setattr(tiling, "_make_tiled_node", counted)
    return made


def bits(a):
    return a.reshape(-1).contiguous().view(torch.uint8)


def given(rng, shape, dtype):
    """Tensors of a shape, or that are broadcast to it, lying in one way or another."""
    full = torch.randn(shape, dtype=dtype)
    found = [
        full,
        torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))),
        torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2],
        torch.randn(shape[-1:], dtype=dtype),
        torch.randn((*shape[:-1], 1), dtype=dtype),
        torch.randn((), dtype=dtype),
        torch.randn((1, *shape[1:]), dtype=dtype),
    ]
    return [full, *rng.choices(found, k=3)]


def composed(rng, count):
    """A function of some tensors, of so many random operators: what is made last, and some more."""
    steps = []
    for _ in range(count):
        kind = rng.choice([UNARY, UNARY, BINARY, BINARY, BINARY, OTHERS])
        steps.append((rng.choice(kind), kind is BINARY, rng.random(), rng.random()))
    kept = rng.randrange(count)

    def f(*tensors):
        made = [*tensors]
        for op, two, i, j in steps:
            a, b = (made[int(len(made) * max(x, 0.3 * y))] for x, y in ((i, j), (j, i)))
            made.append(op(a, b) if two else op(a) if a.dim() else op(a.expand(2, 3)).sum())
        return made[-1], made[kept + len(tensors)]

    return f


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(40))
def test_random_operators(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    f = composed(rng, 14)
    tensors = given(rng, rng.choice(SHAPES), dtype)
    jitted = jit(f)
    for _ in range(2):
        for found, expected in zip(jitted(*tensors), f(*tensors), strict=True):
            assert found.stride() == expected.stride()
            assert found.dtype == expected.dtype
            assert bits(found).equal(bits(expected))
        tensors = [t + 0.5 for t in tensors]


def long(x, b):
    for _ in range(3):
        x = ((x.sin() * b + x).tanh() - 0.1 * b).exp()
    return x


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_done(shape, pieces):
    x, b = torch.randn(shape), torch.randn(shape[-1:])
    jitted = jit(long)
    jitted(x, b)
    assert bits(jitted(x, b)).equal(bits(long(x, b)))
    cut = shape not in ((3, 2000), (5, 1100), (2, 256, 9))  # a row is more than a block
    assert len(pieces) == cut


def test_flat_where_all_lie_alike(pieces):
    x = torch.randn(3, 2000)
    jitted = jit(lambda x, y: long(x, y).mul(2))
    jitted(x, x)
    assert len(pieces) == 1
    assert bits(jitted(x, x + 1)).equal(bits(long(x, x + 1) * 2))


@pytest.mark.parametrize("seed", range(10))
def test_both_halves_of_a_derivative(seed, pieces):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ops = [rng.choice(UNARY[:9]) for _ in range(6)]

    def f(x, b):
        for op in ops:
            x = (op(x.abs() + b) * x).tanh() + b
        return x

    x, b = torch.randn(64, 40), torch.rand(40)
    run = jit(f)
    for _ in range(3):
        ends = [t.clone().requires_grad_() for t in (x, b)]
        others = [t.clone().requires_grad_() for t in (x, b)]
        run(*ends).square().sum().backward()
        f(*others).square().sum().backward()
        for end, other in zip(ends, others, strict=True):
            torch.testing.assert_close(end.grad, other.grad)
    assert pieces


def test_gradients_of_examples(pieces):
    x, w = torch.randn(64, 40), torch.randn(40)
    f = vmap(grad(lambda x: long(x, w).sum()))
    run = jit(f)
    for _ in range(3):
        assert bits(run(x)).equal(bits(f(x)))
        w.mul_(0.9)
        x = x * 0.8
    assert pieces


@pytest.mark.parametrize("count", [1 << 20, (1 << 20) + 128])
def test_by_two_threads(count, pieces, monkeypatch):
    monkeypatch.setattr(tiling, "_BLOCK_ENTRIES", 1 << 16)
    torch.set_num_threads(2)
    x, b = torch.randn(count), torch.randn(())
    run = jit(long)
    run(x, b)
    assert bits(run(x, b)).equal(bits(long(x, b)))
    assert len(pieces) == (count == 1 << 20)  # a share would not end with a whole vector


def test_an_argument_that_is_written_into():
    def f(x, y):
        a = (x.sin() + 1).exp() * y
        x.mul_(2)
        return (a + x).tanh().neg() * y, x

    x = torch.randn(64, 40)
    run = jit(f)
    for _ in range(3):
        mine, theirs = x.clone(), x.clone()
        for found, expected in zip((*run(mine, x), mine), (*f(theirs, x), theirs), strict=True):
            assert bits(found).equal(bits(expected))


def test_an_operand_by_two_names():
    """The square's transpose has its entries in other blocks."""

    def f(x):
        a = x @ x
        b = a.t()
        c = a.sin().mul(b).exp() + b
        return c.tanh()

    x = torch.randn(40, 40) / 10
    run = jit(f)
    for _ in range(3):
        assert bits(run(x)).equal(bits(f(x)))


@pytest.mark.parametrize("least", ["_LARGE", "_WORTH"])
def test_what_is_in_the_caches_is_not_cut(least, pieces, monkeypatch):
    monkeypatch.setattr(tiling, least, 1 << 20)
    jit(long)(torch.randn(64, 64), torch.randn(64))
    assert not pieces


# --- sums ----------------------------------------------------------------------------------------


def norms(x, y):
    z = x[:, :, None] * y[:, None]
    return z.square().sum((1, 2)), z


def scaled_sums(x, y):
    z = x[:, :, None] * y[:, None]
    return (z / (1 + y.sum(1)[:, None, None])).sum(0), z.exp().sum(0, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((40, 5), (40, 64)), ((8, 64), (8, 2)), ((3, 7), (3, 129))])
@pytest.mark.parametrize("f", [norms, scaled_sums])
def test_sums_of_rows_and_of_columns(f, shapes, dtype):
    run = jit(f)
    for seed in range(3):
        torch.manual_seed(seed)
        given = [torch.rand(shape, dtype=torch.double).to(dtype) for shape in shapes]
        for found, expected in zip(run(*given), f(*given), strict=True):
            assert found.stride() == expected.stride()
            assert bits(found).equal(bits(expected))


@pytest.mark.parametrize("f", [norms, scaled_sums])
def test_what_is_summed_is_cut_too(f, pieces):
    jit(f)(torch.rand(16, 64), torch.rand(16, 8))
    assert any("sum" in node.op.run.source for node in pieces)


@pytest.mark.parametrize("size", [64, 65, 128])
def test_sums_of_rows_that_meet_columns(size):
    """A sum of rows of a square matrix is added along columns, where it has lost its dim."""
    x = torch.rand(size, size)

    def f(x):
        y = x.sin() * 3
        lost, kept = y.exp().sum(1), y.exp().sum(1, keepdim=True)
        return (y + lost).cos() * kept, (y * y.sum(0)).exp(), y.sum(0) + lost

    run = jit(f)
    for _ in range(3):
        for found, expected in zip(run(x), f(x), strict=True):
            assert bits(found).equal(bits(expected))


@pytest.mark.parametrize("threads", [2, 3])
def test_sums_with_several_threads(threads):
    torch.set_num_threads(threads)
    given = torch.rand(30, 64), torch.rand(30, 64)
    for f in (norms, scaled_sums):
        run = jit(f)
        for _ in range(3):
            for found, expected in zip(run(*given), f(*given), strict=True):
                assert bits(found).equal(bits(expected))


# --- rematerialization ---------------------------------------------------------------------------


@pytest.fixture
def remade(monkeypatch):
    """The operators that groups make again."""
    found = []
    there = tiling._insert_steps

    def counted(program, groups, steps, kept):
        done = there(program, groups, steps, kept)
        found.extend(steps if done else [])
        return done

    monkeypatch.setattr(tiling, "_insert_steps", counted)
    return found


def clipped(x, y):
    g = x[:, :, None] * y[:, None]
    return (g / g.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1)).sum(0)


def clipped_with_bias(x, y):
    g = (x[:, :, None] * y[:, None] - x[:, :1, None]) * 0.5
    norms = g.square().sum((1, 2))
    x = x / norms[:, None]  # in the memory of x, as far as the program can tell
    return (g / norms[:, None, None]).sum(0), (g * 2).tanh().sum(0), x.sum(0)


@pytest.mark.parametrize("f", [clipped, clipped_with_bias])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_outer_product_is_made_again(f, dtype, remade):
    run = jit(lambda x, y: f(x.sin(), y.cos()))
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(32, 16).to(dtype), torch.randn(32, 32).to(dtype)
        for found, expected in zip(run(x, y), f(x.sin(), y.cos()), strict=True):
            assert bits(found).equal(bits(expected))
    assert remade


def test_it_is_never_kept_as_a_whole(remade, pieces):
    x, y = torch.randn(32, 16), torch.randn(32, 32)
    jit(clipped)(x, y)
    assert remade
    assert len(pieces) == 2
    made = [layout for node in pieces for layout in node.op.layouts]
    assert max(layout.storage_entries for layout in made) <= 16 * 32


def test_what_is_a_result_is_kept(remade):
    def f(x, y):
        g = x[:, :, None] * y[:, None]
        return g, (g.exp() / g.square().sum((1, 2), keepdim=True)).sum(0), g.sum(0)

    x, y = torch.randn(32, 16), torch.randn(32, 32)
    run = jit(f)
    for _ in range(3):
        for found, expected in zip(run(x, y), f(x, y), strict=True):
            assert bits(found).equal(bits(expected))
    assert not remade


@pytest.mark.parametrize("place", ["an operand", "the product", "a view of the product"])
def test_what_the_user_writes_into_is_not_made_again(place, remade):
    def f(x, y):
        x = x.sin()
        g = x[:, :, None] * y[:, None]
        norms = g.square().sum((1, 2), keepdim=True)
        {"an operand": x, "the product": g, "a view of the product": g[1:]}[place].mul_(2)
        return (g / norms).sum(0) + x.sum()

    x, y = torch.randn(32, 16), torch.randn(32, 32)
    run = jit(f)
    for _ in range(3):
        assert bits(run(x, y)).equal(bits(f(x, y)))
    assert not remade


STEPS = {
    "outer": lambda x, y, g: x[:, :, None] * y[:, None],
    "plus": lambda x, y, g: g + x[:, :, None],
    "scaled": lambda x, y, g: g * y[:, None],
    "difference": lambda x, y, g: y[:, None] - g,
    "written": lambda x, y, g: g.mul_(0.5),
    "slow": lambda x, y, g: g.exp().tanh(),
    "rows": lambda x, y, g: g / (g * g).sum((1, 2), keepdim=True),
    "columns": lambda x, y, g: g - (g * 0.5).sum(0),
    "norms": lambda x, y, g: g * (g.abs().sum((1, 2)) + 1)[:, None, None].sqrt(),
}
CHANGES = {  # of the small tensors
    "scaled": lambda x, y, g: (x / (g.sum((1, 2)) ** 2 + 1)[:, None], y),
    "both": lambda x, y, g: (x + g.square().sum(0).sum(1), y * 0.9),
    "written": lambda x, y, g: (x, y.mul_(0.5)),
    "part": lambda x, y, g: (x, torch.cat([y[:, :1], y[:, 1:].sin_()], 1)),
    "anew": lambda x, y, g: (x.tanh() * 2, y.abs() - 1),
}


def compose_outer_products(rng, count):
    """Return a function of two matrices that makes large tensors of them, and sums these."""
    steps = [
        (
            rng.choice([*STEPS] * 2 + ["outer"] * 3),
            rng.random() < 0.4 and rng.choice([*CHANGES]),
            rng.random(),
        )
        for _ in range(count)
    ]

    def f(x, y):
        x, y = x.sin(), y + 1
        large, sums = [STEPS["outer"](x, y, None)], []
        for name, change, place in steps:
            g = large[int(place * len(large))]
            large.append(STEPS[name](x, y, g))
            if change:
                x, y = CHANGES[change](x, y, g)
            sums.append(large[-1].sum(0 if place < 0.6 else (1, 2)))
        return *sums, x, y

    return f


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(40))
def test_random_outer_products(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    f = compose_outer_products(rng, 6)
    run = jit(f)
    for _ in range(2):
        x, y = torch.randn(32, 16, dtype=dtype), torch.randn(32, 32, dtype=dtype)
        for found, expected in zip(run(x, y), f(x, y), strict=True):
            assert found.stride() == expected.stride()
            assert bits(found).equal(bits(expected))

"""Keys, bits and uniform numbers are those of jax.random, bit for bit."""

import os

import pytest
import torch

import forall.random as R

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is in the dev extra")
np = pytest.importorskip("numpy")

SEEDS = (0, 1, 42, 2**31, 2**32 - 1)
SHAPES = ((), (1,), (7,), (3, 0), (4, 5, 6), (1000,))


def numbers(key) -> torch.Tensor:
    """A key of JAX as one of ours."""
    return torch.from_numpy(np.array(jax.random.key_data(key)).astype(np.int64))


@pytest.fixture(autouse=True)
def schedule():
    assert jax.config.jax_threefry_partitionable


@pytest.mark.parametrize("seed", SEEDS)
def test_keys(seed):
    theirs, ours = jax.random.key(seed), R.key(seed)
    assert torch.equal(numbers(theirs), ours)
    for num in (1, 2, 5, 300, (2, 3)):
        assert torch.equal(numbers(jax.random.split(theirs, num)), R.split(ours, num))
    for data in (0, 1, 7, 2**31, 2**32 - 1):
        assert torch.equal(numbers(jax.random.fold_in(theirs, data)), R.fold_in(ours, data))
    second = R.fold_in(R.split(ours)[1], 3)
    assert torch.equal(numbers(jax.random.fold_in(jax.random.split(theirs)[1], 3)), second)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(seed, shape):
    theirs, ours = jax.random.key(seed), R.key(seed)
    for width in (8, 16, 32):
        expected = np.array(jax.random.bits(theirs, shape, f"uint{width}"))
        drawn = R.bits(ours, shape, getattr(torch, f"uint{width}"))
        assert np.array_equal(drawn.numpy(), expected)
        signed = R.bits(ours, shape, getattr(torch, f"int{width}"))
        assert np.array_equal(signed.numpy().view(f"uint{width}"), expected)


def test_64_bits():
    with jax.enable_x64(True):
        theirs = jax.random.key(3)
        expected = np.array(jax.random.bits(theirs, (50,), "uint64"))
        uniform = np.array(jax.random.uniform(theirs, (50,), "float64"))
        normal = np.array(jax.random.normal(theirs, (50,), "float64"))
    assert np.array_equal(R.bits(R.key(3), (50,), torch.uint64).numpy(), expected)
    assert np.array_equal(R.uniform(R.key(3), (50,), torch.float64).numpy(), uniform)
    ours = R.normal(R.key(3), (50,), torch.float64)
    torch.testing.assert_close(ours, torch.from_numpy(normal), rtol=1e-12, atol=1e-12)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform(seed, shape):
    theirs, ours = jax.random.key(seed), R.key(seed)
    expected = np.array(jax.random.uniform(theirs, shape))
    assert np.array_equal(R.uniform(ours, shape).numpy(), expected)
    for low, high in ((-1.0, 1.0), (0.1, 0.7), (-3.3, 9.1), (1e-3, 1e3)):
        expected = np.array(jax.random.uniform(theirs, shape, "float32", low, high))
        drawn = R.uniform(ours, shape, torch.float32, low, high)
        assert np.array_equal(drawn.numpy(), expected)


def test_uniform_in_half_precision():
    expected = np.array(jax.random.uniform(jax.random.key(0), (1000,), "float16"))
    assert np.array_equal(R.uniform(R.key(0), (1000,), torch.float16).numpy(), expected)
    brain = np.array(jax.random.uniform(jax.random.key(0), (1000,), "bfloat16").astype("float32"))
    assert np.array_equal(R.uniform(R.key(0), (1000,), torch.bfloat16).float().numpy(), brain)


@pytest.mark.parametrize("seed", SEEDS)
def test_normal(seed):
    expected = torch.from_numpy(np.array(jax.random.normal(jax.random.key(seed), (100_000,))))
    torch.testing.assert_close(R.normal(R.key(seed), (100_000,)), expected, rtol=1e-5, atol=1e-5)


def test_what_follows_by_a_formula():
    theirs, ours = jax.random.key(5), R.key(5)
    for name in ("exponential", "gumbel", "laplace"):
        expected = torch.from_numpy(np.array(getattr(jax.random, name)(theirs, (10_000,))))
        drawn = getattr(R, name)(ours, (10_000,))
        torch.testing.assert_close(drawn, expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(
        R.bernoulli(ours, 0.3, (1000,)).numpy(),
        np.array(jax.random.bernoulli(theirs, 0.3, (1000,))),
    )
    assert np.array_equal(
        R.rademacher(ours, (1000,)).numpy(), np.array(jax.random.rademacher(theirs, (1000,)))
    )
    expected = torch.from_numpy(np.array(jax.random.truncated_normal(theirs, -1.0, 2.0, (10_000,))))
    drawn = R.truncated_normal(ours, -1.0, 2.0, (10_000,))
    torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-4)

"""Random draws: the three modes, seeds, keys, generators, runs that are undone and made anew."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import forall
from forall import grad, jit, vmap
from gpu.checks import Check, Skipped, assert_same, default_device, numbers, truth_of


def checks(device: torch.device) -> list[Check]:
    xs = numbers(device, 6, 4, dtype=torch.float32)
    return [
        Check(name.replace("_", " "), lambda f=f: f(device, xs))
        for name, f in globals().items()
        if name.startswith("draws_")
    ]


def draws_of_each_mode(device, xs):
    found = vmap(lambda x: torch.rand(3, device=device), randomness="different")(xs)
    assert found.unique(dim=0).shape[0] == 6, "examples drew the same numbers"
    found = vmap(lambda x: torch.rand(3, device=device) + 0 * x[0], randomness="same")(xs)
    assert found.unique(dim=0).shape[0] == 1, "examples drew other numbers"
    try:
        vmap(lambda x: torch.rand(3, device=device))(xs)
    except RuntimeError:
        return
    raise AssertionError("draws without a mode raised nothing")


def draws_of_one_seed(device, xs):
    mapped = vmap(lambda x: F.dropout(x.exp()), randomness="different")
    for f in (mapped, jit(mapped)):
        f(xs)
        torch.manual_seed(3)
        first = f(xs)
        torch.manual_seed(3)
        assert_same(f(xs), first)
        assert not torch.equal(f(xs), first), "a later call repeats the draws"


def draws_replayed_are_those_of_the_call(device, xs):
    mapped = vmap(
        lambda x: F.dropout(x.exp()) + torch.rand(4, device=device), randomness="different"
    )
    recorded = jit(mapped)
    for seed in range(4):
        torch.manual_seed(seed)
        truth = mapped(xs), torch.rand(2, device=device)
        torch.manual_seed(seed)
        assert_same((recorded(xs), torch.rand(2, device=device)), truth)


def draws_of_keys_are_those_of_the_cpu(device, xs):
    if device.type == "cpu":
        raise Skipped("this is the CPU")
    key = forall.random.key(7)
    for draw in ("uniform", "normal", "exponential", "gumbel", "bits"):
        f = getattr(forall.random, draw)
        truth, found = f(key, (64,)), f(key.to(device), (64,))
        assert found.device == device, f"{draw}: on {found.device}"
        assert torch.allclose(truth.double(), found.cpu().double(), atol=1e-5), draw
    found = vmap(lambda x: torch.rand(3, device=x.device), randomness=key)(xs)
    truth = vmap(lambda x: torch.rand(3), randomness=key)(xs.cpu())
    assert_same(found.cpu(), truth)
    moved = vmap(lambda x: torch.rand(3, device=x.device), randomness=key.to(device))(xs)
    assert_same(moved.cpu(), truth)


def draws_of_keys_do_not_hang_on_chunks(device, xs):
    key = forall.random.key(7).to(device)
    f = lambda x: F.dropout(x) + torch.randn(4, device=device)  # noqa: E731
    assert_same(vmap(f, randomness=key, chunk_size=2)(xs), vmap(f, randomness=key)(xs))


def draws_of_a_run_that_is_undone(device, xs):
    """The run in which examples diverge is made anew, and must draw what it drew."""

    def f(x):
        y = x + torch.rand(4, device=device)
        return y if x.sum() > 0 else -y

    mapped = vmap(f, randomness="different")
    for _ in range(3):
        torch.manual_seed(5)
        drawn = torch.rand(6, 4, device=device)
        torch.manual_seed(5)
        found = mapped(xs)
        sign = torch.where(xs.sum(1) > 0, 1.0, -1.0).unsqueeze(1)
        assert_same(found, sign * (xs + drawn))


def draws_where_no_argument_is_on_the_device(device, xs):
    def f(i):
        y = torch.rand(3, device=device)
        return y if i > 2 else -y

    mapped = vmap(f, randomness="same")
    for _ in range(3):
        torch.manual_seed(5)
        drawn = torch.rand(3, device=device)
        after = torch.rand(3, device=device)
        torch.manual_seed(5)
        found = mapped(torch.arange(6))
        assert_same(found.abs(), drawn.expand(6, 3))
        assert_same(torch.rand(3, device=device), after, "a draw after the call")


def draws_shared_by_chunks(device, xs):
    for given in (xs, torch.arange(6.0)):
        f = vmap(lambda x: torch.rand(3, device=device), randomness="same", chunk_size=2)
        assert f(given).unique(dim=0).shape[0] == 1, "chunks drew other numbers"


def draws_of_a_generator_of_the_callers(device, xs):
    truth_of(lambda: torch.rand(1, device=device, generator=torch.Generator(device)))

    def drawn(randomness):
        own = torch.Generator(device=device).manual_seed(11)

        def f(x):
            y = x + torch.rand(4, device=device, generator=own)
            return y if x.sum() > 0 else -y

        return vmap(f, randomness=randomness)(xs), torch.rand(2, device=device, generator=own)

    own = torch.Generator(device=device).manual_seed(11)
    drawn_first = torch.rand(4, device=device, generator=own)
    after = torch.rand(2, device=device, generator=own)
    sign = torch.where(xs.sum(1) > 0, 1.0, -1.0).unsqueeze(1)
    assert_same(drawn("same"), (sign * (xs + drawn_first), after))


def draws_of_a_checkpoint_are_repeated(device, xs):
    def f(x):
        return checkpoint(lambda x: (F.dropout(x) * x).sum(), x, use_reentrant=False)

    torch.manual_seed(1)
    found = vmap(grad(f), randomness="different")(xs) / xs
    near = (found.abs() < 1e-4) | ((found - 4).abs() < 1e-3)
    assert near.all(), "the backward pass has another mask"


def draws_under_a_default_device(device, xs):
    key = forall.random.key(3).to(device)
    with default_device(device):
        found = vmap(lambda x: x[:3] + torch.rand(3), randomness=key)(xs)
    truth = vmap(lambda x: x[:3] + torch.rand(3, device=device), randomness=key)(xs)
    assert_same(found, truth)

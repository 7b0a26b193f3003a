"""Python's numbers of examples, in recorded calls: another number is another answer."""

from __future__ import annotations

import math

import pytest
import torch

import forall
from forall import grad, jit, jvp, vmap
from oracle import same

WEIGHTS = {0: 3.0, 1: 4.0, 2: 5.0}


def first(v):
    return v.argmax().item()


def counted(v):
    i = 0
    while i < first(v):
        i += 1
    return v * i


def tried(v):
    try:
        return v * [1, 2][first(v)]
    except IndexError:
        return v


FUNCTIONS = {
    "equal": lambda v: v * 2 if first(v) == 0 else v,
    "factor": lambda v: v * first(v),
    "in": lambda v: v * 2 if first(v) in (0, 5) else v,
    "range": lambda v: sum([v for _ in range(first(v) + 1)]),
    "slice": lambda v: v[first(v) :].sum(),
    "roll": lambda v: v.roll(first(v)),
    "text": lambda v: v * 2 if str(first(v)) == "0" else v * 7,
    "format": lambda v: v * int(f"{first(v)}"),
    "key": lambda v: v * WEIGHTS[first(v)],
    "place": lambda v: v * [1.0, 2.0, 3.0][first(v)],
    "not": lambda v: v if first(v) else v * 2,
    "max": lambda v: v * max(first(v), 1),
    "divmod": lambda v: v * divmod(first(v) + 3, 2)[0],
    "method": lambda v: v * (first(v) + 1).bit_length(),
    "full": lambda v: torch.full((3,), first(v)) * v,
    "tensor": lambda v: torch.tensor([first(v), 1, 2]) * v,
    "while": counted,
    "try": tried,
    "bool": lambda v: v * 2 if (v[0] > v[1]).item() else v,
    "tolist": lambda v: v * v.sum().tolist(),
    "tolist, a place": lambda v: v * v.tolist()[0],
    "tolist, a tensor of it": lambda v: torch.tensor(v.tolist()) * v,
    "numpy": lambda v: v * float(v.detach().numpy().sum()),
    "math": lambda v: v * math.sin(v.sum().item()),
    "argument of an operator": lambda v: v.add(v, alpha=v.mean().item()),
    "hash": lambda v: v * (hash(v.sum().item()) % 7),
    "float": lambda v: v * float(v.sum().detach()),
    "round": lambda v: v * round(v.sum().item()),
    "compared": lambda v: v * 2 if v.sum().item() > 3 else v,
    "nan": lambda v: v * 2 if math.isnan(v.sum().item()) else v,
}
TRANSFORMS = {
    "vmap": vmap,
    "vmap of grad": lambda f: vmap(grad(lambda v: f(v).sum())),
    "grad of vmap": lambda f: grad(lambda x: vmap(lambda v: f(v).sum())(x).sum()),
    "vmap of jvp": lambda f: vmap(lambda v: jvp(f, (v,), (v,))[1]),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(f), (x,), (x,))[1],
}
ROWS = torch.tensor([[2.0, 1.0, 0.0], [3.0, 1.0, 2.0]])
LATER = (ROWS.flip(1), ROWS[:, [1, 0, 2]], 10 + ROWS, 3 * ROWS, ROWS.flip(0))


def outcome(f, x):
    try:
        return f(x)
    except (IndexError, KeyError) as error:
        return type(error).__name__


@pytest.mark.sweep(4)
@pytest.mark.counted
@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_asked_for_again(name, transform, examples, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    f, made = FUNCTIONS[name], TRANSFORMS[transform]
    recorded, replayed = jit(made(f)), made(f)
    for g in (recorded, replayed):
        for _ in range(5):  # all examples have one number
            outcome(g, ROWS[:examples])
    for rows in LATER:
        x = rows[:examples]
        monkeypatch.setattr(forall.config, "replay", False)
        wanted = outcome(made(f), x)
        monkeypatch.setattr(forall.config, "replay", True)
        for g in (recorded, replayed):
            assert same(outcome(g, x), wanted)


@pytest.mark.counted
def test_a_whole_number_that_all_have_is_recorded():
    f = jit(vmap(lambda v: v * first(v)))
    for _ in range(3):
        f(ROWS)
    assert f.cache_info().hits == 2


@pytest.mark.parametrize("read", ["tolist", "numpy"])
def test_numbers_with_a_tangent(read):
    def f(x):
        return x * float(getattr(x.detach(), read)()[0])

    g = jit(lambda x: jvp(f, (x,), (x,))[1])
    with pytest.warns(forall.PerformanceWarning):
        g(torch.tensor([2.0]))
    for number in (3.0, 4.0):
        x = torch.tensor([number])
        assert same(g(x), x * x)

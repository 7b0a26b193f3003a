"""Torch and Python read the numbers of tensors in many ways: no program keeps what they were.

Each function here has its numbers of a tensor that is captured, or given, and that differs from
call to call. Some ways to call each are tried; all of them with FORALL_DOORS=1.
"""

import functools
import math
import operator
import os
import random
import re
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from draws import HERE
from forall import grad, jacfwd, jacrev, jit, jvp, vmap

pytestmark = [
    pytest.mark.usefixtures("at_once"),
    pytest.mark.filterwarnings("ignore"),
]
X = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])


class Plain(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Scaled(torch.Tensor):
    """Of whose products the class makes something else, by a tensor of numbers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.mul:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor) * torch.tensor([args[1], 1.0, 1.0])
        return super().__torch_function__(func, types, args, kwargs or {})


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x * torch.tensor([t, 1.0, 1.0])

    @staticmethod
    def backward(ctx, g):
        return g * torch.tensor([ctx.saved_tensors[0], 1.0, 1.0]), None


def in_mode(x, t):
    with Plain():
        return x * torch.tensor([t, 1.0, 1.0])


def unseen(x, t):
    with torch._C.DisableTorchFunction():
        return x * torch.tensor([t, 1.0, 1.0])


def written(x, place, value):
    y = x.clone()
    y[place] = value
    return y


def clipped(x, t):
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = x.detach() * 100
    torch.nn.utils.clip_grad_norm_([p], float(t))
    return p.grad + x * 0


def seeded(x, t):
    torch.manual_seed(t)
    return x * torch.rand(())


def drawn(x, t):
    with torch.random.fork_rng():
        torch.manual_seed(t.item())
        return x * torch.rand(())


def looped(x, t):
    for _ in range(t):
        x = x * 2
    return x


def counted(x, t):
    i = 0
    while i < t:
        x, i = x * 2, i + 1
    return x


def told(text):
    return float(re.search(r"[\d.]+", text.split("(")[-1]).group())


# Of an example and a fraction.
FRACTIONS = {
    "tensor": lambda x, t: x * torch.tensor([t, 1.0, 1.0]),
    "tensor of rows": lambda x, t: torch.tensor([[t, 1.0, 0.0], [1.0, t, 1.0], [0.0, 1.0, t]]) @ x,
    "tensor of one": lambda x, t: x * torch.tensor(t),
    "tensor of doubles": lambda x, t: x * torch.tensor([t, 1.0, 1.0], dtype=torch.float64).float(),
    "tensor of views": lambda x, t: x * torch.tensor(list(t.expand(3))),
    "tensor of results": lambda x, t: x * torch.tensor((t * 2, t + 1, 1.0)),
    "tensor of tests": lambda x, t: x * torch.tensor([t > 3, t > 2, True]),
    "tensor, named": lambda x, t: x * torch.tensor(data=[t, 1.0, 1.0]),
    "as_tensor": lambda x, t: x * torch.as_tensor([t, 1.0, 1.0]),
    "asarray": lambda x, t: x * torch.asarray([t, 1.0, 1.0]),
    "new_tensor": lambda x, t: x * x.new_tensor([t, 1.0, 1.0]),
    "new": lambda x, t: x * x.new([t, 1.0, 1.0]),
    "Tensor": lambda x, t: x * torch.Tensor([t, 1.0, 1.0]),
    "DoubleTensor": lambda x, t: x * torch.DoubleTensor([t, 1.0, 1.0]).float(),
    "BoolTensor": lambda x, t: x * torch.BoolTensor([t > 3, True, True]),
    "sparse": lambda x, t: x * torch.sparse_coo_tensor([[0, 1]], [t, 1.0], (3,)).to_dense(),
    "in a mode": in_mode,
    "in no mode": unseen,
    "by a class": lambda x, t: x.as_subclass(Scaled).mul(t) if type(x) is torch.Tensor else x * t,
    "in a Function": lambda x, t: Twice.apply(x, t),
    "in a checkpoint": lambda x, t: checkpoint(
        lambda x: x * torch.tensor([t, 1.0, 1.0]), x, use_reentrant=False
    ),
    "scalar_tensor": lambda x, t: x * torch.scalar_tensor(t),
    "full": lambda x, t: x * torch.full((3,), t),
    "full_like": lambda x, t: x * torch.full_like(x, t.item()),
    "fill_": lambda x, t: x * torch.zeros(3).fill_(t),
    "arange": lambda x, t: x * torch.arange(0, t, 1.0)[-1],
    "linspace": lambda x, t: x * torch.linspace(0, t, 3),
    "logspace": lambda x, t: x * torch.logspace(0, t, 3),
    "float": lambda x, t: x * float(t),
    "complex": lambda x, t: x * complex(t).real,
    "bool": lambda x, t: x * (2 if t > 3 else 1),
    "tolist": lambda x, t: x * torch.tensor(t.expand(3).tolist()),
    "format": lambda x, t: x * float(f"{t:.3f}"),
    "str": lambda x, t: x * told(str(t)),
    "repr": lambda x, t: x * told(repr([t])),
    "floor": lambda x, t: x * math.floor(t),
    "sqrt": lambda x, t: x * math.sqrt(t),
    "numpy": lambda x, t: x * float(t.detach().numpy()),
    "asarray of numpy's": lambda x, t: x * float(np.asarray(t.detach())),
    "array of a list": lambda x, t: x * float(np.array([t.detach(), 1.0])[0]),
    "sum": lambda x, t: x * sum([t, 1.0]),
    "reduce": lambda x, t: x * functools.reduce(operator.add, [t, 1.0]),
    "max": lambda x, t: x * max(t, torch.tensor(2.0)),
    "equal": lambda x, t: x * (2.0 if torch.equal(t, torch.tensor(3.0)) else 1.0),
    "in": lambda x, t: x * (2.0 if 3.0 in t.expand(2) else 1.0),
    "a norm that is clipped": clipped,
    "alpha": lambda x, t: torch.add(x, x, alpha=t),
    "clamp": lambda x, t: x.clamp(max=t.item() / 10),
    "masked_fill": lambda x, t: x.masked_fill(x > 0.2, t.item()),
    "a write": lambda x, t: written(x, slice(0, 2), torch.tensor([t, 1.0])),
    "where": lambda x, t: torch.where(x > 0.2, t.item(), x),
    "eps": lambda x, t: F.layer_norm(x, (3,), eps=t),
    "a norm": lambda x, t: torch.norm(x, p=float(t)).expand(3),
    "quantile": lambda x, t: torch.quantile(x, t.item() / 100).expand(3),
    "a distribution": lambda x, t: torch.distributions.Normal(
        torch.tensor([t, t, t]), 1.0
    ).log_prob(x),
}
# Of an example and a whole number.
WHOLES = {
    "slice": lambda x, t: x[t : t + 1].sum() * x,
    "slice from": lambda x, t: x[t:].sum() * x,
    "index": lambda x, t: x[t] * x,
    "index by a list in a list": lambda x, t: x[[[t, 0]]].sum() * x,
    "index by __getitem__": lambda x, t: x.__getitem__([[t, 0]]).sum() * x,
    "index by lists": lambda x, t: torch.stack([x, x])[([0, 1], [t, 0])].sum() * x,
    "index by tuples": lambda x, t: torch.stack([x, x])[(0, 1), (t, 0)].sum() * x,
    "index behind a slice": lambda x, t: torch.stack([x, x])[:, [t, 0]].sum() * x,
    "index of numpy's": lambda x, t: x[np.array([t.item(), 0])].sum() * x,
    "index by a range": lambda x, t: x[range(t + 1)].sum() * x,
    "index by tests": lambda x, t: x[[True, t > 0, False]].sum() * x,
    "a write by lists": lambda x, t: written(torch.stack([x, x]), (0, [t, 0]), 7.0)[0],
    "LongTensor": lambda x, t: x[torch.LongTensor([t, 0])].sum() * x,
    "gather": lambda x, t: x.gather(0, torch.tensor([t, t, 0])),
    "scatter": lambda x, t: x.scatter(0, torch.tensor([t]), 5.0),
    "repeat": lambda x, t: x.repeat(t + 1).sum() * x,
    "expand": lambda x, t: x.expand(t + 1, 3).sum() * x,
    "Size": lambda x, t: x.new_ones(torch.Size([t + 1])).sum() * x,
    "ones": lambda x, t: torch.ones([t + 1, 2]).sum() * x,
    "eye": lambda x, t: torch.eye(t + 1).sum() * x,
    "range": lambda x, t: x * sum(range(t + 1)),
    "a loop": looped,
    "a loop with a test": counted,
    "operator.index": lambda x, t: x * operator.index(t),
    "a list's index": lambda x, t: x * [1.0, 2.0, 3.0][t],
    "a dict's key": lambda x, t: x * {0: 1.0, 1: 5.0, 2: 3.0}[t.item()],
    "a text": lambda x, t: x * len("a" * t),
    "select": lambda x, t: x.select(0, t) * x,
    "narrow": lambda x, t: x.narrow(0, t, 1) * x,
    "roll": lambda x, t: x.roll(t),
    "tril": lambda x, t: x.expand(3, 3).tril(t.item() - 1).sum(0),
    "reshape": lambda x, t: torch.ones(6).reshape(t + 1, -1).sum(0)[0] * x,
    "split": lambda x, t: x.split([t + 1, 2 - t])[0].sum() * x,
    "tensor_split": lambda x, t: x.tensor_split(t.reshape(1))[0].sum() * x,
    "topk": lambda x, t: x.topk(t + 1)[0].sum() * x,
    "pad": lambda x, t: F.pad(x, (t, 0), value=1.0).sum() * x,
    "one_hot": lambda x, t: F.one_hot(t, 3) * x,
    "as many classes": lambda x, t: F.one_hot(torch.tensor([0]), t + 1).shape[1] * x,
    "repeat_interleave": lambda x, t: x.repeat_interleave(t + 1).sum() * x,
    "a seed": seeded,
    "a seed for a while": drawn,
    "a generator": lambda x, t: (
        x * torch.rand((), generator=torch.Generator(HERE).manual_seed(int(t)))
    ),
    "choice": lambda x, t: x * random.Random(t.item()).choice([1.0, 2.0, 3.0, 4.0]),
    "a mask": lambda x, t: x[torch.arange(3) <= t].sum() * x,
    "nonzero": lambda x, t: torch.nonzero(torch.arange(3) < t).sum() * x,
    "unique": lambda x, t: torch.unique(torch.stack([t, torch.tensor(1)])).shape[0] * x,
    "bincount": lambda x, t: torch.bincount(t.expand(2))[-1] * x,
    "lengths": lambda x, t: (
        torch.nn.utils.rnn.pack_padded_sequence(
            x[None, :, None], [t + 1], batch_first=True
        ).data.sum()
        * x
    ),
}
DOORS = {
    **{n: (f, torch.float32, (3.0, 3.0, 3.0, 3.0, 1.0, 7.5, 3.0)) for n, f in FRACTIONS.items()},
    **{n: (f, torch.int64, (1, 1, 1, 1, 2, 0, 1)) for n, f in WHOLES.items()},
}


def given(make):
    """Calls of a number, by what ``make`` makes of a function of an example and a number."""

    def calls(f, dtype):
        made = make(f)
        return lambda v: made(torch.tensor(v, dtype=dtype))

    return calls


def captured(make):
    """The same, where the function captures the number."""

    def calls(f, dtype):
        number = torch.zeros((), dtype=dtype)
        made = make(lambda x: f(x, number))

        def call(v):
            number.fill_(v)
            return made()

        return call

    return calls


def on_each(m):
    return lambda t: torch.stack([m(x, t) for x in X])


def total(f):
    return lambda *args: f(*args).sum()


def slope(f):
    def call(x, t):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x, t).sum(), x)[0]

    return call


same = functools.partial(vmap, randomness="same")


def of_all(m):
    return functools.partial(m, X)


def in_one(m):
    return lambda x, t: m(x[None], t)[0]


def of_each(m):
    return lambda t: m(X, t.expand(2))


def of_rows_alone(m):
    return lambda: torch.stack([m(x) for x in X])


def of_rows(m):
    return lambda t: m(X, t).sum(1)


VALUES = {
    "vmap": given(lambda f: of_all(same(f, (0, None)))),
    "vmap, captured": captured(lambda f: of_all(same(f))),
    "vmap, of each": given(lambda f: of_each(same(f))),
    "vmap of vmap": given(lambda f: of_all(in_one(same(same(f, (0, None)), (0, None))))),
    "jit": given(lambda f: on_each(jit(f))),
    "jit, captured": captured(lambda f: of_rows_alone(jit(f))),
    "jit of vmap": given(lambda f: of_all(jit(same(f, (0, None))))),
    "jit of vmap, of each": given(lambda f: of_each(jit(same(f)))),
    "jvp": given(lambda f: on_each(lambda x, t: jvp(lambda x: f(x, t), (x,), (x,))[0])),
}
SLOPES = {
    "grad": given(lambda f: on_each(grad(total(f)))),
    "vmap of grad": given(lambda f: of_all(same(grad(total(f)), (0, None)))),
    "vmap of grad, captured": captured(lambda f: of_all(same(grad(total(f))))),
    "jit of grad": given(lambda f: on_each(jit(grad(total(f))))),
    "jacrev": given(lambda f: on_each(lambda x, t: jacrev(f)(x, t).sum(0))),
    "jit of vmap of jacfwd": given(lambda f: of_rows(jit(same(jacfwd(f), (0, None))))),
}
# What says nothing of a derivative, or has another one: a class, a text of a wrapper, ties.
_NO_SLOPES = {"by a class", "in no mode", "clamp", "a norm that is clipped"}
WAYS = {**VALUES, **SLOPES}


def chosen(name):
    found = list(WAYS) if name not in _NO_SLOPES else list(VALUES)
    if name == "by a class":  # to a level a class is its examples' own affair
        found = ["jit", "jit, captured"]
    if os.environ.get("FORALL_DOORS"):
        return found
    return random.Random(crc32(name.encode())).sample(found, min(4, len(found)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", DOORS)
def test_number_that_is_read_is_the_calls_own(name):
    f, dtype, values = DOORS[name]
    for way in chosen(name):
        known = given(lambda f, way=way: on_each(f if way in VALUES else slope(f)))(f, dtype)
        found = WAYS[way](f, dtype)
        for v in values:
            try:
                wanted = known(v)
            except (RuntimeError, TypeError):  # which no plain tensor can be asked either
                continue
            assert torch.allclose(found(v), wanted, rtol=1e-4, atol=1e-5, equal_nan=True), (way, v)


def test_texts_of_examples_are_the_calls_own():
    texts = []
    made = jit(vmap(lambda x: (texts.append(repr(x)), x * 2)[1]))
    for i in range(4):
        made(X + i)
    assert len({*texts}) == 4


@torch.jit.script
def listed(x, t):
    numbers: list[int] = t.reshape(1).tolist()
    return x * numbers[0]


def test_list_in_torchscript_is_the_calls_own():
    for made in (jit(listed), jit(lambda x, t: listed(x, t)), jit(grad(total(listed)))):
        found = [made(X[0], torch.tensor(v)) for v in (1, 1, 1, 2, 3)]
        unit = found[0]
        assert all(map(torch.equal, found, [unit, unit, unit, 2 * unit, 3 * unit]))

"""Random programs: what they are, how they run, and the loop that each transform must equal.

A program is a list of instructions, each a handful of small numbers, so that hypothesis can make
and shrink them. Its meaning is total: a number picks among what is possible there. It runs on any
tensors, so the same text is run on one example at a time and, by `forall.vmap`, on all together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

D = torch.float64

Instruction = tuple[int, int, int, int]
SHAPES = ((3, 2), (2,), (), (2, 3), (3,))


class Doubled(torch.autograd.Function):
    """Twice the value, thrice the derivative: whether the user's backward ran shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g + 0 * x


class Machine:
    """Registers, and one method per kind of instruction."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.registers = list(inputs)

    def run(self, program: list[Instruction]) -> None:
        for kind, a, b, c in program:
            step = STEPS[kind % len(STEPS)]
            step(self, a, b, c)

    def pick(self, n: int) -> Tensor:
        return self.registers[n % len(self.registers)]

    def push(self, t: Tensor) -> None:
        if t.numel() <= 36:
            self.registers.append(t)

    def fit(self, n: int, like: Tensor) -> Tensor:
        """A register as data of this shape, or its mean where it has another."""
        t = self.pick(n)
        return t if t.shape == like.shape else t.mean()

    # --- values ----------------------------------------------------------------------------------

    def fresh(self, a: int, b: int, c: int) -> None:
        shape = SHAPES[a % len(SHAPES)]
        source = self.pick(b)
        makers: list[Callable[[], Tensor]] = [
            lambda: torch.zeros(shape, dtype=D),
            lambda: torch.ones(shape, dtype=D),
            lambda: torch.full(shape, 0.5, dtype=D),
            lambda: torch.zeros_like(source),
            lambda: source.new_zeros(shape),
            lambda: torch.arange(6, dtype=D).reshape(2, 3),
            lambda: torch.empty(shape, dtype=D).fill_(0.25),
            lambda: torch.eye(3, dtype=D),
            lambda: torch.stack([source.sum(), source.mean()]),
            lambda: torch.full(shape, 1.0, dtype=D) * source.mean(),
        ]
        self.push(makers[c % len(makers)]())

    def view(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        views: list[Callable[[], Tensor]] = [
            lambda: t.view_as(t),
            lambda: t.unsqueeze(b % (t.dim() + 1)),
            lambda: t.detach(),
            lambda: t.reshape(-1),
            lambda: t.squeeze(),
        ]
        if t.dim():
            d = b % t.dim()
            n = t.shape[d]
            if n:
                views += [
                    lambda: t.select(d, c % n),
                    lambda: t.narrow(d, c % n, n - c % n),
                    lambda: t.unbind(d)[c % n],
                    lambda: t.split(1, d)[c % n],
                    lambda: t[c % t.shape[0]] if t.shape[0] else t[:],
                    lambda: t[..., ::2],
                    lambda: t[None],
                    lambda: t.movedim(d, 0),
                    lambda: t.transpose(d, -1),
                ]
        if t.dim() >= 2:
            views += [lambda: t.diagonal(), lambda: t.mT, lambda: t.flatten(0, 1)]
        self.push(views[(b + c) % len(views)]())

    def compute(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        s = self.fit(b, t)
        results: list[Callable[[], Tensor]] = [
            lambda: t + s,
            lambda: t * s,
            lambda: t.sin(),
            lambda: t.tanh(),
            lambda: t.clone(),
            lambda: torch.where(t > 0.1, t, s),
            lambda: (t - s).abs(),
            lambda: t * 0.5 + 1,
            lambda: t.flip(0) if t.dim() else t.neg(),
            lambda: t.cumsum(0) if t.dim() else t.exp().clamp(max=3),
            lambda: t.sort(0).values if t.dim() else t.square(),
            lambda: torch.atan2(t, s + 2),
            lambda: t.roll(1, 0) if t.dim() else t.abs(),
            lambda: t.T @ t if t.dim() == 2 else t.cos(),
            lambda: torch.maximum(t, s),
            lambda: Doubled.apply(t),
        ]
        self.push(results[c % len(results)]())

    def reduce(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        if not t.dim() or not t.numel():
            self.push(t.sum())
            return
        d = b % t.dim()
        results: list[Callable[[], Tensor]] = [
            lambda: t.sum(),
            lambda: t.sum(d),
            lambda: t.mean(d, keepdim=True),
            lambda: t.amax(d),
            lambda: t.max(d).values,
            lambda: t.prod(d).clamp(-3, 3),
            lambda: t.logsumexp(d),
            lambda: t.var(d) if t.shape[d] > 1 else t.sum(d),
            lambda: t.softmax(d),
        ]
        self.push(results[c % len(results)]())

    # --- writes ----------------------------------------------------------------------------------

    def write(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        s = self.fit(b, t)
        writes: list[Callable[[], Any]] = [
            lambda: t.add_(s),
            lambda: t.mul_(s),
            lambda: t.copy_(s),
            lambda: t.sub_(s, alpha=2),
            lambda: t.zero_(),
            lambda: t.fill_(0.75),
            lambda: t.sin_(),
            lambda: t.clamp_(-1, 1),
            lambda: t.addcmul_(s, s, value=0.5),
            lambda: t.masked_fill_(s > 0.2, 0.3),
            lambda: t.neg_(),
            lambda: t.lerp_(s.expand(t.shape), 0.25),
            lambda: t.__setitem__(..., s),
            lambda: t.fill_(s.mean()),
            lambda: t.tanh_(),
            lambda: t.__iadd__(s),
        ]
        writes[c % len(writes)]()

    def write_part(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        if not t.dim() or not t.shape[0]:
            return
        n = t.shape[0]
        row = t.shape[1:]
        s = self.pick(b)
        s = s if s.shape == row else s.mean().expand(row)
        index = torch.tensor([c % n])
        rows = s.unsqueeze(0)
        whole = torch.zeros(t.shape[1:], dtype=torch.int64).unsqueeze(0) + c % n
        writes: list[Callable[[], Any]] = [
            lambda: t.__setitem__(c % n, s),
            lambda: t.__setitem__(slice(c % n, None), s),
            lambda: t.__setitem__((..., -1), s.mean()),
            lambda: t.index_add_(0, index, rows),
            lambda: t.index_copy_(0, index, rows),
            lambda: t.index_fill_(0, index, 0.4),
            lambda: t.index_put_((index,), rows),
            lambda: t.index_put_((index,), rows, accumulate=True),
            lambda: t.scatter_(0, whole, rows.expand(whole.shape)),
            lambda: t.scatter_add_(0, whole, rows.expand(whole.shape)),
            lambda: t[c % n].add_(s),
            lambda: t.diagonal().copy_(s.mean()) if t.dim() == 2 else t[:1].mul_(s.mean()),
            lambda: t.mT.mul_(s.mean()) if t.dim() == 2 else t.neg_(),
            lambda: t.__setitem__(t > 0.6, 0.1),
        ]
        writes[(b + c) % len(writes)]()

    def mapped_index(self, a: int, b: int, c: int) -> None:
        """Places that the example's own numbers pick."""
        t = self.pick(a)
        if not t.dim() or not t.shape[0]:
            return
        i = (self.pick(b).sum() > 0.3).long() % t.shape[0]
        row = t.shape[1:]
        s = self.pick(c)
        s = s if s.shape == row else s.mean().expand(row)
        results: list[Callable[[], Any]] = [
            lambda: self.push(t[i]),
            lambda: self.push(t[i.reshape(1)]),
            lambda: t.__setitem__(i, s),
            lambda: t.index_add_(0, i.reshape(1), s.unsqueeze(0)),
            lambda: self.push(t.index_select(0, i.reshape(1))),
            lambda: t.index_put_((i.reshape(1),), s.unsqueeze(0), accumulate=True),
            lambda: self.push(t.gather(0, i.expand(1, *row))),
            lambda: t[i].add_(s),
        ]
        results[(b + c) % len(results)]()

    def out(self, a: int, b: int, c: int) -> None:
        t = self.pick(a).detach()
        s = self.fit(b, t).detach()
        room = torch.empty_like(t) if c % 2 else torch.zeros(t.shape, dtype=D)
        results: list[Callable[[], Any]] = [
            lambda: torch.sin(t, out=room),
            lambda: torch.mul(t, s, out=room),
            lambda: torch.add(t, s, alpha=2, out=room[...]),
        ]
        results[c % len(results)]()
        self.push(room)

    # --- autograd --------------------------------------------------------------------------------

    def inner_grad(self, a: int, b: int, c: int) -> None:
        p = self.pick(a).detach().clone().requires_grad_()
        s = self.fit(b, p)
        create = bool(c % 2)
        (g,) = torch.autograd.grad((p.square() * s.sin()).sum(), p, create_graph=create)
        self.push(p)
        self.push(g)

    def inner_backward(self, a: int, b: int, c: int) -> None:
        p = self.pick(a).detach().clone().requires_grad_()
        q = p * self.fit(b, p)
        if c % 3 == 1:
            q.retain_grad()
        if c % 3 == 2:
            q.register_hook(lambda g: g * 2)
        (q.sin() + p).sum().backward()
        grad = p.grad
        assert grad is not None
        self.push(grad.clone())
        if c % 3 == 1:
            assert q.grad is not None
            self.push(q.grad.clone())
        with torch.no_grad():
            p -= 0.1 * grad
        self.push(p.detach())

    def grad_between(self, a: int, b: int, c: int) -> None:
        x, y = self.pick(a), self.pick(b)
        if not (x.requires_grad and y.requires_grad):
            return
        (g,) = torch.autograd.grad(
            y.sum(), x, create_graph=bool(c % 2), retain_graph=True, allow_unused=True
        )
        self.push(torch.zeros_like(x) if g is None else g.clone())  # it may be an expanded one

    def optimised(self, a: int, b: int, c: int) -> None:
        p = self.pick(a).detach().clone().requires_grad_()
        kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)
        optimizer = kinds[c % 3]([p], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (p - self.fit(b, p).detach()).square().sum().backward()
            optimizer.step()
        self.push(p.detach())

    def hooked(self, a: int, b: int, c: int) -> None:
        t = self.pick(a) * 1
        if t.requires_grad:
            t.register_hook(lambda g: g * 2 if c % 2 else None)
        self.push(t)

    def checkpointed(self, a: int, b: int, c: int) -> None:
        t = self.pick(a)
        s = self.fit(b, t)
        self.push(checkpoint(lambda t: t.sin() * s, t, use_reentrant=False))

    def without_grad(self, a: int, b: int, c: int) -> None:
        with torch.no_grad():
            (self.compute if c % 2 else self.view)(a, b, c // 2)


STEPS: list[Callable[[Machine, int, int, int], None]] = [
    Machine.fresh,
    Machine.fresh,
    Machine.view,
    Machine.view,
    Machine.view,
    Machine.compute,
    Machine.compute,
    Machine.reduce,
    Machine.write,
    Machine.write,
    Machine.write,
    Machine.write_part,
    Machine.write_part,
    Machine.mapped_index,
    Machine.out,
    Machine.inner_grad,
    Machine.inner_backward,
    Machine.grad_between,
    Machine.optimised,
    Machine.hooked,
    Machine.checkpointed,
    Machine.without_grad,
]


# What looks at the graph that reverse mode records has another meaning in forward mode.
NOT_FORWARD = (
    Machine.grad_between,
    Machine.hooked,
    Machine.without_grad,
    Machine.checkpointed,  # recomputed when what it captures has been written to
)


@dataclass(frozen=True)
class Program:
    """Instructions, and what they start from: x of each example, v of each, w the same for all."""

    shape: int
    copies: bool  # whether the example is cloned first, so that writes do not reach the caller
    instructions: tuple[Instruction, ...]

    @property
    def example(self) -> tuple[int, ...]:
        return SHAPES[self.shape % len(SHAPES)]

    def __call__(self, x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        """All that is left in the registers: names that share memory must agree."""
        start = [x.clone(), v.clone()] if self.copies else [x, v]
        machine = Machine([*start, w * 1])
        machine.run(list(self.instructions))
        return machine.registers[2:]

    def without(self, *steps: Any) -> Program:
        kept = (i for i in self.instructions if STEPS[i[0] % len(STEPS)] not in steps)
        return Program(self.shape, self.copies, tuple(kept))

    def number(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """One number that depends on every register."""
        results = self(x, v, w)
        terms = [(i + 1) * r.sum().sin() for i, r in enumerate(results)]
        return torch.stack(terms).sum()

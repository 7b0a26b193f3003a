"""One program per operator, written once for forall, for a Python loop and for JAX.

A program is ``f(lax, m, x, p)``: ``lax`` has the operators, ``m`` the mathematics (torch or
jax.numpy), ``x`` is a vector of three numbers, and ``p`` a whole number that decides what runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

# --- the operators as plain Python ----------------------------------------------------------------


def _cond(pred: Any, true_fun: Any, false_fun: Any, *operands: Any) -> Any:
    return true_fun(*operands) if pred else false_fun(*operands)


def _switch(index: Any, branches: Any, *operands: Any) -> Any:
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def _while_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
    while cond_fun(init_val):
        init_val = body_fun(init_val)
    return init_val


def _fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any) -> Any:
    for i in range(int(lower), int(upper)):
        init_val = body_fun(i, init_val)
    return init_val


def _scan(f: Any, init: Any, xs: Any, length: Any = None, reverse: bool = False) -> Any:
    places = range(len(xs) if length is None else length)
    ys: dict[int, Any] = {}
    for i in reversed(places) if reverse else places:
        init, ys[i] = f(init, None if xs is None else xs[i])
    return init, torch.stack([ys[i] for i in places])


def _map(f: Any, xs: Any) -> Any:
    return torch.stack([f(x) for x in xs])


def _associative_scan(fn: Any, elems: Any, reverse: bool = False) -> Any:
    rows = [tuple(e[i : i + 1] for e in elems) for i in range(len(elems[0]))]
    if reverse:
        rows.reverse()
    for i in range(1, len(rows)):
        rows[i] = fn(rows[i - 1], rows[i])
    if reverse:
        rows.reverse()
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))


PLAIN = SimpleNamespace(
    cond=_cond,
    switch=_switch,
    while_loop=_while_loop,
    fori_loop=_fori_loop,
    scan=_scan,
    map=_map,
    associative_scan=_associative_scan,
)

# --- the programs ---------------------------------------------------------------------------------


def cond(lax: Any, m: Any, x: Any, p: Any) -> Any:
    def root(x: Any, y: Any) -> Any:
        return (m.sqrt(x + 2.0) * y).sum()

    return lax.cond(p > 2, root, lambda x, y: (m.sin(x) * x).sum() - y, x, x[0])


def switch(lax: Any, m: Any, x: Any, p: Any) -> Any:
    branches = [m.sin, lambda x: m.exp(x) * x, m.tanh, lambda x: m.square(x) * x[1]]
    return lax.switch(p - 1, branches, x).sum()


def while_loop(lax: Any, m: Any, x: Any, p: Any) -> Any:
    def body(carry: Any) -> Any:
        i, total, parts = carry
        return i + 1, total + (parts["a"] * parts["b"]).sum(), {"a": m.sin(parts["b"]), "b": x}

    start = (0, 0.0, {"a": x * 2, "b": m.tanh(x)})
    _, total, parts = lax.while_loop(lambda carry: carry[0] < p, body, start)
    return total + (parts["a"] * x).sum()


def fori_loop(lax: Any, m: Any, x: Any, p: Any) -> Any:
    return lax.fori_loop(1, p, lambda i, y: m.sin(y) * x + y / i, x * x).sum()


def scan(lax: Any, m: Any, x: Any, p: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry = m.sin(carry * x) + x * p
        return carry, carry * carry

    first, forward = lax.scan(step, 0.5, x)
    last, back = lax.scan(step, first, x, reverse=True)
    return last + (forward * back * x).sum()


def map(lax: Any, m: Any, x: Any, p: Any) -> Any:
    return (lax.map(lambda y: m.exp(m.sin(y) * p) * x[0], x) * x).sum()


def associative_scan(lax: Any, m: Any, x: Any, p: Any) -> Any:
    def after(f: Any, g: Any) -> Any:
        return f[0] * g[0], g[0] * f[1] + g[1]

    a, b = lax.associative_scan(after, (m.sin(x) * p, x))
    c, d = lax.associative_scan(after, (m.tanh(a), b), reverse=True)
    return (a * d).sum() + (b * c).sum()


PROGRAMS = {
    f.__name__: f for f in (cond, switch, while_loop, fori_loop, scan, map, associative_scan)
}


def nested(f: Any) -> Any:
    """The program as a step of a scan."""

    def outer(lax: Any, m: Any, x: Any, p: Any) -> Any:
        def step(carry: Any, y: Any) -> Any:
            carry = m.tanh(f(lax, m, x * y + carry, p)) + carry * y
            return carry, carry * y

        last, ys = lax.scan(step, x[1] * 0.1, x)
        return last + (ys * x).sum()

    return outer


for name in tuple(PROGRAMS):
    PROGRAMS[f"{name} in scan"] = nested(PROGRAMS[name])

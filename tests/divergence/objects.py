"""Acceptance functions: calls, closures, classes, modules, containers, `with`."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from divergence.cases import array, case, integers, positive, scalars
from forall import functional_call

D = torch.float64


def _clamped(x, low=-1.0, *, high=1.0):
    if x < low:
        return x * 0 + low
    return high + 0.1 * x if x > high else x


def _rounds(x, limit):
    n = 0
    while x < limit:
        x = x * 1.6 + 0.2
        n += 1
    return x, n


@case(scalars)
def helper_with_branches(x):
    y = _clamped(x * 2) + _clamped(x, high=0.5)
    return _clamped(y, 0.0) if x > -1 else _clamped(y)


@case(positive)
def helper_with_a_loop(x):
    y, n = _rounds(x, 3.0)
    if n > 1:
        y, m = _rounds(y / 4, 5.0)
        n = n + m
    return y + n


@case(scalars)
def closures(x):
    def scaled(y):
        return y * x if y > 0.2 else y - x

    shift = 0.5
    moved = lambda y: scaled(y + shift)  # noqa: E731
    if x > 0:
        shift = 1.5
    return moved(x.sin()) + scaled(x)


@case(scalars)
def nonlocal_in_a_branch(x):
    total = x * 0
    calls = 0

    def add(y):
        nonlocal total, calls
        total = total + y
        calls += 1

    add(x)
    if x > 0.3:
        add(x * x)
    for k in range(3):
        if x * k > 1:
            add(x.sin())
    return total, calls


@case(scalars)
def lambdas(x):
    pick = lambda y: y.exp() if y > 0 else y * 2  # noqa: E731
    return sum(map(pick, [x, x - 0.7])) + sum(filter(lambda y: y > 0.4, [x, x * x]))


@case(scalars)
def functions_of_functions(x):
    twice = functools.partial(_clamped, high=0.3)
    step = functools.reduce(lambda a, b: a + b if a > b else a - b, [x, x * x, x.cos()])
    return twice(x) + step


def _doubled(f):
    @functools.wraps(f)
    def call(x):
        return f(f(x)) if x > 0 else f(x)

    return call


@case(scalars)
def decorated_function(x):
    @_doubled
    def g(x):
        return x * 1.5 if x < 0.5 else x.sin()

    return g(x)


class _Shape:
    def __init__(self, side):
        self.side = side
        self.history = [side]

    @property
    def area(self):
        return self.side**2 if self.side > 1 else self.side

    def grow(self, by):
        if by > 0:
            self.side = self.side + by
            self.history.append(self.side)
        return self


class _Box(_Shape):
    def __init__(self, side):
        super().__init__(side)
        self.__hidden = 1.0

    def grow(self, by):
        if self.side > 0.6:
            self.__hidden = self.__hidden + by
            return super().grow(by * 2)
        return super().grow(by)

    def __call__(self, x):
        return x * self.__hidden if x > 0.5 else x

    def __bool__(self):
        return bool(self.side > 0)


@case(scalars)
def methods_and_attributes(x):
    box = _Box(x).grow(x).grow(x - 1)
    return box.area + box(x), len(box.history)


@case(scalars, scalars)
def attribute_written_in_a_branch(x, y):
    shape = _Shape(x)
    shape.count = 0
    if y > 0:
        shape.side = y * 2
        shape.count += 1
    elif x > 0.4:
        shape.name = y
    return shape.side * x + shape.count + (shape.name if hasattr(shape, "name") else 0)


@case(scalars)
def an_object_of_one_branch(x):
    thing = _Box(x) if x > 0.4 else _Shape(x * 3)
    if not isinstance(thing, _Box) or thing:
        thing.grow(x)
    return thing.side


@dataclass(frozen=True)
class _State:
    x: Any
    step: int = 0
    trail: tuple = field(default=())


@case(positive)
def dataclass_replaced_in_a_loop(x):
    state = _State(x)
    while state.x < 4:
        state = replace(state, x=state.x * 1.5 + 0.3, step=state.step + 1)
    return state.x * state.step


class _Pair(NamedTuple):
    left: Any
    right: Any


@case(scalars, scalars)
def named_tuple(x, y):
    pair = _Pair(x, y) if x > y else _Pair(y, x * 2)
    if pair.left > 1:
        pair = pair._replace(right=pair.left * y)
    return pair


class _Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=D), requires_grad=False)
        self.inner = nn.Sequential(nn.Tanh(), nn.Softplus())
        self.register_buffer("total", torch.zeros((), dtype=D))

    def forward(self, x):
        y = x @ self.weight
        if y > 0:
            return self.inner(x) * y
        return self.inner(-x)


_GATE = _Gate()


@case(array(3))
def module_with_a_branch(v):
    y = _GATE(v)
    return y if y.sum() < 2 else y / 2


@case(array(3), array(3))
def module_with_mapped_parameters(v, w):
    return functional_call(_GATE, {"weight": w}, (v,))


class _Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=D))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if x > 0:
            self.total += x
            self.get_buffer("seen")[self.calls % 3] += 1
        elif x < -1:
            self.total = self.total - x * 0.5
        return self.total.clone() * x


@case(scalars)
def buffers_written_in_a_branch(x):
    meter = _Meter()
    y = meter(x) + meter(x - 0.6) + meter(1 - x)
    return y, meter.total, meter.seen, meter.calls


@case(scalars)
def list_appended_in_one_branch(x):
    seen = [x]
    if x > 0:
        seen.append(x * x)
        if x > 1:
            seen += [x, x + 1]
    else:
        seen.insert(0, x.sin())
    total = seen[0]
    for e in seen[1:]:
        total = total * e + 1
    return total + len(seen)


@case(scalars)
def list_under_two_names(x):
    seen = [x]
    other = seen
    box = {"list": seen}
    if x > 0.2:
        other.append(x * 2)
    if x < 1:
        box["list"].append(x.exp())
    seen[0] = x * 3
    return sum(other) + len(seen) + other[-1]


@case(scalars, integers(0, 3))
def dict_stores(x, n):
    table = {"a": x, "b": x * 2}
    if x > 0:
        table["a"] = x.exp()
        table["c"] = x
    table[int(n)] = x + 1
    if "c" not in table:
        del table["b"]
    counts = defaultdict(int)
    counts[x > 0.5 and int(n)] += 2
    return sum(table.values()) + len(table), sum(counts.values()), table.get("b", x)


@case(scalars)
def other_containers(x):
    queue = deque([x, x * 2], maxlen=3)
    names = {"start"}
    order = OrderedDict(first=x)
    for k in range(4):
        if x * k > 0.8:
            queue.append(x * k)
            names.add(f"step {k}")
        else:
            queue.rotate(1)
            order[k] = x - k
    return queue[0] + queue.popleft() * len(queue), len(names), next(reversed(order.values()))


@case(scalars)
def list_methods(x):
    stack = [x, x * 2, x * 3]
    if x > 0:
        last = stack.pop()
    elif x > -1:
        last = stack.pop(0)
        stack.reverse()
    else:
        last = x
        stack.clear()
    stack.extend([last] * 2)
    return stack[0] * 2 + stack[-1], len(stack)


@case(scalars, scalars)
def nested_containers(x, y):
    tree = {"pair": (x, [y]), "more": [{"z": x}]}
    if x > y:
        tree["pair"][1].append(x)
        tree["more"][0]["z"] = y * 2
    else:
        tree["more"].append({"z": x + y})
    return sum(tree["pair"][1]) + sum(d["z"] for d in tree["more"])


@contextlib.contextmanager
def _counting(log):
    log.append(1)
    try:
        yield log
    finally:
        log.append(2)


@case(scalars)
def with_blocks(x):
    log = []
    with _counting(log) as seen:
        if x > 0:
            y = x * 2
            seen.append(3)
        else:
            y = x.exp()
    if x < 1:
        with torch.no_grad(), _counting(log):
            y = y + x.cos()
    with contextlib.suppress(ZeroDivisionError):
        y = y + 1 / len(seen[3:])
    return y * x, len(log)


@case(scalars)
def return_from_a_with_block(x):
    log = []
    for k in range(3):
        with _counting(log):
            if x * k > 0.7:
                return x * len(log)
            if x < -1.2:
                continue
            x = x + 0.1
    return x - len(log)


@case(scalars)
def return_and_break_from_no_grad(x):
    for k in range(4):
        with torch.enable_grad(), contextlib.nullcontext():
            if x > 1.1:
                break
            x = x + 0.7
            if x < -0.9:
                continue
            x = x * (1 + 0.1 * k)
        x = x + 0.1
    with torch.no_grad():
        if x < 0.5:
            return x.sin()
        y = x * 2
    return x + y


@case(scalars)
def unpacked_arguments(x):
    def g(*parts, scale=1.0, **named):
        total = sum(parts) * scale
        for name, value in named.items():
            total = total + value * (2 if name == "a" else 3)
        return total

    parts = (x, x * 2) if x > 0 else (x,)
    named = {"a": x} if x > -1 else {"b": x, "scale": 0.5}
    return g(*parts, **named)


@case(scalars)
def a_function_chosen_by_a_test(x):
    f = torch.sin if x > 0.3 else torch.exp
    g = {True: lambda y: y * 2, False: lambda y: y - 3}[bool(x > -0.6)]
    return g(f(x)) + (f is torch.sin)


class _Positive:
    """An object whose truth differs between examples."""

    def __init__(self, x):
        self.x = x

    def __bool__(self):
        return bool(self.x > 0)


def _kept(x, by):
    return list(filter(by, [_Positive(x), _Positive(-x), _Positive(x + 1)]))


@case(scalars)
def objects_filtered_by_their_truth(x):
    kept = _kept(x, bool)
    return sum(p.x for p in kept) * len(kept) * x


@case(scalars)
def objects_filtered_by_none(x):
    first, *rest = _kept(x, None)
    if len(rest) == 1:
        return first.x * 2
    return first.x - len(rest)


@case(scalars)
def objects_filtered_by_a_function(x):
    return sum(len(_kept(p.x, lambda q: q)) * p.x for p in tuple(_kept(x, lambda p: p)))


@case(scalars)
def objects_that_are_all_true(x):
    return x * (2 if all(map(bool, _kept(x, bool))) else 3) + any([_Positive(x - 1), _Positive(-x)])

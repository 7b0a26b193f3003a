"""Acceptance functions: Python numbers, text and arrays of numpy read from a tensor."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from divergence.cases import array, between, case, digits, flags, integers, positive, scalars

D = torch.float64
LETTERS = ["a", "b", "c", "d", "e"]


@case(scalars)
def item(x):
    a = x.item()
    if a > 0:
        return x * a
    return x + a / 2


@case(scalars, integers(0, 5))
def int_float_bool(x, n):
    k = int(n)
    a = float(x.detach())
    b = bool(n > 2)
    return x * k + a, a * 2, k + 1, b, not b


@case(integers(-20, 20), integers(1, 7))
def arithmetic_of_integers(n, m):
    a, b = int(n), int(m)
    q, r = divmod(a, b)
    return a // b, a % b, q * b + r, abs(a), a**2, -a, a << 2, a & b, a ^ b, a / b, round(a / b, 3)


@case(scalars)
def arithmetic_of_floats(x):
    a = x.item()
    return x * abs(a), round(a), round(a, 1), int(a), max(a, 0.5), a // 0.3, a**2, -a, 3 - a, 2 / a


@case(positive)
def mathematics_of_python(x):
    a = math.sqrt(x.item()) + math.sin(x.detach())
    if math.isnan(a) or math.floor(a) == 1:
        return x * a
    return x + math.ceil(a) + math.hypot(a, 1)


@case(scalars, integers(0, 5))
def index_of_a_list(x, n):
    table = [x, x * 2, x.sin(), 7.0, x**2]
    weights = (1.0, 2.0, 3.0, 5.0, 8.0)
    return table[n] * weights[int(n)] + table[-1]


@case(scalars, integers(0, 4))
def lookup_in_a_dict(x, n):
    table = {0: x, 1: x.exp(), 2: x * x}
    k = n.item()
    if k in table:
        return table[k]
    return table.get(k, x * 5) + len(table)


@case(scalars, integers(0, 5))
def lookup_by_text(x, n):
    name = LETTERS[int(n)]
    if name == "b":
        return x * 2
    if name in {"c", "d"}:
        name = name.upper()
    return x + ord(name) / 100


@case(scalars, integers(0, 5))
def text_with_numbers(x, n):
    text = f"{n}:{x.item():+.1f}|{int(n):03d}"
    if text.startswith("0") or "-" in text:
        return x * len(text)
    return x + float(text.split("|")[1])


@case(array(3))
def text_that_nobody_reads(v):
    label = f"{v[0]:.2f} of {v}"
    y = v * 2
    if v[1] > 0:
        label = "positive " + label
    return y + len(label) * 0


@case(array(6), integers(0, 4))
def slice_by_n(v, s):
    return v[s : s + 2] * 2, v[: int(s) + 1].sum(), v[int(s) :].prod()


@case(array(4), integers(0, 4))
def index_of_a_tensor(v, n):
    return v[n] * v[int(n)] + v[[int(n), 0]].sum()


@case(scalars, integers(1, 5))
def tensors_made_from_numbers(x, n):
    k = int(n)
    ones = torch.ones(k, dtype=D) * x
    steps = torch.arange(k, dtype=D)
    return (ones * steps).sum(), torch.full((2,), x.item(), dtype=D), torch.tensor([k, k + 1])


@case(array(3))
def tensor_from_mapped_entries(w):
    a, b, c = (e.item() for e in w)
    turned = torch.tensor([[0.0, -c, b], [c, 0.0, -a], [-b, a, 0.0]], dtype=D)
    return turned @ w


@case(array(4))
def tolist(v):
    numbers = v.tolist()
    numbers.sort()
    top = numbers[-1]
    return v * top if top > 1 else v + numbers[0]


@case(array(4))
def through_numpy(v):
    a = v.detach().numpy()
    order = np.asarray(v.detach()).argsort()
    if a.max() > 1.1:
        return v[torch.from_numpy(order)]
    return v * float(np.median(a)) + torch.from_numpy(np.sort(a))


@case(array(3), grads=())
def array_of_numpy_in_python(v):
    total = 0.0
    for a in v.numpy():
        if a > 0:
            total += float(a) ** 2
    return v * total


@case(scalars)
def number_of_numpy_on_one_way(x):
    t = np.float64(0.5)
    if x > 0:
        t = x.item()
    late = np.float64(1.0) - t
    return x * float(late) if np.float64(0.6) < t else x + float(np.float64(2.0) * t)


@case(scalars)
def instance_tests(x):
    a = x if x > 0 else x.item()
    if isinstance(a, torch.Tensor):
        return a * 2
    if isinstance(a, float):
        return x + a
    return x * 100


@case(integers(0, 9), scalars)
def numbers_promote_as_pythons_do(n, x):
    k = n.item()
    a = x.item() if k > 4 else k
    return n * 2 + k, n * (a + 0.5), x * k, torch.ones(2, dtype=torch.float32) * a


@case(digits(5), scalars)
def counting(n, x):
    counts = Counter(n.tolist())
    place, often = counts.most_common(1)[0]
    return x * often + len(counts), sum(counts.values()), place * 0 + max(counts)


@case(scalars, grads=())
def number_outputs(x):
    if x > 0.5:
        return 1, 2.5, True
    return 0, x.item(), False


@case(flags, flags, scalars)
def booleans_in_python(a, b, x):
    p, q = bool(a), b.item()
    return x * (p + q), p and q, p or q, (p, q) == (True, False), [x, -x][q]


@case(between(0.5, 3.5))
def while_of_a_python_number(x):
    a = x.item()
    n = 0
    while a > 0.4:
        a = a * 0.7 - 0.01
        n += 1
    return x * n + a


@case(scalars, integers(0, 3))
def number_as_a_dimension(x, n):
    v = torch.stack([x, x * 2, x**2])
    table = v.reshape(3, 1) * v
    k = int(n)
    return table.select(0, k), table.roll(k, 0).diagonal(), table.sum(k % 2), v.repeat(k + 1).sum()

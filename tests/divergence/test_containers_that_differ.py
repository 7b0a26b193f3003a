"""Lists, dicts, sets, tuples and strings that differ between examples: each use is the loop's.

A container that has another length or other keys for some examples shows each of them its own
content. Each operator, method and builtin has to ask for that content.
"""

import pytest
import torch

from divergence.programs import compiled
from divergence.test_random_programs import obstacles
from forall import config, vmap
from oracle import difference, loop

XS = torch.linspace(-1, 2, 6, dtype=torch.float64)
PROGRAM = """
import collections, copy, functools, itertools, math, operator
from collections import Counter, OrderedDict, defaultdict, deque
import torch

def f(x):
    k = "a" if x > 0 else "b"
    n = int(x.item())
    m = None if x > 1 else 3
    s = [x] if x > 0 else [x, 2 * x]
    t = (1, 2) if x > 0 else (3,)
    L = [1.0, 2.0]
    if x > 0:
        L.append(3.0)
    D = {{"a": 1.0}}
    if x > 0:
        D["b"] = 2.0
    S = {{1}}
    if x > 0:
        S.add(2)
    fn = math.sin if x > 0 else math.cos
    z = 0.0
    {use}
    return x * 0 + z
"""

# Uses that run for all examples at once. A use may have several lines.
TOGETHER = r"""
    d = {k: 1.0, "b": 2.0}; z = sum(d.values())
    d = {n: 1.0, 1: 2.0}; z = sum(d.values())
    d = {m: 1.0, 3: 2.0}; z = sum(d.values()) + len(d)
    d = {t: 1.0, (3,): 2.0}; z = sum(d.values())
    d = {fn: 1.0, math.sin: 2.0}; z = sum(d.values())
    d = {**D, "a": 5.0}; z = sum(d.values())
    d = {**D, k: 5.0}; z = sum(d.values())
    d = {**D, **{k: 7.0}}; z = sum(d.values())
    d = D | {"b": 5.0}; z = sum(d.values())
    d = D | {k: 5.0}; z = sum(d.values())
    d = {"c": 1.0} | D; z = sum(d.values())
    d = {"c": 1.0}; d |= D; z = sum(d.values())
    d = {"c": 1.0}; d |= {k: 8.0}; z = sum(d.values())
    d = {"c": 1.0}; d.update(D); z = sum(d.values())
    d = {"c": 1.0}; d.update({k: 3.0}); z = sum(d.values())
    d = {"c": 1.0}; d.update([(k, 3.0)]); z = sum(d.values())
    d = {"a": 1.0}; d.setdefault(k, 3.0); z = sum(d.values())
    d = {"a": 1.0, "b": 4.0}; z = d.pop(k) + sum(d.values())
    d = {"a": 1.0}; z = d.pop(k, 9.0) + len(d)
    d = {0: 1.0}; z = d.pop(n, 9.0) + len(d)
    d = {"a": 1.0}; z = d.get(k, 9.0)
    d = {"a": 1.0, "b": 3.0}; z = d[k]
    d = {"a": 1.0, "b": 3.0}; del d[k]; z = sum(d.values())
    d = {"a": 1.0, "b": 3.0}; d[k] += 4.0; z = d["a"]
    d = {0: 1.0}; d[n] = 4.0; z = sum(d.values())
    d = dict(D); d["q"] = 3.0; z = sum(d.values())
    d = D.copy(); d["q"] = 3.0; z = sum(d.values())
    d = dict(D, q=3.0); z = sum(d.values())
    d = dict([(k, 1.0), ("a", 5.0)]); z = sum(d.values())
    d = dict(zip([k, "a"], [1.0, 2.0])); z = sum(d.values())
    d = dict.fromkeys([k, "a"], 2.0); z = sum(d.values())
    d = dict.fromkeys(s and L, 2.0); z = sum(d.values())
    d = {q: 1.0 for q in L}; z = sum(d.values())
    d = {k + q: 1.0 for q in ("a", "b")}; z = d.get("aa", 7.0)
    d = defaultdict(float); d[k] += 3.0; z = d["a"]
    d = defaultdict(list); d[k].append(3.0); z = len(d["a"])
    d = OrderedDict(); d[k] = 3.0; z = d.get("a", 1.0)
    d = Counter(); d[k] += 1; z = d["a"]
    d = Counter([k, "a", "a"]); z = d["a"]
    d = Counter(L); z = d[3.0]
    z = float(k in {"a": 1})
    z = float(k in D)
    z = float("b" in D)
    z = float("b" in D.keys())
    z = float(2.0 in D.values())
    z = float(("b", 2.0) in D.items())
    z = float(len(D)) + len({k, "a"})
    z = float(len({n, 1}))
    z = float(len({m, 3}))
    z = float(len({*L, 7.0}))
    z = float(len({*S, 2}))
    z = float("a" in {k})
    z = float(1 in {n})
    z = float(k in ("a", "c"))
    z = float(k in ["a", "c"])
    z = float(k in {"a", "c"})
    z = float(n in {1, 2})
    z = float(n in [1, 2])
    z = float(m in (None, 7))
    z = float(len(S | {2}))
    z = float(len(S & {2}))
    z = float(len(S - {2}))
    z = float(len({2, 3} - S))
    z = float(len({2, 3}.union(S)))
    z = float({2, 1} == S)
    z = float(2 in S)
    z = float(n in S)
    q = {2, 3}; q |= S; z = float(len(q))
    q = {2, 3}; q.update(S); z = float(len(q))
    q = {2, 3}; q.add(n); z = float(len(q))
    q = {2, 3}; q.discard(n); z = float(len(q))
    q = {2, 3}; q.add(k); z = float("a" in q)
    q = {"a"}; q.discard(k); z = float(len(q))
    q = set([k, "a"]); z = float(len(q))
    q = frozenset([k, "a"]); z = float(len(q))
    q = frozenset(L); z = float(len(q))
    q = [*L, 9.0]; z = sum(q)
    q = (*L, 9.0); z = sum(q)
    q = [*s, 9.0]; z = len(q)
    q = [*t, 9.0]; z = sum(q)
    q = [1.0]; q.extend(L); z = sum(q)
    q = [1.0]; q += L; z = sum(q)
    q = [1.0] + L; z = sum(q)
    q = L + [1.0]; z = sum(q)
    q = L * 2; z = sum(q)
    q = [1.0]; q.extend(t); z = sum(q)
    q = [1.0, 2.0]; q[n - 1] = 9.0; z = q[0]
    q = [1.0, 2.0, 3.0]; z = q.pop(n)
    q = [1.0, 2.0, 3.0]; del q[n]; z = q[0]
    q = [1.0, 2.0]; q.append(L); z = len(q[2])
    q = [L, L]; q[0].append(4.0); z = len(q[1])
    q = [list(L), L]; q[0].append(4.0); z = len(q[1]) + 10 * len(q[0])
    q = list(L); q.append(4.0); z = sum(q) + len(L)
    q = L[:]; q.append(4.0); z = sum(q) + len(L)
    q = copy.copy(L); q.append(4.0); z = sum(q) + len(L)
    q = copy.deepcopy(L); q.append(4.0); z = sum(q) + len(L)
    q = copy.deepcopy(D); q["z"] = 4.0; z = sum(q.values()) + len(D)
    q = deque(L); q.append(4.0); z = sum(q)
    q = deque(L, maxlen=2); z = sum(q)
    q = deque([1.0]); q.extend(L); z = sum(q)
    q = deque([1.0, 2.0]); q.rotate(n); z = q[0]
    a, b = (L[0], L[-1]); z = a * b
    (a, b), c = (1.0, L[-1]), k; z = a + b + len(c)
    z = max(L) + min(L)
    z = max(L, key=lambda v: -v)
    z = max(n, 1, 0)
    z = max(s).item()
    z = sum(L, 1.0)
    z = math.prod(L)
    z = math.fsum(L)
    z = functools.reduce(operator.mul, L)
    z = functools.reduce(lambda a, b: a - b, L)
    z = sorted(L, reverse=True)[0]
    z = sorted(L, key=lambda v: (k, -v))[0]
    L.sort(reverse=True); z = L[0]
    L.reverse(); z = L[0]
    z = L.index(2.0) + L.count(3.0)
    z = float(L == [1.0, 2.0])
    z = float([1.0, 2.0] == L)
    z = float(L < [1.0, 2.0, 3.0])
    z = float(t == (1, 2))
    z = float(t < (2,))
    z = float(D == {"a": 1.0})
    z = float({"a": 1.0} == D)
    z = len("".join([k, "b"])) + "".join([k, "b"]).count("b")
    z = len(",".join(str(v) for v in L))
    z = len(str(L))
    z = len(repr(D))
    z = len(f"{L}")
    z = len(k * 3 if k == "a" else k)
    z = float(any(v > 2.5 for v in L))
    z = float(all(v < 2.5 for v in L))
    z = float(isinstance(m, int)) + (0 if m is None else m)
    z = float(bool(L[2:])) + float(bool(S - {1}))
    z = float(not L[2:])
    z = (m or 7) + 0.0
    z = 1.0 if m else 2.0
    z = fn(1.0)
    z = sum(map(lambda v: v * n, L))
    z = len(list(filter(lambda v: v > 1.5, L)))
    z = sum(a * b for a, b in zip(L, L[1:]))
    z = sum(a * b for a, b in itertools.combinations(L, 2))
    z = sum(len(p) for p in itertools.permutations(L))
    z = sum(a for a, b in itertools.product(L, range(2)))
    z = sum(itertools.accumulate(L))
    z = sum(itertools.islice(L, 1, None))
    z = sum(itertools.chain(L, [4.0], t))
    z = sum(len(list(g)) for _, g in itertools.groupby(L, lambda v: v > 1.5))
    z = sum(i * v for i, v in enumerate(L))
    z = sum(i * v for i, v in enumerate(reversed(L), 1))
    z = sum(L[i] for i in range(len(L)))
    z = sum(L[::-1][:2])
    z = sum(len(q) for q in D)
    z = sum(v for _, v in sorted(D.items(), reverse=True)[:1])
    z = next(iter(D.values()))
    z = float(list(D)[-1] == "b")
    z = float(len(list(D.keys()) + list(D.values())))
    D.pop("b", None); z = len(D)
    D.clear(); z = len(D)
    D.popitem(); z = len(D)
    L.pop(); z = sum(L)
    L.remove(2.0); z = sum(L)
    L.clear(); z = len(L)
    L[:] = [5.0]; z = sum(L)
    L[-1] = 5.0; z = sum(L)
    L[0], L[-1] = L[-1], L[0]; z = L[0]
    L += [x.item()]; z = L[-1]
    S.remove(1); z = len(S)
    S.discard(2); z = len(S)
    S.clear(); z = len(S)
    z = float(sum(S))
    z = float(sum(sorted(S, reverse=True)[:1]))
    z = torch.tensor(L).sum()
    z = torch.stack([torch.tensor(v) for v in L]).sum()
    z = torch.stack(s).sum()
    z = torch.cat([v[None] for v in s]).mean()
    z = torch.tensor([n, 2]).sum()
    z = torch.tensor([[n], [2]]).sum()
    z = torch.tensor(t).sum()
    z = torch.full((len(L),), 2.0).sum()
    z = torch.arange(len(L)).sum()
    z = torch.ones(3)[n]
    z = torch.ones(3)[:n].sum()
    z = torch.arange(6.0).view(2, 3)[t[0] - 1 if len(t) > 1 else 0].sum()
    z = torch.arange(6.0)[[0, n]].sum()
    z = torch.arange(6.0)[L.index(2.0):len(L)].sum()
    class A: a = 1.0; b = 2.0\n    z = getattr(A, k)
    class A: pass\n    a = A(); a.__dict__.update(D); z = len(vars(a))
    class A(dict): pass\n    a = A(D); a[k] = 4.0; z = sum(a.values())
    class A(list): pass\n    a = A(L); a.append(4.0); z = sum(a)
    for v in L:\n        if v > 1.5: z += v; break\n    else: z = -1.0
    while L: z += L.pop()
    while len(L) < 4: L.append(z); z += 1
    for i in range(n): z += i
    for i, v in enumerate(L): z += i * v
    for q in sorted(D): z += D[q]
    for q in list(D): z += D.pop(q)
    for a, b in zip(L, t): z += a * b
    for v in t: z += v
    for v in S: z += v
    match k:\n        case "a": z = 1.0\n        case _: z = 2.0
    match L:\n        case [a, b]: z = a\n        case [a, b, c]: z = c
    match t:\n        case (a,): z = a\n        case (a, b): z = b
    match m:\n        case None: z = 1.0\n        case 3: z = 2.0
"""
# Uses in code that is not converted, which run in groups.
IN_GROUPS = r"""
    d = {(k, n): 1.0, ("a", 0): 2.0}; z = sum(d.values())
    d = {"c": 1.0}; d.update(**D); z = sum(d.values())
    d = {"a": 1.0}; d.setdefault(n, 3.0); z = sum(d.values())
    d = defaultdict(list); d[n].append(3.0); z = len(d[1])
    q = L * n; z = sum(q)
    q = [1.0]; q[0:0] = L; z = sum(q)
    q = [1.0, 2.0, 3.0]; q[1:2] = L; z = sum(q)
    q = [1.0, 2.0]; q.insert(n, 9.0); z = q[1]
    a, *b = L; z = a + sum(b)
    *a, b = L; z = sum(a) + b
    z = max(*L, 2.5)
    z = math.hypot(*L)
    z = float([k] == ["a"])
    z = float({"q": k} == {"q": "a"})
    z = float((k, 1) < ("b", 0))
    z = len("%s" % k) + len("{}".format(k + "b" * (n > 0)))
    z = len("%d items" % (10 * n))
    z = float(any(L)) + float(all(L))
    z = list(map(fn, [1.0, 2.0]))[1]
    z = sum(itertools.chain.from_iterable([L, t]))
    z = sum(v for v in D.values())
    z = sum(v for q, v in D.items() if q != "a")
    z = next((v for v in L if v > 2.5), -1.0)
    z = torch.zeros(n + 2).shape[0]
    def g(*a, **k): return len(a) + 10 * len(k)\n    z = g(*L, **D)
    def g(*a, **k): return sum(a) + sum(k.values())\n    z = g(*L, **D)
    def g(a, b=2.0, c=4.0): return a * b + c\n    z = g(*L)
    def g(a=5.0, b=7.0): return a * b\n    z = g(**D)
    class A: pass\n    a = A(); a.v = k; a.w = L; z = len(a.w) + (a.v == "a")
    class A: pass\n    a = A(); setattr(a, k, 3.0); z = getattr(a, "a", 1.0)
    for q, v in D.items(): z += v * len(q)
    try: z = L[2]\n    except IndexError: z = -1.0
    try: z = D["b"]\n    except KeyError: z = -1.0
    match D:\n        case {"b": v}: z = v\n        case _: z = -1.0
"""


def lines_of(text):
    return [line.strip() for line in text.strip().splitlines()]


def made_of(use):
    return compiled(PROGRAM.format(use=use.replace("\\n", "\n")), use)


@pytest.mark.parametrize("use", lines_of(TOGETHER))
def test_a_use_is_the_loops_in_one_run(use, monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    f = made_of(use)
    with obstacles() as met:
        assert difference(vmap(f)(XS), loop(f)(XS)) is None
    assert met == []


@pytest.mark.parametrize("use", lines_of(IN_GROUPS))
def test_a_use_is_the_loops_in_groups(use, monkeypatch):
    monkeypatch.setattr(config, "strategy", "together")
    f = made_of(use)
    with obstacles():
        assert difference(vmap(f)(XS), loop(f)(XS)) is None

"""Random modules of Python code: what a function goes by, how it is held, asked for and changed.

A *leaf* (a number, a text, a function, a tensor) is held by a chain of holders, of which each has
many ways to be asked for what it holds, and to be given something else. A function reads the leaf
through the chain, in code of a random form, and between calls something in the chain changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PRELUDE = """
import contextlib, contextvars, copy, enum, functools, importlib, inspect, itertools, math, operator
import sys, threading, types
import typing
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, replace
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
NEVER = False
N = "k"

class C:
    def __init__(self, k): self.k = k
    def get(self): return self.k
    @property
    def prop(self): return self.k
    def __getitem__(self, _): return self.k
    def __call__(self): return self.k
    def __enter__(self): return self.k
    def __exit__(self, *_): pass
    def __iter__(self): yield self.k
class Child(C):
    def get(self): return super().get()
class Slots:
    __slots__ = ("k", "other")
    def __init__(self, k): self.k = k
class Asked:
    def __init__(self, k): self.t = {"k": k}
    def __getattr__(self, name):
        if name == "k": return self.__dict__["t"]["k"]
        raise AttributeError(name)
class Every:
    def __init__(self, k): object.__setattr__(self, "held", k)
    def __getattribute__(self, name):
        return object.__getattribute__(self, "held" if name == "k" else name)
class Desc:
    def __init__(self, k): self.held = k
    def __get__(self, o, t=None): return self.held
class Lazy:
    def __init__(self, k): self.under = k
    @functools.cached_property
    def k(self): return self.under
class Pair(typing.NamedTuple):
    k: typing.Any
    other: typing.Any = None
@dataclass
class Data:
    k: typing.Any
@dataclass(frozen=True)
class Frozen:
    k: typing.Any
class Mod(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
    def forward(self, x): return x
class OwnDict(dict): pass
class OwnList(list):
    def __getitem__(self, i): return super().__getitem__(i)
class Meta(type): pass
class Kind(enum.Enum):
    A = 1
    B = 2
def meta(k):
    own = type("M", (type,), {"k": k})
    return own("T", (), {})
def module(k):
    m = types.ModuleType("own")
    m.k = k
    return m
def function(k):
    def h(): pass
    h.k = k
    return h
def boxed(k): return lambda: k
def variable(k):
    v = contextvars.ContextVar("v")
    v.set(k)
    return v
def local(k):
    v = threading.local()
    v.k = k
    return v
def cls(k): return type("T", (), {"k": k})
def sub(k): return type("U", (cls(k),), {})
def described(k): return type("T", (), {"k": Desc(k)})()
def same(k): return k
def caught(box):
    try: raise KeyError(box)
    except KeyError as error: return error.args[0]
@contextlib.contextmanager
def within(k): yield k
def root(): return R
RR = [lambda: R]
HOME = sys.modules[__name__]
HOMES = [HOME]
class Outer:
    def root(self): return R
    @property
    def prop(self): return root()
class Inner(Outer):
    def root(self): return super().root()
"""


@dataclass(frozen=True)
class Holder:
    """How it is made of what it holds {0}, asked for that, and given another {1}."""

    made: str
    asked: tuple[str, ...]
    given: tuple[str, ...] = ()


ATTRIBUTE = (
    "{0}.k",
    "getattr({0}, 'k')",
    "getattr({0}, N)",
    "operator.attrgetter('k')({0})",
    "(lambda o: o.k)({0})",
    "getattr({0}, 'none', {0}.k)",
    "[o.k for o in [{0}]][0]",
    "caught({0}).k",
)
GIVEN = ("{0}.k = {1}", "setattr({0}, 'k', {1})", "setattr({0}, N, {1})")
ITEM = (
    "{0}[0]",
    "{0}[-1]",
    "next(iter({0}))",
    "[v for v in {0}][0]",
    "(*{0},)[0]",
    "{0}.copy()[0]",
)
PUT = ("{0}[0] = {1}", "{0}.clear(); {0}.append({1})", "{0}.insert(0, {1})", "{0}.append({1})")
KEY = (
    "{0}['k']",
    "{0}.get('k')",
    "{0}[N]",
    "[*{0}.values()][0]",
    "[v for _, v in {0}.items()][0]",
    "{{**{0}}}['k']",
    "operator.itemgetter('k')({0})",
    "{0}.setdefault('k', 0.)",
    "dict({0})['k']",
    "{0}['k' if 'k' in {0} else 'other']",
    "(lambda k: k)(**{0})",
    "copy.copy({0})['k']",
    "max({0}.items())[1]",
)
STORE = (
    "{0}['k'] = {1}",
    "{0}.update(k={1})",
    "{0}.clear(); {0}['k'] = {1}",
    "{0}.update(z={1})",
)
HOLDERS = (
    Holder("[{0}]", (*ITEM, "{0}[:][0]", "list(reversed({0}))[0]", "max({0}, key=bool)"), PUT),
    Holder("{{'k': {0}}}", KEY, STORE),
    Holder("({0},)", ("{0}[0]", "next(iter({0}))", "(lambda *a: a[0])(*{0})", "{0}[-1]")),
    Holder(
        "C({0})",
        (
            *ATTRIBUTE,
            "{0}.get()",
            "{0}.prop",
            "{0}['any']",
            "{0}()",
            "next(iter({0}))",
            "{0}.__dict__['k']",
            "vars({0})['k']",
            "C.get({0})",
            "type({0}).prop.fget({0})",
            "operator.methodcaller('get')({0})",
            "copy.copy({0}).k",
            "{0}.get.__func__({0})",
            "{0}.get.__self__.k",
        ),
        (
            *GIVEN,
            "{0}.__dict__['k'] = {1}",
            "vars({0}).update(k={1})",
            "{0}.__dict__ = {{'k': {1}}}",
            "{0}.get = lambda: {1}",
        ),
    ),
    Holder("Child({0})", (*ATTRIBUTE, "{0}.get()", "super(Child, {0}).get()"), GIVEN),
    Holder("Slots({0})", (*ATTRIBUTE, "Slots.k.__get__({0})"), GIVEN),
    Holder("Asked({0})", ATTRIBUTE, (*GIVEN, "{0}.t['k'] = {1}", "{0}.t = {{'k': {1}}}")),
    Holder("Every({0})", ATTRIBUTE, ("object.__setattr__({0}, 'held', {1})",)),
    Holder("described({0})", ATTRIBUTE, ("type({0}).__dict__['k'].held = {1}", *GIVEN)),
    Holder("Lazy({0})", ATTRIBUTE, (*GIVEN, "{0}.__dict__.pop('k', 0); {0}.under = {1}")),
    Holder("Pair({0})", (*ATTRIBUTE, "{0}[0]", "{0}._asdict()['k']", "{0}._replace(other=1)[0]")),
    Holder("Data({0})", (*ATTRIBUTE, "replace({0}).k"), GIVEN),
    Holder("Frozen({0})", ATTRIBUTE, ("object.__setattr__({0}, 'k', {1})",)),
    Holder("Mod({0})", ATTRIBUTE, GIVEN),
    Holder("types.SimpleNamespace(k={0})", (*ATTRIBUTE, "vars({0})['k']"), GIVEN),
    Holder("OwnDict(k={0})", KEY, STORE),
    Holder("OwnList([{0}])", ITEM[:5], PUT),
    Holder("OrderedDict(k={0})", (*KEY, "{0}[next(reversed({0}))]"), STORE),
    Holder("defaultdict(int, k={0})", KEY, (*STORE, "{0}.pop('k')", "{0}['a']")),
    Holder("deque([{0}])", ITEM, (*PUT, "{0}.appendleft({1})", "{0}.append({1}); {0}.rotate()")),
    Holder("UserDict(k={0})", KEY[:7], (*STORE, "{0}.data = {{'k': {1}}}")),
    Holder("UserList([{0}])", ITEM, (*PUT, "{0}.data = [{1}]")),
    Holder("ChainMap({{}}, dict(k={0}))", KEY[:6], ("{0}['k'] = {1}", "{0}.maps[1]['k'] = {1}")),
    Holder("types.MappingProxyType(dict(k={0}))", (*KEY[:7], *KEY[8:11])),
    Holder("np.array([None, {0}], dtype=object)", ("{0}[1]", "{0}[-1]"), ("{0}[1] = {1}",)),
    Holder("meta({0})", ("type({0}).k", "{0}.k"), ("type({0}).k = {1}", "{0}.k = {1}")),
    Holder("module({0})", (*ATTRIBUTE, "vars({0})['k']", "{0}.__dict__['k']"), GIVEN),
    Holder("function({0})", (*ATTRIBUTE, "{0}.__dict__['k']"), GIVEN),
    Holder("cls({0})", (*ATTRIBUTE, "{0}.__dict__['k']", "{0}().k"), GIVEN),
    Holder("cls({0})()", ATTRIBUTE, (*GIVEN, "type({0}).k = {1}")),
    Holder(
        "sub({0})()",
        (*ATTRIBUTE, "super(type({0}), {0}).k"),
        (*GIVEN, "type({0}).__mro__[2].k = {1}"),
    ),
    Holder("local({0})", ATTRIBUTE, GIVEN),
    Holder("variable({0})", ("{0}.get()",), ("{0}.set({1})",)),
    Holder(
        "boxed({0})",
        ("{0}()", "{0}.__closure__[0].cell_contents"),
        ("{0}.__closure__[0].cell_contents = {1}",),
    ),
    Holder("(lambda k={0}: k)", ("{0}()", "{0}.__defaults__[0]"), ("{0}.__defaults__ = ({1},)",)),
    Holder(
        "(lambda *, k={0}: k)",
        ("{0}()",),
        ("{0}.__kwdefaults__['k'] = {1}", "{0}.__kwdefaults__ = {{'k': {1}}}"),
    ),
    Holder("functools.partial(same, {0})", ("{0}()", "{0}.args[0]")),
    Holder(
        "functools.partial(same, k={0})",
        ("{0}()", "{0}.keywords['k']"),
        ("{0}.keywords['k'] = {1}",),
    ),
    Holder("C({0}).get", ("{0}()", "{0}.__self__.k"), ("{0}.__self__.k = {1}",)),
)


@dataclass(frozen=True)
class Leaf:
    """What is held in the end: texts of values, what is made of x and a value, and writes."""

    values: tuple[str, ...]
    used: tuple[str, ...]
    written: tuple[str, ...] = ()


LEAVES = (
    Leaf(
        (
            "2.",
            "3.",
            "2",
            "3",
            "True",
            "-2.",
            "0.",
            "-0.",
            "float('nan')",
            "np.float64(2.)",
            "None",
        ),
        (
            "x * {0}",
            "(x if {0} > 2 else -x)",
            "x + sum(range(int({0})))",
            "x * {{2.: 5., 3.: 7.}}.get({0}, 1.)",
            "torch.full_like(x, {0}) + x",
            "x * float(str({0}))",
            "x * abs({0})",
            "x * math.copysign(1., {0})",
            "x * (isinstance({0}, float) + 2)",
            "x * (2. if {0} else 3.)",
            "(x if {0} is None else x * 2)",
            "x.sub(1., alpha={0})",
            "x.clamp(min={0})",
            "x[..., :int({0})].sum()",
            "x * len(f'{{{0}}}')",
            "x * max([{0}, 1])",
            "x ** {0}",
            "torch.stack([x] * int({0}))",
            "x * hash({0})",
            "x * ({0} == 2)",
            "torch.tensor([{0}, 1., 1.]) * x",
        ),
    ),
    Leaf(
        ("'sin'", "'cos'", "'neg'", "'abs'"),
        (
            "getattr(torch, {0})(x)",
            "getattr(x, {0})()",
            "operator.methodcaller({0})(x)",
            "x * len({0} + '1')",
            "(x if {0} == 'sin' else -x)",
            "(x if {0} in {{'sin', 'neg'}} else -x)",
            "(x if {0}.startswith('s') else -x)",
            "x * dict(sin=2., cos=3.).get({0}, 4.)",
            "vars(torch)[{0}](x)",
        ),
    ),
    Leaf(
        (
            "torch.sin",
            "torch.cos",
            "(lambda t: t * 2)",
            "(lambda t: t * 3)",
            "torch.Tensor.neg",
            "F.relu",
            "nn.Tanh()",
            "functools.partial(torch.mul, other=3.)",
            "operator.neg",
            "Mod(0)",
        ),
        (
            "{0}(x)",
            "[*map({0}, [x])][0]",
            "(x if {0} is torch.sin else -x)",
            "(x if callable({0}) else -x)",
            "functools.reduce(lambda a, b: {0}(a), [x, x])",
            "(lambda h, *a: h(*a))({0}, x)",
            "(x if isinstance({0}, nn.Module) else {0}(x))",
            "x * len(type({0}).__name__)",
            "nn.Sequential(nn.Tanh(), nn.Tanh())({0}(x))",
        ),
    ),
    Leaf(
        (
            "torch.tensor([1., 2., 3.])",
            "torch.ones(3)",
            "torch.full((3,), 2., requires_grad=True)",
            "torch.ones(3).double()",
            "nn.Parameter(torch.ones(3))",
            "torch.ones(1, 3)",
            "torch.ones(())",
            "torch.ones(3, 2)[:, 0]",
        ),
        (
            "x * {0}",
            "x * ({0}.requires_grad + 1)",
            "x * len({0}.shape)",
            "x + {0}.detach()",
            "(x if {0}.dtype == torch.float32 else -x)",
            "(x if {0}.sum() > 4 else -x)",
            "torch.where({0} > 1, x, -x)",
            "x * {0}.sum().item()",
            "x * (isinstance({0}, nn.Parameter) + 1)",
            "x * sum({0}.stride())",
            "x * ({0}.grad_fn is None)",
            "x + torch.ones_like({0})",
            "x * {0}.numel()",
            "torch.cat([x, {0}.reshape(-1)])",
            "x * float({0}.max())",
            "x * {0}.ndim + {0}.clone()",
        ),
        (
            "{0}.detach().add_(1)",
            "{0}.requires_grad_()",
            "{0}.data = torch.full((3,), 5.)",
            "{0}.detach().zero_()",
        ),
    ),
    Leaf(
        ("Kind.A", "Kind.B"),
        (
            "(x if {0} is Kind.A else -x)",
            "x * {0}.value",
            "x * {{Kind.A: 2., Kind.B: 3.}}[{0}]",
            "x * len({0}.name) * (1 if {0} == Kind.A else 2)",
        ),
    ),
    Leaf(
        ("[1., 2.]", "[2.]", "[]", "[3., 4., 5.]"),
        (
            "x * sum({0})",
            "x * len({0})",
            "(x if {0} else -x)",
            "x * (2. in {0})",
            "x + sum(v * x for v in {0})",
            "x * sum(b * (i + 1) for i, b in enumerate({0}))",
            "x * sum(a * b for a, b in zip({0}, [1., 2., 3.]))",
            "functools.reduce(torch.mul, {0}, x)",
            "x * max({0}, default=1.)",
            "x * math.prod({0})",
            "x * sum(sorted({0})[:1])",
            "x * sum(itertools.chain({0}, [1.]))",
            "x * sum(filter(None, {0}))",
            "x * sum(torch.tensor({0}).tolist())",
        ),
        ("{0}.append(6.)", "{0}[:] = [7.]", "{0}.clear()", "{0}.reverse()", "{0}.extend([1., 0.])"),
    ),
    Leaf(
        ("{'a': 1., 'b': 2.}", "{'b': 2., 'a': 1.}", "{}", "{'a': 3.}"),
        (
            "x * sum({0}.values())",
            "x * len({0})",
            "(x if 'a' in {0} else -x)",
            "functools.reduce(lambda y, v: y * 2 + v, {0}.values(), x)",
            "x * len(''.join({0}))",
            "x * sum(v for k, v in sorted({0}.items()))",
            "x * (lambda a=5., b=6.: a - b)(**{0})",
            "x * {0}.get('a', 7.)",
            "x * (next(iter({0}), 'z') == 'a')",
        ),
        ("{0}['a'] = 9.", "{0}.clear()", "{0}['c'] = 4.", "{0}['a'] = {0}.pop('a', 1.)"),
    ),
)

# Each makes of an expression {e} in x the function {f}; {h} is a name of its own.
FORMS = """
def {f}(x): return {e}

{f} = lambda x: {e}

def {f}(x):
    if NEVER: print()
    return {e}

def {f}(x):
    y = {e}
    return y

def {f}(x):
    def h(x): return {e}
    return h(x)

def {f}(x): return [{e} for x in [x]][0]

def {h}(x): yield {e}
def {f}(x): return next({h}(x))

class {h}:
    def m(self, x): return {e}
{h}_ = {h}()
def {f}(x): return {h}_.m(x)

class {h}:
    def __call__(self, x): return {e}
{f} = {h}()

class {h}(nn.Module):
    def forward(self, x): return {e}
{f} = {h}()

class {h}:
    @staticmethod
    def m(x): return {e}
{f} = {h}.m

class {h}:
    @classmethod
    def m(cls, x): return {e}
def {f}(x): return {h}.m(x)

class {h}:
    def m(self, x): return {e}
{f} = {h}().m

def {h}(x, k): return {e}
{f} = functools.partial({h}, k=0)

def {f}(x):
    try: return {e}
    finally: pass

def {f}(x):
    try: return {e}
    except (AttributeError, TypeError, KeyError): return x * 11

def {f}(x):
    for _ in range(2): x = {e}
    return x

def {f}(x):
    y = x
    while True:
        y = y + {e}
        break
    return y

def {f}(x):
    with contextlib.nullcontext(): return {e}

def {f}(x):
    with within(x) as x: return {e}

def {f}(x):
    with torch.no_grad(): return {e}

@torch.no_grad()
def {f}(x): return {e}

def {h}(g):
    @functools.wraps(g)
    def w(*a): return g(*a)
    return w
@{h}
def {f}(x): return {e}

def {f}(*args):
    (x,) = args
    return {e}

def {f}(x):
    match x.ndim:
        case 1: return {e}
        case _: return -({e})

def {f}(x):
    if (y := {e}) is None: return x
    return y

def {f}(x): return (lambda y: y)(*[{e}])

def {f}(x): return {{'a': {e}, 'b': x}}['a']

def {f}(x): return functools.reduce(lambda y, x: {e} + y, [x, x])

def {f}(x): return sum(map(lambda x: {e}, [x, x]))

class {h}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return {e}
    @staticmethod
    def backward(ctx, g): return g * 2
def {f}(x): return {h}.apply(x)

class {h}:
    def __matmul__(self, x): return {e}
{h}_ = {h}()
def {f}(x): return {h}_ @ x

class {h}:
    def __init__(self, x): self.y = {e}
def {f}(x): return {h}(x).y

@dataclass
class {h}:
    x: typing.Any
    def __post_init__(self):
        x = self.x
        self.x = {e}
def {f}(x): return {h}(x).x

@functools.singledispatch
def {f}(x): return x
@{f}.register
def _(x: torch.Tensor): return {e}

def {h}(x):
    y = yield x
    yield {e}
def {f}(x):
    g = {h}(x)
    next(g)
    return g.send(0)

async def {h}(x): return {e}
def {f}(x):
    try: {h}(x).send(None)
    except StopIteration as stop: return stop.value

def {f}(x):
    global NEVER
    NEVER = False
    return {e}

def {f}(x):
    y = {e}
    z = y
    del y
    return z
""".strip().split("\n\n")

# What holds R, as a function may ask for it.
ROOTS = (
    *["R"] * 12,
    *["root()"] * 8,
    "(lambda: R)()",
    "RR[0]()",
    "globals()['R']",
    "sys.modules[__name__].R",
    "vars(sys.modules[__name__])['R']",
    "importlib.import_module(__name__).R",
    "__import__(__name__).R",
    "inspect.currentframe().f_globals['R']",
    "eval('R')",
    "root.__globals__['R']",
    "operator.attrgetter('R')(sys.modules[__name__])",
    "HOME.R",
    "getattr(HOME, 'R')",
    "HOMES[0].R",
    "locals().get('R', R)",
    "Outer.root(0)",
    "Inner().root()",
    "Outer().prop",
)


@dataclass(frozen=True)
class Change:
    """At which depth of the chain, in which way, and to which value."""

    depth: int
    way: int
    value: int


@dataclass(frozen=True)
class Code:
    """A module with a function `f` that goes by a leaf in a chain of holders, and its changes."""

    leaf: int
    value: int
    used: int
    chain: tuple[tuple[int, int], ...]  # holders, and how each is asked
    forms: tuple[int, ...]
    root: int
    own: Change | None  # what the function itself changes
    changes: tuple[Change, ...]

    @property
    def _leaf(self) -> Leaf:
        return LEAVES[self.leaf % len(LEAVES)]

    @property
    def _holders(self) -> list[Holder]:
        return [HOLDERS[h % len(HOLDERS)] for h, _ in self.chain]

    def _made(self, value: int, below: int = 0) -> str:
        """What the chain holds below a depth."""
        text = _one(self._leaf.values, value)
        for holder in reversed(self._holders[below:]):
            text = holder.made.format(text)
        return text

    def _path(self, depth: int, *, plain: bool) -> str:
        """The expression for what is at a depth: in the plain way, or as the function asks."""
        text = "R" if plain else _one(ROOTS, self.root)
        for (_, ask), holder in zip(self.chain[:depth], self._holders, strict=False):
            text = _one(holder.asked, 0 if plain else ask).format(text)
        return text

    def _statement(self, change: Change) -> str:
        at = change.depth % (len(self.chain) + 2) - 1
        given, new = (), ""
        if 0 <= at < len(self.chain):
            given, new = self._holders[at].given, self._made(change.value, at + 1)
        elif at > 0:
            given = self._leaf.written
        if not given:
            return f"R = {self._made(change.value)}"
        return _one(given, change.way).format(self._path(at, plain=True), new)

    @property
    def source(self) -> str:
        """The module's, but for what all have."""
        e = _one(self._leaf.used, self.used).format(self._path(len(self.chain), plain=False))
        texts = [f"R = {self._made(self.value)}"]
        for i, form in enumerate(self.forms):
            name = "f" if i == len(self.forms) - 1 else f"f{i}"
            texts.append(_one(FORMS, form).format(f=name, h=f"h{i}", e=e))
            e = f"{name}(x)"
        if self.own is not None:
            own = f"    global R\n    y = plainly(x)\n    {self._statement(self.own)}\n    return y"
            texts.append(f"plainly = f\ndef f(x):\n{own}")
        return "\n".join(texts)

    @property
    def statements(self) -> list[str]:
        """What is run between calls."""
        return [self._statement(change) for change in self.changes]


def _one(texts: Sequence[str], n: int) -> str:
    return texts[n % len(texts)]

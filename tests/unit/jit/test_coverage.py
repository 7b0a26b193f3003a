"""The coverage of a call has each name that the call read, and none of branches not taken."""

import asyncio

import pytest

from forall._jit.tracing.coverage import ObservedCoverage

MANY = "\n".join(f"  here.n{i}" for i in range(300))  # their numbers need EXTENDED_ARG
# Functions of ``here``, an object that notes the names that are read of it. Names that begin with
# "not_" are not read.
SHAPES = {
    "a line": "def f(here):\n return here.a.b + here.c",
    "branches": "def f(here):\n if here.a: here.b\n else: here.not_c\n return here.d or here.not_e",
    "one line": "def f(here): return here.a if here.b else here.not_c",
    "assert": "def f(here):\n if not here.a: return here.not_b\n assert here.c, here.not_d",
    "a loop": "def f(here):\n for i in (1, 2):\n  here.a\n  if i > 2: here.not_b\n else: here.c",
    "a while": "def f(here):\n i = 0\n while here.a and i < 3:\n  i += 1\n  here.b\n return here.c",
    "try": (
        "def f(here):\n try:\n  here.a\n  [][0]\n  here.not_b\n except KeyError: here.not_c\n"
        " except IndexError as e: here.d\n else: here.not_e\n finally: here.g"
    ),
    "with": (
        "def f(here):\n with here.a as b, here.c:\n  b.d\n  raise KeyError\n  here.not_e\n"
        " return here.g"
    ),
    "match": (
        "def f(here):\n match [1, here.a]:\n  case [2, b]: here.not_b\n"
        "  case [1, b] if b.c: here.d\n  case _: here.not_e"
    ),
    "comprehensions": (
        "def f(here):\n return [here.a for _ in 'xy' if here.b], {here.c: here.d for _ in 'x'},"
        " {here.not_e for _ in ''}, [(here.g, i.h) for i in (here.i, here.j)]"
    ),
    "all and any": (
        "def f(here):\n return all(here.a for _ in 'xy'), any(here.b for _ in 'xy'),"
        " tuple(here.c for _ in 'xy'), any(here.not_d for _ in '')"
    ),
    "a generator": (
        "def f(here):\n def g():\n  here.a\n  yield here.b\n  yield here.c\n  here.not_d\n"
        " return next(h := g()), here.e, next(h)"
    ),
    "yield from": (
        "def f(here):\n def g(n):\n  here.a\n  yield here.b\n  if n: yield from g(n - 1)\n"
        "  else: here.c\n return [*g(2)]"
    ),
    "async": (
        "def f(here):\n async def g(n):\n  here.a\n  if n: await g(n - 1)\n  else: here.b\n"
        "  return here.c if n > 5 or here.d else here.not_e\n return run(g(2))"
    ),
    "functions in it": (
        "def f(here):\n def g(x=here.a): return x.b\n def unused(): here.not_c\n"
        " return g(), (lambda: here.d)()"
    ),
    "recursion": "def f(here, n=3):\n here.a\n return f(here, n - 1) if n else here.b",
    "a class": (
        "def f(here):\n class A:\n  k = here.a\n  def g(self): return here.b\n"
        "  def unused(self): here.not_c\n class B(A):\n"
        "  def g(self): return super().g(), here.d\n return B().g()"
    ),
    "writes": "def f(a):\n a.a.w = 1\n del a.b.w\n a.c.d += a.e\n a.g[a.h] = 2",
    "texts": "def f(here): return f'{here.a!r:{here.b.width}} {here.c if here.d else here.not_e}'",
    "calls": "def f(here): return here.a(here.b, *here.c(), k=here.d(1), **{'j': here.e})",
    "a chain": "def f(here): return 1 < here.a(5) < here.b(0) < here.not_c",
    "many names": f"def f(here):\n if 1:\n{MANY}\n if here.a: here.b\n else: here.not_c",
    "a long jump": f"def f(here):\n if here.a:\n  here.b\n else:\n{MANY.replace('.n', '.not_n')}",
}


class Noted:
    """An object with any attribute, which notes their names."""

    width = 9  # not noted

    def __init__(self, names):
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name):
        self._names.add(name)
        return self

    def __setattr__(self, name, value):
        self._names.add(name)

    def __delattr__(self, name):
        self._names.add(name)

    def __setitem__(self, key, value):
        pass

    def __add__(self, other):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True

    def __call__(self, *given, **named):
        return given[0] if given else [self]

    def __iter__(self):
        return iter(())


def _compile(text):
    """A function whose code no call has run."""
    home = {"run": asyncio.run, "__name__": "users"}
    exec(text, home)  # noqa: S102
    return home["f"]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_name_that_is_read_is_seen(shape):
    """From the first call on, and where Python has adapted the code by then."""
    for before in (0, 1, 20):
        f = _compile(SHAPES[shape])
        for _ in range(before):
            f(Noted(set()))
        for _ in range(3):
            names, ran = set(), ObservedCoverage()
            with ran.observe_calls():
                f(Noted(names))
            seen = ran.list_names(f.__code__)
            assert names <= seen, before
            assert not [name for name in seen if name.startswith("not_")], before

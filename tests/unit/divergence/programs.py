"""Random programs of everything that conversion takes apart, as text: for one example they are
ordinary Python, and so is what they should give for many."""

from __future__ import annotations

import linecache
import random

HEAD = """
import contextlib

class Point:
    count = 0
    def __init__(self, u, v):
        self.u = u
        self.v = v
        self.__seen = []
    def __call__(self, w):
        if w > self.u:
            self.v = self.v + 0.25
            return self.v
        return self.u
    def see(self, w):
        if w > 0.1:
            self.__seen.append(w)
        elif w < -0.4:
            self.__seen = [w]
        return len(self.__seen)
    @property
    def size(self):
        return self.u * 0.5

def helper(a, b=0.5, *, low=-1.0):
    k = 0
    while a < b:
        a = a * 0.5 + 0.3
        k += 1
        if k > 3:
            return a - k
    return (a if a > low else a * 0 + low) + k

def recursive(a, depth):
    if depth == 0 or a > 0.8:
        return a
    if a > 0:
        return recursive(a + 0.3, depth - 1)
    return recursive(-a, depth - 1) * 0.5

def maybe(a):
    return None if a < 0.1 else a * 2

"""


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.lines: list[str] = []
        self.loops = 0
        self.fresh = 0

    def expr(self, depth: int = 2) -> str:
        r = self.r
        if depth == 0:
            return r.choice(
                ["x", "y", "z", "x", "y", "0.3", "-0.2", "float(n)", "p.u", "p.v", "c[0]"]
            )
        e = lambda: self.expr(depth - 1)  # noqa: E731
        return r.choice(
            [
                e(),
                f"({e()} + {e()}) * 0.5",
                f"({e()} - {e()})",
                f"{e()} * 0.7",
                f"({e()} if {self.test(depth - 1)} else {e()})",
                f"helper({e()} * 1.0, low={r.choice(['-0.1', '0.2'])})",
                f"recursive({e()} * 1.0, 2)",
                "c[n % 2]",
                "d['k']",
                "p(x)",
                "p.size",
                "bump(x)",
                f"((w := {e()}) + w * 0.5)",
                f"sum([q * 0.5 for q in c if {self.test(0)}], start=x)",
            ]
        )

    def test(self, depth: int = 1) -> str:
        r = self.r
        if depth == 0:
            a = r.choice(["x", "y", "z", "p.u", "c[0]"])
            b = r.choice(["0.1", "-0.3", "y", "x", "z", "0.6"])
            return f"{a} {r.choice(['<', '>', '<=', '>='])} {b}"
        t = lambda: self.test(depth - 1)  # noqa: E731
        return r.choice(
            [
                t(),
                f"({t()} and {t()})",
                f"({t()} or {t()})",
                f"not {t()}",
                f"-0.5 < {self.expr(0)} < {r.choice(['0.4', 'y'])} < 2",
                f"n % {r.choice('23')} == {r.choice('01')}",
                f"len(c) > {r.choice('234')}",
                "m is None",
                "m is not None and m > 0.2",
                f"((w := {self.expr(0)}) > 0.1 or (w := y) < 0.5) and w < 3",
                f"any({self.test(0)} and q > 0 for q in c)",
                "all([q < 0.7 for q in c])",
                "'e' in d",
                "bool(x > y) == True",
            ]
        )

    def block(self, indent: str, depth: int, in_loop: bool) -> None:
        for _ in range(self.r.randint(1, 3)):
            self.statement(indent, depth, in_loop)

    def put(self, indent: str, text: str) -> None:
        self.lines.append(indent + text)

    def statement(self, i: str, depth: int, in_loop: bool) -> None:
        r = self.r
        kinds = ["simple"] * 5
        if depth:
            kinds += ["if"] * 4 + ["while", "for", "with", "match", "try"]
        if in_loop:
            kinds += ["break", "continue"]
        if i != "    ":
            kinds.append("return")
        getattr(self, "_" + r.choice(kinds))(i, depth, in_loop)

    def _simple(self, i: str, depth: int, in_loop: bool) -> None:
        v = self.r.choice("xyz")
        text = self.r.choice(
            [
                f"{v} = {self.expr()}",
                f"{v} = {self.expr()}",
                f"{v} = {self.expr()}",
                "x, y = y, x",
                "x, (y, z) = z, (x, y)",
                f"{v} = {self.r.choice('xyz')}",
                f"{v} += {self.expr(1)}",
                f"{v} -= 0.125",
                f"n = n + {self.r.choice('12')}",
                "n += 1",
                "n = len(c) + 1",
                "n = int(x * 3)",
                "n = [1, 2, 3][int(abs(x) * 2) % 3]",
                f"c.append({self.expr(1)})",
                f"c = [{self.expr(0)}, {self.expr(0)}]",
                "c = c + [x]",
                "b = c",
                "c, b = b, c",
                "b.append(y)",
                f"c[0] = {self.expr(1)}",
                "c[n % 2] += 0.5",
                "c = [q * 2 for q in c]",
                f"c = [q for q in c if {self.test(0)}] + [x, y]",
                "if len(c) > 2: c.pop()",
                f"d['k'] = {self.expr(1)}",
                f"d[{self.r.choice(['int(n) % 3', repr('e')])}] = {self.expr(0)}",
                "d.pop('e', None)",
                f"p.u = {self.expr(1)}",
                "p.v += 0.5",
                "p = Point(x, y)",
                "o, p = p, o",
                "n = n + p.see(y)",
                f"m = maybe({self.expr(0)} * 1.0)",
                "m = None",
                f"{v} = bump({self.expr(0)})",
                "total = total + 0.1",
                f"{v} = (m or 0.5) * 1.0 + x * 0",
                f"{v} = min({self.expr(0)}, {self.expr(0)}, x) * 1.0",
                f"assert {v} > -1e9, 'low'",
                "x, *rest = [x, y, z]",
                f"{v} = (lambda q: q * y if q > 0.2 else -q)(x) * 0.5",
                f"{v} = sum(c, start=x * 0)",
                "del b; b = c",
            ]
        )
        self.put(i, text)

    def _if(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, f"if {self.test()}:")
        self.block(i + "    ", depth - 1, in_loop)
        if self.r.random() < 0.3:
            self.put(i, f"elif {self.test()}:")
            self.block(i + "    ", depth - 1, in_loop)
        if self.r.random() < 0.5:
            self.put(i, "else:")
            self.block(i + "    ", depth - 1, in_loop)

    def _while(self, i: str, depth: int, in_loop: bool) -> None:
        self.loops += 1
        k = f"k{self.loops}"
        self.put(i, f"{k} = 0")
        self.put(i, f"while {k} < {self.r.randint(1, 4)} and ({self.test()}):")
        self.put(i + "    ", f"{k} += 1")
        self.block(i + "    ", depth - 1, True)
        self._else(i, depth, in_loop)

    def _for(self, i: str, depth: int, in_loop: bool) -> None:
        self.loops += 1
        k = f"k{self.loops}"
        items = self.r.choice(
            ["range(3)", "range(n % 4)", "list(c)", "[x, y, 0.5]", "range(len(c))", "c[:2]"]
        )
        head = f"for {k} in {items}:"
        if self.r.random() < 0.2:
            head = f"for {k}, z in zip(range(3), [x, y, z]):"
        if self.r.random() < 0.1:
            head = "for total in [total, total + 0.2]:"
        self.put(i, head)
        self.block(i + "    ", depth - 1, True)
        self._else(i, depth, in_loop)

    def _else(self, i: str, depth: int, in_loop: bool) -> None:
        if self.r.random() < 0.3:
            self.put(i, "else:")
            self.block(i + "    ", depth - 1, in_loop)

    def _with(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, "with contextlib.nullcontext(x) as z:")
        self.block(i + "    ", depth - 1, in_loop)

    def _try(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, "try:")
        self._simple(i + "    ", 0, False)
        self.put(i + "    ", f"if {self.test()}:")
        self._simple(i + "        ", 0, False)
        self.put(i, "finally:")
        self.put(i + "    ", "n = n + 1")

    def _match(self, i: str, depth: int, in_loop: bool) -> None:
        subject = self.r.choice(["n % 4", "[n % 2, x]", "(x, y)"])
        self.put(i, f"match {subject}:")
        for pattern in ("0", "1 | 2", "[0, q] if q > 0.1", "[1, w]"):
            if self.r.random() < 0.7:
                self.put(i + "    ", f"case {pattern}:")
                self.block(i + "        ", depth - 1, in_loop)
        self.put(i + "    ", "case _:")
        self.block(i + "        ", depth - 1, in_loop)

    def _break(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, "break")

    def _continue(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, "continue")

    def _return(self, i: str, depth: int, in_loop: bool) -> None:
        self.put(i, self.r.choice(["return x, n", "return c", "return (y, total)", "return x + y"]))

    def program(self, depth: int = 3) -> str:
        self.lines = [
            "def program(x, y, n):",
            "    z = x * 0.5",
            "    w = y",
            "    m = None",
            "    total = y * 0",
            "    c = [x, y]",
            "    b = c",
            "    d = {'k': x * 0.3}",
            "    p = o = Point(y * 0.5, x)",
            "    def bump(v):",
            "        nonlocal total",
            "        if v > 0.2:",
            "            total = total + v",
            "        return total * 0.5",
        ]
        self.block("    ", depth, False)
        self.block("    ", depth, False)
        self.lines.append("    return x, y, z, n, c, b, d, p.u, p.v, o.u, m, total, w")
        return HEAD + "\n".join(self.lines) + "\n"


def program(seed: int, depth: int = 3):
    """The function of a random program, and its text."""
    text = Writer(seed).program(depth)
    name = f"<program {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict = {"__name__": "programs"}
    exec(compile(text, name, "exec"), names)  # noqa: S102
    return names["program"], text

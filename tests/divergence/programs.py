"""Random programs whose examples diverge: source text from a seed, and how it is shrunk.

A program is a function of three numbers, a vector and an integer. It keeps six names: `a` and `b`
are numbers in tensors, `v` is a vector, `g` a Python float, `k` a Python integer, `s` a list of
numbers and `d` a dict. Each statement leaves them with the same kinds and within bounds, so that
any sequence of statements is valid. Loops count their steps, so that each program ends. Constants
are drawn anew for each test, and what is compared with them is continuous in the inputs, so that
the last bit decides almost never; `stable` tells where it does.
"""

from __future__ import annotations

import ast
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor

from divergence.cases import D
from draws import make_generator

EXAMPLES = 9
INDENT = "    "
HEADER = ("import math", "import torch", "", "D = torch.float64", "")


class Writer:
    """Draws statements, nested to a depth, and writes them down."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.loops = 0  # how many were written: each counts its steps in a name of its own
        self.helpers: list[str] = []
        self.inside: list[str] = []  # the loops and try blocks around the place being written

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def constant(self, low: float = -1.2, high: float = 1.2) -> str:
        return f"{self.random.uniform(low, high):.5f}"

    def write(self, depth: int, text: str) -> None:
        self.lines.append(INDENT * depth + text)

    # --- expressions -----------------------------------------------------------------------------

    def number(self) -> str:
        """A number in a tensor, of order one."""
        kinds = [
            lambda: self.pick("a", "b"),
            lambda: self.pick("a", "b"),
            lambda: f"{self.pick('a', 'b')}.{self.pick('sin', 'cos', 'tanh', 'sigmoid')}()",
            lambda: f"v[{self.index()}]",
            lambda: f"s[{self.pick('0', '-1', 'k % len(s)')}]",
            lambda: f"d[{self.pick(*map(repr, ('p', 'q')))}]",
            lambda: f"(a * {self.constant()} + {self.pick('b', 'g', 'k * 0.1')}).tanh()",
            lambda: f"({self.pick('a', 'b')} if {self.test(1)} else {self.pick('a', 'b')} * 0.7)",
            lambda: "v.sum().sin()",
            lambda: f"v[v > {self.constant()}].sum().tanh()",
        ]
        if self.helpers:
            kinds += [lambda: f"{self.pick(*self.helpers)}({self.pick('a', 'b')}, k)"] * 2
        return self.random.choice(kinds)()

    def index(self) -> str:
        return self.pick("0", "k % 3", "2", "k % 2", "-1")

    def integer(self) -> str:
        """A Python integer from 0 to 4."""
        return self.random.choice(
            [
                lambda: str(self.random.randrange(5)),
                lambda: "k",
                lambda: self.pick("int(n) % 5", "(n % 5).item()"),
                lambda: f"int({self.number()}.abs() * 1.73 + {self.constant(0.1, 0.9)}) % 5",
                lambda: "len(s) % 5",
                lambda: f"min(k, {self.random.randrange(1, 5)})",
                lambda: f"int((v > {self.constant()}).sum())",
                lambda: f"(v < {self.constant()}).nonzero().numel()",
            ]
        )()

    def test(self, depth: int = 0) -> str:
        """Whether something holds, as Python's bool or in a tensor."""
        simple = [
            lambda: f"{self.pick('a', 'b')} {self.pick('<', '>')} {self.constant()}",
            lambda: (
                f"{self.pick('a', 'b')} - {self.pick('b.sin()', 'a.cos()')} > {self.constant()}"
            ),
            lambda: f"k {self.pick('<', '>', '==', '!=', '<=')} {self.random.randrange(4)}",
            lambda: f"n % {self.random.randrange(2, 4)} == {self.random.randrange(2)}",
            lambda: f"v.{self.pick('sum', 'max', 'min')}() > {self.constant()}",
            lambda: f"(v > {self.constant()}).{self.pick('any', 'all')}()",
            lambda: f"{self.constant(-1.2, 0)} < {self.pick('a', 'b')} < {self.constant(0, 1.2)}",
            lambda: f"g > {self.constant()}",
            lambda: f"len(s) > {self.random.randrange(1, 6)}",
            lambda: f"'r' {self.pick('in', 'not in')} d",
        ]
        if depth > 1 or self.chance(0.7):
            return self.random.choice(simple)()
        one, other = self.test(depth + 1), self.test(depth + 1)
        return self.pick(f"{one} and {other}", f"{one} or {other}", f"not ({one})")

    # --- statements ------------------------------------------------------------------------------

    def simple(self) -> list[str]:
        x, i, c = self.number(), self.integer(), self.constant
        kinds = [
            [f"a = a * {c(-0.8, 0.8)} + {x} * {c()}"],
            [f"b = ({x} + b * {c()}).{self.pick('sin', 'tanh')}()"],
            ["a, b = b, a"],
            [f"a, b = b * {c()}, {x}"],
            [f"a, k = {x}, {i}"],
            [f"k = {i}"],
            [f"k = (k + {i}) % 5"],
            [f"g = {self.pick('a', 'b', 'v[1]')}.item() * {c()}"],
            [f"g = math.sin({self.pick('b.item()', 'g')} + {c()})"],
            ["if len(s) < 6:", f"{INDENT}s.append({x})"],
            [f"s[{self.pick('0', '-1')}] = {x}"],
            ["if len(s) > 1:", f"{INDENT}b = b * 0.5 + s.pop({self.pick('', '0')})"],
            ["s = [e * 0.9 for e in s]"],
            [f"s = [e for e in s if e > {c()}] or [a]"],
            [f"d['{self.pick('p', 'q', 'r')}'] = {x}"],
            [f"b = b * 0.5 + d.get('r', {self.pick('a', '0.25')})"],
            [f"v = v * {c()} + {x} * 0.3"],
            ["v = v.clone()", f"v[v > {c()}] = {self.pick(c(), 'a', 'b')}"],
            [
                "v = v.clone()",
                f"v[{self.index()}] {self.pick('=', '+=', '*=')} {self.pick('a', c())}",
            ],
            [f"v = torch.cat([v[v > {(t := c())}], v[~(v > {t})] * 0.8])"],
            [f"a = a * 0.5 + v[(v < {c()}).nonzero()[:, 0]].sum() * 0.3"],
            ["a = a * 0.6 + v[:k].sum() * 0.2"],
            [f"b = b * 0.5 + sum(e * 0.3 for e in v if e > {c()})"],
            [f"a = a + 0.1 * len(f'{{k}}{{n}}') + {c()}", "a = a.tanh()"],
        ]
        return self.random.choice(kinds)

    def leave(self) -> str | None:
        """A statement that leaves the block, where one may stand here."""
        ways = ["return result(a, b, v, g, k, s, d)"]
        if "loop" in self.inside:
            ways += ["break", "continue"] * 3
        if "try" in self.inside:
            ways += ["raise ValueError('no')", "raise KeyError('r')"] * 2
        return self.pick(*ways) if self.chance(0.8) else None

    def block(self, depth: int, nested: int, size: int) -> None:
        for _ in range(self.random.randint(1, size if nested < 2 else 2)):
            self.statement(depth, nested)
        if nested and self.chance(0.08):
            way = self.leave()
            if way:
                self.write(depth, way)

    def statement(self, depth: int, nested: int) -> None:
        compound = [self.branch] * 4 + [self.loop_while, self.loop_for] * 2 + [self.guarded]
        if nested < 3 and self.chance((0.6, 0.4, 0.25)[nested]):
            self.random.choice(compound)(depth, nested + 1)
        elif nested and self.chance(0.12):
            self.write(depth, f"if {self.test()}:")
            self.write(depth + 1, self.leave() or "pass")
        else:
            for line in self.simple():
                self.write(depth, line)

    def branch(self, depth: int, nested: int) -> None:
        self.write(depth, f"if {self.test()}:")
        self.block(depth + 1, nested, 3)
        while self.chance(0.25):
            self.write(depth, f"elif {self.test()}:")
            self.block(depth + 1, nested, 2)
        if self.chance(0.6):
            self.write(depth, "else:")
            self.block(depth + 1, nested, 3)

    def loop_while(self, depth: int, nested: int) -> None:
        self.loops += 1
        step, limit = f"step{self.loops}", self.random.randint(2, 4)
        self.write(depth, f"{step} = 0")
        if self.chance(0.3):
            self.write(depth, "while True:")
            self.write(depth + 1, f"{step} += 1")
            self.write(depth + 1, f"if {step} > {limit} or {self.test()}:")
            self.write(depth + 2, "break")
            self.body(depth, nested)
        else:
            self.write(depth, f"while {step} < {limit} and ({self.test()}):")
            self.write(depth + 1, f"{step} += 1")
            self.body(depth, nested)
            self.otherwise(depth, nested)

    def loop_for(self, depth: int, nested: int) -> None:
        self.loops += 1
        name = f"i{self.loops}"
        rows, steps = f"for e{self.loops} in ", f"for {name} in "
        header, first = self.random.choice(
            [
                (f"{steps}range({self.random.randint(1, 3)}):", f"a = a + {name} * 0.1"),
                (f"{steps}range({self.integer()}):", f"b = b * 0.9 + {name} * 0.1"),
                (f"{rows}v:", f"a = a * 0.5 + e{self.loops} * 0.3"),
                (f"{rows}list(s):", f"b = b * 0.6 + e{self.loops}"),
                (
                    f"for {name}, e{self.loops} in enumerate(v[v > {self.constant()}]):",
                    f"k = {name}",
                ),
            ]
        )
        self.write(depth, header)
        self.write(depth + 1, first)
        self.body(depth, nested)
        self.otherwise(depth, nested)

    def body(self, depth: int, nested: int) -> None:
        self.inside.append("loop")
        self.block(depth + 1, nested, 3)
        self.inside.pop()

    def otherwise(self, depth: int, nested: int) -> None:
        if self.chance(0.3):
            self.write(depth, "else:")
            self.block(depth + 1, nested, 2)

    def guarded(self, depth: int, nested: int) -> None:
        self.write(depth, "try:")
        self.inside.append("try")
        fails, x = self.constant(), self.pick("a", "b")
        self.write(
            depth + 1,
            self.pick(
                f"b = b * 0.5 + d['r'] * {self.constant()}",
                f"a = a * [0.5, {self.constant()}][k]",
                f"g = {self.constant()} / (1 + k % 2)",
                f"b = helper_that_may_fail({x}, {fails})",
            ),
        )
        self.block(depth + 1, nested, 2)
        self.write(depth + 1, f"if {self.test()}:")
        self.write(depth + 2, self.pick("raise ValueError('x')", "d['none'] + 1", "[0][k + 1]"))
        self.inside.pop()
        self.write(
            depth, "except (KeyError, IndexError):" if self.chance(0.4) else "except LookupError:"
        )
        self.block(depth + 1, nested, 2)
        self.write(depth, "except ValueError as error:")
        self.write(depth + 1, "k = len(error.args[0]) % 5")
        self.block(depth + 1, nested, 2)
        if self.chance(0.3):
            self.write(depth, "else:")
            self.block(depth + 1, nested, 2)
        if self.chance(0.3):
            self.write(depth, "finally:")
            self.write(depth + 1, f"b = b * {self.constant()}")

    # --- the whole -------------------------------------------------------------------------------

    # How a helper may leave its loop, what it calls itself with, and what it returns in the end.
    EXITS = ("break", "continue", "return a.cos()", "k = k - 1", "a = -a")
    INNER = "a.sin()"
    ENDS = ("return a.tanh()", "return a.sin() if k > 1 else a.cos()")

    def helper(self, name: str) -> None:
        """A function of a number and an integer, with a loop and perhaps calls of its own."""
        self.write(0, f"def {name}(a, k):")
        limit = self.random.randint(1, 3)
        self.write(1, self.pick(f"for i in range({limit}):", f"for i in range(min(k, {limit})):"))
        self.write(2, f"a = a * {self.constant(-0.9, 0.9)} + {self.constant()}")
        self.write(2, f"if a {self.pick('<', '>')} {self.constant()}:")
        self.write(3, self.pick(*self.EXITS))
        if self.chance(0.5):
            self.write(2, f"while a < {self.constant(-0.8, -0.2)}:")
            self.write(3, f"a = a * 0.5 + {self.constant(0.1, 0.6)}")
        if self.chance(0.5):
            self.write(1, f"if k > 0 and a > {self.constant()}:")
            self.write(2, f"return {name}({self.INNER}, k - 1) * {self.constant()}")
        self.write(1, self.pick(*self.ENDS))
        self.write(0, "")

    def program(self) -> str:
        self.lines += HEADER
        self.write(0, "def helper_that_may_fail(a, limit):")
        self.write(1, "if a > limit:")
        self.write(2, "raise ValueError('above the limit')")
        self.write(1, "return a * 0.5")
        self.write(0, "")
        for number in range(self.random.randint(0, 2)):
            self.helper(f"helper{number}")
            self.helpers.append(f"helper{number}")
        self.write(0, "def result(a, b, v, g, k, s, d):")
        self.write(1, "rest = sum(d.values()) + len(d) + len(s) * 0.1")
        self.write(1, "return a * 1.0, b * 1.0, v * 1.0, a * g, k * 1, sum(s) * 1.0, rest")
        self.write(0, "")
        self.write(0, "def f(a, b, v, n):")
        self.write(1, "v, g, k, s, d = v.clone(), 0.25, 0, [a], {'p': a, 'q': b * 0.5}")
        for _ in range(self.random.randint(3, 6)):
            self.statement(1, 0)
        self.write(1, "return result(a, b, v, g, k, s, d)")
        return "\n".join(self.lines) + "\n"


class Numbers(Writer):
    """Programs of Python numbers, which keep the types that Python gives them.

    `a` and `b` are floats, `k` is an integer from 0 to 4, `g` a number of any type, `w` None or a
    number, `z` a text, `c` a tuple, `s` a list of numbers, `v` a vector. `e` is bound by some
    branches alone: who reads it without having it fails, as in the loop.
    """

    EXITS = ("break", "continue", "return 1", "k = k - 1", "return math.cos(a)")
    INNER = "math.sin(a)"
    ENDS = ("return math.tanh(a)", "return a if k > 1 else k")

    def number(self) -> str:
        """A number of order one, mostly a float."""
        one = self.pick("a", "b", "g", "a", "b")
        kinds = [
            lambda: one,
            lambda: self.pick("a", "b", "k", "g", "c[0]", "s[k % len(s)]", "s[-1]"),
            lambda: f"{self.pick('min', 'max')}({one}, {self.constant()})",
            lambda: f"{self.pick('min', 'max')}({one}, {self.pick('a', 'b', 'k', '1', 'True')})",
            lambda: f"{self.pick('min', 'max')}(s)",
            lambda: f"{self.pick('min', 'max')}(a, k, {self.constant()}, key=abs)",
            lambda: f"abs({one})",
            lambda: f"round({one}, {self.pick('0', '1', '2')})",
            lambda: f"math.{self.pick('sin', 'tanh', 'floor', 'ceil', 'fabs', 'atan')}({one})",
            lambda: f"math.{self.pick('sqrt', 'log1p')}(abs({one}))",
            lambda: f"math.{self.pick('hypot', 'atan2', 'copysign')}({one}, {self.constant()})",
            lambda: f"({one} if {self.test(1)} else {self.pick('a', 'k', '0.5', 'True')})",
            lambda: f"({one} {self.pick('and', 'or')} {self.pick('k', 'b', '0.5', '2')})",
            lambda: f"{one} {self.pick('%', '//')} {self.pick('0.7', '2', '-1.3')}",
            lambda: f"abs({one}) ** {self.pick('2', '0.5', '-0.3', '3')}".replace("** -", "** 0"),
            lambda: f"sum([{one}, k, {self.constant()}])",
            lambda: "sum(s)",
            lambda: f"sorted([{one}, b, {self.constant()}])[{self.pick('0', '1', '-1')}]",
            lambda: f"divmod({one}, {self.pick('2', '0.6')})[{self.pick('0', '1')}]",
            lambda: f"(w if w is not None else {self.pick('a', '0.25', '1')})",
            lambda: f"float({self.pick('k', 'g', 'a', repr('0.5'))})",
            lambda: f"({self.test(1)}) {self.pick('+', '*', '-')} {self.pick('a', 'k', '1')}",
            lambda: f"v[{self.index()}].item()",
        ]
        if self.helpers:
            kinds += [lambda: f"{self.pick(*self.helpers)}({self.pick('a', 'b', 'g')}, k)"] * 2
        return self.random.choice(kinds)()

    def integer(self) -> str:
        return self.random.choice(
            [
                lambda: str(self.random.randrange(5)),
                lambda: self.pick("k", "n % 5", "(k + n) % 5", "k ^ 1", "k & 3", "k >> 1"),
                lambda: f"int({self.number()}) % 5",
                lambda: f"round({self.number()}) % 5",
                lambda: f"int({self.test(1)})",
                lambda: f"{self.pick('min', 'max')}(k, {self.random.randrange(1, 5)})",
                lambda: "len(s) % 5",
                lambda: f"len({self.pick('z', 'str(k)', 'c')}) % 5",
                lambda: f"sum({self.pick('1', 'i')} for i in range(5) if i > k) % 5",
                lambda: f"sum([{self.test(1)}, {self.test(1)}])",
                lambda: "-k % 5",
                lambda: f"pow(k, {self.random.randrange(3)}, 5)",
            ]
        )()

    def test(self, depth: int = 0) -> str:
        one = self.pick("a", "b", "g", "k", "a - b", "c[0]")
        simple = [
            lambda: f"{one} {self.pick('<', '>', '<=', '>=')} {self.constant()}",
            lambda: f"{one} {self.pick('<', '>')} {self.pick('a', 'b', 'k')}",
            lambda: f"k {self.pick('<', '>', '==', '!=', '<=')} {self.random.randrange(4)}",
            lambda: f"{self.constant(-1.2, 0)} < {one} < {self.constant(0, 1.2)}",
            lambda: f"n % {self.random.randrange(2, 4)} == {self.random.randrange(2)}",
            lambda: f"w is {self.pick('None', 'not None')}",
            lambda: f"k {self.pick('in', 'not in')} ({self.random.randrange(3)}, 3)",
            lambda: f"z {self.pick('==', '!=')} {self.pick(repr('x'), repr('yy'))}",
            lambda: f"isinstance({self.pick('a', 'g', 'w', 'k')}, {self.pick('int', 'float')})",
            lambda: f"{self.pick('any', 'all')}([{one} > 0, k > 1])",
            lambda: f"{self.pick('any', 'all')}(e > {self.constant()} for e in s)",
            lambda: self.pick("k", "t", "w", "z", "bool(g)"),
            lambda: f"(u := {self.pick('a', 'k', 'g')}) > {self.constant()}",
            lambda: f"len(s) > {self.random.randrange(1, 6)}",
            lambda: f"v[{self.index()}] > {self.constant()}",
        ]
        if depth > 1 or self.chance(0.7):
            return self.random.choice(simple)()
        one, other = self.test(depth + 1), self.test(depth + 1)
        return self.pick(f"{one} and {other}", f"{one} or {other}", f"not ({one})")

    def simple(self) -> list[str]:
        x, i, c = self.number(), self.integer(), self.constant
        bounded = self.pick("math.sin({})", "({}) % 1.5", "min(max({}, -1.5), 1.5)").format(x)
        kinds = [
            [f"a = float({bounded})"],
            [f"b = b * {c(-0.9, 0.9)} + math.sin({x}) * {c()}"],
            [f"g = {bounded}"],
            [f"g = {self.pick('k', 'a', 't', 'True', '1', '1.0', 'k > 1', 'a > b')}"],
            [f"g {self.pick('+=', '-=', '*=')} {self.pick('a', 'k', '1', '0.5')}", "g = g % 3"],
            ["a, b = b, a"],
            [f"a, k = b, {i}"],
            [f"k = {i}"],
            [f"k {self.pick('+=', '-=', '*=', '|=', '^=')} {self.pick('1', 'k', '3')}", "k %= 5"],
            [f"t = {self.test()}"],
            [f"w = {self.pick('None', 'a', 'k', 'g', '0.5')}"],
            [f"w = {x} if {self.test()} else None"],
            [f"z = {self.pick(repr('x'), repr('yy'), 'str(k)', repr('x') + ' * k')}"],
            [f"z = f'{{k}}{{{self.pick('t', 'k', 'b > 0', 'a:.1f')}}}'"],
            [f"c = {self.pick('(a, k)', '(k, b)', '(b, 1)', '(g, k, a)', '(a,) + c[:1]')}"],
            [f"c = (a, 1) if {self.test()} else (b, {self.pick('1', '2', '2.5')})"],
            ["if len(s) < 6:", f"{INDENT}s.append({x})"],
            ["s = [e * 0.9 for e in s]"],
            [f"s = [e for e in s if e > {c()}] or [a]"],
            [f"s[{self.pick('0', '-1')}] = {x}"],
            [f"if {self.test()}:", f"{INDENT}e = {x}"],
            [f"if {self.test()}:", f"{INDENT}e = {x}", "else:", f"{INDENT}e = k", "a = a + e % 1"],
            [f"v = v * {c()} + {self.pick('a', 'k', 'g')} * 0.3"],
        ]
        return self.random.choice(kinds)

    def leave(self) -> str | None:
        ways = ["return result(a, b, k, g, t, w, z, c, s, v)"]
        if "loop" in self.inside:
            ways += ["break", "continue"] * 3
        return self.pick(*ways) if self.chance(0.8) else None

    def guarded(self, depth: int, nested: int) -> None:
        self.write(depth, f"for i in range({self.integer()}):")
        self.body(depth, nested)
        self.otherwise(depth, nested)

    def loop_for(self, depth: int, nested: int) -> None:
        self.loops += 1
        name = f"i{self.loops}"
        header, first = self.random.choice(
            [
                (f"for {name} in range({self.random.randint(1, 3)}):", f"a = a + {name} * 0.1"),
                (f"for {name} in range({self.integer()}):", f"b = b * 0.9 + {name} * 0.1"),
                (f"for {name} in (a, k, 0.5):", f"g = {name}"),
                (f"for {name} in list(s):", f"b = b * 0.6 + {name} % 1"),
                (f"for {name}, y{self.loops} in enumerate([a, b, k]):", f"k = {name}"),
                (f"for {name}, y{self.loops} in zip(s, [k, 1]):", f"g = y{self.loops}"),
            ]
        )
        self.write(depth, header)
        self.write(depth + 1, first)
        self.body(depth, nested)
        self.otherwise(depth, nested)
        if self.chance(0.2):
            self.write(depth, f"g = {name}")  # who has had no step does not have it

    def program(self) -> str:
        self.lines += HEADER
        self.lines += NUMBERS_RESULT.splitlines()
        for number in range(self.random.randint(0, 2)):
            self.helper(f"helper{number}")
            self.helpers.append(f"helper{number}")
        self.write(0, "def f(a, b, v, n):")
        self.write(1, "a, b, n, k, g, t, w = a.item(), b.item(), n.item(), 0, 0.25, True, None")
        self.write(1, "z, c, s, u = 'x', (a, 1), [a, 0.5], 0")
        for _ in range(self.random.randint(3, 6)):
            self.statement(1, 0)
        self.write(1, "return result(a, b, k, g, t, w, z, c, s, v)")
        return "\n".join(self.lines) + "\n"


# What tells the types of numbers, and whatever is none
NUMBERS_RESULT = """\
def told(x):
    if x is None:
        return torch.tensor(0.0, dtype=D), 4
    if isinstance(x, str):
        return torch.tensor(float(len(x)), dtype=D), 5
    kind = 0 if isinstance(x, bool) else 1 if isinstance(x, int) else 2
    return torch.tensor(float(x), dtype=D), kind

def result(a, b, k, g, t, w, z, c, s, v):
    first, last = c[0], c[-1]
    rest = told(first), told(last), len(c), len(s), told(s[0])
    return told(a), told(b), told(k), told(g), told(t), told(w), told(z), rest, v * 1.0
"""


def source(seed: int, writer: type[Writer] = Writer) -> str:
    """The text of the program of a seed."""
    return writer(seed).program()


def compiled(text: str, name: str) -> Callable:
    """The function `f` of a text, in a file that is only in the cache of lines."""
    path = f"<{name}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    space: dict = {"__name__": name}
    exec(compile(text, path, "exec"), space)  # noqa: S102 - the text is our own
    return space["f"]


def inputs(seed: int, size: int = EXAMPLES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draws = make_generator(seed)
    return (
        torch.rand(size, dtype=D, generator=draws) * 3 - 1.5,
        torch.rand(size, dtype=D, generator=draws) * 3 - 1.5,
        torch.rand(size, 3, dtype=D, generator=draws) * 3 - 1.5,
        torch.randint(0, 7, (size,), generator=draws),
    )


class TooLongError(Exception):
    """A program has run more lines than programs do: it may not end."""


def limited(f: Callable, lines: int = 20_000) -> Callable:
    """`f`, raising after so many lines: a program that was made shorter may run for ever."""

    def run(*row: Tensor) -> object:
        left = lines

        def trace(frame: FrameType, event: str, _: object) -> Callable | None:
            nonlocal left
            if not frame.f_code.co_filename.startswith("<program"):
                return None
            left -= 1
            if left < 0:
                raise TooLongError
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return f(*row)
        finally:
            sys.settrace(before)

    return run


def shorter(text: str) -> Iterator[str]:
    """The text with one statement dropped, or with a block in the place of its statement."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for place, statement in enumerate(block):
                for instead in _instead(statement, may_be_empty=name != "body" or len(block) > 1):
                    block[place : place + 1] = instead
                    yield ast.unparse(tree) + "\n"
                    block[place : place + len(instead)] = [statement]


def _instead(statement: ast.stmt, *, may_be_empty: bool) -> Iterator[list[ast.stmt]]:
    yield [] if may_be_empty else [ast.Pass()]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block and not isinstance(statement, (ast.FunctionDef, ast.ExceptHandler)):
            yield list(block)

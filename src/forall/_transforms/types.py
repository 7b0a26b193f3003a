"""Type variables of the public verbs: they keep the parameters of a function, and its result."""

from __future__ import annotations

from typing import Any, Literal, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
R = TypeVar("R")  # what the function returns
# The argument that is differentiated. Without a bound every operator in a lambda is an error.
A = TypeVar("A", bound=Any)
X = TypeVar("X")  # the aux
Ts = TypeVarTuple("Ts")  # primals

# How many at once: so many, as many as memory takes, or all.
Chunk = int | Literal["auto"] | None

"""Type variables of the public verbs: they keep the parameters of a function, and its result."""

from __future__ import annotations

from typing import ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
R = TypeVar("R")  # what the function returns
A = TypeVar("A")  # the argument that is differentiated
X = TypeVar("X")  # the aux
Ts = TypeVarTuple("Ts")  # primals

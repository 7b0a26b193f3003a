"""Type variables of the public transforms: they keep a function's parameters and its result."""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    overload,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.chunk_size import Chunks
    from forall._jit.cache.cache_info import CacheInfo, Kind

P = ParamSpec("P")
R = TypeVar("R")  # the result of the function
# The argument that is differentiated. Without a bound every operator in a lambda is an error.
A = TypeVar("A", bound=Any)
A_contra = TypeVar("A_contra", bound=Any, contravariant=True)
B = TypeVar("B", bound=Any)  # the argument after that one
X = TypeVar("X")  # the aux
Ts = TypeVarTuple("Ts")  # primals

# How many examples at once: a number, as many as memory allows, or all.
Chunk: TypeAlias = "int | Literal['auto'] | Chunks | None"

Q = ParamSpec("Q")  # the parameters of a method, without its object
Out_co = TypeVar("Out_co", covariant=True)


class Jitted(Protocol[P, Out_co]):
    """The type of a function that `jit` returns, also as a method of a class, with its cache."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[Any, Q], Out_co], instance: object, owner: type, /
    ) -> Callable[Q, Out_co]: ...

    def cache_info(self) -> CacheInfo: ...

    def cache_clear(self) -> None: ...

    def kinds(self) -> list[Kind]: ...

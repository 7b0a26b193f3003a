# Types of the public names, for type checkers: the overloads are here and nowhere else.

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Concatenate, Generic, Literal, TypeAlias, overload

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functionalize, replace_all_batch_norm_modules_

from forall import random as random
from forall._api.chunk_size import Chunks
from forall._api.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from forall._api.debug_unwrap import debug_unwrap
from forall._api.explain import Explanation, explain
from forall._api.functional_call import functional_call, stack_module_state
from forall._api.per_example_grad_norm import per_example_grad_norm
from forall._api.shard_map import axes, shard_map
from forall._api.stacked import stacked
from forall._api.torch_func_patch import install, installed, uninstall
from forall._api.typing import A, A_contra, B, Chunk, Jitted, Out_co, P, R, Ts, X
from forall._compat.versions import rearrange
from forall._control_flow.associative_scan import associative_scan
from forall._control_flow.cond import cond, switch
from forall._control_flow.scan import map, scan  # noqa: A004 - the name that it has in JAX
from forall._control_flow.while_loop import fori_loop, while_loop
from forall._core.config import now as config
from forall._core.errors import AxisError, PerformanceWarning, RankError
from forall._jit.cache.cache_info import CacheInfo, Kind

__all__ = [
    "AxisError",
    "Chunks",
    "Explanation",
    "PerformanceWarning",
    "RankError",
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axes",
    "axis_index",
    "axis_size",
    "cond",
    "config",
    "debug_unwrap",
    "explain",
    "fori_loop",
    "functional_call",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "hessian_diag",
    "hvp",
    "install",
    "installed",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jit",
    "jvp",
    "laplacian",
    "linearize",
    "map",
    "per_example_grad_norm",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "scan",
    "shard_map",
    "stack_module_state",
    "stacked",
    "switch",
    "uninstall",
    "vjp",
    "vmap",
    "while_loop",
]

Argnums: TypeAlias = int | tuple[int, ...]
Argnames: TypeAlias = str | tuple[str, ...] | None

# What transforms return is a function. Types of its own let type checkers see what is inside:
# a lambda in `vmap(grad(lambda x: ...))`, or that a Hessian by a tensor is a tensor.

class _Derivative(Generic[A_contra, P, Out_co]):
    def __call__(self, x: A_contra, /, *args: P.args, **kwargs: P.kwargs) -> Out_co: ...

class _Hessian(Generic[A_contra, P]):
    @overload
    def __call__(
        self: _Hessian[Tensor, P], x: Tensor, /, *args: P.args, **kwargs: P.kwargs
    ) -> Tensor: ...
    @overload
    def __call__(
        self: _Hessian[dict[X, Tensor], P],
        x: dict[X, Tensor],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> dict[X, dict[X, Tensor]]: ...
    @overload
    def __call__(self, x: A_contra, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...

class _JittedHessian(_Hessian[A_contra, P]):
    def cache_info(self) -> CacheInfo: ...
    def cache_clear(self) -> None: ...
    def kinds(self) -> list[Kind]: ...

@overload
def vmap(
    func: _Hessian[A, P],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str | Tensor = "error",
    *,
    chunk_size: Chunk = None,
    divergence: str = "split",
    ragged: bool = False,
    max_steps: int | None = None,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> _Hessian[A, P]: ...
@overload
def vmap(
    func: _Derivative[A, P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str | Tensor = "error",
    *,
    chunk_size: Chunk = None,
    divergence: str = "split",
    ragged: bool = False,
    max_steps: int | None = None,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, R]: ...
@overload
def vmap(
    func: Callable[P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str | Tensor = "error",
    *,
    chunk_size: Chunk = None,
    divergence: str = "split",
    ragged: bool = False,
    max_steps: int | None = None,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Callable[P, R]: ...
@overload
def grad(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, P, A]: ...
@overload
def grad(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: Literal[1],
    has_aux: Literal[False] = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], B]: ...
@overload
def grad(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: tuple[Literal[1], Literal[0]],
    has_aux: Literal[False] = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], tuple[B, A]]: ...
@overload
def grad(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: Literal[False] = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], tuple[A, B]]: ...
@overload
def grad(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, P, tuple[A, X]]: ...
@overload
def grad(
    func: Callable[P, tuple[Tensor, X]],
    argnums: Argnums = 0,
    *,
    has_aux: Literal[True],
    argnames: Argnames = None,
    holomorphic: bool = False,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def grad(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    argnames: Argnames = None,
    holomorphic: bool = False,
) -> Callable[P, Any]: ...
@overload
def grad_and_value(  # with has_aux what func returns, (value, aux), comes back as it is
    func: Callable[Concatenate[A, P], R],
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, P, tuple[A, R]]: ...
@overload
def grad_and_value(
    func: Callable[Concatenate[A, B, P], R],
    argnums: Literal[1],
    has_aux: bool = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], tuple[B, R]]: ...
@overload
def grad_and_value(
    func: Callable[Concatenate[A, B, P], R],
    argnums: tuple[Literal[1], Literal[0]],
    has_aux: bool = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], tuple[tuple[B, A], R]]: ...
@overload
def grad_and_value(
    func: Callable[Concatenate[A, B, P], R],
    argnums: tuple[Literal[0], Literal[1]],
    has_aux: bool = False,
    *,
    argnames: None = None,
    holomorphic: bool = False,
) -> _Derivative[A, Concatenate[B, P], tuple[tuple[A, B], R]]: ...
@overload
def grad_and_value(
    func: Callable[P, R],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    argnames: Argnames = None,
    holomorphic: bool = False,
) -> Callable[P, tuple[Any, R]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, A]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, X]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, Tensor]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, tuple[Tensor, X]]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: Literal[1],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], B]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: tuple[Literal[0], Literal[1]],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], tuple[A, B]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], dict[X, Tensor]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, dict[X, A]]: ...
@overload
def jacrev(
    func: Callable[Concatenate[A, P], tuple[Tensor, ...]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, ...]]: ...
@overload
def jacrev(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, Any]: ...
@overload
def jacrev(
    func: Callable[P, tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def jacrev(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, R]]: ...
@overload
def jacrev(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    _preallocate_and_copy: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, tuple[R, X]]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, A]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, X]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, Tensor]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, tuple[Tensor, X]]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: Literal[1],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], B]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: tuple[Literal[0], Literal[1]],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], tuple[A, B]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], dict[X, Tensor]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, dict[X, A]]: ...
@overload
def jacfwd(
    func: Callable[Concatenate[A, P], tuple[Tensor, ...]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, ...]]: ...
@overload
def jacfwd(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, Any]: ...
@overload
def jacfwd(
    func: Callable[P, tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def jacfwd(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, R]]: ...
@overload
def jacfwd(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    randomness: str = "error",
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, tuple[R, X]]]: ...
@overload
def hessian(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Hessian[A, P]: ...
@overload
def hessian(
    func: Callable[Concatenate[A, Tensor, P], Tensor],
    argnums: Literal[1],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[Tensor, P], Tensor]: ...
@overload
def hessian(
    func: Callable[Concatenate[Tensor, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[Tensor, P, tuple[Tensor, tuple[Tensor, Tensor]]]: ...
@overload
def hessian(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, Any]: ...
@overload
def hessian(
    func: Callable[P, tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def hessian(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, tuple[Any, R]]]: ...
@overload
def hessian(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, tuple[Any, R, X]]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, A]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, X]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, Tensor]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, tuple[Tensor, X]]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: Literal[1],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], B]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, B, P], Tensor],
    argnums: tuple[Literal[0], Literal[1]],
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, Concatenate[B, P], tuple[A, B]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], dict[X, Tensor]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, dict[X, A]]: ...
@overload
def jacobian(
    func: Callable[Concatenate[A, P], tuple[Tensor, ...]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> _Derivative[A, P, tuple[A, ...]]: ...
@overload
def jacobian(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, Any]: ...
@overload
def jacobian(
    func: Callable[P, tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def jacobian(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, R]]: ...
@overload
def jacobian(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
    holomorphic: bool = False,
    mesh: DeviceMesh | None = None,
) -> Callable[P, tuple[Any, tuple[R, X]]]: ...
@overload
def jit(
    func: _Hessian[A, P],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    backend: Literal["python", "inductor", "cudagraphs"] = "python",
    fastmath: bool = False,
) -> _JittedHessian[A, P]: ...
@overload
def jit(
    func: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    backend: Literal["python", "inductor", "cudagraphs"] = "python",
    fastmath: bool = False,
) -> Jitted[P, R]: ...
@overload
def jvp(
    func: Callable[[*Ts], R],
    primals: tuple[*Ts],
    tangents: tuple[*Ts],
    *,
    strict: bool = False,
    has_aux: Literal[False] = False,
) -> tuple[R, R]: ...
@overload
def jvp(
    func: Callable[[*Ts], tuple[R, X]],
    primals: tuple[*Ts],
    tangents: tuple[*Ts],
    *,
    strict: bool = False,
    has_aux: Literal[True],
) -> tuple[R, R, X]: ...
@overload
def jvp(
    func: Callable, primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False
) -> Any: ...
@overload
def linearize(func: Callable[[*Ts], R], *primals: *Ts) -> tuple[R, Callable[[*Ts], R]]: ...
@overload
def linearize(func: Callable[..., R], *primals: Any) -> tuple[R, Callable[..., R]]: ...
@overload
def hvp(
    func: Callable[Concatenate[A, ...], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
) -> Callable[..., A]: ...
@overload
def hvp(
    func: Callable[Concatenate[A, ...], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
) -> Callable[..., tuple[A, X]]: ...
@overload
def hvp(
    func: Callable[Concatenate[A, ...], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
) -> Callable[..., tuple[A, tuple[A, Tensor]]]: ...
@overload
def hvp(
    func: Callable[Concatenate[A, ...], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[True],
) -> Callable[..., tuple[A, tuple[A, Tensor, X]]]: ...
@overload
def hvp(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
) -> Callable[..., Any]: ...
@overload
def hvp(
    func: Callable[..., tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
) -> Callable[..., tuple[Any, X]]: ...
@overload
def hvp(
    func: Callable[..., R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
) -> Callable[..., tuple[Any, tuple[Any, R]]]: ...
@overload
def hvp(
    func: Callable[..., tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
) -> Callable[..., tuple[Any, tuple[Any, R, X]]]: ...
@overload
def hessian_diag(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> _Derivative[A, P, A]: ...
@overload
def hessian_diag(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> _Derivative[A, P, tuple[A, X]]: ...
@overload
def hessian_diag(
    func: Callable[Concatenate[A, P], Tensor],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> _Derivative[A, P, tuple[A, tuple[A, Tensor]]]: ...
@overload
def hessian_diag(
    func: Callable[Concatenate[A, P], tuple[Tensor, X]],
    argnums: Literal[0] = 0,
    *,
    argnames: None = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> _Derivative[A, P, tuple[A, tuple[A, Tensor, X]]]: ...
@overload
def hessian_diag(
    func: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> Callable[P, Any]: ...
@overload
def hessian_diag(
    func: Callable[P, tuple[Any, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> Callable[P, tuple[Any, X]]: ...
@overload
def hessian_diag(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> Callable[P, tuple[Any, tuple[Any, R]]]: ...
@overload
def hessian_diag(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> Callable[P, tuple[Any, tuple[Any, R, X]]]: ...
@overload
def laplacian(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> Callable[P, R]: ...
@overload
def laplacian(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: Chunk = None,
) -> Callable[P, tuple[R, X]]: ...
@overload
def laplacian(
    func: Callable[P, R],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> Callable[P, tuple[R, tuple[Any, R]]]: ...
@overload
def laplacian(
    func: Callable[P, tuple[R, X]],
    argnums: Argnums = 0,
    *,
    argnames: Argnames = None,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: Chunk = None,
) -> Callable[P, tuple[R, tuple[Any, R, X]]]: ...
@overload
def vjp(
    func: Callable[[*Ts], R], *primals: *Ts, has_aux: Literal[False] = False
) -> tuple[R, Callable[..., tuple[*Ts]]]: ...
@overload
def vjp(
    func: Callable[[*Ts], tuple[R, X]], *primals: *Ts, has_aux: Literal[True]
) -> tuple[R, Callable[..., tuple[*Ts]], X]: ...
@overload
def vjp(func: Callable, *primals: Any, has_aux: bool = False) -> Any: ...

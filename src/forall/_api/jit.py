"""`jit`: a pure function that is recorded once for each kind of arguments, and replayed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, cast

from torch.compiler import is_dynamo_compiling

from forall._api import argument_checks
from forall._core.errors import TransformCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forall._api.typing import Jitted, P, R
    from forall._jit.cache.jit_cache import JitCache


def jit(
    func: Callable[P, R],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    backend: Literal["python", "inductor", "cudagraphs"] = "python",
    fastmath: bool = False,
) -> Jitted[P, R]:
    """Return ``func`` without its Python: recorded once for each kind of arguments, then replayed.

    The law: ``jit(f)(x)`` equals ``f(x)`` for a pure function ``f`` of trees of tensors: results,
    derivatives taken outside, random draws, and what is written into arguments. Transforms inside
    are recorded as what they come down to: a straight line of operators without a level or a tape.

    Cost: the first call of a kind runs ``func`` as it is, then optimizes and compiles the recorded
    operators, about a millisecond for each. A later call runs the operators. The last 64 kinds are
    kept.

    Two calls are of one kind if these agree: the tree of the arguments; the shape, strides, dtype,
    device and ``requires_grad`` of each tensor; the class and value of each number and string;
    which tensors and containers are identical; the identity of everything else; torch's state
    (grad mode, autocast, default dtype, default device).

    If something outside requires grad, the backward pass is replayed as well. A derivative of that
    pass runs ``func`` again, as does the first pass that starts at other results than before.

    Captured tensors are read anew with each call. The objects that ``func`` can be seen to reach
    (closure, globals, defaults, attributes, modules) are compared with each call by identity, and
    a change leads to a new recording.

    The program also computes each answer that ``func`` read: to a test (``if (x > 0).all():``, a
    check that raises), a whole number (``int(batch.max())``), the shape of a masked selection. If
    an answer differs from the recorded one, ``func`` is called.

    Code that no program can replace runs as it is, with one `PerformanceWarning` that says why.
    Examples are answers that change all the time or differ between examples, ``.item()`` of a
    fraction, numpy, a list or an attribute that ``func`` changes. Inside another transform, and
    for arguments of a class of their own, ``func`` runs as it is without a warning.

    Backends: ``"python"`` runs operator after operator, each bit as in ``f(x)``; where they are
    many and called often, by torch's own interpreter. ``"inductor"`` and ``"cudagraphs"`` hand the
    operators to torch's compilers when a kind is called for the second time: seconds once, and
    results equal to rounding. Draws, views and what a compiler refuses stay Python's; of the latter
    a `PerformanceWarning` tells. Both halves of a derivative are compiled, what a derivative of the
    second one needs is not. ``"cudagraphs"`` copies arguments and captured tensors to where the
    graph reads them with each call, so it is for many small operators. It needs a CUDA device,
    where ``make gpu`` tests it.

    With ``fastmath`` products of matrices are taken in the order that costs least, and sums with
    them in one operator. ``(s[:, None] * v) @ w.T`` for a thousand ``s`` becomes one product of all
    ``s`` with a matrix made of ``v`` and ``w``: half the time of ``vmap(hessian(f))`` of a small
    perceptron at 4096 points. A sum or a norm of outer products is computed from their factors, as
    of clipped per-example gradients of linear layers. Results are equal to rounding; where
    something in between is too large or too small for its dtype, infs and nans may come in, or go,
    as with other programs for the same numbers. Shapes and layouts stay.

    To look inside: ``jitted.cache_info()`` counts calls as `functools.lru_cache` does; a miss ran
    ``func``. ``jitted.kinds()`` lists the kinds that are kept, and ``print(*jitted.kinds())`` shows
    each program, or why there is none. ``jitted.cache_clear()`` drops them all.

    Args:
        func: a function of trees of tensors, or a module. What it does besides (print, files,
            Python's own random numbers, the clock) happens while it is recorded, and not again.
        static_argnums: the places of arguments that are part of the kind as a whole, by ``hash``
            and ``==``: an object of your own, a frozen dataclass of settings. Negative ones count
            from the end. What lists, tuples and dicts hold need not be static.
        static_argnames: the same, by name. An argument is static however it is passed.
        backend: what runs the operators, see above.
        fastmath: whether sums and products may be taken in another order, see above.

    Raises:
        TypeError: where ``func`` cannot be called, or a static argument has no hash or is a tensor.
        ValueError: where ``func`` has no argument that is said to be static, or no such backend is.
        RuntimeError: where this machine has not what the backend needs.
        Exception: what ``func`` raises while it is recorded.

    Source: the idea is that of Frostig, Johnson and Leary, "Compiling machine learning programs via
    high-level tracing" (2018).

    Example:
        >>> from forall import grad, vmap
        >>> def loss(w, x):                            # (2,), (2,) -> ()
        ...     return (x @ w).sin()
        >>> slopes = jit(vmap(grad(loss), in_dims=(None, 0)))
        >>> w, xs = torch.tensor([1.0, 2.0]), torch.eye(2)
        >>> slopes(w, xs)                              # recorded
        tensor([[ 0.5403,  0.0000],
                [-0.0000, -0.4161]])
        >>> slopes(2 * w, xs)                          # replayed
        tensor([[-0.4161, -0.0000],
                [-0.0000, -0.6536]])
        >>> slopes.cache_info()
        CacheInfo(hits=1, misses=1, maxsize=64, currsize=1)
        >>> print(*slopes.kinds())
        loss(float32[2], float32[2, 2]): 5 operators
            v0: argument                       float32[2]
            v1: argument                       float32[2, 2]
            v4: constant                       float32[2]
            v2 = mv.default(v1, v0)            float32[2]
            v5 = cos_.default(v2)              float32[2]
            v6 = mul.Tensor(v4, v5)            float32[2]
            v7 = reshape.default(v6, [2, 1])   float32[2, 1]
            v8 = mul.Tensor(v7, v1)            float32[2, 2]
            return v8
    """
    argument_checks.check_callable("jit", func)
    if is_dynamo_compiling():
        return cast("Jitted[P, R]", func)  # the compiler of the outer function traces it too
    kinds = _make_kinds(func, static_argnums, static_argnames, backend, fastmath)

    @functools.wraps(func, updated=())
    def run_jitted(*args: Any, **kwargs: Any) -> Any:
        return kinds.run(args, kwargs)

    run_jitted.cache_info = kinds.read_counts
    run_jitted.cache_clear = kinds.clear
    run_jitted.kinds = kinds.list_kinds
    return cast("Jitted[P, R]", run_jitted)


def _make_kinds(func: Callable, *how: Any) -> JitCache:
    # Importing these takes a tenth of `import forall`, and many programs never use `jit`.
    from forall._jit.cache.jit_cache import JitCache
    from forall._jit.static_args import StaticArguments

    static_argnums, static_argnames, backend, fastmath = how
    statics = StaticArguments(func, static_argnums, static_argnames)
    anew = _make_kinds, (func, *how)
    return JitCache(
        func, statics, anew, compile_graph=_find_compiler(func, backend), fastmath=fastmath
    )


def _find_compiler(func: Callable, backend: str) -> Callable:
    from forall._jit.backends.python_source import compile_python

    if backend == "python":
        return compile_python
    from forall._jit.backends.torch_compile import make_compiler

    return make_compiler(TransformCall("jit", func, backend=backend), backend)

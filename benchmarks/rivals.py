"""How a program is had from each compiler, and from other libraries: what `peers` compares."""

import contextlib
import copy
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.func
from torch.utils._pytree import tree_map

import forall
from forall._compat import compile_backends
from registry import Contestants, Program


class Rival(NamedTuple):
    """One way to have a workload's program.

    Attributes:
        missing: what this machine lacks for it, if anything.
        program: a program that was never called; None where there is none for this workload.
        calls: how many calls it takes until it is compiled; None where nothing is compiled.
        read: the result as tensors of torch's.
    """

    name: str
    missing: Callable[[], str | None]
    program: Callable[[Contestants], Program | None]
    calls: int | None = 1
    read: Callable[[Any], Any] = lambda result: result


def nothing() -> None:
    """Torch is always there."""


def no_module(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        return None if importlib.util.find_spec(name) else f"{name} is not installed"

    return missing


def no_compiler() -> str | None:
    lacks = compile_backends.find_inductor_obstacle()
    return lacks and f"this machine lacks {lacks}"


def jax_() -> Any:
    """JAX on one thread, as torch is; it has to be told before it is imported."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return importlib.import_module("jax")


def by_jax(contestants: Contestants) -> Program | None:
    if contestants.by_jax is None:
        return None
    jax = jax_()
    function, tensors = contestants.by_jax(jax)
    given = tree_map(lambda t: jax.numpy.asarray(t.detach().numpy()), tensors)
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*given))


def from_jax(result: Any) -> Any:
    return tree_map(lambda a: torch.from_numpy(np.array(a)), result)


def by_opacus(contestants: Contestants) -> Program | None:
    if contestants.by_opacus is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked = importlib.import_module("opacus.grad_sample").GradSampleModule
    model, loss = contestants.by_opacus
    wrapped = hooked(copy.deepcopy(model), loss_reduction="sum")

    def program() -> dict[str, torch.Tensor]:
        wrapped.zero_grad()
        loss(wrapped).backward()
        parameters = wrapped._module.named_parameters()  # noqa: SLF001
        return {name: value.grad_sample for name, value in parameters}

    return program


RIVALS = (
    Rival("jit", nothing, lambda c: c.jitted and forall.jit(c.anew(forall))),
    Rival(
        "inductor",
        no_compiler,
        lambda c: c.jitted and forall.jit(c.anew(forall), backend="inductor"),
        calls=2,
    ),
    Rival("torch.compile", no_compiler, lambda c: torch.compile(c.anew(torch.func))),
    Rival("JAX", no_module("jax"), by_jax, read=from_jax),
    Rival("Opacus", no_module("opacus"), by_opacus, calls=None),
    Rival("hand-written", nothing, lambda c: c.programs[-1], calls=None),
)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Inductor finds nothing of what was compiled before, here or in another process."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # tells of kept folders
    with config.patch(force_disable_caches=True), fresh_cache():
        yield

"""What `jit` says of its options."""

import pytest
import torch

from forall import jit
from golden import refused

X = torch.arange(3.0)


def scaled(x, settings=None, *, mode="plain"):
    return x


@pytest.mark.parametrize("places", [2, -3, (0, 7)])
def test_static_places_that_the_function_has_not(places):
    n = 7 if places == (0, 7) else places
    with refused(
        ValueError,
        f"""
        jit(scaled, static_argnums={places}): the function has no such argument.
            static_argnums   {n}
            arguments        x, settings
        Count from 0.
        """,
    ):
        jit(scaled, static_argnums=places)


def test_static_names_that_the_function_has_not():
    with refused(
        ValueError,
        """
        jit(scaled, static_argnames='sitting'): the function has no such argument.
            static_argnames   'sitting'
            arguments         x, settings, mode
        Give names of these.
        """,
    ):
        jit(scaled, static_argnames="sitting")


@pytest.mark.parametrize("places", ["1", 1.0, (1, None), True])
def test_static_places_of_a_wrong_type(places):
    with refused(
        TypeError,
        f"""
        jit(scaled, static_argnums={places!r}): static_argnums must be an int, or several.
            static_argnums   {places!r}   {type(places).__name__}
        Give an int, or a tuple of them.
        """,
    ):
        jit(scaled, static_argnums=places)


@pytest.mark.parametrize("names", [1, ("x", 1)])
def test_static_names_of_a_wrong_type(names):
    with refused(
        TypeError,
        f"""
        jit(scaled, static_argnames={names!r}): static_argnames must be a str, or several.
            static_argnames   {names!r}   {type(names).__name__}
        Give a str, or a tuple of them.
        """,
    ):
        jit(scaled, static_argnames=names)


@pytest.mark.parametrize("value", [[1, 2], {1}, (1, {})])
def test_a_static_argument_without_a_hash(value):
    with refused(
        TypeError,
        f"""
        jit(scaled, static_argnums=1): a static argument must hash.
            argument 1   {value!r}   {type(value).__name__}
        A program is kept for each value of it. Give it __hash__ and __eq__, or a form that has them, such as a tuple for a list. Numbers and strings in lists, tuples and dicts need not be static.
        """,
    ):
        jit(scaled, static_argnums=1)(X, value)


def test_a_static_tensor():
    with refused(
        TypeError,
        """
        jit(scaled, static_argnames=('settings',)): a tensor is no static argument.
            settings   float32[3]   Tensor
        A program is kept for each value of a static argument, and reads tensors anew. Leave it out, or give its number: x.item().
        """,
    ):
        jit(scaled, static_argnames=("settings",))(X, settings=X)


@pytest.mark.parametrize("backend", ["xla", None])
def test_a_backend_that_there_is_not(backend):
    with refused(
        ValueError,
        f"""
        jit(scaled, backend={backend!r}): no such backend.
            backend   {backend!r}
        It is one of 'python' (default), 'inductor' and 'cudagraphs'.
        """,
    ):
        jit(scaled, backend=backend)


def test_inductor_without_a_compiler(monkeypatch):
    from torch._inductor import config  # it reads the variable, and keeps what that was

    monkeypatch.setenv("CXX", "/nowhere/g++")
    without = config.patch("cpp.cxx", ("/nowhere/g++",))  # monkeypatch would not put it back
    with (
        without,
        refused(
            RuntimeError,
            """
        jit(scaled, backend='inductor'): this machine cannot run that backend.
            backend   'inductor'
            missing   a C++ compiler that works
        It needs g++ or clang++; the environment's CXX names another. backend='python' needs nothing.
        """,
        ),
    ):
        jit(scaled, backend="inductor")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_without_a_device():
    with refused(
        RuntimeError,
        """
        jit(scaled, backend='cudagraphs'): this machine cannot run that backend.
            backend   'cudagraphs'
            missing   a CUDA device
        It needs a GPU. backend='python' needs nothing.
        """,
    ):
        jit(scaled, backend="cudagraphs")

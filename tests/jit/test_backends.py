"""Programs in the hands of torch's compilers: what they give is what the function gives.

Compiling takes seconds, so most is tested with a stand-in that is as free as a compiler may be: it
works on copies, so that no result lies where an argument or another result does.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forall import PerformanceWarning, grad, jit, vmap
from forall._compat import compile_backends
from forall._compat.ambient_settings import get_allowed_precision
from forall._jit.backends import python_source, torch_compile
from forall._jit.tracing import tracer
from jit.cases import AS_IT_IS, CASES
from jit.test_adversarial import same, six_calls

X = torch.linspace(0.1, 0.7, 6).reshape(2, 3)
torchs_own_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")
by_inductor = functools.partial(jit, backend="inductor")


@pytest.fixture
def compiler(monkeypatch):
    """The one that there is, and how often it was asked."""
    if compile_backends.find_inductor_obstacle() is not None:
        pytest.skip("no C++ compiler")
    asked, real = [], compile_backends.compile_by_inductor

    def compiled(program, examples, *, writes):
        asked.append(program)
        return real(program, examples, writes=writes)

    monkeypatch.setattr(compile_backends, "compile_by_inductor", compiled)
    return asked


def alike(found, wanted):
    return len(found) == len(wanted) and all(map(same, found, wanted))


# --- the cut into pieces, with a stand-in -------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_six_calls_are_those_of_the_function(name, stand_in):
    told = six_calls(name, by_inductor)
    assert any("not recorded" in text for text in told) == (name in AS_IT_IS), told
    assert any("not compiled" in text for text in told) == (name == "conjugates"), told


def test_results_are_views_where_they_were(stand_in):
    def f(x):
        y = x.sin()
        return y, y[1:], y.t(), x, x[0], x.view(3, 2), y.t()[1:].mul_(2)

    g = by_inductor(f)
    for i in range(3):
        x, z = X + i, X + i
        found, wanted = g(x), f(z)
        assert alike(found, wanted)
        for these, argument in ((found, x), (wanted, z)):
            these[0].add_(1)  # seen through all views
            these[5].mul_(3)
            assert these[3] is argument
        assert alike(found, wanted)
        assert [y.stride() for y in found] == [y.stride() for y in wanted]
    assert len(stand_in) == 1


def test_draws_stay_between_pieces_in_their_order(stand_in):
    def f(x):
        y = (x * 2).sin() + torch.rand(3)
        z = y.exp() * torch.randn(2, 3)
        return z.cos().sum(), torch.nn.functional.dropout(z, 0.5)

    g = by_inductor(f)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted, after = f(X), torch.get_rng_state()
        torch.manual_seed(seed)
        assert alike(g(X), wanted)
        assert torch.get_rng_state().equal(after)
    assert len(stand_in) >= 2
    assert not any("rand" in word or "bernoulli" in word for piece in stand_in for word in piece)


def test_written_arguments_that_share_memory_are_seen_at_each_call(stand_in):
    w = torch.ones(3)

    def f(x):
        x.add_(1).mul_(2)
        return x * w

    g = by_inductor(f)
    for _ in range(2):
        assert g(X.clone()).equal(2 * (X + 1))
    assert len(stand_in) == 1
    assert g(w).equal(torch.full((3,), 16.0))
    assert w.equal(torch.full((3,), 4.0))


def test_results_that_a_compiler_has_as_one_are_taken_apart(stand_in, monkeypatch):
    def one_for_both(program, examples, *, writes):
        def run(*tensors):
            (y, _) = program(*tensors)
            return y, y

        return run

    monkeypatch.setattr(compile_backends, "compile_by_inductor", one_for_both)
    g = by_inductor(lambda x: (x.sin(), x.sin().neg().neg()))
    g(X)
    y, z = g(X)
    assert y.equal(z)
    y.add_(1)
    assert z.equal(X.sin())


@pytest.mark.parametrize("fault", ["raises", "lies otherwise"])
def test_what_a_compiler_cannot_do_python_does(stand_in, monkeypatch, fault):
    def faulty(program, examples, *, writes):
        if fault == "raises":
            raise NotImplementedError("no such operator\nand a long story")
        return lambda *tensors: [y.t().contiguous().t() for y in program(*tensors)]

    monkeypatch.setattr(compile_backends, "compile_by_inductor", faulty)
    g = by_inductor(lambda x: x.sin().exp())
    g(X)
    why = "NotImplementedError: no such operator" if fault == "raises" else "lie otherwise"
    with pytest.warns(PerformanceWarning, match=f"backend='inductor'.*by Python: .*{why}"):
        assert g(X).equal(X.sin().exp())
    for i in range(3):
        assert g(X + i).equal((X + i).sin().exp())


def test_both_halves_of_a_derivative_are_compiled(stand_in):
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    g = by_inductor(lambda x: (x * w).sin().exp().sum())
    for i in range(4):
        x = (X + i).requires_grad_()
        second = i == 3
        found = torch.autograd.grad(g(x), (x, w), create_graph=second)
        wanted = torch.autograd.grad((x * w).sin().exp().sum(), (x, w), create_graph=second)
        assert alike(found, wanted)
        if second:
            found, wanted = (torch.autograd.grad(a[0].sum(), (x, w)) for a in (found, wanted))
            assert alike(found, wanted)
    assert len(stand_in) == 2


# --- the compiler itself ------------------------------------------------------------------------


def everything(w):
    """A function that does what a compiler may get wrong."""

    def f(x, counter):
        y = vmap(grad(lambda a: ((a * w).sin() ** 2).sum()))(x)
        counter.add_(y.sum())
        row = y[1]
        row.mul_(2)
        return {"y": y, "row": row, "x": x, "flat": x.view(-1)[1:], "one": counter, "n": 3}

    return f


@pytest.mark.sweep(3)
@torchs_own_warnings
@pytest.mark.parametrize("fault", [None, "other numbers", "an error"])
@pytest.mark.parametrize("writes", [False, True])
def test_the_compilers_own_lines_are_called_where_they_are_all(
    compiler, monkeypatch, fault, writes
):
    from torch._inductor import compile_fx

    called, real = [], compile_fx.compile_fx_inner

    class Lines:
        _boxed_call = True

        def __init__(self, *args, **how):
            self.made = real(*args, **how)

        def __call__(self, given):
            return self.made(given)

        def current_callable(self, given):
            called.append(fault)
            if fault == "an error":
                raise ValueError
            return [y + 1 if fault else y for y in self.made(given)]

    monkeypatch.setattr(compile_fx, "compile_fx_inner", Lines)
    f = lambda x: (x.mul_(2) if writes else x).sin() * x  # noqa: E731
    g = by_inductor(f)
    for i in range(4):
        torch.testing.assert_close(g(X + i), f(X + i))
    # Compared, tried, and called three times; the first call was recorded.
    assert len(called) == (0 if writes else 1 if fault else 5)


@torchs_own_warnings
def test_inductor_gives_what_the_function_gives(compiler):
    w = torch.ones(3)
    f = everything(w)
    g = by_inductor(f)
    for i in range(4):
        w.copy_(torch.tensor([1.0, 2.0, 3.0]) + i)  # read anew
        x, z, one, two = X + i, X + i, torch.zeros(2), torch.zeros(2)
        found, wanted = g(x, one), f(z, two)
        assert alike([x, one, *found.values()], [z, two, *wanted.values()])
        for views in (found, wanted):
            views["row"].add_(1)
            views["flat"].add_(1)
        assert alike([x, one, *found.values()], [z, two, *wanted.values()])
        assert found["x"] is x
        assert found["one"] is one
    assert len(compiler) == 1


@torchs_own_warnings
def test_inductor_makes_the_tests_of_a_branch(compiler):
    def f(x):
        return x.sin().exp() if (x == x).all() else x.nan_to_num().cos().exp()  # noqa: PLR0124

    g, x = by_inductor(f), torch.ones(3)
    for y in (x, x, x * torch.nan, x * torch.nan, x):
        torch.testing.assert_close(g(y), f(y))
    assert g.cache_info().hits > 0


@torchs_own_warnings
def test_inductor_takes_derivatives_and_draws(compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    g = by_inductor(lambda x: F.mse_loss(model(x), torch.ones(2, 2)))
    weights = [*model.parameters()]
    for seed in range(4):
        found, wanted = (
            (torch.manual_seed(seed), torch.autograd.grad(call(X + seed), weights))[1]
            for call in (g, lambda x: F.mse_loss(model(x), torch.ones(2, 2)))
        )
        assert alike(found, wanted)
        with torch.no_grad():
            for p in weights:
                p.sub_(0.1)
    assert len(compiler) >= 2


@torchs_own_warnings
def test_all_programs_are_compiled_in_one_thread_of_a_process(monkeypatch):
    """A second one crashes the process: torch 2.10 and 2.11 built for CUDA, without a device."""
    from torch._inductor import compile_fx

    threads = []

    def noted(program, _examples, **_how):
        threads.append(threading.current_thread())
        return program

    monkeypatch.setattr(compile_fx, "compile_fx", noted)
    for process in (os.getpid(), os.getpid(), -1):  # the last is a forked one, without threads
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        compile_backends.compile_by_inductor(
            torch.fx.symbolic_trace(lambda x: x.sin()), [X], writes=True
        )
    assert threads[0] is threads[1]
    assert threads[0].is_alive()
    assert threads[2] is not threads[0]
    compile_backends._THREADS.pop(-1).shutdown()


@torchs_own_warnings
def test_inductor_under_other_states_of_torch(compiler):
    g = by_inductor(lambda x, w: ((x @ w).sin() * 2).exp())
    w = torch.linspace(-1, 1, 6).reshape(3, 2)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        for i in range(3):
            with mode():
                x = X + i
                found, wanted = g(x, w), ((x @ w).sin() * 2).exp()
            assert found.dtype == wanted.dtype
            assert found.is_inference() == wanted.is_inference()
            assert torch.allclose(found, wanted, rtol=1e-2 if found.dtype != x.dtype else 1e-5)
    assert len(compiler) == 3


def test_python_imports_no_compiler():
    code = (
        "import sys, torch, torch.func; before = set(sys.modules); import forall; "
        "f = forall.jit(lambda x: x.sin() * 2); x = torch.ones(3, requires_grad=True); "
        "[f(x).sum().backward() for _ in range(3)]; f.kinds(); "
        "print(*sorted(n for n in set(sys.modules) - before "
        "if n.startswith(('torch._inductor', 'torch._dynamo', "
        "'forall._jit.backends.torch_compile'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_on_a_gpu(backend):
    w = torch.ones(3, device="cuda")
    f = everything(w)
    g = jit(f, backend=backend)
    for i in range(4):
        w.copy_(torch.tensor([1.0, 2.0, 3.0]) + i)
        x, z = ((X + i).cuda() for _ in range(2))
        one, two = (torch.zeros(2, device="cuda") for _ in range(2))
        found, wanted = g(x, one), f(z, two)
        kept = found["y"].clone()
        assert alike([x, one, *found.values()], [z, two, *wanted.values()])
        g(x, one)
        assert found["y"].equal(kept)  # a later call writes into no earlier result
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    h = jit(lambda x: (x * leaf).sin().exp().sum(), backend=backend)
    for i in range(4):
        x = (X + i).cuda()
        found = torch.autograd.grad(h(x), leaf)
        wanted = torch.autograd.grad((x * leaf).sin().exp().sum(), leaf)
        assert alike(found, wanted)


# --- graphs, on a device that is made up ---------------------------------------------------------


class Tape(TorchDispatchMode):
    """What a graph of CUDA's is: operators that run again on the memory that they ran on."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, made))
        return made

    def replay(self):
        for func, args, kwargs, made in self.ran:
            again = func(*args, **kwargs)
            if again is not made:
                made.copy_(again)


class Stream:
    """One that only notes what it waits for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def made_up(monkeypatch):
    """A device whose tensors are the CPU's; its state, which tests may set."""
    device = SimpleNamespace(stream=Stream(), captured=[], is_capturing=False)

    @contextmanager
    def graph(tape, stream, capture_error_mode):
        device.captured.append((stream, capture_error_mode))
        with tape:
            yield

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: device.is_capturing,
        "device": lambda device: nullcontext(),
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": lambda: SimpleNamespace(record=lambda: None),
        "current_stream": lambda: device.stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Tape,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch_compile.CompiledSubgraph, "_find_obstacle", lambda core, tensors: None
    )
    monkeypatch.setattr(compile_backends, "find_gpu", lambda tensors: torch.device("cpu"))
    return device


def test_a_graph_reads_copies_and_hands_copies_back(made_up):
    w = torch.ones(3)
    f = lambda x: ((x * w).sin(), x.add_(1), (x * w).cos()[1])  # noqa: E731
    g = jit(f, backend="cudagraphs")
    kept = []
    for i in range(4):
        w.fill_(i + 1)
        x, z = X + i, X + i
        found, wanted = g(x), f(z)
        assert alike([x, *found], [z, *wanted])
        kept.append(([y.clone() for y in wanted], found))
    for wanted, found in kept:
        assert alike(found, wanted)  # no later call wrote into them
    ((stream, mode),) = made_up.captured
    assert stream is not made_up.stream
    assert mode == "thread_local"  # other threads may call CUDA meanwhile


def test_another_stream_waits_for_the_last_call_of_a_graph(made_up):
    g = jit(lambda x: (x.sin() * 2).exp(), backend="cudagraphs")
    first, second = made_up.stream, Stream()
    for stream in (first, first, second, second, first):
        made_up.stream = stream
        assert g(X).equal((X.sin() * 2).exp())
    assert (len(first.waited), len(second.waited)) == (1, 1)


def test_a_graph_of_the_users_holds_no_other(made_up):
    g = jit(lambda x: (x.sin() * 2).exp(), backend="cudagraphs")
    for is_capturing in (False, True, False, True, False):
        made_up.is_capturing = is_capturing
        before = len(made_up.captured)
        assert g(X).equal((X.sin() * 2).exp())
        assert len(made_up.captured) == before or not is_capturing
    assert len(made_up.captured) == 1


@pytest.mark.parametrize("flag", ["benchmark", "deterministic"])
def test_a_graph_is_of_the_settings_that_its_kernels_were_chosen_by(made_up, monkeypatch, flag):
    monkeypatch.setattr(torch_compile, "_is_on_accelerator", lambda program, numbers: True)
    g = jit(lambda x: (x.sin() * 2).exp(), backend="cudagraphs")
    for on in (False, False, True, True, False):
        with torch.backends.cudnn.flags(enabled=True, **{flag: on}):
            assert g(X).equal((X.sin() * 2).exp())
    assert len(made_up.captured) == 2
    assert g.cache_info().currsize == 1


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
def test_precision_is_among_the_settings_of_compiled_code():
    before = get_allowed_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert get_allowed_precision() != before
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert get_allowed_precision() == before


def test_constants_are_waited_for_before_another_stream_reads_them(monkeypatch):
    recorded, written = [], []
    for module, seen in ((tracer, recorded), (python_source, written)):
        note = seen.extend
        monkeypatch.setattr(module, "synchronize_devices", note)
    f = jit(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).exp())
    for _ in range(3):
        assert f(X).equal(X * torch.tensor([1.0, 2.0, 3.0]).exp())
    assert [t.tolist() for t in recorded] == [[1.0, 2.0, 3.0]]
    assert [t.tolist() for t in written] == [torch.tensor([1.0, 2.0, 3.0]).exp().tolist()]


def test_what_is_not_on_the_gpu_is_no_part_of_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    g = jit(lambda x: (x.sin() * 2).exp(), backend="cudagraphs")
    g(X)
    with pytest.warns(PerformanceWarning, match="a tensor is not on the GPU"):
        assert g(X).equal((X.sin() * 2).exp())

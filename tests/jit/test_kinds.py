"""What is kept of a function's calls: how many kinds, which, and how often they were used."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F

from forall import PerformanceWarning, hessian, jacfwd, jacrev, jit, vmap

X = torch.tensor([1.0, 2.0])


def test_hits_and_misses_make_up_all_calls():
    f = jit(lambda x: 2 * x)
    assert f.cache_info() == (0, 0, 64, 0)
    for _ in range(3):
        f(X)
    assert f.cache_info() == (2, 1, 64, 1)
    f(X.double())
    assert f.cache_info() == (2, 2, 64, 2)
    vmap(f)(X)  # runs the function, as a part of what it is in
    info = f.cache_info()
    assert (info.hits, info.misses, info.maxsize, info.currsize) == (2, 3, 64, 2)
    f.cache_clear()
    assert f.cache_info() == (0, 0, 64, 0)
    assert f(X).equal(2 * X)
    assert f.cache_info() == (0, 1, 64, 1)


def test_the_64_kinds_used_last_are_kept():
    f = jit(lambda x: 2 * x)
    f(X)
    for n in range(3, 103):
        assert f(torch.ones(n)).equal(2 * torch.ones(n))
        assert f(X).equal(2 * X)  # used again and again, so it stays
        assert f.cache_info().currsize == min(n - 1, 64)
    assert f.cache_info() == (100, 101, 64, 64)
    kept = [kind.arguments for kind in f.kinds()]
    assert kept == [*(f"float32[{n}]" for n in range(40, 103)), "float32[2]"]
    f(torch.ones(39))
    assert f.cache_info().misses == 102


def test_a_kind_that_is_pushed_out_is_freed():
    class Thing:
        pass

    f = jit(lambda x, thing: 2 * x)
    thing = Thing()
    gone = weakref.ref(thing)
    f(X, thing)
    del thing
    gc.collect()
    assert gone() is not None  # else another could take its identity
    for n in range(1, 66):
        f(torch.ones(n), None)
    gc.collect()
    assert gone() is None


def test_a_program_can_be_read():
    weight = torch.tensor([3.0, 4.0])
    f = jit(lambda x, *, n: (x * weight).sum() + n)
    f(X, n=1)
    (kind,) = f.kinds()
    assert (kind.arguments, kind.operators, kind.times, kind.why) == ("float32[2], n=1", 3, 1, None)
    assert (
        str(kind)
        == kind.text
        == """\
<lambda>(float32[2], n=1): 3 operators
    v0: argument               float32[2]
    v1: captured, read anew    float32[2]
    v5: constant               float32[]
    v2 = mul.Tensor(v0, v1)    float32[2]
    v3 = sum.default(v2)       float32[]
    v4 = add_.Tensor(v3, v5)   float32[]
    return v4"""
    )


def test_a_backward_pass_can_be_read():
    f = jit(lambda x: x.sin())
    f(X.clone().requires_grad_())
    (kind,) = f.kinds()
    assert kind.operators == 3
    assert (
        str(kind)
        == """\
<lambda>(float32[2] requires_grad): 3 operators
    v0: argument                         float32[2]
    v1 = sin.default(v0)                 float32[2]
    return v1
    v2: cotangent of the backward pass   float32[2]
    v3 = cos.default(v0)                 float32[2]
    v4 = mul.Tensor(v2, v3)              float32[2]
    return v4"""
    )


def test_a_kind_that_is_recorded_anew_says_how_often():
    scale = [2.0]
    f = jit(lambda x: x * scale[0])
    for i in range(4):
        scale[0] = float(i)
        assert f(X).equal(i * X)
        assert f(X).equal(i * X)
    (kind,) = f.kinds()
    assert kind.times == 4
    assert str(kind).startswith("<lambda>(float32[2]): 1 operator, recorded 4 times\n")
    assert f.cache_info() == (4, 4, 64, 1)


def test_a_kind_that_is_not_recorded_says_why():
    def scaled(x):
        return x * x.sum().item()

    f = jit(scaled)
    with pytest.warns(PerformanceWarning, match="looks at numbers") as told:
        f(X)
    f(X)
    line = scaled.__code__.co_firstlineno + 1
    head, where, cure = str(told[0].message).splitlines()
    assert head.startswith("jit(scaled): not recorded, so run as it is: ")
    assert where.endswith(f"test_kinds.py:{line}   return x * x.sum().item()")
    assert cure == "Write the function without that, or leave jit out."
    assert told[0].filename == __file__
    (kind,) = f.kinds()
    assert kind.why is not None
    assert "looks at numbers" in kind.why
    assert str(kind) == f"scaled(float32[2]): not recorded: {kind.why}"
    assert f.cache_info() == (0, 2, 64, 1)


MUCH = [[i] for i in range(60_000)]
SCALE = [2.0]


def test_where_too_much_is_named_what_runs_is_watched():
    @jit
    def f(x):
        return MUCH if x is None else x * SCALE[0]

    for _ in range(4):
        assert f(X).equal(2 * X)
    assert f.cache_info() == (2, 2, 64, 1)
    SCALE[0] = 3.0
    try:
        for _ in range(4):
            assert f(X).equal(3 * X)
    finally:
        SCALE[0] = 2.0
    assert f.cache_info().hits > 2


def test_where_what_runs_is_too_much_it_runs_as_it_is():
    f = jit(lambda x: x * len(MUCH))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert all(f(X).equal(X * len(MUCH)) for _ in range(5))
    assert [w.category for w in told] == [PerformanceWarning]
    (kind,) = f.kinds()
    assert "too much" in str(kind.why)


def test_an_argument_that_fits_no_program_says_why():
    f = jit(lambda x: x * 2)
    sparse = X.to_sparse()
    with pytest.warns(PerformanceWarning, match="layout"):
        f(sparse)
    assert f(sparse).to_dense().equal(2 * X)
    (kind,) = f.kinds()
    assert kind.why == "an argument of layout torch.sparse_coo"
    assert f.cache_info() == (0, 2, 64, 1)


def test_what_makes_a_kind_is_told():
    f = jit(lambda x: None)
    f({"a": [X, (1.5, "b")], "c": None})
    f(torch.ones(2, 3).t())
    with torch.no_grad():
        f(X)
    with torch.inference_mode():
        f(X)
    with torch.autocast("cpu"):
        f(X)
    assert [kind.arguments for kind in f.kinds()] == [
        "dict(float32[2], 1.5, 'b', None)",
        "float32[3, 2] by (1, 3)",
        "float32[2]; under no_grad",
        "float32[2]; under inference_mode",
        "float32[2]; under autocast",
    ]


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def inference_with_grad():
    with torch.inference_mode(), torch.enable_grad():
        yield


STATES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode and grad": inference_with_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": default_dtype,
    "deterministic": deterministic,
}


@pytest.mark.parametrize("first", [nullcontext, *STATES.values()], ids=["nothing", *STATES])
@pytest.mark.parametrize("then", STATES.values(), ids=STATES)
@pytest.mark.parametrize("args", [(torch.eye(2) / 3,), ()], ids=["an argument", "none"])
def test_a_change_of_torchs_state_is_another_kind_also_at_a_glance(args, first, then):
    def f(x=torch.eye(2) / 5):  # noqa: B008 - captured, as a global is
        return x @ x + torch.full((2, 2), 0.1), torch.is_grad_enabled()

    def facts(made):
        return made[0].dtype, made[0].is_inference(), made[0].tolist(), made[1]

    g = jit(f)
    for state in (first, then, first, then):
        with state():
            for _ in range(4):  # the last ones are told at a glance
                assert facts(g(*args)) == facts(f(*args))
    assert g.cache_info().misses == (1 if first is then else 2)


def test_arguments_that_are_no_tensors_are_looked_at():
    f = jit(lambda *xs: sum(xs))
    for _ in range(4):
        assert f(X, X).equal(2 * X)
    assert f(X, 2.0).equal(X + 2)
    assert f(X).equal(X)
    assert f(X, X, X).equal(3 * X)
    assert f(X, torch.nn.Parameter(X)).requires_grad
    for _ in range(4):
        assert f(X, X.clone()).equal(2 * X)
    with pytest.raises(TypeError):
        f(X, y=X)


@pytest.mark.parametrize(
    "verb", [hessian, lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacrev(f))]
)
def test_an_operator_whose_backward_has_no_forward_formula_is_recorded(verb):
    f = verb(lambda x: F.layer_norm(torch.cat([x.sin(), x * x]), (6,)))
    g, x = jit(f), torch.randn(3, dtype=torch.float64)
    for i in range(3):
        torch.testing.assert_close(g(x * i), f(x * i))
    assert g.cache_info().hits == 2

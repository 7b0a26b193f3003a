"""What is said about memory, settings, releases of torch, and programs beside forall's own."""

from math import inf, nan

import pytest
import torch
from torch.autograd.function import once_differentiable

import forall
from forall import Chunks, explain, grad, hessian_diag, jvp, linearize, vmap
from forall._compat import versions
from forall._core.config import parse_replay, parse_strategy
from forall.testing import check_grad, check_vmap
from golden import refused

X = torch.arange(6.0).reshape(3, 2)


def cubes(x):
    return (x**3).sum()


def test_a_budget_that_is_too_small():
    with refused(
        MemoryError,
        """
        Chunks(size='auto', memory_budget=100, progress=False): tensors take 400 B, and may take 100 B.
        Pass a larger memory_budget, or make less at once.
        """,
    ):
        hessian_diag(cubes, chunk_size=Chunks(memory_budget=100))(torch.ones(100))


def test_a_size_beside_a_budget():
    with refused(
        ValueError,
        """
        Chunks(size=4, memory_budget=100): the budget tells how many fit, so no size can be given.
        Leave one of the two out.
        """,
    ):
        Chunks(4, memory_budget=100)


def test_what_explain_explains():
    with refused(
        TypeError,
        """
        explain(transformed): it explains what vmap, grad or another transform returned.
            transformed   3   int
        Pass the transformed function, then its arguments: explain(vmap(f))(x).
        """,
    ):
        explain(3)


def test_words_of_the_environment():
    with refused(
        ValueError,
        """
        FORALL_REPLAY='off' does not say whether calls are replayed.
        Set it to 0, 1 or check, or leave it out for 1.
        """,
    ):
        parse_replay("off")
    with refused(
        ValueError,
        """
        FORALL_STRATEGY='off' does not say how examples that diverge are run.
        Set it to together or loop, or leave it out for measured.
        """,
    ):
        parse_strategy("off")


def test_a_setting_that_does_not_exist():
    with refused(
        AttributeError,
        """
        forall.config.repaly: there is no setting of this name.
            settings   replay, patience, strategy, agree, rank_timeout
        Did you mean replay?
        """,
    ):
        forall.config.repaly = False  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(forall.config, "repaly")


VALUES_THAT_A_SETTING_DOES_NOT_TAKE = {
    "near": ("replay", "chekc", "'chekc'", "True, False or 'check'", "'check'"),
    "a word for a truth value": ("replay", "true", "'true'", "True, False or 'check'", "True"),
    "in capitals": (
        "strategy",
        "Loop",
        "'Loop'",
        "'measured', 'together' or 'loop'",
        "'loop'",
    ),
    "not near": ("strategy", "groups", "'groups'", "'measured', 'together' or 'loop'", None),
    "None": ("strategy", None, "None", "'measured', 'together' or 'loop'", None),
    "of another setting": ("agree", "loop", "'loop'", "'each', 'call' or 'never'", None),
    "below 0": ("patience", -1, "-1", "seconds, 0 or more", None),
    "no number": ("patience", nan, "nan", "seconds, 0 or more", None),
    "a text": ("patience", "1", "'1'", "seconds, 0 or more", None),
    "0": ("rank_timeout", 0, "0", "seconds, more than 0 or None", None),
    "a tensor": ("rank_timeout", X, "float32[3, 2]", "seconds, more than 0 or None", None),
}


@pytest.mark.parametrize("case", VALUES_THAT_A_SETTING_DOES_NOT_TAKE)
def test_a_value_that_a_setting_does_not_take(case):
    name, value, shown, values, near = VALUES_THAT_A_SETTING_DOES_NOT_TAKE[case]
    before = getattr(forall.config, name)
    text = f"forall.config.{name}: it does not take {shown}.\n    values   {values}"
    with refused(ValueError, text if near is None else f"{text}\nDid you mean {near}?"):
        setattr(forall.config, name, value)
    assert getattr(forall.config, name) == before


def test_a_setting_whose_name_has_changed(monkeypatch):
    monkeypatch.setattr(forall.config, "strategy", "together")
    text = "forall.config.parting is now forall.config.strategy."
    with pytest.warns(DeprecationWarning, match=text):
        assert forall.config.parting == "together"
    with pytest.warns(DeprecationWarning, match=text):
        forall.config.parting = "loop"
    assert forall.config.strategy == "loop"


def test_a_report_whose_name_has_changed():
    report = forall.explain(forall.vmap(lambda x: x if x > 0 else -x))(torch.tensor([1.0, -1.0]))
    assert len(report.divergences) == 1
    with pytest.warns(DeprecationWarning, match="partings is now divergences"):
        assert report.partings == report.divergences


def test_the_error_of_a_setting_that_the_page_shows():
    with refused(
        ValueError,
        """
        forall.config.strategy: it does not take 'groups'.
            values   'measured', 'together' or 'loop'
        """,
    ):
        forall.config.strategy = "groups"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replay", 0),
        ("replay", "check"),
        ("patience", 0),
        ("patience", 0.0),
        ("patience", inf),
        ("strategy", "measured"),
        ("agree", "never"),
        ("rank_timeout", 1e-3),
        ("rank_timeout", None),
    ],
)
def test_a_value_that_a_setting_takes(name, value, monkeypatch):
    monkeypatch.setattr(forall.config, name, value)
    assert getattr(forall.config, name) == value


def test_a_release_of_torch_that_calls_another_function():
    first, last = (".".join(map(str, r)) for r in (versions.OLDEST, versions.NEWEST))
    with refused(
        ImportError,
        f"""
        forall: this release of torch is not known, and derivatives could come out wrong.
            torch   {torch.__version__}, where forall._compat.versions.get_release does not call gone
        Install a torch that forall was tested on, from {first} to {last}.
        """,
    ):
        versions.require_called("gone", versions, "get_release")


def test_arguments_of_checks():
    with refused(
        ValueError,
        """
        check_vmap(sin, in_dims=0): there is no example.
        Pass at least one, to compare with.
        """,
    ):
        check_vmap(torch.sin, X[:0])
    with refused(
        ValueError,
        """
        check_grad(sin): arguments must be float64 tensors.
            argument   float32[3, 2]
        Convert it: x.double().
        """,
    ):
        check_grad(torch.sin, X)


# --- tensors that a derivative needs -----------------------------------------------------------


def test_a_tensor_that_is_written_to_before_the_derivative():
    x, w = X.clone(), torch.ones(2, requires_grad=True)
    y = vmap(lambda row: (w * row).sum())(x).sum()
    x.mul_(2)
    with refused(
        RuntimeError,
        """
        one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that a transformed call was given, captured or returned.
            the tensor   float32[3, 2]
        It is at version 1; expected version 0 instead.
        Take the derivative before it is written to, or write into a copy (.clone()).
        """,
    ):
        y.backward()


def test_a_tensor_that_is_written_to_before_a_push():
    x = X.clone()
    _, push = linearize(lambda y: (x * y).sum(), X)
    x.mul_(2)
    with refused(
        RuntimeError,
        """
        linearize(<lambda>): a tensor that the derivative is made of has been modified by an inplace operation since.
            the tensor   float32[3, 2]
        Push before it is written to, or write into a copy (.clone()).
        """,
    ):
        push(X)


# --- functions of others -----------------------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: jvp(Once.apply, (X,), (X,)),
        lambda: grad(lambda x: grad(lambda y: Once.apply(y).sum())(x).sum())(X),
    ],
)
def test_a_backward_that_is_marked_to_run_once(call):
    with refused(
        RuntimeError,
        """
        OnceBackward: trying to differentiate twice a function that was marked with @once_differentiable.
        Forward mode (jvp, jacfwd, hessian) differentiates the backward of a Function as well.
        Take the mark off where the backward is made of operators of torch, or write it as a Function that has a backward too.
        """,
    ):
        call()


class WithoutPlaces(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(_info, _in_dims, x):
        return x.exp()


def test_a_vmap_of_a_function_that_gives_no_out_dims():
    with refused(
        RuntimeError,
        """
        WithoutPlaces.vmap: returns the outputs and their out_dims.
            returned   float32[3, 2]   Tensor
        Return (outputs, out_dims), with an int or None for each output.
        """,
    ):
        vmap(WithoutPlaces.apply)(X)


def test_an_attribute_that_a_wrapper_has():
    def name_it(row):
        row.level = 3
        return row

    with refused(
        AttributeError,
        """
        x.level = ...: a tensor inside a transform of forall has a .level already.
        Take another name, or x.as_subclass(Sub), which keeps a .level of its own.
        """,
    ):
        vmap(name_it)(X)


def test_a_scale_of_each_example():
    def quantize(x, scale):
        return torch.quantize_per_tensor(x, scale, torch.tensor(0), torch.qint8).dequantize()

    with refused(
        NotImplementedError,
        """
        vmap: aten.quantize_per_tensor.tensor_qparams would give each example a scale of its own, and quantised tensors that differ in scale have no stack.
        Give all examples one scale, or use torch.fake_quantize_*.
        """,
    ):
        vmap(quantize)(X, torch.tensor([0.1, 0.2, 0.3]))


def test_linearize_of_torch_func_around_and_inside():
    with refused(
        NotImplementedError,
        """
        torch.func.linearize: its function calls a transform of forall.
        It traces the function and takes what the transform computes for constant.
        Use forall.linearize instead.
        """,
    ):
        torch.func.linearize(grad(cubes), X)
    with refused(
        NotImplementedError,
        """
        torch.func.linearize: called inside a transform of forall.
        Its program is constant in the point, so outer derivatives would be wrong.
        Use forall.linearize instead.
        """,
    ):
        vmap(lambda x: torch.func.linearize(torch.sin, x)[0])(X)

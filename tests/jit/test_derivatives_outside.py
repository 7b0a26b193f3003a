"""What torch's own autograd outside takes of a recorded call is what it takes of the function."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import forall
from forall import jacfwd, jacrev, jit, vmap
from forall._jit.cache import differentiable_entry

D = torch.float64


def leaf(*shape, shift=0.0):
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=D) / 7 + shift
    return numbers.reshape(shape).requires_grad_()


def alike(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_results_that_nobody_differentiates_give_nothing(recorded):
    x = torch.zeros(3, dtype=D, requires_grad=True)
    f = vmap(lambda x: (x * 2, x.log(), x.exp()))
    g = recorded(f)
    for live in ([0], [0], [0], [0, 2], [0, 2], [2], [2], [2], [0], [0, 1, 2], [2], [0]):
        found, wanted = ([h(x)[i].sum() for i in live] for h in (g, f))
        alike(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x))


def test_a_loss_next_to_what_it_is_made_of(recorded):
    w, x = leaf(3, 2), leaf(4, 3).detach()

    def f(w, x):
        y = torch.tanh(x @ w)
        return y.square().sum(), y

    g = recorded(f)
    for _ in range(9):
        loss, y = g(w, x)
        alike(torch.autograd.grad(loss, w)[0], torch.autograd.grad(f(w, x)[0], w)[0])
        assert y.requires_grad


def test_only_what_is_needed_must_stay_as_it_was(recorded):
    w, x = leaf(3), leaf(3)
    g = recorded(lambda x: w + x * 2)
    for _ in range(6):
        y = g(x)
        with torch.no_grad():
            w.add_(1)
            x.mul_(2)
        alike(
            torch.autograd.grad(y.sum(), (w, x)), (torch.ones(3, dtype=D), 2 * torch.ones(3).to(D))
        )


def test_what_is_needed_and_written_is_an_error(recorded):
    w, x = leaf(3), leaf(3)
    g = recorded(lambda x: w * x)
    for _ in range(6):
        y = g(x)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x)


W = leaf(3)
V = W * 2
_SQUARES = W * W


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 5 + W,
        lambda x: x.sin() * W,
        lambda x: x + W + V,
        lambda x: x * V * _SQUARES,
        lambda x: V * 2 + W + x.detach(),
    ],
)
@pytest.mark.parametrize(
    "history", [lambda: W * 2, lambda: W.exp(), lambda: leaf(3), lambda: V * 3, lambda: V]
)
def test_histories_that_lead_to_what_is_captured_count_once(f, history, recorded):
    g = recorded(f)
    for _ in range(6):
        x = history()
        found, wanted = (torch.autograd.grad(h(x).sum(), W, retain_graph=True) for h in (g, f))
        alike(found, wanted)


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
@pytest.mark.parametrize("order", ["vw", "wv"])
def test_a_view_of_what_is_captured(order, recorded):
    """Both lie in the same place, so memory does not tell which of them a level has shared."""
    w = leaf(3)
    v = w[:]
    home = SimpleNamespace(**{name: {"v": v, "w": w}[name] for name in order})
    xs = torch.ones(2, 3, dtype=D)
    ways = {
        "given": (vmap(lambda x, v: x * v.sin() * w.cos(), (0, None)), (xs, v)),
        "captured too": (vmap(lambda x: x * home.v.sin() * home.w.cos()), (xs,)),
        "captured alone": (vmap(lambda x, v: x * home.w.cos(), (0, None)), (xs, v.detach())),
    }
    for f, given in ways.values():
        g = recorded(f)
        for _ in range(6):
            found, wanted = (
                torch.autograd.grad(h(*given).sum(), w, retain_graph=True) for h in (g, f)
            )
            alike(found, wanted)


@pytest.mark.parametrize("order", ["vw", "wv"])
@pytest.mark.parametrize("given", [True, False])
def test_what_lay_in_one_place_lies_in_two(order, given, recorded):
    rows = torch.tensor([[0.1, 0.2], [3.0, 4.0]], dtype=D)
    v, w = rows[0], torch.nn.Parameter(rows[0])
    home = SimpleNamespace(**{name: {"v": v, "w": w}[name] for name in order})
    if given:
        f = vmap(lambda x, v: x * v.sin() * home.w.cos(), (0, None))
        args = torch.ones(2, 2, dtype=D), v
    else:
        f = vmap(lambda x: x * home.v.sin() * home.w.cos())
        args = (torch.ones(2, 2, dtype=D),)
    g = recorded(f)
    for data in (rows[0], rows[0], rows[0], rows[0], rows[1], rows[1], 2 * rows[0], rows[0]):
        w.data = data
        alike(g(*args), f(*args))
        found, wanted = (torch.autograd.grad(h(*args).sum(), w) for h in (g, f))
        alike(found, wanted)


def test_arguments_made_of_each_other(recorded):
    x = leaf(3)

    def f(a, b):
        return a * 3 + b.sin() * a

    g = recorded(f)
    for _ in range(6):
        a = x.exp()
        for b in (a * 2, a, a[:], a.clone()):
            found, wanted = (
                torch.autograd.grad(h(a, b).sum(), (x, a, b), retain_graph=True) for h in (g, f)
            )
            alike(found, wanted)


def test_a_recurrent_cell(recorded):
    """The state that goes in was made by the same weights, which are captured."""
    w, u = leaf(3, 3), leaf(3, 3, shift=0.3)

    def cell(h, c):
        c = torch.sigmoid(h @ w) * c + torch.tanh(h @ u)
        return torch.tanh(c), c

    def losses(cell):
        h, c = leaf(3).detach() / 9, leaf(3).detach() / 3
        for _ in range(12):
            h, c = cell(h, c)
        return torch.autograd.grad(h.sum(), (w, u))

    with warnings.catch_warnings():
        warnings.simplefilter("error", forall.PerformanceWarning)
        g = recorded(cell)
        for _ in range(3):
            alike(losses(g), losses(cell))


def test_a_second_derivative_under_the_state_of_the_call(recorded):
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)

    def f(x):
        return torch.nn.functional.silu(x @ w)

    def penalty(h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = h(x)
        (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), w)

    g = recorded(f)
    for _ in range(6):
        alike(penalty(g), penalty(f))


def test_a_second_derivative_after_the_numbers_have_changed(recorded):
    scale = {"by": 2.0}
    x = leaf(3)

    def f(x):
        return x.sin() * scale["by"]

    g = recorded(f)
    for _ in range(6):
        scale["by"] = 2.0
        g(x)
    y = g(x)
    scale["by"] = 3.0
    try:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    except RuntimeError as error:
        assert "changed since" in str(error)  # noqa: PT017 - or the right numbers
    else:
        alike(slope, x.cos() * 2)


def test_vectors_mapped_over_a_backward_pass(recorded):
    x, vs = leaf(3), torch.eye(3, dtype=D)
    for f in (vmap(lambda x: x.sin() * x), lambda x: x.sin() * x):
        g = recorded(f)
        wanted = torch.diag(x.cos() * x + x.sin()).detach()
        for _ in range(6):
            y = g(x)

            def pulled(v, y=y):
                return torch.autograd.grad(y, x, v, retain_graph=True)[0]

            alike(vmap(pulled)(vs), wanted)


def test_torchs_own_mapped_backward_pass(recorded):
    x, vs = leaf(3), torch.eye(3, dtype=D)
    g = recorded(lambda x: x.sin() * x)
    for _ in range(6):
        (found,) = torch.autograd.grad(g(x), x, vs, is_grads_batched=True)
        alike(found, torch.diag(x.cos() * x + x.sin()).detach())


def test_hooks_on_what_is_saved_are_called(recorded):
    x = leaf(3)
    f = vmap(lambda x: x.sin() * x)
    g = recorded(f)
    for _ in range(6):
        counts = []
        for h in (g, f):
            packed = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, packed=packed: packed.append(t) or t, lambda t: t
            ):
                y = h(x)
            torch.autograd.grad(y.sum(), x)
            counts.append(len(packed))
        assert counts[0] == counts[1]


def test_hooks_run_as_often_as_the_function_has_them_run(recorded):
    x, seen = leaf(3), []

    def f(x):
        y = x.sin()
        y.register_hook(seen.append)
        return y * 2

    if recorded is jit:
        pytest.skip("jit is told that a function is pure")
    g = recorded(f)
    for i in range(1, 7):
        torch.autograd.grad(g(x).sum(), x)
        assert len(seen) == i


def test_a_backward_of_the_users_own_runs_as_often_as_ever(recorded):
    seen = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x * 2

        @staticmethod
        def backward(_, g):
            seen.append(1)
            return g * 2

    if recorded is jit:
        pytest.skip("jit is told that a function is pure")
    x, g = leaf(3), recorded(lambda x: Noted.apply(x) * 3)
    for i in range(1, 7):
        torch.autograd.grad(g(x).sum(), x)
        assert len(seen) == i


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
def test_a_view_that_is_older_than_that_its_base_requires_grad(recorded):
    def f(x, v):
        return x * 2 + v, v

    g = recorded(f)
    for _ in range(6):
        x = leaf(4, 3).detach()
        v = x[1]
        x.requires_grad_()
        (slope,) = torch.autograd.grad(g(x, v)[0].sum(), x, allow_unused=True)
        alike(slope, torch.full((4, 3), 2.0, dtype=D))


def test_what_is_differentiated_in_ever_other_ways_is_recorded_no_more(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    x, f = leaf(3), vmap(lambda x: (x.sin(), x.cos()))
    recorded = []
    make = differentiable_entry.DifferentiableEntry.__init__
    monkeypatch.setattr(
        differentiable_entry.DifferentiableEntry,
        "__init__",
        lambda self, *args: recorded.append(1) or make(self, *args),
    )
    for i in range(100):
        (slope,) = torch.autograd.grad(f(x)[i % 2].sum(), x)
        alike(slope, x.cos() if i % 2 == 0 else -x.sin())
    assert 2 <= len(recorded) <= 9


def test_many_are_pulled_back_at_once_through_calls_of_transforms_inside(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", "check")
    x, inner = leaf(2, 2), vmap(jacfwd(lambda x: (x * x.flip(0)).sin()))
    outer = jacrev(inner)

    def slope(jacobian):
        y, pull = forall.vjp(jacobian, x)
        return torch.autograd.grad(pull(torch.ones_like(y))[0].square().sum(), x)[0]

    def plain(x):
        return torch.autograd.functional.jacobian(inner, x, create_graph=True)

    wanted = slope(plain)
    for _ in range(3):
        alike(slope(outer), wanted)


PASSES = {
    "a product": lambda x: (x * W).sin() * x,
    "two results": lambda x: (x * W, (x + W).exp()),
    "the cotangent as it is": lambda x: (x + W, x - W),
    "a kernel with two formulas": lambda x: torch.nn.functional.silu(x * W),
    "draws": lambda x: torch.nn.functional.dropout(x, 0.5) * W.sin() + torch.randn(3).to(D) * x,
    "a view of what is captured": lambda x: (W[1:], x * W),
}


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", PASSES)
def test_a_backward_pass_that_records_itself(name, times, recorded):
    """Its results are written into sums of what they are made of, once and again."""
    f = PASSES[name]
    g = recorded(f)

    def use(h, i):
        torch.manual_seed(i)
        x = (W * (i + 1)).exp()  # made of what is captured
        c = x.cos() + W
        found = h(x)
        ends = found if isinstance(found, tuple) else (found,)
        slopes = [torch.zeros(3, dtype=D)]
        for _ in range(times):
            (slope,) = torch.autograd.grad(ends, x, [c[: len(y)] for y in ends], create_graph=True)
            slopes.append(slope.detach())
            if not slope.requires_grad:
                return slopes
            ends = (slope * slope.detach().cos(),)
        return slopes, torch.autograd.grad(ends[0].sum(), W)

    for i in range(6):
        alike(use(g, i / 7), use(f, i / 7))


def test_a_history_that_nobody_follows_is_no_reason_to_call_the_function(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    again, real = [], differentiable_entry.RecordedCall._rerun_function
    monkeypatch.setattr(
        differentiable_entry.RecordedCall,
        "_rerun_function",
        lambda self, *args: again.append(1) or real(self, *args),
    )
    f = vmap(lambda x: (x * W).sin() * x)
    x = leaf(2, 3)
    for _ in range(40):
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        assert slope.requires_grad
    assert len(again) == 1  # of the first pass, after which such a pass is recorded


def test_what_is_read_for_a_second_derivative_and_written_is_an_error(recorded):
    w, x = leaf(3), leaf(3)
    g = recorded(lambda x: (w * x).sin())
    for _ in range(6):
        (slope,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match=r"inplace|changed since"):
            torch.autograd.grad(slope.sum(), x)

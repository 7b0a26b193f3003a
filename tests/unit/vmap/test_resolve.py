"""How operators without a row are handled: what falls to the loop, and what it says."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from forall import PerformanceWarning, jvp, vmap
from forall._vmap import registry, rule_lookup
from forall._vmap.rule_makers import basic
from oracle import check_vmap

X = torch.arange(12.0).reshape(3, 4)
aten = torch.ops.aten


@pytest.fixture
def twice():
    """An operator of the user's own, whose kernel is any code at all."""

    @torch.library.custom_op("forall_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    return twice


@pytest.fixture
def add_to():
    @torch.library.custom_op("forall_tests::add_to", mutates_args=("x",))
    def add_to(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += float(y.numpy().sum())
        return x * 2

    return add_to


def test_an_operator_of_the_users_own_runs_once_per_example(twice):
    with pytest.warns(PerformanceWarning, match="forall_tests.twice"):
        check_vmap(lambda x: twice(x) + 1, (X,), 1)


def test_one_that_writes_too(add_to):
    def f(x):
        y = x.clone()
        return add_to(y, x), y

    with pytest.warns(PerformanceWarning, match="forall_tests.add_to"):
        check_vmap(f, (X,))


@pytest.fixture
def in_memory_order():
    """An operator that takes the entries of its operands as they lie in memory."""

    @torch.library.custom_op("forall_tests::in_memory_order", mutates_args=("y",))
    def in_memory_order(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x.as_strided((x.numel(),), (1,))
        y += first.cumsum(0).view(y.shape)
        return first.clone()

    return in_memory_order


@pytest.mark.filterwarnings("ignore:.*in_memory_order:forall.PerformanceWarning")
@pytest.mark.parametrize("in_dims", [-1, (-1, 0), (0, -1)])
def test_a_kernel_is_given_the_layout_of_the_loop(in_memory_order, in_dims):
    x, y = torch.rand(3, 3, 3), torch.rand(3, 3, 3)

    def f(x, y):
        made, written = x * 2, y + 1
        rows = written[:1], made.mT
        return in_memory_order(made, written), written, rows, in_memory_order(made.mT, written * x)

    check_vmap(f, (x, y), in_dims)
    check_vmap(vmap(f, in_dims), (torch.stack([x, x + 1], -1), torch.stack([y, y - 1], -1)), -1)


def test_the_warning_names_the_users_line_once_per_operator(twice):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        line = inspect.currentframe().f_lineno + 1
        vmap(twice)(X)
        vmap(lambda x: twice(twice(x)))(X)
    told = [w for w in caught if issubclass(w.category, PerformanceWarning)]
    assert [(w.filename, w.lineno) for w in told] == [(__file__, line)]


def test_a_kernel_that_reads_memory_falls_to_the_loop():
    def f(x):
        return aten._pack_padded_sequence(x[:, None, None], torch.tensor([4]), False)[0]

    with pytest.warns(PerformanceWarning, match="_pack_padded_sequence"):
        check_vmap(f, (X,))


def _registered(monkeypatch, run):
    """aten.sin, as if this were its decomposition."""
    monkeypatch.setitem(
        registry.HANDLERS, aten.sin.default, rule_lookup._make_decomposed_handler(run)
    )


def test_a_decomposition_that_leads_back_to_its_operator(monkeypatch):
    _registered(monkeypatch, lambda x: aten.sin.default(x) + 0)
    with pytest.warns(PerformanceWarning, match="sin"):
        check_vmap(aten.sin.default, (X,))


@pytest.mark.parametrize("error", [NotImplementedError, None])
def test_a_decomposition_that_fails(monkeypatch, error):
    def run(x):
        if error is None:
            return x * x.sum().item()
        raise error

    _registered(monkeypatch, run)
    once = vmap(aten.sin.default, divergence="error")
    with pytest.warns(PerformanceWarning, match="sin"):
        assert torch.equal(once(X), X.sin())


def test_examples_part_where_a_decomposition_asks_for_a_value(monkeypatch):
    _registered(monkeypatch, lambda x: x * x.sum().item())
    assert torch.allclose(vmap(aten.sin.default)(X), X * X.sum(1, keepdim=True))


def test_a_decomposition_that_raises_what_one_example_would(monkeypatch):
    def run(x):
        raise ValueError("not such a value")

    _registered(monkeypatch, run)
    with pytest.raises(ValueError, match="not such a value"):
        vmap(aten.sin.default)(X)


def test_a_copy_of_a_view_is_the_view_copied():
    check_vmap(lambda x: torch.view_copy(x, (3, 1)), (X,), 1)
    check_vmap(lambda x: torch.unbind_copy(x.reshape(2, 2), 1), (X,))


@pytest.mark.parametrize("name", ["numpy", "tolist", "share_memory_", "__dlpack__"])
def test_what_reads_memory_says_so(name):
    with pytest.raises(RuntimeError, match="none has memory of its own"):
        vmap(lambda x: getattr(x, name)(), divergence="error")(X)


def test_the_loop_is_right_without_examples():
    def f(x):
        return basic.loop_and_stack(level(x), aten.sin.default, (x,), {})

    def level(x):
        return x.level

    assert vmap(f)(X[:0]).shape == (0, 4)


def test_torchs_zeros_without_memory_are_added_after_the_level_has_ended():
    leaf = torch.tensor([[0.3, -0.2], [0.5, 0.1]], dtype=torch.float64, requires_grad=True)

    def f(x):
        (g,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)  # its derivative is zero
        return (g * x + x.square()).sum()

    (found,) = torch.autograd.grad(vmap(f)(leaf).sum(), leaf)
    torch.testing.assert_close(found, leaf.sign() + 2 * leaf)


def test_an_operator_that_has_a_rule_keeps_it():
    rule, way = registry.HANDLERS[aten.clone.default], registry.WAYS[aten.clone.default]
    assert rule_lookup.resolve_handler(aten.clone.default) is rule
    assert (registry.HANDLERS[aten.clone.default], registry.WAYS[aten.clone.default]) == (rule, way)


def test_a_sum_with_zeros_under_forward_mode_leaves_other_calls_as_they_are():
    """It is a copy, and a copy of images is laid out as the images of one example are."""
    vmap(lambda x, t: jvp(lambda x: torch.addcmul(X[0], x, X[0]), (x,), (t,)))(X, X)
    images = torch.arange(72.0).view(3, 2, 2, 2, 3)
    check_vmap(lambda x: x.clone(memory_format=torch.channels_last) + 0, (images,))

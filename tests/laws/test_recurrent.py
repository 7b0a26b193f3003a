"""Recurrent networks under every transform, and that all examples are one fused call."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import forall
from forall._core.errors import DataDependentError
from laws.recurrent import CELLS, LAYERS
from oracle import difference, loop

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

B, T, N, I, H = 3, 4, 2, 3, 4  # noqa: E741 - as in the formulas

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
LAYER = pytest.mark.parametrize("name", LAYERS)


def layer(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    return kind(I, H, **options).to(dtype)


def inputs(module: nn.Module, *front: int, own: bool = True) -> Tensor:
    """Sequences for each of ``front``, with a batch dim of their own or without."""
    inner = ((N, T, I) if module.batch_first else (T, N, I)) if own else (T, I)
    return torch.randn(*front, *inner, dtype=module.weight_ih_l0.dtype)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in module.named_parameters()}


def ensemble(module: nn.Module) -> dict[str, Tensor]:
    return {
        k: torch.stack([p * (1 + i / 4) for i in range(B)]) for k, p in parameters(module).items()
    }


def flat(tree: object) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tree_leaves(tree)])


def energy(module: nn.Module):
    """A scalar of parameters and input."""
    return lambda params, x: flat(functional_call(module, params, (x,))).sin().sum()


def gradients(module: nn.Module):
    """The gradients of that, by torch."""
    value = energy(module)

    def found(params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        return dict(zip(own, torch.autograd.grad(value(own, x), list(own.values())), strict=True))

    return found


@pytest.mark.parametrize("own", [True, False], ids=["batched", "one sequence"])
@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "no_grad"])
@DTYPES
@LAYER
def test_layers_are_the_loop(name, dtype, recording, own):
    module = layer(name, dtype)
    xs = inputs(module, B, own=own)
    with torch.set_grad_enabled(recording):
        assert difference(forall.vmap(module)(xs), loop(module)(xs)) is None
        last = xs.movedim(0, -1)
        assert difference(forall.vmap(module, in_dims=-1)(last), loop(module, -1)(last)) is None


@DTYPES
@LAYER
def test_layers_with_weights_of_each_example(name, dtype):
    module = layer(name, dtype)
    stacks, xs = ensemble(module), inputs(module, B)

    def call(params, x):
        return functional_call(module, params, (x,))

    assert difference(forall.vmap(call)(stacks, xs), loop(call)(stacks, xs)) is None
    dims = (dict.fromkeys(stacks, 0), None)
    one = xs[0]
    found = forall.vmap(call, in_dims=(0, None))(stacks, one)
    assert difference(found, loop(call, dims)(stacks, one)) is None


@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("own", [True, False], ids=["batched", "one sequence"])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
@DTYPES
def test_states_of_each_example_or_shared(name, dtype, own, recording):
    module = layer(name, dtype)
    xs = inputs(module, B, own=own)
    hs = torch.randn(B, module.num_layers, *[N] * own, H, dtype=dtype)

    def call(x, h):
        return module(x, (h, h.sin()) if name == "lstm" else h)

    with torch.set_grad_enabled(recording):
        assert difference(forall.vmap(call)(xs, hs), loop(call)(xs, hs)) is None
        for dims in ((0, None), (None, 0)):
            args = tuple(a if d == 0 else a[0] for a, d in zip((xs, hs), dims, strict=True))
            assert difference(forall.vmap(call, dims)(*args), loop(call, dims)(*args)) is None


@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("name", CELLS)
@DTYPES
def test_cells_are_the_loop_step_by_step(name, dtype, recording):
    kind, options = CELLS[name]
    torch.manual_seed(0)
    cell = kind(I, H, **options).to(dtype)

    def steps(xs):
        state, seen = None, []
        for x in xs:
            state = cell(x, state)
            seen.append(state)
        return seen

    with torch.set_grad_enabled(recording):
        for shape in ((B, T, N, I), (B, T, I)):
            xs = torch.randn(shape, dtype=dtype)
            assert difference(forall.vmap(steps)(xs), loop(steps)(xs)) is None


@pytest.mark.parametrize("own", [True, False], ids=["batched", "one sequence"])
@DTYPES
@LAYER
def test_gradients_of_each_example(name, dtype, own):
    module = layer(name, dtype)
    xs, shared, stacks = inputs(module, B, own=own), parameters(module), ensemble(module)
    grad, truth = forall.grad(energy(module)), gradients(module)
    assert difference(grad(shared, xs[0]), truth(shared, xs[0])) is None
    found = forall.vmap(grad, in_dims=(None, 0))(shared, xs)
    assert difference(found, loop(truth, (dict.fromkeys(shared), 0))(shared, xs)) is None
    assert difference(forall.vmap(grad)(stacks, xs), loop(truth)(stacks, xs)) is None


@pytest.mark.parametrize("mapped", [False, True], ids=["shared", "ensemble"])
@DTYPES
@LAYER
def test_a_backward_pass_from_outside(name, dtype, mapped):
    """The fused backward's derivative of a layer, as autograd runs it without create_graph."""
    module = layer(name, dtype)
    given = ensemble(module) if mapped else parameters(module)
    params = {k: p.requires_grad_() for k, p in given.items()}
    xs = inputs(module, B).requires_grad_()
    dim = 0 if mapped else None

    def call(params, x):
        return functional_call(module, params, (x,))

    def pulled(outs):
        leaves = tree_leaves(outs)
        cots = [torch.cos(torch.arange(t.numel())).view(t.shape).to(dtype) for t in leaves]
        return torch.autograd.grad(leaves, [*params.values(), xs], cots)

    found = pulled(forall.vmap(call, in_dims=(dim, 0))(params, xs))
    truth = pulled(loop(call, (dict.fromkeys(params, dim), 0))(params, xs))
    assert difference(found, truth) is None


@DTYPES
@LAYER
def test_forward_mode_and_second_derivatives(name, dtype):
    """Also through oneDNN's layer in float32, which has no forward formula; against float64."""
    module = layer(name, dtype)
    params = parameters(module)
    x = inputs(module)[..., :2, :].to(dtype)
    exact = {k: p.double() for k, p in params.items()}
    module = module.double()

    def of(given):
        return lambda x: flat(functional_call(module, given, (x,))).sin()

    f, g = of(params), of(exact)
    j = torch.autograd.functional.jacobian(g, x.double())
    h = torch.autograd.functional.hessian(lambda x: g(x).pow(2).sum(), x.double())
    t = torch.randn_like(x)

    def scalar(x):
        return f(x).pow(2).sum()

    along = (j.flatten(1) @ t.double().flatten()).to(dtype)
    assert difference(forall.jvp(f, (x,), (t,))[1], along) is None
    for jacobian in (forall.jacfwd, forall.jacrev):
        assert difference(jacobian(f)(x), j.to(dtype)) is None
    assert difference(forall.linearize(f, x)[1](t), along) is None
    assert difference(forall.hessian(scalar)(x), h.to(dtype)) is None
    assert difference(forall.jacrev(forall.grad(scalar))(x), h.to(dtype)) is None
    many = forall.vmap(forall.hessian(scalar))(torch.stack([x, x.cos()]))
    assert difference(many[0], h.to(dtype)) is None


@pytest.mark.parametrize("name", ["lstm", "lstm projected", "gru", "rnn"])
def test_differences_agree_through_vmap(name):
    module = layer(name)
    params = parameters(module)
    xs = inputs(module, 2)[..., :2, :].requires_grad_()
    f = forall.vmap(lambda x: flat(functional_call(module, params, (x,))))
    assert torch.autograd.gradcheck(f, xs, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, xs, fast_mode=True)


def test_two_levels_of_examples():
    module = layer("lstm", torch.float32)
    xs, stacks = inputs(module, 2, B), ensemble(module)

    def call(params, x):
        return functional_call(module, params, (x,))[0]

    found = forall.vmap(forall.vmap(call), in_dims=(None, 0))(stacks, xs)
    assert difference(found, torch.stack([loop(call)(stacks, x) for x in xs])) is None


def test_no_examples():
    for dtype in (torch.float32, torch.float64):
        for recording in (True, False):
            module = layer("lstm", dtype).requires_grad_(recording)
            out, (h, c) = forall.vmap(module)(inputs(module, 0))
            assert (out.shape, out.dtype) == ((0, T, N, H), dtype)
            assert h.shape == c.shape == (0, 1, N, H)


# --- one call for all examples -------------------------------------------------------------------


def operators(f, *args) -> Counter:
    """How often each operator ran, also within others."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        f(*args)
    return Counter({row.key: row.count for row in found.key_averages()})


@pytest.mark.counted
@pytest.mark.parametrize(("name", "layers"), [("lstm", 1), ("gru", 1), ("rnn", 2)])
def test_without_a_derivative_all_examples_are_one_call(name, layers):
    """As many products for all examples as for one."""
    module = layer(name).requires_grad_(False)
    xs = inputs(module, B)
    one, all_ = operators(module, xs[0]), operators(forall.vmap(module), xs)
    assert all_["aten::addmm"] == one["aten::addmm"] == (T + 1) * layers
    assert all_["aten::tanh"] == one["aten::tanh"]


@pytest.mark.counted
@pytest.mark.parametrize("name", CELLS)
def test_without_a_derivative_a_cell_is_one_call(name):
    kind, options = CELLS[name]
    cell = kind(I, H, **options).requires_grad_(False)
    xs = torch.randn(B, N, I)
    one, all_ = operators(cell, xs[0]), operators(forall.vmap(cell), xs)
    assert all_["aten::linear"] == one["aten::linear"] == 2
    assert all_["aten::addmm"] == one["aten::addmm"]


@pytest.mark.counted
def test_a_recorded_layer_of_onednn_is_one_call():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN a layer is made of ordinary operators")
    module = layer("lstm of two layers both ways", torch.float32)
    assert operators(forall.vmap(module), inputs(module, B))["aten::mkldnn_rnn_layer"] == 2 * 4


# --- packed sequences ----------------------------------------------------------------------------


def packed(module, lengths: list[int], in_order: bool, batch_first: bool = False):
    def call(x):
        given = pack_padded_sequence(x, lengths, enforce_sorted=in_order, batch_first=batch_first)
        out, state = module(given)
        return pad_packed_sequence(out, padding_value=0.5, batch_first=batch_first), state

    return call


LENGTHS = pytest.mark.parametrize(
    ("lengths", "in_order"),
    [([T, T], True), ([T, 2], True), ([1, 3], False)],
    ids=["equal", "in order", "in no order"],
)


@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "no_grad"])
@LENGTHS
@DTYPES
@LAYER
def test_packed_sequences_are_the_loop(name, dtype, lengths, in_order, recording):
    module = layer(name, dtype)
    xs, call = inputs(module, B), packed(module, lengths, in_order, module.batch_first)
    with torch.set_grad_enabled(recording):
        assert difference(forall.vmap(call)(xs), loop(call)(xs)) is None


@LENGTHS
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn with relu"])
def test_packed_sequences_have_derivatives(name, lengths, in_order):
    module = layer(name)
    params, xs = parameters(module), inputs(module, B)

    def value(params, x):
        (out, _), state = packed(
            lambda x: functional_call(module, params, (x,)), lengths, in_order
        )(x)
        return flat((out, state)).sin().sum()

    def truth(params, x):
        own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        return dict(zip(own, torch.autograd.grad(value(own, x), list(own.values())), strict=True))

    found = forall.vmap(forall.grad(value), in_dims=(None, 0))(params, xs)
    assert difference(found, loop(truth, (dict.fromkeys(params), 0))(params, xs)) is None
    f = lambda x: value(params, x)  # noqa: E731
    hessian = torch.autograd.functional.hessian(f, xs[0])
    assert difference(forall.vmap(forall.hessian(f))(xs)[0], hessian) is None
    assert difference(forall.jacfwd(forall.grad(f))(xs[0]), hessian) is None


# The layers' code sets an attribute of theirs with each call, which no other example may see.
@pytest.mark.filterwarnings("ignore:vmap.*examples diverge in code:forall.PerformanceWarning")
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences_of_lengths_of_each_example(name, in_order):
    module = layer(name)
    params, xs = parameters(module), inputs(module, 4)
    lengths = torch.tensor([[T, 3], [T, 2], [T, 3], [2, 1]])
    lengths = lengths if in_order else lengths.flip(1)

    def call(params, x, n):
        given = pack_padded_sequence(x, n, enforce_sorted=in_order)
        out, state = functional_call(module, params, (given,))
        return pad_packed_sequence(out, total_length=T)[0], state, given.batch_sizes.sum()

    def value(params, x, n):
        return flat(call(params, x, n)[:2]).sin().sum()

    def truth(params, x, n):
        own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        return dict(
            zip(own, torch.autograd.grad(value(own, x, n), list(own.values())), strict=True)
        )

    for f, its, dims in (
        (call, call, (None, 0, 0)),
        (forall.grad(value), truth, (None, 0, 0)),
    ):
        found = forall.vmap(f, in_dims=dims)(params, xs, lengths)
        assert (
            difference(found, loop(its, (dict.fromkeys(params), 0, 0))(params, xs, lengths)) is None
        )


def test_packed_lengths_that_differ_where_examples_may_not_part():
    lengths = torch.tensor([[T, 3], [T, 2]])
    call = forall.vmap(lambda x, n: pack_padded_sequence(x, n).data.sum(), divergence="error")
    with pytest.raises(DataDependentError, match=r"to read lengths of a packed sequence"):
        call(torch.ones(2, T, N, I), lengths)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn with relu"])
def test_packed_sequences_as_arguments(name):
    """As an argument that is shared, or differentiated, and in an ensemble of weights."""
    module = layer(name)
    params, stacks = parameters(module), ensemble(module)
    given = pack_padded_sequence(inputs(module), [T, 2], enforce_sorted=False)

    def value(params, given):
        out, state = functional_call(module, params, (given,))
        return flat((out.data, state)).sin().sum()

    def truth(params):
        own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        gradients = torch.autograd.grad(value(own, given), list(own.values()))
        return dict(zip(own, gradients, strict=True))

    dims = (dict.fromkeys(stacks, 0),)
    found = forall.vmap(forall.grad(value), in_dims=(0, None))(stacks, given)
    assert difference(found, loop(truth, dims)(stacks)) is None
    data = given.data.clone().requires_grad_()
    (want,) = torch.autograd.grad(value(params, given._replace(data=data)), data)
    gradient = forall.grad(value, argnums=1)(params, given)
    assert type(gradient) is type(given)
    assert gradient.batch_sizes is None
    assert difference(gradient.data, want) is None
    tangents = {k: p.cos() for k, p in params.items()}
    _, tangent = forall.jvp(lambda p: value(p, given), (params,), (tangents,))
    want = sum((g * tangents[k]).sum() for k, g in truth(params).items())
    assert difference(tangent, want) is None


# --- dropout between the layers ------------------------------------------------------------------


@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers(kind, recording):
    torch.manual_seed(0)
    module = kind(I, 64, num_layers=2, dropout=0.5)
    one = torch.randn(T, N, I)
    xs = one.expand(B, T, N, I)

    def call(x):
        return module(x)[0]

    with torch.set_grad_enabled(recording):
        with pytest.raises(RuntimeError, match="randomness='error'"):
            forall.vmap(call)(xs)
        apart = forall.vmap(call, randomness="different")(xs)
        assert not torch.equal(apart[0], apart[1])
        alike = forall.vmap(call, randomness="same")(xs)
        assert torch.equal(alike[0], alike[1])
        key = forall.random.key(3)
        keyed = forall.vmap(call, randomness=key)(xs)
        truth = [keyed_example(call, one, key, i) for i in range(B)]
        assert difference(keyed, torch.stack(truth)) is None
        module.eval()
        assert difference(forall.vmap(call)(xs), loop(call)(xs)) is None


def keyed_example(f, x, key, i):
    with forall.random.scope(key, i):
        return f(x)

"""tensordict's collections of tensors: an example has one of the dims they share less."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import forall
from forall import grad, vmap

tensordict = pytest.importorskip("tensordict")
TensorDict = tensordict.TensorDict
D = torch.float64


class Pair(tensordict.TensorClass):
    p: torch.Tensor
    q: torch.Tensor


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=D).reshape(shape).sin()


SQUARE = TensorDict({"a": numbers(5, 5)}, [5])  # whose shapes do not tell which dim is which
GRID = TensorDict({"a": numbers(2, 3, 4)}, [2, 3], names=["x", "y"])
PAIR = Pair(p=numbers(5, 3), q=numbers(5), batch_size=[5])
NESTED = TensorDict({"a": numbers(4, 4), "n": TensorDict({"c": numbers(4, 4, 2)}, [4, 4])}, [4])

# A function of one example, where the examples are, and where they go.
CASES = {
    "a number": (lambda t: t["a"].sum() * t.numel(), SQUARE, 0, 0),
    "its shape": (lambda t: torch.zeros(t.shape), SQUARE, 0, 0),
    "made inside": (lambda t: TensorDict({"y": t["a"].sum()}, []), SQUARE, 0, 0),
    "an entry set": (lambda t: t.clone().set("n", torch.tensor(1.0)), SQUARE, 0, 0),
    "a class": (lambda t: t + 1, PAIR, 0, 0),
    "a class, copied": (lambda t: t.clone(), PAIR, 0, 0),
    "of a class": (lambda t: t.p * t.q, PAIR, 0, 0),
    "the last dim": (lambda t: t["a"].sum(1) * t.numel(), GRID, -1, 0),
    "to the last": (lambda t: t + 1, GRID, 0, -1),
    "from the second": (lambda t: t * 2, GRID, 1, 0),
    "nested": (lambda t: t + 1, NESTED, 0, 0),
    "shapes in it": (lambda t: torch.zeros((*t.shape, *t["n"].shape)), NESTED, 0, 0),
    "in a dict": (lambda t: {"k": t, "z": t["a"].sum()}, SQUARE, 0, 0),
    "reduced": (lambda t: t.sum(), SQUARE, 0, 0),
    "reshaped": (lambda t: t.reshape(-1), GRID, 0, 0),
}


def example(t, dim: int, i: int):
    return t[:, i] if dim in (1, -1) else t[i]


def put_together(found: list, dim: int):
    if isinstance(found[0], dict):
        return {key: put_together([f[key] for f in found], dim) for key in found[0]}
    return torch.stack(found, dim)


def alike(found, expected) -> None:
    if isinstance(expected, dict):
        for key in expected:
            alike(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert (type(found), found.batch_size) == (type(expected), expected.batch_size)
        for key in expected.keys(True):
            mine, its = found.get(key), expected.get(key)
            assert mine.shape == its.shape
            if isinstance(its, torch.Tensor):
                torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_the_loops(name, replay, chunk_size, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "patience", 0)
    f, given, dim, place = CASES[name]
    mapped = vmap(f, dim, place, chunk_size=chunk_size)
    expected = put_together([f(example(given, dim, i)) for i in range(given.shape[dim])], place)
    for _ in range(4):
        alike(mapped(given), expected)


def test_names_of_dims_go_with_them():
    assert vmap(lambda t: t + 1)(GRID).names == [None, "y"]
    assert vmap(lambda t: t + 1, 1, 1)(GRID).names == ["x", None]


def test_two_levels():
    found = vmap(vmap(lambda t: t["a"].sum() * t.numel()))(GRID)
    torch.testing.assert_close(found, GRID["a"].sum(2))


def test_gradients_of_parameters_in_a_collection():
    net, xs = nn.Linear(3, 2, dtype=D), numbers(4, 3)
    p = TensorDict.from_module(net).detach()

    def loss(p, x):
        return functional_call(net, p.to_dict(), (x,)).square().sum()

    found = vmap(grad(loss), (None, 0))(p, xs)
    assert found.batch_size == (4,)
    for name in ("weight", "bias"):
        expected = torch.stack([grad(loss)(p, x)[name] for x in xs])
        torch.testing.assert_close(found[name], expected)


def ensemble(as_module=True):
    """Parameters of three modules, and a function of those of one."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 2, dtype=D) for _ in range(3)]
    empty = nn.Linear(4, 2, device="meta", dtype=D)

    def of_one(params, x):
        with params.to_module(empty, preserve_module_state=False):
            return empty(x)

    return TensorDict.from_modules(*nets, as_module=as_module), of_one


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("place", [0, 1, -1, (1,)])
def test_parameters_of_an_ensemble(place, replay, monkeypatch):
    """As a module they are no node of torch's trees, and are mapped as what they hold is."""
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "patience", 0)
    params, of_one = ensemble()
    assert isinstance(params, nn.Module)
    xs = numbers(5, 4)
    mapped = vmap(of_one, (0, None), place)
    for step in range(6):
        dim = place[0] if isinstance(place, tuple) else place
        expected = torch.stack([xs @ w.T + b for w, b in zip(*weights(params), strict=True)], dim)
        found = mapped(params, xs)
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(found.square().sum(), list(params.parameters()))
        other = torch.autograd.grad(expected.square().sum(), list(params.parameters()))
        torch.testing.assert_close(gradients, other)
        with torch.no_grad():
            for p in params.parameters():
                p += step


def weights(params):
    return params["weight"], params["bias"]


def test_parameters_of_an_ensemble_as_a_result():
    params, _ = ensemble()
    found = vmap(lambda p: p * 2)(params)
    assert found.batch_size == (3,)
    torch.testing.assert_close(found["weight"], params["weight"] * 2)
    assert vmap(lambda p: p.batch_size)(params) == ()


def test_parameters_of_an_ensemble_among_others():
    params, of_one = ensemble()
    xs = numbers(3, 5, 4)
    found = vmap(lambda d, x: of_one(d["p"], x) * d["s"], ({"p": 0, "s": None}, 0))(
        {"p": params, "s": 2.0}, xs
    )
    expected = [2 * (x @ w.T + b) for x, w, b in zip(xs, *weights(params), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))
    shared = vmap(lambda p, x: p["weight"][0] @ x, (None, 0))(params, numbers(6, 4))
    torch.testing.assert_close(shared, numbers(6, 4) @ params["weight"][0].T)


def test_parameters_of_an_ensemble_by_name():
    params, of_one = ensemble()
    xs = numbers(5, 4)
    found = vmap(of_one, {"params": 0, "x": None})(params=params, x=xs)
    torch.testing.assert_close(found, vmap(of_one, (0, None))(params, xs))


def test_a_stack_that_keeps_its_tensors_apart():
    lazy = tensordict.LazyStackedTensorDict(*(SQUARE[i : i + 2] for i in range(3)), stack_dim=0)
    with pytest.raises(NotImplementedError, match=r"LazyStackedTensorDict keeps .*\n.*\n.*contig"):
        vmap(lambda t: t["a"] * 2)(lazy)
    dense = lazy.contiguous()
    torch.testing.assert_close(vmap(lambda t: t["a"] * 2)(dense), dense["a"] * 2)

"""Transformed functions that are copied, or sent to another process, do what they did."""

import copy
import io
import pickle
import sys

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import forall

NET = torch.nn.Linear(3, 2)
X = torch.linspace(-1, 1, 12).reshape(4, 3)
W = torch.tensor([0.5, -1.0, 2.0])


def loss(w, x):
    return (w * x).sin().sum()


slopes = forall.vmap(forall.grad(loss), (None, 0))
FUNCTIONS = {
    "vmap": (forall.vmap(lambda x: x.sin() * x), (X,)),
    "grad": (forall.grad(loss), (W, X[0])),
    "vmap of grad": (forall.vmap(forall.grad(loss), (None, 0)), (W, X)),
    "hessian": (forall.hessian(loss), (W, X[0])),
    "laplacian": (forall.vmap(forall.laplacian(lambda x: x.sin().prod())), (X,)),
    "of a module": (forall.vmap(NET), (X,)),
    "of torch's function": (forall.jacrev(torch.sin), (W,)),
    "of a method": (forall.vmap(NET.forward, chunk_size=2), (X,)),
    "jit": (forall.jit(forall.vmap(lambda x: x * 2)), (X,)),
}


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cloudpickle(name, calls, monkeypatch):
    """Also when it has been called, timed and replayed."""
    monkeypatch.setattr(forall.config, "patience", 0)
    f, args = FUNCTIONS[name]
    for _ in range(calls):
        f(*args)
    again = pickle.loads(cloudpickle.dumps(f))  # noqa: S301 - our own
    for _ in range(3):
        torch.testing.assert_close(again(*args), f(*args))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_copied_with_the_module_that_holds_it(name, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    f, args = FUNCTIONS[name]
    holder = torch.nn.Module()
    holder.f = f
    expected = [f(*args) for _ in range(3)][-1]
    for made in (copy.copy(f), copy.deepcopy(f), copy.deepcopy(holder).f):
        torch.testing.assert_close(made(*args), expected)


class Slopes(torch.nn.Module):
    """What a module does by name needs no pickle of the transformed function."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())

    def forward(self, x):
        return slopes(self.w, x)


def test_saved_module():
    file = io.BytesIO()
    torch.save(Slopes(), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(X), Slopes()(X))


def test_pickle_says_that_it_takes_no_function_that_was_made():
    """As of everything that functools.wraps; torch.func's are no different."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="Can't pickle"):
        pickle.dumps(slopes)


class Rows(Dataset):
    """Its examples are computed in the worker, also by a function that was sent there."""

    def __init__(self):
        self.sent = cloudpickle.dumps(forall.vmap(lambda x: x * 2))

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        double = pickle.loads(self.sent)  # noqa: S301 - our own
        return slopes(W, double(X[i : i + 1]))[0]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context):
    if context == "fork" and "jax" in sys.modules:
        pytest.skip("a process in which JAX has started threads is not to be forked")
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=context)
    torch.testing.assert_close(torch.cat([*loader]), slopes(W, X * 2))

"""Surprising on purpose. Each test is a sentence about what happens, and why it is right.

Index
    called once          Python side effects happen once, however many examples there are
    identity             a mapped result is new memory, also where the function gives back its input
    one tensor twice     a result returned twice comes back as two tensors
    captured late        a transformed function reads what it captures when it is called
    write-through        writing into a mapped argument writes into the caller's tensor
    once is enough       filling a shared tensor with the same for all examples happens once
    same object          an argument without a mapped leaf is handed on as the very same object
    keyword arguments    are shared, not mapped, unless a dict of in_dims names them
    numbers              come back as a tensor with an entry per example
    what is no value     strings and None pass through as they are
    random by default    a random draw is an error until somebody says which
    the same draw        randomness="same" is one draw, across chunks too
    the module random    draws one number for all examples, with a warning
    no_grad outside      does not reach into grad
    no_grad inside       cuts the derivative to zeros
    detach inside        cuts it likewise, without a word
    integer value        a scalar that no derivative reaches has zero gradients
    the value's history  a value noted inside grad is still part of a graph, aux is not
    ties                 the gradient of a maximum shares itself between equal entries
    an inf in one row    of a matrix stays in that row of a Jacobian; the loop makes nan of all
    captured leaf        .backward() inside leaves on it the sum over the examples
    no example           the function runs once, on a stand-in
    what is identical    a number of each example is not Python's True, whatever it is for each
    prints repeat        a first run that examples diverge in is undone, but not what it printed
    the type             of a value inside vmap is forall's; x.__class__ and isinstance say Tensor
    jit prints once      jit skips Python: what it prints, draws or counts besides happens once
    jit and the clock    Python's own random numbers and the time are read once, when recorded
    jit and settings     what the function asks of torch's settings is read once, but for modes
"""

import random
import time

import pytest
import torch

from forall import grad, jacrev, jit, vmap

X = torch.arange(6.0).reshape(3, 2)


def test_called_once():
    calls = []
    vmap(lambda x: (calls.append(x.shape), x)[1])(X)
    assert calls == [(2,)]


def test_identity():
    y = vmap(lambda x: x)(X)
    y.zero_()
    assert X.any()


def test_one_tensor_twice():
    a, b = vmap(lambda x: (x, x))(X)
    a.zero_()
    assert b.equal(X)


def test_captured_late():
    scale = torch.tensor(2.0)
    double = vmap(lambda x: x * scale)
    scale.mul_(3)
    assert double(X).equal(6 * X)


def test_write_through():
    mine = X.clone()
    vmap(lambda x: x.mul_(2))(mine)
    assert mine.equal(2 * X)


def test_once_is_enough():
    shared = torch.zeros(2)
    vmap(lambda x: (shared.fill_(5), x)[1])(X)
    assert shared.equal(torch.full((2,), 5.0))


def test_same_object():
    todo = [1, 2]
    vmap(lambda x, jobs: x * jobs.pop(), in_dims=(0, None))(X, todo)
    assert todo == [1]


def test_keyword_arguments():
    rows = torch.ones(3, 2)
    assert vmap(lambda x, by: x * by)(X, by=rows).shape == (3, 3, 2)
    assert vmap(lambda x, by: x * by, in_dims={"x": 0, "by": 0})(X, by=rows).shape == (3, 2)


def test_numbers():
    assert vmap(lambda x: x.shape[0])(X).equal(torch.tensor([2, 2, 2]))


def test_what_is_no_value():
    assert vmap(lambda _: ("name", None))(X) == ("name", None)


def test_random_by_default():
    with pytest.raises(RuntimeError, match="randomness='error' forbids"):
        vmap(torch.nn.functional.dropout)(X)


def test_the_same_draw():
    for chunk_size in (None, 1, 2):
        drawn = vmap(lambda _: torch.rand(()), randomness="same", chunk_size=chunk_size)(X)
        assert drawn.unique().numel() == 1


def test_the_module_random():
    with pytest.warns(UserWarning, match="once for all 3 examples"):
        found = vmap(lambda x: x.sum() * 0 + random.random())(X)
    assert len(found.unique()) == 1


def test_no_grad_outside():
    with torch.no_grad():
        assert grad(lambda x: x.square().sum())(X).equal(2 * X)


def test_no_grad_inside():
    def f(x):
        with torch.no_grad():
            return x.square().sum()

    assert not grad(f)(X).any()


def test_detach_inside():
    assert not grad(lambda x: x.detach().sum())(X).any()


def test_integer_value():
    assert not grad(lambda x: (x > 0).sum())(X).any()


def test_the_values_history():
    noted = []

    def f(x):
        y = x.square()
        noted.append(y)
        return y.sum(), y

    _, aux = grad(f, has_aux=True)(X)
    assert noted[0].requires_grad
    assert not aux.requires_grad


def test_ties():
    assert grad(torch.max)(torch.ones(2)).equal(torch.tensor([0.5, 0.5]))


def test_captured_leaf():
    w = torch.ones(2, requires_grad=True)
    vmap(lambda x: ((x * w).sum().backward(), x)[1])(X)
    assert w.grad is not None
    assert w.grad.equal(X.sum(0))


def test_no_example():
    calls = []
    y = vmap(lambda x: (calls.append(x.shape), x.sum())[1])(X[:0])
    assert calls == [(2,)]
    assert y.shape == (0,)


def test_what_is_identical():
    def f(x):
        return x * 2 if (x.sum().item() > 4) is True else x  # == would be the loop's

    assert vmap(f)(X).equal(X)


def test_prints_repeat(capsys):
    def f(x):
        print("once")
        return x.sum() if x[0] > 1 else x[1]

    vmap(f)(X)
    first = capsys.readouterr().out.count("once")
    vmap(f)(X)  # converted at once from now on
    assert (first, capsys.readouterr().out.count("once")) == (2, 1)


def test_the_type():
    asked = []

    def f(x):
        asked.extend([isinstance(x, torch.Tensor), x.__class__ is torch.Tensor])
        asked.append(type(x) is torch.Tensor)  # which is of Python's own making, and asks nobody
        return x

    vmap(f)(X)
    assert asked == [True, True, False]


def test_jit_prints_once(capsys):
    def f(x):
        print("once")
        return x + random.random()

    g = jit(f)
    assert g(X).equal(g(X))
    assert capsys.readouterr().out == "once\n"


def test_jit_and_the_clock():
    g = jit(lambda x: x + random.random() + time.perf_counter())
    assert g(X).equal(g(X))


def test_jit_and_settings():
    f = jit(lambda x: x * torch.get_num_threads())
    before, wanted = torch.get_num_threads(), f(X)
    try:
        torch.set_num_threads(before + 1)
        assert f(X).equal(wanted)  # modes (no_grad, autocast, default dtype) are part of the kind
        assert vmap(lambda x: x * torch.get_num_threads())(X).equal((before + 1) * X)
    finally:
        torch.set_num_threads(before)


def test_the_index_names_every_test():
    entries = (line[4:25].strip() for line in (__doc__ or "").splitlines() if line[:4] == "    ")
    index = {entry.replace("'", "").replace("-", "_").replace(" ", "_") for entry in entries}
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert index == tests - {"the_index_names_every_test"}


def test_an_inf_in_one_row():
    w = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    x = torch.ones(2, requires_grad=True)
    first = torch.autograd.grad((w @ x)[0], x)[0]
    assert first.isnan().tolist() == [True, False]  # 0 * inf
    assert jacrev(lambda x: w @ x)(x.detach()).equal(w)

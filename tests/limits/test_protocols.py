"""numpy's functions and Python's protocols on a value of one example, against the loop."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

from by_groups import EXPECTED
from draws import make_generator
from forall import PerformanceWarning, grad, jacfwd, jvp, vmap
from forall._compat import numpy_interop
from forall._core.errors import DataDependentError
from oracle import difference, loop

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

DOUBLE = torch.float64
X = torch.randn(4, 3, dtype=DOUBLE, generator=make_generator(0))
INTS = torch.tensor([[3, 1, 2], [0, 5, 4], [7, 7, 1], [2, 2, 2]])


def as_tensor(out):
    """The loop gets numpy's arrays and numbers back, where ours are tensors."""
    if isinstance(out, (tuple, list)):
        return tuple(map(as_tensor, out))
    return torch.from_numpy(np.array(out)) if isinstance(out, (np.ndarray, np.generic)) else out


def by_numpy(f):
    """``f`` of a plain tensor as numpy sees it."""
    return lambda x: as_tensor(f(x.numpy()))


FUNCTIONS = {
    "sin": np.sin,
    "add": lambda x: np.add(x, 1),
    "subtract from": lambda x: np.subtract(2.5, x),
    "array times": lambda x: np.multiply(np.arange(3.0), x),
    "maximum": lambda x: np.maximum(x, 0),
    "arctan2": lambda x: np.arctan2(x, x[::1] + 1),
    "sum": np.sum,
    "sum of axis": lambda x: np.sum(x, axis=0, keepdims=True),
    "mean": np.mean,
    "std": lambda x: np.std(x, ddof=1),
    "dot": lambda x: np.dot(x, x),
    "outer": lambda x: np.outer(x, x),
    "where": lambda x: np.where(x > 0, x, 0),
    "clip": lambda x: np.clip(x, -1, 1),
    "concatenate": lambda x: np.concatenate([x, x]),
    "stack": lambda x: np.stack([x, 2 * x], axis=1),
    "cumsum": np.cumsum,
    "norm": np.linalg.norm,
    "sort": np.sort,
    "isnan": np.isnan,
    "reduce": np.maximum.reduce,
    "accumulate": np.add.accumulate,
    "outer of a ufunc": lambda x: np.add.outer(x, x),
    "median": np.median,
    "argsort": np.argsort,
    "percentile": lambda x: np.percentile(x, 30),
    "interp": lambda x: np.interp(x, [-1.0, 0.0, 1.0], [0.0, 3.0, 4.0]),
    "modf": np.modf,
    "sinc": np.sinc,
    "fft": lambda x: np.fft.fft(x),
    "float32": lambda x: np.sin(x, dtype=np.float32),
}


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpys_functions_are_those_of_the_example(name):
    f = FUNCTIONS[name]
    assert difference(vmap(f)(X), loop(by_numpy(f))(X)) is None


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "f", [np.sin, np.square, np.sum, np.mean, np.cumsum, lambda x: np.add(x, 1)]
)
def test_the_dtype_is_numpys(f, dtype):
    xs = INTS.to(dtype)
    assert difference(vmap(f)(xs), loop(by_numpy(f))(xs)) is None


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("f", [np.sin, np.median, lambda x: np.dot(x, x), lambda x: np.sort(x)])
def test_numpys_functions_under_two_levels(f):
    xs = torch.stack([X, X.flip(0)])
    assert difference(vmap(vmap(f))(xs), loop(loop(by_numpy(f)))(xs)) is None


@pytest.mark.parametrize("f", [lambda x: np.float64(2) * x, lambda x: np.float32(2) - x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_number_of_numpys_in_front_is_a_python_number_as_for_a_tensor(f, dtype):
    xs = INTS.to(dtype)
    assert difference(vmap(f)(xs), loop(f)(xs)) is None


def test_a_tensor_times_an_array_is_what_it_is_for_a_tensor():
    def f(x):
        return x * np.ones(3)

    assert difference(vmap(f)(X.float()), loop(f)(X.float())) is None


@pytest.mark.parametrize("f", [np.sin, np.square, np.linalg.norm, lambda x: np.where(x > 0, x, -x)])
def test_derivatives_flow_where_torch_has_the_function(f):
    g = {np.sin: torch.sin, np.square: torch.square, np.linalg.norm: torch.linalg.norm}
    ours = g.get(f, torch.abs)
    assert (
        difference(vmap(grad(lambda x: np.sum(f(x))))(X), vmap(grad(lambda x: ours(x).sum()))(X))
        is None
    )
    assert difference(vmap(jacfwd(f))(X), vmap(jacfwd(ours))(X)) is None
    assert difference(jvp(f, (X[0],), (X[1],)), jvp(ours, (X[0],), (X[1],))) is None


@pytest.mark.parametrize(
    "run",
    [
        lambda: vmap(grad(lambda x: np.median(x)))(X),
        lambda: vmap(lambda x: jvp(np.median, (x,), (x,)))(X),
        lambda: jvp(np.median, (X[0],), (X[1],)),
    ],
)
def test_where_it_has_not_a_derivative_is_refused(run):
    with pytest.raises(RuntimeError, match="no derivative"):
        run()


def test_numpy_itself_runs_once_per_example_and_says_so():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        vmap(np.median)(X)
    assert [w.category for w in told] == [PerformanceWarning]


def test_what_is_the_same_for_all_examples_is_asked_once():
    table = torch.ones(3, dtype=DOUBLE)
    assert difference(vmap(lambda x: x + np.sin(table))(X), X + table.sin()) is None
    assert vmap(lambda x: (np.shape(x), np.ndim(x), x)[2])(X).shape == X.shape
    found = []
    vmap(lambda x: found.append(torch.zeros(2).numpy().sum()) or x)(X)
    assert found == [0.0]


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("f", [lambda x: np.add(x, 1, out=np.zeros(3)), np.unique])
def test_what_numpy_cannot_say_for_all_is_refused(f):
    with pytest.raises((TypeError, RuntimeError)):
        vmap(f)(torch.tensor([[1.0, 1.0, 2.0], [1.0, 2.0, 3.0]]))


def test_torchs_layer_has_every_function_that_it_is_asked_for():
    for name in numpy_interop.UFUNCS:
        assert numpy_interop.find_counterpart(getattr(np, name)) is not None
    for name in numpy_interop.FUNCTIONS:
        home, _, last = name.rpartition(".")
        assert (
            numpy_interop.find_counterpart(getattr(getattr(np, home) if home else np, last))
            is not None
        )


# --- Python's protocols -------------------------------------------------------------------------

PROTOCOLS = {
    "copy": lambda x: copy.copy(x) + 1,
    "copy is an alias": lambda x: (copy.copy(x := x * 1).add_(1), x)[1],
    "deepcopy": lambda x: copy.deepcopy(x) + 1,
    "deepcopy is none": lambda x: (copy.deepcopy(x).add_(1), x)[1] * 1,
    "deepcopy in a list": lambda x: copy.deepcopy([x, x])[1],
    "len": lambda x: len(x),
    "iter": lambda x: sum(v for v in x),
    "reversed": lambda x: next(iter(reversed(x))),
    "unpacking": lambda x: torch.stack([*x, x[0]]),
    "hash": lambda x: float({x: 2.0}[x]),
    "in a dict": lambda x: x in {x: 1},
    "in a set": lambda x: len({x, x, x * 1}),
    "id": lambda x: {id(x): 5}[id(x)],
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "is_tensor": torch.is_tensor,
    "a FloatTensor": lambda x: isinstance(x, torch.DoubleTensor),
    "type(dtype)": lambda x: x.type(torch.float32),
    "to": lambda x: x.to(torch.float32),
    "to like": lambda x: x.to(torch.ones(1)),
    "cpu": lambda x: x.cpu(),
    "is_contiguous": lambda x: x.is_contiguous(),
    "is_contiguous of a view": lambda x: x.outer(x).mT.is_contiguous(),
    "a number of numpy's shape": lambda x: x.reshape(np.shape(x)) * np.ndim(x),
    "stride": lambda x: x.stride(0),
    "element_size": lambda x: x.element_size(),
    "nbytes": lambda x: x.nbytes,
    "numel": lambda x: x.numel(),
    "abs": abs,
    "Tensor(x)": lambda x: torch.Tensor(x.float()),
    "Parameter": lambda x: torch.nn.Parameter(x).detach() * 2,
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "a shared number": lambda x: x * torch.tensor(2.0, dtype=DOUBLE).item(),
    "a shared list": lambda x: x * torch.ones(2).tolist()[1],
    "a shared format": lambda x: x * float(f"{torch.tensor(2.0):.2f}"),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_answers_as_for_the_example(name):
    f = PROTOCOLS[name]
    assert difference(vmap(f)(X.clone()), loop(f)(X.clone())) is None
    nested = torch.stack([X, X + 1])
    assert difference(vmap(vmap(f))(nested.clone()), loop(loop(f))(nested.clone())) is None


def test_the_type_is_told_as_of_the_example():
    told = []
    vmap(lambda x: told.append((x.type(), x.dtype, x.device, x.layout, x.shape)) or x)(X)
    x = X[0]
    assert told == [(x.type(), x.dtype, x.device, x.layout, x.shape)]


def test_a_copy_of_what_was_computed_is_refused_as_in_the_loop():
    def f(x):
        return copy.deepcopy(x * 2).sum()

    for run in (loop, vmap):
        with pytest.raises(RuntimeError, match=r"deepcopy|graph leaves"):
            run(grad(f))(X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.tolist(),
        lambda x: f"{x[0]:.2f}",
        lambda x: float(x[0]),
        lambda x: x.data_ptr(),
        lambda x: x.storage(),
        lambda x: pickle.dumps(x),
        lambda x: torch.from_dlpack(x),
    ],
)
def test_what_needs_the_number_of_one_example_is_refused_where_none_may_part(f):
    with pytest.raises(DataDependentError):
        vmap(f, divergence="error")(X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * torch.from_numpy(x.numpy().copy()),
        lambda x: torch.from_numpy(np.asarray(x) * 2),
        lambda x: torch.tensor(x.tolist()),
        lambda x: float(f"{x[0]:.2f}"),
        lambda x: float(x[0]),
    ],
)
@EXPECTED
def test_examples_part_where_python_needs_their_numbers(f):
    assert difference(vmap(f)(X), loop(f)(X)) is None


@pytest.mark.parametrize(
    "f", [lambda x: x.data_ptr(), lambda x: x.storage(), lambda x: pickle.dumps(x)]
)
def test_what_needs_the_memory_of_one_example_is_refused(f):
    with pytest.raises(DataDependentError):
        vmap(f)(X)


@pytest.mark.parametrize(
    "transform", [vmap, lambda f: lambda x: jvp(f, (x,), (x,))], ids=["vmap", "jvp"]
)
def test_a_kernel_that_is_launched_past_the_dispatcher_is_refused(transform):
    code = "template <typename T> T square_of(T x) { return x * x; }"
    square = torch.cuda.jiterator._create_jit_fn(code)
    with pytest.raises(TypeError, match=r"square_of.*cannot run inside a transform"):
        transform(lambda x: square(x).sum())(torch.ones(3))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.detach().numpy().copy(),
        lambda x: np.asarray(x.detach()).copy(),
        lambda x: x.tolist(),
        lambda x: f"{x[0]:.2f}",
        lambda x: x[0].item(),
    ],
)
@pytest.mark.parametrize("transform", ["grad", "jvp", "grad of jvp", "jvp of grad", "jvp of jvp"])
def test_derivatives_let_numbers_be_read_as_outside(f, transform):
    told = []

    def g(x):
        told.append(f(x))
        return x.sum()

    x = X[0]
    push = lambda h: lambda y: jvp(h, (y,), (y,))[1].sum()  # noqa: E731
    {
        "grad": lambda: grad(g)(x),
        "jvp": lambda: push(g)(x),
        "grad of jvp": lambda: grad(push(g))(x),
        "jvp of grad": lambda: push(grad(g))(x),
        "jvp of jvp": lambda: push(push(g))(x),
    }[transform]()
    assert repr(told) == repr([f(x)])


# --- repr ---------------------------------------------------------------------------------------


def test_repr_shows_one_example_and_the_values_of_all():
    told = []
    vmap(lambda x: told.extend([repr(x), str(x), f"{x}", f"{x + torch.ones(3)}"]) or x)(X)
    for text in told:
        assert "float64[3], one for each of 4 examples" in text
    assert repr(X[2]).removeprefix("tensor(").split("]")[0] in told[0]


def test_repr_never_fails():
    told = []

    def note(x):
        told.append(repr(x))
        return x

    def f(x):
        y = note(x).sin()
        y.register_hook(lambda g: note(g))
        jvp(lambda z: note(note(z) * x), (y,), (y,))
        vmap(lambda z: note(note(z) + x))(torch.ones(2, 3))
        note(torch.zeros(2))
        note(x[None].mT)
        return (y * y).sum()

    vmap(grad(f), in_dims=1)(X.mT)
    vmap(lambda x: note(x.to(torch.complex64).conj()))(X)
    vmap(vmap(lambda x: note(x * 2), in_dims=1), in_dims=0)(torch.ones(2, 3, 4))
    vmap(note)(torch.ones(0, 3))
    vmap(note)(torch.ones(50, 60, 70))
    vmap(note)(torch.ones(3, 2, device="meta"))
    assert all(told)
    assert max(map(len, told)) < 4000

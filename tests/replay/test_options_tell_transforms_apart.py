"""What a transform was given tells its calls from those of others of the same function."""

from __future__ import annotations

import inspect
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import forall
from forall import Chunks, grad, jacrev, jvp, vjp, vmap
from forall._api.define_transform import define_transform
from forall._api.execution import transform_decorator as decorator

X = torch.arange(1.0, 4.0)
DATA = {"func", "primals", "tangents"}  # what a call is of
# Of each keyword two values that a transform takes.
VALUES = {
    "argnums": (0, 1),
    "argnames": (None, "x"),
    "has_aux": (False, True),
    "return_value": (False, True),
    "strict": (False, True),
    "holomorphic": (False, True),
    "randomness": ("error", "same"),
    "chunk_size": (None, 1),
    "in_dims": (0, 1),
    "out_dims": (0, 1),
    "divergence": ("split", "error"),
    "ragged": (False, True),
    "max_steps": (None, 5),
    "axis_name": (None, "b"),
    "axis_size": (None, 3),
    "_preallocate_and_copy": (False, True),
    "in_placements": (None, ([Shard(0)], [Replicate()])),
    "out_placements": ([Shard(0)], [Shard(1)]),
}
# Transforms whose calls are no one else's: a wrapper of `jit` has its kinds for itself, and what
# `vjp` replays is the function that it was given, whatever it does with the results. The last is
# torch's, and not replayed.
OF_THEIR_OWN = {"jit", "vjp", "functionalize"}


@pytest.fixture(scope="module")
def meshes():
    """Meshes of one process, whose dims have unlike names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in "ab"]
    dist.destroy_process_group()


def transforms() -> dict:
    """The public functions of a function."""
    found = {n: getattr(forall, n) for n in forall.__all__}
    functions = {n: f for n, f in found.items() if inspect.isfunction(f)}
    return {
        n: f
        for n, f in functions.items()
        if next(iter(inspect.signature(f).parameters), "") == "func"
    }


def key(name: str, meshes: list, monkeypatch: pytest.MonkeyPatch, **options) -> tuple:
    """What tells a transform with these options from others."""
    if name == "shard_map":
        options = {"mesh": meshes[0], **options}
    keys, original = [], decorator._make_transform_key

    def noted(how: tuple) -> tuple:
        keys.append(original(how))
        return keys[-1]

    monkeypatch.setattr(decorator, "_make_transform_key", noted)
    monkeypatch.setattr(decorator, "_keys", {})
    args = {"jvp": ((X,), (X,)), "linearize": (X,)}.get(name, ())
    transform = transforms()[name]
    transform((lambda x: (x, x)) if options.get("has_aux") else (lambda x: 2 * x), *args, **options)
    monkeypatch.setattr(decorator, "_make_transform_key", original)
    assert keys[0] is not None
    return keys[0]


KEYED = sorted({*transforms()} - OF_THEIR_OWN)
KEYWORDS = [
    (name, parameter)
    for name in KEYED
    for parameter in inspect.signature(transforms()[name]).parameters
    if parameter not in DATA
]


def test_there_are_transforms_with_keywords():
    assert {"vmap", "grad", "jvp", "hessian", "per_example_grad_norm"} <= {*KEYED}
    assert len(KEYWORDS) > 50


@pytest.mark.parametrize(("name", "keyword"), KEYWORDS)
def test_each_keyword_of_each_transform_tells_it_from_others(
    name, keyword, meshes, at_once, monkeypatch
):
    one, other = meshes if keyword == "mesh" else VALUES[keyword]
    first = key(name, meshes, monkeypatch, **{keyword: one})
    assert first != key(name, meshes, monkeypatch, **{keyword: other})
    assert first == key(name, meshes, monkeypatch, **{keyword: one})


def test_each_transform_is_told_from_others(meshes, at_once, monkeypatch):
    keys = [key(name, meshes, monkeypatch) for name in KEYED]
    assert len({*keys}) == len(keys)


def test_meshes_of_two_dims_are_told_by_their_names(meshes):
    grids = [init_device_mesh("cpu", (1, 1), mesh_dim_names=n) for n in (("a", "b"), ("b", "a"))]
    keys = [decorator._make_transform_key((mesh,)) for mesh in (*meshes, *grids)]
    assert None not in keys
    assert len({*keys}) == 4
    again = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert decorator._make_transform_key((again,)) == keys[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0, False),
        (1, True),
        ((0,), 0),
        ("a", ("a",)),
        (0.0, 0),
        (0.0, -0.0),
        (0.0, float("nan")),
        (Chunks(1), 1),
        (Chunks(1), Chunks(2)),
        (Chunks(1), Chunks(1, progress=True)),
        (Chunks(), Chunks(memory_budget=9)),
    ],
)
def test_values_that_are_equal_or_nearly_are_told_apart(one, other):
    assert decorator._make_transform_key((one,)) != decorator._make_transform_key((other,))


def test_options_that_are_nan_are_the_same():
    first, second = (decorator._make_transform_key((float("nan"),)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("value", [1j, torch.ones(1), type("Place", (int,), {})(0), [1j]])
def test_what_is_of_another_class_tells_nothing(value):
    assert decorator._make_transform_key(("grad", value)) is None


def dot(entries, y):
    return (entries["a"] * entries["b"] * y).sum()


ENTRIES = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3.0)}


def test_dims_in_a_dict_that_is_made_anew_are_replayed(at_once, hits):
    y = torch.ones(3)
    for a, b in [(0, None)] * 8 + [(None, None)] * 8:
        dims = ({"a": a, "b": b}, 0)
        given = ENTRIES if a == 0 else {"a": ENTRIES["b"], "b": ENTRIES["b"]}
        ys = torch.ones(2, 3)
        wanted = torch.stack([dot({**given, "a": x}, y) for x in given["a"].expand(2, 3)])
        assert vmap(dot, dims)(given, ys).equal(wanted)
    assert len(hits) >= 6


@pytest.mark.parametrize("is_nested", [False, True])
def test_dims_in_a_dict_that_changes_are_those_of_the_call(is_nested, at_once):
    square = {"a": torch.arange(9.0).reshape(3, 3), "b": torch.arange(3.0)}
    rows = torch.stack([dot({**square, "a": x}, torch.ones(3)) for x in square["a"]])
    columns = torch.stack([dot({**square, "a": x}, torch.ones(3)) for x in square["a"].T])
    dims = {"a": 0, "b": None}
    kept = vmap(dot, (dims, None))
    ys = torch.ones(3)

    def call(f):
        return vmap(lambda y: f(square, y))(ys[None])[0] if is_nested else f(square, ys)

    for axis, wanted in [(0, rows)] * 6 + [(1, columns)] * 6:
        dims["a"] = axis
        assert call(kept).equal(wanted)
        late = {"a": 1 - axis, "b": None}
        made = vmap(dot, (late, None))
        late["a"] = axis
        assert call(made).equal(wanted)


def test_a_keyword_that_a_transform_is_told_tells_it_from_others(at_once):
    @define_transform()
    def transform(func, argnums=0, *, new=False):
        return lambda f, *args: f(*args) * (3 if new else 2)

    def f(x):
        return x.sin()

    for new in [False] * 4 + [True] * 4:
        assert transform(f, new=new)(X).equal(f(X) * (3 if new else 2))


def test_an_option_has_one_key_however_it_is_passed(at_once, monkeypatch):
    keys, original = [], decorator._make_transform_key
    monkeypatch.setattr(
        decorator, "_make_transform_key", lambda how: keys.append(original(how)) or keys[-1]
    )
    monkeypatch.setattr(decorator, "_keys", {})
    f = lambda x: x.sum()  # noqa: E731
    for args, options in [((f,), {}), ((f, 0), {}), ((), {"func": f}), ((f,), {"argnums": 0})]:
        grad(*args, **options)
    assert len({*keys}) == 1
    assert grad(f, 1) is not grad(f, argnums=1)
    assert len({*keys}) == 2


@pytest.mark.parametrize("name", sorted({*transforms()} - {"functionalize"}))
def test_a_transform_refuses_arguments_that_it_does_not_take(name):
    transform = transforms()[name]
    with pytest.raises(TypeError, match=rf"{name}\(\) missing .* argument: 'func'"):
        transform()
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'other'"):
        transform(torch.sin, other=1)
    with pytest.raises(TypeError, match=rf"^{name}\(func\): func must be callable"):
        transform(X, *([X] if name in ("vjp", "shard_map") else []))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_pull_back_has_no_options_in_what_is_replayed(has_aux, at_once):
    def f(x):
        return x.sin(), x.cos()

    for aux in [has_aux] * 4 + [not has_aux] * 4:
        value, pull, *rest = vjp(f, X, has_aux=aux)
        cotangents = torch.ones(3) if aux else (torch.ones(3), torch.zeros(3))
        assert pull(cotangents)[0].allclose(X.cos())
        assert (rest == []) is not aux
        assert (value if aux else value[0]).equal(X.sin())


def test_options_of_one_function_alternate(at_once):
    def f(x, y):
        return (x * y.square()).sum()

    def pair(x, y):
        return f(x, y), x

    ways = [
        (lambda: grad(f)(X, X), X.square()),
        (lambda: grad(f, 1)(X, X), 2 * X.square()),
        (lambda: grad(f, (1,))(X, X)[0], 2 * X.square()),
        (lambda: grad(f, argnames="y")(X, X), 2 * X.square()),
        (lambda: grad(pair, has_aux=True)(X, X)[0], X.square()),
        (lambda: jacrev(f)(X, X), X.square()),
        (lambda: vmap(f)(X, X), X**3),
        (lambda: vmap(f, (0, None))(X, X), X * X.square().sum()),
        (lambda: jvp(f, (X, X), (X, 0 * X))[1], (X**3).sum()),
    ]
    for (one, a), (other, b) in combinations(ways, 2):
        for _ in range(4):
            assert one().allclose(a)
            assert other().allclose(b)


def test_what_is_told_by_the_very_same_words_is_read_once(monkeypatch):
    monkeypatch.setattr(decorator, "_keys", {})
    monkeypatch.setattr(decorator, "_MOST_KEYS", 2)
    options = {"in_dims": (0, None), "randomness": "same"}
    first = ("vmap", *options.items())
    key = decorator._read(first)
    assert decorator._read(("vmap", *options.items())) == key
    assert len(decorator._keys) == 1
    for other in ({"in_dims": (1, None)}, {"in_dims": (True, None)}, {"in_dims": (0, 0)}):
        assert decorator._read(("vmap", *{**options, **other}.items())) != key
    assert decorator._read(("grad", *options.items())) != key
    assert len(decorator._keys) <= 2


def test_what_may_change_is_read_with_each_transform(monkeypatch):
    monkeypatch.setattr(decorator, "_keys", {})
    dims, chunks = [0, None], Chunks(size=2)
    for told in ({"in_dims": (dims,)}, {"chunk_size": chunks}, {"randomness": X}):
        decorator._read(("vmap", *told.items()))
    assert not decorator._keys
    before = decorator._read(("vmap", ("in_dims", (dims,))))
    dims[1] = 0
    assert decorator._read(("vmap", ("in_dims", (dims,)))) != before


def test_words_that_take_the_place_of_others_are_not_taken_for_them(monkeypatch):
    """Tuples made anew, of the same values and of others, have the keys that they should."""
    monkeypatch.setattr(decorator, "_keys", {})
    f = lambda x, y: x * y  # noqa: E731
    for n in range(3000):
        dims = (None, 0) if n % 2 else (0, None)
        dims = tuple(d for d in dims)  # another object
        how = ("vmap", ("in_dims", dims))
        key, _ = decorator._read(how)
        expected = decorator._make_transform_key(how)
        assert key == expected
        assert len(decorator._keys) <= 4  # two here, and two of the calls below
        if not n % 500:
            args = (X.sum(), X) if n % 2 else (X, X.sum())
            assert torch.equal(vmap(f, dims)(*args), X * X.sum())

"""``vmap(f)(xs)`` is ``torch.stack([f(x) for x in xs])``, whatever goes in and comes out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draws import make_generator
from forall import functional_call, grad, stack_module_state, vmap
from oracle import check_vmap, difference, loop

D = torch.float64


def seeded(*shape):
    generator = make_generator(sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


# --- in_dims and out_dims -------------------------------------------------------------------------


@pytest.mark.parametrize("out_dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("in_dim", [0, 1, 2, -1, -2, -3])
def test_an_int_says_where_the_examples_are(in_dim, out_dim):
    x = seeded(4, 4, 4)
    check_vmap(lambda a: a.sin() @ a.T, (x,), in_dim, out_dim)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (-1, None), (1, 0), (0, -1)])
def test_none_shares_an_argument(in_dims):
    check_vmap(lambda a, b: a * b + a.sum(), (seeded(3, 3), seeded(3, 3)), in_dims)


def test_a_tree_of_dims_fits_its_argument():
    args = ({"a": seeded(3, 2), "b": [seeded(2, 3), seeded(2)]}, seeded(2, 3))

    def f(tree, y):
        return {"sum": tree["a"] + tree["b"][0] + y, "both": (tree["b"][1] * y.sum(), y)}

    dims = ({"a": 0, "b": [1, None]}, -1)
    check_vmap(f, args, dims)
    check_vmap(f, args, dims, {"sum": 1, "both": (-1, 0)})


def test_one_dim_stands_for_a_whole_subtree():
    args = ({"a": seeded(3, 2), "b": [seeded(3, 2), seeded(3)]}, seeded(2))
    found = vmap(lambda tree, y: tree["a"] * tree["b"][0] + tree["b"][1] * y, (0, None))(*args)
    tree, y = args
    truth = torch.stack([tree["a"][i] * tree["b"][0][i] + tree["b"][1][i] * y for i in range(3)])
    assert difference(found, truth) is None


def test_one_out_dim_stands_for_a_whole_tree():
    found = vmap(lambda a: (a, {"b": a * 2}), out_dims=1)(seeded(3, 2))
    assert difference(found, (seeded(3, 2).T, {"b": seeded(3, 2).T * 2})) is None


def test_a_dict_names_arguments_and_shares_the_rest():
    def f(x, y=None, *, scale, offset=1.0):
        return x * y + scale.sum() + offset

    x, y, scale = seeded(3, 2), seeded(2), seeded(2, 3)
    truth = torch.stack([x[i] * y + scale[:, i].sum() + 2.0 for i in range(3)])
    found = vmap(f, in_dims={"x": 0, "scale": -1})(x, y=y, scale=scale, offset=2.0)
    assert difference(found, truth) is None
    assert (
        difference(vmap(f, {"x": 0, "scale": 1})(x=x, y=y, scale=scale, offset=2.0), truth) is None
    )


def test_keyword_arguments_are_shared():
    x, y = seeded(3, 3), seeded(3)
    found = vmap(lambda a, *, b, n: a * b * n)(x, b=y, n=2)
    assert difference(found, x * y * 2) is None


def test_an_argument_without_a_mapped_leaf_is_the_very_object():
    shared = {"list": [1, 2, 3], "tensor": seeded(2)}
    seen = []

    def f(a, given):
        seen.append(given)
        return a * given["list"].pop() + given["tensor"]

    vmap(f, (0, None))(seeded(3, 2), shared)
    assert seen[0] is shared
    assert shared["list"] == [1, 2]


def test_the_function_runs_once():
    runs = []
    vmap(lambda a: (runs.append(a.shape), a * 2)[1])(seeded(5, 2))
    assert runs == [torch.Size([2])]


def test_the_wrapped_function_keeps_its_name_and_doc():
    def f(a):
        """Doc."""
        return a

    assert vmap(f).__name__ == "f"
    assert vmap(f).__doc__ == "Doc."
    assert vmap(nn.Linear(2, 2).double())(seeded(3, 2)).shape == (3, 2)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (3, 0), (0, 0), (0, 2, 3)])
def test_sizes_zero_and_one_have_the_loops_shapes(shape):
    def f(a):
        return a.sin(), a.sum(), torch.cat([a, a]), a.unsqueeze(0) * torch.ones(4, *a.shape)

    x = torch.zeros(shape, dtype=D)
    found = vmap(f)(x)
    some = torch.stack([x.new_zeros(shape[1:])] * 2)
    truth = tuple(t.new_zeros(shape[0], *t.shape[1:]) for t in loop(f)(some))
    assert difference(found, truth, values=False) is None
    if shape[0]:
        check_vmap(f, (x,))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 100])
def test_chunks_change_no_value(chunk_size):
    def f(a, b):
        return {"sum": a + b, "product": (a @ b, b)}

    args = seeded(2, 5), seeded(2)
    check_vmap(f, args, (1, None), {"sum": -1, "product": (0, 1)}, chunk_size=chunk_size)


def test_chunks_run_the_function_once_each():
    runs = []
    vmap(lambda a: (runs.append(1), a)[1], chunk_size=2)(seeded(5, 2))
    assert len(runs) == 3


# --- nesting --------------------------------------------------------------------------------------


def test_maps_nest_with_any_dims():
    def f(a, b):
        return a.sin() * b + a.sum()

    x, y = seeded(2, 3, 4), seeded(4, 3)
    found = vmap(vmap(f, (0, None), 1), (1, -1), -1)(x, y)
    columns = [torch.stack([f(x[i, j], y[:, j]) for i in range(2)], 1) for j in range(3)]
    assert difference(found, torch.stack(columns, -1)) is None


def test_the_outer_products_of_two_maps():
    x, y = seeded(3), seeded(4)
    table = vmap(vmap(lambda a, b: a * b.exp(), (None, 0)), (0, None))(x, y)
    assert difference(table, x[:, None] * y.exp()) is None
    deep = vmap(
        vmap(vmap(lambda a, b, c: a * b + c, (None, None, 0)), (None, 0, None)), (0, None, None)
    )
    assert difference(deep(x, y, x), (x[:, None] * y)[:, :, None] + x) is None


def test_an_inner_map_over_what_the_outer_one_shares():
    x, y = seeded(3, 2), seeded(4, 2)
    found = vmap(lambda a: vmap(lambda b: a @ b)(y))(x)
    assert difference(found, x @ y.T) is None


# --- results --------------------------------------------------------------------------------------


def test_numbers_become_stacked_tensors():
    found = vmap(lambda a: (a.shape[0], 2.5, True, 1j))(seeded(3, 2))
    truth = (
        torch.tensor([2, 2, 2]),
        torch.tensor([2.5] * 3),
        torch.tensor([True] * 3),
        torch.tensor([1j] * 3),
    )
    assert difference(found, truth) is None


def test_none_and_strings_pass_through():
    found = vmap(lambda a: {"none": None, "name": "f", "value": a})(seeded(3, 2))
    assert found["none"] is None
    assert found["name"] == "f"
    assert difference(found["value"], seeded(3, 2)) is None


def test_a_result_is_not_the_arguments_memory():
    x = seeded(3, 2)
    for f in (lambda a: a, lambda a: a.view(2), lambda a: a.T if a.dim() == 2 else a[:1]):
        y = vmap(f)(x)
        y.add_(1)
        assert difference(x, seeded(3, 2)) is None


def test_a_shared_result_is_not_the_captured_memory():
    w = seeded(2)
    y = vmap(lambda a: w)(seeded(3, 2))
    y[0].add_(1)
    assert difference(w, seeded(2)) is None
    assert difference(y[1:], seeded(2).expand(2, 2).contiguous()) is None


def test_two_results_that_are_one_tensor_do_not_share_memory():
    def f(a):
        b = a * 2
        return b, b, b.view(2)

    first, second, third = vmap(f)(seeded(3, 2))
    first.zero_()
    assert difference((second, third), (seeded(3, 2) * 2, seeded(3, 2) * 2)) is None


def test_a_shared_result_is_repeated_for_every_example():
    w = seeded(2)
    check_vmap(lambda a: w, (seeded(3, 2),))
    check_vmap(lambda a: torch.ones(4, dtype=D), (seeded(3, 2),), out_dims=-1)
    assert difference(vmap(lambda a: w * 2, out_dims=None)(seeded(3, 2)), w * 2) is None


# --- randomness --------------------------------------------------------------------------------


def test_random_operators_are_an_error_by_default():
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda a: a + torch.rand(2))(seeded(3, 2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda a: torch.rand(5),
        torch.randn_like,
        lambda a: nn.functional.dropout(torch.ones(20), 0.5),
        lambda a: torch.zeros(5).normal_(),
        lambda a: torch.randint(0, 1_000_000, (4,)),
        lambda a: torch.randperm(20),
    ],
    ids=["rand", "randn_like", "dropout", "normal_", "randint", "randperm"],
)
def test_draws_differ_or_agree_as_the_flag_says(draw):
    x = seeded(3, 4)
    torch.manual_seed(0)
    same = vmap(draw, randomness="same")(x)
    different = vmap(draw, randomness="different")(x)
    assert same.shape == different.shape
    assert all((row == same[0]).all() for row in same)
    assert not any((row == different[0]).all() for row in different[1:])


def test_a_seed_fixes_the_draws():
    def draws():
        torch.manual_seed(3)
        return vmap(lambda a: a + torch.randn(2), randomness="different")(seeded(3, 2))

    assert difference(draws(), draws()) is None


# --- modules -----------------------------------------------------------------------------------


def test_an_ensemble_of_modules_equals_the_loop_over_them():
    models = [
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
        for _ in range(5)
    ]
    params, buffers = stack_module_state(models)
    x = seeded(6, 3)

    def call(p, b, x):
        return functional_call(models[0], (p, b), (x,))

    truth = torch.stack([m(x) for m in models])
    assert difference(vmap(call, (0, 0, None))(params, buffers, x), truth) is None
    each = torch.stack([m(x[:5][i]) for i, m in enumerate(models)])
    assert difference(vmap(call)(params, buffers, x[:5]), each) is None
    vmap(call, (0, 0, None))(params, buffers, x).sum().backward()
    sum(m(x).sum() for m in models).backward()
    truth = torch.stack([m[0].weight.grad for m in models])
    assert difference(params["0.weight"].grad, truth) is None


def test_a_module_is_mapped_as_a_function():
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(0)).double()
    check_vmap(conv, (seeded(4, 2, 5, 5),))


# --- writes in place ------------------------------------------------------------------------------


def fill_by_index(a):
    b = torch.zeros(4, dtype=D)
    b[0] = a[1]
    b[1:3] = a[:2] * 2
    b[-1] += a.sum()
    return b


def views_made_before_the_write(a):
    b = torch.zeros(3, 3, dtype=D)
    row, diagonal, flat = b[1], b.diagonal(), b.view(-1)
    row.copy_(a)
    diagonal.mul_(2).add_(a)
    flat[0] = a[2]
    return b, row, diagonal, flat


def views_made_after_the_write(a):
    b = torch.zeros(3, 3, dtype=D)
    b[1] = a
    row, column = b[1], b[:, 2]
    column.add_(a)
    b.T[0].mul_(3)
    return b, row, column


def accumulate(a):
    total = torch.zeros((), dtype=D)
    for i in range(3):
        total += a[i] ** i
    return total


def fills(a):
    b = torch.empty(3, dtype=D).fill_(2)
    b.mul_(a).clamp_(min=0).sub_(1)
    b[a > 0] = 7
    b.masked_fill_(a > 1, 9.0)
    return b


def out_argument(a):
    b = torch.empty(3, dtype=D)
    torch.mul(a, 2, out=b)
    torch.add(b, a, out=b[:])
    return b


def scattered(a):
    b = torch.zeros(3, dtype=D)
    index = a.argsort()
    b.scatter_add_(0, index, a)
    b.index_add_(0, index, a * 2)
    b.index_put_((index,), a, accumulate=True)
    return b


def in_a_branch_of_views(a):
    b = a * 2
    halves = b.split([1, 2])
    halves[0].zero_()
    halves[1].add_(a[0])
    return b, torch.cat(halves)


WRITES = [
    fill_by_index,
    views_made_before_the_write,
    views_made_after_the_write,
    accumulate,
    fills,
    out_argument,
    scattered,
    in_a_branch_of_views,
]


@pytest.mark.parametrize("f", WRITES)
def test_writes_into_tensors_born_inside_equal_the_loop(f):
    check_vmap(f, (seeded(4, 3),))
    check_vmap(f, (seeded(3, 4),), 1)


@pytest.mark.parametrize("f", WRITES)
def test_nested_maps_write_as_the_nested_loop(f):
    x = seeded(2, 4, 3)
    assert difference(vmap(vmap(f))(x), loop(loop(f))(x)) is None


# Under autograd torch refuses these on plain tensors: out=, writes into one of several views, and
# into a view from before its base required grad.
REFUSED = {out_argument, in_a_branch_of_views, views_made_before_the_write}


@pytest.mark.parametrize("f", [f for f in WRITES if f not in REFUSED])
def test_gradients_flow_through_writes(f):
    def total(a):
        out = f(a)
        return sum((t * t).sum() for t in (out if isinstance(out, tuple) else (out,)))

    x = seeded(4, 3)
    leaf = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(sum(total(a) for a in leaf), leaf)
    (outside,) = torch.autograd.grad(vmap(total)(leaf).sum(), leaf)
    assert difference(vmap(grad(total))(x), truth) is None
    assert difference(outside, truth) is None


def test_gradients_flow_through_views_made_before_a_write():
    def total(a):
        b = torch.zeros(3, 3, dtype=D)
        row, flat = b[1], b.view(-1)
        row.copy_(a)
        b.mul_(3)
        return (row * a).sum() + (flat**3).sum()

    x = seeded(4, 3)
    truth = 6 * x + 81 * x**2
    leaf = x.clone().requires_grad_()
    (outside,) = torch.autograd.grad(vmap(total)(leaf).sum(), leaf)
    assert difference(vmap(grad(total))(x), truth) is None
    assert difference(outside, truth) is None


def test_an_inner_map_writes_into_what_the_outer_one_made():
    def f(a):
        b = torch.zeros(2, 3, dtype=D)
        vmap(lambda row, s: row.copy_(a * s))(b, torch.tensor([1.0, 2.0], dtype=D))
        return b

    x = seeded(4, 3)
    assert difference(vmap(f)(x), torch.stack([x, 2 * x], 1)) is None


@pytest.mark.parametrize("in_dim", [0, 1, -1])
def test_the_caller_sees_writes_into_a_mapped_argument(in_dim):
    def f(a):
        a.mul_(2)
        a[0] = 7
        a[1:].add_(a[0])
        return a.sum()

    check_vmap(f, (seeded(3, 3),), in_dim)


def test_the_caller_sees_writes_into_a_mapped_view():
    base = seeded(3, 6)
    vmap(lambda a: a.zero_())(base[:, ::2])
    truth = seeded(3, 6)
    truth[:, ::2] = 0
    assert difference(base, truth) is None


def test_a_write_marks_the_callers_tensor_as_changed():
    x = seeded(3, 2)
    before = x._version
    vmap(lambda a: a.mul_(2))(x)
    assert x._version > before


def test_a_shared_tensor_takes_no_per_example_data():
    shared = torch.zeros(2, dtype=D)
    for write in (
        shared.copy_,
        lambda a: shared[:1].mul_(a[0]),
        lambda a: shared.index_put_((torch.tensor([0]),), a[:1]),
        lambda a: torch.mul(a, 2, out=shared),
    ):
        with pytest.raises(RuntimeError, match=r"clone|in_dims|map the tensor"):
            vmap(write)(seeded(3, 2))
    assert difference(shared, torch.zeros(2, dtype=D)) is None


def test_an_argument_with_in_dims_none_takes_no_per_example_data():
    with pytest.raises(RuntimeError, match=r"all examples share"):
        vmap(lambda a, b: b.copy_(a), (0, None))(seeded(3, 2), torch.zeros(2, dtype=D))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths_in_a_list(reduction):
    x = seeded(3, 5, 2, 4).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 3]])

    def f(x):
        return F.ctc_loss(x, targets, (5, 4), target_lengths=(2, 1), reduction=reduction)

    check_vmap(f, (x,))
    check_vmap(grad(lambda x: f(x).sum()), (x,))


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("shape", [(4, 7, 7, 7), (2, 4, 7, 7, 7)])
@pytest.mark.parametrize("pool", [F.fractional_max_pool2d, F.fractional_max_pool3d])
def test_more_random_samples_than_images(pool, shape, mapped):
    dims = 2 if pool is F.fractional_max_pool2d else 3
    shape = shape[: len(shape) - 3 + dims]
    x = seeded(*(3,) * (mapped[0] == 0), *shape)
    samples = torch.rand(*(3,) * (mapped[1] == 0), 3, 4, dims, dtype=D)

    def f(x, samples):
        return pool(x, 2, output_size=(4,) * dims, _random_samples=samples)

    check_vmap(f, (x, samples), mapped)

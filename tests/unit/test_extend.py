"""The extenders' door: rules for operators of other libraries."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forall import PerformanceWarning, extend, grad, jvp, vmap
from forall._vmap import registry
from golden import refused
from oracle import check_vmap

X = torch.arange(6.0).reshape(3, 2)


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    handlers, ways = dict(registry.HANDLERS), dict(registry.WAYS)
    yield
    registry.HANDLERS.clear()
    registry.HANDLERS.update(handlers)
    registry.WAYS.clear()
    registry.WAYS.update(ways)


class Library:
    """A few operators of a library that knows nothing of forall."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

        @torch.library.custom_op("rooms_extend::scaled", mutates_args=())
        def scaled(x: torch.Tensor, by: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
            self.calls.append(tuple(x.shape))
            return x * by + offset

        @torch.library.custom_op("rooms_extend::joined", mutates_args=())
        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(parts)

        @torch.library.custom_op("rooms_extend::spread", mutates_args=())
        def spread(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
            return x.amax(dim, keepdim) - x.amin(dim, keepdim)

        @torch.library.custom_op("rooms_extend::both", mutates_args=())
        def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin(), x.sum()

        @torch.library.custom_op("rooms_extend::grow", mutates_args={"x"})
        def grow(x: torch.Tensor, by: torch.Tensor) -> None:
            x.add_(by)

        self.scaled, self.joined, self.spread, self.both, self.grow = (
            scaled,
            joined,
            spread,
            both,
            grow,
        )
        scaled.register_autograd(
            lambda ctx, g: (g * ctx.by, (g * ctx.x).sum(), None),
            setup_context=lambda ctx, inputs, output: ctx.__dict__.update(
                x=inputs[0], by=inputs[1]
            ),
        )


LIBRARY = Library()


def scaled_rule(size: int, mapped: frozenset[str], x: Any, by: Any, offset: float = 0.0) -> Any:
    if "x" not in mapped:
        x = x.expand(size, *x.shape)
    if "by" in mapped:
        by = by.reshape(size, *(1,) * (x.dim() - 1))
    return x * by + offset


@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 0), (-1, 0)])
def test_a_rule_runs_once_and_equals_the_loop(in_dims):
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    args = (X if in_dims[0] in (0, None) else X.T.contiguous(), torch.arange(3.0))
    if in_dims[1] is None:
        args = (args[0], torch.tensor(2.0))
    check_vmap(lambda x, by: LIBRARY.scaled(x, by, 1.0), args, in_dims)
    LIBRARY.calls.clear()
    vmap(LIBRARY.scaled, in_dims=in_dims)(*args)
    assert LIBRARY.calls == []


def test_a_rule_nests():
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    twice = vmap(vmap(LIBRARY.scaled, (0, None)), (None, 0))(X, torch.arange(4.0))
    assert twice.equal(X * torch.arange(4.0)[:, None, None])


def test_derivatives_are_the_operators_own():
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    by = torch.tensor(3.0)
    inside = vmap(grad(lambda x: LIBRARY.scaled(x, by).sum()))(X)
    assert inside.equal(torch.full_like(X, 3.0))
    outside = grad(lambda by: vmap(LIBRARY.scaled, (0, None))(X, by).sum())(by)
    assert outside == X.sum()


def test_no_examples_are_one_blank_one():
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    assert vmap(LIBRARY.scaled, (0, None))(X[:0], torch.ones(())).shape == (0, 2)


def test_a_list_comes_as_stacks_if_one_of_it_does():
    seen = []

    @extend.batching_rule(LIBRARY.joined)
    def rule(size, mapped, parts):
        seen.append((size, mapped, [tuple(p.shape) for p in parts]))
        return torch.cat(parts, 1)

    ours = torch.ones(1)
    check_vmap(lambda x: LIBRARY.joined([x, ours]), (X,))
    assert seen == [(3, {"parts"}, [(3, 2), (3, 1)])]


def test_several_results():
    extend.batching_rule(LIBRARY.both)(lambda size, mapped, x: (x.sin(), x.flatten(1).sum(1)))
    check_vmap(LIBRARY.both, (X,))
    check_vmap(LIBRARY.both, (X,), in_dims=1)


@pytest.mark.parametrize(
    "name",
    [
        lambda: torch.ops.rooms_extend.scaled.default,
        lambda: torch.ops.rooms_extend.scaled,
        lambda: LIBRARY.scaled,
    ],
)
def test_an_operator_goes_by_any_of_its_names(name):
    extend.batching_rule(name())(scaled_rule)
    LIBRARY.calls.clear()
    vmap(LIBRARY.scaled, (0, None))(X, torch.ones(()))
    assert LIBRARY.calls == []


def test_families():
    extend.pointwise(LIBRARY.scaled)
    check_vmap(LIBRARY.scaled, (X, torch.arange(3.0)))
    extend.reduction(LIBRARY.spread)
    for dim in ([0], [-1], [0, 1]):
        for axis in range(3):
            check_vmap(lambda x, d=dim: LIBRARY.spread(x, d), (torch.randn(2, 3, 4),), axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        extend.loop(LIBRARY.both)
        check_vmap(LIBRARY.both, (X,))


def test_without_a_rule_an_operator_loops_and_warns():
    with pytest.warns(PerformanceWarning, match="rooms_extend"):
        check_vmap(LIBRARY.both, (X,))


def test_a_rule_of_torchs_own_is_used():
    @torch.library.custom_op("rooms_extend::torchs", mutates_args=())
    def torchs(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * by

    infos = []

    @torchs.register_vmap
    def rule(info, in_dims, x, by):
        infos.append((info.batch_size, info.randomness, in_dims))
        return x.movedim(in_dims[0], -1) * by, -1

    y = vmap(torchs, (1, None), randomness="same")(X, torch.tensor(2.0))
    assert y.equal(2 * X.T)
    assert infos == [(2, "same", (1, None))]


# --- what it refuses ---------------------------------------------------------------------------


def test_a_second_rule_needs_override():
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    with refused(
        ValueError,
        """
        batching_rule(rooms_extend.scaled.default): the operator has a rule already.
        An operator has one rule. Pass override=True to take its place.
        """,
    ):
        extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    extend.batching_rule(LIBRARY.scaled, override=True)(lambda size, mapped, x, by: x * 0)
    assert not vmap(LIBRARY.scaled, (0, None))(X, torch.ones(())).any()


def test_an_overridden_rule_of_our_own():
    try:
        extend.batching_rule(torch.ops.aten.sin.default, override=True)(
            lambda size, mapped, x: x.cos()
        )
        assert vmap(torch.sin)(X).equal(X.cos())
    finally:
        from forall._vmap.fast_path import api_calls

        api_calls._overruled.clear()
        api_calls._known.clear()


def test_no_operator():
    with refused(
        TypeError,
        """
        batching_rule(op): op must be an operator.
            op   'sin'   str
        Pass torch.ops.<library>.<name>.<overload>, or what torch.library.custom_op made.
        """,
    ):
        extend.batching_rule("sin")


def test_an_operator_that_writes():
    with refused(
        ValueError,
        """
        batching_rule(rooms_extend.grow.default): the operator writes into its arguments.
            schema   rooms_extend::grow(Tensor(a0!) x, Tensor by) -> ()
        Give a rule to the form that returns a new tensor; this one is derived from it.
        """,
    ):
        extend.batching_rule(LIBRARY.grow)


def test_a_reduction_without_a_dim():
    with refused(
        ValueError,
        """
        reduction(rooms_extend.both.default): the operator has no argument called dim.
            schema   rooms_extend::both(Tensor x) -> (Tensor, Tensor)
        Write a rule for it with batching_rule.
        """,
    ):
        extend.reduction(LIBRARY.both)


def test_a_result_without_the_examples_in_front():
    extend.batching_rule(LIBRARY.both)(lambda size, mapped, x: (x, x.sum()))
    with refused(
        ValueError,
        """
        batching_rule(rooms_extend.both.default): a result does not have the examples in front.
            result     float32[]
            examples   3
        Return (size, *S); expand what is the same for all examples.
        """,
    ):
        vmap(LIBRARY.both)(X)


def test_jvp_without_a_forward_formula_comes_from_the_backward():
    extend.batching_rule(LIBRARY.scaled)(scaled_rule)
    by = torch.tensor(3.0)
    _, t = jvp(lambda x: vmap(lambda x: LIBRARY.scaled(x, by))(x), (X,), (torch.ones_like(X),))
    assert t.equal(torch.full_like(X, 3.0))

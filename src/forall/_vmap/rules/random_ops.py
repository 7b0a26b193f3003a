"""Rules of random operators, by the level's ``randomness``.

``"error"`` refuses, ``"different"`` draws (B, *S), ``"same"`` draws one S for all examples. With
``"same"``, examples with different parameters still share the underlying draw. If the level has a
scope (`forall.random.scope`), the scope's key draws for each example instead, whatever the flag is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import rng_state
from forall._compat.documented_error import documented_error
from forall._compat.private_api import DispatchKey, OpOverload
from forall._compat.shapes import broadcast_shapes
from forall._core.axes import pad_rank
from forall._core.errors import format_columns
from forall._random import torch_ops
from forall._random.key_scope import scopes
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.mutation.in_place import get_writable_stack
from forall._vmap.registry import HANDLERS, SHARED, register_rows
from forall._vmap.rule_makers.basic import (
    count_example_dims,
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    reenter_level,
    wrap_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def make_randomness_error(level: Any, func: Any) -> RuntimeError:
    name, verb = func.overloadpacket.__name__, level.state.columns_of
    if verb is not None:  # the user has called no vmap, or has told that one already
        return _make_columns_error(verb, name)
    return documented_error(RuntimeError, "randomness-error")(
        f"vmap: {name} draws random numbers, and randomness='error' forbids that.\n"
        + format_columns(
            [
                ("randomness='different'", "each example draws its own"),
                ("randomness='same'", "one draw serves all examples"),
                ("randomness=random.key(0)", "each example draws its own, by forall.random's key"),
            ]
        )
        + "\nSay which to vmap, or draw outside it."
    )


def _make_columns_error(verb: str, name: str) -> RuntimeError:
    cures = [
        ("forall.random.scope(key)", "a block around the call: the draws are those of the key")
    ]
    if verb == "jacfwd":
        cures.insert(0, ("randomness='same'", "one draw serves all columns"))
    return documented_error(RuntimeError, "column-randomness")(
        f"{verb}: {name} draws random numbers, and each column could see others.\n"
        + format_columns(cures)
        + "\nSay which, or draw outside the function."
    )


def make_seeded_handler(rule: Callable) -> Callable:
    """Return a handler that refuses with randomness='error' and runs ``rule`` otherwise."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        if level.config.randomness == "error":
            raise make_randomness_error(level, func)
        return rule(level, func, args, kwargs)

    return handler


def register_random(rules: dict[Any, Callable]) -> None:
    """Register rules that also run if no argument is batched."""
    rows = {op: make_seeded_handler(rule) for op, rule in rules.items()}
    register_rows(rows)
    SHARED.update(rows)


# --- in place ------------------------------------------------------------------------------------


def _draw_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run x.uniform_() and its like, which overwrite x with a draw."""
    x, *rest = args
    if level.config.randomness == "same" and not any(is_mapped(a, level) for a in rest):
        rest = [lower_shared(a, level) for a in rest]
        if not is_mapped(x, level):
            func(lower_shared(x, level), *rest, **kwargs)
            return x
        target = get_writable_stack(level, func, x, [])
        one = target.new_empty(target.shape[1:])
        target.copy_(func(one, *rest, **kwargs))
        return x
    target = get_writable_stack(level, func, x, list(rest))
    if level.config.randomness == "same":  # bernoulli_(p) with a batched p
        drawn = torch.rand(target.shape[1:], device=target.device, **kwargs)
        target.copy_(drawn < _pad_rank(rest[0], target.dim() - 1, level))
    else:
        func(target, *[_pad_rank(a, target.dim() - 1, level) for a in rest], **kwargs)
    return x


def _pad_rank(a: Any, rank: int, level: Any) -> Any:
    """Pad the rank of a batched argument: (B, *P) -> (B, 1, .., *P), to broadcast to (B, *S)."""
    if not is_mapped(a, level):
        return lower_shared(a, level)
    return pad_rank(move_to_front(a), rank)


register_random(
    dict.fromkeys(
        (
            aten.uniform_.default,
            aten.normal_.default,
            aten.exponential_.default,
            aten.geometric_.default,
            aten.cauchy_.default,
            aten.log_normal_.default,
            aten.random_.default,
            aten.random_.to,
            getattr(aten.random_, "from"),
            aten.bernoulli_.float,
            aten.bernoulli_.Tensor,
        ),
        _draw_in_place,
    )
)


# --- new tensors ---------------------------------------------------------------------------------


def make_factory_rule(place: int) -> Callable:
    """Return the rule of a factory function whose argument number ``place`` is the size."""

    def rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        if level.config.randomness == "same":
            return wrap_stack(func(*args, **kwargs), None, level)
        args = (*args[:place], [level.size, *args[place]], *args[place + 1 :])
        return wrap_stack(func(*args, **kwargs), 0, level)

    return rule


def _draw_like(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw like x, whose shape, dtype and device alone are used."""
    x, *rest = args
    if any(is_mapped(a, level) for a in rest):  # randint_like(x, high) with a batched high
        raise make_randomness_error(level, func) from None
    value = expand_to_stack(x, level)
    if level.config.randomness == "same":
        one = value.new_empty(value.shape[1:])
        return wrap_stack(func(one, *rest, **kwargs), None, level)
    return wrap_stack(func(value, *rest, **kwargs), 0, level)


def _permutation(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    n, generator = args[0], kwargs.pop("generator", None)
    options = {"dtype": torch.int64, **{k: v for k, v in kwargs.items() if v is not None}}
    if level.config.randomness == "same":
        drawn = aten.randperm.generator(n, generator=generator, **options)
        return wrap_stack(drawn, None, level)
    # Ranks of doubles: two of them are equal too rarely to tell.
    keys = torch.rand(
        level.size, n, generator=generator, dtype=torch.float64, device=kwargs.get("device")
    )
    return wrap_stack(keys.argsort(1).to(options["dtype"]), 0, level)


register_random(
    {
        aten.rand.default: make_factory_rule(0),
        aten.rand.generator: make_factory_rule(0),
        aten.randn.default: make_factory_rule(0),
        aten.randn.generator: make_factory_rule(0),
        aten.randint.default: make_factory_rule(1),
        aten.randint.generator: make_factory_rule(1),
        aten.randint.low: make_factory_rule(2),
        aten.randint.low_generator: make_factory_rule(2),
        aten.normal.float_float: make_factory_rule(2),
        aten.randperm.default: _permutation,
        aten.randperm.generator: _permutation,
        **{
            getattr(packet, name): _draw_like
            for packet in (aten.rand_like, aten.randn_like, aten.randint_like)
            for name in packet.overloads()
            if "out" not in name and "Tensor" not in name
        },
    }
)


# --- with batched parameters ---------------------------------------------------------------------


def _normal(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return mean + std * z in the dtype of the mean, or of std if the mean is a number."""
    args = (*args, 1.0)[:2]  # the default of std
    given = [a for a in args if isinstance(a, Tensor)]
    shape = broadcast_shapes(*(a.shape for a in given))
    ours = any(is_mapped(a, level) for a in given)
    mean, std = (_pad_rank(a, len(shape), level) if isinstance(a, Tensor) else a for a in args)
    head = mean if isinstance(mean, Tensor) else std
    several = level.config.randomness == "different"
    z = head.new_empty([level.size, *shape] if several else shape).normal_(**kwargs)
    if ours and not several:
        z = z.expand(level.size, *shape)
    out = torch.add(torch.mul(z, std), mean).to(head.dtype)
    return wrap_stack(out, 0 if ours or several else None, level)


def _draw_per_example(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one example after another, each from the same state of the generator."""
    generator = rng_state.find_generator((*args, *kwargs.values()))
    start = generator.get_state()
    outs = []
    for i in range(level.size):
        generator.set_state(start)
        mine = [expand_to_stack(a, level)[i] if isinstance(a, Tensor) else a for a in args]
        outs.append(func(*mine, **kwargs))
    if isinstance(outs[0], tuple):
        return tuple(wrap_stack(torch.stack(o), 0, level) for o in zip(*outs, strict=True))
    return wrap_stack(torch.stack(outs), 0, level)


def make_distribution_rule(draw: Callable) -> Callable:
    """Return a rule made of ``draw(func, stacks, rest, kwargs)``, which draws for all examples."""

    def rule(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        rest = [a for a in args if not isinstance(a, Tensor)]
        mapped = any(is_mapped(a, level) for a in tensors)
        if level.config.randomness == "same" and not mapped:
            out = func(*[lower_shared(a, level) for a in args], **kwargs)
            return wrap_results(out, None, level)
        if level.config.randomness == "same" and level.size:
            return _draw_per_example(level, func, args, kwargs)
        rank = max(count_example_dims(a, level) for a in tensors)
        stacks = [expand_to_stack(a, level) for a in tensors]
        stacks = [pad_rank(v, rank) for v in stacks]
        return wrap_results(draw(func, stacks, rest, kwargs), 0, level)

    return rule


def _draw_pointwise(func: Any, stacks: list[Tensor], rest: list, kwargs: dict) -> Any:
    return func(*stacks, *rest, **kwargs)


def _multinomial(func: Any, stacks: list[Tensor], rest: list, kwargs: dict) -> Tensor:
    (p,) = stacks
    n = rest[0] if rest else kwargs["num_samples"]
    if p.numel() == 0:
        return p.new_empty((*p.shape[:-1], n), dtype=torch.int64)
    return func(p.reshape(-1, p.shape[-1]), *rest, **kwargs).reshape(*p.shape[:-1], n)


def _dropout(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return (x * mask / (1 - p), mask). Evaluation mode draws nothing."""
    x, p, train = args
    if train is False or p == 0:
        with reenter_level(level):
            return aten.clone.default(x), aten.ones_like.default(x, dtype=torch.bool)
    if level.config.randomness == "error":
        raise make_randomness_error(level, func)
    if level.config.randomness == "same":
        value = expand_to_stack(x, level)
        mask = value.new_empty(value.shape[1:], dtype=torch.bool).bernoulli_(1 - p)
        mask = mask.expand(value.shape)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return wrap_stack(value * mask * scale, 0, level), wrap_stack(mask, 0, level)
    return wrap_results(func(expand_to_stack(x, level), p, train), 0, level)


def _rrelu(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run rrelu, which keeps the drawn slope of each negative entry. Evaluation draws nothing."""
    x, noise, lower_, upper, training, *_ = (*args, *(0.125, 1 / 3, False)[len(args) - 2 :])
    given = {"generator": args[5]} if len(args) > 5 else kwargs
    in_place = func is aten.rrelu_with_noise_.default
    with reenter_level(level):
        if not training:
            slope = (lower_ + upper) / 2
            out = aten.leaky_relu.default(x, slope)
        else:
            if level.config.randomness == "error":
                raise make_randomness_error(level, func)
            drawn = aten.uniform_.default(aten.empty_like.default(noise), lower_, upper, **given)
            slopes = torch.where(x <= 0, drawn, 1.0)
            aten.copy_.default(noise, slopes)
            out = aten.mul.Tensor(x, slopes)
        return aten.copy_.default(x, out) if in_place else out


_MAYBE = {
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu,
}
register_rows(_MAYBE)
SHARED.update(_MAYBE)
register_random(
    {
        aten.normal.Tensor_float: _normal,
        aten.normal.float_Tensor: _normal,
        aten.normal.Tensor_Tensor: _normal,
        aten.poisson.default: make_distribution_rule(_draw_pointwise),
        aten.binomial.default: make_distribution_rule(_draw_pointwise),
        aten._standard_gamma.default: make_distribution_rule(_draw_pointwise),
        aten._sample_dirichlet.default: make_distribution_rule(_draw_pointwise),
        aten.multinomial.default: make_distribution_rule(_multinomial),
    }
)


# --- decompositions ----------------------------------------------------------------------------


def _run_decomposition(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run torch's own decomposition, an in-place draw into a new buffer."""
    with reenter_level(level):
        return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _bernoulli(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Draw with x as the probabilities, or in the shape of x with one p."""
    x, *p = args
    with reenter_level(level):
        return aten.bernoulli_(aten.empty_like.default(x), *(p or [x]), **kwargs)


register_random(
    {
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.Tensor: _bernoulli,
        aten.bernoulli.p: _bernoulli,
        **dict.fromkeys(
            (
                aten.uniform.default,
                aten.exponential.default,
                aten.geometric.default,
                aten.cauchy.default,
                aten.log_normal.default,
                aten.random.default,
                aten.random.to,
                getattr(aten.random, "from"),
                aten.normal_functional.default,
            ),
            _run_decomposition,
        ),
    }
)


# --- operators of other files that have dropout ------------------------------------------------


def make_dropout_handler(handler: Callable) -> Callable:
    """Return a handler that obeys ``randomness`` if the operator's dropout probability is not 0."""

    def handle(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        ours = any(is_mapped(a, level) for a in (*args, *kwargs.values()))
        if torch_ops.probability(func, args, kwargs):
            if level.config.randomness == "error":
                raise make_randomness_error(level, func)
            if level.config.randomness == "same" and ours:
                return _draw_per_example(level, func, args, kwargs)
            if level.config.randomness == "different" and not ours:
                first, *rest = args
                return handler(
                    level,
                    func,
                    (wrap_stack(expand_to_stack(first, level), 0, level), *rest),
                    kwargs,
                )
        if ours:
            return handler(level, func, args, kwargs)
        kwargs = {k: lower_shared(a, level) for k, a in kwargs.items()}
        return wrap_results(func(*[lower_shared(a, level) for a in args], **kwargs), None, level)

    return handle


def make_keyed_handler(handler: Callable) -> Callable:
    """Return a handler that draws with the key of the level's scope if there is one.

    The scope's draw is made of ordinary operators on examples, which the level batches. If no scope
    is running while the level is, a value is being recomputed that was drawn without a scope.
    """

    def handle(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        scope = level.state.scope
        if (
            scope is None
            or (level.active and scopes.running is None)
            or not torch_ops.has_draws(func, args, kwargs)
        ):
            rng_state.record_draw((*args, *kwargs.values()))
            return handler(level, func, args, kwargs)
        with reenter_level(level):
            return scope.draw(func, args, kwargs)

    return handle


for _op, _handler in list(HANDLERS.items()):  # the rules of other files, registered before
    # reads tags alone: `facts` would parse the schema of every operator at import
    if isinstance(_op, OpOverload) and torch.Tag.nondeterministic_seeded in _op.tags:
        if _op not in SHARED:
            SHARED[_op] = make_dropout_handler(_handler)
        SHARED[_op] = HANDLERS[_op] = make_keyed_handler(SHARED[_op])

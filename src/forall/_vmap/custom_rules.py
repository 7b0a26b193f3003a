"""Rules for operators of other libraries: the functions of `forall.extend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import custom_op, pytree
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts
from forall._core.errors import format_columns, format_short, type_name_of
from forall._vmap import registry
from forall._vmap.fast_path import api_calls
from forall._vmap.rule_makers import basic
from forall._vmap.rule_makers.along_dims import make_dim_handler
from forall._vmap.rule_makers.pointwise import handle_pointwise

if TYPE_CHECKING:
    from collections.abc import Callable


def batching_rule(op: Any, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Register what an operator does to all examples at once: a decorator.

    The law: for an operator ``op: (*S) -> (*R)``, ``rule(B, mapped, xs)`` equals
    ``torch.stack([op(x) for x in xs])``. `forall.testing.check_vmap` tests it.

    A rule is called as ``rule(size, mapped, *args, **kwargs)`` with the operator's own arguments
    and returns what the operator returns. The names in ``mapped`` (a frozenset, names as in the
    operator's schema) differ between the examples: these come as stacks ``(size, *S)``, examples in
    front. Other tensors come as they are, once for all examples. In a list of tensors of which
    one differs, all are stacks. Every tensor of the result has the examples in front.

    A rule runs below autograd: derivatives are taken of the operator, by its own formula.
    It may call any operator of torch, ``op`` itself too, and it is called with ``size`` at least 1.

    Args:
        op: an operator (``torch.ops.mylib.foo.default``), all overloads of one
            (``torch.ops.mylib.foo``), or what ``torch.library.custom_op`` made.
        override: take the place of a rule that is there.

    Raises:
        TypeError: if ``op`` is no operator.
        ValueError: if it has a rule already, or writes into its arguments. In-place and out=
            forms need no rule: they are derived from the form that returns a new tensor.

    Example:
        >>> import torch, forall
        >>> @torch.library.custom_op("forall_doc::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:      # (n,), () -> (n,)
        ...     return x * by
        >>> @batching_rule(scaled)
        ... def rule(size, mapped, x, by):
        ...     if "by" in mapped and "x" in mapped:
        ...         by = by[:, None]                                            # (B, 1)
        ...     return x * by if "x" in mapped else torch.outer(by, x)          # (B, n)
        >>> forall.vmap(scaled, in_dims=(None, 0))(torch.ones(2), torch.arange(3.0))
        tensor([[0., 0.],
                [1., 1.],
                [2., 2.]])
    """
    ops = _find_functional_overloads("batching_rule", (op,))

    def register(rule: Callable) -> Callable:
        _enter_handlers("batching_rule", {o: _make_named_handler(o, rule) for o in ops}, override)
        return rule

    return register


def pointwise(*ops: Any, override: bool = False) -> None:
    """Declare operators that work entry by entry, and whose arguments broadcast as torch's do.

    The law: entry i of a result depends on entry i of each argument alone.
    """
    _enter_handlers(
        "pointwise",
        dict.fromkeys(_find_functional_overloads("pointwise", ops), handle_pointwise),
        override,
    )


def reduction(*ops: Any, override: bool = False) -> None:
    """Declare operators that reduce: ``op(x, dim, ..)``, with one int or a list of them as ``dim``.

    The law: ``(*S) -> (*S without dim)``, or with ``keepdim`` each reduced dim stays with size 1.
    """
    found = _find_functional_overloads("reduction", ops)
    for o in found:
        if "dim" not in get_facts(o).names:
            raise documented_error(ValueError, "operator-rule")(
                f"reduction({o}): the operator has no argument called dim.\n"
                f"{format_columns([('schema', str(o._schema))])}\n"
                "Write a rule for it with batching_rule."
            )
    _enter_handlers("reduction", {o: make_dim_handler(o) for o in found}, override)


def loop(*ops: Any, override: bool = False) -> None:
    """Declare operators that run once per example, without a warning."""
    _enter_handlers(
        "loop",
        dict.fromkeys(_find_functional_overloads("loop", ops), basic.loop_and_stack),
        override,
    )


def _find_op_overloads(verb: str, op: Any) -> list:
    """All overloads that ``op`` names; of several, those that write nothing."""
    found = custom_op.find_overloads(op)
    if found is None:
        rows = [("op", format_short(op), type_name_of(op))]
        raise documented_error(TypeError, "operator-rule")(
            f"{verb}(op): op must be an operator.\n{format_columns(rows)}\n"
            "Pass torch.ops.<library>.<name>.<overload>, or what torch.library.custom_op made."
        )
    return found if len(found) == 1 else [o for o in found if not get_facts(o).mutates]


def _find_functional_overloads(verb: str, ops: tuple) -> list:
    found = [o for op in ops for o in _find_op_overloads(verb, op)]
    for o in found:
        if get_facts(o).mutates:
            raise documented_error(ValueError, "operator-rule")(
                f"{verb}({o}): the operator writes into its arguments.\n"
                f"{format_columns([('schema', str(o._schema))])}\n"
                "Give a rule to the form that returns a new tensor; this one is derived from it."
            )
    return found


def _enter_handlers(verb: str, handlers: dict[Any, Callable], override: bool) -> None:
    for op in handlers:
        if registry.WAYS.get(op) == "row" and not override:
            raise documented_error(ValueError, "operator-rule")(
                f"{verb}({op}): the operator has a rule already.\n"
                "An operator has one rule. Pass override=True to take its place."
            )
    for op, handler in handlers.items():
        registry.HANDLERS[op] = handler
        registry.WAYS[op] = "row"
        api_calls.leave_to_own_rule(op)


def _make_named_handler(op: Any, rule: Callable) -> Callable:
    names = get_facts(op).names

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        given = (*zip(names, args, strict=False), *kwargs.items())
        mapped = frozenset(name for name, a in given if _is_any_mapped(a, level))
        size = level.size or 1  # without examples a rule gets one blank example
        out = rule(
            size,
            mapped,
            *[_to_stacks(a, level) for a in args],
            **{k: _to_stacks(a, level) for k, a in kwargs.items()},
        )
        _check_results(op, out, size)
        return basic.wrap_results(out if level.size else basic.drop_examples(out), 0, level)

    return handler


def _is_any_mapped(a: Any, level: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return any(basic.is_mapped(b, level) for b in a)
    return basic.is_mapped(a, level)


def _to_stacks(a: Any, level: Any) -> Any:
    """(B, *S) for what differs, all of a list if one of it does; the rest as it is."""
    if not _is_any_mapped(a, level):
        return basic.lower_shared(a, level)
    if isinstance(a, (list, tuple)):
        return [_to_stack(b, level) for b in a]
    return _to_stack(a, level)


def _to_stack(a: Any, level: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    if level.size:
        return basic.expand_to_stack(a, level)
    return (
        basic.make_blank_example(a)
        if basic.is_mapped(a, level)
        else basic.lower_shared(a, level)[None]
    )


def _check_results(op: Any, out: Any, size: int) -> None:
    for o in pytree.get_leaves(out):
        if isinstance(o, torch.Tensor) and (o.dim() == 0 or o.shape[0] != size):
            raise documented_error(ValueError, "operator-rule")(
                f"batching_rule({op}): a result does not have the examples in front.\n"
                f"{format_columns([('result', format_short(o)), ('examples', str(size))])}\n"
                "Return (size, *S); expand what is the same for all examples."
            )


def make_torch_handler(op: Any, otherwise: Callable) -> Callable:
    """The rule that ``torch.library.register_vmap`` was given, in torch's own convention."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        rule = custom_op.get_vmap_rule(op)
        if rule is None or not level.size:
            return otherwise(level, func, args, kwargs)
        info = custom_op.OpVmapInfo(level.size, level.config.randomness)
        dims = tuple(_get_batch_dims(a, level) for a in args)
        out, places = rule(
            info,
            dims,
            *[_get_values(a, level) for a in args],
            **{k: _get_values(a, level) for k, a in kwargs.items()},
        )
        leaves, spec = pytree.flatten(out)
        found = pytree.broadcast_prefix(places, spec)
        if found is None:
            rows = [("result", pytree.format_tree(spec)), ("out_dims", format_short(places))]
            raise documented_error(ValueError, "operator-rule")(
                f"vmap: the rule that torch.library.register_vmap has for {func} is at fault.\n"
                f"{format_columns(rows)}\n"
                "It returns (result, out_dims), with one int or None per result."
            )
        left = [basic.wrap_results(o, p, level) for o, p in zip(leaves, found, strict=True)]
        return pytree.unflatten(left, spec)

    return handler


def _get_batch_dims(a: Any, level: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return [_get_batch_dims(b, level) for b in a]
    return a.axis if basic.is_mapped(a, level) else None


def _get_values(a: Any, level: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return [_get_values(b, level) for b in a]
    return a.value if basic.is_mapped(a, level) else basic.lower_shared(a, level)

"""Modules as functions of their parameters and buffers, which may be stacks over many modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import functorch_interop
from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short, type_name_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def functional_call(
    module: torch.nn.Module,
    parameter_and_buffer_dicts: dict[str, torch.Tensor] | Sequence[dict[str, torch.Tensor]],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """``module(*args, **kwargs)`` with these parameters and buffers in the place of its own.

    Afterwards the module has its own again, also those of a submodule that stands in two places:
    there torch.func leaves what it was given. What the module writes into its buffers (running
    statistics) is written into those given; one that it replaces is replaced in the dict.

    Cost: that of the call, and a look at each submodule.

    Args:
        module: any module but a scripted one.
        parameter_and_buffer_dicts: tensors by name, or several dicts of them without a common name.
            What has no name here stays the module's own.
        args: a tuple of arguments, or the only one.
        kwargs: arguments by name.
        tie_weights: a parameter with two names, of which one is given, is replaced under both.
        strict: raise where a name is missing, or is none of the module's.

    Raises:
        ValueError: for what is no dict, for a name in two dicts, and for two values of one tied
            parameter.
        RuntimeError: for scripted modules, and where ``strict`` finds other names.

    Source: torch.func.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> given = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
        >>> functional_call(model, given, torch.tensor([1.0, 2.0]))
        tensor([3.])
    """
    given = module, parameter_and_buffer_dicts, args, kwargs
    if torch.compiler.is_dynamo_compiling():
        return functorch_interop.call_torch_func(
            "functional_call", *given, tie_weights=tie_weights, strict=strict
        )
    _check_module(module, parameter_and_buffer_dicts)
    own = _save_slots(module)
    try:
        return functorch_interop.call_torch_func(
            "functional_call", *given, tie_weights=tie_weights, strict=strict
        )
    finally:
        for slots, tensors in own:
            slots.update(tensors)


def _check_module(module: Any, given: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise documented_error(TypeError, "functional-call")(
            "functional_call(module, parameters, args): the first argument must be a module.\n"
            f"{format_columns([('module', format_short(module), type_name_of(module))])}\n"
            "The module comes first, then the dict of its parameters, then the arguments."
        )
    dicts = given if isinstance(given, (list, tuple)) else [given]
    for d in dicts:
        if not isinstance(d, dict):
            raise documented_error(ValueError, "functional-call")(
                "functional_call(module, parameters, args): parameters are given by name, in a "
                "dict.\n"
                f"{format_columns([('parameters', format_short(d), type_name_of(d))])}\n"
                "Make it one: {name: p.detach() for name, p in module.named_parameters()}."
            )


def _save_slots(module: torch.nn.Module) -> list[tuple[dict, dict]]:
    """Return the dicts in which torch may leave the given tensors, with their present entries.

    They belong to submodules that have more than one name, and to recurrent ones, which keep a list
    of their weights.
    """
    seen: set[torch.nn.Module] = set()
    twice: dict[torch.nn.Module, None] = {}
    left = [module]
    while left:
        m = left.pop()
        if m in seen:
            twice.update(dict.fromkeys(m.modules()))
        else:
            seen.add(m)
            left += [child for child in m._modules.values() if child is not None]
    own = [(slots, {**slots}) for m in twice for slots in (m._parameters, m._buffers)]
    lists = [vars(m) for m in seen if isinstance(m, torch.nn.RNNBase)]
    return own + [(slots, {n: slots[n] for n in _LISTS if n in slots}) for slots in lists]


_LISTS = ("_flat_weights", "_flat_weight_refs")  # of a recurrent layer's weights


def stack_module_state(
    models: Sequence[torch.nn.Module] | torch.nn.ModuleList, *, detach: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of several modules of one kind, stacked by name.

    For a parameter of shape ``(*S)`` in each of B modules the stack has shape ``(B, *S)``: map it
    along dim 0 to run all modules at once.

    Cost: one copy of every parameter and buffer.

    Args:
        models: modules of the same class, all in training mode or none.
        detach: True makes the stacks new leaves, unrelated to the modules, to be handed to an
            optimizer; this is what torch.func does. False keeps them a function of the modules'
            own parameters: gradients reach the modules, ``p.grad`` of each parameter with
            ``.backward()``, and transforms around differentiate through the stacking.

    Raises:
        RuntimeError: for no modules, and where class, mode, names or ``requires_grad`` differ.

    Source: torch.func.

    Example:
        >>> models = [torch.nn.Linear(2, 3) for _ in range(4)]
        >>> params, buffers = forall.stack_module_state(models, detach=False)
        >>> params["weight"].shape
        torch.Size([4, 3, 2])
        >>> def f(p, x):                               # one module: (2,) -> (3,)
        ...     return forall.functional_call(models[0], p, (x,))
        >>> forall.vmap(f, in_dims=(0, None))(params, torch.ones(2)).sum().backward()
        >>> models[3].weight.grad                      # d sum / d weight[o, i] = x[i]
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """
    if detach and torch.compiler.is_dynamo_compiling():
        return functorch_interop.call_torch_func("stack_module_state", models)
    models = _check_models(models)
    parameters = _check_by_name([dict(m.named_parameters()) for m in models])
    buffers = _check_by_name([dict(m.named_buffers()) for m in models])
    if detach:
        return functorch_interop.call_torch_func("stack_module_state", models)
    return _stack_by_name(parameters), _stack_by_name(buffers)


def _check_models(models: Any) -> list[torch.nn.Module]:
    given = [*models] if isinstance(models, Iterable) else [models]
    if not given:
        raise documented_error(RuntimeError, "stack-modules")(
            "stack_module_state(models): there is no module to stack.\nPass at least one."
        )
    if given == [models] or not all(isinstance(m, torch.nn.Module) for m in given):
        rows = [("models", format_short(models), type_name_of(models))]
        raise documented_error(TypeError, "stack-modules")(
            f"stack_module_state(models): models must be several modules.\n{format_columns(rows)}\n"
            "Pass a list of them."
        )
    _check_alike("class", [type(m).__name__ for m in given], [type(m) for m in given])
    _check_alike("mode", ["training" if m.training else "evaluation" for m in given])
    return given


def _check_by_name(tensors: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    _check_alike("names", [", ".join(t) for t in tensors])
    for name in tensors[0]:
        _check_alike(f"shape of {name}", [str([*t[name].shape]) for t in tensors])
        _check_alike(f"requires_grad of {name}", [str(t[name].requires_grad) for t in tensors])
    return tensors


def _stack_by_name(tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([t[name] for t in tensors]) for name in tensors[0]}


def _check_alike(what: str, shown: list[str], values: list | None = None) -> None:
    values = values or shown
    for i, value in enumerate(values):
        if value != values[0]:
            rows = [("models[0]", shown[0]), (f"models[{i}]", shown[i])]
            raise documented_error(RuntimeError, "stack-modules")(
                f"stack_module_state(models): the modules differ in {what}.\n"
                f"{format_columns(rows)}\n"
                "Only modules that differ in their values alone can run as one."
            )

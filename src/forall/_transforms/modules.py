"""`stack_module_state`: the parameters and buffers of many modules as stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import columns
from forall._torch import handover

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    if detach:
        return handover.call("stack_module_state", models)
    if not len(models):
        raise RuntimeError(
            "stack_module_state(models): there is no module to stack.\nPass at least one."
        )
    _alike("class", [type(m).__name__ for m in models], [type(m) for m in models])
    _alike("mode", ["training" if m.training else "evaluation" for m in models])
    return (
        _stacks([dict(m.named_parameters()) for m in models]),
        _stacks([dict(m.named_buffers()) for m in models]),
    )


def _stacks(tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    _alike("names", [", ".join(t) for t in tensors])
    for name in tensors[0]:
        _alike(f"requires_grad of {name}", [str(t[name].requires_grad) for t in tensors])
    return {name: torch.stack([t[name] for t in tensors]) for name in tensors[0]}


def _alike(what: str, shown: list[str], values: list | None = None) -> None:
    values = values or shown
    for i, value in enumerate(values):
        if value != values[0]:
            rows = [("models[0]", shown[0]), (f"models[{i}]", shown[i])]
            raise RuntimeError(
                f"stack_module_state(models): the modules differ in {what}.\n{columns(rows)}\n"
                "Only modules that differ in their values alone can run as one."
            )

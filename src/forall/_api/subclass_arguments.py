"""Arguments and results of `vmap` that are of the user's own tensor classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.tensor_subclass import (
    can_be_posed,
    convert_to_class,
    get_users_attributes,
    get_users_class,
    has_own_torch_function,
    is_of_users_class,
    only_preserves_class,
    unwrap_posed,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import format_columns, format_short
from forall._vmap import boundary

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._core.errors import TransformCall


class ExampleAttributes(NamedTuple):
    """The class and the attributes of each example of a mapped argument."""

    kind: type
    shared: dict[str, Any]  # attributes that are the same for all examples
    apiece: dict[str, torch.Tensor]  # per-example tensors, stacked along 0

    def select_attributes(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> ExampleAttributes:
        """Return the attributes of some of the examples; ``pick`` selects from stacks along 0."""
        return self._replace(apiece={k: pick(t) for k, t in self.apiece.items()})

    def put_on_example(self, example: Any, level: Any) -> Any:
        """Give a fresh example this class and these attributes."""
        if can_be_posed(self.kind):
            example = convert_to_class(example, self.kind)
        own = {k: boundary.stack_to_example(t, 0, level) for k, t in self.apiece.items()}
        if self.shared or own:
            example.__dict__.update(self.shared | own)
        return example


def find_example_attributes(
    call: TransformCall, leaf: Any, dim: int, size: int
) -> ExampleAttributes:
    """Return the attributes of the examples that the loop takes from an argument by ``select``."""
    if not size:
        return ExampleAttributes(get_users_class(leaf), {}, {})
    first = leaf.select(dim, 0)
    kind, own = get_users_class(first), dict(get_users_attributes(first))
    if not has_own_torch_function(kind) or only_preserves_class(kind):
        return ExampleAttributes(kind, own, {})
    others = range(1, size) if own else range(size - 1, size)
    found_by_name = {k: [v] for k, v in own.items()}
    for i in others:
        other = leaf.select(dim, i)
        found = get_users_attributes(other)
        if get_users_class(other) is not kind or found.keys() != own.keys():
            raise _make_difference_error(
                call, leaf, [(0, kind, own), (i, get_users_class(other), found)]
            )
        for k, v in found.items():
            found_by_name[k].append(v)
    apiece = {}
    for k, column in found_by_name.items():
        number = next((i for i, v in enumerate(column) if not _is_same(v, column[0])), None)
        if number is None:
            continue
        if not _can_be_stacked(column):
            values = [(i, kind, {k: column[i]}) for i in (0, number)]
            raise _make_difference_error(call, leaf, values)
        apiece[k] = torch.stack(column)
        del own[k]
    return ExampleAttributes(kind, own, apiece)


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - an object may answer with anything, and then is not equal
        return False


def _can_be_stacked(column: list) -> bool:
    first = column[0]
    return all(
        isinstance(v, torch.Tensor)
        and not is_of_users_class(v)
        and (v.shape, v.dtype, v.device) == (first.shape, first.dtype, first.device)
        for v in column
    )


def _make_difference_error(
    call: TransformCall, leaf: Any, seen: list[tuple[int, type, dict]]
) -> ValueError:
    rows = [
        (
            f"example {i}",
            kind.__name__,
            ", ".join(f".{k} = {format_short(v)}" for k, v in own.items()),
        )
        for i, kind, own in seen
    ]
    name = get_users_class(leaf).__name__
    return documented_error(ValueError, "tensor-subclass")(
        f"{call}: the examples of a tensor of class {name} differ in what "
        f"x.select(dim, i) hands on.\n{format_columns(rows)}\n"
        "Hand on a tensor for each example, or pass what differs as an argument of its own."
    )


def stack_by_class(known: Any, stack: torch.Tensor, place: int, level: Any) -> Any:
    """Return the stack of a result in the class that ``torch.stack`` gives in the loop.

    For a class with its own ``__torch_function__``, torch.stack is called with an entry per
    example.
    """
    kind = get_users_class(known)
    if not can_be_posed(kind) or not has_own_torch_function(kind):
        return stack
    if only_preserves_class(kind) or not level.size:
        return convert_to_class(stack, kind)
    own = {k: _index_attribute(v, level) for k, v in get_users_attributes(known).items()}
    rows = []
    for i in range(level.size):
        with functions_off():
            row = convert_to_class(stack.select(place, i), kind)
        row.__dict__.update({k: value(i) for k, value in own.items()})
        rows.append(row)
    return torch.stack(rows, place)


def _index_attribute(value: Any, level: Any) -> Callable[[int], Any]:
    """Return a function from an example's number to the value of an attribute."""
    of = unwrap_posed(value)
    if isinstance(of, Wrapper) and of.level.root is level:
        stack = stack_by_class(value, boundary.example_to_stack(of, 0, level), 0, level)
        return lambda i: stack.select(0, i)
    return lambda i: value

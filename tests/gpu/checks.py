"""What a check is, how one is judged, and the tools that all sections share."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import forall
from oracle import difference, loop

D = torch.float64

# From best to worst. "slow" is right, by a loop over the examples or by a call that was not
# recorded; "waits" is right, with a synchronisation that nothing asks for.
STATUSES = ("ok", "skipped", "not run", "slow", "waits", "error", "wrong", "crash")
FAILED = ("error", "wrong", "crash")


class Skipped(Exception):  # noqa: N818 - a status, and no error
    """This machine, or this release of torch, lacks what a check is about."""


class Waits(Exception):  # noqa: N818
    """The host waited for the device where nothing asks for it."""


class Slow(Exception):  # noqa: N818
    """What a check is about is right, but in a slow way."""


class Check(NamedTuple):
    """A name, and what raises AssertionError where a number is wrong.

    What it returns, if anything, is a text for the report. Where it ``may_be_slow``, that is no
    matter of the device.
    """

    name: str
    run: Callable[[], Any]
    may_be_slow: bool = False


@dataclass
class Result:
    section: str
    name: str
    status: str
    text: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(section: str, check: Check, device: torch.device) -> Result:
    """Run a check; whatever happens in it becomes its status."""
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        status, text = _outcome(check, device)
    slow = sorted({brief(w.message) for w in told if w.category is forall.PerformanceWarning})
    if status == "ok" and slow and not check.may_be_slow:
        status, text = "slow", "; ".join(slow)
    return Result(section, check.name, status, text, round(time.perf_counter() - started, 3))


def _outcome(check: Check, device: torch.device) -> tuple[str, str]:
    try:
        said = check.run()
        synchronise(device)  # an error of a kernel is raised late
    except Skipped as why:
        return "skipped", brief(why)
    except Waits as why:
        return "waits", brief(why)
    except Slow as why:
        return "slow", brief(why)
    except AssertionError as error:
        return "wrong", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {brief(error)}"
    return "ok", said if isinstance(said, str) else ""


def brief(message: object, width: int = 300) -> str:
    """The beginning of a message, in one line."""
    return " ".join(str(message).split())[:width]


# --- devices -------------------------------------------------------------------------------------


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def only_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("it is about CUDA")


@contextlib.contextmanager
def default_device(device: torch.device) -> Iterator[None]:
    """What is made without a device lies on this one, as after `torch.set_default_device`."""
    with torch.device(device):
        yield


def on(device: torch.device, tree: Any) -> Any:
    """The tree with its tensors there."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def numbers(
    device: torch.device, *shape: int, dtype: torch.dtype = D, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Normal numbers, the same on each device."""
    draws = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, dtype=D, generator=draws, device="cpu") * scale
    return made.to(dtype).to(device)


# --- what is compared ----------------------------------------------------------------------------


def assert_same(found: Any, truth: Any, what: str = "", working: torch.dtype | None = None) -> None:
    """Compare two trees in structure, shapes, dtypes, devices and values."""
    text = difference(found, truth, values=False) or _other_device(found, truth)
    text = text or difference(found, truth, working=working)
    assert text is None, f"{what}: {text}" if what else text


def _other_device(found: Any, truth: Any) -> str | None:
    for x, y in zip(tree_leaves(found), tree_leaves(truth), strict=True):
        if isinstance(y, Tensor) and x.device != y.device:
            return f"device: {x.device} instead of {y.device}"
    return None


def truth_of(run: Callable[[], Any]) -> Any:
    """What the plain program gives; a check that has none says nothing about forall."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Skipped(f"the plain program raises {type(error).__name__}: {brief(error)}") from error


def total(tree: Any) -> Tensor:
    """One number, to which each real entry of a tree gives another part."""
    leaves = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
    flat = torch.cat(
        [x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32)) for x in leaves]
    )
    return (
        flat * torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype, device=flat.device)
    ).sum()


def gradients(f: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of the total of ``f`` in all arguments, by torch's autograd."""

    def run(*xs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in xs]
        return torch.autograd.grad(total(f(*leaves)), leaves, materialize_grads=True)

    return run


def vmapped_and_differentiated(
    name: str, f: Callable[..., Any], *stacks: Tensor, working: torch.dtype | None = None
) -> list[Check]:
    """Checks that ``f`` of all examples, and its gradients, are the loop's."""
    places = tuple(range(len(stacks)))

    def values() -> None:
        truth = truth_of(lambda: loop(f)(*stacks))
        assert_same(forall.vmap(f)(*stacks), truth, working=working)

    def slopes() -> None:
        truth = truth_of(lambda: loop(gradients(f))(*stacks))
        found = forall.vmap(forall.grad(lambda *xs: total(f(*xs)), argnums=places))(*stacks)
        assert_same(found, truth, working=working)

    return [Check(f"vmap of {name}", values), Check(f"vmap of grad of {name}", slopes)]


# --- networks ------------------------------------------------------------------------------------


def perceptron(
    device: torch.device, width: int = 32, dtype: torch.dtype = D, inputs: int = 16
) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = nn.Sequential(
            nn.Linear(inputs, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 10),
        )
    return net.to(dtype).to(device)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def cross_entropy(module: nn.Module) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    """The loss of one example as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = forall.functional_call(module, params, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(out, y.unsqueeze(0))

    return loss


def gradients_of_weights(
    module: nn.Module, xs: Sequence[Tensor] | Tensor, value: Callable[[Any], Tensor] = total
) -> dict[str, Tensor]:
    """The gradients of ``value(module(x))`` in the parameters, one example after another."""
    names, leaves = zip(*module.named_parameters(), strict=True)
    rows = [torch.autograd.grad(value(module(x)), leaves) for x in xs]
    return {n: torch.stack(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}


def second_call_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """What the second call gives: of a function by `jit`, the one that is replayed."""

    def run(*args: Any) -> Any:
        f(*args)
        return f(*args)

    return run

"""A network as libraries write them, and a layer of experts.

Settings, registries, questions about torch's state, messages that hardly anybody gets: nothing of
this has a say in the gradients, and each of it is Python that runs with each call.
"""

import functools
import logging
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from registry import Contestants, contest, workload
from workloads.per_example import of_two_layers, per_example_gradients

logger = logging.getLogger(__name__)


@dataclass
class Settings:
    width: int = 64
    classes: int = 10
    activation: str = "gelu"
    told: bool = False


ACTIVATIONS = {"gelu": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu}


@functools.lru_cache
def scale(width: int) -> float:
    return width**-0.5


def is_traced() -> bool:
    import torch  # as what can be imported without it has to

    return torch.jit.is_tracing() or torch.compiler.is_compiling()


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.enter = nn.Linear(settings.width, settings.width)
        self.leave = nn.Linear(settings.width, settings.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self.settings, "told", False):
            logger.info("a batch of %s", tuple(x.shape))
            print("a batch")
        if x.shape[-1] != self.settings.width and not is_traced():
            warnings.warn("the width is another", stacklevel=2)
        hidden = ACTIVATIONS[self.settings.activation](self.enter(x) * scale(self.settings.width))
        return self.leave(hidden)


@workload("library-style", "per-example gradients of a layer in the style of libraries, batch 64")
def library_style(device: torch.device) -> Contestants:
    settings = Settings()
    model = Layer(settings).to(device)
    inputs = torch.randn(64, settings.width, device=device)
    labels = torch.randint(settings.classes, (64,), device=device)
    factor = scale(settings.width)

    def activation(x):
        return F.gelu(x * factor, approximate="tanh")

    by_hand = of_two_layers(model, activation, inputs, labels)
    return contest(lambda api: per_example_gradients(api, model, inputs, labels), by_hand)


@workload("experts", "per-example gradients of a layer of 8 experts (`grouped_mm`), 16 x 32 tokens")
def experts(device: torch.device) -> Contestants:
    count, width, tokens, examples = 8, 64, 32, 16
    weight = torch.randn(count, width, width, device=device) * width**-0.5
    inputs = torch.randn(examples, tokens, width, device=device)
    chosen = torch.randint(count, (examples, tokens), device=device)

    def ends_of(group, count):
        each = group.unsqueeze(1) == torch.arange(count, device=device)
        return each.sum(0).cumsum(0).to(torch.int32)

    def loss(weight, x, chosen):
        order, ends = chosen.argsort(), ends_of(chosen, count)
        return F.grouped_mm(x[order], weight, offs=ends).square().sum()

    def transformed(api):
        gradients = api.vmap(api.grad(loss), (None, 0, 0))
        return lambda: gradients(weight, inputs, chosen)

    def handwritten():
        # An expert's gradient is x^T 2 x w over its tokens: all examples' experts are groups.
        group = (chosen + count * torch.arange(examples, device=device).unsqueeze(1)).flatten()
        order = group.argsort()
        x = inputs.flatten(0, 1)[order]
        per_expert = chosen.flatten()[order].argsort()
        ends = ends_of(chosen.flatten(), count)
        out = torch.empty_like(x)
        out[per_expert] = F.grouped_mm(x[per_expert], weight, offs=ends)
        ends = ends_of(group, examples * count)
        return F.grouped_mm(x.t(), 2 * out, offs=ends).unflatten(0, (examples, count))

    return contest(transformed, handwritten)

"""Recurrent networks with one weight for all examples: they can be one batch."""

import torch
from torch import nn

from registry import DIVERGING, Contestants, contest, loop_contest, workload

EXAMPLES, OWN, LENGTH, WIDTH, HIDDEN = 64, 16, 20, 128, 256
LIMITS = {(0, 2): 1.3}


@workload(
    "gru-cell",
    f"`vmap` of `nn.GRUCell`, {EXAMPLES} examples of {OWN} rows, {WIDTH} to {HIDDEN}; by hand one "
    "call on all rows",
    limits=LIMITS,
)
def gru_cell(device: torch.device) -> Contestants:
    cell = nn.GRUCell(WIDTH, HIDDEN).to(device).requires_grad_(False)
    x = torch.randn(EXAMPLES, OWN, WIDTH, device=device)
    h = torch.randn(EXAMPLES, OWN, HIDDEN, device=device)

    def transformed(api):
        batched = api.vmap(cell)
        return lambda: batched(x, h)

    def handwritten():
        return cell(x.flatten(0, 1), h.flatten(0, 1)).unflatten(0, (EXAMPLES, OWN))

    return contest(transformed, handwritten)


def sequences(device: torch.device, recording: bool) -> Contestants:
    """An LSTM over one sequence per example; torch.func.vmap has no rule for it."""
    network = nn.LSTM(WIDTH, HIDDEN).to(device).requires_grad_(recording)
    x = torch.randn(EXAMPLES, LENGTH, WIDTH, device=device)

    def outputs(x: torch.Tensor) -> torch.Tensor:
        return network(x)[0].detach()

    def handwritten():
        return outputs(x.transpose(0, 1)).transpose(0, 1)

    return loop_contest(outputs, (x,), handwritten, chosen=range(8), tolerance=1e-4)


@workload(
    "lstm",
    f"`vmap` of `nn.LSTM` without a derivative, {EXAMPLES} sequences of length {LENGTH}, {WIDTH} "
    f"to {HIDDEN}; by hand one call on the batch",
    names=DIVERGING,
    limits=LIMITS,
)
def lstm(device: torch.device) -> Contestants:
    return sequences(device, recording=False)


@workload("lstm-recorded", "the same, recorded for a derivative", names=DIVERGING, limits=LIMITS)
def lstm_recorded(device: torch.device) -> Contestants:
    return sequences(device, recording=True)

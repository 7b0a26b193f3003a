"""The recurrent networks that are checked: what they are called, and their options."""

from __future__ import annotations

from typing import Any

from torch import nn

LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "lstm projected": (nn.LSTM, {"proj_size": 2}),
    "lstm of two layers both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru both ways, batch first": (
        nn.GRU,
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
    ),
    "rnn": (nn.RNN, {"num_layers": 2}),
    "rnn with relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}
CELLS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
    "rnn": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu", "bias": False}),
}

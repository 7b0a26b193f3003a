"""Recurrent layers and cells in ordinary operators, and their pull-backs.

Accelerators have one kernel for all steps of a layer (cuDNN), and one for a cell. These kernels
support neither vmap nor forward mode, and cuDNN's backward has no derivative. Ordinary operators
have all three.

A layer's input holds the rows of all steps, one step after another, as (S, I). ``sizes`` is the
number of rows of each step; it falls from step to step if sequences are packed.

Source: Hochreiter and Schmidhuber, "Long short-term memory" (1997); Cho et al., "Learning phrase
representations using RNN encoder-decoder for statistical machine translation" (2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Tensor = torch.Tensor
RELU, TANH, LSTM, GRU = range(4)  # as cuDNN numbers them


class Weights(NamedTuple):
    """The parameters of one layer in one direction; H' is the size of the projected state."""

    of_input: Tensor  # (G * H, I), with G gates
    of_hidden: Tensor  # (G * H, H')
    input_bias: Tensor | None  # (G * H,)
    hidden_bias: Tensor | None
    projection: Tensor | None  # (H', H)

    @classmethod
    def from_params(cls, params: Sequence[Tensor]) -> Weights:
        biases = [*params[2:4]] if len(params) > 3 else [None, None]
        return cls(*params[:2], *biases, params[-1] if len(params) % 2 else None)

    def select_present(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Return those of five gradients that belong to a parameter, in order."""
        return [g for g, w in zip(found, self, strict=True) if w is not None]


# --- one step -------------------------------------------------------------------------------------


def lstm_cell(x: Tensor, h: Tensor, c: Tensor, b: Any = None, d: Any = None) -> tuple:
    """Return h' and c', and the tensor that the kernel saves: the activated gates (N, 4H).

    ``x`` and ``h`` are the products of input and hidden state with their weights, ``b`` and ``d``
    are biases.
    """
    gates = x + h if b is None else x + b + (h + d)
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], -1)


def lstm_cell_backward(
    gh: Tensor | None, gc: Tensor | None, before: Tensor, c: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cotangents of the gates before their functions, and of the cell state before."""
    i, f, g, o = gates.chunk(4, -1)
    seen = c.tanh()
    if gh is not None:
        through = gh * o * (1 - seen * seen)
        gc = through if gc is None else gc + through
    by_output = torch.zeros_like(c) if gh is None else gh * seen
    gc = torch.zeros_like(c) if gc is None else gc
    parts = (gc * g * i * (1 - i), gc * before * f * (1 - f), gc * i * (1 - g * g))
    return torch.cat([*parts, by_output * o * (1 - o)], -1), gc * f


def gru_cell(x: Tensor, h: Tensor, hidden: Tensor, b: Any = None, d: Any = None) -> tuple:
    """Return h', and the tensor that the kernel saves (N, 5H): r, z, n, h and its part of n."""
    x, h = (x, h) if b is None else (x + b, h + d)
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], -1)


def gru_cell_backward(g: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cotangents of the input's and the hidden state's products, and of the state."""
    r, z, n, hidden, hn = kept.chunk(5, -1)
    gn = g * (1 - z) * (1 - n * n)
    gr, gz = gn * hn * r * (1 - r), g * (hidden - n) * z * (1 - z)
    return torch.cat([gr, gz, gn], -1), torch.cat([gr, gz, gn * r], -1), g * z


def _step(mode: int, x: Tensor, h: Tensor, hidden: Tensor, c: Any) -> tuple[Tensor, Any, Tensor]:
    """Return h', c' and the tensor that `_step_backward` reads."""
    if mode == LSTM:
        return lstm_cell(x, h, c)
    if mode == GRU:
        new, kept = gru_cell(x, h, hidden)
        return new, None, kept
    new = (x + h).tanh() if mode == TANH else (x + h).relu()
    return new, None, new


def _step_backward(mode: int, step: _Step, g: Tensor, gc: Any) -> tuple[Tensor, Tensor, Any, Any]:
    """Return the cotangents of the input's and the hidden state's products, then of the states."""
    if mode == LSTM:
        gates, gc = lstm_cell_backward(g, gc, step.cell_before, step.cell, step.kept)
        return gates, gates, None, gc
    if mode == GRU:
        return *gru_cell_backward(g, step.kept), None
    g = g * (1 - step.kept * step.kept) if mode == TANH else g * (step.kept > 0)
    return g, g, None, None


# --- one layer ------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """The values of a step that its pull-back reads."""

    place: int
    before: Tensor  # the hidden state
    cell_before: Any
    cell: Any
    kept: Tensor
    unprojected: Tensor


def _steps(
    x: Tensor, h: Tensor, c: Any, w: Weights, mode: int, sizes: Sequence[int], reverse: bool
) -> tuple[list[Tensor], Tensor, Any, list[_Step]]:
    given = linear(x, w.of_input, w.input_bias).split([*sizes])
    outs: list[Any] = [None] * len(sizes)
    steps = []
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        n = sizes[t]
        before, cell_before = _first_rows(h, n), None if c is None else _first_rows(c, n)
        by_hidden = linear(before, w.of_hidden, w.hidden_bias)
        new, cell, kept = _step(mode, given[t], by_hidden, before, cell_before)
        out = new if w.projection is None else linear(new, w.projection)
        outs[t] = out
        steps.append(_Step(t, before, cell_before, cell, kept, new))
        h = _replace_first_rows(out, h, n)
        c = None if c is None else _replace_first_rows(cell, c, n)
    return outs, h, c, steps


def _first_rows(h: Tensor, n: int) -> Tensor:
    return h if n == h.shape[0] else h[:n]


def _replace_first_rows(new: Tensor, h: Tensor, n: int) -> Tensor:
    """Return ``h`` with its first rows replaced by ``new``."""
    return new if n == h.shape[0] else torch.cat([new, h[n:]])


def _layer_backward(
    x: Tensor,
    h: Tensor,
    c: Any,
    w: Weights,
    mode: int,
    sizes: Sequence[int],
    reverse: bool,
    *gs: Any,
) -> tuple[Tensor, Tensor, Any, list[Tensor]]:
    """Return the cotangents of rows, states and parameters; each parameter's by one product."""
    *_, steps = _steps(x, h, c, w, mode, sizes, reverse)
    gy, gh, gc = gs
    gy = gy.split([*sizes])
    columns: list[list[Any]] = [[None] * len(sizes) for _ in range(5)]
    by_input, by_hidden, before, projected, unprojected = columns
    for step in reversed(steps):
        t, n = step.place, sizes[step.place]
        g = gy[t] + _first_rows(gh, n)
        projected[t], unprojected[t], before[t] = g, step.unprojected, step.before
        if w.projection is not None:
            g = g @ w.projection
        found = _step_backward(mode, step, g, None if gc is None else _first_rows(gc, n))
        by_input[t], by_hidden[t], direct, by_cell = found
        back = by_hidden[t] @ w.of_hidden
        gh = _replace_first_rows(back if direct is None else back + direct, gh, n)
        gc = None if gc is None else _replace_first_rows(by_cell, gc, n)
    rows, hidden = torch.cat(by_input), torch.cat(by_hidden)
    found = [rows.mT @ x, hidden.mT @ torch.cat(before), rows.sum(0), hidden.sum(0), None]
    if w.projection is not None:
        found[4] = torch.cat(projected).mT @ torch.cat(unprojected)
    return rows @ w.of_input, gh, gc, w.select_present(found)


# --- layers ---------------------------------------------------------------------------------------


class Layers(NamedTuple):
    """Several layers, and the layout of their input."""

    mode: int
    count: int
    directions: int
    batch_first: bool
    sizes: Sequence[int] = ()  # of the steps of packed sequences; the input is (S, I) there

    def rows(self, x: Tensor) -> tuple[Tensor, list[int]]:
        """Return an input or output as the rows of all steps, and how many each step has."""
        if self.sizes:
            return x, [*self.sizes]
        x = x.transpose(0, 1) if self.batch_first else x
        return x.flatten(0, 1), [x.shape[1]] * x.shape[0]

    def whole(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return rows of all steps in the layout of the output."""
        if self.sizes:
            return rows
        x = rows.unflatten(0, (len(sizes), -1))
        return x.transpose(0, 1) if self.batch_first else x

    def parts(self, params: Sequence[Tensor]) -> list[Weights]:
        each = len(params) // (self.count * self.directions)
        return [Weights.from_params(params[i : i + each]) for i in range(0, len(params), each)]

    def __call__(
        self,
        x: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        params: Sequence[Tensor],
        drop: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output and the states at the end; ``drop`` runs between two layers."""
        outs, hs, cs, sizes, _ = self._run(x, hx, cx, params, drop)
        return self.whole(outs, sizes), torch.stack(hs), None if cx is None else torch.stack(cs)

    def _run(self, x: Tensor, hx: Tensor, cx: Any, params: Any, drop: Any = None) -> tuple:
        weights = self.parts(params)
        rows, sizes = self.rows(x)
        hs, cs, given = [], [], []
        for layer in range(self.count):
            rows = drop(rows) if drop is not None and layer else rows
            given.append(rows)
            both = []
            for reverse in range(self.directions):
                k = layer * self.directions + reverse
                c = None if cx is None else cx[k]
                out, h, c, _ = _steps(rows, hx[k], c, weights[k], self.mode, sizes, reverse == 1)
                both.append(torch.cat(out))
                hs.append(h)
                cs.append(c)
            rows = _concat_directions(both)
        return rows, hs, cs, sizes, given

    def backward(
        self,
        x: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        params: Sequence[Tensor],
        gy: Tensor | None,
        gh: Tensor | None,
        gc: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Return the cotangents of the input, of the states and of the parameters."""
        weights = self.parts(params)
        rows, _, _, sizes, given = self._run(x, hx, cx, params)
        by_rows = torch.zeros_like(rows) if gy is None else self.rows(gy)[0]
        gh = torch.zeros_like(hx) if gh is None else gh
        by_cells: Any = None
        if cx is not None:
            by_cells = torch.zeros_like(cx) if gc is None else gc
        hs, cs = [None] * len(weights), [None] * len(weights)
        by_params: list[list[Tensor]] = [[] for _ in weights]
        for layer in reversed(range(self.count)):
            both = []
            for reverse, g in enumerate(by_rows.chunk(self.directions, -1)):
                k = layer * self.directions + reverse
                states = (hx[k], None if cx is None else cx[k])
                gs = (g, gh[k], None if cx is None else by_cells[k])
                how = (weights[k], self.mode, sizes, reverse == 1)
                found = _layer_backward(given[layer], *states, *how, *gs)
                by_input, hs[k], cs[k], by_params[k] = found
                both.append(by_input)
            by_rows = _add_all(both)
        states = torch.stack(hs), None if cx is None else torch.stack(cs)
        return self.whole(by_rows, sizes), *states, [g for part in by_params for g in part]


def _concat_directions(both: list[Tensor]) -> Tensor:
    return torch.cat(both, -1) if len(both) > 1 else both[0]


def _add_all(both: Iterable[Tensor]) -> Tensor:
    first, *rest = both
    for other in rest:
        first = first + other
    return first


# --- the operators ----------------------------------------------------------------------------


def _make_layers(mode: int, count: int, batch_first: bool, both_ways: bool, sizes: Any) -> Layers:
    return Layers(mode, count, 2 if both_ways else 1, batch_first, [*sizes])


def drops_out(count: int, dropout: float, train: bool) -> bool:
    """Return True if a kernel for several layers draws random numbers between them."""
    return train and dropout > 0 and count > 1


def refuse_dropout(count: int, dropout: float, train: bool) -> None:
    """Raise if a kernel has drawn random numbers that no other operator can reproduce."""
    if drops_out(count, dropout, train):
        raise documented_error(NotImplementedError, "no-keyed-draw")(
            "cuDNN's recurrent layers draw their dropout in the kernel, so there is no such "
            f"derivative of them.\n    dropout   {dropout}, between {count} layers\n"
            "Switch cuDNN off around the call (torch.backends.cudnn.flags(enabled=False)), or use "
            "module.eval()."
        )


def cudnn_rnn(
    x, params, stride, buffer, hx, cx, mode, hidden, projected, count, batch_first, dropout, train,
    both_ways, sizes, state,
):  # fmt: skip
    """Return the output and states of ``aten._cudnn_rnn``."""
    refuse_dropout(count, dropout, train)
    out, h, c = _make_layers(mode, count, batch_first, both_ways, sizes)(x, hx, cx, params)
    return out, h, h.new_zeros(0) if c is None else c


def cudnn_rnn_backward(
    x, params, stride, buffer, hx, cx, out, gy, gh, gc, mode, hidden, projected, count, batch_first,
    dropout, train, both_ways, sizes, state, reserve, mask,
):  # fmt: skip
    """Return the cotangents that ``aten._cudnn_rnn_backward`` gives."""
    refuse_dropout(count, dropout, train)
    layers = _make_layers(mode, count, batch_first, both_ways, sizes)
    gx, gh, gc, by_params = layers.backward(x, hx, cx, params, gy, gh, gc if mode == LSTM else None)
    found = [gx, gh, gc]
    return *[g if asked else None for g, asked in zip(found, mask, strict=False)], by_params


def fused_lstm_cell_backward(gh, gc, before, c, gates, has_bias):
    """Return the cotangents that ``aten._thnn_fused_lstm_cell_backward_impl`` gives."""
    by_gates, by_cell = lstm_cell_backward(gh, gc, before, c, gates)
    return by_gates, by_cell, by_gates.sum(0) if has_bias else None


def fused_gru_cell_backward(g, kept, has_bias):
    """Return the cotangents that ``aten._thnn_fused_gru_cell_backward`` gives."""
    x, h, hidden = gru_cell_backward(g, kept)
    return x, h, hidden, *((x.sum(0), h.sum(0)) if has_bias else (None, None))

"""Acceptance functions: writes in place, optimizers, autograd inside, random draws, outputs."""

from __future__ import annotations

import torch

import forall
from divergence.cases import array, case, integers, positive, scalars

D = torch.float64


# --- writes --------------------------------------------------------------------------------------


@case(array(3), writes=True)
def argument_written_before_and_after(v):
    v += 0.1
    if v.sum() > 0:
        v.mul_(2)
    else:
        v[0] = v[1] * 3
    v[2] -= 1
    return v * v


@case(array(3), scalars, writes=True)
def argument_written_in_a_loop(v, x):
    v[0] += x
    while v[0] < 1.5:
        v[0] += 0.4
        v[1:] *= 1.1
    return v.sum() * x


@case(array(3, 2), writes=True)
def view_of_an_argument_written(a):
    row = a[1]
    flat = a.view(-1)
    if a[0, 0] > 0:
        row.fill_(0.5)
    else:
        flat[2:4] += 1
    flat[0] = row.sum()
    return a.sin(), row * 2


@case(array(4))
def view_written_in_a_branch(v):
    a = v.clone().reshape(2, 2)
    turned = a.T
    if v[0] > 0:
        turned[0] = v[:2]
    for k in range(2):
        if v[k] < 0.5:
            a[k, 0] += v[k] * 2
    return a * 2, turned[1]


@case(array(4), integers(0, 4))
def element_written_by_n(v, n):
    y = torch.zeros(4, dtype=D)
    y[n] = v[n]
    if int(n) > 1:
        y[int(n) - 1 :] += 1
    table = torch.zeros(2, 2, dtype=D)
    table[int(n) % 2, 0] = v.sum()
    return y, table


@case(scalars)
def buffer_filled_up_to_an_exit(x):
    trail = torch.full((6,), -1.0, dtype=D)
    for k in range(6):
        trail[k] = x
        if x > 1.2:
            break
        x = x * 1.2 + 0.3
    return trail, x


@case(array(3))
def in_place_methods(v):
    y = torch.zeros_like(v)
    y.copy_(v)
    if v[0] > v[1]:
        y.sin_().add_(v, alpha=2)
    else:
        y.clamp_(min=-0.5).mul_(v).neg_()
    return y


# --- derivatives inside ---------------------------------------------------------------------------


@case(array(2), grads=(), forward=False)
def sgd_stepped_before_it_parts(v):
    w = v.clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = ((w - 1.3) ** 2).sum() + w.prod()
        loss.backward()
        optimizer.step()
        return loss

    loss = step()
    n = 1
    while loss > 2.2 and n < 6:
        loss = step()
        n += 1
    return w.detach(), n


@case(array(2), grads=(), forward=False)
def lbfgs(v):
    w = v.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=4, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = ((w - 0.3) ** 2).sum() + (w[0] * w[1]).exp()
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()


@case(scalars, forward=False)
def gradient_inside_a_branch(x):
    if x > 0:
        (g,) = torch.autograd.grad(_cubed(leaf := x.detach().requires_grad_()), leaf)
        return g * x
    return _cubed(x)


def _cubed(x):
    return x**3 if x.abs() > 1 else x**2


@case(scalars)
def transforms_inside(x):
    slope = forall.grad(_cubed)(x)
    if slope > 1:
        return slope * x
    return forall.jvp(_cubed, (x,), (x * 2,))[1]


def _vmap_inside(v):
    y = torch.stack([_cubed(e) for e in v])
    if y.sum() > 1:
        return y * 2
    return torch.stack([e if e > v[0] else -e for e in y])


@case(array(3), plain=_vmap_inside)
def vmap_inside(v):
    y = forall.vmap(_cubed)(v)
    if y.sum() > 1:
        return y * 2
    return forall.vmap(lambda e: e if e > v[0] else -e)(y)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx, inputs, output):  # noqa: ARG004 - torch names them
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 if x > 0 else g * x


@case(scalars, forward=False)
def backward_with_a_branch(x):
    y = _Clip.apply(x * 1.5)
    return y * x


@case(scalars)
def no_grad_in_a_branch(x):
    if x > 0:
        with torch.no_grad():
            y = x.exp()
    else:
        y = x.exp()
    return y * x, x.detach() + (x if x < 1 else x.detach())


# --- where `torch.where` gives NaN gradients -----------------------------------------------------


@case(scalars)
def root_in_a_branch(x):
    return x.sqrt() if x > 0 else 0 * x


@case(scalars)
def root_before_the_test(x):
    # The root is NaN for some, who do not use it: in the loop they have a finite derivative.
    root = x.sqrt()
    if x > 0:
        return root * 2
    return x * 3


@case(array(2))
def norm_at_zero(v):
    w = torch.where(v > 0.4, v, 0.0) if v[0] > 0 else v * 0
    length = w.norm()
    if length > 0:
        return w / length
    return w


@case(scalars, scalars)
def quotient_before_the_test(x, y):
    z = torch.where(y > 0, y, 0.0)
    quotient, logarithm = x / z, z.log()
    if z != 0:
        return quotient + logarithm
    return x


@case(array(3))
def chosen_of_a_table_with_nan(v):
    table = [v.sqrt(), v.log(), v]
    if (v > 0).all():
        return table[0] + table[1]
    return table[2]


# --- random draws --------------------------------------------------------------------------------


@case(scalars, keyed=True)
def draws_before_and_after(x):
    a = torch.rand((), dtype=D)
    if x > 0:
        y = x * torch.randn(2, dtype=D).sum()
    else:
        y = x + a
    return y + torch.rand((), dtype=D), a


@case(positive, keyed=True)
def draws_in_a_loop(x):
    n = 0
    while x < 4:
        x = x + torch.rand((), dtype=D)
        n += 1
    return x * torch.randn((), dtype=D), n


@case(scalars, keyed=True)
def rejection_sampling(x):
    for _ in range(20):
        proposal = torch.rand((), dtype=D) * 2 - 1
        if torch.rand((), dtype=D) < (-((proposal - x / 4) ** 2)).exp() * 0.6:
            return proposal * x
    return x


@case(array(4), keyed=True)
def draws_of_differing_shape(v):
    chosen = v[v > 0]
    noise = torch.randn(len(chosen), dtype=D)
    return (chosen * noise).sum() + torch.nn.functional.dropout(v, 0.5).sum()


# --- outputs -------------------------------------------------------------------------------------


@case(scalars)
def tree_output(x):
    if x > 0:
        return {"value": x, "parts": (x * 2, [x.exp()]), "none": None}
    return {"value": -x, "parts": (x, [x.sin()]), "none": None}


@case(scalars)
def none_output(x):
    if x > 0:
        return None, x
    return None, x * 2


@case(scalars)
def text_output(x):
    return ("the same", x) if x > 0 else ("the same", -x)


@case(scalars, grads=())
def integer_output(x):
    if x > 1:
        return 2
    return 1 if x > 0 else 0


@case(scalars, grads=())
def tensor_of_integers_output(x):
    if x > 0:
        return torch.tensor([1, 2]), torch.ones(2, 3) * 2, x > 1
    return torch.tensor([3, 4]), torch.zeros(2, 3), x < -1


@case(scalars, scalars)
def arguments_returned(x, y):
    if x > 0:
        return x, y
    return y, x


@case(array(3), scalars, grads=())
def read_and_written_in_turns(v, x):
    """What was narrowed to be read is out of date once something is written, by whatever name."""
    y = v * 2
    top = y[:1]
    fresh = v + x
    out = y * 0
    if x > 0:
        out = out + y * 3 + fresh
        y += x
        fresh *= 2
        out = out - y * fresh
        if x > 1:
            out = out + y * fresh
            top.mul_(3)
            fresh.sub_(x)
            out = out * y + fresh
        out = out + y * fresh
    return out + y + fresh, top * y


@case(array(3), scalars)
def views_written_where_some_run(v, x):
    """A view taken in a branch is one of the tensor's memory, and of its history."""
    y = v * 2
    a = x
    if x > 0:
        column = y.unsqueeze(-1)
        column.mul_(x)
        first, _, last = (y * x).unbind(0)
        z = (y + x).unsqueeze(0).transpose(0, 1)
        z.add_(column)
        a = first * last + (z @ z.transpose(0, 1)).amax(-1).sum() + torch.amax(y, 0)
    return a * x + y.sum(), y.amin(0, True)


@case(array(2, 3), scalars)
def a_row_of_either_kind_written(m, x):
    """Who has a view under the name writes into what it views."""
    m = m * 1
    row = m[0] if x > 0 else m[1] * 2
    row += x
    other = m[1] if x > 1 else m[0]
    other.mul_(3)
    return m, row


@case(array(2, 3), scalars)
def a_row_of_either_kind_seen_to_change(m, x):
    """What is written into the whole is seen by who has a view of it under the name."""
    m = m * 1
    if x > 0:
        row = m[0]
    else:
        row = m[1].clone()
    m *= 2
    m[0] += x
    return row * 3, m


@case(array(2, 3), integers(0, 4), grads=(0,))
def rows_of_a_loop(m, n):
    """The views of each lane's last step."""
    m = m * 1
    row, i = m[0], 0
    while i < n:
        row = m[i % 2]
        row += i
        i += 1
    row *= 2
    return m

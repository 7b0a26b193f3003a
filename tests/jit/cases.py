"""Functions that a replayed call must not be stale for: each is made anew with its own state.

A case is a function without arguments that gives ``call(i)``: what the i-th call gives, for the
function as it is or under `jit`. What it returns is compared, side effects included.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import math
import random
import sys
import types
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import forall
from draws import HERE, make_generator
from forall import cond, grad, hessian, jacfwd, jacrev, jvp, scan, vmap, while_loop

CASES = {}
AS_IT_IS = set()  # of these, some call cannot be recorded, and they warn


def case(function):
    CASES[function.__name__] = function
    return function


def unrecorded(function):
    AS_IT_IS.add(function.__name__)
    return case(function)


def xs(i, *shape, dtype=None):
    return torch.randn(*(shape or (3,)), generator=make_generator(i), dtype=dtype)


# --- what the function captures -------------------------------------------------------------------

SCALE = 2.0
WEIGHT = torch.ones(3)
HOME = SimpleNamespace(factor=3.0, table={"a": [1.0, 2.0]})


def set_global(name, value):
    globals()[name] = value


@case
def a_global_number(jit):
    f = jit(lambda x: x * SCALE)

    def call(i):
        set_global("SCALE", [2.0, 2, 0.0, -0.0, float("nan"), 2.0][i])
        return f(xs(i)), f(xs(i)).dtype

    return call


@case
def a_global_tensor_replaced(jit):
    f = jit(lambda x: x * WEIGHT)

    def call(i):
        set_global("WEIGHT", xs(100 + i // 2))
        return f(xs(i))

    return call


@case
def an_attribute_of_a_class(jit):
    class Scale:
        factor = 2.0

        def __call__(self, x):
            return x * self.factor

    f = jit(Scale())

    def call(i):
        Scale.factor = 2.0 + i // 2
        return f(xs(i))

    return call


@case
def an_attribute_of_a_class_by_inheritance(jit):
    class Base:
        factor = 2.0

    class Scale(Base):
        pass

    thing = Scale()
    f = jit(lambda x: x * thing.factor)

    def call(i):
        if i < 4:
            Base.factor = 2.0 + i // 2
        else:
            Scale.factor = -float(i)
        return f(xs(i))

    return call


class Settings:
    scale = 3.0

    @staticmethod
    def shift():
        return 1.0


@case
def a_class_as_a_global(jit):
    f = jit(lambda x: x * Settings.scale + Settings.shift())

    def call(i):
        Settings.scale = 3.0 + i // 2
        Settings.shift = staticmethod(lambda: 2.0 * (i // 3))
        return f(xs(i))

    return call


@case
def the_class_of_an_object(jit):
    class Twice:
        def of(self, x):
            return 2 * x

    class Thrice(Twice):
        def of(self, x):
            return 3 * x

    thing = Twice()
    f = jit(lambda x: thing.of(x))

    def call(i):
        thing.__class__ = Thrice if i in (1, 2, 5) else Twice
        return f(xs(i))

    return call


class Slotted:
    __slots__ = ("factor",)


@case
def an_attribute_in_a_slot(jit):
    thing = Slotted()
    thing.factor = 1.0
    f = jit(lambda x: x * thing.factor)

    def call(i):
        thing.factor = 1.0 + i // 2
        return f(xs(i))

    return call


@case
def bytes_that_change(jit):
    flags = bytearray(b"\x00\x01")
    f = jit(lambda x: x * flags[0])

    def call(i):
        flags[0] = i // 2
        return f(xs(i))

    return call


@case
def a_queue(jit):
    class Recent(collections.deque):
        pass

    recent, plain = Recent([1.0], maxlen=2), collections.deque([1.0], maxlen=2)
    f = jit(lambda x: x * recent[0] * plain[-1])

    def call(i):
        recent.append(float(i // 2))
        plain.append(float(i // 3))
        return f(xs(i))

    return call


@case
def a_dict_with_defaults(jit):
    table = collections.defaultdict(float, a=1.0)
    counts = collections.Counter(a=1)
    f = jit(lambda x: x * table["a"] + counts["a"])

    def call(i):
        table["a"], counts["a"] = float(i // 2), i // 3
        return f(xs(i))

    return call


@unrecorded
def arrays_of_numpy_in_a_list(jit):
    a = np.ones(3, dtype=np.float32)
    f = jit(lambda x: x * torch.tensor([a[0], a[1], a[2]]) + torch.tensor([a]).sum())

    def call(i):
        a[:] = i // 2
        return f(xs(i))

    return call


@unrecorded
def an_array_of_numpy_by_name(jit):
    a = np.ones(3, dtype=np.float32)
    f = jit(lambda x: x * torch.tensor(data=a))

    def call(i):
        a[:] = i // 2
        return f(xs(i))

    return call


@case
def a_number_of_an_array_of_numpy(jit):
    a = np.ones(3)
    f = jit(lambda x: x * a[0])

    def call(i):
        a[0] = i // 2
        return f(xs(i))

    return call


MODULE = types.ModuleType("settings")


def factor_of_the_module():
    return MODULE.factor


@case
def two_names_in_a_module(jit):
    f = jit(lambda x: x * factor_of_the_module() + MODULE.shift)

    def call(i):
        MODULE.factor, MODULE.shift = float(i // 2), float(i // 3)
        return f(xs(i))

    return call


@case
def a_jitted_function_inside(jit):
    inner = jit(lambda x: x * SCALE)
    f = jit(lambda x: inner(x) + 1)

    def call(i):
        set_global("SCALE", 2.0 + i // 2)
        return f(xs(i)), inner(xs(i))

    return call


@case
def a_closure_number(jit):
    n = 0

    def call(i):
        nonlocal n
        n = i // 2
        return f(xs(i))

    f = jit(lambda x: x + n)
    return call


@case
def a_closure_tensor_replaced(jit):
    w = None

    def call(i):
        nonlocal w
        w = xs(50 + i // 2)
        return f(xs(i))

    f = jit(lambda x: x * w)
    return call


@case
def a_captured_tensor_written(jit):
    w = torch.zeros(3)
    f = jit(lambda x: x * w)

    def call(i):
        w.add_(i)
        return f(xs(i))

    return call


@case
def a_captured_tensor_with_new_data(jit):
    w = torch.zeros(3)
    f = jit(lambda x: (x * w).sum())

    def call(i):
        w.data = torch.full((1,) if i > 3 else (3,), float(i))
        return f(xs(i))

    return call


@case
def memory_shared_with_numpy(jit):
    array = np.zeros(3, dtype=np.float32)
    w = torch.from_numpy(array)
    f = jit(lambda x: x * w)

    def call(i):
        array[:] = i
        return f(xs(i))

    return call


@unrecorded
def an_array_of_numpys(jit):
    array = np.zeros(3, dtype=np.float32)
    f = jit(lambda x: x * torch.tensor(array))

    def call(i):
        array[:] = i
        return f(xs(i))

    return call


@case
def a_list_of_numbers(jit):
    numbers = [1.0, 2.0, 3.0]
    f = jit(lambda x: x * torch.tensor(numbers))

    def call(i):
        numbers[i % 3] = float(i)
        return f(xs(i))

    return call


@case
def a_dict_of_tensors(jit):
    weights = {"a": torch.ones(3), "b": torch.ones(3)}
    f = jit(lambda x: sum(x * w for w in weights.values()))

    def call(i):
        weights["abc"[i % 3]] = xs(10 + i)
        return f(xs(i))

    return call


@case
def an_attribute_of_an_object(jit):
    f = jit(lambda x: x * HOME.factor + HOME.table["a"][0])

    def call(i):
        HOME.factor = 1.0 + i // 2
        HOME.table["a"][0] = float(i // 3)
        return f(xs(i))

    return call


@case
def a_default_of_an_argument(jit):
    def f(x, scale=1.0):
        return x * scale

    g = jit(f)

    def call(i):
        f.__defaults__ = (float(i // 2),)
        return g(xs(i))

    return call


@case
def a_helper_redefined(jit):
    f = jit(lambda x: HELPERS["h"](x) + helper(x))

    def call(i):
        HELPERS["h"] = torch.sin if i % 2 else torch.cos
        set_global("helper", (lambda x: x * 2) if i > 3 else (lambda x: x * 3))
        return f(xs(i))

    return call


HELPERS = {"h": torch.sin}


def helper(x):
    return x


@case
def a_method(jit):
    class Model:
        def __init__(self):
            self.w = torch.ones(3)

        def forward(self, x):
            return x * self.w

    m = Model()
    f = jit(m.forward)

    def call(i):
        if i == 2:
            m.w = xs(7)
        if i == 4:
            Model.forward = lambda self, x: x + self.w
        return f(xs(i)), jit(m.forward)(xs(i))

    return call


@case
def a_callable_object(jit):
    class Scale:
        factor = 1.0

        def __call__(self, x):
            return x * self.factor

    s = Scale()
    f = jit(s)

    def call(i):
        if i == 2:
            s.factor = 5.0
        if i == 4:
            del s.factor
            Scale.factor = 7.0
        return f(xs(i))

    return call


@case
def a_partial(jit):
    state = {"k": 1.0}
    f = jit(functools.partial(lambda state, x: x * state["k"], state))

    def call(i):
        state["k"] = 1.0 + i // 2
        return f(xs(i))

    return call


# --- modules --------------------------------------------------------------------------------------


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))


@case
def a_module_in_training_or_not(jit):
    m = net()
    f = jit(m)

    def call(i):
        m.train(i % 3 == 0)
        torch.manual_seed(i)
        return f(xs(i, 5, 3))

    return call


@case
def a_module_trained(jit):
    m = net().eval()
    f = jit(lambda x, y: F.mse_loss(m(x), y))
    optimizer = torch.optim.Adam(m.parameters(), lr=0.1)

    def call(i):
        optimizer.zero_grad()
        value = f(xs(i, 5, 3), xs(100 + i, 5, 2))
        value.backward()
        optimizer.step()
        return value.detach(), [p.detach().clone() for p in m.parameters()]

    return call


@case
def a_parameter_replaced(jit):
    m = nn.Linear(3, 3)
    nn.init.ones_(m.weight)
    nn.init.ones_(m.bias)
    f = jit(m)

    def call(i):
        if i % 2:
            m.weight = nn.Parameter(xs(i, 3, 3))
        return f(xs(i, 2, 3)).detach()

    return call


@case
def a_submodule_replaced(jit):
    m = net().eval()
    f = jit(vmap(m))

    def call(i):
        if i == 3:
            m[1] = nn.ReLU()
        return f(xs(i, 5, 3)).detach()

    return call


@case
def a_hook_of_a_module(jit):
    m = nn.Linear(3, 3)
    nn.init.ones_(m.weight)
    nn.init.ones_(m.bias)
    f = jit(m)
    handles = []

    def doubled(_module, _args, out):
        return out * 2

    def call(i):
        if i == 2:
            handles.append(m.register_forward_hook(doubled))
        if i == 4:
            handles.pop().remove()
        return f(xs(i, 2, 3)).detach()

    return call


@case
def a_parameter_frozen(jit):
    m = nn.Linear(3, 1)
    nn.init.ones_(m.weight)
    nn.init.ones_(m.bias)
    f = jit(m)

    def call(i):
        m.weight.requires_grad_(i % 2 == 0)
        m.zero_grad()
        f(xs(i, 2, 3)).sum().backward()
        return None if m.weight.grad is None else m.weight.grad.clone(), m.bias.grad.clone()

    return call


@case
def running_statistics(jit):
    m = nn.BatchNorm1d(3)
    f = jit(m)

    def call(i):
        with torch.no_grad():
            out = f(xs(i, 6, 3))
        return out, m.running_mean.clone(), m.num_batches_tracked.clone()

    return call


@unrecorded
def running_statistics_and_a_derivative(jit):
    m = nn.BatchNorm1d(3)
    f = jit(m)

    def call(i):
        x = xs(i, 6, 3).requires_grad_()
        (g,) = torch.autograd.grad(f(x).square().sum(), x)
        return g, m.running_mean.clone(), m.num_batches_tracked.clone()

    return call


@case
def a_module_as_an_argument(jit):
    ms = [nn.Linear(3, 3), nn.Linear(3, 3)]
    for k, m in enumerate(ms):
        nn.init.constant_(m.weight, k)
        nn.init.zeros_(m.bias)
    f = jit(lambda m, x: m(x))

    def call(i):
        if i == 4:
            ms[0].weight = nn.Parameter(xs(9, 3, 3))
        return f(ms[i % 2], xs(i, 2, 3)).detach()

    return call


@case
def functional_calls(jit):
    m = net().eval()
    f = jit(
        vmap(
            grad(lambda p, x: forall.functional_call(m, p, (x,)).sum()),
            in_dims=(None, 0),
        )
    )

    def call(i):
        p = {k: xs(i, *v.shape) for k, v in m.named_parameters()}
        return f(p, xs(i, 5, 3))

    return call


# --- what is not a function of its arguments alone ------------------------------------------------


@case
def a_branch_on_a_number(jit):
    f = jit(lambda x: x * 2 if x.sum() > 0 else x - 1)
    return lambda i: f(xs(i))


@unrecorded
def a_branch_that_is_ever_another(jit):
    f = jit(lambda x, i: x * 2 if (i % 2 == 0).item() else x - 1)
    return lambda i: [f(xs(i), torch.tensor(i + k)) for k in range(4)]


@case
def a_whole_number(jit):
    f = jit(lambda x, batch: x.new_zeros(int(batch.max()) + 1).index_add(0, batch, x))
    return lambda i: f(xs(i), torch.tensor([0, 1, 1 if i < 3 else 2]))


@case
def a_whole_number_asked_for_its_truth(jit):
    f = jit(lambda x, n: x * 2 if n else x - 1)
    return lambda i: f(xs(i), torch.tensor(i // 2))


@case
def a_whole_number_of_all_examples(jit):
    f = jit(vmap(lambda x, n: x.narrow(0, 0, n.item()).sin(), in_dims=(0, None)))
    return lambda i: f(xs(i, 4, 3), torch.tensor(2 if i < 3 else 3))


@unrecorded
def a_whole_number_that_is_ever_another(jit):
    f = jit(lambda x, i: x * i.item())
    return lambda i: [f(xs(i), torch.tensor(4 * i + k)) for k in range(4)]


@case
def a_mask_that_is_captured(jit):
    mask = torch.tensor([True, False, True])
    f = jit(vmap(grad(lambda x: (x[mask].sin() * mask.nonzero()[0]).sum())))

    def call(i):
        if i == 3:
            mask.logical_not_()
        return f(xs(i, 4, 3))

    return call


@case
def what_a_mask_picks(jit):
    def f(x, edges):
        edges = edges[:, edges[0] != edges[1]]
        return x.index_add(0, edges[1], x[edges[0]]), edges.masked_select(edges < 2)

    g = jit(f)
    edges = torch.tensor([[0, 1, 2, 2, 0], [1, 1, 0, 1, 2]])
    return lambda i: g(xs(i), edges if i < 3 else edges.flip(1)[:, i - 3 : i])


@case
def what_is_there_once(jit):
    f = jit(lambda x, n: x.index_select(0, n.unique()).cumsum(0))
    return lambda i: f(xs(i), torch.tensor([0, 2, 0 if i < 4 else 1]))


@case
def picked_with_a_derivative_outside(jit):
    f = jit(lambda x, mask: x[mask].sin() * 2)

    def call(i):
        x = xs(i).requires_grad_()
        out = f(x, torch.tensor([True, i < 3, True]))
        return out.detach(), *torch.autograd.grad(out.sum(), x)

    return call


@case
def a_branch_that_is_another_from_some_call_on(jit):
    f = jit(grad(lambda x: (x * 2 if (x > 0).all() else x.exp()).sum()))
    return lambda i: f(xs(i).abs() * (1 if i < 3 else -1))


@case
def a_check_that_raises(jit):
    def f(x):
        if not (x > 0).all():
            raise ValueError(f"{x.min():.3f} is not positive")
        return x.log()

    g = jit(f)

    def call(i):
        try:
            return g(xs(i).abs() + (i != 3) - 1 * (i == 3))
        except ValueError as error:
            return str(error)

    return call


@case
def a_check_of_each_example_that_raises(jit):
    def f(x):
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt().sum()

    g = jit(vmap(grad(f)))

    def call(i):
        x = xs(i, 4, 3).abs() + 1
        if i == 3:
            x[2, 1] = -1.0
        try:
            return g(x)
        except ValueError as error:
            return str(error).splitlines()[0]

    return call


@case
def a_distribution_that_checks_its_arguments(jit):
    def log_density(mean, scale, x):
        return torch.distributions.Normal(mean, scale).log_prob(x).sum()

    f = jit(vmap(grad(log_density, (0, 1)), (0, 0, None)))

    def call(i):
        scale = xs(10 + i, 4).abs() + 0.1
        if i == 4:
            scale[1] = -1.0
        try:
            return f(xs(i, 4), scale, xs(20 + i, 5))
        except ValueError as error:
            return type(error).__name__

    return call


@case
def a_loop_of_some_steps(jit):
    def halved(x):
        while (x.abs() > 1).any():
            x = x / 2
        return x

    f = jit(halved)
    return lambda i: f(xs(i) * 2 ** (i // 3))


@case
def numbers_drawn_before_a_branch(jit):
    def f(x):
        noise = torch.rand(3)
        return x + noise if (x > 0).all() else x - torch.rand(3) * noise

    g = jit(f)

    def call(i):
        torch.manual_seed(i)
        return g(xs(i).abs() * (-1) ** (i // 2)), torch.rand(2)

    return call


@unrecorded
def an_argument_written_before_a_branch(jit):
    def f(x):
        x.mul_(2)
        return x + 1 if (x > 0).all() else x - 1

    g = jit(f)

    def call(i):
        x = xs(i).abs() * (-1) ** (i // 2)
        return g(x), x

    return call


@case
def memory_of_its_own_written_before_a_branch(jit):
    def f(x):
        y = x.clone()
        y.mul_(2)
        return y + 1 if (y > 0).all() else y - 1

    g = jit(f)
    return lambda i: g(xs(i).abs() * (-1) ** (i // 2))


@case
def a_branch_on_what_is_captured(jit):
    w = torch.ones(3)
    f = jit(lambda x: x * w if torch.isfinite(w).all() else x)

    def call(i):
        w[0] = float("inf") if i in (2, 3) else float(i)
        return f(xs(i))

    return call


@case
def a_branch_with_a_derivative_outside(jit):
    w = torch.ones(3, requires_grad=True)
    f = jit(lambda x: (x * w).sin() if (x * w > 0).all() else (x * w * w).cos())

    def call(i):
        w.data.copy_(xs(i + 9))
        y = f(w.detach() * (-1) ** (i // 2))
        return y, torch.autograd.grad(y.sum(), w)

    return call


@case
def a_truth_taken_for_a_number(jit):
    f = jit(lambda x: x * (x > 0).all().item() + (x < 5).any().item())
    return lambda i: f(xs(i).abs() * (-1) ** (i // 2))


@case
def examples_that_agree(jit):
    f = jit(vmap(lambda x: x * 2 if x > 0 else x - 1))
    return lambda i: f(xs(i, 6).abs() * (-1) ** (i // 3))


@case
def a_test_of_what_is_the_same_for_all_examples(jit):
    def f(x, w):
        return x * w if (w * 1 > 0).all() else x - w

    f = jit(vmap(f, (0, None)))
    return lambda i: f(xs(i, 6, 3), xs(i).abs() * (-1) ** (i // 2))


@case
def a_test_of_what_is_captured_by_all_examples(jit):
    w = torch.ones(3)
    f = jit(vmap(grad(lambda x: (x * w if w.prod() > 0 else (x - w).exp()).sum())))

    def call(i):
        w.copy_(xs(i).abs() * (-1) ** (i // 2))
        return f(xs(i, 6, 3))

    return call


@case
def a_test_of_one_map_in_another(jit):
    inner = vmap(lambda x, y: x * 2 if (y > 0).all() else x.exp(), (0, None))
    f = jit(vmap(inner, (None, 0)))
    return lambda i: f(xs(i, 4), xs(i, 2, 3).abs() * (-1) ** (i // 3))


@case
def a_test_in_inference_mode(jit):
    f = jit(vmap(lambda x: x * 2 if (x > 0).all() else x - 1))

    def call(i):
        with torch.inference_mode():
            return f(xs(i, 6, 3).abs() * (-1) ** (i // 2))

    return call


@unrecorded
def places_that_a_tensor_is_split_at(jit):
    f = jit(vmap(lambda x, cuts: torch.tensor_split(x, cuts)[0], (0, None)))
    return lambda i: f(xs(i, 2, 6), torch.tensor([1 + i // 2]))


@unrecorded
def places_that_each_example_is_split_at(jit):
    f = jit(vmap(lambda x, cuts: torch.tensor_split(x, cuts)[0]))
    return lambda i: f(xs(i, 2, 6), torch.tensor([[1 + i // 2]] * 2))


@case
def a_test_of_a_tangents_value(jit):
    f = jit(lambda x: jvp(lambda y: y * 2 if (y.sin() > 0).all() else y.exp(), (x,), (x,))[1])
    return lambda i: f(xs(i).abs().clamp(0.1, 3) * (-1) ** (i // 2))


@case
def examples_of_two_maps_that_agree(jit):
    f = jit(vmap(vmap(lambda x: x * 2 if (x > 0).all() else x.exp(), in_dims=1)))
    return lambda i: f(xs(i, 2, 3, 4).abs() * (-1) ** (i // 3))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x * x


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x if (g > 0).all() else g


@unrecorded
def a_branch_in_a_backward_outside(jit):
    f = jit(lambda x: Branching.apply(x) * 2)

    def call(i):
        x = xs(i).requires_grad_()
        return torch.autograd.grad(f(x), x, xs(i + 9).abs() * (-1) ** (i // 2))

    return call


@case
def a_branch_in_a_backward(jit):
    f = jit(grad(lambda x: (Branching.apply(x) * x.detach()).sum()))
    return lambda i: f(xs(i).abs() * (-1) ** (i // 2))


@unrecorded
def an_items_value(jit):
    f = jit(lambda x: x * x.max().item())
    return lambda i: f(xs(i))


@unrecorded
def examples_that_part(jit):
    f = jit(vmap(lambda x: x * 2 if x > 0 else x - 1))
    return lambda i: f(xs(i, 6))


@unrecorded
def a_loop_that_examples_leave(jit):
    def root(a):
        x = a
        while (x * x - a).abs() > 1e-6 * a:
            x = (x + a / x) / 2
        return x

    f = jit(vmap(root))
    return lambda i: f(xs(i, 6).square() + 1)


@unrecorded
def numbers_of_examples(jit):
    f = jit(vmap(lambda x: torch.full((2,), x.item() * 2)))
    return lambda i: f(xs(i, 4))


@unrecorded
def a_list_that_grows(jit):
    seen = []

    def f(x):
        seen.append(len(seen))
        return x * len(seen)

    g = jit(f)
    return lambda i: (g(xs(i)), list(seen))


@unrecorded
def a_counter(jit):
    count = 0

    def f(x):
        nonlocal count
        count += 1
        return x * count

    g = jit(f)
    return lambda i: (g(xs(i)), count)


@case
def a_mask_kept_on_a_module_by_its_first_call(jit):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(3, 3).tril()
            return self.mask @ x

    module = Causal()
    g = jit(module)
    return lambda i: (g(xs(i)), module.mask)


@case
def a_cache_of_results(jit):
    cache = {}

    def f(x):
        key = tuple(x.shape)
        if key not in cache:
            cache[key] = torch.arange(x.numel()).float()
        return x + cache[key]

    g = jit(f)
    return lambda i: (g(xs(i, 2 + i % 2)), sorted(cache))


@unrecorded
def a_generator_of_pythons(jit):
    numbers = iter(range(100))

    def f(x):
        state.append(next(numbers))
        return x + state[-1]

    state = []
    g = jit(f)
    return lambda i: g(xs(i))


@case
def shapes_that_depend_on_numbers(jit):
    f = jit(lambda x: x[x > 0].sum() + x.nonzero().sum())
    return lambda i: f(xs(i))


@unrecorded
def numbers_of_tensors_made_into_another(jit):
    f = jit(lambda x, n: x * torch.tensor([n[0], n[1], 1]) + x.new_tensor([[n[2]]]))
    return lambda i: f(xs(i), xs(i + 9))


@unrecorded
def numbers_of_a_captured_tensor_made_into_another(jit):
    held = torch.tensor([1.0, 2.0, 3.0])
    f = jit(grad(lambda x: (x * torch.as_tensor([held[0], held[2], 1.0])).sum()))

    def call(i):
        held.add_(i)
        return f(xs(i))

    return call


@unrecorded
def numbers_of_tensors_made_into_another_by_a_class(jit):
    f = jit(lambda x, n: x * torch.Tensor([n[0], n[1], 1]))
    return lambda i: f(xs(i), xs(i + 9))


@case
def lists_of_numbers_beside_tensors(jit):
    f = jit(lambda x, n: x[[0, 2]] * torch.tensor([2.0, 3.0]) + x[n, [1, 0]].sum())
    return lambda i: f(xs(i, 3, 2), torch.tensor([i % 2, 0]))


@unrecorded
def split_where_a_tensor_says(jit):
    f = jit(lambda x, places: torch.tensor_split(x, places)[0].sum())
    return lambda i: f(xs(i), torch.tensor([1 + i // 3, 3]))


@unrecorded
def packed_as_lengths_say(jit):
    torch.manual_seed(0)
    layer = torch.nn.LSTM(2, 3).requires_grad_(False)

    def f(x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
        return layer(packed)[1][0], x.new_zeros(packed.data.shape[0])

    g = jit(f)
    return lambda i: g(xs(i, 4, 3, 2), torch.tensor([4, 2 + i // 3, 1]))


@unrecorded
def memory_read_by_numpy(jit):
    f = jit(lambda x: torch.from_numpy(np.sin(x.numpy())))
    return lambda i: f(xs(i))


@unrecorded
def a_list_of_its_numbers(jit):
    f = jit(lambda x: torch.tensor([2 * a for a in x.tolist()]))
    return lambda i: f(xs(i))


@unrecorded
def backward_inside(jit):
    w = torch.ones(3, requires_grad=True)

    def f(x):
        (x * w).sum().backward()
        return x * 1

    g = jit(f)

    def call(i):
        return g(xs(i)), w.grad.clone()

    return call


@unrecorded
def a_seed_set_inside(jit):
    def f(x):
        torch.manual_seed(7)
        return x + torch.rand(3)

    g = jit(f)
    return lambda i: g(xs(i))


@unrecorded
def a_seed_set_between_draws(jit):
    def f(x):
        y = x + torch.rand(3)
        torch.manual_seed(7)
        return y

    g = jit(f)

    def call(i):
        torch.manual_seed(i)
        return g(xs(i)), torch.rand(2)

    return call


@unrecorded
def a_generator_made_inside(jit):
    g = jit(lambda x: x + torch.rand(3, generator=torch.Generator(HERE).manual_seed(3)))
    return lambda i: g(xs(i))


@unrecorded
def a_generator_seeded_inside(jit):
    generator = make_generator()

    def f(x):
        generator.manual_seed(3)
        return x + torch.rand(3, generator=generator)

    g = jit(f)
    return lambda i: g(xs(i))


@case
def a_generator_captured(jit):
    generator = make_generator(3)
    g = jit(lambda x: x + torch.rand(3, generator=generator))

    def call(i):
        if i == 3:
            generator.manual_seed(3)
        return g(xs(i))

    return call


@unrecorded
def draws_forked(jit):
    def f(x):
        with torch.random.fork_rng(devices=[]):
            y = x + torch.rand(3)
        return y * torch.rand(3)

    g = jit(f)

    def call(i):
        torch.manual_seed(i)
        return g(xs(i))

    return call


@unrecorded
def draws_made_again_by_a_checkpoint(jit):
    w = torch.ones(3, requires_grad=True)

    def f(x):
        y = checkpoint(lambda x: F.dropout(x * w, 0.5), x, use_reentrant=False)
        return y.square().sum()

    g = jit(f)

    def call(i):
        torch.manual_seed(i)
        value = g(xs(i))
        return value.detach(), torch.autograd.grad(value, w)

    return call


# --- arguments ------------------------------------------------------------------------------------


@case
def numbers_as_arguments(jit):
    f = jit(lambda x, a, flag: x * a if flag else x + a)
    given = [(2, True), (2.0, True), (2, False), (0.0, True), (-0.0, True), (True, 1)]

    def call(i):
        out = f(torch.arange(3), *given[i])
        return out, out.dtype, 1 / f(torch.ones(1), *given[i])

    return call


@case
def words_as_arguments(jit):
    f = jit(lambda x, mode=None, **more: getattr(x, mode)() * more.get("k", 1))
    given: list[Any] = [{"mode": "sin"}, {"mode": "cos"}, {"mode": "sin", "k": 2}]
    return lambda i: f(xs(i), **given[i % 3])


@case
def shapes(jit):
    f = jit(lambda x: x.sum(0) * x.shape[0])
    return lambda i: f(xs(i, 1 + i // 2, 2 + i % 2))


@case
def dtypes(jit):
    f = jit(lambda x: x.sin() * 2)
    kinds = [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.bfloat16]
    return lambda i: f(xs(i).to(kinds[i])) if i < 6 else None


@case
def strides(jit):
    f = jit(lambda x: (x + 0, (x + 0).stride(), x.reshape(-1)))
    return lambda i: f(xs(i, 4, 6).t() if i % 2 else xs(i, 6, 8)[:, ::2])


@case
def offsets(jit):
    f = jit(lambda x: x.as_strided((2,), (1,), x.storage_offset()) * x[1])
    return lambda i: f(xs(i, 10)[i % 3 : i % 3 + 4])


@case
def conjugates(jit):
    f = jit(lambda x: x * 2 + x.imag)
    return lambda i: f(xs(i, dtype=torch.complex64).conj() if i % 2 else xs(i).to(torch.cfloat))


@case
def one_tensor_twice(jit):
    f = jit(lambda x, y: x * 2 + y)

    def call(i):
        x = xs(i)
        return f(x, x) if i % 2 else f(x, xs(i + 1))

    return call


@case
def writes_into_an_argument_passed_twice(jit):
    def f(x, y):
        x.mul_(2)
        return x + y

    g = jit(f)

    def call(i):
        x, y = xs(i), xs(i + 1)
        out = g(x, x) if i % 2 else g(x, y)
        return out, x

    return call


@case
def views_of_one_memory(jit):
    def f(x, y):
        x.add_(1)
        return y * 2

    g = jit(f)

    def call(i):
        base = xs(i, 6)
        return g(base[:3], base[3 * (i % 2) : 3 * (i % 2) + 3].clone() if i > 3 else base[:3]), base

    return call


@case
def an_argument_written(jit):
    f = jit(lambda x: x.mul_(2).sum())

    def call(i):
        x = xs(i)
        version = x._version
        return f(x), x, x._version - version

    return call


@case
def a_captured_tensor_that_is_written_inside(jit):
    w = torch.zeros(3)

    def f(x):
        w.add_(x)
        return w * 2

    g = jit(f)
    return lambda i: (g(xs(i)), w.clone())


@case
def an_argument_that_is_captured(jit):
    w = torch.ones(3)
    f = jit(lambda x: x * w)
    return lambda i: f(w) if i % 2 else f(xs(i))


@case
def a_captured_tensor_that_is_an_argument_at_first(jit):
    w = torch.ones(3)
    f = jit(lambda x: x * w)
    return lambda i: f(xs(i)) if i % 3 == 2 else f(w)


@case
def an_argument_that_views_what_is_captured(jit):
    w = torch.arange(6.0)
    f = jit(lambda x: x.add_(1) * w[:3])
    return lambda i: (f(w[i % 4 : i % 4 + 3]) if i % 3 else f(xs(i)), w.clone())


@case
def operators_that_autocast_casts_behind_those_that_it_does_not(jit):
    f = jit(vmap(torch.mv, (0, None)))
    g = jit(grad(lambda x: F.linear(x, x).sin().sum()))

    def call(i):
        with torch.autocast("cpu", torch.bfloat16, enabled=i < 4):
            return f(xs(i, 2, 3, 4), xs(i, 4)), g(xs(i, 3, 3))

    return call


@unrecorded
def a_transform_of_torchs(jit):
    f = jit(lambda x: torch.func.grad(lambda y: y.sin().sum())(x))
    g = jit(vmap(lambda x: torch.func.vjp(torch.sin, x)[1](x)[0]))
    return lambda i: (f(xs(i)), g(xs(i)))


@case
def attributes_of_tensors(jit):
    w = torch.ones(3)
    w.scale = 1.0
    f = jit(lambda x: x * w * w.scale * (x.scale if hasattr(x, "scale") else 1))

    def call(i):
        w.scale = [1.0, 2.0, 2.0, -0.0, 3.0, 3.0][i]
        x = xs(i)
        if i % 2:
            x.scale = i // 2
        return f(x), f(xs(i))

    return call


@case
def matrices_that_have_no_root_or_inverse(jit):
    f, g = jit(vmap(torch.linalg.cholesky)), jit(lambda x: torch.linalg.solve(x, x[0]))

    def outcome(h, x):
        try:
            return h(x)
        except RuntimeError:
            return "no"

    eye = torch.eye(3).expand(2, 3, 3)
    signs = [1.0, 2.0, -1.0, 3.0, 0.0, 1.0]
    return lambda i: (outcome(f, signs[i] * eye), outcome(g, signs[i] * eye[0]))


@unrecorded
def a_sparse_matrix_that_is_captured(jit):
    m = torch.eye(3).to_sparse()
    f, g = jit(lambda x: m @ x), jit(lambda x: x.to_sparse().to_dense() * 2)
    return lambda i: (f(xs(i, 3, 2)), g(xs(i, 3, 2)))


@unrecorded
def a_quantised_tensor(jit):
    f = jit(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())
    return lambda i: f(xs(i))


@case
def constants_that_are_results_and_views_of_each_other(jit):
    def f(x):
        a = torch.arange(12.0).reshape(3, 4)
        b = torch.tensor([1.0, 2.0, 3.0])
        return x + 1, a, a[1:, ::2], a.t(), b, b[:2], torch.ones(3, 1).expand(3, 2)

    g = jit(f)

    def call(i):
        x, a, v, t, b, w, e = g(xs(i))
        layouts = [tuple(s.stride()) for s in (a, v, t, b, w, e)]
        a[1, 0] += 5
        w[0] = -1
        return x, a, v, t, b, w, e, layouts

    return call


@case
def a_vector_times_a_matrix(jit):
    matrix = xs(9, 3, 4)
    f = jit(lambda x: x @ matrix)  # torch takes a dimension away in place
    return lambda i: f(xs(i))


@case
def shapes_changed_in_place(jit):
    def f(x):
        y = x * 2
        z = y.reshape(3, 1)
        z.squeeze_(1)
        y.unsqueeze_(0)
        a, b = y.sin(), y.transpose_(0, 1) * 3
        z += 1
        c = (x.reshape(1, 3) + 1).t_().squeeze_()
        c.unsqueeze_(1).mul_(3)
        return a, b, c, y, z

    f = jit(f)
    return lambda i: f(xs(i))


@case
def shapes_changed_in_place_and_a_derivative(jit):
    matrix = xs(9, 3, 4).requires_grad_()

    def f(x):
        y = x @ matrix
        z = (y.exp() * 2).unsqueeze_(0)
        return z.transpose_(0, 1).squeeze_() * y

    f = jit(f)

    def call(i):
        x = xs(i).requires_grad_()
        y = f(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, matrix))

    return call


@unrecorded
def the_shape_of_an_argument_changed_in_place(jit):
    f = jit(lambda x: x.unsqueeze_(0) * 2)

    def call(i):
        x = xs(i)
        return f(x), x

    return call


@case
def no_elements(jit):
    f = jit(vmap(lambda x: x.sin().sum()))
    return lambda i: f(xs(i, i % 2, 3))


@case
def trees(jit):
    f = jit(lambda t: {"a": t["x"] + t["y"][0], "b": (t["y"][1], None, 3, "word"), "c": []})
    return lambda i: f({"x": xs(i), "y": [xs(i + 1), xs(i + 2)]})


# --- results --------------------------------------------------------------------------------------


@case
def dtypes_asked_for(jit):
    def f(x, y):
        dtype = torch.promote_types(x.dtype, torch.result_type(x, y))
        return x.to(dtype) + y.to(dtype) * torch.can_cast(x.dtype, y.dtype)

    g = jit(f)
    return lambda i: (g(xs(i), xs(i).double()), g(xs(i).double(), xs(i)), g(xs(i) > 0, xs(i) > 0))


@unrecorded
def arguments_that_get_a_history(jit):
    total = torch.zeros(3)

    def into(v, x):
        v.add_(x.mean())

    def in_place(x):
        x.mul_(3)

    def captured(x):
        total.copy_(x)
        return x.detach().sum()

    f, g, h = jit(into), jit(in_place), jit(captured)

    def call(i):
        v, x = xs(i), xs(i).requires_grad_()
        f(v, x)
        y = x * 2
        g(y)
        total.detach_()
        h(x)
        return [torch.autograd.grad(t.sum(), x, allow_unused=True) for t in (v, y, total)]

    return call


@case
def arguments_written_without_a_history(jit):
    w = torch.ones(3, requires_grad=True)

    def step(x):
        with torch.no_grad():
            x.add_(1)
            w.mul_(0.5).add_(x)
        return w.detach().sum()

    f = jit(step)

    def call(i):
        x = xs(i).requires_grad_()
        y = xs(i)
        return f(y), f(x), x, y, w.detach().clone()

    return call


@case
def results_cut_from_their_history(jit):
    w = torch.ones(3, requires_grad=True)
    f = jit(lambda x: (x.detach(), x.detach()[1:], w.detach()))
    g = jit(lambda x: (y := x.detach(), y, w.detach().view(3, 1)))

    def call(i):
        x = xs(i).requires_grad_()
        with torch.no_grad() if i % 2 else torch.enable_grad():
            found = [*f(x), *g(x)]
        with torch.no_grad():
            w.add_(1)  # a view of it would find its history now
        return [y.requires_grad for y in found], found[3] is found[4], found

    return call


@case
def arguments_and_views_of_them_without_grad(jit):
    w = torch.ones(3, requires_grad=True)
    f = jit(lambda x: (x, x[1:], w, w.view(3, 1), (x * w).sin()))

    def call(i):
        x = xs(i).requires_grad_()
        y = x * 1 if i > 3 else x
        with torch.no_grad():
            found = f(y)
        return [t.requires_grad for t in found], found[0] is y, found[2] is w, found

    return call


@case
def a_result_that_is_the_argument(jit):
    f = jit(lambda x: (x, x.view(-1), x.detach()))

    def call(i):
        x = xs(i)
        a, b, c = f(x)
        b.add_(1)
        return a is x, b is x, c is x, x, c

    return call


@case
def a_result_that_is_captured(jit):
    w = torch.ones(3)
    f = jit(lambda x: (w, w[1:], x))

    def call(i):
        a, b, _ = f(xs(i))
        b.add_(1)
        return a is w, w.clone()

    return call


@case
def a_constant_that_is_then_written(jit):
    f = jit(lambda x: (torch.zeros(3), torch.tensor([1.0, 2.0]), torch.ones_like(x)))

    def call(i):
        out = f(xs(i))
        kept = [t.clone() for t in out]
        for t in out:
            t.add_(1)
        return kept

    return call


@case
def a_constant_written_inside(jit):
    def f(x):
        t, u = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
        t[0], u[1] = x[0], x[1]
        return t, u, torch.eye(3).fill_diagonal_(2.0)

    g = jit(f)
    return lambda i: g(xs(i))


@case
def one_result_twice(jit):
    def f(x):
        y = x * 2
        return y, y, y[:1]

    g = jit(f)

    def call(i):
        a, b, c = g(xs(i))
        a.add_(1)
        return a is b, b, c

    return call


@case
def several_results_of_one_operator(jit):
    f = jit(lambda x: (x.sort(), x.topk(2).values, x.max(0), x.unbind(), x.split(1), x.chunk(2)))
    return lambda i: f(xs(i))


@case
def a_view_written_inside(jit):
    def f(x):
        y = x * 1
        y.t().diagonal().zero_()
        y[0].copy_(x[1])
        return y, y.t()

    g = jit(f)
    return lambda i: g(xs(i, 3, 3))


# --- the state of torch ---------------------------------------------------------------------------


@case
def draws(jit):
    f = jit(lambda x: x + torch.rand(3) + F.dropout(x))

    def call(i):
        torch.manual_seed(i)
        return f(xs(i)), torch.rand(2)

    return call


@case
def draws_of_examples(jit):
    f = jit(vmap(lambda x: x + torch.randn(()), randomness="different"))
    g = jit(vmap(lambda x: x + torch.randn(()), randomness="same"))

    def call(i):
        torch.manual_seed(i)
        return f(xs(i)), g(xs(i)), torch.rand(2)

    return call


@case
def draws_from_a_key(jit):
    f = jit(lambda key: forall.random.normal(key, (3,)))
    g = jit(vmap(lambda key, x: x + forall.random.uniform(key)))

    def call(i):
        key = forall.random.key(i)
        return f(key), g(forall.random.split(key, 3), xs(i))

    return call


@case
def draws_and_a_derivative(jit):
    f = jit(lambda x: F.dropout(x, 0.5).square().sum())

    def call(i):
        torch.manual_seed(i)
        x = xs(i).requires_grad_()
        y = f(x)
        (g,) = torch.autograd.grad(y, x, create_graph=i % 2 == 1)
        return y.detach(), g.detach(), torch.rand(2)

    return call


@case
def gradients_on_and_off(jit):
    w = torch.ones(3, requires_grad=True)
    f = jit(lambda x: x * w)

    def call(i):
        with torch.set_grad_enabled(i % 2 == 0):
            out = f(xs(i))
        return out.detach(), out.requires_grad

    return call


@case
def autocast(jit):
    f = jit(lambda x: F.linear(x, x))

    def call(i):
        with torch.autocast("cpu", torch.bfloat16 if i % 3 else torch.float16, enabled=i % 2 == 0):
            out = f(xs(i, 3, 3))
        return out, out.dtype

    return call


@case
def the_default_dtype(jit):
    f = jit(lambda x: x + torch.ones(3) + torch.tensor([1.0, 2.0, 3.0]))

    def call(i):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        try:
            out = f(torch.arange(3))
        finally:
            torch.set_default_dtype(before)
        return out, out.dtype

    return call


@case
def inference(jit):
    f = jit(lambda x: x * 2)

    def call(i):
        with torch.inference_mode(i % 2 == 0):
            out = f(xs(i))
        return out.clone(), out.is_inference()

    return call


# --- derivatives ----------------------------------------------------------------------------------


@case
def arguments_that_require_grad_or_not(jit):
    f = jit(lambda x, y: (x * y.sin()).sum())

    def call(i):
        x, y = xs(i).requires_grad_(i % 2 == 0), xs(i + 1).requires_grad_()
        f(x, y).backward()
        return x.grad, y.grad

    return call


@case
def an_argument_with_a_history(jit):
    f = jit(lambda x: x.square().sum())

    def call(i):
        x = xs(i).requires_grad_()
        f(x.exp()).backward()
        return x.grad

    return call


@case
def several_results_and_cotangents(jit):
    f = jit(lambda x: (x.sin(), x.sum(), (x > 0), x.detach() * 2))

    def call(i):
        x = xs(i, 2, 3).requires_grad_()
        a, b, c, d = f(x)
        ends = [(a.t().sum(0)[0] + b), b, (a * c).sum()][i % 3]
        return *torch.autograd.grad(ends, x), c, d, c.requires_grad, d.requires_grad

    return call


@case
def a_cotangent_laid_out_otherwise(jit):
    f = jit(lambda x: x.view(2, 3) * 2)

    def call(i):
        x = xs(i, 6).requires_grad_()
        c = xs(i, 3, 2).t() if i % 2 else torch.ones(()).expand(2, 3)
        return torch.autograd.grad(f(x), x, c)

    return call


@case
def a_second_derivative(jit):
    f = jit(lambda x: (x**3).sum())

    def call(i):
        x = xs(i).requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)

    return call


@case
def transforms_around(jit):
    w = torch.ones(3, requires_grad=True)
    f = jit(lambda x: (x**3 * w).sum())

    def call(i):
        x = xs(i, 2, 3)
        out = (
            grad(f)(x[0]),
            vmap(grad(f))(x),
            hessian(f)(x[0]),
            jacfwd(f)(x[0]),
            jacrev(f)(x[0]),
            jvp(f, (x[0],), (x[1],)),
        )
        return [t.detach() for t in forall._compat.pytree.get_leaves(out)]

    return call


@case
def transforms_inside(jit):
    w = xs(77).requires_grad_()

    def energy(x):
        return (x**3 * w.sin()).sum()

    f = jit(lambda x: (vmap(grad(energy))(x), hessian(energy)(x[0]), jacfwd(grad(energy))(x[1])))

    def call(i):
        out = f(xs(i, 2, 3))
        return *torch.autograd.grad(sum(t.sin().sum() for t in out), w), *[t.detach() for t in out]

    return call


@case
def a_jit_inside(jit):
    inner = jit(lambda x: x.sin() * 2)
    f = jit(vmap(lambda x: inner(x).sum() + inner(x * 2).sum()))
    return lambda i: f(xs(i, 4, 3))


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.clamp(-0.5, 0.5) * x


@case
def a_function_with_a_backward_of_its_own(jit):
    f = jit(lambda x: Clipped.apply(x).sin().sum())

    def call(i):
        x = xs(i).requires_grad_()
        return *torch.autograd.grad(f(x), x), vmap(grad(f))(xs(i, 2, 3))

    return call


@case
def parts_held_constant(jit):
    def f(x):
        with torch.no_grad():
            a = x * 2
        return (a * x + x.detach()).sum()

    g = jit(f)

    def call(i):
        x = xs(i).requires_grad_()
        return torch.autograd.grad(g(x), x)

    return call


@case
def a_checkpoint(jit):
    def f(x):
        part = torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)
        return part.sum()

    g = jit(f)

    def call(i):
        x = xs(i).requires_grad_()
        return torch.autograd.grad(g(x), x)

    return call


@unrecorded
def a_hook_on_a_captured_leaf(jit):
    w = torch.ones(3, requires_grad=True)
    seen = []
    w.register_hook(lambda g: seen.append(g.clone()))
    f = jit(lambda x: (x * w).sum())

    def call(i):
        w.grad = None
        f(xs(i)).backward()
        return w.grad, list(seen)

    return call


@unrecorded
def a_written_argument_with_a_derivative(jit):
    w = torch.ones(3, requires_grad=True)

    def f(x):
        x.mul_(w)
        return x * 2

    g = jit(f)

    def call(i):
        x = xs(i)
        (d,) = torch.autograd.grad(g(x).sum(), w)
        return d, x.detach()

    return call


@unrecorded
def a_view_of_an_argument_with_a_derivative(jit):
    f = jit(lambda x: x[1:])

    def call(i):
        x = xs(i).requires_grad_()
        y = x * 1
        out = f(y)
        out.mul_(2)
        return torch.autograd.grad(y.sum(), x)

    return call


@case
def layers(jit):
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.GroupNorm(1, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(18, 2),
    )
    p = {k: v.detach() for k, v in m.named_parameters()}
    f = jit(
        vmap(
            grad(
                lambda p, x, y: F.cross_entropy(forall.functional_call(m, p, (x[None],)), y[None])
            ),
            in_dims=(None, 0, 0),
        )
    )
    return lambda i: f(p, xs(i, 4, 1, 8, 8), torch.arange(4) % 2)


@case
def structured_control_flow(jit):
    f = jit(lambda x: scan(lambda c, a: (c + a.sin(), c * a), x[0], x[1:]))
    return lambda i: f(xs(i, 5, 2))


@unrecorded
def a_conditional(jit):
    f = jit(vmap(lambda x: cond(x.sum() > 0, torch.sin, torch.cos, x)))
    g = jit(lambda x: while_loop(lambda x: x.norm() < 10, lambda x: x * 2, x))
    return lambda i: (f(xs(i, 4, 2)), g(xs(i)))


@case
def mathematics_of_python(jit):
    state = {"t": 0.5}
    f = jit(lambda x: x * math.sin(state["t"]))

    def call(i):
        state["t"] = 0.5 + i // 2
        return f(xs(i))

    return call


@case
def an_error_and_then_none(jit):
    f = jit(lambda x: x @ x)

    def call(i):
        try:
            return f(xs(i, 3 if i % 2 else 2, 3))
        except RuntimeError as error:
            return str(error).splitlines()[0]

    return call


@case
def indices(jit):
    f = jit(lambda x, i: (x[i], x.index_select(0, i), x.gather(0, i), torch.where(x > 0, x, 0.0)))
    return lambda i: f(xs(i, 4), torch.tensor([i % 4, 0, 1]))


@case
def zeros_without_memory(jit):
    """As torch's forward formulas have where nothing moves; times an inf they are 0."""

    def f(x):
        zeros = torch.ops.aten._efficientzerotensor([3])
        one, other = zeros * x, 2 * x
        return one * x * x, other * zeros * x, (one * x).clone() * 2

    f = jit(f)
    return lambda i: f(torch.tensor([1.0, float("inf"), float(i)]))


# --- what a captured tensor is, asked by who reads none of its numbers ----------------------------


@case
def whether_a_captured_tensor_requires_grad(jit):
    w = torch.ones(2)
    f = jit(lambda x: x * 2 if w.requires_grad else x * 3)

    def call(i):
        w.requires_grad_(i > 2)
        with torch.set_grad_enabled(i % 2 == 0):
            return f(xs(i))

    return call


@case
def whether_what_is_made_of_it_requires_grad(jit):
    w = torch.ones(2)
    f = jit(lambda x: x * 2 if (w * 2).requires_grad else x * 3)

    def call(i):
        with torch.set_grad_enabled(i % 2 == 0):
            w.requires_grad_(i > 3)
            return f(xs(i))

    return call


@case
def the_layout_of_a_captured_tensor(jit):
    w = torch.ones(2, 3)
    f = jit(lambda x: x * w.shape[0] + w.element_size())

    def call(i):
        if i > 3:
            w.data = [torch.ones(4, 3), torch.ones(4, 3).double()][i % 2]
        return f(xs(i))

    return call


@case
def the_shape_of_a_captured_sparse_tensor(jit):
    w = torch.eye(3, 2).to_sparse()
    f = jit(lambda x: x * w.shape[0])

    def call(i):
        w.sparse_resize_((max(i, 3), 2), 2, 0)
        return f(xs(i))

    return call


@case
def the_class_of_a_captured_tensor(jit):
    class Own(torch.Tensor):
        pass

    w = torch.ones(2)
    f = jit(lambda x: x * 2 if type(w) is torch.Tensor else x * 3)

    def call(i):
        if i > 3:
            w.__class__ = Own
        return f(xs(i))

    return call


@unrecorded
def the_gradient_of_a_captured_tensor(jit):
    w = torch.ones(2)
    f = jit(lambda x: x * 2 if w.grad is None else x * 3)

    def call(i):
        w.grad = w * 2 if i > 3 else None
        return f(xs(i))

    return call


@unrecorded
def how_often_an_argument_was_written_to(jit):
    f = jit(lambda x: x * x._version)

    def call(i):
        x = xs(i)
        for _ in range(i):
            x.add_(1)
        return f(x)

    return call


@unrecorded
def whether_an_argument_is_a_leaf(jit):
    f = jit(lambda x: x.detach() * 2 if x.is_leaf else x.detach() * 3)

    def call(i):
        x = xs(i).requires_grad_()
        return f(x if i < 4 else x * 1)

    return call


@unrecorded
def what_memory_held_written_into_a_captured_tensor(jit):
    lengths = torch.zeros(2)

    def loss(x):
        return F.ctc_loss(x, torch.tensor([[1, 2], [2, 3]]), (5, 4), (2, 1), reduction="mean")

    def f(x):
        lengths.copy_(loss(x))
        return x * 2

    f = jit(f)

    def call(i):
        return f(xs(i, 5, 2, 4).log_softmax(-1)), lengths.clone()

    return call


@unrecorded
def numbers_of_a_list_that_torch_writes_unseen(jit):
    targets = torch.tensor([[1, 2], [2, 3]])

    def loss(x):
        return F.ctc_loss(x, targets, (5, 4), target_lengths=(2, 1), reduction="mean")

    f = jit(grad(loss))

    def call(i):
        x = xs(i, 5, 2, 4).log_softmax(-1)
        others = [torch.full((2,), 7.0 + n) for n in range(9)]  # in the memory that it had
        del others
        return f(x)

    return call


@case
def whether_an_argument_is_a_parameter(jit):
    f = jit(lambda x: x.detach() * (2 if isinstance(x, nn.Parameter) else 3))

    def call(i):
        x = xs(i).requires_grad_()
        return f(nn.Parameter(x) if i < 4 else x)

    return call


@case
def whether_an_argument_is_one_of_inference_mode(jit):
    f = jit(lambda x: x * (2 if x.is_inference() else 3))

    def call(i):
        with torch.inference_mode(i > 3):
            x = xs(i)
        return f(x)

    return call


@case
def attributes_of_what_is_held_weakly(jit):
    class Held:
        factor = 2.0

    held = Held()
    known = weakref.WeakValueDictionary(a=held)
    f = jit(lambda x: x * known["a"].factor)

    def call(i):
        held.factor = 2.0 + i // 3
        return f(xs(i))

    return call


# --- modules, by other ways than their names ------------------------------------------------------


def settings(**names: Any) -> Any:
    module = types.ModuleType("own_settings")
    vars(module).update(names)
    return module


def by_a_module(i, module, f):
    module.factor = 2.0 + i // 3
    return f(xs(i))


def scaled(x, module):
    return x * module.factor


@case
def a_module_that_an_object_holds(jit):
    home = SimpleNamespace(settings=settings(factor=1.0))
    f = jit(lambda x: x * home.settings.factor)
    return lambda i: by_a_module(i, home.settings, f)


@case
def a_module_that_is_handed_on(jit):
    f = jit(lambda x: scaled(x, MODULE))
    return lambda i: by_a_module(i, MODULE, f)


@case
def a_module_that_a_function_gives(jit):
    def given():
        return MODULE

    f = jit(lambda x: x * given().factor)
    return lambda i: by_a_module(i, MODULE, f)


@case
def a_module_asked_by_any_name(jit):
    name = "fac" + "tor"
    f = jit(lambda x: x * getattr([MODULE][0], name))
    return lambda i: by_a_module(i, MODULE, f)


@case
def a_module_in_a_module(jit):
    outer = settings(inner=settings(factor=1.0))
    f = jit(lambda x: scaled(x, outer.inner))
    return lambda i: by_a_module(i, outer.inner, f)


@case
def a_module_that_finds_its_names(jit):
    found = {"factor": 1.0}
    module = settings(__getattr__=lambda name: found[name])
    f = jit(lambda x: x * module.factor)

    def call(i):
        found["factor"] = 2.0 + i // 3
        return f(xs(i))

    return call


@case
def a_module_of_another_class(jit):
    class Own(types.ModuleType):
        @property
        def factor(self):
            return self.under + 1.0

    module = settings(factor=1.0)
    f = jit(lambda x: x * module.factor)

    def call(i):
        module.under = i // 4
        if i == 2:
            del module.factor
            module.__class__ = Own
        return f(xs(i))

    return call


@case
def a_module_imported_inside(jit):
    def f(x):
        import jit.cases as own  # noqa: PLW0406

        return x * own.SCALE

    f = jit(f)

    def call(i):
        set_global("SCALE", 2.0 + i // 3)
        return f(xs(i))

    return call


def by_ways_of_its_own(function):
    """A case of a function, in a module of its own, that finds `SCALE` in another way than that."""

    def made(jit):
        home = settings(sys=sys, inspect=inspect, importlib=importlib, given=lambda: 0)
        home.given = types.FunctionType(home.given.__code__, vars(home))
        f = jit(types.FunctionType(function.__code__, vars(home)))

        def call(i):
            sys.modules["own_settings"] = home
            home.SCALE = 2.0 + i // 3
            return f(xs(i))

        return call

    made.__name__ = function.__name__
    return case(made)


@by_ways_of_its_own
def its_own_globals(x):
    return x * globals()["SCALE"]


@by_ways_of_its_own
def the_globals_of_another(x):
    return x * given.__globals__["SCALE"]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@by_ways_of_its_own
def the_globals_of_a_frame(x):
    return x * inspect.currentframe().f_globals["SCALE"]


@by_ways_of_its_own
def what_is_evaluated(x):
    return x * eval("SCALE * 2")  # noqa: S307


@case
def a_module_in_what_is_evaluated(jit):
    own = settings(factor=1.0)
    code = (lambda x: x * eval("own.factor * 2")).__code__  # noqa: S307
    f = jit(types.FunctionType(code, {"own": own}))
    return lambda i: by_a_module(i, own, f)


@by_ways_of_its_own
def the_table_of_modules(x):
    return x * sys.modules[__name__].SCALE


@case
def a_module_that_is_replaced(jit):
    def f(x):
        import own_settings  # pyright: ignore[reportMissingImports]

        return x * own_settings.factor

    f = jit(f)

    def call(i):
        sys.modules["own_settings"] = settings(factor=2.0 + i // 3)
        return f(xs(i))

    return call


@by_ways_of_its_own
def a_module_imported_by_name(x):
    return x * importlib.import_module("own_settings").SCALE


random.seed(0)

"""torch.autograd.Function of both styles under every transform: the user's backward decides.

Backwards are wrong on purpose, so that one that is inlined or skipped shows. The truth is
torch.autograd on plain tensors, the push-forward its pull-back twice (see `words`).
"""

# ruff: noqa: ARG004 - torch names the arguments of these methods

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from limits.words import OUTSIDE, WORDS, outcome
from oracle import difference


class Old(Function):
    """3 x w; both derivatives are wrong."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 3 * x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * 100 * w, g * x * 7


class New(Function):
    """3 x w; both derivatives are wrong."""

    @staticmethod
    def forward(x, w):
        return 3 * x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        return g * y * w, g * x * 7


class OfResult(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 2 * g * y


class OfIntermediate(Function):
    """Saves what is neither an argument nor a result; its derivative is lost, as torch has it."""

    @staticmethod
    def forward(ctx, x):
        s = x.sin()
        ctx.save_for_backward(s, x)
        return s * x

    @staticmethod
    def backward(ctx, g):
        s, x = ctx.saved_tensors
        return g * (s + 5 * x)


class OnContext(Function):
    """Keeps a tensor and numbers on ctx itself."""

    @staticmethod
    def forward(ctx, x, power, name, scale=2.0):
        ctx.x, ctx.power, ctx.scale = x.detach(), power, scale
        assert name == "name"
        return scale * x**power

    @staticmethod
    def backward(ctx, g):
        return g * ctx.x * ctx.power * ctx.scale, None, None, None


class TwoResults(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, (x + w).sin()

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return 5 * g * w + h, g * x - 3 * h


class NotMaterialized(Function):
    """Without zeros for a result that goes unused."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x.sin()

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        gx = None if g is None else 5 * g * w
        if h is not None:
            gx = h * x if gx is None else gx + h * x
        return gx, None if g is None else g * x * x


class Indices(Function):
    """One result has no derivative."""

    @staticmethod
    def forward(ctx, x):
        y, order = x.sort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return y, order

    @staticmethod
    def backward(ctx, g, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(0, order, g) * 3


class FloatWithout(Function):
    """A result of floats that is said to have no derivative."""

    @staticmethod
    def forward(ctx, x):
        y = x.cos()
        ctx.mark_non_differentiable(y)
        ctx.save_for_backward(x)
        return x * x, y

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        return g * x * 5


class OnlySome(Function):
    """Computes what it is asked for; None elsewhere."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = g * w * 11 if ctx.needs_input_grad[0] else None
        gw = g * x * 13 if ctx.needs_input_grad[1] else None
        return gx, gw


class NoneForX(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return None, g * x * 2


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 7


class InPlaceNew(Function):
    @staticmethod
    def forward(x, w):
        return x.mul_(w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * w * 7, g * 3


class Inner(Function):
    """Its backward calls torch.autograd itself, and another Function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            p = x.detach().requires_grad_()
            (d,) = torch.autograd.grad((p**3).sum(), p)
        return OfResult.apply(x) * g + d * g


class Straight(Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Reversed(Function):
    """A gradient turned round, by a factor that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.factor * g, None


class AnInput(Function):
    """One result is an argument as it is."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x, x * w

    @staticmethod
    def backward(ctx, g, h):
        (w,) = ctx.saved_tensors
        return 2 * g + 3 * h * w, None


class Nested(Function):
    """Calls a Function in its forward, whose backward is not to run."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Old.apply(x, x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Captured(Function):
    """Its backward reads a tensor that it was not given."""

    @staticmethod
    def forward(ctx, x, holder):
        ctx.holder = holder
        return x * holder[0]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.holder[0] * 4, None


class Reduced(Function):
    """Shapes change on the way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g * x * 9).expand_as(x)


class Product(Function):
    """x w; both derivatives are wrong."""

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 21, g * x * 22


class OwnRule(Product):
    """Its own vmap rule, generated."""

    generate_vmap_rule = True


class OwnJvp(Function):
    """Its own push-forward, which agrees with its backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 5, g * x * 5

    @staticmethod
    def jvp(ctx, tx, tw):
        x, w = ctx.saved_tensors
        return 5 * (tx * w if tx is not None else 0) + 5 * (x * tw if tw is not None else 0)


class OwnVmap(Product):
    """A vmap rule by hand."""

    @staticmethod
    def vmap(info, in_dims, x, w):
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x
        w = w.movedim(in_dims[1], 0) if in_dims[1] is not None else w
        return OwnVmap.apply(x, w), 0


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 5


def in_place(a, w):
    h = a * w
    y = InPlace.apply(h)
    return y + h


def in_place_on_a_view(a, w):
    h = a * w + 1
    InPlace.apply(h[:2])
    return h.sin()


def sorted_by(a, w):
    y, order = Indices.apply(a * w)
    return y * w + order * a


def without(a, w):
    x, y = FloatWithout.apply(a * w)
    return x * y.requires_grad + y * 2 + x


def two(a, w):
    y, z = TwoResults.apply(a, w)
    return y * z


def twice(a, w):
    """The same Function under itself, and with one tensor in both places."""
    return Old.apply(New.apply(a, a), w) + Old.apply(a, a)


def in_a_checkpoint(a, w):
    return torch.utils.checkpoint.checkpoint(
        lambda a: Old.apply(a.sin(), w), a, use_reentrant=False
    )


def differentiated_inside(a, w):
    p = (a * w).detach().requires_grad_()
    (g,) = torch.autograd.grad(Old.apply(p * p, p).sum(), p, create_graph=True)
    return g * a


def stepped(a, w):
    p = (a * w).detach().requires_grad_()
    Once.apply(p).sum().backward()
    return p.grad * a


CASES = {
    "old style": lambda a, w: Old.apply(a * a, w),
    "setup_context": lambda a, w: New.apply(a * a, w),
    "a result saved": lambda a, w: OfResult.apply(a * w),
    "an intermediate saved": lambda a, w: OfIntermediate.apply(a * w),
    "state on ctx": lambda a, w: OnContext.apply(a * w, 3, "name"),
    "a default": lambda a, w: OnContext.apply(a * w, 2, "name", 0.5),
    "two results": two,
    "one of two results": lambda a, w: TwoResults.apply(a, w)[1],
    "not materialized": lambda a, w: NotMaterialized.apply(a, w)[0] * a,
    "not materialized, the other": lambda a, w: NotMaterialized.apply(a, w)[1] * w,
    "not materialized, both": lambda a, w: sum(NotMaterialized.apply(a, w)),
    "a result of integers": sorted_by,
    "a result without derivative": without,
    "needs_input_grad": lambda a, w: OnlySome.apply(a, w) * a,
    "needs_input_grad, one detached": lambda a, w: OnlySome.apply(a.detach(), w) * a,
    "None for an argument": lambda a, w: NoneForX.apply(a, w) * a,
    "mark_dirty": in_place,
    "mark_dirty on a view": in_place_on_a_view,
    "mark_dirty with setup_context": lambda a, w: InPlaceNew.apply(a * 2, w) * w,
    "autograd in the backward": lambda a, w: Inner.apply(a * w),
    "straight through": lambda a, w: Straight.apply(5 * a) * w,
    "a gradient turned round": lambda a, w: Reversed.apply(a, 3) * w,
    "an argument as result": lambda a, w: sum(AnInput.apply(a * 2, w)),
    "a Function in a forward": lambda a, w: Nested.apply(a * w),
    "captured by the backward": lambda a, w: Captured.apply(a, (w,)),
    "a number as result": lambda a, w: Reduced.apply(a * w) * a,
    "generate_vmap_rule": lambda a, w: OwnRule.apply(a, w) * a,
    "a vmap method": lambda a, w: OwnVmap.apply(a, w) * a,
    "a jvp method": lambda a, w: OwnJvp.apply(a, w) * a,
    "one in another": twice,
    "in a checkpoint": in_a_checkpoint,
    "differentiated inside": differentiated_inside,
    "once_differentiable inside": stepped,
    "of what does not differ": lambda a, w: Old.apply(w, w) * a,
    "of a shared argument": lambda a, w: Old.apply(w * 2, a),
}


def check(word, f, outside):
    there = WORDS[word]
    mine = outcome(there.ours, f, there.shape, outside)
    assert difference(mine, outcome(there.truth, f, there.shape, outside)) is None


@pytest.mark.sweep(8)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("case", CASES)
def test_a_function_has_the_derivative_that_its_author_wrote(case, word):
    for outside in OUTSIDE:
        check(word, CASES[case], outside)

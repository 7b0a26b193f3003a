"""Functions of one example that combine all examples: sums, batch norm, a contrastive loss.

torch.func has no named axes. Its programs take what the examples have in common from outside.
"""

import torch

import forall
from registry import REPLAYED, Contestants, contest, workload


@workload(
    "named-axes-psum",
    "`x - psum(x)` of 64 examples of 16 numbers",
    limits={(REPLAYED, 1): 1.0},
)
def named_axes_psum(device: torch.device) -> Contestants:
    xs = torch.randn(64, 16, device=device)

    def transformed(api):
        if api is forall:
            combined = api.vmap(lambda x: x - forall.psum(x, "b"), axis_name="b")
            return lambda: combined(xs)
        mapped = api.vmap(torch.sub, in_dims=(0, None))
        return lambda: mapped(xs, xs.sum(0))

    def by_jax(jax):
        f = jax.vmap(lambda x: x - jax.lax.psum(x, "b"), axis_name="b")
        return f, (xs,)

    return contest(transformed, lambda: xs - xs.sum(0), by_jax=by_jax)


def _contest_gradients(of_one, of_all, w, xs, ys) -> Contestants:
    """Compare the gradient of a mean over named examples with that of a loss of all examples."""

    def transformed(api):
        if api is forall:
            mapped = api.vmap(of_one, in_dims=(None, 0, 0), axis_name="b")
            gradient = api.grad(lambda w: mapped(w, xs, ys).mean())
        else:
            gradient = api.grad(of_all)
        return lambda: gradient(w)

    def handwritten():
        leaf = w.detach().requires_grad_()
        return torch.autograd.grad(of_all(leaf), leaf)[0]

    return contest(transformed, handwritten)


@workload(
    "named-axes-batch-norm",
    "gradient of a layer with batch norm by `pmean`, 256 examples of 64 numbers",
    limits={(REPLAYED, 1): 1.0},
)
def named_axes_batch_norm(device: torch.device) -> Contestants:
    xs = torch.randn(256, 64, device=device)
    ys = torch.randn(256, 32, device=device)
    w = torch.randn(64, 32, device=device) / 8

    def normalize(h, mean):
        centered = h - mean(h)
        return centered / (mean(centered**2) + 1e-5).sqrt()

    def of_one(w, x, y):
        return ((normalize(x @ w, lambda h: forall.pmean(h, "b")) - y) ** 2).mean()

    def of_all(w):
        return ((normalize(xs @ w, lambda h: h.mean(0)) - ys) ** 2).mean()

    return _contest_gradients(of_one, of_all, w, xs, ys)


@workload(
    "named-axes-contrastive",
    "gradient of a contrastive loss by `all_gather`, 128 pairs of 64 numbers",
    limits={(REPLAYED, 1): 1.0},
)
def named_axes_contrastive(device: torch.device) -> Contestants:
    a, b = torch.randn(2, 128, 64, device=device).unbind()
    w = torch.randn(64, 32, device=device) / 8

    def of_one(w, x, y):
        rows = forall.all_gather(y @ w, "b")
        scores = (rows @ (x @ w)).log_softmax(0)
        own = forall.axis_index("b") == torch.arange(128, device=device)
        return -torch.where(own, scores, 0).sum()

    def of_all(w):
        return -((a @ w) @ (b @ w).T).log_softmax(1).diagonal().mean()

    return _contest_gradients(of_one, of_all, w, a, b)

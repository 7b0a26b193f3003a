"""jit of functions that call torch's own control flow, which has no rule for a mode like ours."""

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torchs_map

from forall import grad, jit, vmap
from oracle import difference

X = torch.tensor([[1.0, 2.0], [-3.0, 1.0]])

FUNCTIONS = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * x, (x,)),
    "while_loop": lambda x: while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)
    )[1],
    "scan": lambda x: scan(lambda c, r: (c + r, c * r), torch.ones(2), x)[1],
    "map": lambda x: torchs_map(lambda r: r * r.sum(), x),
    "associative_scan": lambda x: associative_scan(torch.mul, x, 0, combine_mode="generic"),
}


@pytest.mark.filterwarnings("ignore:jit")
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_jit_is_the_function(f):
    gradient = grad(lambda x: f(x).sum())
    for function in (f, gradient, vmap(f), vmap(gradient)):
        xs = torch.stack([X, X + 1]) if function not in (f, gradient) else X
        jitted = jit(function)
        for x in (xs, xs * 2, -xs, xs):
            assert difference(jitted(x), function(x)) is None

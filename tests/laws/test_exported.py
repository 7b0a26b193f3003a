"""torch.export of modules that use transforms: where ours have a level, torch's do the work."""

import pytest
import torch

import forall

X = torch.linspace(-1, 1, 12).reshape(4, 3)
CALLS = {
    "vmap": lambda x: forall.vmap(torch.sin)(x),
    "nested vmap": lambda x: forall.vmap(forall.vmap(torch.sin))(x),
    "vmap with dims": lambda x: forall.vmap(torch.sin, 1, 1)(x),
    "grad": lambda x: forall.grad(lambda x: x.sin().sum())(x),
    "vjp": lambda x: forall.vjp(torch.sin, x)[1](x)[0],
}


class Calls(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize("name", CALLS)
def test_exported_module_computes_what_the_module_does(name):
    module = Calls(CALLS[name])
    exported = torch.export.export(module, (X,), strict=False).module()
    torch.testing.assert_close(exported(2 * X), module(2 * X))

"""tensordict: EnsembleModule, and a function of a TensorDictParams with out_dims."""

import torch
from tensordict import TensorDict
from tensordict.nn import EnsembleModule, TensorDictModule
from torch import nn


def make():
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    ensemble = EnsembleModule(TensorDictModule(net, in_keys=["x"], out_keys=["y"]), 5)
    params = TensorDict.from_modules(
        *[nn.Linear(8, 3, device="cpu") for _ in range(5)], as_module=True
    )
    empty = nn.Linear(8, 3, device="meta")
    data = TensorDict({"x": torch.randn(16, 8)}, [16])

    def of_one(params, x):
        with params.to_module(empty, preserve_module_state=False):
            return empty(x)

    def run():
        apart = torch.vmap(of_one, in_dims=(0, None), out_dims=(1,))(params, data["x"])
        return [ensemble(data)["y"], apart]

    return run

"""evotorch: search (CEM, PGPE) for a batch of problems, a module of flat parameters."""

import torch
from evotorch.algorithms.functional import cem, cem_ask, cem_tell, pgpe, pgpe_ask, pgpe_tell
from evotorch.decorators import expects_ndim
from evotorch.neuroevolution.net.functional import ModuleExpectingFlatParameters
from torch import nn


@expects_ndim(1)
def rastrigin(x):
    return 10 * x.shape[-1] + (x.square() - 10 * (2 * torch.pi * x).cos()).sum()


def make():
    network = ModuleExpectingFlatParameters(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    )
    population = torch.randn(64, network.parameter_length)
    observed = torch.randn(6)
    centers = torch.randn(4, 12)

    def run():
        torch.manual_seed(0)
        state = cem(
            center_init=centers, parenthood_ratio=0.5, objective_sense="min", stdev_init=1.0
        )
        other = pgpe(
            center_init=centers,
            center_learning_rate=0.1,
            stdev_learning_rate=0.1,
            objective_sense="min",
            stdev_init=1.0,
        )
        for _ in range(3):
            found = cem_ask(state, popsize=20)
            state = cem_tell(state, found, rastrigin(found))
            found = pgpe_ask(other, popsize=20)
            other = pgpe_tell(other, found, rastrigin(found))
        policies = torch.func.vmap(network, in_dims=(0, None))(population, observed)
        return [state.center, other.optimizer_state.center, policies]

    return run

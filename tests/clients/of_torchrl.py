"""torchrl: a network for each of several agents, and its gradients."""

import torch
from torchrl.modules import MultiAgentConvNet, MultiAgentMLP


def make():
    mlp = MultiAgentMLP(
        n_agent_inputs=8,
        n_agent_outputs=4,
        n_agents=5,
        centralized=False,
        share_params=False,
        depth=2,
        num_cells=32,
    )
    conv = MultiAgentConvNet(
        n_agents=3,
        centralized=True,
        share_params=False,
        in_features=2,
        num_cells=[8],
        kernel_sizes=3,
    )
    seen, images = torch.randn(32, 5, 8), torch.randn(4, 3, 2, 8, 8)

    def run():
        mlp.zero_grad()
        out = mlp(seen)
        out.square().sum().backward()
        return [out, conv(images), [p.grad.clone() for p in mlp.parameters()]]

    return run

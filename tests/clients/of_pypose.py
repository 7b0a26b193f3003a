"""PyPose: a modular Jacobian, and steps of Levenberg-Marquardt for a rotation."""

import pypose as pp
import torch
from torch import nn


class Inverse(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.pose = pp.Parameter(start)

    def forward(self, x):
        return (self.pose @ x).Log().tensor()


def make():
    start, x = pp.randn_SE3(2, 2), pp.randn_SE3(2, 2)
    vectors = torch.randn(5, 3)

    def turned(pose, vectors):
        return pose.Act(vectors)

    def run():
        model = Inverse(start)
        optimizer = pp.optim.LM(model, strategy=pp.optim.strategy.Adaptive(damping=1e-3))
        for _ in range(2):
            optimizer.step(x)
        rotation = pp.randn_SO3(sigma=0.0)
        slopes = pp.func.jacrev(turned, argnums=(0, 1))(rotation, vectors)
        return [model.pose.detach().tensor(), list(slopes)]

    return run

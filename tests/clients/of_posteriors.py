"""posteriors: an extended Kalman filter, a dense Laplace approximation and a variational fit."""

import posteriors
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = torch.randn(24, 5), torch.randn(24, 1)

    def log_likelihood(params, batch):
        xs, ys = batch
        out = torch.func.functional_call(model, params, (xs,))
        return -(out - ys).square().sum(-1), out

    def log_posterior(params, batch):
        log, out = log_likelihood(params, batch)
        return log.mean(), out

    filtering = posteriors.ekf.diag_fisher.build(log_likelihood, lr=1e-3, per_sample=True)
    laplace = posteriors.laplace.dense_ggn.build(
        lambda params, batch: (
            torch.func.functional_call(model, params, (batch[0],)),
            torch.empty(0),
        ),
        lambda out, batch: -(out - batch[1]).square().sum(),
    )
    variational = posteriors.vi.diag.build(
        log_posterior, posteriors.torchopt.torchopt.adam(lr=1e-2), n_samples=4, stl=True
    )

    def run():
        torch.manual_seed(0)
        filtered, _ = filtering.update(filtering.init(params), batch)
        fitted, _ = laplace.update(laplace.init(params), batch)
        guess, _ = variational.update(variational.init(params), batch)
        return [
            dict(filtered.params.items()),
            dict(filtered.sd_diag.items()),
            fitted.prec,
            dict(guess.params.items()),
        ]

    return run

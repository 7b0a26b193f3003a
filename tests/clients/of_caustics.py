"""caustics: magnification, Jacobian and time delay of a gravitational lens."""

import caustics
import torch


def make():
    cosmology = caustics.FlatLambdaCDM()
    lens = caustics.SIE(
        cosmology=cosmology, z_l=0.5, z_s=1.0, x0=0.0, y0=0.0, q=0.7, phi=0.3, Rein=1.0
    )
    # torch.func's jacfwd gives float64 for float32: the lens has its numbers in float64.
    xs, ys = torch.linspace(0.2, 1.5, 24).double(), torch.linspace(-1.0, 1.2, 24).double()

    def run():
        at = lens.jacobian_lens_equation(xs, ys)

        def deflected(x, y):
            return torch.stack(lens.raytrace(x, y))

        each = torch.vmap(torch.func.jacrev(deflected, argnums=(0, 1)))(xs, ys)
        return [at, lens.magnification(xs, ys), list(each)]

    return run

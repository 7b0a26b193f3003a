"""einx: operations along named axes, in its notation, by torch.vmap."""

import einx
import torch


def make():
    x, w = torch.randn(4, 16, 32), torch.randn(4, 32, 8)
    backend = "torch.vmap"

    def run():
        return [
            einx.sum("a [b] c", x, backend=backend),
            einx.dot("a b [c], a [c] d -> a b d", x, w, backend=backend),
            einx.flip("a (b [c]) d", x, c=4, backend=backend),
            einx.softmax("a [b] c", x, backend=backend),
        ]

    return run

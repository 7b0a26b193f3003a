"""An explained call gives what the call gives, also where a converted run is given up."""

import torch

from forall import explain, jvp, vmap

SOURCE = """
def halve(x):
    t = torch.tensor(0.0)
    while t < 3:
        new = x * 0.5
        if new.norm() < 1:
            t = t + 1
        x = torch.cat([new[:1], new[1:]])
        t = t + 0.1 * x.norm()
    return x
"""


def test_a_transform_inside_of_a_run_that_is_given_up():
    names = {"torch": torch}
    exec(SOURCE, names)  # noqa: S102 - so that it has no source that could be converted
    halve = names["halve"]

    def slope(x):
        return jvp(lambda s: halve(s), (x,), (x,))[1]

    xs = torch.rand(4, 2, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [5.0], [9.0]])
    found = explain(vmap(slope))(xs)
    torch.testing.assert_close(found.result, torch.stack([slope(x) for x in xs]))

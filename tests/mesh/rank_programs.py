"""Functions that the ranks of a pool call, by name. The first argument is a mesh of one dim."""

import time

import torch
import torch.distributed as dist

import forall
from forall import axis_index, axis_size, grad, jvp, pmax, psum, vmap
from mesh.programs import EXAMPLES, PROGRAMS, Named


def call_programs(mesh, names, sizes):
    """Return each program's value and derivatives on this rank's examples."""
    rank = mesh.get_local_rank()
    start = sum(sizes[:rank])
    found = {}
    for name in names:
        program = PROGRAMS[name]
        x = EXAMPLES[start : start + sizes[rank]]
        f = vmap(lambda x, p=program: p(Named, x), axis_name="i", mesh=mesh)
        try:
            found[name] = f(x), grad(lambda x, f=f: f(x).square().sum())(x)
        except Exception as error:
            import traceback
            found[name] = traceback.format_exc()
    return found

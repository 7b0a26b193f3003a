"""Random numbers from keys: a draw depends on its key alone."""

from forall._random.continuous import (
    exponential,
    gumbel,
    laplace,
    multivariate_normal,
    normal,
    truncated_normal,
    uniform,
)
from forall._random.discrete import (
    bernoulli,
    categorical,
    choice,
    permutation,
    poisson,
    rademacher,
    randint,
)
from forall._random.gamma import beta, dirichlet, gamma
from forall._random.key_scope import next_key, scope
from forall._random.keys import bits, fold_in, key, split

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "categorical",
    "choice",
    "dirichlet",
    "exponential",
    "fold_in",
    "gamma",
    "gumbel",
    "key",
    "laplace",
    "multivariate_normal",
    "next_key",
    "normal",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "scope",
    "split",
    "truncated_normal",
    "uniform",
]

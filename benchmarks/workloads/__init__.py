"""Importing the groups registers their workloads, in the order of the report."""

from . import pointwise  # noqa: F401, I001
from . import small  # noqa: F401
from . import per_example  # noqa: F401
from . import attention  # noqa: F401
from . import recurrent  # noqa: F401
from . import ensembles  # noqa: F401
from . import jacobians  # noqa: F401
from . import hessians  # noqa: F401
from . import maml  # noqa: F401
from . import gaussian_process  # noqa: F401
from . import diverging  # noqa: F401
from . import fallbacks  # noqa: F401
from . import convolutions  # noqa: F401
from . import named_axes  # noqa: F401
from . import shared  # noqa: F401
from . import libraries  # noqa: F401

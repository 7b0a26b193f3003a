"""Functions and classes of torch and Python that are known to be pure: an allow-list.

A function that is missing here is not recorded. The functions in `QUESTIONS` read torch's state;
their results are compared with each call.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import functools
import inspect
import itertools
import operator
import pickle
import re
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from torch._library import custom_ops
from torch.autograd import functional
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from forall._compat.device_mesh import is_mesh_class, is_placement_class
from forall._compat.dispatch_state import CAST_KEYS
from forall._compat.private_api import (
    OpOverload,
    OpOverloadPacket,
    function_homes,
    functions_pass,
    module_of,
)
from forall._compat.tensordict import is_pure_module
from forall._compat.versions import LATER_QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

# Modules whose functions are all trusted, and packages whose classes are.
_MODULES = frozenset({"math", "_operator", "operator", "itertools", "_bisect", "re", "forall"})
# Modules of Python's whose functions have no side effects, as members of classes too.
_OF_PYTHON = frozenset(
    {"collections", "enum", "dataclasses", "abc", "typing", "types", "functools", "contextlib"}
    | {"reprlib"}  # whose decorator is around the `__repr__` of a dataclass, from Python 3.13 on
)
_CLASSES = (
    "torch.nn.modules.",
    "torch.nn.parameter",
    "torch.nn.utils.rnn",
    "torch.nn.utils.parametriz",  # and "parametrizations"
    "torch.distributions.",
    "torch.autograd.function",
    "torch.autograd.grad_mode",
    "torch.amp.autocast_mode",
    "torch.fx.",
    "torch._dynamo.eval_frame",
    "torch._subclasses.fake_tensor",
    "forall.",
    "enum",
    "abc",
    "collections.abc",
    "numbers",
)
_HOMES_OF_FUNCTIONS = (
    "torch.distributions.",
    "torch.nn.modules.",
    "torch.nn.utils.parametriz",
    "torch.nn.utils.convert_parameters",
    "torch.nn.utils.stateless",
    "torch.utils._contextlib",
    "torch.amp.autocast_mode",  # of what it decorates
    "torch.fx.graph_module",
    "torch._dynamo.",  # of what is not to be compiled
)

_BUILTINS = """
    abs all any bin bool bytes callable chr complex dict divmod enumerate filter float frozenset
    hasattr hex int isinstance issubclass iter len list map max min next object oct ord pow range
    repr reversed round set slice sorted str sum super tuple type zip property staticmethod
    classmethod True False None NotImplemented Ellipsis __build_class__ __name__ __annotations__
"""
_TELLING = """
    _version grad grad_fn is_leaf retains_grad output_nr data_ptr const_data_ptr _base _is_view
    _cdata _use_count is_shared is_pinned _backward_hooks _post_accumulate_grad_hooks
    initial_seed seed manual_seed get_state set_state get_rng_state set_rng_state __dict__ __code__
    __globals__ __closure__ __subclasses__ f_back f_globals f_locals gi_frame cr_frame ag_frame
    tb_frame cache_info
"""
_NUMPYS = """
    all allclose amax amin angle any append arange argmax argmin argpartition argsort argwhere
    array array_equal array_equiv array_split asanyarray asarray ascontiguousarray
    asfortranarray astype atleast_1d atleast_2d atleast_3d average bartlett bincount blackman
    block broadcast_arrays broadcast_shapes broadcast_to ceil choose clip column_stack compress
    concat concatenate convolve copy corrcoef correlate count_nonzero cov cross cumprod cumsum
    cumulative_prod cumulative_sum delete diag diag_indices diag_indices_from diagflat diagonal
    diff digitize dot dsplit dstack ediff1d einsum expand_dims extract eye fix flatnonzero flip
    fliplr flipud full full_like geomspace gradient hamming hanning histogram histogram2d
    histogram_bin_edges histogramdd hsplit hstack i0 identity imag indices inner insert interp
    intersect1d isclose iscomplex iscomplexobj isin isneginf isposinf isreal isrealobj isscalar
    issubdtype ix_ kaiser kron lexsort linspace logspace matrix_transpose max mean median
    meshgrid min mod moveaxis nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean
    nanmedian nanmin nanpercentile nanprod nanquantile nanstd nansum nanvar ndim nonzero ones
    ones_like outer partition percentile permute_dims polyadd polyder polydiv polyfit polyint
    polymul polysub polyval prod ptp quantile ravel ravel_multi_index real real_if_close repeat
    reshape resize result_type roll rollaxis roots rot90 round searchsorted select setdiff1d
    setxor1d shape sinc size sort sort_complex split squeeze stack std sum swapaxes take
    take_along_axis tensordot tile trace transpose trapezoid tri tril tril_indices
    tril_indices_from triu triu_indices triu_indices_from union1d unique unique_all
    unique_counts unique_inverse unique_values unravel_index unstack unwrap vander var vdot
    vsplit vstack where zeros zeros_like
"""
_OF_NUMPY = frozenset(_NUMPYS.split())
# Functions of optree's that take trees apart. What others have registered with it is watched.
_OF_OPTREE = frozenset({"flatten", "flatten_with_path", "is_leaf", "make_leaf", "make_none"})
BUILTINS = frozenset(_BUILTINS.split()) | {
    n for n, e in vars(builtins).items() if isinstance(e, type) and issubclass(e, BaseException)
}
# Attributes that tell more of a tensor, a generator or a function than a cache key does.
TELLING = frozenset(_TELLING.split())

# Functions that read an attribute whose name is not in the source.
BY_NAME = frozenset({"getattr", "setattr", "vars"})
_TOLD = [getattr(torch.Tensor, n) for n in TELLING - {"__dict__"} if hasattr(torch.Tensor, n)]
# The functions and getters of tensors with those names.
TELLS = frozenset(_TOLD + [told.__get__ for told in _TOLD if hasattr(told, "__get__")])

# Functions of torch's state without arguments (but for autocast, which is part of the key).
QUESTIONS = frozenset(
    {
        torch.jit.is_scripting,
        torch.jit.is_tracing,
        torch._C._get_tracing_state,
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
        torch.is_autocast_enabled,
        torch.is_autocast_cpu_enabled,
        torch.is_autocast_cache_enabled,
        torch.is_inference_mode_enabled,
        torch.are_deterministic_algorithms_enabled,
        torch.is_anomaly_enabled,
        torch.get_default_device,
        torch.get_num_interop_threads,
        torch.cuda.is_available,
        torch.cuda.is_initialized,
        torch.cuda.device_count,
        torch.cuda.is_current_stream_capturing,
        torch.xpu.is_available,
        torch.mps.is_available,
        torch.backends.mps.is_available,
        torch.distributed.is_available,
        torch._C._are_functorch_transforms_active,
        *LATER_QUESTIONS,
    }
)

# Keys at which a function is called before any mode sees its operator.
_COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeImplicitAutogradNestedTensor",
    *CAST_KEYS,
)

# Modules of functions of tensors.
_HOMES = (*function_homes[:-1], F, torch.functional, torch.linalg, torch.fft, torch.special)
_UNFIT = ("__", "set_", "_cufft_set", "from_file")
# Functions that are trusted one by one, of torch and of any other module.
_SINGLE_FUNCTIONS = (
    functions_pass,
    checkpoint,
    torch.autograd.grad,
    functional.jacobian,
    functional.hessian,
    functional.vjp,
    functional.jvp,
    functional.hvp,
    functional.vhp,
    torch.tensor,
    torch._assert,
    torch._check,
    torch._check_index,
    torch._check_type,
    torch._check_value,
    torch.as_tensor,
    torch.is_tensor,
    torch.overrides.is_tensor_like,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_grad_enabled,
    torch.get_default_dtype,
    torch.numel,
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.autocast,
    sdpa_kernel,
    SDPBackend,
    torch.finfo,
    torch.iinfo,
    torch.Tensor,
    torch.Size,
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.func.functional_call,
    inspect.signature,
    torch.jit.annotate,
    torch.autograd.forward_ad.unpack_dual,
    torch.jit.ignore,
    torch.jit.unused,
    *QUESTIONS,
    *(
        getattr(pytree, f"tree_{n}")
        for n in ["map", "map_only", "flatten", "unflatten", "leaves", "iter", "all", "any"]
    ),
    pickle.dumps,  # it reads the memory of a tensor, which the recorder sees
    types.SimpleNamespace,
    collections.OrderedDict,
    collections.defaultdict,
    functools.partial,
    functools.reduce,
    collections.deque,
)
_FOUND = [getattr(home, n) for home in _HOMES for n in dir(home) if not n.startswith(_UNFIT)]
# By identity, since none of them is ever freed.
_FUNCTIONS = frozenset(map(id, [*filter(callable, _FOUND), *_SINGLE_FUNCTIONS]))
_QUESTIONS = frozenset(map(id, QUESTIONS))


# Classes whose objects are compared by value.
WORDS = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    types.CodeType,
    types.UnionType,
)
# These too, and classes whose objects never change.
_INERT = (
    *WORDS,
    types.GenericAlias,  # guards compare its parts, as those of the following
    type(...),
    type(NotImplemented),
    type(getattr(functools, "Placeholder", None)),  # new in Python 3.14
    range,
    slice,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    SDPBackend,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    type(inspect.FullArgSpec.args),  # a reader of a namedtuple's entry
    type(torch.LongTensor),  # the recorder refuses the tensors that these make
)
_INERT_MODULES = frozenset(
    {"typing", "annotationlib", "dataclasses", "_abc", "enum", "numpy._globals"}
)


# Classes whose objects are known, or inspected one by one.
_LOOKED_AT = frozenset({torch.jit.ScriptFunction, *_INERT})


def is_inert(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _INERT) or module_of(kind) in _INERT_MODULES:
        return True
    if is_mesh_class(kind) or is_placement_class(kind):
        return True
    return kind.__module__ == "numpy" and issubclass(kind, sys.modules["numpy"].generic)


def is_state_query(value: Any) -> bool:
    """Return True if a function reads torch's state, so that its result has to be guarded."""
    return id(value) in _QUESTIONS or _is_onnx_query(value)


def _is_onnx_query(value: Any) -> bool:
    """Return True for onnx's function of its state; importing torch.onnx for it takes 0.2 s."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and value is getattr(onnx, "is_in_onnx_export", None)


def is_known_function(value: Any) -> bool:
    """Return True for a function that is known to be pure by its identity; most are torch's."""
    return id(value) in _FUNCTIONS or _is_onnx_query(value)


# Functions that read any attribute of their argument.
READERS = frozenset({hasattr, pickle.dumps})

# Code of `copy.copy` that makes an object of what the object's own reducer tells.
REBUILDING = (copy._reconstruct.__code__,)  # pyright: ignore[reportAttributeAccessIssue]


def is_shallow_copy(value: Any) -> bool:
    """Return True for `copy.copy`, which calls what is registered for, or in, an object's class."""
    return value is copy.copy


def list_copiers() -> tuple[Any, ...]:
    """Return by which functions, or how, `copy.copy` copies the objects of Python's own classes."""
    tables = [getattr(copy, name) for name in _TABLES_OF_COPY if hasattr(copy, name)]
    return tuple({**table} if isinstance(table, dict) else {*table} for table in tables)


# The first is of Python 3.13 and before, the others are of Python 3.14.
_TABLES_OF_COPY = ("_copy_dispatch", "_copy_atomic_types", "_copy_builtin_containers")


SCRIPTS = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch._C.ScriptMethod)
# The nodes of TorchScript, besides operators, that have no state.
_SCRIPTED = """
    Constant If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex TupleSlice
    DictConstruct NumToTensor Uninitialized RaiseException unchecked_cast dtype device layout
    min max abs range enumerate zip is_cuda unchecked_unwrap_optional annotate isinstance
"""
_OF_SCRIPTS = frozenset(f"prim::{name}" for name in _SCRIPTED.split())
_NOT_OF_SCRIPTS = frozenset(f"aten::{name}" for name in TELLING | {"warn", "set_grad_enabled"})


def _is_pure_script(function: torch.jit.ScriptFunction) -> bool:
    """Return True if a scripted function only calls operators, which the recorder sees."""
    return all(
        kind in _OF_SCRIPTS or (kind.startswith("aten::") and kind not in _NOT_OF_SCRIPTS)
        for kind in _iterate_node_kinds(function.inlined_graph)
    )


def has_tolist(scripted: Any) -> bool:
    """Return True if a scripted function makes a list of a tensor, whose memory it reads itself."""
    return "prim::tolist" in _iterate_node_kinds(scripted.inlined_graph)


def _iterate_node_kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _iterate_node_kinds(inner)


def is_trusted_value(value: Any) -> bool:
    """Return True if a value of a library may be used: called, if it can be."""
    if is_known_function(value) or is_inert(value):
        return True
    if isinstance(value, torch.jit.ScriptFunction):
        return _is_pure_script(value)
    if value is operator.attrgetter or value is operator.methodcaller:
        return False  # they read attributes that the analysis does not see
    if isinstance(value, type):
        return _is_trusted_class(value)
    if _is_numpy_function(value) or is_of_optree(value):
        return True
    module = module_of(value)
    if isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        home = getattr(value, "__globals__", {}).get("__name__", module)
        return (
            home.partition(".")[0] in _MODULES | _OF_PYTHON
            or (home == "builtins" and value.__name__ in BUILTINS)
            or is_pure_module(home)
            or home.startswith(_HOMES_OF_FUNCTIONS)
            or (value.__name__ == "__new__" and is_trusted_base(getattr(value, "__self__", object)))
        )
    return isinstance(value, (OpOverload, OpOverloadPacket))


def _is_numpy_function(value: Any) -> bool:
    """Return True for a function of numpy's that computes numbers from numbers."""
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if numpy is None or not (kind is types.FunctionType or kind.__module__ == "numpy"):
        return False
    name = getattr(value, "__name__", "")
    there = vars(numpy).get(name)  # numpy warns of some that it does not have
    is_numpys = there is value or getattr(there, "__wrapped__", None) is value
    return is_numpys and (name in _OF_NUMPY or isinstance(value, numpy.ufunc))


def is_of_optree(value: Any) -> bool:
    """Return True for a C function of optree that only flattens or unflattens a tree."""
    optree = sys.modules.get("optree._C")
    if optree is None or type(value) is not types.BuiltinFunctionType:
        return False
    return value.__name__ in _OF_OPTREE and vars(optree).get(value.__name__) is value


def _is_trusted_class(kind: type) -> bool:
    module = module_of(kind)
    if module in _INERT_MODULES or kind in _LOOKED_AT:  # objects of these are inspected
        return True
    if module == "builtins":
        return kind.__name__ in BUILTINS
    if module == "numpy":  # programs have no arrays, so these only give Python's numbers
        numpy = sys.modules["numpy"]
        kinds = (numpy.ndarray, numpy.generic, numpy.ufunc, numpy.dtype, type(numpy.sum))
        return issubclass(kind, kinds) or kind is type(numpy.dtype)
    return (
        module in _MODULES
        or is_pure_module(module)
        or module.startswith(_CLASSES)
        or kind in _BASES
        or _is_collections_namedtuple(kind)
    )


_BASES = frozenset(
    {
        *torch.Tensor.__mro__,
        torch.nn.Module,
        torch.nn.Parameter,
        *torch.autograd.Function.__mro__,
        types.SimpleNamespace,
        types.ModuleType,
        threading.local,  # its attributes are those of the thread that reads them
        contextlib.nullcontext,
        *contextlib.ExitStack.__mro__,
        functools.partial,
        itertools.chain,
        collections.OrderedDict,
        collections.defaultdict,
        collections.deque,
        collections.Counter,
        re.Pattern,
        re.Match,
        inspect.Signature,
        inspect.Parameter,
        inspect.Parameter.empty,
        inspect.BoundArguments,
    }
)


def is_trusted_base(kind: type) -> bool:
    """Return True if a class of the user's may derive from this one of a library."""
    module = module_of(kind)
    return (
        kind in _BASES
        or module in ("typing", "typing_extensions", "enum", "abc")
        or is_pure_module(module)
        or module.startswith(_CLASSES)
        or (module == "builtins" and kind.__name__ in BUILTINS)
        or _is_collections_namedtuple(kind)
    )


def _is_collections_namedtuple(kind: type) -> bool:
    """Return True if `collections.namedtuple` made all methods of a class."""
    if kind.__bases__ != (tuple,) or "_fields" not in vars(kind):
        return False
    functions = (getattr(f, "__func__", f) for f in vars(kind).values())
    homes = [f.__globals__["__name__"] for f in functions if isinstance(f, types.FunctionType)]
    return all(home == "collections" or home.startswith("namedtuple_") for home in homes)


def find_op_definition(op: Any) -> Any:
    """Return the `torch.library.custom_op` that holds an operator's functions, or None."""
    packet = getattr(op, "overloadpacket", op)
    return custom_ops.OPDEFS.get(packet._qualified_op_name)


def is_python_composite(op: Any) -> bool:
    """Return True for an operator that a user's Python function implements by other operators.

    The function is registered by name and kept where Python does not find it, so its code cannot be
    analysed.
    """
    packet = getattr(op, "overloadpacket", op)
    home, _, name = packet._qualified_op_name.partition("::")
    names = {f"{home}/{name}", *(f"{home}/{name}.{overload}" for overload in packet.overloads())}
    return any(f"{n}/{key}" in torch.library._impls for n in names for key in _COMPOSITE)

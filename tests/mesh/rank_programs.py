"""Functions that the ranks of a pool call, by name. The first argument is a mesh of one dim."""

import contextlib
import functools
import gc
import itertools
import time
import traceback
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

import forall
from forall import (
    all_gather,
    axis_index,
    axis_size,
    grad,
    hessian,
    jacfwd,
    jacobian,
    jacrev,
    jit,
    jvp,
    linearize,
    per_example_grad_norm,
    pmax,
    pmean,
    psum,
    shard_map,
    vjp,
    vmap,
)
from forall._auto_replay.replayed_calls import get_transform_calls as get_calls
from forall._mesh import rank_kernels
from forall._mesh.rank_group import get_rank_group
from mesh.programs import EXAMPLES, PROGRAMS
from mesh.transforms import INSIDE, named, weights

ALL = (len(EXAMPLES),)


def take_share(x, sizes, rank):
    start = sum(sizes[:rank])
    return x[start : start + sizes[rank]]


def weigh(f, share):
    """Return the sum of all results of ``f``, with a weight for each entry on each rank."""

    def loss(x):
        y = f(x)
        return (y * share(weights(torch.empty(*ALL, *y.shape[1:], dtype=y.dtype)))).sum()

    return loss


def push(f, x, share):
    return jvp(f, (x,), (share(EXAMPLES.cos()),))


def pull_by_backward(f, x, share):
    x = x.clone().requires_grad_()
    weigh(f, share)(x).backward()
    return x.grad


# Outcomes on one rank's examples that are a part of those on all examples.
OUTSIDE = {
    "value": lambda f, x, share: f(x),
    "grad": lambda f, x, share: grad(weigh(f, share))(x),
    "vjp": lambda f, x, share: vjp(weigh(f, share), x)[1](torch.tensor(2.0).double()),
    "jvp": push,
    "linearize": lambda f, x, share: linearize(f, x)[1](share(EXAMPLES.sin())),
    "grad of jvp": lambda f, x, share: grad(
        lambda x: weigh(lambda x: push(f, x, share)[1], share)(x)
    )(x),
    "backward": pull_by_backward,
    "vmap further out": lambda f, x, share: vmap(f, 1, 1)(torch.stack([x, 2 * x, x.cos()], 1)),
    "jit": lambda f, x, share: [jit(f)(x) for _ in range(3)][-1],
}


def list_cases():
    cases = [(name, "outside", transform) for name in PROGRAMS for transform in OUTSIDE]
    return cases + [(name, "inside", transform) for name in PROGRAMS for transform in INSIDE]


def run_case(case, sizes=ALL, rank=0, **options):
    """Return what one of the cases gives on a rank's examples."""
    name, place, transform = case
    f, x = named(PROGRAMS[name]), take_share(EXAMPLES, sizes, rank)
    if place == "inside":
        return vmap(INSIDE[transform][0](f), axis_name="i", **options)(x)
    f = vmap(f, axis_name="i", **options)
    return OUTSIDE[transform](f, x, lambda whole: take_share(whole, sizes, rank))


def run_cases(mesh, cases, sizes):
    """Return the outcome of each case on this rank's examples, or the text of its error."""
    rank = mesh.get_local_rank()
    found = {}
    for case in cases:
        try:
            found[case] = tree_map(torch.Tensor.detach, run_case(case, sizes, rank, mesh=mesh))
        except Exception:
            found[case] = traceback.format_exc()
    return found


# --- failures ----------------------------------------------------------------------------------


class BadDataError(ValueError):
    """What the user's code raises in these programs."""


def _try(f, *args):
    """Return the error that a call raises, as its class, its text and its rank, and the seconds."""
    start = time.perf_counter()
    error = None
    try:
        f(*args)
    except Exception as raised:
        error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
    return error, time.perf_counter() - start


def _is_last(mesh):
    return mesh.get_local_rank() == mesh.size() - 1


def _fails(x, last):
    if last:
        raise BadDataError("bad data")
    return psum(x, "b")


def _fails_between(x, last):
    y = psum(x, "b")
    if last:
        raise BadDataError("bad data")
    return psum(x * y, "b")


def _fails_at_the_end(x, last):
    y = psum(x, "b")
    if last:
        raise BadDataError("bad data")
    return y


def _has_another_shape(x, last):
    return psum(torch.cat([x, x]) if last else x, "b")


def _has_another_dtype(x, last):
    return psum(x.float() if last else x, "b")


def _calls_another(x, last):
    return (pmax if last else psum)(x, "b")


def _swaps_two(x, last):
    def first():
        return psum(x, "b")

    def second():
        return psum(2 * x, "b")

    return [f() for f in ((second, first) if last else (first, second))]


def _sends_one_more(x, last):
    y = psum(x, "b")
    return psum(x * y, "b") if last else y


def _takes_another_branch(x, last):
    if x.sum() > (1000 if last else -1000):  # all examples of a rank agree
        return psum(x, "b")
    return psum(x.cos(), "b")


def _has_a_bad_dim(x, last):
    return x


FAILURES = {
    "fails before a message": _fails,
    "fails between messages": _fails_between,
    "fails after the last message": _fails_at_the_end,
    "has another shape": _has_another_shape,
    "has another dtype": _has_another_dtype,
    "calls another collective": _calls_another,
    "swaps two messages": _swaps_two,
    "sends one message more": _sends_one_more,
    "takes another branch": _takes_another_branch,
    "is called wrongly": _has_a_bad_dim,
}


def run_failures(mesh, names):
    """Return each program's error on this rank, and the sum of a correct call afterwards."""
    last = _is_last(mesh)
    x = torch.ones(2, 3, dtype=torch.float64)
    found = {}
    for name in names:
        in_dims = (7, None) if last and name == "is called wrongly" else (0, None)
        f = vmap(FAILURES[name], in_dims, axis_name="b", mesh=mesh)
        error, seconds = _try(f, x, last)
        after = vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh)(x)
        found[name] = (error, seconds, after[0, 0].item())
    return found


def run_with_agreement(mesh, how, sizes):
    """Return the outcome of a call with several collectives, with this setting."""
    xs = take_share(torch.arange(8.0), sizes, mesh.get_local_rank())
    with settings(agree=how):
        return vmap(lambda x: psum(x, "b") * x + pmax(x, "b"), axis_name="b", mesh=mesh)(xs)


def make_one_call_more(mesh):
    """The last rank makes a call that the others do not make."""
    x = torch.ones(2)
    if _is_last(mesh):
        error, seconds = _try(vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh), x)
    else:
        error, seconds = _try(vmap(lambda x: psum(2 * x, "b"), axis_name="b", mesh=mesh), x)
    after = vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh)(x)
    return error, seconds, after[0].item()


def wait_for_one_that_stays_away(mesh, seconds):
    """The last rank does not come to a call; the others give up after a part of this time."""
    vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh)(torch.ones(2))
    if _is_last(mesh):
        time.sleep(seconds)
        return None
    forall.config.rank_timeout = seconds / 4
    return _try(vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh), torch.ones(2))


def wait_for_one_that_never_comes(mesh, seconds):
    """The last rank makes no call at all, so that not even the first one begins."""
    if _is_last(mesh):
        time.sleep(seconds)
        return None
    forall.config.rank_timeout = seconds / 4
    return _try(vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh), torch.ones(2))


def wait_for_one_that_is_killed(mesh):
    if _is_last(mesh):
        time.sleep(1000)
    return _try(vmap(lambda x: psum(x, "b"), axis_name="b", mesh=mesh), torch.ones(2))


# --- one sequence of messages --------------------------------------------------------------------


def _part(x):
    y = psum(x, "b")
    if x > 2.5:  # examples of one rank alone diverge here
        z = x * y
    else:
        z = x - y
    return psum(z, "b") + z


def _loop(x):
    r = psum(x * x, "b")
    n = 0
    while r > 1:  # the same for all
        r = r / 2
        n = n + 1
    while x < n:  # each example for itself
        x = x + 1
    return pmean(x, "b")


def _choose(x):
    y = x.log() if x > 3 else x
    return all_gather(y, "b") * axis_index("b")


def _reduce_in_a_branch(x):
    if x > 2.5:
        return psum(x, "b")
    return x


CONTROL = {"examples diverge between": _part, "loops": _loop, "a branch before": _choose}


def run_control_flow(mesh, sizes, calls):
    """Return the outcome of each program of control flow, called so many times."""
    xs = take_share(torch.arange(8.0), sizes, mesh.get_local_rank())
    return {
        name: [vmap(f, axis_name="b", mesh=mesh)(xs) for _ in range(calls)]
        for name, f in CONTROL.items()
    }


def reduce_in_a_branch(mesh, sizes):
    xs = take_share(torch.arange(8.0), sizes, mesh.get_local_rank())
    return _try(vmap(_reduce_in_a_branch, axis_name="b", mesh=mesh), xs)[0]


def part_around_a_call(mesh, sizes):
    """Examples of a vmap without a mesh part after a call over ranks, on one rank alone."""
    rank = mesh.get_local_rank()
    xs = take_share(torch.arange(8.0), sizes, rank)

    def outer(s):
        y = vmap(lambda x: psum(x * s, "b"), axis_name="b", mesh=mesh)(xs)[0]
        if rank == 1 and s > 1:
            y = y + 1
        return y

    return vmap(outer)(torch.tensor([1.0, 2.0]))


def draw(mesh, sizes, seed):
    """Return what each example draws by a key, and its number."""
    xs = take_share(torch.zeros(8, 2), sizes, mesh.get_local_rank())
    key = forall.random.key(seed)

    def f(x):
        return x + torch.rand(2), torch.randn(()), axis_index("b")

    found = vmap(f, randomness=key, axis_name="b", mesh=mesh)(xs)
    in_chunks = vmap(f, randomness=key, axis_name="b", mesh=mesh, chunk_size=2)(xs)
    unnamed = vmap(lambda x: x + torch.rand(2), randomness=key, mesh=mesh)(xs)
    return *found, *in_chunks, unnamed


def use_sizes(mesh):
    """Return what a call tells of sizes, with no mapped argument, and with a wrong axis_size."""
    f = vmap(lambda: axis_index("b") * axis_size("b"), axis_name="b", axis_size=5, mesh=mesh)
    wrong = vmap(lambda x: x, axis_name="b", axis_size=9, mesh=mesh)
    return f(), _try(wrong, torch.ones(2))[0]


# --- recorded calls -----------------------------------------------------------------------------

WIDE = torch.linspace(-1, 2, 24).double().view(8, 3)
W = torch.tensor([1.0, 2.0, 0.5]).double()


def normalize(w, x):
    """A function of one example with four messages, of which the last is one of a derivative."""
    y = x * w
    y = (y - pmean(y, "b")) / psum(y.square(), "b").sqrt()
    return grad(lambda x: (pmean(x, "b").sin() * y).sum())(x) + y


def _weigh_square(f):
    return lambda w, xs: (f(w, xs).square() * W).sum()


# From a call over ranks to a function that is recorded, or holds one that is.
RECORDED = {
    "jit": jit,
    "jit around a derivative": lambda f: jit(
        lambda w, xs: (grad(_weigh_square(f))(w, xs), f(w, xs))
    ),
    "replay": lambda f: f,
    "replay of a derivative": lambda f: grad(_weigh_square(f)),
    "replay of a push-forward": lambda f: vmap(
        lambda i, w, xs: jvp(lambda w: f(w, xs), (w,), (i * W,))[1], (0, None, None)
    ),
}


@contextlib.contextmanager
def settings(**options):
    """Set `forall.config` within the context."""
    before = {name: getattr(forall.config, name) for name in options}
    try:
        for name, value in options.items():
            setattr(forall.config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(forall.config, name, value)


def record_call(how, **options):
    """Return a function that makes a call, and one that counts those that were replayed."""
    f = RECORDED[how](vmap(normalize, (None, 0), axis_name="b", **options))
    call = functools.partial(f, torch.arange(2.0)) if "push-forward" in how else f
    count = _count_jitted if how.startswith("jit") else _count_replayed
    return call, lambda: count(f)


def _count_jitted(f):
    return f.cache_info().hits


def _count_replayed(f):
    return get_calls(f).hits


def give(i):
    """Return the arguments of a call number ``i``, of all examples."""
    return W + i % 3, WIDE.roll(i, 0)


def call_recorded(mesh, how, sizes, times, eager_ranks, replay=True):
    """Return the results of some calls on this rank's examples, and how many were replayed.

    In every fourth call the ranks have each other's sizes.
    """
    rank, found = mesh.get_local_rank(), []
    with settings(replay=replay if rank not in eager_ranks else False, patience=0.0):
        call, count = record_call(how, mesh=mesh)
        if rank in eager_ranks and how.startswith("jit"):
            call = call.__wrapped__
        for i in range(times):
            w, xs = give(i)
            now = sizes if i % 4 != 3 else sizes[::-1]
            found.append(call(w, take_share(xs, now, rank)))
    return found, count()


def ask_of_data(mesh, sizes, how):
    """Return results of a function that asks a question of its rank's examples, and the hits."""
    rank, found = mesh.get_local_rank(), []

    def shrink(x):
        total = psum(x, "b")
        if x > 10:  # true in the fourth call on rank 0 alone
            x = x / 2
        return x + psum(total * x, "b")

    f = vmap(shrink, axis_name="b", mesh=mesh)
    f = jit(f) if how == "jit" else f
    with settings(patience=0.0):
        for i in range(8):
            xs = take_share(torch.arange(8.0), sizes, rank)
            found.append(f(xs + (20 if i == 3 and not rank else 0)))
    return found


def fail_in_a_program(mesh, how):
    """Fail on the last rank within a recorded call; return the error, and the next result."""
    f = vmap(lambda i, x: psum(x[i] * psum(x, "b").sum(), "b"), axis_name="b", mesh=mesh)
    f, count = (jit(f), _count_jitted) if how == "jit" else (f, _count_replayed)
    xs, at = torch.ones(2, 3), torch.tensor([0, 1])
    with settings(patience=0.0):
        for _ in range(6):
            f(at, xs)
        hits = count(f)
        error = _try(f, at + (7 if _is_last(mesh) else 0), xs)
        return error, f(at, xs), hits


def root_of_gradient(f):
    """Return a function that ends past a derivative's message: it fails for a negative sign."""

    def root(sign, w, xs):
        slope = grad(lambda w: f(w, xs).square().sum())(w)
        if sign > 5:
            return (sign * slope).sum()
        return torch.linalg.cholesky(sign * slope).sum()

    return root


SIGNS = (-1.0, 2.0, 2.0, 2.0, -1.0, 2.0, 8.0, 8.0, 2.0)


def fail_past_the_messages(mesh, how, failing):
    """Return the outcomes of nine calls, and the hits.

    On some ranks two of the calls fail, and two take another branch than those before. An outcome
    is a result, or what `_try` tells of an error. The first rank runs the function.
    """
    rank, found = mesh.get_local_rank(), []
    xs, w = torch.eye(2) * torch.arange(2.0, 4.0).view(2, 1, 1), torch.eye(2)
    f = root_of_gradient(vmap(lambda w, x: psum(w * x, "b"), (None, 0), axis_name="b", mesh=mesh))
    made, count = (jit(f), _count_jitted) if how == "jit" else (grad(f), _count_replayed)
    call, before = f if how == "jit" and not rank else made, count(made)
    with settings(patience=0.0, replay="check" if rank else False):
        for i in range(9):
            sign = torch.tensor(SIGNS[i] if rank in failing else 2.0)
            error, _ = _try(lambda sign, i: found.append(call(sign, w, xs + i * w)), sign, i)
            if error:
                found.append(error)
    return found, count(made) - before


def fail_where_a_call_runs_again(mesh, how):
    """Fail on the last rank where forall would make a failed call again; return the errors.

    It does so while a call is being recorded, and where examples of another vmap have parted.
    """
    total = vmap(lambda i, x: psum(x[i].sum(), "b"), axis_name="b", mesh=mesh)

    def f(at, xs):
        return total(at, xs) * 2

    def parted(at, xs):
        def one(scale):
            y = scale * 2 if scale > 1 else scale
            return total(at, xs).sum() * y

        return vmap(one)(torch.arange(3.0))

    run = {"recorded": total, "within": f, "parted": parted}[how]
    xs, at = torch.ones(2, 3), torch.tensor([0, 1])
    wrong = at + (7 if _is_last(mesh) else 0)
    errors = []
    with settings(patience=0.0):
        for before in range(4):
            made = forall.grad(lambda at, xs: f(at, xs).sum(), 1) if how == "within" else run
            for _ in range(before):
                made(at, xs)
            errors.append(_try(made, wrong, xs))
        return errors, run(at, xs)


def interrupt_a_program(mesh):
    """Interrupt the last rank while a recorded call comes to a message; return the error."""
    f = jit(vmap(lambda x: psum(x.sin(), "b").cos(), axis_name="b", mesh=mesh))
    xs, communicate = torch.arange(2.0), rank_kernels.communicate
    want = [f(xs) for _ in range(4)][-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    error, seconds = None, 0.0
    try:
        if _is_last(mesh):
            rank_kernels.communicate = interrupt
        error, seconds = _try(f, xs)
    except KeyboardInterrupt:
        error = ("KeyboardInterrupt", "", None)
    finally:
        rank_kernels.communicate = communicate
    return error, seconds, f(xs) - want, f.cache_info().hits


def pull_back_outside(mesh, sizes):
    """Return gradients from outside of a jitted call, which is not recorded then, and the kinds."""
    rank = mesh.get_local_rank()
    f, found = jit(vmap(normalize, (None, 0), axis_name="b", mesh=mesh)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(4):
            w, xs = give(i)
            w.requires_grad_()
            (f(w, take_share(xs, sizes, rank)).square() * W).sum().backward()
            found.append(w.grad)
    return found, [kind.why for kind in f.kinds()]


def draw_recorded(mesh, sizes):
    """Return draws of a jitted call with a key, and how many calls were replayed."""
    f = vmap(
        lambda x: x + torch.rand(2) + psum(torch.randn(()), "b"),
        randomness=forall.random.key(3),
        axis_name="b",
        mesh=mesh,
    )
    f = jit(f)
    xs = take_share(torch.zeros(8, 2), sizes, mesh.get_local_rank())
    return [f(xs) for _ in range(4)], f.cache_info().hits


def call_from_two_lines(mesh):
    """Call a jitted derivative from another line on each rank, after it was recorded on one."""
    f = vmap(lambda w, x: psum(w * x, "b"), (None, 0), axis_name="b", mesh=mesh)
    g = jit(grad(lambda w, xs: f(w, xs).sum()))
    xs, w = torch.arange(2.0), torch.tensor(3.0)
    found = [g(w, xs) for _ in range(3)]
    if _is_last(mesh):
        g.cache_clear()
        found.append(g(w, xs))
    else:
        found.append(g(w, xs))
    return found


# --- Jacobians ----------------------------------------------------------------------------------


def curve(x):
    return (torch.outer(x.sin(), x[:2].cos()), x.square().sum()), x[:1] * x


JACOBIANS = {
    "jacrev": (jacrev, curve),
    "jacfwd": (jacfwd, curve),
    "jacobian": (jacobian, curve),
    "hessian": (hessian, curve),
}
POINT = torch.linspace(0.3, 2.0, 5).double()
BATCH = torch.linspace(-1, 1, 10).double().view(2, 5)
AROUND = {
    "alone": lambda f: f()(POINT),
    "in chunks": lambda f: f(chunk_size=2)(POINT),
    "jit": lambda f: [(g := jit(f()))(POINT), g(POINT), g(POINT)][-1],
    "grad": lambda f: grad(lambda x: sum(y.sin().sum() for y in tree_leaves(f()(x))))(POINT),
    "vmap": lambda f: vmap(f(), out_dims=-1)(BATCH),
    "with a value": lambda f: f(return_value=True)(POINT)[0],
}


def take_jacobian(how, around, **options):
    transform, f = JACOBIANS[how]
    return tree_leaves(AROUND[around](lambda **more: transform(f, **options, **more)))


def take_jacobians(mesh):
    """Return this rank's part of each Jacobian, or the text of its error."""
    found = {}
    for case in itertools.product(JACOBIANS, AROUND):
        try:
            found[case] = take_jacobian(*case, mesh=mesh)
        except Exception:
            found[case] = traceback.format_exc()
    return found


def differ_in_outputs(mesh):
    """Take a Jacobian of a function with another output on the last rank; return the error."""
    return _try(jacrev(lambda x: x[: 2 + _is_last(mesh)], mesh=mesh), POINT)


def take_norms(mesh, sizes):
    """Return the norms of this rank's gradients."""
    xs = take_share(WIDE, sizes, mesh.get_local_rank())
    return per_example_grad_norm(lambda w, x: (w * x).sin().sum(), mesh=mesh)(W, xs)


# --- axes of ranks, and DTensors ----------------------------------------------------------------


def name_dim(mesh, name):
    return DeviceMesh.from_group(mesh.get_group(), "cpu", mesh_dim_names=(name,))


def run_in_axes(mesh, cases):
    """Return each case's outcome with this rank's example, by ``axes`` and by ``shard_map``."""
    mesh, found = name_dim(mesh, "i"), {}
    x = EXAMPLES[mesh.get_local_rank()]
    for name, transform in cases:
        try:
            f = INSIDE[transform][0](named(PROGRAMS[name]))
            with forall.axes(mesh):
                found[name, transform] = f(x), shard_map(f, mesh)(x)
        except Exception:
            found[name, transform] = traceback.format_exc()
    return tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, found)


def mix(x):
    """A function of one block with collectives along two dims."""
    y = x.sin() * psum(x, "a") + pmean(x, ("a", "b"))
    return y + all_gather(y, "b").sum(0) * (axis_index("b") + 2 * axis_index("a"))


def run_on_two_dims(mesh):
    """Return results and gradients of `mix` on a mesh of two dims, from DTensors and back."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.linspace(-1, 1, 4 * 5 * 3).double().view(4 * 5, 3)[:18]
    scale = torch.tensor([0.5, 1.5, -1.0]).double()
    placements, same = [Shard(0), Shard(0)], [Replicate(), Replicate()]
    x = distribute_tensor(whole[:16], grid, placements)
    w = distribute_tensor(scale, grid, same).requires_grad_()
    f = shard_map(lambda w, x: mix(w * x), grid, (same, placements), placements)
    y = f(w, x)
    total = shard_map(
        lambda y: psum(y.cos().sum(), ("a", "b")), grid, (placements,), out_placements=same
    )(y)
    total.backward()
    uneven = shard_map(
        lambda x: x[: 1 + mesh.get_local_rank()], grid, out_placements=[Shard(0), Shard(0)]
    )(x)
    return [t.full_tensor().detach() for t in (y, total, w.grad)], tuple(uneven.shape)


def swap_axes(x):
    """A function of one block that tells dim "a" of a mesh from dim "b"."""
    return x * psum(axis_index("a"), "b") + psum(x, "a")


def replay_blocks(mesh):
    """Return the results of some calls of each function of blocks, the hits, and an explanation.

    The first rank runs the functions, the others replay them and compare.
    """
    rank = mesh.get_local_rank()
    line = DeviceMesh.from_group(mesh.get_group(), "cpu", mesh_dim_names=("a",))
    grid, turned = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("a", "b"), ("b", "a"))
    )
    both = [Shard(0), Shard(1)]
    calls = {
        "one dim": (f := shard_map(lambda x: x.sin() * psum(x, "a"), line)),
        "two dims": (g := shard_map(mix, grid)),
        "a derivative": shard_map(grad(lambda x: mix(x).sin().sum()), grid),
        "inside a derivative": grad(lambda x: g(x).sin().sum()),
        "made anew": lambda x: shard_map(mix, grid, (both,))(x),
        "swapped": lambda x: shard_map(swap_axes, grid)(x) - 3 * shard_map(swap_axes, turned)(x),
    }
    found = {name: [] for name in calls}
    with settings(patience=0.0, replay="check" if rank else False):
        for i, (name, call) in itertools.product(range(5), calls.items()):
            found[name].append(call(WIDE[rank] + i))
        hits = [get_calls(call).hits for call in (f, g)]
        return found, hits, str(forall.explain(g)(WIDE[rank] + 5))


def map_dtensors(mesh, sizes):
    """Return the results of a vmap of DTensors, and the gradient of a replicated one."""
    xs = distribute_tensor(WIDE[: sum(sizes)], mesh, [Shard(0)])
    w = distribute_tensor(W, mesh, [Replicate()]).requires_grad_()
    f = vmap(normalize, (None, 0), axis_name="b", mesh=mesh)
    y = f(w, xs)
    mean = vmap(
        lambda w, x: pmean((w * x).sin().sum(), "b"), (None, 0), None, axis_name="b", mesh=mesh
    )
    total = y.square().sum() + mean(w, xs)
    total.backward()
    wrong = _try(f, w, distribute_tensor(WIDE, mesh, [Shard(1)]))[0]
    return [t.full_tensor().detach() for t in (y, total, w.grad)], str(y.placements), wrong


def destroy_group(mesh):
    """Return True if the group by which ranks agree has ended with the group of the data."""
    group = dist.new_group([*range(mesh.size())])
    of_its_own = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("b",))
    reduce_one = jit(vmap(lambda x: psum(x, "b"), axis_name="b", mesh=of_its_own))
    for _ in range(2):
        reduce_one(torch.ones(2))
    control = weakref.ref(get_rank_group(of_its_own).control)
    dist.destroy_process_group(group)
    del group, of_its_own, reduce_one
    gc.collect()
    return control() is None

"""Functions that the ranks of a pool call, by name. The first argument is a mesh of one dim."""

import time

import torch
import torch.distributed as dist

import forall
from forall._core.errors import TransformCall
from forall._mesh import rank_operators
from forall._mesh.agreement import RankCall
from forall._mesh.rank_group import get_rank_group


def call_operators(mesh):
    group = get_rank_group(mesh)
    r, n = group.rank, group.size
    sizes = [k + 1 for k in range(n)]
    x = torch.arange(3.0) + 10 * r
    rows = torch.full((r + 1, 2), float(r))
    found = {}
    with RankCall(group, TransformCall("vmap", call_operators), r + 1) as call:
        found["sizes"] = call.sizes
        found["sum"] = rank_operators.reduce(x, "sum", group)
        found["max"] = rank_operators.reduce(x, "max", group)
        found["any"] = rank_operators.reduce(x > 11, "max", group)
        found["complex"] = rank_operators.reduce(torch.complex(x, -x), "sum", group)
        found["rows"] = rank_operators.gather(rows, sizes, group)
        found["scattered"] = rank_operators.scatter(torch.ones(sum(sizes), 2), sizes, group)
        give = torch.arange(n).repeat_interleave(2) + 100 * r
        found["given"] = rank_operators.exchange(give, [2] * n, [2] * n, group)
        w = x.clone().requires_grad_()
        total = (rank_operators.reduce(w, "sum", group) ** 2).sum()
        found["gradient"] = torch.autograd.grad(total, w)[0]
    return found


def time_call(mesh, count):
    group = get_rank_group(mesh)
    x = torch.ones(10)
    with RankCall(group, TransformCall("vmap", time_call), 1):
        rank_operators.reduce(x, "sum", group)
        start = time.perf_counter()
        for _ in range(count):
            rank_operators.reduce(x, "sum", group)
        ours = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(x.clone(), group=group.group)
    return ours / count, (time.perf_counter() - start) / count


def _sum(x, group):
    return rank_operators.reduce(x, "sum", group)


def _call(group, body):
    with RankCall(group, TransformCall("vmap", body), 4):
        return body()


def _failing(what):
    """A program for the ranks in which the last one does something else than the others."""

    def program(mesh):
        group = get_rank_group(mesh)
        start = time.perf_counter()
        error = None
        try:
            _call(group, lambda: what(group, group.rank == group.size - 1))
        except Exception as raised:
            error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
        seconds = time.perf_counter() - start
        after = _call(group, lambda: _sum(torch.tensor(group.rank), group)).item()
        return error, seconds, after

    return program


@_failing
def fails_before_a_message(group, is_last):
    if is_last:
        raise ValueError("bad data")
    return _sum(torch.ones(2), group)


@_failing
def fails_between_messages(group, is_last):
    x = _sum(torch.ones(2), group)
    if is_last:
        raise ValueError("bad data")
    return _sum(x, group)


@_failing
def fails_after_the_last_message(group, is_last):
    x = _sum(torch.ones(2), group)
    if is_last:
        raise ValueError("bad data")
    return x


@_failing
def has_another_shape(group, is_last):
    return _sum(torch.ones(3 if is_last else 2), group)


@_failing
def has_another_dtype(group, is_last):
    return _sum(torch.ones(2, dtype=torch.float64 if is_last else torch.float32), group)


@_failing
def calls_another_operator(group, is_last):
    return rank_operators.reduce(torch.ones(2), "max" if is_last else "sum", group)


@_failing
def swaps_two_messages(group, is_last):
    def first():
        return _sum(torch.ones(2), group)

    def second():
        return _sum(torch.zeros(2), group)

    return [f() for f in ((second, first) if is_last else (first, second))]


@_failing
def sends_one_message_more(group, is_last):
    x = _sum(torch.ones(2), group)
    return _sum(x, group) if is_last else x


@_failing
def takes_another_branch(group, is_last):
    if is_last:
        return _sum(torch.ones(2), group)
    return _sum(torch.ones(2), group)


def makes_one_call_more(mesh):
    """The last rank makes a call that the others do not make; they make another one."""
    group = get_rank_group(mesh)

    def one():
        return _sum(torch.ones(2), group)

    def other():
        return _sum(torch.ones(2), group)

    errors = []
    start = time.perf_counter()
    for f in (one, other) if group.rank == group.size - 1 else (other,):
        try:
            _call(group, f)
        except Exception as raised:
            errors.append((type(raised).__name__, str(raised), getattr(raised, "rank", None)))
            break
    seconds = time.perf_counter() - start
    after = _call(group, lambda: _sum(torch.tensor(group.rank), group)).item()
    return errors[0], seconds, after


def stays_away(mesh, seconds):
    """The last rank does not come to a call within the limit."""
    group = get_rank_group(mesh)
    if group.rank == group.size - 1:
        time.sleep(seconds)
        return None
    forall.config.rank_timeout = seconds / 4
    return _catch(group)


def waits_for_a_message(mesh):
    """All ranks but the last one wait for a message, so that the last one can be killed."""
    group = get_rank_group(mesh)
    if group.rank == group.size - 1:
        time.sleep(1000)
    return _catch(group)


def _catch(group):
    start = time.perf_counter()
    try:
        _call(group, lambda: _sum(torch.ones(2), group))
    except Exception as raised:
        error = (type(raised).__name__, str(raised), getattr(raised, "rank", None))
        return error, time.perf_counter() - start
    return None

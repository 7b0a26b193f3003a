"""A small vectorised value, and vmap's functions for its lanes: enough to run converted code with.

`each(f, *columns)` is the loop; `together(f, *columns)` runs f once, converted, for all lanes.
"""

from __future__ import annotations

import operator
import threading
from types import SimpleNamespace
from typing import Any

import torch

from forall._divergence import aliases, converted_call, runtime
from forall._divergence.vmap_interface import install_interface


def _dtype(column):
    return torch.float64 if isinstance(column[0], float) else torch.int64


class World:
    def __init__(self, ids) -> None:
        self.ids = tuple(sorted(ids))

    @property
    def size(self) -> int:
        return len(self.ids)

    def __sub__(self, other):
        rest = set(self.ids) - set(other.ids)
        return World(rest) if rest else None

    def __and__(self, other):
        both = set(self.ids) & set(other.ids)
        return World(both) if both else None

    def __or__(self, other):
        return World(set(self.ids) | set(other.ids))

    def unite_all(self, others):
        return World(set(self.ids).union(*(other.ids for other in others)))

    def __eq__(self, other) -> bool:
        return self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)

    def __repr__(self) -> str:
        return f"World{self.ids}"


class Undefined(Exception):  # noqa: N818
    pass


class Differ(Exception):  # noqa: N818
    """A Python value was asked for where lanes have several."""


class _State(threading.local):
    world: Any = None
    answers: Any = None  # of the innermost `apart`
    asked = 0
    waiting: Any = None
    followed = False  # whether other names of what was written follow now

    def __init__(self) -> None:
        self.changed: list[V] = []


STATE = _State()


def now():
    return STATE.world


class running:
    def __init__(self, world) -> None:
        self.world = world

    def __enter__(self) -> None:
        self.before, STATE.world = STATE.world, self.world

    def __exit__(self, *_) -> None:
        STATE.world = self.before


class V:
    """One tensor for each lane of ``world``, stacked."""

    names = None  # for `aliases`: each is a memory of its own

    def __init__(self, data, world) -> None:
        assert len(data) == world.size
        self.data, self.world = data, world

    shape = property(lambda self: self.data.shape[1:])
    dtype = property(lambda self: self.data.dtype)
    device = property(lambda self: self.data.device)
    layout = property(lambda self: self.data.layout)

    def rows(self):
        """What the running lanes have."""
        place = {lane: n for n, lane in enumerate(self.world.ids)}
        try:
            return [place[lane] for lane in STATE.world.ids]
        except KeyError:
            raise Undefined(f"{STATE.world} of {self.world}") from None

    def narrow(self):
        return self.data[self.rows()]

    def write(self, new) -> None:
        self.data[self.rows()] = rows_of(new).to(self.data.dtype)
        if self.names:
            STATE.changed.append(self)
            if not STATE.followed:
                STATE.followed = True
                aliases.propagate_writes()
                STATE.followed = False

    def add_(self, other):
        self.write(self.narrow() + rows_of(other))
        return self

    def copy_(self, other):
        self.write(other)
        return self

    def __iadd__(self, other):
        return self.add_(other)

    def __isub__(self, other):
        return self.add_(-other)

    def sin(self):
        return V(self.narrow().sin(), STATE.world)

    def abs(self):
        return V(self.narrow().abs(), STATE.world)

    def item(self):
        data = self.narrow()
        kind = data.dtype.is_floating_point
        return Number(V(data.to(torch.float64 if kind else torch.int64), STATE.world))

    def __bool__(self) -> bool:
        return bool(one_of(self != 0))

    def __len__(self) -> int:
        return self.data.shape[1]

    def __getitem__(self, k):
        if isinstance(k, (V, Number)):
            k = rows_of(k).long()
            return V(self.narrow()[torch.arange(len(k)), k], STATE.world)
        return V(self.narrow()[:, k], STATE.world)

    def __setitem__(self, k, value) -> None:
        data = self.narrow()
        data[:, k] = rows_of(value)
        self.write(V(data, STATE.world))

    def __repr__(self) -> str:
        return f"V({self.data.tolist()}, {self.world})"

    __hash__ = object.__hash__


def rows_of(value):
    if isinstance(value, Number):
        return value.tensor.narrow()
    return value.narrow() if isinstance(value, V) else torch.as_tensor(value)


class Number:
    """A Python number of each lane, weakly typed."""

    __hash__ = object.__hash__

    def __init__(self, tensor) -> None:
        self.tensor = self.whole = tensor

    @property
    def kind(self):
        dtypes = {torch.bool: bool, torch.int64: int, torch.float64: float}
        return dtypes[self.tensor.dtype]

    @property
    def __class__(self):
        return self.kind

    def concretize(self):
        return one_of(self.tensor)

    def __bool__(self) -> bool:
        return bool(one_of(Number(V(rows_of(self) != 0, STATE.world)).tensor))

    def __index__(self) -> int:
        return int(self.concretize())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.concretize())

    def __repr__(self) -> str:
        return f"Number({self.tensor})"


def _operator(name, run, reverse=False):
    def method(self, other):
        if type(other) not in (V, Number, int, float, bool):
            return NotImplemented
        a, b = rows_of(self), rows_of(other)
        if a.dim() and b.dim() and a.dim() != b.dim():
            a, b = (t.reshape(t.shape + (1,) * (max(a.dim(), b.dim()) - t.dim())) for t in (a, b))
        if type(self) is V and type(other) is Number:
            b = b.to(self.dtype)
        elif type(other) is V and type(self) is Number:
            a = a.to(other.dtype)
        data = run(b, a) if reverse else run(a, b)
        numbers = type(self) is Number and type(other) is not V
        if numbers and data.is_floating_point():
            data = data.double()
        made = V(data, STATE.world)
        return Number(made) if numbers else made

    return method


for _name in "add sub mul truediv floordiv mod pow lt le gt ge eq ne".split():  # noqa: SIM905
    for _class in (V, Number):
        _run = getattr(operator, _name)
        setattr(_class, f"__{_name}__", _operator(_name, _run))
        if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(_class, f"__r{_name}__", _operator(_name, _run, reverse=True))
for _class in (V, Number):
    _class.__neg__ = lambda self: self * -1
V.__abs__ = V.abs
V.__index__ = lambda self: int(one_of(self))
Number.__abs__ = lambda self: Number(self.tensor.abs())


def asked(test):
    rows = rows_of(test) != 0
    yes = [lane for lane, r in zip(STATE.world.ids, rows.tolist(), strict=True) if r]
    no = [lane for lane, r in zip(STATE.world.ids, rows.tolist(), strict=True) if not r]
    if not yes or not no:
        return not no
    return World(yes), World(no)


def one_of(v):
    """The one value of the lanes that run. Where they differ, some go on, the others wait."""
    rows = rows_of(v).tolist()
    if all(r == rows[0] for r in rows):
        return rows[0]
    if STATE.answers is None:
        raise Differ(f"{rows}")
    first = rows[0]
    mine = World([lane for lane, r in zip(STATE.world.ids, rows, strict=True) if r == first])
    STATE.waiting.append(STATE.world - mine)
    STATE.world = mine
    return first


def apart(call, join):
    """Run again, from the start, for the lanes that wanted another value."""
    entry = (STATE.world, STATE.answers, STATE.waiting)
    parts, waiting = [], [STATE.world]
    try:
        while waiting:
            STATE.world, STATE.answers, STATE.waiting = waiting.pop(), (), waiting
            result = call()
            parts.append((STATE.world, result))
    finally:
        STATE.world, STATE.answers, STATE.waiting = entry
    return join(parts)


def joined(parts):
    ids = {lane: n for n, lane in enumerate(STATE.world.ids)}
    pieces = []
    for world, value in parts:
        with running(world):
            rows = rows_of(value)
            if not isinstance(value, V):
                rows = rows.expand(world.size, *rows.shape)
            pieces.append((world, rows))
    first = pieces[0][1]
    data = torch.empty(len(ids), *first.shape[1:], dtype=first.dtype)
    for world, rows in pieces:
        data[[ids[lane] for lane in world.ids]] = rows
    assert sum(w.size for w, _ in parts) == len(ids)
    return V(data, STATE.world)


def joined_numbers(parts, dtype):
    return joined([(world, torch.tensor(n, dtype=dtype)) for world, n in parts])


def convert_number(n, kind):
    dtypes = {int: torch.int64, float: torch.float64, bool: torch.bool}
    return Number(V(rows_of(n).to(dtypes[kind]), STATE.world))


def changed():
    found, STATE.changed = STATE.changed, []
    return found


def put(target, value, world) -> None:
    with running(world):
        target.copy_(value)


def use_toy() -> None:
    install_interface(
        SimpleNamespace(
            Tensor=V,
            BatchedScalar=Number,
            UndefinedForExamples=Undefined,
            get_active_set=now,
            run_active_set=running,
            evaluate_users_test=asked,
            evaluate_test=asked,
            join_tensors=joined,
            join_numbers=joined_numbers,
            run_per_group=apart,
            find_alias_family=lambda v: v,
            is_partial_name=lambda _: False,
            make_new_name=None,
            take_written_families=changed,
            write_examples=put,
            convert_number=convert_number,
            call_math=converted_call.call_unconverted,
        )
    )


def forget() -> None:
    """After an exception: as if nothing had run."""
    t = runtime.thread
    t.leave_sets(0)
    t.top, t.diverged = None, 0
    t.mixed.clear()


def close(a, b):
    """Whether results agree, but for rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-9 * max(1, abs(a)) or str(a) == str(b)
    return a == b


def columns_of(columns, world):
    return [
        V(torch.tensor(c, dtype=_dtype(c)), world) if isinstance(c, list) else c for c in columns
    ]


def together(f, *columns, size=None):
    """f converted, for all lanes at once: its result for each lane."""
    use_toy()
    size = size or next(len(c) for c in columns if isinstance(c, list))
    world = World(range(size))
    run = runtime.convert(f)
    assert not isinstance(run, runtime.Refusal), run
    with running(world):
        result = run(*columns_of(columns, world))
        t = runtime.thread
        assert t.top is None
        assert not t.entered
        assert t.diverged == 0
        found = [lane_of(result, lane) for lane in range(size)]
        t.mixed.clear()
        return found


def each(f, *columns):
    """The loop."""
    size = next(len(c) for c in columns if isinstance(c, list))
    return [
        lane_of(
            f(
                *(
                    torch.tensor(c, dtype=_dtype(c))[n].clone() if isinstance(c, list) else c
                    for c in columns
                )
            ),
            n,
        )
        for n in range(size)
    ]


def lane_of(value, lane):
    """What one lane has of a result, as Python's."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    with running(World([lane])):
        if type(value) is runtime.Varying:
            return lane_of(runtime.merge(value.running_parts()), lane)
        if id(value) in runtime.thread.mixed:
            found = runtime.thread.mixed[id(value)][1].restrict_to(World([lane]))
            return lane_of(type(value)(found), lane)
        if type(value) in (V, Number):
            return rows_of(value)[0].tolist()
        if isinstance(value, (list, tuple)):
            return [lane_of(v, lane) for v in value]
        if isinstance(value, dict):
            return {k: lane_of(v, lane) for k, v in value.items()}
        return value

"""`id` is replayed where it only tells which objects are one, and called where it may tell more."""

import linecache
import operator
import sys
from collections.abc import Mapping
from functools import partial
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

from forall import vmap
from forall._api.execution.transform_decorator import describe_replay
from oracle import same

pytestmark = pytest.mark.usefixtures("at_once")

NET = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
LEAST = 1000  # less than any address
CALLS = 24  # some are observed, and some recorded in vain, before one is replayed
LAST = {}


class Node:
    """A tensor, and other nodes."""

    def __init__(self, x, *others):
        self.x, self.others = x, [*others]


def make_ring(x):
    first = Node(x, Node(2 * x), Node(3 * x))
    first.others[1].others += [first, first.others[0]]
    return first


def add_all(x):
    return visit(make_ring(x))


def visit(node, *, seen=None):
    key = id(node)
    if seen is None:
        seen = {}
    if key in seen:
        return seen[key]
    seen[key] = node.x * 10

    def visit_other(other):
        return visit(other, seen=seen)

    return node.x + sum(visit_other(other) for other in node.others)


def add_each_once(x):
    seen = set()
    return x + walk_in_a_set(make_ring(x), seen) + walk_in_a_set(make_ring(x), set())


def walk_in_a_set(node, seen):
    if id(node) in seen:
        return 0.0
    seen.add(id(node))
    found = node.x
    for other in node.others:
        found = found + walk_in_a_set(other, seen)
    seen.discard(id(node))
    return found if node.others else -found


def find_dtype(x):
    return x.to(dtype_of({"a": x, "b": [2, x.double()[None][0].to(x.dtype)]}))


def dtype_of(container, visited=None, visiting=None):
    container_id = id(container)
    if visited is None:
        visited = {}
    if container_id in visited:
        return visited[container_id]
    if visiting is None:
        visiting = set()
    if container_id in visiting:
        return None

    class result:
        dtype = None

        @classmethod
        def update(cls, dtype):
            if dtype is not None:
                cls.dtype = dtype

    def call_self(inner):
        return dtype_of(inner, visited=visited, visiting=visiting)

    if isinstance(container, torch.Tensor):
        result.update(container.dtype)
    elif isinstance(container, (Mapping, list)):
        visiting.add(container_id)
        try:
            for inner in container.values() if isinstance(container, Mapping) else container:
                result.update(call_self(inner))
        finally:
            visiting.remove(container_id)
    visited[container_id] = result.dtype
    return result.dtype


def use_parameters(x):
    chosen = {id(p) for p in NET[0].parameters()}
    return x * sum(i for i, p in enumerate(NET.parameters()) if id(p) in chosen)


def index_parameters(x):
    places = {id(p): i for i, p in enumerate(NET.parameters())}
    return x * places[id(NET[1].bias)] + x * places.get(id(x), 0.5)


def ask_for_one(x):
    y = x.sin()
    a, b = [y, x], [x, y]
    return y if id(a[0]) == id(b[1]) and id(x) not in {id(a), id(b)} else x


def begin_with_one(x):
    y = x.cos()
    known = {id(x): x}
    known.setdefault(id(y), x * len(known))
    return known.pop(id(y)) + known[id(x)]


AS_KEYS = [
    add_all,
    add_each_once,
    find_dtype,
    use_parameters,
    index_parameters,
    ask_for_one,
    begin_with_one,
]


def as_a_number(x):
    return x + (id(x) > LEAST)


def in_a_variable(x):
    k = id(x)
    seen = {k}
    return x + (k > LEAST) + (k in seen)


def in_another_variable(x):
    k = id(x)
    n = k
    return x + (n > LEAST)


def in_an_attribute(x):
    class Kept:
        k = id(x)

    return x + (Kept.k > LEAST)


def in_a_text(x):
    k = id(x)
    return x + len(f"{k}") // 20


def by_map(x):
    return x + (max(map(id, [x])) > LEAST)


def as_a_value(x):
    k = id(x)
    seen = {k: k}
    return x + (seen[k] > LEAST)


def listed(x):
    seen = {id(x)}
    return x + (max([*seen]) > LEAST)


def popped(x):
    seen = {id(x)}
    return x + (seen.pop() > LEAST)


def iterated(x):
    seen = {}
    seen[id(x)] = 1
    for k in seen:
        x = x + (k > LEAST)
    return x


def returned(x):
    return x + (max(make_table(x)) > LEAST)


def make_table(x):
    seen = {}
    seen[id(x)] = 1
    return seen


def passed_to_a_builtin(x):
    seen = {}
    seen[id(x)] = 1
    return x + (max(seen) > LEAST)


def passed_to_one_that_tells(x):
    seen = {}
    seen[id(x)] = 1
    return x + (tell(seen) > LEAST)


def tell(table):
    return max(table)


def passed_by_one_that_lists(x):
    seen = {}
    note(x, seen)
    return x + (max(seen) > LEAST)


def passed_under_another_name(x):
    seen = {}
    called = note
    called(x, seen)
    return x + (max(seen) > LEAST)


def passed_by_partial(x):
    seen = {}
    partial(note, seen=seen)(x)
    return x + (max(seen) > LEAST)


def passed_by_map(x):
    seen = {}
    list(map(note, [x], [seen]))
    return x + (max(seen) > LEAST)


def passed_by_stars(x):
    seen = {}
    note(*(x, seen))
    return x + (max(seen) > LEAST)


def note(x, seen):
    seen[id(x)] = 1


def kept_by_a_default(x):
    return note_by_default(x) + (max(LAST, default=2 * LEAST) > LEAST)


def note_by_default(x, seen=LAST):
    seen[id(x)] = 1
    seen.pop(id(x))
    return x


def of_a_dict_of_its_own(x):
    dict = Echo
    seen = dict()
    return x + (seen.get(id(x)) > LEAST)


class Echo(dict):
    def get(self, key, default=None):
        return key


def in_a_global_table_of_an_inner_function(x):
    def make():
        table = {}
        return table.get(id(x), x)

    def look():
        table[id(x)] = 1
        return table.pop(id(x))

    return make() + look()


table = {}


def noted_here(x, seen):
    seen[id(x)] = 1
    return 2 * LEAST


def tell_noted(x, seen):
    return max(seen)


def by_an_alias(x):
    global noted_here  # noqa: PLW0603
    seen = {}
    before = noted_here
    noted_here(x, seen)
    noted_here = tell_noted
    found = noted_here(x, seen)
    noted_here = before
    return x + (found > LEAST)


def by_an_alias_in_a_module(x):
    seen = {}
    here = THIS
    noted_here(x, seen)
    before, here.noted_here = here.noted_here, tell_noted
    found = noted_here(x, seen)
    here.noted_here = before
    return x + (found > LEAST)


def by_an_alias_that_is_set(x):
    seen = {}
    before = noted_here
    noted_here(x, seen)
    setattr(THIS, "noted_here", tell_noted)  # noqa: B010
    found = noted_here(x, seen)
    setattr(THIS, "noted_here", before)  # noqa: B010
    return x + (found > LEAST)


def by_an_alias_in_a_function(x):
    noted_here(x, {})
    return call_its_own(x)


def call_its_own(x):
    def noted_here(x, held):
        return max(held)

    seen = {id(x): 1}
    return x + (noted_here(x, seen) > LEAST)


def with_the_same_code(x):
    seen = {id(x): 1}
    pass_on(x, {})
    return x + (PASSING_ON(x, seen) > LEAST)


def pass_on(x, seen):
    return noted_here(x, seen)


PASSING_ON = FunctionType(pass_on.__code__, {"noted_here": tell_noted})


def by_a_module(x):
    seen = {}
    return NOTING(x, seen) + (max(seen) > LEAST)


class Noting(nn.Module):
    def forward(self, x, seen):
        seen[id(x)] = 1
        return x


NOTING = Noting()


def by_an_operator_of_a_class(x):
    seen = {}
    return (Adding(x) + seen) + (max(seen) > LEAST)


class Adding:
    def __init__(self, x):
        self.x = x

    def __add__(self, seen):
        seen[id(self)] = 1
        return self.x


def of_a_len_of_its_own(x):
    len = max
    seen = {id(x): 1}
    return x + (len(seen) > LEAST)


def as_one_of_the_rest(x):
    seen = {id(x): 1}
    return x + (find_most(x, seen) > LEAST)


def find_most(x, *tables):
    return max(tables[0])


def by_named_stars(x):
    seen = {}
    note_if_asked(x, **{"seen": seen})  # noqa: PIE804
    return x + (max(seen) > LEAST)


def by_stars(x):
    seen = {}
    note_if_asked(*[x, seen])
    return x + (max(seen) > LEAST)


def note_if_asked(x, seen=None):
    if seen is None:
        seen = {}
    seen[id(x)] = 1


def by_a_class(x):
    seen = {id(x)}

    class Made(Base, seen=seen):
        pass

    return x + (Made.most > LEAST)


class Base:
    def __init_subclass__(cls, seen):
        cls.most = max(seen)


def by_a_parameter_of_that_name(x):
    k = id(x)
    seen = {k}

    def look(k):
        return k in seen

    return x + sum(map(look, range(LEAST)))


def by_a_number(x):
    return x + (id(x) == LEAST)


def in_a_range(x):
    return x + (id(x) in range(LEAST))


def in_a_set(x):
    return x + (LEAST in {id(x), id(LAST)})


def of_a_set(x):
    return x + ({id(x)}.pop() > LEAST)


THIS = sys.modules[__name__]


def by_its_variables(x):
    k = id(x)
    return x + (vars()["k"] > LEAST) + (k != id(LAST))


def by_an_error(x):
    seen = {}
    try:
        x = x + seen[id(x)]
    except KeyError as error:
        x = x + (error.args[0] > LEAST)
    return x


def by_an_error_of_another(x):
    seen = {}
    try:
        take(x, seen)
    except KeyError as error:
        x = x + (error.args[0] > LEAST)
    return x


def take(x, seen):
    return seen.pop(id(x))


def by_a_guess(x):
    seen = {id(x)}
    return x + sum(n in seen for n in range(LEAST))


def in_a_table_of_others(x):
    LAST[id(x)] = 1
    del LAST[id(x)]
    return x


def under_a_global_name(x):
    global last_id  # noqa: PLW0603
    last_id = id(x)
    return x + (last_id > LEAST)


def of_a_subclass(x):
    seen = Telling()
    seen[id(x)] = 1
    return x + (seen.last > LEAST)


class Telling(dict):
    def __setitem__(self, key, value):
        self.last = key


def of_a_nested_function(x):
    def inner(k):
        return k > LEAST

    return x + inner(id(x))


def by_a_name_of_its_own(x):
    k = id(x)

    def inner(k):
        return k != id(LAST) and k > LEAST

    return x + inner(k=LEAST) + (k != id(LAST))


def by_an_operator(x):
    return x + operator.gt(id(x), LEAST)


TELLING = [
    as_a_number,
    in_a_variable,
    in_another_variable,
    in_an_attribute,
    in_a_text,
    by_map,
    as_a_value,
    listed,
    popped,
    iterated,
    returned,
    passed_to_a_builtin,
    passed_to_one_that_tells,
    passed_by_one_that_lists,
    passed_under_another_name,
    passed_by_partial,
    passed_by_map,
    passed_by_stars,
    kept_by_a_default,
    of_a_dict_of_its_own,
    in_a_global_table_of_an_inner_function,
    by_an_alias,
    by_an_alias_in_a_module,
    by_an_alias_that_is_set,
    by_an_alias_in_a_function,
    with_the_same_code,
    by_a_module,
    by_an_operator_of_a_class,
    of_a_len_of_its_own,
    as_one_of_the_rest,
    by_named_stars,
    by_stars,
    by_a_class,
    by_a_parameter_of_that_name,
    by_a_number,
    in_a_range,
    in_a_set,
    of_a_set,
    by_its_variables,
    by_an_error,
    by_an_error_of_another,
    by_a_guess,
    in_a_table_of_others,
    under_a_global_name,
    of_a_subclass,
    of_a_nested_function,
    by_a_name_of_its_own,
    by_an_operator,
]


def check_calls(f) -> str:
    """Compare many calls with the loop, and return what is said of their replay."""
    mapped = vmap(f)
    for _ in range(CALLS):
        xs = torch.randn(3, 2)
        assert same(mapped(xs), torch.stack([f(x) for x in xs]))
    return describe_replay(mapped)


@pytest.mark.parametrize("f", AS_KEYS, ids=lambda f: f.__name__)
def test_ids_that_are_keys_are_replayed(f):
    assert "calls so far" in check_calls(f)


@pytest.mark.parametrize("f", TELLING, ids=lambda f: f.__name__)
def test_ids_that_may_tell_an_address_are_not_replayed(f):
    assert " uses id (" in check_calls(f)


def test_ids_in_a_file_that_has_changed_are_not_replayed():
    m = ModuleType("changed")
    ran = "def f(x):\n    return x + (id(x) > 1000)\n"
    shown = "def f(x):\n    return x + (id(x) == id(x))\n"
    linecache.cache[m.__name__] = len(shown), None, shown.splitlines(keepends=True), m.__name__
    exec(compile(ran, m.__name__, "exec"), vars(m))  # noqa: S102
    mapped = vmap(m.f)
    for _ in range(CALLS):
        mapped(torch.ones(3))
    assert " uses id (" in describe_replay(mapped)


def test_a_file_of_which_python_warns_is_compiled_without_a_warning(recwarn):
    m = ModuleType("warned_of")
    text = "def f(x):\n    return x * ((1 is 1) + (id(x) == id(x)))\n"
    linecache.cache[m.__name__] = len(text), None, text.splitlines(keepends=True), m.__name__
    with pytest.warns(SyntaxWarning):
        code = compile(text, m.__name__, "exec")
    exec(code, vars(m))  # noqa: S102
    mapped = vmap(m.f)
    for _ in range(CALLS):
        assert same(mapped(torch.ones(3)), torch.full((3,), 2.0))
    assert "calls so far" in describe_replay(mapped)
    assert not recwarn.list

"""What is put back before a function runs once more."""

import pytest

from forall._core.python_snapshot import PythonSnapshot
from forall._core.python_state import globals_of, names_of

COUNT = 0
LOG = []


def rebinds():
    global COUNT  # noqa: PLW0603 - what is tested
    COUNT += 1


def forgets():
    global COUNT  # noqa: PLW0603 - what is tested
    del COUNT


def keeps():
    LOG.append(1)


def outer():
    def inner():
        return LOG

    return inner


def test_globals_are_found_where_they_are_named_and_not_where_an_attribute_is():
    assert dict(globals_of(rebinds.__code__)) == {"COUNT": True}
    assert dict(globals_of(keeps.__code__)) == {"LOG": False}
    assert dict(globals_of(outer.__code__)) == {"LOG": False}
    assert names_of(keeps.__code__) == {"LOG", "append"}


def test_a_global_is_bound_again():
    for change in (rebinds, forgets):
        before = PythonSnapshot(change, ())
        change()
        assert before.differs_from_now()
        before.restore()
        assert COUNT == 0
        assert not before.differs_from_now()


def test_empty_containers_of_an_object_are_emptied_again():
    class Thing:
        def __init__(self):
            self.seen, self.names = [], {}

        def __call__(self):
            self.seen.append(1)
            self.names["a"] = 2

    thing = Thing()
    before = PythonSnapshot(thing, ())
    thing()
    before.restore()
    assert thing.seen == []
    assert thing.names == {}


def asserts(value, held):
    LOG.append(value)
    assert value == held, "the message"


def test_objects_of_the_program_that_runs_the_tests_are_left_alone(request, monkeypatch):
    before = PythonSnapshot(asserts, (request, {"patch": monkeypatch}))
    taken = [*before.attributes, *before.contents, *before.functions, *before.classes]
    modules = {type(row[0]).__module__ for row in taken}
    modules |= {getattr(row[0], "__module__", "") for row in taken}
    roots = {module.partition(".")[0] for module in modules if isinstance(module, str)}
    assert roots.isdisjoint({"_pytest", "pytest", "pluggy", "xdist", "execnet"})
    assert len(taken) < 20, taken


def test_what_another_thread_of_the_test_runner_writes_stays(request):
    before = PythonSnapshot(asserts, (1, 2))
    request.config.stash[_written] = True
    LOG.append(1)
    before.restore()
    assert request.config.stash[_written]
    assert LOG == []


_written = pytest.StashKey[bool]()

"""Functions that read torch's state are replayed, and each call has the answer of its time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forall
from forall._auto_replay.purity import find_impurity
from forall._compat.pure_functions import QUESTIONS
from forall._jit.guards.build import Guards

# The number of threads between operators can be set once in a process.
_PROGRAM = """
    import functools
    from types import SimpleNamespace

    import torch
    from torch import get_num_interop_threads as ask

    import forall
    from forall import explain, grad, vmap

    forall.config.replay, forall.config.patience = True, 0
    TABLE, HOLDER, PART = {"ask": [ask]}, SimpleNamespace(ask=ask), functools.partial(ask)

    def by_dotted_name(x):
        return x.square().sum() * torch.get_num_interop_threads()

    def by_import(x):
        from torch import get_num_interop_threads
        return x.square().sum() * get_num_interop_threads()

    def by_text(x):
        return x.square().sum() * getattr(torch, "get_num_interop_threads")()

    def by_variable(x):
        return x.square().sum() * ask()

    def by_default(x, ask=ask):
        return x.square().sum() * ask()

    def by_table(x):
        return x.square().sum() * TABLE["ask"][0]()

    def by_object(x):
        return x.square().sum() * HOLDER.ask()

    def by_partial(x):
        return x.square().sum() * PART()

    def close_over(ask):
        return lambda x: x.square().sum() * ask()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ask = ask

        def forward(self, x):
            return x.square().sum() * self.ask()

    FUNCTIONS = [by_dotted_name, by_import, by_text, by_variable, by_default, by_table, by_object]
    FUNCTIONS += [by_partial, close_over(ask), Net()]
    X = torch.arange(6.0).reshape(2, 3)
    before = ask()
    for number in (before, before + 3):
        if number != before:
            torch.set_num_interop_threads(number)
        for f in FUNCTIONS:
            slope = vmap(grad(f))
            for _ in range(8):
                assert slope(X).equal(2 * X * number), (f, number)
            assert explain(slope)(X).replay.endswith("calls so far"), (f, explain(slope)(X).replay)
    print(len(FUNCTIONS))
"""


def test_the_number_of_threads_between_operators_is_that_of_each_call(tmp_path):
    home = str(Path(forall.__file__).parents[1])
    path = tmp_path / "program.py"
    path.write_text(f"import sys; sys.path.insert(0, {home!r})\n{textwrap.dedent(_PROGRAM)}")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10\n"


@pytest.mark.parametrize("ask", sorted(QUESTIONS, key=repr), ids=lambda ask: ask.__name__)
def test_a_question_is_refused_or_watched_whatever_leads_to_it(ask):
    table = {"ask": [ask]}
    for f in (lambda x: x if ask() else -x, lambda x: x if table["ask"][0]() else -x):
        guards = Guards(f)
        assert find_impurity(guards) is not None or ask in guards._state.answers

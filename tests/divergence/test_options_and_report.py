"""What vmap may be told about examples that diverge, and what it tells of them."""

from __future__ import annotations

import builtins
import functools
import inspect
import runpy
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import forall
from by_groups import only_groups
from divergence.cases import D
from divergence.test_generators import halves, summed
from forall import grad, vmap
from forall._core.levels import stack
from forall._divergence.thread_state import thread
from golden import refused

ROOT = Path(__file__).parents[2]
XS = torch.tensor([1.0, 4.0, 100.0, 2e4, 9.0], dtype=D)


def root(a):
    x = a
    while (x * x - a).abs() > 1e-9 * a:
        x = (x + a / x) / 2
    return x


def steps(a):
    x, n = a, 0
    while (x * x - a).abs() > 1e-9 * a:
        x, n = (x + a / x) / 2, n + 1
    return n


@pytest.fixture(params=["groups", "converted"])
def way(request, monkeypatch):
    """Groups alone, as for a function whose source cannot be had; or what vmap chooses."""
    if request.param == "groups":
        only_groups(monkeypatch)
    return request.param


def line_of(f, text):
    lines, first = inspect.getsourcelines(f)
    return first + next(n for n, line in enumerate(lines) if text in line)


# --- divergence ----------------------------------------------------------------------------------


def test_divergence_may_be_refused():
    with pytest.raises(RuntimeError, match="differs between the examples"):
        vmap(root, divergence="error")(XS)
    assert torch.equal(vmap(root, divergence="error")(XS[:1]), root(XS[0])[None])


def test_no_other_divergence():
    with refused(
        ValueError,
        """
        vmap: divergence must be 'split' or 'error'.
            divergence   'never'
        'split' runs examples that diverge in groups; 'error' refuses them.
        """,
    ):
        vmap(root, divergence="never")


# --- ragged --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_results_of_several_shapes_have_gradients(chunk_size):
    rows = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0], [-1.0, 7.0, -2.0]], dtype=D)
    leaf = rows.clone().requires_grad_()
    out = vmap(lambda row: row[row > 0] ** 2, ragged=True, chunk_size=chunk_size)(leaf)
    assert out.is_nested
    for mine, row in zip(out.unbind(), rows, strict=True):
        assert torch.equal(mine, row[row > 0] ** 2)
    sum(t.sum() for t in out.unbind()).backward()
    assert torch.equal(leaf.grad, torch.where(rows > 0, 2 * rows, 0.0))


# --- max_steps -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_loops_of_so_many_steps_are_run_and_no_longer_ones(chunk_size):
    most = max(steps(x) for x in XS)
    expected = torch.stack([root(x) for x in XS])
    assert torch.equal(vmap(root, max_steps=most, chunk_size=chunk_size)(XS), expected)
    with pytest.raises(RuntimeError, match=f"goes on after max_steps={most - 1} steps"):
        vmap(root, max_steps=most - 1, chunk_size=chunk_size)(XS)
    assert stack.listening == ()


@pytest.mark.usefixtures("way")
def test_steps_are_counted_under_a_default_device():
    most = max(steps(x) for x in XS)
    with torch.device(XS.device), pytest.raises(RuntimeError, match="goes on after"):
        vmap(root, max_steps=most - 1)(XS)


def test_the_message_names_the_line_and_the_examples():
    late = [str(n) for n, x in enumerate(XS) if steps(x) > 6]
    assert len(late) > 1
    at = f"{__file__}:{line_of(root, 'while')}"
    text = f"""
        vmap(root, max_steps=6): the loop goes on after max_steps=6 steps.
            at        {at}   while (x * x - a).abs() > 1e-9 * a:
            goes on   examples {", ".join(late)}
            running   {len(late)} of {len(XS)} examples
        Allow more steps, or let the test end the loop sooner.
        """
    for _ in range(2):  # the second call knows that its examples diverge
        with pytest.raises(RuntimeError) as caught:
            vmap(root, max_steps=6)(XS)
        assert type(caught.value) is RuntimeError
        assert str(caught.value) == dedent(text).strip()


def grown(x):
    while x < 100:
        x = x * 1.001
    return x


def grown_by_steps(x, end):
    while x < end:
        x = x + 1
    return x


def grown_twice(x):
    if x < 0:
        x = grown_by_steps(x, 0)
    return grown_by_steps(x, 10)


@pytest.mark.parametrize(
    ("f", "xs", "options", "who", "running"),
    [
        (grown, [99.9, 1.0, 120.0], {"max_steps": 50}, "example 1", "1 of 3 examples"),
        (grown, [1.0], {"max_steps": 50}, "example 0", "1 of 1 example"),
        (grown, [1.0, 120.0, 2.0], {"max_steps": 50}, "examples 0, 2", "2 of 3 examples"),
        (
            grown,
            [99.9, 120.0, 99.9, 1.0, 120.0],
            {"max_steps": 50, "chunk_size": 2},
            "example 3",
            "1 of the 2 that run together, of 5 examples in all",
        ),
        # The second is at the same place, and was asked 5 times less: it runs, and may go on.
        (grown_twice, [-5.0, 0.0, 20.0], {"max_steps": 12}, "example 0", "2 of 3 examples"),
    ],
)
def test_the_message_counts_the_examples_that_still_run(f, xs, options, who, running):
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            vmap(f, **options)(torch.tensor(xs))
        rows = [line.split("   ") for line in str(caught.value).splitlines()[2:4]]
        assert [[cell.strip() for cell in row if cell] for row in rows] == [
            ["goes on", who],
            ["running", running],
        ]


def test_a_loop_that_would_never_end():
    def endless(x):
        while True:
            if not x > 0:
                return x
            x = x + 1

    def fed_by_a_generator(x):
        def more():
            y = x
            while y > 0:
                y = y + 1
                yield y

        return sum(more(), x)

    for f in (endless, fed_by_a_generator):
        with pytest.raises(RuntimeError, match="goes on") as caught:
            vmap(f, max_steps=20)(torch.tensor([1.0, -1.0, 2.0]))
        assert "example" in str(caught.value)


def test_tests_of_two_questions_count_once():
    def f(x):
        n = 0
        while x > 0 and x < 100:
            x, n = x * 2, n + 1
        while not (x < 1 or x < 2):
            x, n = x / 2, n + 1
        return n

    xs = torch.tensor([1.0, 3.0, 0.5])
    expected = torch.tensor([f(x) for x in xs])
    assert torch.equal(vmap(f, max_steps=8)(xs), expected)


def test_a_call_run_again_for_each_group_counts_once():
    xs = 2.0 ** torch.arange(12)
    assert torch.equal(vmap(summed, max_steps=11)(xs), torch.stack([summed(x) for x in xs]))


def test_loops_of_forall_count_too():
    def f(x):
        return forall.while_loop(lambda y: y < 100, lambda y: y * 2, x)

    xs = torch.tensor([1.0, 50.0, 200.0])
    assert vmap(f, max_steps=7)(xs).tolist() == [128.0, 100.0, 200.0]
    with pytest.raises(RuntimeError, match="goes on after max_steps=6 steps"):
        vmap(f, max_steps=6)(xs)


def test_inner_and_outer_limits_are_each_its_own():
    def inner(a):
        return vmap(root, max_steps=50)(a)

    assert torch.allclose(
        vmap(inner, max_steps=50)(XS[:4].reshape(2, 2)), XS[:4].reshape(2, 2).sqrt()
    )
    with pytest.raises(RuntimeError, match="vmap\\(root, max_steps=4\\)"):
        vmap(lambda a: vmap(root, max_steps=4)(a))(XS[:4].reshape(2, 2))
    grads = vmap(grad(root), max_steps=50)(XS)
    assert torch.allclose(grads, torch.stack([grad(root)(x) for x in XS]))


def test_max_steps_is_a_number():
    with refused(
        ValueError,
        """
        vmap: max_steps counts steps.
            max_steps   'many'   str
        Pass an int of at least 0, or None.
        """,
    ):
        vmap(root, max_steps="many")


# --- explain -------------------------------------------------------------------------------------


@pytest.mark.counted  # it says whether calls are replayed
def test_what_the_guide_says_of_its_example(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["roots.py"])
    runpy.run_path("examples/roots.py", run_name="__main__")
    text = capsys.readouterr().out.strip()
    page = (ROOT / "docs/getting_started.md").read_text()
    assert f"```text\n{text}\n```" in page, (
        "put into docs/getting_started.md what examples/roots.py prints"
    )


@pytest.mark.counted
def test_a_call_whose_examples_agree():
    e = forall.explain(vmap(lambda x: x * 2, out_dims=0))(XS)
    assert torch.equal(e.result, XS * 2)
    assert (
        str(e) == "vmap(<lambda>): 5 examples\n\nhow it ran\n    as it is, all examples in one run"
    )


def test_nothing_is_left_behind():
    forall.explain(vmap(root))(XS)
    assert (thread.report, stack.listening) == (None, ())
    with pytest.raises(ValueError, match="mine"):
        forall.explain(vmap(failing))(XS)
    assert (thread.report, stack.listening) == (None, ())


def failing(x):
    if x > 2:
        raise ValueError("mine")
    return x


def test_each_step_has_the_examples_that_took_it():
    e = forall.explain(vmap(root))(XS)
    counts = torch.zeros(len(XS), dtype=torch.int64)
    for step in e.steps:
        counts[list(step.examples)] += 1
    assert counts.tolist() == [steps(x) + 1 for x in XS]
    assert {p.construct for p in e.divergences} == {"while"}
    assert torch.equal(e.result, vmap(root)(XS))


def test_a_loop_over_a_range_of_each_example_is_named_by_its_own_line():
    def doubled(x, n):
        for _ in range(n.item()):
            x = 2 * x
        return x

    def doubled_later(x, n):
        steps = range(n.item())
        for _ in steps:
            x = 2 * x
        return x

    for f in (doubled, doubled_later):
        e = forall.explain(vmap(f))(torch.ones(4), torch.tensor([0, 3, 1, 0]))
        assert e.result.tolist() == [1, 8, 2, 1]
        assert {p.place.file for p in e.divergences} == {__file__}


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_in_groups_and_in_chunks_the_numbers_are_those_of_all(monkeypatch, chunk_size):
    only_groups(monkeypatch)
    e = forall.explain(vmap(root, chunk_size=chunk_size))(XS)
    counts = torch.zeros(len(XS), dtype=torch.int64)
    for step in e.steps:
        counts[list(step.examples)] += 1
    assert counts.tolist() == [steps(x) + 1 for x in XS]
    assert sum(e.groups) >= len(XS) - 1
    assert any("groups of" in way for way in e.ways)


def test_calls_that_run_again_for_each_group_are_named():
    e = forall.explain(vmap(grad(root)))(XS)
    assert torch.allclose(e.result, torch.stack([grad(root)(x) for x in XS]))
    if not e.converted:  # grad's own code runs as it is
        assert e.again[0][0] == "root"
        assert "ran again for each group\n    root   " in str(e)


def test_why_a_function_is_not_converted():
    e = forall.explain(vmap(summed))(2.0 ** torch.arange(4))
    ((name, place, why),) = e.refused
    assert (name, why) == ("halves", "a generator or a coroutine")
    assert place.endswith(f":{halves.__code__.co_firstlineno}")
    assert [f.name for f in e.converted] == ["summed"]
    text = str(e)
    assert "not converted, so run once for each group" in text
    assert "while x > 1:" in text


def test_a_return_under_no_grad_keeps_all_examples_in_one_run():
    def f(x):
        with torch.no_grad():
            if x > 0:
                return 2 * x
        return x

    e = forall.explain(vmap(f))(XS - 2)
    assert torch.equal(e.result, torch.stack([f(x) for x in XS - 2]))
    assert e.ways[-1] == "converted, all examples in one run"


def test_examples_that_see_each_others_writes_run_in_turn():
    def f(x):
        if x > 5:
            total.add_(x)
            return x
        return total + x

    total = torch.zeros((), dtype=D)
    e = forall.explain(vmap(f))(XS)
    assert e.ways[-1] == "one example after another: 5 examples"
    assert total == XS[XS > 5].sum()


@functools.wraps(vmap(root))
def around(x):
    return x


@pytest.mark.parametrize("given", [root, around, 3], ids=["a function", "around a mapped one", "3"])
def test_only_what_vmap_returns_is_explained(given):
    with pytest.raises(TypeError, match="explain\\(transformed\\): it explains what vmap, grad"):
        forall.explain(given)


# --- the picture ---------------------------------------------------------------------------------


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    e = forall.explain(vmap(root))(XS)
    path = tmp_path / "lanes.png"
    assert e.plot(path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = e.plot().axes[0]
    assert axes.get_ylabel() == "example"
    assert axes.images[0].get_array().shape == (len(XS), len(e.steps))
    assert forall.explain(vmap(torch.sin))(XS).plot(tmp_path / "none.png").exists()


def test_without_matplotlib_there_is_the_text(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with refused(
        ImportError,
        """
        Explanation.plot(): it draws with matplotlib, which is not installed.
        Install it (pip install matplotlib), or print the explanation.
        """,
    ):
        forall.explain(vmap(root))(XS).plot()

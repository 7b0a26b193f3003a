"""The page of an explanation, and the time and memory by operator."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

import forall
from forall import explain, grad, hessian, jacrev, jit, jvp, vjp, vmap

X = torch.arange(1.0, 4.0)
VOID = {"meta", "br", "link", "img", "hr", "input"}


def root(a):
    x = a
    while (x * x - a).abs() > 1e-4 * a:
        x = (x + a / x) / 2
    return x


def loss(w):
    return (w * X).sin().square().sum()


def printing(x):
    print(end="")
    return x.sum()


class Page(HTMLParser):
    """Checks that tags are balanced, and collects tags and text by element."""

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.open, self.tags, self.texts, self.attributes = [], [], {}, []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def rows(self):
        """The cells of each row of a table, as they are escaped."""
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", self.html)
        cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
        return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells if row]


def read(explanation):
    return Page(explanation.to_html())


def explain_plain():
    return explain(vmap(loss))(X.repeat(4, 1))


def explain_diverging():
    return explain(vmap(root))(torch.tensor([1.0, 4.0, 100.0, 2e4]))


def explain_grad():
    return [explain(grad(printing))(X) for _ in range(8)][-1]


def explain_nested():
    return explain(vmap(grad(loss)))(X.repeat(4, 1))


def explain_jitted():
    f = jit(loss)
    f(X)
    return explain(f)(X)


def explain_replayed():
    return [explain(hessian(loss))(X) for _ in range(8)][-1]


CASES = [
    explain_plain,
    explain_diverging,
    explain_grad,
    explain_nested,
    explain_jitted,
    explain_replayed,
]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("make", CASES)
def test_a_page_is_valid_and_refers_to_nothing_outside(make):
    e = make()
    page = read(e)
    assert "script" not in page.tags
    assert page.texts["h1"] == [e.call]
    for name, value in page.attributes:
        assert name not in {"src", "href", "xlink:href", "srcset"}
        assert not value or "//" not in value
    assert "@import" not in page.html
    assert "url(" not in page.html
    assert "prefers-color-scheme: dark" in page.html
    for way in e.ways:
        assert way in page.texts["li"]
    names = [row[0] for row in page.rows()]
    assert "Python, forall and autograd" in names
    assert {cost.name for cost in e.operators[:20]} <= {*names}


def test_the_page_of_a_plain_call():
    page = read(explain_plain())
    assert "No test on values: all examples ran the same operators." in page.texts["p"]
    assert "Divergence by source line" not in page.texts["h2"]
    assert "4 examples" in page.html


def test_the_page_of_a_call_that_diverges():
    e = explain_diverging()
    page = read(e)
    first = root.__code__.co_firstlineno
    rows = {row[0]: row[1:] for row in page.rows() if len(row) == 4}
    assert rows[str(first)] == ["", "def root(a):", ""]
    steps, text, groups = rows[str(first + 2)]
    assert steps == str(len(e.steps))
    assert text == "    while (x * x - a).abs() &gt; 1e-4 * a:"
    assert groups == ", ".join(" + ".join(map(str, p.sizes)) for p in e.divergences)
    assert rows[str(first + 3)][0] == ""
    assert page.tags.count("svg") == 1
    drawn = re.findall(r'<path d="([^"]*)" fill="#[0-9A-F]{6}"( fill-opacity="0.4")?>', page.html)
    assert len(drawn) == 2
    cells = {pale: sum(map(int, re.findall(r"v(\d+)", boxes))) for boxes, pale in drawn}
    assert sum(cells.values()) == sum(len(step.examples) for step in e.steps)
    stopped = [len(s.examples) - len(s.true) for s in e.steps if s.true is not None]
    assert cells[' fill-opacity="0.4"'] == sum(stopped)


def test_steps_tell_which_examples_went_on():
    steps = explain_diverging().steps
    assert steps[0].examples == range(4)
    assert list(steps[0].true) == [1, 2, 3]
    for step, after in pairwise(steps):
        assert list(after.examples) == list(step.examples if step.true is None else step.true)


def test_a_divergence_inside_return_is_told_at_its_line():
    def f(x):
        y = x * 2
        return y if y < 3 else -y

    e = explain(vmap(f))(X)
    assert {(p.file, p.line) for p in e.divergences} == {(__file__, f.__code__.co_firstlineno + 2)}


@pytest.mark.usefixtures("at_once")
def test_the_page_tells_why_a_call_is_not_replayed():
    page = read(explain_grad())
    assert any(text.startswith("Not replayed: printing uses print (") for text in page.texts["p"])
    assert "pre" not in page.texts


@pytest.mark.parametrize("make", [explain_jitted, explain_replayed])
def test_the_page_of_a_replayed_call_lists_the_program(make, at_once):
    e = make()
    page = read(e)
    assert "replayed: the recorded program ran in the place of the function" in page.texts["li"]
    assert page.texts["pre"] == [e.program]


def test_text_of_the_user_is_escaped():
    e = explain(vmap(lambda x: x.exp() if 0 < x < 10 else 0 * x, in_dims=0))(X - 2)
    page = read(e)
    assert page.texts["h1"] == ["vmap(<lambda>)"]
    assert "<lambda>" not in page.html
    assert any("if 0 < x < 10 else" in text for text in page.texts["code"])


def test_many_examples_and_steps_are_thinned():
    e = explain(vmap(root))(torch.linspace(1, 2e4, 500))
    html = e.to_html()
    assert f"Shown are {len(e.steps)} of {len(e.steps)} steps and 200 of 500 examples." in html
    assert len(html) < 200_000


def test_a_page_can_be_written(tmp_path):
    e = explain_plain()
    path = tmp_path / "page.html"
    html = e.to_html(path)
    assert path.read_text("utf-8") == html == e.to_html()
    assert e._repr_html_() in e.to_html()


def test_a_terminal_shows_the_text():
    e = explain_plain()
    assert repr(e) == str(e)


# --- vmaps inside other transforms ---------------------------------------------------------------


def total(xs):
    return vmap(root)(xs).sum()


ROOTS = torch.tensor([1.0, 4.0, 100.0])


@pytest.mark.counted  # a call that is recorded has no reports of those inside
@pytest.mark.parametrize(
    ("explained", "args"),
    [
        (explain(grad(total)), (ROOTS,)),
        (explain(jacrev(total)), (ROOTS,)),
        (explain(jvp), (total, (ROOTS,), (ROOTS,))),
        (explain(vjp), (total, ROOTS)),
    ],
)
def test_a_vmap_inside_another_transform_is_explained(explained, args):
    e = explained(*args)
    (inner,) = e.inside
    assert (inner.call, inner.examples) == ("vmap(root)", 3)
    assert {p.construct for p in inner.divergences} == {"while"}
    assert inner.steps[0].examples == range(3)
    assert "inside: vmap(root): 3 examples" in str(e)
    page = read(e)
    assert page.texts["h1"] == [e.call, "inside: vmap(root)"]
    assert page.tags.count("svg") == 1


@pytest.mark.counted  # a call that is recorded has no reports of those inside
def test_the_first_few_vmaps_inside_are_explained():
    def f(x):
        for _ in range(20):
            x = vmap(torch.sin)(x)
        return x.sum()

    e = explain(grad(f))(ROOTS)
    assert {inner.call for inner in e.inside} == {"vmap(sin)"}
    assert len(e.inside) == 8
    assert e.result.equal(grad(f)(ROOTS))


def test_a_vmap_inside_a_vmap_belongs_to_its_explanation():
    e = explain(vmap(total))(ROOTS[None])
    assert (e.call, e.inside) == ("vmap(total)", ())


# --- operators -----------------------------------------------------------------------------------


def test_an_operator_counts_once_for_all_examples():
    costs = {
        c.name: c for c in explain(vmap(lambda x: x.exp().tanh()))(torch.ones(5, 100)).operators
    }
    assert (costs["exp"].calls, costs["tanh"].calls) == (1, 1)
    assert costs["exp"].allocated == 5 * 100 * 4
    assert costs["exp"].seconds > 0


def test_a_batching_rule_counts_with_what_it_runs():
    w = torch.ones(4, 3)
    costs = {c.name: c.calls for c in explain(vmap(lambda x: w @ x))(torch.ones(5, 3)).operators}
    assert costs["mm"] == 1
    assert "mv" not in costs
    assert "matmul" not in costs


def test_operators_take_no_longer_than_the_call():
    for make in CASES:
        e = make()
        assert 0 < sum(c.seconds for c in e.operators) <= e.seconds
        assert [c.seconds for c in e.operators] == sorted(c.seconds for c in e.operators)[::-1]


def test_the_table_of_operators_as_text():
    e = explain_nested()
    head, rest, *rows = e.format_operators().splitlines()
    assert head.split() == ["operator", "calls", "time", "share", "allocated"]
    assert rest.split()[:4] == ["Python,", "forall", "and", "autograd"]
    assert [row.split()[0] for row in rows] == [c.name for c in e.operators]


def test_operators_are_measured_on_request_alone():
    assert explain(vmap(loss), operators=False)(X[None]).operators == ()
    with torch.autograd.profiler.profile():
        assert explain(vmap(loss))(X[None]).operators == ()
    html = explain(vmap(loss), operators=False)(X[None]).to_html()
    assert "Time and memory" not in html


def test_an_error_ends_the_measurement():
    with pytest.raises(RuntimeError, match="must return a scalar"):
        explain(grad(torch.sin))(X)
    assert not torch.autograd.profiler._is_profiler_enabled
    assert explain_plain().operators


def test_the_profiler_prints_nothing():
    code = "import torch, forall; forall.explain(forall.grad(torch.sum))(torch.ones(3))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


TRANSFORMS = {
    "vmap": (vmap(loss), (X[None],)),
    "grad": (grad(loss), (X,)),
    "grad_and_value": (forall.grad_and_value(loss), (X,)),
    "jacrev": (jacrev(loss), (X,)),
    "jacfwd": (forall.jacfwd(loss), (X,)),
    "jacobian": (forall.jacobian(loss), (X,)),
    "hessian": (hessian(loss), (X,)),
    "hessian_diag": (forall.hessian_diag(loss), (X,)),
    "laplacian": (forall.laplacian(loss), (X,)),
    "hvp": (forall.hvp(loss), (X, X)),
    "per_example_grad_norm": (forall.per_example_grad_norm(loss, in_dims=(0,)), (X[None],)),
    "jit": (jit(loss), (X,)),
    "vjp": (vjp, (loss, X)),
    "jvp": (jvp, (loss, (X,), (X,))),
    "linearize": (forall.linearize, (loss, X)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_has_a_page_with_operators(name):
    transformed, args = TRANSFORMS[name]
    e = explain(transformed)(*args)
    assert e.call == f"{name}(loss)"
    assert {"sin", "mul"} <= {c.name for c in e.operators}
    assert sum(c.allocated for c in e.operators) > 0
    assert read(e).texts["h1"][0] == e.call


# --- a browser -----------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(page, *flags):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", *flags]
    return subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )


def read_title(dom):
    found = re.search("<title>(.*)</title>", dom)
    assert found is not None
    return found[1].split("; ")


@in_a_browser
def test_a_browser_shows_the_page(tmp_path):
    pictures = pytest.importorskip("matplotlib.image")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    e = explain_diverging()
    e.to_html(page)
    dom = browse(page, "--dump-dom").stdout
    assert f"<h1>{e.call}</h1>" in dom
    assert dom.count("<section>") == e.to_html().count("<section>")
    assert dom.count("<path") == e.to_html().count("<path")
    browse(page, "--window-size=420,1200", f"--screenshot={picture}")
    pixels = pictures.imread(picture)[..., :3]
    colours = {tuple(c) for c in (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()}
    assert (0, 0x72, 0xB2) in colours  # the first line's cells
    assert len(colours) > 20


# What notebooks say of tables and code in their outputs.
NOTEBOOK = """
.output table { table-layout: fixed; margin-left: auto; font-size: 12px; }
.output td, .output th, .output tr { text-align: right; padding: 9px; white-space: normal; }
.output tbody tr:nth-child(odd) { background: #f5f5f5; }
.output tbody tr:hover { background: #e0e0e0; }
.output :not(pre) > code { background-color: #eeeeee; padding: 1px 5px; color: #000000; }
.output code { white-space: pre-wrap; }
.output pre { white-space: pre-wrap; background: #eeeeee; }
.output h2 { font-weight: 400; color: #000000; }
"""
ASK = """
const of = (what) => getComputedStyle(document.querySelector(".forall-explanation " + what));
const found = [
  getComputedStyle(document.querySelector(".forall-explanation")).backgroundColor,
  of("h2").color, of("h2").fontWeight, of("code").backgroundColor, of("code").color,
  of(".source td:nth-child(3)").textAlign, of(".source td code").whiteSpace,
  of(".source tr:nth-child(3)").backgroundColor, of(".source").tableLayout, of("td").paddingLeft,
];
document.title = found.join("; ");
"""
LIGHT, DARK = ("rgb(255, 255, 255)", "rgb(28, 32, 36)"), ("rgb(21, 24, 27)", "rgb(228, 231, 234)")


@in_a_browser
@pytest.mark.parametrize("systems", ["light", "dark"])
@pytest.mark.parametrize(
    ("theme", "colours"),
    [
        ("", LIGHT),
        ('data-jp-theme-light="true"', LIGHT),
        ('data-jp-theme-light="false"', DARK),
        ('class="vscode-dark"', DARK),
        ('theme="dark"', DARK),
    ],
)
def test_a_notebook_shows_it_by_its_own_theme_and_the_explanations_style(
    theme, colours, systems, tmp_path
):
    page = tmp_path / "page.html"
    fragment = explain_diverging()._repr_html_()
    page.write_text(
        f"<!DOCTYPE html><html><head><style>{NOTEBOOK}</style></head><body {theme}>"
        f'<div class="output">{fragment}</div><script>{ASK}</script></body></html>'
    )
    scheme = {"dark": 0, "light": 1}[systems]
    dom = browse(page, f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom").stdout
    found = read_title(dom)
    back, text = colours
    none = "rgba(0, 0, 0, 0)"
    assert found == [
        *(back, text, "600", none, text),
        *("left", "pre", none, "auto", "9.6px"),
    ]


@in_a_browser
@pytest.mark.parametrize(("scheme", "colours"), [(0, DARK), (1, LIGHT)])
def test_the_page_is_dark_where_the_system_is(scheme, colours, tmp_path):
    page = tmp_path / "page.html"
    explain_diverging().to_html(page)
    page.write_text(page.read_text().replace("</body>", f"<script>{ASK}</script></body>"))
    dom = browse(page, f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom").stdout
    assert read_title(dom)[:2] == [*colours]


def test_a_notebook_is_not_asked_for_the_systems_colours():
    """It may be light on a dark system."""
    assert "prefers-color-scheme" not in explain_plain()._repr_html_()
    assert "prefers-color-scheme" in explain_plain().to_html()

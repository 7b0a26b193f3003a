"""The page of an explanation: HTML with its own style and pictures, and nothing from elsewhere.

`make_fragment` is what a notebook shows, and `make_page` puts it into a document. All text that
comes from the user's code is escaped.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from forall._api.explain_plot import COLOURS, clip_text, format_count
from forall._api.operator_costs import (
    OTHER_TIME,
    find_other_time,
    format_seconds,
    format_share,
)
from forall._compat.call_site import SourceLine
from forall._core.errors import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forall._api.explained_call import ExplainedCall
    from forall._divergence.report_records import Divergence, Step

# What a page shows at most; the text says where it shows less than there is.
_STEPS, _EXAMPLES, _OPERATORS, _GROUPS = 600, 200, 20, 6
_AROUND = 3  # lines around a test that are shown of a long function
_WHOLE = 40  # lines of a function that is shown whole

_DARK = """color-scheme: dark; --text: #e4e7ea; --muted: #a3abb3; --line: #3a4149;
  --page: #15181b; --panel: #1e2327; --empty: #2b3137; --bar: #2f5f88; --mark: #463a16;"""
# Notebooks whose theme is dark: JupyterLab, VS Code, Colab. The system may be light, and they dark.
_IN_THE_DARK = ':is([data-jp-theme-light="false"], .vscode-dark, [theme="dark"])'
# Of the id in the selector there is no element: it makes the rules stronger than a notebook's own.
_STYLE = (
    """
.forall-explanation { color-scheme: light; --text: #1c2024; --muted: #5b636b; --line: #d7dce1;
  --page: #ffffff; --panel: #f4f6f8; --empty: #e6e9ed; --bar: #9fc4e4; --mark: #fff1cf;
  background: var(--page); color: var(--text); padding: 1rem;
  font: 16px/1.5 system-ui, sans-serif; }
_IN_THE_DARK .forall-explanation { _DARK }
.forall-explanation * { box-sizing: border-box; }
.forall-explanation > * { max-width: 62rem; margin-left: auto; margin-right: auto; }
.forall-explanation h1 { font: 600 1.5rem/1.3 ui-monospace, monospace; margin-top: 0;
  margin-bottom: .25rem; overflow-wrap: anywhere; }
.forall-explanation section + h1 { margin-top: 3rem; font-size: 1.25rem; }
.forall-explanation h2 { font: 600 1.15rem/1.3 system-ui, sans-serif; margin: 0 0 .5rem; }
.forall-explanation :is(h1, h2) { color: inherit; letter-spacing: normal; }
.forall-explanation section { margin-top: 1.75rem; }
.forall-explanation p { margin-top: .25rem; margin-bottom: .25rem; }
.forall-explanation .muted { color: var(--muted); }
.forall-explanation ul, .forall-explanation ol { margin: .25rem 0; padding-left: 1.5rem; }
.forall-explanation :is(code, pre) { font: .85rem/1.5 ui-monospace, monospace; color: inherit;
  background: none; border: 0; padding: 0; white-space: inherit; }
.forall-explanation .wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); }
.forall-explanation pre { margin: 0; padding: .75rem; white-space: pre; }
.forall-explanation table { border-collapse: collapse; width: 100%; font-size: .9rem;
  color: inherit; table-layout: auto; margin: 0; border: 0; }
.forall-explanation tr { background: none; }
.forall-explanation :is(th, td) { padding: .2rem .6rem; text-align: left; vertical-align: middle;
  line-height: 1.5; background: none; border: 0; white-space: nowrap; max-width: none; }
.forall-explanation th { color: var(--muted); font-weight: 600;
  border-bottom: 1px solid var(--line); }
.forall-explanation .number { text-align: right; font-variant-numeric: tabular-nums; }
.forall-explanation td.bar { width: 30%; min-width: 5rem; }
.forall-explanation td.bar span { display: block; height: .8rem; background: var(--bar);
  border-radius: 2px; }
.forall-explanation .operators td:first-child { white-space: normal; }
@media (max-width: 40rem) { .forall-explanation .bar { display: none; }
  .forall-explanation :is(th, td) { padding: .2rem .4rem; }
  .forall-explanation table { font-size: .8rem; } }
.forall-explanation .source td { padding-top: 0; padding-bottom: 0; }
.forall-explanation .source td:nth-child(3) { white-space: pre; }
.forall-explanation .source td:last-child { width: 50%; }
.forall-explanation .functions td:last-child { white-space: normal; min-width: 14rem; }
.forall-explanation .source tr.diverged td { background: var(--mark); }
.forall-explanation .source tr.gap td { color: var(--muted); }
.forall-explanation .lanes { display: grid; grid-template-columns: auto 1fr; gap: 0 .5rem; }
.forall-explanation .lanes .rows { display: flex; flex-direction: column;
  justify-content: space-between; font-size: .75rem; color: var(--muted); text-align: right; }
.forall-explanation .lanes .rows span { flex: 1 1 0; display: flex; align-items: center;
  justify-content: flex-end; line-height: 1; }
.forall-explanation .lanes .rows.ends span { flex: 0 0 auto; }
.forall-explanation .lanes svg { display: block; width: 100%; }
.forall-explanation .lanes .steps { grid-column: 2; display: flex;
  justify-content: space-between; font-size: .75rem; color: var(--muted); }
.forall-explanation .key { list-style: none; padding: 0; }
.forall-explanation .key li { display: flex; gap: .5rem; align-items: baseline; }
.forall-explanation .key code { overflow-wrap: anywhere; }
.forall-explanation .swatch { flex: none; display: inline-block; width: .8rem; height: .8rem;
  border-radius: 2px; }
""".replace("_IN_THE_DARK", _IN_THE_DARK)
    .replace("_DARK", _DARK)
    .replace(".forall-explanation", ":is(.forall-explanation, #forall)")
)


def make_page(explanation: ExplainedCall) -> str:
    """Return the explanation as an HTML document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(explanation.call)}: how it ran</title>\n"
        "<style>body { margin: 0; background: #ffffff; }\n"
        "@media (prefers-color-scheme: dark) { body { background: #15181b; }\n"
        f"  body > :is(.forall-explanation, #forall) {{ {_DARK} }} }}</style>\n"
        f"</head>\n<body>\n{make_fragment(explanation)}\n</body>\n</html>\n"
    )


def make_fragment(explanation: ExplainedCall) -> str:
    """Return the explanation as one element, with its style."""
    style = f"<style>{_STYLE}</style>"
    body = _make_body(explanation)
    inside = [_make_body(e, "inside: ") for e in explanation.inside]
    return f'<div class="forall-explanation">\n{style}\n{"".join([body, *inside])}\n</div>'


def _make_body(e: ExplainedCall, before: str = "") -> str:
    """Return all sections on one call. The title of a call inside another has a word before it."""
    facts = [format_count(e.examples, "example")] if e.examples else []
    if e.operators:
        facts.append(f"{format_seconds(e.seconds)}, with the profiler on")
    head = f"<h1>{before}{escape(e.call)}</h1>"
    if facts:
        head += f'\n<p class="muted">{" · ".join(facts)}</p>'
    colours = _assign_colours(e.steps)
    sections = (
        _make_section("How it ran", _list_ways(e)),
        _make_section("Replay", "" if before else _describe_replay(e)),
        _make_section("Examples over steps", _draw_lanes(e, colours)),
        _make_section("Divergence by source line", _list_source(e, colours)),
        _make_section("Functions", _list_functions(e)),
        _make_section("Once per example, without a batching rule", _list_looped(e)),
        _make_section("Time and memory by operator", _list_operators(e)),
        _make_section("Recorded program", _show_program(e)),
    )
    return "\n".join(filter(None, (head, *sections)))


def _make_section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>" if body else ""


def _list_ways(e: ExplainedCall) -> str:
    items = "".join(
        f"<li>{escape(way)}{'' if n == 1 else f' ({n} times)'}</li>"
        for way, n in Counter(e.ways).items()
    )
    measured = f'\n<p class="muted">Such calls: {escape(e.measured)}</p>' if e.measured else ""
    return f"<ol>{items}</ol>{measured}"


def _list_looped(e: ExplainedCall) -> str:
    items = "".join(
        f"<li><code>{escape(name)}</code>: {format_count(n, 'call')}</li>" for name, n in e.looped
    )
    return f"<ul>{items}</ul>" if items else ""


def _describe_replay(e: ExplainedCall) -> str:
    if e.replay.startswith("no: "):
        return f"<p>Not replayed: {escape(e.replay.removeprefix('no: '))}</p>"
    replayed, before = "Replayed", ""
    if e.examples:
        replayed = "Other calls replayed"
        before = "<p>This call was not replayed, so that its examples can be seen.</p>\n"
    if e.replay:
        return f"{before}<p>{replayed}: {escape(e.replay)}</p>"
    return (
        f"{before}<p>No call was replayed so far. With <code>forall.config.replay</code> on, a "
        "function is recorded once its calls have taken <code>forall.config.patience</code> "
        "seconds.</p>"
    )


# --- examples over steps -------------------------------------------------------------------------


class _Cells(NamedTuple):
    """A kind of cells in the picture: of one line, with or without a false test."""

    place: SourceLine
    is_pale: bool


def _assign_colours(steps: Sequence[Step]) -> dict[SourceLine, str]:
    places = sorted({step.place for step in steps})
    return {place: COLOURS[n % len(COLOURS)] for n, place in enumerate(places)}


def _draw_lanes(e: ExplainedCall, colours: dict[SourceLine, str]) -> str:
    if not e.examples:
        return ""
    if not e.steps:
        return "<p>No test on values: all examples ran the same operators.</p>"
    columns = _select_evenly(len(e.steps), _STEPS)
    lanes = _select_evenly(e.examples, _EXAMPLES)
    rows = {example: row for row, example in enumerate(lanes)}
    paths: dict[_Cells, list[str]] = defaultdict(list)
    gap = 0.1 if 1 < len(columns) <= 100 else 0.0
    for x, column in enumerate(columns):
        step = e.steps[column]
        stopped = set() if step.true is None else {*step.examples} - {*step.true}
        for is_pale in (False, True):
            drawn = [n for n in step.examples if n in rows and (n in stopped) is is_pale]
            for first, count in _find_runs(sorted(rows[n] for n in drawn)):
                box = f"M{x + gap / 2:g} {first}h{1 - gap:g}v{count}h{gap - 1:g}z"
                paths[_Cells(step.place, is_pale)].append(box)
    return (
        f"{_describe_lanes(e, columns, lanes)}\n"
        f'<div class="lanes" style="max-width: {max(12, 2 * len(columns) + 4)}rem">'
        f"{_label_lanes(lanes)}{_draw_svg(paths, colours, len(columns), len(lanes))}"
        f'<div class="steps"><span>step 1</span><span>{len(e.steps)}</span></div></div>\n'
        f"{_list_keys(e.steps, paths, colours)}"
    )


def _select_evenly(count: int, most: int) -> list[int]:
    """Return the numbers below ``count``, or as many of them as are to be shown."""
    if count <= most:
        return [*range(count)]
    return [n * count // most for n in range(most)]


def _find_runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Return the first number and the length of each run of consecutive numbers."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], i - start
            start = i


def _describe_lanes(e: ExplainedCall, columns: list[int], lanes: list[int]) -> str:
    text = "Each row is an example. Each column is a step: a test on values, in order."
    if len(columns) < len(e.steps) or len(lanes) < e.examples:
        text += (
            f" Shown are {len(columns)} of {len(e.steps)} steps"
            f" and {len(lanes)} of {e.examples} examples."
        )
    return f'<p class="muted">{text}</p>'


def _label_lanes(lanes: list[int]) -> str:
    if len(lanes) <= 16:
        return f'<div class="rows">{"".join(f"<span>{n}</span>" for n in lanes)}</div>'
    return f'<div class="rows ends"><span>{lanes[0]}</span><span>{lanes[-1]}</span></div>'


def _draw_svg(
    paths: dict[_Cells, list[str]], colours: dict[SourceLine, str], width: int, height: int
) -> str:
    drawn = "".join(
        f'<path d="{"".join(boxes)}" fill="{colours[cells.place]}"'
        f"{' fill-opacity=' + chr(34) + '0.4' + chr(34) if cells.is_pale else ''}>"
        f"<title>{_name_cells(cells)}</title></path>"
        for cells, boxes in paths.items()
    )
    lines = "".join(f"M0 {row}h{width}" for row in range(1, height)) if height <= 48 else ""
    pixels = max(48, min(height * 22, 420))
    return (
        f'<svg viewBox="0 0 {width} {height}" height="{pixels}" preserveAspectRatio="none"'
        ' role="img" aria-label="which examples took each step">'
        f'<rect width="{width}" height="{height}" style="fill: var(--empty)"></rect>{drawn}'
        f'<path d="{lines}" style="stroke: var(--page)" vector-effect="non-scaling-stroke"></path>'
        "</svg>"
    )


def _name_cells(cells: _Cells) -> str:
    text = f"{cells.place.near()}   {cells.place.text()}"
    return escape(f"{text}   (false)" if cells.is_pale else text)


def _list_keys(
    steps: Sequence[Step], paths: dict[_Cells, list[str]], colours: dict[SourceLine, str]
) -> str:
    times = Counter(step.place for step in steps)
    items = [
        _make_key(f"background: {colour}", _name_line(place), n)
        for place, colour in colours.items()
        for n in (format_count(times[place], "step"),)
    ]
    if any(cells.is_pale for cells in paths):
        pale = f"background: {next(iter(colours.values()))}; opacity: .4"
        items.append(_make_key(pale, "fainter: examples for which the test was false", ""))
    items.append(_make_key("background: var(--empty)", "the example does not take this step", ""))
    return f'<ul class="key">{"".join(items)}</ul>'


def _name_line(place: SourceLine) -> str:
    return f"<code>{escape(f'{place.near()}   {clip_text(place.text())}')}</code>"


def _make_key(style: str, label: str, count: str) -> str:
    counted = f' <span class="muted">{count}</span>' if count else ""
    return f'<li><span class="swatch" style="{style}"></span><span>{label}{counted}</span></li>'


# --- the source ----------------------------------------------------------------------------------


def _list_source(e: ExplainedCall, colours: dict[SourceLine, str]) -> str:
    """Return the source around all tests, with counts beside its lines."""
    places = {*colours, *(p.place for p in e.divergences), *e.scalar}
    if not places:
        return ""
    steps: dict[SourceLine, list[Step]] = defaultdict(list)
    for step in e.steps:
        steps[step.place].append(step)
    divergences: dict[SourceLine, list[Divergence]] = defaultdict(list)
    for divergence in e.divergences:
        divergences[divergence.place].append(divergence)
    parts = []
    for file in sorted({place.file for place in places}):
        lines = [place.line for place in places if place.file == file]
        shown = sorted({n for line in lines for n in _find_shown_lines(file, line)})
        rows, before = [], shown[0]
        for n in shown:
            if n > before + 1:
                rows.append('<tr class="gap"><td></td><td></td><td>...</td><td></td></tr>')
            before, place = n, SourceLine(file, n)
            rows.append(_make_source_row(place, steps[place], divergences[place], colours))
        head = (
            '<tr><th class="number">line</th><th class="number">steps</th>'
            f"<th>{escape(_shorten_path(file))}</th><th>diverged into groups of</th></tr>"
        )
        table = f'<table class="source">{head}{"".join(rows)}</table>'
        parts.append(f'<div class="wide">{table}</div>')
    return "\n".join(parts)


def _shorten_path(file: str) -> str:
    return SourceLine(file, 0).near().rpartition(":")[0]


def _make_source_row(
    place: SourceLine,
    steps: list[Step],
    divergences: list[Divergence],
    colours: dict[SourceLine, str],
) -> str:
    sizes = Counter(" + ".join(map(str, divergence.sizes)) for divergence in divergences)
    groups = [f"{size}{'' if n == 1 else f' (x{n})'}" for size, n in sizes.items()]
    if len(groups) > _GROUPS:
        more = sum([*sizes.values()][_GROUPS:])
        groups = [*groups[:_GROUPS], f"and {format_count(more, 'time')} more"]
    colour = colours.get(place)
    edge = f' style="box-shadow: inset 4px 0 {colour}"' if colour else ""
    kind = ' class="diverged"' if divergences else ""
    text = linecache.getline(place.file, place.line).rstrip("\n") or (
        "(no source)" if steps or divergences else ""
    )
    return (
        f'<tr{kind}><td class="number"{edge}>{place.line}</td>'
        f'<td class="number">{len(steps) or ""}</td><td><code>{escape(text)}</code></td>'
        f"<td>{', '.join(groups)}</td></tr>"
    )


def _find_shown_lines(file: str, line: int) -> range:
    """Return the lines of the function around a line, or those near it if it is a long one."""
    count = len(linecache.getlines(file))
    first, last = _find_function(file, line) or (line - _AROUND, line + _AROUND)
    if last - first >= _WHOLE:
        first, last = max(first, line - _AROUND), min(last, line + _AROUND)
    if not count:
        return range(line, line + 1)
    return range(max(first, 1), min(last, count) + 1)


def _find_function(file: str, line: int) -> tuple[int, int] | None:
    """Return the first and last line of the innermost function around a line."""
    found = None
    for first, last in _list_functions_of(file, "".join(linecache.getlines(file))):
        if first <= line <= last and (found is None or last - first < found[1] - found[0]):
            found = first, last
    return found


@lru_cache(maxsize=8)
def _list_functions_of(file: str, source: str) -> list[tuple[int, int]]:
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError):
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def _list_functions(e: ExplainedCall) -> str:
    rows = [
        *((f.name, f.place, "converted, so that examples can diverge inside") for f in e.converted),
        *((f.name, f.place, f"run once for each group: {f.why}") for f in e.refused),
        *((name, "", f"ran again {format_count(n, 'time')} for a group") for name, n in e.again),
    ]
    rows += [
        (place.text(), place.near(), "numbers of Python's own; otherwise one example after another")
        for place in e.scalar
    ]
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(place)}</code></td>"
        f"<td>{escape(how)}</td></tr>"
        for name, place, how in rows
    )
    head = "<tr><th>function</th><th>where</th><th>how it ran</th></tr>"
    return f'<div class="wide"><table class="functions">{head}{cells}</table></div>'


# --- operators and programs ----------------------------------------------------------------------


def _list_operators(e: ExplainedCall) -> str:
    if not e.operators:
        return ""
    shown, others = e.operators[:_OPERATORS], e.operators[_OPERATORS:]
    rows = [(f"<code>{escape(c.name)}</code>", c.calls, c.seconds, c.allocated) for c in shown]
    if others:
        calls, seconds = sum(c.calls for c in others), sum(c.seconds for c in others)
        allocated = sum(c.allocated for c in others)
        rows.append((f"{len(others)} other operators", calls, seconds, allocated))
    cells = [_make_cost_row(OTHER_TIME, "", find_other_time(e), e.seconds, "")]
    cells += [
        _make_cost_row(name, str(calls), seconds, e.seconds, format_bytes(allocated))
        for name, calls, seconds, allocated in rows
    ]
    head = (
        '<tr><th>operator</th><th class="number">calls</th><th class="number">time</th>'
        '<th class="number">share</th><th class="number">allocated</th><th class="bar"></th></tr>'
    )
    return (
        f'<div class="wide"><table class="operators">{head}{"".join(cells)}</table></div>\n'
        '<p class="muted">Time of the host in this one call, measured by torch\'s profiler, which '
        "makes each operator a little slower. On a GPU it is the time to launch kernels. "
        "Allocated is what operators allocated in all, what was freed again included.</p>"
    )


def _make_cost_row(name: str, calls: str, seconds: float, whole: float, allocated: str) -> str:
    width = 100 * seconds / whole if whole else 0
    return (
        f'<tr><td>{name}</td><td class="number">{calls}</td>'
        f'<td class="number">{format_seconds(seconds)}</td>'
        f'<td class="number">{format_share(seconds, whole)}</td>'
        f'<td class="number">{allocated}</td>'
        f'<td class="bar"><span style="width: {min(width, 100):.1f}%"></span></td></tr>'
    )


def _show_program(e: ExplainedCall) -> str:
    return f'<div class="wide"><pre>{escape(e.program)}</pre></div>' if e.program else ""

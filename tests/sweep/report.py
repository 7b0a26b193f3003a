"""The sweep's verdicts as markdown: totals on top, then what is not equal, then every entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .engines import WAYS
from .judge import STATUSES
from .known_gaps import EXCEPTIONS, GAPS
from .words import PART, PART_WORDS, WORDS, WRITING_WORDS

Row = dict[str, Any]
ENGINES = ("forall", "torch.func")


def merged(verdicts: Iterable[Row]) -> list[Row]:
    """One row per entry, word and engine: the worst over its dtypes."""
    rows: dict[tuple, Row] = {}
    for v in verdicts:
        row = rows.setdefault(
            (v["name"], v["word"], v["engine"]),
            {
                **{k: v[k] for k in ("name", "word", "engine")},
                "status": "no truth",
                "way": "",
                "cases": Counter(),
                "first": {},
                "empty": 0,
                "rounded": 0,
            },
        )
        row["empty"] += v["empty"]
        row["rounded"] += v["rounded"]
        row["status"] = max(row["status"], v["status"], key=STATUSES.index)
        row["way"] = max(row["way"], v["way"], key=lambda w: WAYS.index(w) if w else -1)
        row["cases"].update(v["cases"])
        for status, text in v["first"].items():
            row["first"].setdefault(status, f"[{v['dtype']}] {text}")
    return sorted(rows.values(), key=lambda r: r["name"])


def summary(verdicts: Iterable[Row]) -> list[str]:
    """How many entries have which status, for each word and engine."""
    rows = merged(verdicts)
    heads = [s for s in STATUSES if s != "no truth"]
    lines = [
        f"| transform | engine | with a truth | {' | '.join(heads)} | only size 0 | cases |",
        f"|---|---|{'---:|' * (len(heads) + 3)}",
    ]
    for word in WORDS:
        for engine in ENGINES:
            ours = [r for r in rows if (r["word"], r["engine"]) == (word, engine)]
            by = Counter(r["status"] for r in ours)
            if not ours:
                continue
            cases = sum(n for r in ours for s, n in r["cases"].items() if s != "no truth")
            counts = " | ".join(str(by[s]) for s in heads)
            empty = sum(_only_empty(r) for r in ours)
            judged = len(ours) - by["no truth"]
            lines.append(f"| {word} | {engine} | {judged} | {counts} | {empty} | {cases} |")
    return lines


def _only_empty(row: Row) -> bool:
    """Whether everything else is right, and only a call with no examples goes astray."""
    return 0 < row["empty"] == sum(row["cases"].get(s, 0) for s in ("wrong", "error"))


def markdown(verdicts: list[Row], entries: int) -> str:
    rows = merged(verdicts)
    parts = ["# Coverage", "", *_head(verdicts, rows, entries), *summary(verdicts), ""]
    for status in ("crash", "timeout", "wrong", "error"):
        found = [r for r in rows if r["engine"] == "forall" and status in r["first"]]
        parts += _section(status, found)
    return "\n".join([*parts, *_table(rows)]) + "\n"


def _head(verdicts: list[Row], rows: list[Row], entries: int) -> list[str]:
    ran = {e: _ran([v for v in verdicts if v["engine"] == e]) for e in ENGINES}
    cases = sum(n for v in verdicts for s, n in v["cases"].items() if s != "no truth")
    none = sum(
        n
        for v in verdicts
        for s, n in v["cases"].items()
        if s == "no truth" and v["engine"] == "forall"
    )
    rounded = sum(r["rounded"] for r in rows if r["engine"] == "forall")
    lines = [
        "Written by `make coverage`; do not edit. Every operator in torch's own database, its",
        "forms in place and with `out=`, under each transform, next to the loop over examples and",
        "torch's own autograd on plain tensors.",
        "",
        f"Entries: {len({r['name'] for r in rows})} of {entries}.",
        *(f"{engine}: {dtypes}.  " for engine, dtypes in ran.items()),
        f"{', '.join(PART[:-1])} and {PART[-1]} were tried under {' and '.join(PART_WORDS)} alone,",
        "forms that write, and what only the references of torch have, under",
        f"{', '.join(WRITING_WORDS[:-1])} and {WRITING_WORDS[-1]}.",
        f"Cases: {cases}, both engines together. Not counted: {none} cases in which plain tensors,",
        "or torch's own autograd, raise, or torch gives a view another value than its copy. Of",
        f"forall's equal cases {rounded} are equal up to the order of summation (relative to the",
        "largest entry), and not within `torch.testing.assert_close`'s defaults.",
        "",
        "An entry is as good as its worst case. `loops` is equal, but an operator ran once per",
        "example. `only size 0` counts the entries among error and wrong that fail in nothing but",
        "a call without examples.",
        "",
    ]
    return lines


def _ran(verdicts: list[Row]) -> str:
    """How many entries ran in which dtype."""
    dtypes: dict[str, set[str]] = {}
    for v in verdicts:
        dtypes.setdefault(v["dtype"], set()).add(v["name"])
    return ", ".join(f"{len(names)} in {d}" for d, names in dtypes.items()) or "not run"


def _section(status: str, rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"## forall: {status}", ""]
    for r in rows:
        text = r["first"].get(status, "").replace("|", "\\|")[:300]
        why = {**GAPS, **EXCEPTIONS}.get((r["name"], r["word"]))
        text = f"{why}. First: {text}" if why else text
        lines.append(f"- `{r['name']}`, {r['word']} ({r['cases'].get(status, 0)}): {text}")
    return [*lines, ""]


def _table(rows: list[Row]) -> list[str]:
    found = {(r["name"], r["word"], r["engine"]): r for r in rows}
    names = list(dict.fromkeys(r["name"] for r in rows))
    lines = [
        "## Every entry",
        "",
        "forall / torch.func. `=` equal, `↻` equal by a loop, `E` error, `W` wrong, `T` timeout,",
        "`C` crash, `·` no truth to compare with. The way is how forall finds the operator's",
        "meaning under vmap; `shared` met no mapped argument.",
        "",
        f"| entry | way | {' | '.join(WORDS)} |",
        f"|---|---|{'---|' * len(WORDS)}",
    ]
    for name in names:
        way = found.get((name, "vmap", "forall"), {}).get("way", "")
        cells = " | ".join(
            " ".join(_mark(found.get((name, word, engine))) for engine in ENGINES) for word in WORDS
        )
        lines.append(f"| `{name}` | {way or 'shared'} | {cells} |")
    return lines


_MARKS = dict(zip(STATUSES, "·=↻EWTC", strict=True))


def _mark(row: Row | None) -> str:
    return _MARKS[row["status"]] if row else ""

"""The sweep's verdicts as markdown: totals on top, then what is not equal, then every entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .engines import WAYS
from .judge import STATUSES

Row = dict[str, Any]
BAD = ("wrong", "error")


def merged(verdicts: Iterable[Row]) -> list[Row]:
    """One row per entry: the worst over its dtypes."""
    rows: dict[str, Row] = {}
    for v in verdicts:
        row = rows.setdefault(
            v["name"],
            {
                "name": v["name"],
                "status": "no case",
                "way": "",
                "cases": Counter(),
                "first": {},
                "empty": 0,
            },
        )
        row["empty"] += v["empty"]
        row["status"] = max(row["status"], v["status"], key=STATUSES.index)
        row["way"] = max(row["way"], v["way"], key=lambda w: WAYS.index(w) if w else -1)
        row["cases"].update(v["cases"])
        for status, text in v["first"].items():
            row["first"].setdefault(status, f"[{v['dtype']}] {text}")
    return sorted(rows.values(), key=lambda r: r["name"])


def totals(rows: list[Row]) -> dict[str, Any]:
    by = Counter(r["status"] for r in rows)
    cases = Counter()
    for r in rows:
        cases.update(r["cases"])
    judged = len(rows) - by["no case"]
    right = by["equal"] + by["loops"]
    return {
        "entries": len(rows),
        "with a case": judged,
        "equal": right,
        "equal %": round(100 * right / judged, 1) if judged else 0.0,
        **{s: by[s] for s in STATUSES if s not in ("equal", "no case")},
        "no case": by["no case"],
        "with a loop": sum(r["cases"].get("loops", 0) > 0 for r in rows),
        "only at size 0": {s: sum(r["status"] == s and _only_empty(r) for r in rows) for s in BAD},
        "cases": {s: cases[s] for s in STATUSES if cases[s]},
        "ways": {w or "shared": n for w, n in Counter(r["way"] for r in rows).items()},
    }


def _only_empty(row: Row) -> bool:
    """Whether everything else is right, and only a call with no examples goes astray."""
    return 0 < row["empty"] == sum(row["cases"].get(s, 0) for s in BAD)


def markdown(verdicts: Iterable[Row], title: str) -> str:
    rows = merged(verdicts)
    parts = [f"# {title}", "", *_summary(rows)]
    for status in ("crash", "timeout", "wrong", "error", "loops", "no case"):
        parts += _section(
            status, [r for r in rows if status in r["first"] or r["status"] == status]
        )
    parts += ["## every entry", "", "| entry | status | way | cases |", "|---|---|---|---|"]
    for r in rows:
        cases = ", ".join(f"{n} {s}" for s, n in r["cases"].items())
        parts.append(f"| `{r['name']}` | {r['status']} | {r['way'] or '-'} | {cases} |")
    return "\n".join(parts) + "\n"


def _summary(rows: list[Row]) -> list[str]:
    t = totals(rows)
    lines = [
        f"- entries: {t['entries']}, of which the loop runs for {t['with a case']}",
        f"- equal: {t['equal']} ({t['equal %']} %), of which by a loop: {t['loops']}",
        *(f"- {s}: {t[s]}, of which only at size 0: {t['only at size 0'][s]}" for s in BAD),
        *(f"- {s}: {t[s]}" for s in ("timeout", "crash")),
        f"- entries in which an overload was called once per example: {t['with a loop']}",
        "- cases: " + ", ".join(f"{n} {s}" for s, n in t["cases"].items()),
        "- ways: " + ", ".join(f"{n} {w}" for w, n in sorted(t["ways"].items())),
        "",
        "An entry is as good as its worst case. `loops` is equal, but an overload was called once",
        "per example. `no case` is a case in which the loop over plain tensors itself raises. The",
        "way `shared` means that no operator met a mapped argument (factories, names).",
        "",
    ]
    return lines


def _section(status: str, rows: list[Row]) -> list[str]:
    # Cases without a truth are many and say nothing of the engine; entries without one do.
    if status in ("no case", "loops"):
        rows = [r for r in rows if r["status"] == status]
    if not rows:
        return []
    lines = [f"## {status}", ""]
    for r in rows:
        text = r["first"].get(status, "").replace("|", "\\|")
        lines.append(f"- `{r['name']}` ({r['cases'].get(status, 0)}): {text}")
    return [*lines, ""]

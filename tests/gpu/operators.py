"""Torch's own database of operators, under the main transforms, judged as in the sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.checks import Check, Skipped, Slow

QUICK = 5  # one in so many of the checks is made with --quick
SAMPLES = 2
WORDS = ("vmap", "vmap∘vjp", "vmap∘jvp", "jvp∘vjp∘vmap", "jacrev")


def checks(device: torch.device) -> list[Check]:
    try:
        from sweep import known_gaps
        from sweep.engines import Engine
        from sweep.entries import all_ops, dtypes_for
        from sweep.judge import Entry
    except ImportError as error:
        raise Skipped(f"the database of operators needs {error}") from error
    known = known_gaps.GAPS | known_gaps.EXCEPTIONS
    engine = Engine("forall")

    def of(name: str, op: Any) -> Callable[[], str]:
        def run() -> str:
            (dtype,) = dtypes_for(op, [torch.float32])[:1]
            entry = Entry(name, op, dtype, SAMPLES, device=device)
            counts = 0
            problems: dict[str, list[str]] = {"wrong": [], "error": [], "loops": []}
            for word in WORDS if dtype.is_floating_point else WORDS[:1]:
                (verdict,) = entry.judge(word, [engine])
                counts += sum(verdict.cases.values()) - verdict.cases.get("no truth", 0)
                if verdict.status in problems and (name, word) not in known:
                    text = verdict.first.get(verdict.status, "")
                    problems[verdict.status].append(f"{word}: {text}")
            assert not problems["wrong"], "; ".join(problems["wrong"])
            if problems["error"]:
                raise RuntimeError("; ".join(problems["error"]))
            if problems["loops"]:
                raise Slow("; ".join(problems["loops"]))
            if not counts:
                raise Skipped(entry.why or "no plain call runs on this device")
            return f"{counts} cases"

        return run

    return [Check(name, of(name, op)) for name, op in all_ops().items()]

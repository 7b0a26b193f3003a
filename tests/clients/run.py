"""Runs every library's program, and writes docs/reference/clients.md: `make clients`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from compare import DISTRIBUTIONS, NAMES, Found, compare

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
FAILED = "failed"
# What cannot be installed beside this torch, and why.
MISSING = {
    "theseus-ai": "it needs scikit-sparse, of which there is no wheel: building it takes the "
    "headers of SuiteSparse. Its torchkin stands alone.",
}

HEAD = """\
# Libraries that call torch.func

Each program below is a few lines on a released library, and calls torch.func through the library's
own code. It runs as it is, and with forall in torch.func's place (`forall.installed()`). Both
results are compared by `torch.testing.assert_close`, at the first call and at the last one. The
largest difference is in units of the largest entry; 0 means the same bits. Times are of one thread,
medians of rounds that alternate, after 100 calls of forall's, or five seconds of them.
`make clients` writes this page: it makes an environment with the releases of
`tests/clients/requirements.txt`.

"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", help="libraries; all of them without a name")
    options.add_argument(
        "--one", action="store_true", help="run one here, and print what came of it"
    )
    options.add_argument("--dry", action="store_true", help="write no page")
    chosen = options.parse_args()
    if chosen.one:
        print(json.dumps(asdict(compare(chosen.names[0]))))
        return 0
    found = {}
    for name in chosen.names or NAMES:
        found[name] = in_a_process(name)
        print(tell(name, found[name]), flush=True)
    ratios = [one.ours / one.theirs for one in found.values() if isinstance(one, Found)]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    print(f"geometric mean of {len(ratios)} ratios: {mean:.2f}")
    if not chosen.names and not chosen.dry:
        PAGE.write_text(page(found, mean))
    return int(any(not isinstance(one, Found) for one in found.values()))


def in_a_process(name: str) -> Found | str:
    """What came of a library, or the end of what it printed where it failed."""
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    lines = ran.stdout.splitlines()
    if ran.returncode == 0 and lines:
        return Found(**json.loads(lines[-1]))
    errors = ran.stderr.strip().splitlines()
    return errors[-1] if errors else f"ended with {ran.returncode}"


def tell(name: str, one: Found | str) -> str:
    if not isinstance(one, Found):
        return f"{name:14} {FAILED}: {one}"
    return (
        f"{name:14} {one.theirs * 1e3:9.2f} ms {one.ours * 1e3:9.2f} ms "
        f"{one.ours / one.theirs:6.2f}   {one.difference:7.1e}   {', '.join(one.transforms)}"
        f"{'   (against the loop)' if one.why_loop else ''}"
    )


def page(found: dict[str, Found | str], mean: float) -> str:
    lines = [
        "| library | what runs | transforms | torch.func, ms | forall, ms | ratio | difference |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    notes = []
    for name, one in found.items():
        distribution = DISTRIBUTIONS.get(name, name)
        release = importlib.metadata.version(distribution)
        if not isinstance(one, Found):
            lines.append(f"| {distribution} {release} | {FAILED}: `{one}` | | | | | |")
            continue
        loop = " (the loop)" if one.why_loop else ""
        ratio = one.ours / one.theirs
        lines.append(
            f"| {distribution} {release} | {one.what} | {', '.join(one.transforms)} "
            f"| {one.theirs * 1e3:.2f}{loop} | {one.ours * 1e3:.2f} | {ratio:.2f} "
            f"| {f'{one.difference:.0e}' if one.difference else 0} |"
        )
        if one.why_loop:
            notes.append(f"{distribution}: {one.why_loop}")
    notes += [f"Not installed: {name}, since {why}" for name, why in MISSING.items()]
    place = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    end = f"Geometric mean of the ratios: {mean:.2f}. Measured with {place}.\n"
    told = "".join(f"- {note}\n" for note in notes)
    return HEAD + "\n".join(lines) + f"\n\n{end}\n{told}"


if __name__ == "__main__":
    sys.exit(main())

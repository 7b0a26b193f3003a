"""Compare forall with torch.func, the loop, and hand-written programs; see --help."""

import argparse
import os
import sys
import traceback
import warnings
from pathlib import Path

# The profiler that counts memory would otherwise report its every start on standard error.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# torch.func.linearize warns about the graph it traces itself.
warnings.filterwarnings("ignore", module="torch.fx", category=UserWarning)

import torch

import against_the_loop
import first_calls
import forall
import over_ranks
import peers
import picture
import report
import sizes
import workloads  # noqa: F401
from measure import Built, keep_memory, make, measure
from registry import WORKLOADS, Workload

RESULTS = Path(__file__).with_name("results.md")
SECTIONS = ("times", "first", "sizes", "peers", "divergence", "ranks")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads to run")
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        help="what to measure: times and peak memory, first calls, sizes, peers, programs whose "
        "examples diverge, and programs over two processes (all; with --only: times)",
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and stop")
    parser.add_argument("--rounds", type=int, help="rounds per workload (41, quick: 5)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter samples")
    # One thread: on a machine shared with others, waiting for a second one is what varies most.
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"file to write, and beside it a picture; by default {RESULTS.name} beside this "
        "program for a complete run, and none for --only, --sections or --quick",
    )
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown workloads: {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here")
    if options.rounds is None:
        options.rounds = 5 if options.quick else 41
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads take a positive number")
    if options.out is None and not (options.only or options.sections or options.quick):
        options.out = RESULTS
    if options.sections is None:
        options.sections = ["times"] if options.only else SECTIONS
    return options


def prepare(options: argparse.Namespace) -> torch.device:
    keep_memory()
    torch.set_num_threads(options.threads)
    # Reduced precision would make the contestants disagree for reasons of no interest here.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(options.device)


def make_all(chosen: list[Workload], device: torch.device) -> tuple[Built, list[str]]:
    """Build every workload and find all disagreements before any time goes into measuring."""
    built, failures = [], []
    for workload in chosen:
        try:
            built.append((workload, make(workload, device)))
        except Exception as error:
            traceback.print_exception(error)
            failures.append(f"{workload.name}: {type(error).__name__}: {error}")
    return built, failures


def times(built: Built, options: argparse.Namespace, device: torch.device) -> list[str]:
    rows: list[report.Row] = []
    target = 0.005 if options.quick else 0.02
    for workload, contestants in built:
        rows.append((workload, measure(workload, contestants, options.rounds, target, device)))
        print(report.table(rows[-1:])[-1], flush=True)
    shown = options.out and picture.draw(rows, options.out.with_suffix(".png"))
    return [*report.times(rows), *([shown] if shown else [])]


def main() -> int:
    options = arguments()
    if options.list:
        for workload in WORKLOADS.values():
            print(f"{workload.name:28} {workload.quantity}: {workload.summary}")
        return 0
    forall.config.replay = False  # but in the contestants that are there to show it
    device = prepare(options)
    chosen = [WORKLOADS[name] for name in options.only or WORKLOADS]
    needed = {"times", "first", "peers"} & {*options.sections}
    built, failures = make_all(chosen if needed else [], device)
    if failures:
        print("\nNothing was measured:", *failures, sep="\n", file=sys.stderr)
        return 1
    beside = options.out and options.out.with_name("divergence.png")
    sections = {
        "times": lambda: times(built, options, device),
        "first": lambda: first_calls.section(built, options.rounds, device),
        "sizes": lambda: sizes.section(options.rounds, device),
        "peers": lambda: peers.section(built, options.rounds, device),
        "divergence": lambda: against_the_loop.section(options.rounds, device, beside),
        "ranks": lambda: over_ranks.section(options.rounds, device),
    }
    lines = report.opening(device, options.rounds)
    for name in filter(options.sections.__contains__, SECTIONS):
        lines += sections[name]()
        # After each: whatever stops a later one, what was measured stays.
        if options.out is not None:
            options.out.write_text("\n".join(lines) + "\n")
    if options.out is None:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Function transforms at work on handwritten digits.

Four pieces of work that need derivatives of many things at once, each done with forall, each
checked against the plain loop over examples or networks with torch.autograd, each timed against
that loop and against torch.func:

(a) private training: per-example gradients by vmap(grad) (digits_privacy);
(b) an ensemble of networks trained at once, by stack_module_state and vmap (digits_ensemble);
(c) the Hessian of a loss and its largest eigenvalue, by hessian and by jvp of grad
    (digits_curvature);
(d) the Jacobians of a network at every test image, by vmap(jacrev) (digits_curvature).

The module of each part states the laws that it checks. A number that disagrees with the loop or
misses its target ends the program with a message and exit status 1. Otherwise the run ends with a
table of times and a picture.

    python examples/digits.py [--out PATH] [--quick] [--seed SEED] [--threads N]
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from digits_checks import WrongNumberError
from digits_curvature import run_hessian, run_jacobians
from digits_data import load_split
from digits_ensemble import run_ensemble
from digits_privacy import PrivacySettings, run_privacy
from digits_report import draw_picture, print_table


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Function transforms on handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="where to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few steps and rounds, for a smoke test; the accuracy target is not checked",
    )
    # One thread gives the same numbers on any number of cores. The loop's operators are too small
    # to gain from more, and on a busy machine threads that wait for each other distort all times.
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch's operators")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> None:
    """All parts, the table and the picture."""
    quick, seed = arguments.quick, arguments.seed
    rounds = 2 if quick else 7
    torch.set_num_threads(arguments.threads)
    digits = load_split(seed)
    print(
        f"{len(digits.train_labels)} training and {len(digits.test_labels)} test images, "
        f"PyTorch {torch.__version__}, threads: {torch.get_num_threads()}, seed {seed}"
    )
    settings = PrivacySettings(steps=20) if quick else PrivacySettings()
    privacy = run_privacy(digits, settings, rounds, seed, quick)
    ensemble = run_ensemble(digits, 20 if quick else 300, rounds, seed)
    hessian = run_hessian(digits, 200 if quick else 1000, rounds, seed)
    jacobian = run_jacobians(digits, privacy.network, privacy.params, rounds)
    parts = (privacy, ensemble, hessian, jacobian)
    print_table([part.comparison for part in parts], rounds)
    draw_picture(arguments.out, privacy, ensemble, hessian, jacobian)


def main() -> int:
    """The exit status."""
    arguments = parse_arguments()
    start = time.perf_counter()
    try:
        run(arguments)
    except WrongNumberError as wrong:
        print(f"\ndigits: wrong number: {wrong}", file=sys.stderr)
        return 1
    print(f"\nfinished in {time.perf_counter() - start:.0f} s")
    print(f"picture written to {arguments.out.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

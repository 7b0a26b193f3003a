"""Sweep of torch's own operator samples through vmap, judged by the loop."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
for _path in (str(_TESTS), str(_TESTS.parent / "src")):
    if _path not in sys.path:
        sys.path.append(_path)

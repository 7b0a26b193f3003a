"""The verbs keep a function's parameters and result: typed.py, read by the type checker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("typed.py")
ROOT = Path(__file__).parents[2]


def test_the_type_checker_sees_what_a_verb_returns():
    pytest.importorskip("pyright")
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", str(FILE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(run.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    lines = [(d["range"]["start"]["line"] + 1, d["message"]) for d in found["generalDiagnostics"]]
    assert not lines

"""Transforms keep a function's parameters and result: what type checkers say of two modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]


def run_checker(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["typed.py", "user_code.py"])
def test_pyright_sees_what_a_transform_returns(name):
    pytest.importorskip("pyright")
    found = json.loads(run_checker("pyright", "--outputjson", str(HERE / name)).stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    lines = [(d["range"]["start"]["line"] + 1, d["message"]) for d in found["generalDiagnostics"]]
    assert not lines


def test_mypy_sees_what_a_transform_returns(tmp_path):
    pytest.importorskip("mypy")
    run = run_checker("mypy", "--strict", "--cache-dir", str(tmp_path), str(HERE / "user_code.py"))
    assert run.stdout.startswith("Success"), run.stdout

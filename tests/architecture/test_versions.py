"""Which releases of torch are known, and what is said of others."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
import torch

from forall._compat import versions

ROOT = Path(__file__).parents[2]


def test_the_metadata_asks_for_what_was_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, low), (newest, high) = versions.OLDEST, versions.NEWEST
    assert project["dependencies"] == [f"torch>={oldest}.{low},<{newest}.{high + 1}"]


@pytest.mark.parametrize("release", ["2.10.0+cpu", "2.15.1+cu130", "2.15.0a0+git1a2b3c"])
def test_a_release_that_was_tested_is_not_warned_of(release, monkeypatch):
    monkeypatch.setattr(torch, "__version__", release)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested()


def test_a_newer_release_is_warned_of(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0\+cpu is newer.*2\.10 to") as told:
        versions.warn_if_untested()
    assert "collect_env" in str(told[0].message)


def test_the_warning_of_a_newer_release_names_the_line_that_imports(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import torch\ntorch.__version__ = "2.99.0"\nimport forall\n')
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stderr.startswith(f"{script}:3: UserWarning: forall: torch 2.99.0 is newer")


def test_a_function_that_torch_no_longer_calls_is_an_error():
    module = types.ModuleType("torch.utils.some")
    exec("def outer():\n    return _inner()\ndef _inner():\n    pass\n", vars(module))  # noqa: S102
    versions.require_called("_inner", module, "outer")
    with pytest.raises(ImportError, match=r"torch\.utils\.some\.outer does not call _renamed"):
        versions.require_called("_renamed", module, "outer")


def test_backward_stays_torchs_where_it_asks_for_overrides():
    functions = types.ModuleType("functions")
    exec(  # noqa: S102
        "def asks(tensors):\n    return has_torch_function(tensors)\n"
        "def asks_nobody(tensors):\n    return None\n",
        vars(functions),
    )
    assert versions.ask_overrides_of_backward(functions.asks) is functions.asks
    assert versions.ask_overrides_of_backward(functions.asks_nobody) is not functions.asks_nobody
    torchs = inspect.unwrap(torch.autograd.backward)
    asks = "has_torch_function" in torchs.__code__.co_names
    assert (torch.autograd.backward is torchs) == asks


def test_operators_that_a_release_lacks_are_left_out():
    assert versions.find_existing(["mm.default", "mm.nowhere", "nothing_of_this_name.default"]) == (
        torch.ops.aten.mm.default,
    )

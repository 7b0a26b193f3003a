"""The wheel and the source distribution: what is in them, and that they can be installed."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import forall

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder)
    return folder


def test_wheel_has_each_module_the_stub_and_the_marker_of_types(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("forall/")}
    source = ROOT / "src"
    kinds = ("*.py", "*.pyi", "py.typed", "errors.md")
    there = {str(p.relative_to(source)) for kind in kinds for p in source.rglob(kind)}
    assert there <= names
    assert "forall/__init__.pyi" in names
    assert "forall/py.typed" in names
    assert "forall/errors.md" in names


def test_source_distribution_has_what_building_needs_and_no_tests(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/forall/__init__.py"} <= names
    assert not {n for n in names if n.startswith(("tests/", "benchmarks/", ".git/"))}


def test_source_distribution_installs_and_runs(built, tmp_path):
    """Into an empty folder, beside the torch of this environment."""
    (sdist,) = built.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "--no-deps", "--no-build-isolation", "--target", tmp_path / "site", sdist)
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import forall, runpy; "
    script += f"assert forall.__file__.startswith({str(tmp_path)!r}), forall.__file__; "
    script += f"runpy.run_path({str(ROOT / 'tests' / 'matrix' / 'first_steps.py')!r})"
    assert run(sys.executable, "-c", script, cwd=tmp_path).strip() == "ok"


def test_version_is_written_once(built):
    (wheel,) = built.glob("*.whl")
    assert f"-{forall.__version__}-" in wheel.name
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [forall.__version__]
    assert f"{forall.__version__}" in (ROOT / "CHANGELOG.md").read_text()

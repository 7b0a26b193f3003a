"""Draws the pictures that `explain` makes of the examples, for the pages that show them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "pictures"
# The pictures of the site, and the script that draws each, given the place for it.
PICTURES = {"guides/roots.png": "examples/roots.py"}


def draw(script: str, picture: Path) -> bytes:
    """Return the picture that a script writes into the file that it is given."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    source = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, str(picture)]
    ran = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{script} failed:\n{ran.stderr}")
    return picture.read_bytes()


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures."""
    from mkdocs.structure.files import File

    for place, script in PICTURES.items():
        content = draw(script, BUILD / Path(place).name)
        files.append(File.generated(config, place, content=content))
    return files

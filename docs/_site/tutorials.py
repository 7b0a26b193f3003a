"""Makes a page, a notebook and a picture in the gallery of each script in docs/tutorials.

A script is a notebook in jupytext's percent format. It runs in a process of its own, and the page
shows what it prints and draws. A line such as ``STEPS = 2000  # fast: 200`` has the second value
where FORALL_TUTORIALS=fast, which is for CI.

As a program, it runs the scripts that are named, or all: ``python docs/_site/tutorials.py dp_sgd``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from base64 import b64decode, b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "tutorials"
BUILD = ROOT / "build" / "tutorials"
SECONDS = 900  # for one script
ORDER = "order.txt"  # in SCRIPTS: the names of the scripts, as the gallery shows them
_FAST = re.compile(r"^(\s*\w+ = ).*?  # fast: (.*)$", re.MULTILINE)
_COMMENT = re.compile(r"  # fast: .*$", re.MULTILINE)


class Tutorial(NamedTuple):
    """A script that has run: its page, its pictures by name, and its notebook without output."""

    name: str
    title: str
    summary: str
    page: str
    pictures: dict[str, bytes]
    notebook: str


def list_scripts() -> list[Path]:
    """Return the scripts in the order of the gallery; raise if one is missing or not listed."""
    names = (SCRIPTS / ORDER).read_text().split()
    found = {p.stem for p in SCRIPTS.glob("*.py")}
    if found != {*names}:
        raise FileNotFoundError(f"{ORDER} and docs/tutorials differ in {found ^ {*names}}")
    return [SCRIPTS / f"{name}.py" for name in names]


def is_fast() -> bool:
    return os.environ.get("FORALL_TUTORIALS") == "fast"


def run_tutorial(script: Path) -> Tutorial:
    """Run a script, or take what it gave when it last ran as it is."""
    text = script.read_text()
    text = _FAST.sub(r"\1\2", text) if is_fast() else _COMMENT.sub("", text)
    kept = BUILD / f"{script.stem}-{_hash(text)}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        pictures = {name: b64decode(data) for name, data in found.pop("pictures").items()}
        return Tutorial(**found, pictures=pictures)
    tutorial = _run(script.stem, text)
    BUILD.mkdir(parents=True, exist_ok=True)
    pictures = {name: b64encode(data).decode() for name, data in tutorial.pictures.items()}
    kept.write_text(json.dumps({**tutorial._asdict(), "pictures": pictures}))
    return tutorial


def _hash(text: str) -> str:
    """Return a hash of a script and of forall's source, which its output depends on."""
    found = hashlib.sha256(text.encode())
    for file in sorted((ROOT / "src").rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _run(name: str, text: str) -> Tutorial:
    notebook = jupytext.reads(text, fmt="py:percent")
    title, summary = _read_heading(notebook.cells[0].source)
    bare = jupytext.writes(notebook, fmt="ipynb")
    resources = {"metadata": {"path": str(SCRIPTS)}}
    # One thread for each of two scripts that run side by side, on the source of this checkout.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT / "src")}
    quiet = ["--IPKernelApp.log_level=40"]  # errors alone
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=resources,
        extra_arguments=quiet,
    )
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        raise RuntimeError(f"docs/tutorials/{name}.py failed:\n{error}") from None
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:  # its text, `<Figure size ..>`, tells nothing
                data.pop("text/plain", None)
    exporter = MarkdownExporter()
    page, found = exporter.from_notebook_node(notebook, {"output_files_dir": f"{name}_files"})
    pictures: dict[str, bytes] = found["outputs"]
    link = (
        f'[Download this page as a notebook]({name}.ipynb){{ .md-button download="{name}.ipynb" }}'
    )
    return Tutorial(name, title, summary, f"{page}\n\n{link}\n", pictures, bare)


def _read_heading(text: str) -> tuple[str, str]:
    """Return the title and the first paragraph of a script's first cell."""
    title, _, rest = text.partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"the first cell is to begin with '# Title', not {title!r}")
    return title[2:], " ".join(rest.strip().partition("\n\n")[0].split())


def run_all(names: list[str] | None = None) -> list[Tutorial]:
    """Run scripts, two at a time; print how long each took."""
    scripts = [s for s in list_scripts() if not names or s.stem in names]

    def run(script: Path) -> Tutorial:
        start = time.perf_counter()
        tutorial = run_tutorial(script)
        print(f"{script.stem}: {time.perf_counter() - start:.0f} s", flush=True)
        return tutorial

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, scripts)]


def _make_gallery(tutorials: list[Tutorial]) -> str:
    """Return the page that shows all tutorials, a picture each."""
    cards = []
    for t in tutorials:
        picture = f"    ![{t.title}]({[*t.pictures][-1]})\n\n" if t.pictures else ""
        cards.append(f"-   **[{t.title}]({t.name}.md)**\n\n{picture}    {t.summary}\n")
    start = (
        "# Tutorials\n\nEach page is a script that ran when this page was built, on data that a "
        "package ships or a model makes. Each ends with a check of its result, and can be "
        "downloaded as a notebook.\n\n"
    )
    return start + '<div class="grid cards" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"


# --- the hooks that mkdocs calls ------------------------------------------------------------------

_nav: list[str] = []


def on_config(config: Any) -> Any:
    """List the tutorials in the navigation."""
    for entry in config.nav:
        if "Tutorials" in entry:
            entry["Tutorials"] = ["tutorials/index.md"]
            entry["Tutorials"] += [f"tutorials/{s.stem}.md" for s in list_scripts()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, pictures and notebooks."""
    from mkdocs.structure.files import File

    tutorials = run_all()
    made: dict[str, str | bytes] = {"tutorials/index.md": _make_gallery(tutorials)}
    for t in tutorials:
        made[f"tutorials/{t.name}.md"] = t.page
        made[f"tutorials/{t.name}.ipynb"] = t.notebook
        made |= {f"tutorials/{name}": data for name, data in t.pictures.items()}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


if __name__ == "__main__":
    run_all(sys.argv[1:])

"""Runs a program with forall in the place of torch.func: see `forall.install`.

python -m forall script.py [argument ...]
python -m forall -m module [argument ...]

Prints cause and cure of an error: a line below its message has the key.

python -m forall explain KEY
"""

import pkgutil
import runpy
import sys
from pathlib import Path

import forall
from forall._core.error_entries import find_entries, read_entries


def main() -> None:
    """Run the program that the command line names, as Python would, or explain an error."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        forall.install()
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[:1] == ["explain"]:
        _explain_error(" ".join(arguments[1:]))
    elif arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)  # noqa: T201 - what was asked for
    elif not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    else:
        _run_file(arguments)


def _explain_error(words: str) -> None:
    found = find_entries(words) if words else []
    if len(found) == 1:
        print(found[0].format_plain())  # noqa: T201 - what was asked for
        return
    keys = [e.key for e in found] or list(read_entries())
    listed = "\n".join(f"    {key}" for key in keys)
    said = f"no entry {words!r}; {'near it' if found else 'there'} are" if words else "the keys are"
    sys.exit(f"python -m forall explain: {said}\n{listed}")


def _run_file(arguments: list[str]) -> None:
    path = arguments[0]
    if not Path(path).exists():
        sys.exit(f"python -m forall: there is no file {path!r}")
    forall.install()
    sys.argv[:] = arguments
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder that `python -m` has put there
        if pkgutil.get_importer(path) is None:  # a script: runpy enters a folder or a zip file
            sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()

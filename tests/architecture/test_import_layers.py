"""Imports point down the layers of packages, deferred ones included, and never in a ring."""

import pytest

import counts
from source import files, imports

# Public modules are on top: they may import any package, and no package imports them.
LAYERS = {
    "_compat": 0,
    "_ast_rewrite": 0,
    "_core": 1,
    "_mesh": 2,
    "_random": 2,
    "_jit": 3,
    "_vmap": 4,
    "_autodiff": 4,
    "_divergence": 5,
    "_api": 6,
    "_auto_replay": 7,
    "_control_flow": 7,
}
PUBLIC = ("__init__.py", "__main__.py", "extend.py", "random.py", "testing.py")
RULES = "_vmap/rules/"


def package(path: str) -> str:
    return path.split("/", maxsplit=1)[0]


def imported_packages(path: str) -> set[str]:
    found = set()
    for name in imports(files()[path]):
        if name.startswith("forall."):
            found.add(name.split(".")[1])
    return found


@pytest.mark.parametrize("path", files())
def test_a_file_is_in_a_layer_or_public(path):
    assert path in PUBLIC or package(path) in LAYERS


@pytest.mark.parametrize("path", [p for p in files() if p not in PUBLIC])
def test_imports_point_down(path):
    mine = package(path)
    for used in imported_packages(path):
        assert used in LAYERS, f"{path} imports the public module forall.{used}"
        assert used == mine or LAYERS[used] < LAYERS[mine], f"{path} imports from {used}"


def test_automatic_replay_is_imported_by_the_public_package_alone():
    """All other packages meet it by the slot of the transforms' decorator."""
    users = {path for path in files() if "_auto_replay" in imported_packages(path)}
    assert {path for path in users if package(path) != "_auto_replay"} == {"__init__.py"}


def test_no_modules_import_each_other():
    """Imports inside functions and those for types alone count too."""
    assert counts.rings() == []


@pytest.mark.parametrize("path", [p for p in files() if p.startswith(RULES)])
def test_no_file_of_rules_imports_another(path):
    others = [n for n in imports(files()[path]) if n.startswith("forall._vmap.rules")]
    assert path.endswith("__init__.py") or not others


@pytest.mark.parametrize("path", [p for p in files() if p.startswith(RULES)])
def test_every_file_of_rules_is_registered(path):
    name = path.removeprefix(RULES).removesuffix(".py")
    entered = set(imports(files()[RULES + "__init__.py"]))
    assert name == "__init__" or f"forall._vmap.rules.{name}" in entered

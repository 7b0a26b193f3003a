"""Imports point down the floors of the house, deferred ones included."""

import pytest

import counts
from source import files, imports

# Doors stand on top: they may open on any room, and no room goes through a door.
FLOORS = {
    "_compat": 0,
    "_ast_rewrite": 0,
    "_core": 1,
    "_jit": 2,
    "_random": 2,
    "_vmap": 3,
    "_autodiff": 3,
    "_divergence": 4,
    "_api": 5,
    "_control_flow": 6,
}
DOORS = ("__init__.py", "__main__.py", "extend.py", "random.py", "testing.py")


def room(path: str) -> str:
    return path.split("/", maxsplit=1)[0]


def rooms_used(path: str) -> set[str]:
    found = set()
    for name in imports(files()[path]):
        if name.startswith("forall."):
            found.add(name.split(".")[1])
    return found


@pytest.mark.parametrize("path", files())
def test_a_room_is_on_a_floor_or_a_door(path):
    assert path in DOORS or room(path) in FLOORS


@pytest.mark.parametrize("path", [p for p in files() if p not in DOORS])
def test_imports_point_down(path):
    mine = room(path)
    for used in rooms_used(path):
        assert used in FLOORS, f"{path} goes through a door, forall.{used}"
        assert used == mine or FLOORS[used] < FLOORS[mine], f"{path} imports from {used}"


@pytest.mark.parametrize("path", [p for p in files() if p.startswith("_vmap/rules/")])
def test_no_file_of_rules_imports_another(path):
    others = [n for n in imports(files()[path]) if n.startswith("forall._vmap.rules")]
    assert path.endswith("__init__.py") or not others


@pytest.mark.parametrize("path", [p for p in files() if p.startswith("_vmap/rules/")])
def test_every_file_of_rules_is_entered(path):
    name = path.removeprefix("_vmap/rules/").removesuffix(".py")
    entered = set(imports(files()["_vmap/rules/__init__.py"]))
    assert name == "__init__" or f"forall._vmap.rules.{name}" in entered


def test_no_modules_import_each_other():
    """Imports inside functions and those for types alone count too."""
    assert counts.rings() == []

"""Only `_compat` names what torch keeps private, and only `_compat` calls torch.func."""

import pytest

from source import chains, files, imports

INSIDE = [path for path in files() if not path.startswith("_compat/")]

# What else may be named outside, and why. An entry that is no longer needed fails.
ALLOWED: dict[tuple[str, str], str] = {}


def is_private(name: str) -> bool:
    """True if a dotted name leads through something private of torch. Operators are public."""
    parts = name.split(".")
    if parts[0] not in {"torch", "functorch"} or parts[:2] == ["torch", "ops"]:
        return False
    return any(p.startswith("_") and not p.startswith("__") for p in parts)


def private_names(path: str) -> set[str]:
    tree = files()[path]
    return {name for name in (*imports(tree), *chains(tree)) if is_private(name)}


@pytest.mark.parametrize("path", INSIDE)
def test_private_names_of_torch_are_in_compat_alone(path):
    private = {name for name in private_names(path) if (path, name) not in ALLOWED}
    assert not private, "give it a name in _compat/private_api.py"


@pytest.mark.parametrize(("path", "name"), ALLOWED)
def test_an_exception_is_still_needed(path, name):
    assert name in private_names(path)


@pytest.mark.parametrize("path", INSIDE)
def test_torchs_own_transforms_are_called_in_compat_alone(path):
    tree = files()[path]
    used = {
        name
        for name in (*imports(tree), *chains(tree))
        if f"{name}.".startswith(("torch.func.", "functorch."))
    }
    if path == "__init__.py":  # utilities that are no transforms are torch's own
        used -= {
            f"torch.func.{name}"
            for name in (
                "functionalize",
                "rearrange",
                "replace_all_batch_norm_modules_",
            )
        }
    assert not used

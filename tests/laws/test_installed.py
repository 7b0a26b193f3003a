"""forall in the place of torch.func: what is replaced, and that all of it is put back."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.func

import forall
from forall.__main__ import main

TORCHS = {name: getattr(torch.func, name) for name in torch.func.__all__}
KEPT = {"functionalize", "rearrange", "replace_all_batch_norm_modules_"}  # forall has torch's
X = torch.tensor([0.5, -1.0, 2.0])


def doubled(x):
    return x.item() * 2  # torch.func's vmap refuses


def is_forall_there():
    return torch.vmap.__code__ is forall.vmap.__code__


@pytest.fixture
def library():
    """Return a function that makes a module of this source, which its test may import."""
    made = []

    def make(name, source):
        module = ModuleType(name)
        sys.modules[name] = module
        made.append(name)
        exec(textwrap.dedent(source), vars(module))  # noqa: S102
        return module

    yield make
    for name in made:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def torchs_are_back():
    yield
    assert {name: getattr(torch.func, name) for name in TORCHS} == TORCHS
    assert torch.vmap is TORCHS["vmap"]


def test_all_transforms_are_replaced_and_come_back():
    with forall.installed() as names:
        for name, torchs in TORCHS.items():
            now = getattr(torch.func, name)
            assert (now is torchs) == (name in KEPT)
            assert name in KEPT or now.__code__ is getattr(forall, name).__code__
        torch.testing.assert_close(torch.vmap(doubled)(X), 2 * X)
    assert {f"torch.func.{name}" for name in TORCHS.keys() - KEPT} < {*names}
    assert {"torch.vmap", "functorch.vmap", "functorch.jacrev"} < {*names}
    assert not [name for name in names if name.startswith(("forall.", "torch._"))]


def test_names_that_modules_have_imported_are_replaced(library):
    module = library("library_a", "from torch.func import vmap as batched, grad")
    with forall.installed() as names:
        assert {"library_a.batched", "library_a.grad"} < {*names}
        torch.testing.assert_close(module.batched(doubled)(X), 2 * X)
    assert module.batched is TORCHS["vmap"]
    assert module.grad is TORCHS["grad"]


def test_a_module_imported_meanwhile_finds_ours_and_is_put_back(library):
    with forall.installed():
        module = library("library_b", "from torch.func import vmap; from functorch import jvp")
        torch.testing.assert_close(module.vmap(doubled)(X), 2 * X)
    assert module.vmap is TORCHS["vmap"]
    assert module.jvp is importlib.import_module("functorch").jvp
    assert module.jvp.__module__ == "torch._functorch.deprecated"


def test_what_is_imported_from_forall_stays(library):
    before = library("library_c", "from forall import vmap; import forall")
    with forall.installed():
        meanwhile = library("library_d", "from forall import vmap, grad")
    assert before.vmap is meanwhile.vmap is forall.vmap
    assert meanwhile.grad is forall.grad


def test_what_another_puts_there_meanwhile_stays(library):
    module = library("library_e", "from torch.func import vmap, grad")
    with forall.installed():
        module.vmap = other = lambda f: f
    assert module.vmap is other
    assert module.grad is TORCHS["grad"]


def test_blocks_nest():
    with forall.installed():
        with forall.installed() as names:
            assert names == ()
        assert is_forall_there()
    assert not is_forall_there()


def test_install_stays_until_uninstall():
    try:
        assert "torch.vmap" in forall.install()
        assert forall.install() == ()
        with forall.installed():
            assert is_forall_there()
        assert is_forall_there()
    finally:
        forall.uninstall()
    assert not is_forall_there()
    forall.uninstall()
    assert not is_forall_there()


def test_uninstall_waits_for_the_end_of_a_block():
    with forall.installed():
        forall.install()
        forall.uninstall()
        assert is_forall_there()
    assert not is_forall_there()


def test_a_second_install_replaces_what_has_been_imported_since(library):
    kept = torch.vmap
    with forall.installed():
        module = library("library_f", "")
        module.vmap = kept
        with forall.installed() as names:
            assert names == ("library_f.vmap",)
    assert module.vmap is kept


def test_an_exception_leaves_all_as_it_was():
    with pytest.raises(ZeroDivisionError), forall.installed():
        _ = 1 / 0
    assert not is_forall_there()


def test_an_interrupt_while_names_are_replaced_leaves_all_as_it_was(library):
    module = library("library_g", "from torch.func import vmap")
    from forall._api import torch_func_patch as room

    replaced = []

    class Interrupting(dict):
        """A namespace of which one name may be given once."""

        def __setitem__(self, name, value):
            replaced.append(name)
            if len(replaced) == 1:
                raise KeyboardInterrupt
            super().__setitem__(name, value)

    own = room._iterate_namespaces
    with pytest.MonkeyPatch.context() as patch:
        names = Interrupting(vmap=TORCHS["vmap"])
        patch.setattr(room, "_iterate_namespaces", lambda: [*own(), ("last", names)])
        with pytest.raises(KeyboardInterrupt), forall.installed():
            raise AssertionError("the block must not begin")
    assert module.vmap is TORCHS["vmap"]
    assert names["vmap"] is TORCHS["vmap"]


def test_as_a_decorator():
    @forall.installed()
    def both():
        return torch.vmap(doubled)(X)

    torch.testing.assert_close(both(), 2 * X)
    torch.testing.assert_close(both(), 2 * X)


def test_blocks_of_several_threads_overlap():
    """Each thread finds forall in its own block, whichever ends first."""
    missing = []
    start = threading.Barrier(4)

    def enter_and_leave():
        start.wait()
        for _ in range(25):
            with forall.installed():
                if not is_forall_there():
                    missing.append(threading.get_ident())

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing


def test_functions_in_torchs_place_can_be_pickled_and_copied():
    with forall.installed():
        for function in (torch.func.grad, torch.vmap, importlib.import_module("functorch").vmap):
            assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301
            assert copy.deepcopy(function) is function
        saved = pickle.dumps(torch.func.jacrev)
    assert pickle.loads(saved) is TORCHS["jacrev"]  # noqa: S301


def test_forall_itself_goes_on_calling_torchs():
    """Inside an active transform of torch's, ours hand over to torch's: no recursion."""
    torchs = TORCHS["vmap"]
    with forall.installed():
        found = torchs(lambda x: torch.func.grad(lambda y: y**3)(x))(X)
        inner = torch.func.vmap(lambda x: torchs(lambda y: y * x)(X))(X)
    torch.testing.assert_close(found, 3 * X**2)
    torch.testing.assert_close(inner, X[:, None] * X)


def test_functorchs_own_names_work():
    functorch = importlib.import_module("functorch")
    with forall.installed():
        torch.testing.assert_close(functorch.vmap(functorch.grad(lambda x: x**2))(X), 2 * X)
    with pytest.warns(FutureWarning, match="deprecated"):
        functorch.grad(lambda x: x**2)


def cubes(x):
    return (
        torch.vmap(torch.func.grad(lambda y: (y**3).sum()))(x)
        + torch.func.jvp(torch.sin, (x,), (x,))[1]
    )


WANTED = 3 * X**2 + X * X.cos()


def test_compiled_code_works_before_within_and_after():
    torch.compiler.reset()
    compiled = torch.compile(cubes, backend="eager")
    torch.testing.assert_close(compiled(X), WANTED)
    with forall.installed():
        torch.testing.assert_close(compiled(X), WANTED)
        torch.testing.assert_close(torch.func.vmap(compiled)(X[None])[0], WANTED)
    torch.testing.assert_close(compiled(X), WANTED)


def test_code_compiled_within_works_within_and_after():
    torch.compiler.reset()
    with forall.installed():
        compiled = torch.compile(cubes, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), WANTED)
        torch.testing.assert_close(compiled(X), WANTED)
    torch.testing.assert_close(compiled(X), WANTED)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(cubes, backend="eager")(X), WANTED)


class Mapped(torch.nn.Module):
    def forward(self, x):
        return torch.vmap(lambda y: y.sin() * 2)(x)


@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("strict", [False, True])
def test_export_works_within(strict):
    with forall.installed():
        exported = torch.export.export(Mapped(), (X,), strict=strict)
    torch.testing.assert_close(exported.module()(X), X.sin() * 2)


SCRIPT = """
import sys, torch, beside
if __name__ == "__main__":
    print(sys.argv[1:], torch.vmap(lambda x: x.item() * 2)(torch.tensor([1.0, 2.0])).tolist())
    print(beside.HERE, sys.argv[0] == __file__, __package__ or None)
    sys.exit(3)
"""
PRINTED = ["['-m', '1'] [2.0, 4.0]", "found True None"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 'found'")
    return tmp_path


@pytest.fixture
def command(monkeypatch):
    """Return a function that runs the command with these arguments, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["forall", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", sys.path.copy())
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            forall.uninstall()
            sys.modules.pop("beside", None)
        return end.value.code

    return run


def test_a_script_runs_as_python_runs_it(folder, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "forall", folder / "program.py", "-m", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path.parent,
        env={**os.environ, "PYTHONPATH": str(Path(forall.__file__).parents[1])},
        check=False,
    )
    assert ran.stdout.splitlines() == PRINTED, ran.stderr
    assert ran.returncode == 3


def test_a_module_runs_as_python_runs_it(folder, command, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)  # as `python -m` does
    assert command("-m", "program", "-m", "1") == 3
    assert capsys.readouterr().out.splitlines() == PRINTED


def test_a_folder_runs_as_python_runs_it(folder, command, capsys):
    (folder / "program.py").rename(folder / "__main__.py")
    assert command(folder, "-m", "1") == 3
    assert capsys.readouterr().out.startswith(PRINTED[0])


@pytest.mark.parametrize("arguments", [[], ["--unknown"], ["-m"]])
def test_the_command_says_what_it_wants(command, arguments):
    assert "python -m forall script.py" in command(*arguments)


def test_a_script_that_is_not_there_is_named(command):
    assert command("missing.py") == "python -m forall: there is no file 'missing.py'"

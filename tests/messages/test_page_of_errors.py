"""Errors and the entries of `errors.md`: each check names one, and each entry has what it shows."""

import ast
import copy
import pickle
import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import source
from forall import cond, grad, jit, jvp, random, vmap
from forall.__main__ import main
from forall._compat.documented_error import NOTE
from forall._core.error_entries import FILE, ErrorEntry, find_entries
from golden import ENTRIES, cause_of, entry_of, messages_of

X = torch.ones(3, 2)
PAGE = FILE.read_text()
OF_WARNINGS = set(re.findall(r"^### (\S+)", PAGE.split("\n## Warnings")[1], re.MULTILINE))
OF_ERRORS = [entry for key, entry in ENTRIES.items() if key not in OF_WARNINGS]
BLANK = "\0"  # for what a formatted string fills in


class Site(NamedTuple):
    """A place where an error is made: ``documented_error(kind, key)(text)``."""

    key: str
    text: str

    @property
    def pieces(self) -> list[str]:
        """What the first line says, whatever is filled in."""
        return [p for p in cause_of(self.text).rstrip(".").split(BLANK) if len(p) > 3]


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return text_of(node.func.value)  # "...".replace(...)
    return BLANK


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [c for c in found if isinstance(c.func, ast.Name) and c.func.id == name]


def find_sites() -> list[Site]:
    found = []
    for tree in source.files().values():
        keyed = {id(c): text_of(c.args[1]) for c in calls(tree, "documented_error")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node.func) in keyed:
                found += [Site(keyed.pop(id(node.func)), text_of(node.args[0]))]
        assert not keyed, "documented_error() is called with a text where it stands"
    return found


SITES = find_sites()


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.key}: {site.pieces[-1][:40]}")
def test_a_check_names_an_entry_that_shows_its_message(site):
    assert site.pieces
    lines = messages_of(ENTRIES[site.key])
    assert any(all(piece in line for piece in site.pieces) for line in lines), lines


# Errors without a key: another way to run the call catches them, or torch's own come before.
UNDER_NO_KEY = (
    "adds to a gradient of examples that have diverged",
    "communicates between processes",
    "copy would have no history",
    "differs between the examples needs more than 64 bits",
    "has a rule already",
    "tensor whose tangent is laid out otherwise",
    "where examples have diverged, of an x from before",
    "which has no rule yet",
    "writes into a view of a gradient",
    f"leaves for a tree of {BLANK}",
    f"{BLANK} is {BLANK} instead of {BLANK}",
    f"{BLANK}: {BLANK} instead of {BLANK}",
    "input tensor must have at least 2 dimensions",  # as torch says it
    "dims of the tensor do not fit",
)


def find_without_key() -> list[str]:
    """The messages, of forall's form "call: cause", of errors that are made without a key."""
    found = []
    for tree in source.files().values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and len(node.args) == 1
            ):
                text = text_of(node.args[0])
                if node.func.id.endswith("Error") and cause_of(text) != text.splitlines()[0]:
                    found.append(text)
    return found


def test_an_error_of_ours_has_a_key():
    without = find_without_key()
    assert without
    assert [text for text in without if not any(words in text for words in UNDER_NO_KEY)] == []


@pytest.mark.parametrize("entry", OF_ERRORS, ids=lambda entry: entry.key)
def test_an_entry_shows_no_message_that_nothing_raises(entry):
    sites = [site for site in SITES if site.key == entry.key]
    for line in messages_of(entry):
        assert any(all(piece in line for piece in site.pieces) for site in sites), line


def find_golden() -> list[str]:
    """The first lines of all messages that tests have in full."""
    trees = (ast.parse(path.read_text()) for path in Path(__file__).parents[1].rglob("test_*.py"))
    texts = (text_of(c.args[1]) for c in chain(*(calls(tree, "refused") for tree in trees)))
    found = [cause_of(text) for text in texts if text != BLANK]
    return [cause for cause in found if len(cause.replace(BLANK, "")) > 10]


GOLDEN = find_golden()


def fits(pattern: str, blank: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split(blank))), text) is not None


@pytest.mark.parametrize("entry", OF_ERRORS, ids=lambda entry: entry.key)
def test_an_entry_has_a_message_that_a_test_has_in_full(entry):
    lines = [cause_of(line) for line in messages_of(entry)]
    assert any(fits(a, "...", b) or fits(b, BLANK, a) for a in lines for b in GOLDEN)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.key)
def test_an_entry_has_a_cause_after_its_messages(entry):
    assert messages_of(entry)
    told = re.sub(r"^```.*?^```$", "", entry.text, flags=re.MULTILINE | re.DOTALL).strip()
    assert len(told.split()) > 8
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", entry.key)


def test_messages_of_warnings_are_in_the_source():
    joined = "".join(p.read_text() for p in FILE.parent.rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", joined)
    for key in OF_WARNINGS:
        for line in messages_of(ENTRIES[key]):
            pieces = [piece for piece in cause_of(line).split("...") if len(piece) > 3]
            assert pieces
            assert all(piece in joined for piece in pieces), line


# --- the note ----------------------------------------------------------------------------------


def broken(x):
    return vmap(torch.sum, in_dims=7)(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: broken(X),
        lambda: vmap(broken)(X[None]),
        lambda: grad(lambda x: vmap(broken)(x).sum())(X[None]),
        lambda: jvp(broken, (X,), (X,)),
        lambda: jit(broken)(X),
        lambda: cond(True, broken, broken, X),
    ],
)
def test_a_nested_call_names_the_entry_once(call):
    for _ in range(4):  # later calls may be replayed
        with pytest.raises(ValueError, match="in_dims names a dim") as caught:
            call()
        assert entry_of(caught.value).key == "in-dims-range"


def test_checks_before_a_call_name_an_entry():
    for key, call in {
        "not-callable": lambda: vmap(X),  # pyright: ignore[reportArgumentType]
        "chunk-size": lambda: vmap(torch.sum, chunk_size=0),
        "random-seed": lambda: random.key(0.5),  # pyright: ignore[reportArgumentType]
        "no-key-in-scope": random.next_key,
    }.items():
        with pytest.raises(Exception, match=r".") as caught:
            call()
        assert entry_of(caught.value).key == key


def test_an_error_after_some_replayed_calls_names_its_entry():
    f = vmap(lambda x, y: (x * y).sum())
    for _ in range(6):
        f(X, X)
    with pytest.raises(ValueError, match="differ in size") as caught:
        f(X, X[:2])
    assert entry_of(caught.value).key == "axes-differ"


def test_errors_of_the_user_and_of_torch_name_none():
    def own(x):
        raise ValueError("mine")

    for call in (lambda: vmap(own)(X), lambda: grad(own)(X), lambda: vmap(torch.mv)(X, X)):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        assert not any(NOTE in note for note in getattr(caught.value, "__notes__", []))


def test_compiled_code_catches_an_error_in_one_graph():
    def f(x):
        try:
            return random.normal(x, (2,))
        except TypeError:
            return x * 2

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X * 2)


def test_compiled_code_that_is_refused_names_the_entry():
    with pytest.raises(TypeError, match="a key is an int64") as caught:
        torch.compile(lambda x: random.normal(x, (2,)), backend="eager")(X)
    assert entry_of(caught.value).key == "random-key"


def test_a_caught_error_that_is_raised_again_keeps_its_note():
    def f(x):
        try:
            return broken(x)
        except ValueError as error:
            raise error.with_traceback(None) from None

    with pytest.raises(ValueError, match="in_dims names") as caught:
        vmap(f)(X[None])
    assert entry_of(caught.value).key == "in-dims-range"


@pytest.mark.parametrize("made_again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])  # noqa: S301
def test_a_copy_names_the_entry(made_again):
    with pytest.raises(ValueError, match="in_dims names") as caught:
        broken(X)
    assert entry_of(made_again(caught.value)).key == "in-dims-range"


# --- looking it up -----------------------------------------------------------------------------


def keys(words: str) -> list[str]:
    return [entry.key for entry in find_entries(words)]


def test_words_find_entries():
    assert keys("axes-differ") == ["axes-differ"]
    assert keys("The mapped axes  differ in size") == ["axes-differ"]
    assert "axes-differ" in keys("axis-differs")
    assert keys("qqqq") == []


def test_an_entry_for_a_terminal_has_no_marks():
    plain = ErrorEntry("key", "```text\nE: a\n```\n\nSee [b `c`](d.md) and [`e`][f.e].")
    assert plain.format_plain() == "key\n\nE: a\n\nSee b `c` and `e`."
    assert not any(re.search(r"\]\(|\]\[|```", e.format_plain()) for e in ENTRIES.values())


def test_the_command_prints_an_entry(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["forall", "explain", "axes-differ"])
    main()
    told = capsys.readouterr().out
    assert told.startswith(
        "axes-differ\n\nValueError: vmap(f, in_dims=...): the mapped axes differ"
    )
    assert ">>> vmap(torch.dot, in_dims=(0, None))(xs, w)" in told


@pytest.mark.parametrize(
    ("words", "said", "keys"),
    [
        (["axis-differ"], "no entry 'axis-differ'; near it are", ["axes-differ"]),
        (["must", "be"], "no entry 'must be'; near it are", ["complex-derivative"]),
        (["qqqq"], "no entry 'qqqq'; there are", [*ENTRIES]),
        ([], "the keys are", [*ENTRIES]),
    ],
)
def test_the_command_lists_keys(words, said, keys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["forall", "explain", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert str(end.value.code).startswith(f"python -m forall explain: {said}")
    assert set(keys) <= {*str(end.value.code).split()}

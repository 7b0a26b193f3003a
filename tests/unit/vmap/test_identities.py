"""Which tensors are known to be identity matrices, and for how long."""

import gc
import weakref

import pytest
import torch

from forall import vmap
from forall._compat.symbolic_eye import is_identity, make_identity

CPU = torch.device("cpu")

ARE = {
    "itself": lambda t: t,
    "rows": lambda t: t.unsqueeze(1),
    "columns": lambda t: t.unsqueeze(-1),
    "turned": lambda t: t.t(),
    "by another way": lambda t: t.view(3, 1, 3).flatten(0, 1),
    "all of it": lambda t: t[:, :3],
}
ARE_NOT = {
    "a part": lambda t: t[:2, :2],
    "a row": lambda t: t[0],
    "other rows": lambda t: t[[1, 0, 2]],
    "a row for each": lambda t: t[:1].expand(3, 3),
    "directions of a matrix": lambda t: t.view(9),
    "its bits": lambda t: t.view(torch.int32),
    "a copy": lambda t: t.clone(),
    "less": lambda t: t._neg_view(),
    "another order": lambda t: t.as_strided((3, 3), (1, 2)),
    "from further on": lambda t: t.as_strided((2, 2), (3, 1), 1),
}


@pytest.mark.parametrize("name", ARE)
def test_what_is_one(name):
    t = make_identity(3, torch.float32, CPU)
    view = ARE[name](t)
    assert is_identity(view)
    assert view.squeeze().equal(torch.eye(3))


@pytest.mark.parametrize("name", ARE_NOT)
def test_what_is_none(name):
    assert not is_identity(ARE_NOT[name](make_identity(3, torch.float32, CPU)))


def test_others_are_none():
    assert not is_identity(torch.eye(3))
    assert not is_identity(torch.eye(3).to_sparse())
    assert not is_identity(torch.nn.Parameter(torch.eye(3)))


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t.view(-1).mul_(2),
        lambda t: t[0].zero_(),
        lambda t: vmap(lambda row: row.mul_(2))(t),
        lambda t: vmap(lambda row: row[1:].mul_(2))(t),
        lambda t: vmap(lambda _: t.view(3, 3).zero_().sum())(torch.ones(2)),
    ],
)
def test_until_it_is_written_to(write):
    t = make_identity(3, torch.float32, CPU)
    view = t.unsqueeze(1)
    write(t)
    assert not is_identity(t)
    assert not is_identity(view)


def test_until_any_example_is_written_to():
    t = make_identity(3, torch.float32, CPU)
    vmap(lambda x: (x * 2).add_(1))(torch.ones(2))
    assert not is_identity(t)
    assert is_identity(make_identity(3, torch.float32, CPU))


@pytest.mark.parametrize("size", [0, 1])
def test_the_smallest(size):
    assert is_identity(make_identity(size, torch.float64, CPU).unsqueeze(1))


def test_its_memory_is_freed():
    t = make_identity(3, torch.float32, CPU)
    memory = weakref.ref(t.untyped_storage())
    view = t.unsqueeze(1)
    assert is_identity(view)
    del t, view
    gc.collect()
    assert memory() is None


def test_inference_mode_counts_no_writes():
    with torch.inference_mode():
        assert not is_identity(make_identity(3, torch.float32, CPU))

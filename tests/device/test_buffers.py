"""Buffers of bytes, of which kernels of an accelerator expect where they begin."""

import pytest
import torch

from device import fakedev
from forall import PerformanceWarning, vmap

SEEN = []


@pytest.fixture(scope="module")
def library():
    kept = torch.library.Library("buffers", "DEF")
    kept.define("read(Tensor x) -> Tensor")
    kept.define("write(Tensor(a!) x) -> ()")

    def read(x):
        SEEN.append(x.data_ptr() % 256 and x.storage_offset())
        return x + 1

    def write(x):
        x.add_(1)

    kept.impl("read", read, "CompositeExplicitAutograd")
    kept.impl("write", write, "CompositeExplicitAutograd")
    yield
    kept._destroy()


@pytest.mark.counted
@pytest.mark.usefixtures("library")
@pytest.mark.filterwarnings(f"ignore::{PerformanceWarning.__module__}.PerformanceWarning")
def test_examples_begin_where_memory_of_their_own_would():
    xs = torch.zeros(5, 64, dtype=torch.uint8, device=fakedev.NAME)
    SEEN.clear()
    assert (vmap(torch.ops.buffers.read)(xs) == 1).all()
    assert len(SEEN) == 5
    assert not any(SEEN)  # each begins where memory does, or is memory of its own


@pytest.mark.usefixtures("library")
@pytest.mark.filterwarnings(f"ignore::{PerformanceWarning.__module__}.PerformanceWarning")
def test_what_is_written_to_is_no_copy():
    xs = torch.zeros(5, 64, dtype=torch.uint8, device=fakedev.NAME)
    vmap(lambda x: (torch.ops.buffers.write(x), x.clone())[1])(xs)
    assert (xs == 1).all()

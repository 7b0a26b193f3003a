"""Functions of tensordict's collections are replayed, and nothing of what they do is lost."""

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import forall
from forall import grad, vmap
from forall._api.execution.transform_decorator import describe_replay

tensordict = pytest.importorskip("tensordict")
TensorDict, TensorDictParams = tensordict.TensorDict, tensordict.TensorDictParams
tdnn = pytest.importorskip("tensordict.nn")
pytestmark = pytest.mark.usefixtures("at_once", "either_way")
TIMES = 60  # the first calls are watched and recorded


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).sin()


def eagerly(f, *args):
    with mock.patch.object(forall.config, "replay", False):
        return f(*args)


def same(found, expected) -> bool:
    found, expected = (torch.utils._pytree.tree_flatten(x) for x in (found, expected))
    assert found[1] == expected[1]
    return all(map(torch.equal, found[0], expected[0]))


def repeat(f, *args) -> list:
    return [f(*args) for _ in range(TIMES)]


class Cases:
    """Functions of a collection, of parameters in a module, and of a module of an ensemble."""

    def collection(self):
        data = TensorDict({"x": numbers(4, 3), "n": TensorDict({"k": numbers(4)}, [4])}, [4])
        return vmap(lambda t: t.set("y", t["x"] * t["n", "k"])), (data,)

    def captured(self):
        kept = TensorDict({"n": TensorDict({"k": numbers(3)}, [])}, [])
        return vmap(lambda x: x * kept["n"]["k"]), (numbers(4, 3),)

    def made_inside(self):
        return vmap(lambda x: TensorDict({"a": x, "b": x.sum()}, []).apply(torch.sin)), (
            numbers(4, 3),
        )

    def gradient(self):
        data = TensorDict({"x": numbers(4, 3)}, [4])
        return vmap(grad(lambda t: (t["x"] ** 2).sum())), (data,)

    def parameters(self):
        nets = [nn.Linear(3, 2) for _ in range(5)]
        params = TensorDict.from_modules(*nets, as_module=True)
        empty = nn.Linear(3, 2, device="meta")

        def call(params, x):
            with params.to_module(empty, preserve_module_state=False):
                return empty(x)

        return vmap(call, in_dims=(0, None), out_dims=1), (params, numbers(4, 3))

    def ensemble(self):
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        module = tdnn.TensorDictModule(net, in_keys=["x"], out_keys=["y"])
        with forall.installed():
            ensemble = tdnn.EnsembleModule(module, 5)
        return ensemble.vmapped_forward, (TensorDict({"x": numbers(4, 3)}, [4]), ensemble.params_td)


CASES = [name for name in vars(Cases) if name[0] != "_"]


@pytest.mark.parametrize("name", CASES)
def test_functions_of_collections_are_replayed_and_equal(name, hits):
    f, args = getattr(Cases(), name)()
    expected = eagerly(f, *args)
    for found in repeat(f, *args):
        assert same(found, expected)
    assert hits, describe_replay(f)


@pytest.mark.parametrize("name", ["parameters", "ensemble"])
def test_derivatives_outside_replayed_calls_are_those_of_the_eager_call(name, hits):
    f, args = getattr(Cases(), name)()
    leaves = [x for a in args if isinstance(a, TensorDictParams) for x in a.parameters() if x.ndim]

    def slopes():
        ends = torch.utils._pytree.tree_leaves(f(*args))
        total = sum(y.square().sum() for y in ends if y.requires_grad)
        return torch.autograd.grad(total, leaves)

    expected = eagerly(slopes)
    for found in repeat(slopes):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert hits, describe_replay(f)


def set_entry(kept, data, params):
    kept["n"]["k"] = numbers(3) * 5


def set_batch_dims(kept, data, params):
    kept.batch_size = [3]


def set_parameter(kept, data, params):
    params.data.mul_(3.0)


def set_key(kept, data, params):
    data["z"] = numbers(4)


@pytest.mark.parametrize("change", [set_entry, set_batch_dims, set_parameter, set_key])
def test_changes_of_collections_are_noticed(change, hits):
    kept = TensorDict({"n": TensorDict({"k": numbers(3)}, [3])}, [])
    data = TensorDict({"x": numbers(4, 3)}, [4])
    params = TensorDictParams(TensorDict({"w": numbers(3)}, []))

    @vmap
    def f(t):
        return t["x"] * kept["n", "k"] * params["w"] * (len(kept.batch_size) + 1) * len(t.keys())

    repeat(f, data)
    assert hits, describe_replay(f)
    change(kept, data, params)
    expected = eagerly(f, data)
    for found in repeat(f, data):
        assert same(found, expected)


def test_settings_of_tensordict_are_noticed(hits):
    module = tdnn.TensorDictModule(lambda x: x * 2, in_keys=["x"], out_keys=["y"])
    data = TensorDict({"x": numbers(4, 3), "y": torch.zeros(4, 3)}, [4])
    f = vmap(lambda t: module(t)["y"])
    repeat(f, data)
    assert hits, describe_replay(f)
    with tdnn.set_skip_existing(True):
        for found in repeat(f, data):
            assert same(found, torch.zeros(4, 3))
    assert same(f(data), numbers(4, 3) * 2)


def test_the_kind_of_sample_is_noticed(hits):
    module = tdnn.ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["a"], distribution_class=torch.distributions.Normal
    )
    data = TensorDict({"loc": numbers(4, 3), "scale": torch.ones(4, 3)}, [4])
    f = vmap(lambda t: module(t)["a"], randomness="different")
    repeat(f, data)
    with tdnn.set_interaction_type(tdnn.InteractionType.MEAN):
        assert same(f(data), numbers(4, 3))
    with tdnn.set_interaction_type(tdnn.InteractionType.RANDOM):
        assert not same(f(data), numbers(4, 3))


def test_patched_functions_of_tensordict_are_noticed(hits):
    data = TensorDict({"x": numbers(4, 3)}, [4])
    f = vmap(lambda t: t.exclude("x").numel() + t["x"])
    expected = repeat(f, data)[0]
    assert hits, describe_replay(f)
    with mock.patch.object(TensorDict, "numel", return_value=7):
        assert same(f(data), 7 + data["x"])
    assert same(f(data), expected)


def test_a_class_of_the_users_has_its_own_methods(hits):
    rate = [2.0]

    class Scaled(tensordict.TensorClass):
        x: torch.Tensor

        def get_scaled(self):
            return self.x * rate[0]

    data = Scaled(x=numbers(4, 3), batch_size=[4])
    f = vmap(lambda t: t.get_scaled())
    assert same(repeat(f, data)[-1], numbers(4, 3) * 2)
    rate[0] = 3.0
    assert same(f(data), numbers(4, 3) * 3)


def test_files_are_written_with_each_call(hits):
    kept = TensorDict({"k": numbers(3)}, [])
    with tempfile.TemporaryDirectory() as home:

        @vmap
        def f(x):
            kept.memmap(Path(home) / f"{len([*Path(home).iterdir()])}")
            return x * 2

        repeat(f, numbers(4, 3))
        assert len([*Path(home).iterdir()]) >= TIMES
    assert not hits


def test_a_function_with_effects_is_named(hits, tmp_path):
    kept = TensorDict({"k": numbers(3)}, [])
    f = vmap(lambda x: (kept.memmap_like(tmp_path / "a", copy_existing=True), x * 2)[1])
    repeat(f, numbers(4, 3))
    assert not hits
    assert "tensordict" in describe_replay(f)


def test_a_function_of_tensordict_is_watched_while_it_runs(hits, tmp_path):
    kept = TensorDict({"k": numbers(3)}, [])
    save = TensorDict.memmap_like  # reached without an object of its class
    f = vmap(lambda x: (save(kept, tmp_path / "a"), x * 2)[1])
    repeat(f, numbers(4, 3))
    assert not hits


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_a_run_that_is_made_again_finds_nested_collections_as_they_were():
    kept = TensorDict({"n": TensorDict({"calls": torch.zeros(())}, [])}, [])
    seen = []

    def f(x):
        kept["n"]["calls"] = kept["n"]["calls"] + 1
        seen.append(x.cpu().numpy().tolist())  # only the loop has the numbers of one example
        return x * 2

    vmap(f)(numbers(4, 3))
    assert kept["n"]["calls"] == 4
    assert seen == numbers(4, 3).tolist()

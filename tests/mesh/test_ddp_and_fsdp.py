"""Modules that ranks share by DistributedDataParallel or FSDP2 are the modules themselves.

They run within vmap, and vmap within them. Both are trained for a few steps.
"""

import pytest
import torch

from forall import vmap
from mesh import rank_modules
from mesh.pool import ask


@pytest.fixture(scope="module")
def outcomes(pool):
    return ask(pool, "rank_modules.train_all", rank_modules.CASES, size=2)


@pytest.fixture(scope="module")
def truths():
    return {use: rank_modules.train(use, parts=2) for use in rank_modules.USES}


@pytest.mark.parametrize(
    "case", [c for c in rank_modules.CASES if c not in rank_modules.REFUSED], ids=" ".join
)
def test_a_shared_module_is_the_module(outcomes, truths, case):
    found = [outcome[case] for outcome in outcomes]
    for one in found:
        assert not isinstance(one, str), one
    results, parameters = truths[case[1]]
    together = [torch.cat(rows) for rows in zip(*[steps for steps, _ in found], strict=True)]
    torch.testing.assert_close(together, results)
    for _, own in found:
        torch.testing.assert_close(own, parameters)


@pytest.mark.parametrize("case", rank_modules.REFUSED, ids=" ".join)
def test_a_backward_pass_that_torch_does_not_support_is_an_error(outcomes, case):
    for outcome in outcomes:
        assert "RuntimeError" in outcome[case]


def test_compiled_code_is_what_it_is_without_a_compiler(pool):
    network = rank_modules.make_network()
    want = 2 * vmap(rank_modules.normalized(network), axis_name="b")(rank_modules.XS)
    answers = ask(pool, "rank_modules.compile_calls", size=2)
    for answer in answers:
        assert answer.pop("around, in one graph") == "Unsupported"  # Dynamo's own error
    for name in answers[0]:
        for rows in zip(*[answer[name] for answer in answers], strict=True):
            torch.testing.assert_close(torch.cat(rows), want)

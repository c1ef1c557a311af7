"""The kernels together with autocast, checkpointing, compilation, and heads of transformers."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import compare, make, weighted_sum
from tolerances import BFLOAT16, EXACT, SINGLE
from torch.utils.checkpoint import checkpoint

from klgrad.kernels import from_logits, token_statistics


def gradients_of(case, total):
    return torch.autograd.grad(total, case.leaves)


@pytest.mark.parametrize("backward", ["inside", "outside"])
@pytest.mark.usefixtures("small_tiles")
def test_autocast_is_the_same_as_casting(backward):
    """Inputs are cast, and gradients have the dtype of their tensors; sums stay float32."""
    case = make(dtype=torch.float32, bias=True).require_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = case.statistics()
        total = weighted_sum(found)
        gradients = gradients_of(case, total) if backward == "inside" else None
    gradients = gradients or gradients_of(case, total)
    cast = case.to(torch.bfloat16)
    biases = [h.bias for h in (case.head, case.ref_head)]
    cast = replace(
        cast, head=replace(cast.head, bias=biases[0].detach()), ref_head=replace(cast.ref_head, bias=biases[1])
    )
    explicit = cast.require_grad().statistics()
    assert found.logp.dtype == torch.float32
    compare(found, explicit, SINGLE)
    for x, y in zip(gradients, gradients_of(cast, weighted_sum(explicit)), strict=True):
        assert x.dtype == torch.float32
        BFLOAT16.check_vector(x, y.float())


def test_autocast_leaves_float64_and_given_logits_alone():
    case, z = make(), torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, of_logits = case.statistics(), from_logits(z, targets)
    compare(found, case.specification(), EXACT)
    SINGLE.check(of_logits.logp, z.double().log_softmax(-1).gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_checkpointing(reentrant):
    case = make(bias=True).require_grad()

    def loss(hidden, weight, bias):
        return weighted_sum(
            replace(case, hidden=hidden.tanh(), head=replace(case.head, weight=weight, bias=bias)).statistics()
        )

    plain = gradients_of(case, loss(*case.leaves))
    checkpointed = checkpoint(loss, *case.leaves, use_reentrant=reentrant)
    found = torch.autograd.backward(checkpointed) or [x.grad for x in case.leaves]
    for x, y in zip(found, plain, strict=True):
        EXACT.check_vector(x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks, and means to hide the warning
def test_compilation_goes_around_it():
    case = make(bias=True, dtype=torch.float32).require_grad()

    def loss(hidden):
        found = token_statistics(
            torch.tanh(hidden) * 2, case.head, case.targets, case.ref_hidden, case.ref_head, entries=case.entries
        )
        return weighted_sum(found) * 3 + from_logits(hidden, case.targets % 16, -hidden.detach()).forward_kl.sum()

    compiled = torch.compile(loss, backend="eager")
    expected, found = loss(case.hidden), compiled(case.hidden)
    SINGLE.check(found, expected)
    for x, y in zip(gradients_of(case, found), gradients_of(case, expected), strict=True):
        SINGLE.check_vector(x, y)

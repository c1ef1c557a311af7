"""Bad inputs are refused, and the message names the input and the remedy."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import make

from klgrad.errors import KernelInputError
from klgrad.kernels import Head, from_logits, lumped_kl, tiling, top_entries

CASE = make((6,), 20, 4, bias=True, ref_bias=True)


def put(x, value):
    x = x.clone()
    x[(1,) * x.ndim] = value
    return x


TENSORS = {
    "hidden": lambda v: replace(CASE, hidden=put(CASE.hidden, v)),
    "head.weight": lambda v: replace(CASE, head=replace(CASE.head, weight=put(CASE.head.weight, v))),
    "head.bias": lambda v: replace(CASE, head=replace(CASE.head, bias=put(CASE.head.bias, v))),
    "ref_hidden": lambda v: replace(CASE, ref_hidden=put(CASE.ref_hidden, v)),
    "ref_head.weight": lambda v: replace(CASE, ref_head=replace(CASE.ref_head, weight=put(CASE.ref_head.weight, v))),
    "ref_head.bias": lambda v: replace(CASE, ref_head=replace(CASE.ref_head, bias=put(CASE.ref_head.bias, v))),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", TENSORS)
def test_the_tensor_that_is_not_finite_is_named_with_its_place(name, value):
    with pytest.raises(KernelInputError, match=rf"finite `{name}`; received {value:g} at \[1"):
        TENSORS[name](value).statistics()


def test_overflow_of_finite_inputs():
    with pytest.raises(KernelInputError, match="overflow in the logits"):
        make((2,), 5, 4, dtype=torch.float32, policy={"scale": 1e39}).statistics()


SHORT = Head(CASE.ref_head.weight[:18])
CALLS = {
    "a target beyond the vocabulary": (
        lambda: replace(CASE, targets=put(CASE.targets, 20)).statistics(), "targets from 0 to 19.*20.*tokenizer"),
    "a padding target": (
        lambda: replace(CASE, targets=put(CASE.targets, -100)).statistics(), "received -100; remedy: mask padding"),
    "an entry beyond the vocabulary": (
        lambda: replace(CASE, entries=put(CASE.entries, 25)).statistics(), "received 25"),
    "vocabularies that differ": (
        lambda: replace(CASE, ref_head=SHORT).statistics(), r"20 and 18 entries; remedy: .*padded.*weight\[:n\]"),
    "a hidden size that is not the head's": (
        lambda: replace(CASE, hidden=CASE.hidden[:, :3]).statistics(), "`hidden` of width 4.*width 3"),
    "a reference's hidden size": (
        lambda: replace(CASE, ref_hidden=CASE.ref_hidden[:, :3]).statistics(), "`ref_hidden` of width 4.*width 3"),
    "more hidden states than targets": (
        lambda: replace(CASE, targets=CASE.targets[1:]).statistics(), "`hidden` of shape.*positions 0..T-2"),
    "hidden states without a batch": (
        lambda: replace(CASE, hidden=CASE.hidden[0]).statistics(), "`hidden` of shape"),
    "entries without their own dimension": (
        lambda: replace(CASE, entries=CASE.targets).statistics(), "`entries` of shape"),
    "a mask of another shape": (lambda: CASE.statistics(mask=torch.ones(3)), r"`mask` of shape \(6,\).*\(3,\)"),
    "token ids for hidden states": (
        lambda: replace(CASE, hidden=CASE.hidden.long()).statistics(), "floating-point dtype.*not token ids"),
    "floats for targets": (lambda: replace(CASE, targets=CASE.hidden[:, 0]).statistics(), "integer `targets`"),
    "no reference head": (lambda: replace(CASE, ref_head=None).statistics(), "`ref_head` together with `ref_hidden`"),
    "no reference hidden states": (
        lambda: replace(CASE, ref_hidden=None).statistics(), "`ref_hidden` together with `ref_head`"),
    "a weight of one dimension": (lambda: Head(torch.ones(5)), r"`weight` of shape \(V, H\)"),
    "a bias of another length": (lambda: Head(torch.ones(5, 2), torch.ones(4)), r"`bias` of shape \(5,\).*\(4,\)"),
    "temperature 0": (lambda: Head(torch.ones(5, 2), temperature=0), "`temperature` > 0"),
    "a negative soft-cap": (lambda: Head(torch.ones(5, 2), softcap=-1), r"`softcap` > 0.*-1; remedy: pass the c of"),
    "a soft-cap of 0": (lambda: Head(torch.ones(5, 2), softcap=0.0), r"`softcap` > 0.*or None for no cap"),
    "a temperature that is not a number": (
        lambda: Head(torch.ones(5, 2), temperature=torch.nan), "`temperature` > 0.*nan.*sampled at"),
    "a scale of 0": (lambda: Head(torch.ones(5, 2), scale=0.0), "`scale` > 0"),
    "a budget too small": (
        lambda: CASE.statistics(budget=1000), r"at least [\d,]+ bytes \([\d.]+ MiB\); received 1,000 bytes"),
    "no reference to roll out with": (
        lambda: make((2, 3), paired=False).statistics().rollout(torch.ones(2, 3)), "statistics with a reference"),
    "temperature 0 of logits": (
        lambda: from_logits(torch.ones(1, 3), torch.tensor([0]), temperature=0), "`temperature` > 0"),
    "logits over vocabularies that differ": (
        lambda: from_logits(torch.ones(1, 3), torch.tensor([0]), torch.ones(1, 4)), "padded"),
    "NaN logits": (lambda: from_logits(torch.tensor([[0, torch.nan]]), torch.tensor([0])), "`logits` without NaN"),
    "infinite logits": (lambda: from_logits(torch.tensor([[0, torch.inf]]), torch.tensor([0])), "`logits` without NaN"),
    "NaN logits of the reference": (
        lambda: from_logits(torch.ones(1, 2), torch.tensor([0]), torch.tensor([[0, torch.nan]])),
        "`ref_logits` without NaN"),
    "a sampled token that is banned": (
        lambda: from_logits(torch.tensor([[0, -torch.inf]]), torch.tensor([1])), "-inf at live token 0.*do not ban"),
    "every token banned": (
        lambda: from_logits(torch.full((1, 3), -torch.inf), torch.tensor([0])), "received -inf at live token 0"),
    "every token banned by the reference": (
        lambda: from_logits(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([[0.0] * 3, [-torch.inf] * 3])),
        "`ref_logits` with a finite entry.*-inf at live token 1 for every entry"),
    "an unknown mode": (lambda: CASE.statistics(mode="quick"), '"lean" or "fast"; received \'quick\''),
    "a target of the top entries beyond the vocabulary": (
        lambda: top_entries(CASE.hidden, CASE.head, put(CASE.targets, 20), 3), "targets from 0 to 19.*20.*tokenizer"),
    "a target beyond the logits": (lambda: from_logits(torch.ones(1, 3), torch.tensor([3])), "received 3"),
    "another number of entries": (lambda: lumped_kl(torch.ones(2, 3), torch.ones(2, 4)), "same k entries"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_bad_input_is_refused_with_a_remedy(what):
    call, message = CALLS[what]
    with pytest.raises(KernelInputError, match=message) as caught:
        call()
    assert caught.value.remedy


def test_unvalidated_input_is_not_checked():
    found = TENSORS["hidden"](torch.nan).statistics(validate=False)
    assert found.logp[1].isnan()
    assert found.logp[0].isfinite()


def test_unvalidated_logits_without_any_probability_have_no_kl():
    """The KLs are NaN: there is no distribution to compare with."""
    z, none = torch.zeros(2, 3), torch.tensor([[0.0] * 3, [-torch.inf] * 3])
    for given in ((z, none), (none, z), (none, none)):
        found = from_logits(given[0], torch.tensor([0, 1]), given[1], validate=False)
        for kl in (found.reverse_kl, found.forward_kl):
            assert kl.isnan().tolist() == [False, True]


def test_the_smallest_budget_that_is_named_is_enough(monkeypatch):
    monkeypatch.setattr(tiling, "GRANULE", 8)
    need = tiling.make_plan(6, 20, torch.float64, paired=True, mode="fast").tile_bytes // 24 * 8
    CASE.statistics(budget=need)
    with pytest.raises(KernelInputError, match="budget of at least"):
        CASE.statistics(budget=need - 1)

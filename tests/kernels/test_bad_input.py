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


def spoilt(name, value):
    """The case with a value in one of its tensors."""
    field, _, of_head = name.partition(".")
    x = getattr(CASE, field)
    return replace(
        CASE, **{field: replace(x, **{of_head: put(getattr(x, of_head), value)}) if of_head else put(x, value)}
    )


TENSORS = ("hidden", "head.weight", "head.bias", "ref_hidden", "ref_head.weight", "ref_head.bias")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", TENSORS)
def test_the_tensor_that_is_not_finite_is_named_with_its_place(name, value):
    with pytest.raises(KernelInputError, match=rf"finite `{name}`; received {value:g} at \[1"):
        spoilt(name, value).statistics()


def test_overflow_of_finite_inputs():
    with pytest.raises(KernelInputError, match="overflow in the logits"):
        make((2,), 5, 4, dtype=torch.float32, policy={"scale": 1e39}).statistics()


CHANGES = {
    "targets from 0 to 19.*20.*tokenizer": {"targets": put(CASE.targets, 20)},
    "received -100; remedy: mask padding": {"targets": put(CASE.targets, -100)},
    "received 25": {"entries": put(CASE.entries, 25)},
    r"20 and 18 entries; remedy: .*padded.*weight\[:n\]": {"ref_head": Head(CASE.ref_head.weight[:18])},
    "`hidden` of width 4.*width 3": {"hidden": CASE.hidden[:, :3]},
    "`ref_hidden` of width 4.*width 3": {"ref_hidden": CASE.ref_hidden[:, :3]},
    "`hidden` of shape.*positions 0..T-2": {"targets": CASE.targets[1:]},
    "`hidden` of shape": {"hidden": CASE.hidden[0]},
    "`entries` of shape": {"entries": CASE.targets},
    "floating-point dtype.*not token ids": {"hidden": CASE.hidden.long()},
    "integer `targets`": {"targets": CASE.hidden[:, 0]},
    "`ref_head` together with `ref_hidden`": {"ref_head": None},
    "`ref_hidden` together with `ref_head`": {"ref_hidden": None},
}
"""Inputs of the statistics that are refused, by the message."""

HEADS = {
    r"`weight` of shape \(V, H\)": {"weight": torch.ones(5)},
    r"`bias` of shape \(5,\).*\(4,\)": {"bias": torch.ones(4)},
    "`temperature` > 0": {"temperature": 0},
    r"`softcap` > 0.*-1; remedy: pass the c of": {"softcap": -1},
    r"`softcap` > 0.*or None for no cap": {"softcap": 0.0},
    "`temperature` > 0.*nan.*sampled at": {"temperature": torch.nan},
    "`scale` > 0": {"scale": 0.0},
}

NONE, ONE = torch.full((1, 3), -torch.inf), torch.tensor([0])
LOGITS = {
    "padded": (torch.ones(1, 3), ONE, torch.ones(1, 4)),
    "`logits` without NaN": (torch.tensor([[0, torch.nan]]), ONE),
    "`logits` without NaN and .inf": (torch.tensor([[0, torch.inf]]), ONE),
    "`ref_logits` without NaN": (torch.ones(1, 2), ONE, torch.tensor([[0, torch.nan]])),
    "-inf at live token 0.*do not ban": (torch.tensor([[0, -torch.inf]]), torch.tensor([1])),
    "received -inf at live token 0": (NONE, ONE),
    "`ref_logits` with a finite entry.*-inf at live token 1 for every entry": (
        torch.zeros(2, 3), torch.tensor([0, 1]), torch.cat([0 * torch.ones(1, 3), NONE])),
    "received 3": (torch.ones(1, 3), torch.tensor([3])),
}  # fmt: skip
"""Policy, targets and reference."""

CALLS = {
    r"`mask` of shape \(6,\).*\(3,\)": lambda: CASE.statistics(mask=torch.ones(3)),
    r"at least [\d,]+ bytes \([\d.]+ MiB\); received 1,000 bytes": lambda: CASE.statistics(budget=1000),
    '"lean" or "fast"; received \'quick\'': lambda: CASE.statistics(mode="quick"),
    "statistics with a reference": lambda: make((2, 3), paired=False).statistics().rollout(torch.ones(2, 3)),
    "`temperature` > 0 and": lambda: from_logits(torch.ones(1, 3), ONE, temperature=0),
    "targets from 0 to 19.*20": lambda: top_entries(CASE.hidden, CASE.head, put(CASE.targets, 20), 3),
    "same k entries": lambda: lumped_kl(torch.ones(2, 3), torch.ones(2, 4)),
    **{text: lambda x=x: replace(CASE, **x).statistics() for text, x in CHANGES.items()},
    **{text: lambda x=x: Head(**{"weight": torch.ones(5, 2)} | x) for text, x in HEADS.items()},
    **{text: lambda x=x: from_logits(*x) for text, x in LOGITS.items()},
}


@pytest.mark.parametrize("message", CALLS)
def test_bad_input_is_refused_with_a_remedy(message):
    with pytest.raises(KernelInputError, match=message) as caught:
        CALLS[message]()
    assert caught.value.remedy


def test_unvalidated_input_is_not_checked():
    found = spoilt("hidden", torch.nan).statistics(validate=False)
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

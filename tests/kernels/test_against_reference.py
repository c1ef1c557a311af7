"""Values and gradients against plain torch over full float64 logits of the same inputs."""

from dataclasses import replace

import pytest
import torch
from kernels.cases import GRADIENT, agree, budget, check_gradient_of, compare, make, weighted_sum
from tolerances import BFLOAT16, EXACT, SINGLE

from klgrad.errors import KernelInputError
from klgrad.kernels import Head, from_logits, fused_statistics, token_statistics

SETTINGS = {
    "plain": {},
    "policy alone": {"paired": False, "bias": True},
    "bias": {"bias": True},
    "reference's bias": {"ref_bias": True},
    "temperature": {"policy": {"temperature": 0.7}, "ref": {"temperature": 0.7}},
    "soft-cap": {"bias": True, "policy": {"softcap": 2.0}},
    "reference's soft-cap": {"ref": {"softcap": 1.5}},
    "scale": {"policy": {"scale": 0.3}, "ref": {"scale": 1.7}},
    "all": {
        "bias": True,
        "ref_bias": True,
        "policy": {"temperature": 1.4, "softcap": 3.0, "scale": 1.6},
        "ref": {"temperature": 0.8, "softcap": 2.0, "scale": 0.7},
    },
}
KEPT = {
    "nothing": lambda case: {"budget": budget(case, kept=0)},
    "some": lambda case: {"budget": budget(case, kept=30)},
}
KEPT |= {"everything": lambda case: {"mode": "fast"}, "what 2 GiB hold": lambda case: {"mode": "lean"}}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("small_tiles")
def test_every_transform_however_much_is_kept(setting, kept):
    case = make(**SETTINGS[setting])
    agree(case, EXACT, **KEPT[kept](case))


@pytest.mark.parametrize("tiles", ["one tile", "many tiles"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("shape", "vocabulary", "size", "ref_size"),
    [((1,), 2, 4, 4), ((1,), 1025, 64, 256), ((2, 3), 129, 8, 5), ((2, 1, 4), 40, 6, 9), ((11,), 37, 1, 3)],
    ids=str,
)
def test_odd_shapes(shape, vocabulary, size, ref_size, seed, tiles, request):
    if tiles == "many tiles":
        request.getfixturevalue("small_tiles")
    agree(make(shape, vocabulary, size, ref_size, seed=seed), EXACT)


@pytest.mark.parametrize("size", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hidden_sizes_and_dtypes(size, dtype):
    agree(make((3,), 300, size, 64, dtype=dtype, bias=True), SINGLE, GRADIENT[dtype])


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_half_precision_over_many_tiles(dtype, kept):
    """Kept logits are float16; sums over tiles and chunks are float32."""
    case = make(dtype=dtype, bias=True, policy={"softcap": 4.0})
    agree(case, SINGLE, BFLOAT16, **KEPT[kept](case))


MIXED = {
    "float32 head": lambda case: replace(case, head=case.to(torch.float32).head),
    "float32 hidden": lambda case: replace(case, hidden=case.to(torch.float32).hidden),
    "float32 policy": lambda case: replace(case, hidden=case.hidden.float(), head=case.to(torch.float32).head),
    "float32 bias": lambda case: replace(case, head=replace(case.head, bias=case.head.bias.float())),
    "float32 reference": lambda case: replace(
        case, ref_hidden=case.ref_hidden.float(), ref_head=case.to(torch.float32).ref_head
    ),
    "float64 hidden": lambda case: replace(case, hidden=case.to(torch.float64).hidden),
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.usefixtures("small_tiles")
def test_mixed_dtypes(kind):
    case = MIXED[kind](make(dtype=torch.bfloat16, bias=True))
    agree(case, SINGLE, BFLOAT16)
    gradients = torch.autograd.grad(weighted_sum(case.statistics()), case.leaves)
    assert [g.dtype for g in gradients] == [x.dtype for x in case.leaves]


def test_entries_may_repeat_and_may_be_the_target():
    case = make()
    agree(replace(case, entries=torch.stack([case.targets, case.targets, case.entries[:, 0]], 1)), EXACT)


@pytest.mark.usefixtures("small_tiles")
def test_non_contiguous_inputs():
    turned = lambda x: None if x is None else x.detach().T.contiguous().T
    every_other = lambda x: torch.stack([x, x], 1)[:, 0]
    case = make(bias=True)
    heads = [Head(turned(h.weight), every_other(h.bias) if h.bias is not None else None) for h in (case.head,)]
    strided = replace(
        case,
        hidden=turned(case.hidden),
        head=heads[0],
        targets=every_other(case.targets),
        ref_hidden=turned(case.ref_hidden),
        entries=case.entries.T.contiguous().T,
    )
    assert not any(x.is_contiguous() for x in (strided.hidden, heads[0].weight, heads[0].bias, strided.targets))
    agree(strided, EXACT)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_only_the_required_gradients_are_computed(wanted):
    case = make(bias=True)
    whole = torch.autograd.grad(weighted_sum(case.require_grad().statistics()), case.leaves)
    fewer = make(bias=True)
    leaves = [fewer.leaves[i].requires_grad_() for i in wanted]
    weighted_sum(fewer.statistics()).backward()
    for i, leaf in zip(wanted, leaves, strict=True):
        assert torch.equal(leaf.grad, whole[i])
    assert sum(x.grad is not None for x in fewer.leaves) == len(wanted)


@pytest.mark.parametrize("name", ["logp", "entropy", "reverse_kl", "forward_kl", "entries_logp"])
def test_each_output_alone(name):
    check_gradient_of(name, make(bias=True), EXACT)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.usefixtures("small_tiles")
def test_a_second_backward_pass_gives_the_same_gradient(kept):
    """The first backward pass overwrites the kept logits."""
    case = make(bias=True).require_grad()
    total = weighted_sum(case.statistics(**KEPT[kept](case)))
    first = torch.autograd.grad(total, case.leaves, retain_graph=True)
    for again, before in zip(torch.autograd.grad(total, case.leaves), first, strict=True):
        EXACT.check_vector(again, before)


def test_results_may_be_changed_in_place():
    case, spared = make().require_grad(), make().require_grad()
    changed, kept = case.statistics(), spared.statistics()
    loss = weighted_sum(changed)
    for name in ("reverse_kl", "forward_kl", "entropy"):
        getattr(changed, name).data.zero_()
    for a, b in zip(
        torch.autograd.grad(loss, case.leaves), torch.autograd.grad(weighted_sum(kept), spared.leaves), strict=True
    ):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused_not_wrong():
    case = make().require_grad()
    z = torch.randn(2, 5, requires_grad=True)
    of_logits = from_logits(z, torch.tensor([0, 1]), torch.zeros(2, 5)).reverse_kl.sum()
    for total, leaf in ((weighted_sum(case.statistics()), case.hidden), (of_logits, z)):
        with pytest.raises(KernelInputError, match="first derivatives"):
            torch.autograd.grad(total, leaf, create_graph=True)


def test_the_reference_gets_no_gradient():
    case = make()
    case.hidden.requires_grad_()
    for x in (case.ref_hidden, case.ref_head.weight):
        x.requires_grad_()
    found = case.statistics()
    assert not found.ref_logp.requires_grad
    weighted_sum(found).backward()
    assert case.ref_hidden.grad is None
    assert case.ref_head.weight.grad is None


def test_without_a_reference_there_is_no_kl():
    found = token_statistics(*(getattr(make(), n) for n in ("hidden", "head", "targets")))
    assert found.ref_logp is found.reverse_kl is found.forward_kl is found.entries_logp is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_from_logits(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    z, z_ref = 2 * torch.randn(2, *shape, 300, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(300, shape, generator=generator)
    z, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = from_logits(z.mT.contiguous().mT if len(shape) == 1 else z, targets, z_ref, temperature=1.5)
    expected = fused_statistics.statistics_of_logits(wide / 1.5, targets, z_ref.double() / 1.5)
    compare(found, expected, EXACT if dtype == torch.float64 else SINGLE)
    (gradient,), (truth,) = (
        torch.autograd.grad(weighted_sum(found), z),
        torch.autograd.grad(weighted_sum(expected), wide),
    )
    GRADIENT[dtype].check_vector(gradient, truth)

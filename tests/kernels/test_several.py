"""Divergences to several references: the weighted sum of the definitions, and one pass over the policy's logits."""

from collections import Counter

import pytest
import torch
from kernels.cases import GENERATORS, make, weighted_sum
from tolerances import EXACT, SINGLE

from klgrad.core.divergences import jensen_shannon
from klgrad.errors import KernelInputError
from klgrad.kernels import fused_statistics, tiling, token_statistics

NUMBERS = (0.7, 0.9)
TABLE = (torch.linspace(0.2, 1.4, 7).double(), torch.tensor(0.5).double())
"""One weight for each token of the first reference, and the same for all of the second."""
FIELDS = {"bias": True, "policy": {"temperature": 1.4, "softcap": 3.0}}


def two(**settings):
    """A policy, and two references with other widths and other transforms of the logits."""
    first = make(**FIELDS, ref_size=11, ref_bias=True, ref={"softcap": 2.0, "scale": 0.7}, **settings)
    other = make(seed=1, ref_size=5, ref={"temperature": 0.8}, **settings)
    return first, other


def found_by(case, other, weights, **options):
    references = ([case.ref_hidden, other.ref_hidden], [case.ref_head, other.ref_head])
    given = (case.hidden, case.head, case.targets, *references)
    return token_statistics(*given, ref_weights=weights, entries=case.entries, **options)


def defined(case, other, weights, divergence=None):
    """The sums of what the definition says of each reference."""
    one = case.specification(divergence)
    given = (case.hidden, case.head, case.targets, other.ref_hidden, other.ref_head)
    both = one, fused_statistics.reference_statistics(*given, divergence=divergence)
    total = lambda name: sum(w * getattr(x, name) for w, x in zip(weights, both, strict=True))
    names = ["ref_logp", "reverse_kl", "forward_kl", *(["divergence"] if divergence else [])]
    return one._replace(**{name: total(name) for name in names})


def check(case, other, weights, tolerance=EXACT, divergence=None, **options):
    wide, far = case.to(torch.float64).require_grad(), other.to(torch.float64)
    found = found_by(case.require_grad(), other, weights, divergence=divergence, **options)
    expected = defined(wide, far, weights or (0.5, 0.5), divergence)
    for name, value in found._asdict().items():
        if value is not None:
            tolerance.check(value, getattr(expected, name))
    pairs = zip(case.leaves, wide.leaves, strict=True)
    slopes = [torch.autograd.grad(weighted_sum(x), y.leaves) for x, y in ((found, case), (expected, wide))]
    for (_, _), x, y in zip(pairs, *slopes, strict=True):
        tolerance.check_vector(x.double(), y)


@pytest.mark.parametrize("divergence", [None, *GENERATORS], ids=str)
@pytest.mark.parametrize("weights", [NUMBERS, TABLE, None], ids=["numbers", "by token", "equal"])
@pytest.mark.usefixtures("small_tiles")
def test_value_and_gradient_are_the_weighted_sums(weights, divergence):
    check(*two(), weights, divergence=divergence)


def test_in_float32_with_a_mask():
    case, other = two(dtype=torch.float32)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    found = found_by(case, other, [x.float() for x in TABLE], divergence="jensen-shannon", mask=mask)
    wide = defined(case.to(torch.float64), other.to(torch.float64), TABLE, jensen_shannon())
    SINGLE.check(found.divergence, wide.divergence * mask)
    SINGLE.check(found.reverse_kl, wide.reverse_kl * mask)


def test_the_policy_is_projected_once_for_all(monkeypatch):
    """In the forward pass, for a divergence, and in the backward pass; and so are the gradients' products."""
    calls, whole = Counter(), tiling.matmul_t
    monkeypatch.setattr(tiling, "matmul_t", lambda h, w, out: calls.update({h.shape[1]: len(h)}) or whole(h, w, out))
    case, other = two()
    found = found_by(case.require_grad(), other, NUMBERS, divergence="hellinger")
    found.divergence.sum().backward()
    assert calls == {16: 3 * 7, 11: 3 * 7, 5: 3 * 7}  # tokens, by the width of the model


def test_one_in_a_list_is_one():
    case, _ = two()
    given = (case.hidden, case.head, case.targets)
    alone = token_statistics(*given, case.ref_hidden, case.ref_head)
    listed = token_statistics(*given, [case.ref_hidden], [case.ref_head], ref_weights=[1.0])
    for x, y in zip(alone, listed, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


def test_bad_input():
    case, other = two()
    with pytest.raises(KernelInputError, match=r"2 `ref_weights`, one for each reference; received 1"):
        found_by(case, other, [1.0])
    with pytest.raises(KernelInputError, match="as many `ref_head` as `ref_hidden`"):
        token_statistics(case.hidden, case.head, case.targets, [case.ref_hidden], [case.ref_head, other.ref_head])
    with pytest.raises(KernelInputError, match=r"`ref_weights` that fit the targets, \(7,\)"):
        found_by(case, other, [torch.ones(3), 1.0])

"""Fast checks of a copy of the kernels; for each of them there is a fault that must break it."""

from dataclasses import replace

import torch
from kernels.cases import SMALL_TILES, agree, budget, check_gradient_of, confident, make, weighted_sum
from tolerances import EXACT, KEPT, NEAR_KL, SINGLE

from klgrad.kernels import fused_statistics


def tiled(package, kept=None, **settings) -> None:
    """Values and gradients over many small tiles, with nothing, something or everything kept."""
    vars(package.tiling).update(SMALL_TILES)
    case = make(**settings)
    agree(case, EXACT, package=package, **({} if kept is None else {"budget": budget(case, kept=kept)}))


def recomputed(package) -> None:
    tiled(package, kept=0, bias=True)


def kept(package) -> None:
    tiled(package)


def kept_with_cap(package) -> None:
    tiled(package, policy={"softcap": 2.0, "temperature": 0.7})


def divergence(package) -> None:
    """Over many small tiles, beside weights on all other outputs."""
    vars(package.tiling).update(SMALL_TILES)
    for name in ("jensen-shannon", "chi-square"):
        agree(make(bias=True), EXACT, package=package, divergence=name)


def several(package) -> None:
    """Two references with weights, beside weights on the policy's own outputs."""
    vars(package.tiling).update(SMALL_TILES)
    weights, pair = (0.7, 0.9), (make(bias=True, ref_size=11).require_grad(), make(seed=1, ref_size=5))
    own = lambda h: package.Head(h.weight, h.bias)
    found = package.token_statistics(
        *(pair[0].hidden, own(pair[0].head), pair[0].targets),
        *([x.ref_hidden for x in pair], [own(x.ref_head) for x in pair]),
        ref_weights=weights,
        divergence="jensen-shannon",
    )
    expected = [
        replace(pair[0], ref_hidden=x.ref_hidden, ref_head=x.ref_head).specification("jensen-shannon") for x in pair
    ]
    for name in ("divergence", "reverse_kl", "forward_kl"):
        total = sum(w * getattr(x, name) for w, x in zip(weights, expected, strict=True))
        EXACT.check(getattr(found, name), total)
        sums = [
            (x + found_by.entropy + found_by.logp).sum()
            for x, found_by in ((getattr(found, name), found), (total, expected[0]))
        ]
        slopes = [torch.autograd.grad(x, pair[0].leaves, retain_graph=True) for x in sums]
        for x, y in zip(*slopes, strict=True):
            EXACT.check_vector(x, y)


def confident_tokens(package) -> None:
    """Tokens whose gradient is a small difference of large numbers."""
    check_gradient_of("reverse_kl", confident(1e-3, tokens=4, vocabulary=300), KEPT, package=package, mode="fast")


def second_backward(package) -> None:
    case = make().require_grad()
    total = weighted_sum(case.statistics(package))
    first = torch.autograd.grad(total, case.leaves, retain_graph=True)
    for again, before in zip(torch.autograd.grad(total, case.leaves), first, strict=True):
        EXACT.check_vector(again, before)


def no_token(package) -> None:
    """Uninitialised memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        case = make((0,)).require_grad()
        gradients = torch.autograd.grad(weighted_sum(case.statistics(package)), case.leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all((g == 0).all() for g in gradients)


def of_logits(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, 8, 300, generator=generator, dtype=torch.float64)
    z, z_ref, targets = z.to(dtype), (z + step * noise).to(dtype), torch.arange(8)
    return z, z_ref, targets, fused_statistics.statistics_of_logits(z.double(), targets, z_ref.double())


def near(package) -> None:
    z, z_ref, targets, truth = of_logits(1e-4)
    found = package.from_logits(z, targets, z_ref)
    NEAR_KL.check(found.reverse_kl, truth.reverse_kl)
    NEAR_KL.check(found.forward_kl, truth.forward_kl)


def far(package) -> None:
    z, z_ref, targets, truth = of_logits(3.0)
    found = package.from_logits(z, targets, z_ref)
    SINGLE.check(found.reverse_kl, truth.reverse_kl)
    SINGLE.check(found.forward_kl, truth.forward_kl)


def exchanged(package) -> None:
    """Two parts whose masses agree, though their entries differ much: the sums for the near case are used here too."""
    z, *_ = of_logits(1.0, torch.float64)
    truth = fused_statistics.statistics_of_logits(z, torch.arange(8), z.flip(-1))
    parts = [package.state.of_logits(z[:, part], z.flip(-1)[:, part])[2] for part in (slice(100), slice(100, 300))]
    found = package.state.finish(package.state.merge(torch.stack(parts, 1)))
    EXACT.check(found.reverse_kl, truth.reverse_kl)
    EXACT.check(found.forward_kl, truth.forward_kl)


def banned(package) -> None:
    z, z_ref, targets, _ = of_logits(0.1)
    z_ref[:, 280:] = -torch.inf
    found = package.from_logits(z, targets, z_ref)
    log_q, log_p = z_ref[:, :280].double().log_softmax(-1), z.double().log_softmax(-1)[:, :280]
    SINGLE.check(found.ref_logp, log_q[range(8), targets])
    SINGLE.check(found.forward_kl, (log_q.exp() * (log_q - log_p)).sum(-1))
    assert (found.reverse_kl == torch.inf).all()


def top_k(package) -> None:
    """The expectation, over every token, of value and gradient of `sampled_tail_kl`, for both divergences."""
    generator = torch.Generator().manual_seed(0)
    z, ref = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    log_p, log_q = z.requires_grad_().log_softmax(-1), ref.log_softmax(-1)
    p, q, head = log_p.exp(), log_q.exp(), torch.tensor([1, 4])
    for divergence, full in {"reverse": (p * (log_p - log_q)).sum(), "forward": (q * (log_q - log_p)).sum()}.items():
        one = lambda y, d: package.sampled_tail_kl(
            log_p[head], log_q[head], log_p[y], log_q[y], (head == y).any(), divergence=d
        )
        mean = sum(p[y].detach() * one(y, divergence) for y in range(7))
        EXACT.check(mean, full)
        slope = lambda x: torch.autograd.grad(x, z, retain_graph=True)[0]
        EXACT.check_vector(slope(mean), slope(full))


CHECKS = (recomputed, kept, kept_with_cap, confident_tokens, second_backward, no_token, near, far, exchanged, banned)
CHECKS += (divergence, several, top_k)

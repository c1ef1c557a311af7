"""What the tables of docs/distil.md measure: bias and noise of a gradient, and the KL of a chain, by explicit sums."""

import itertools

import pytest
import stale_topk
import topk_bias
import torch

from klgrad.core.divergences import named

GENERATOR = torch.Generator().manual_seed(0)
LOGITS, REF = 2 * torch.randn(2, 3, 7, generator=GENERATOR, dtype=torch.float64)
LOG_Q = REF.log_softmax(-1)


def by_logits(loss):
    z = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(loss(z.log_softmax(-1)).sum(), z)[0]


def of_samples(coefficient):
    """The gradient of each token that may be sampled, (V, N, V), and its probability, (V, N)."""
    pick = lambda y: by_logits(lambda log_p: coefficient[:, y] * log_p[:, y])
    return torch.stack([pick(y) for y in range(7)]), LOGITS.softmax(-1).T


def relative(x, exact):
    return float(x.square().sum().sqrt() / exact.norm())


def test_every_row_is_the_bias_and_the_noise_of_its_gradient(monkeypatch):
    monkeypatch.setattr(topk_bias, "ENTRIES", (3,))
    log_p = LOGITS.log_softmax(-1)
    for divergence in ("reverse", "forward"):
        rows = {(row["entries"], row["tail"]): row for row in topk_bias.measures(LOGITS, LOG_Q, divergence)}
        pair = (lambda p, q: p.exp() * (p - q)) if divergence == "reverse" else (lambda p, q: q.exp() * (q - p))
        exact = by_logits(lambda log_p, pair=pair: pair(log_p, LOG_Q).sum(-1))
        ids = log_p.topk(3).indices
        inside = torch.zeros_like(LOGITS).scatter(1, ids, 1.0)
        slope = named(divergence).slope(log_p - LOG_Q)
        baseline = (log_p.exp() * slope).sum(-1, keepdim=True)
        coefficients = {
            ("sampled", ""): slope,
            ("sampled", "less its mean at the prefix"): slope - baseline,
            ("student's", "sampled"): slope * (1 - inside),
        }
        for name, coefficient in coefficients.items():
            gradients, chances = of_samples(coefficient)
            mean = (chances[..., None] * gradients).sum(0)
            variance = (chances[..., None] * (gradients - mean).square()).sum(0)
            assert float(rows[name]["noise"]) == pytest.approx(relative(variance.sqrt(), exact), rel=6e-3)
            assert float(rows[name]["bias"]) == 0
        renormalised = by_logits(
            lambda x, ids=ids, pair=pair: pair(*(y.gather(1, ids).log_softmax(-1) for y in (x, LOG_Q))).sum(-1)
        )
        clipped = by_logits(lambda x, pair=pair: pair(x, LOG_Q).clamp(max=0.05).sum(-1))
        wrong = {("student's", "none, renormalised"): renormalised, ("all", "each entry clipped at 0.05"): clipped}
        for name, found in wrong.items():
            assert float(rows[name]["bias"]) == pytest.approx(relative(found - exact, exact), rel=6e-3)
            assert float(rows[name]["bias"]) > 0.05


def test_the_kl_of_a_chain_is_the_sum_over_its_completions(monkeypatch):
    monkeypatch.setattr(stale_topk, "LENGTH", 3)
    log_p, log_q = (x[:, :3].log_softmax(-1) for x in (LOGITS, REF))
    total = torch.zeros((), dtype=torch.float64)
    for words in itertools.product(range(3), repeat=3):
        steps = [(a, b) for a, b in zip((0, *words), words, strict=False)]
        logs = [torch.stack([table[a, b] for a, b in steps]).sum() for table in (log_p, log_q)]
        total = total + logs[0].exp() * (logs[0] - logs[1])
    assert float(stale_topk.kl_of(log_p.float(), log_q.float())) == pytest.approx(float(total) / 3, rel=1e-5)

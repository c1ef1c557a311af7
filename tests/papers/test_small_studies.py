"""Exact parts of the studies on a CPU against sums that are written in another way, and the small model."""

import math
from dataclasses import replace

import pytest
import torch
from tolerances import EXACT, Tol

from klgrad.core.credit import to_go
from klgrad.core.importance import prefix_ratio, token_ratio
from klgrad.papers.comedy import chains as tree
from klgrad.papers.own import degenerate_distillation, division, small_model, stale_k1
from klgrad.papers.tang_munos.fig8_sequences import exact_gradient

SINGLE = Tol(1e-4, 1e-4, "log-probs of a transformer in float32, by a cache and without")
GROWTH = Tol(1e-3, 1e-6, "a push of 1e-9 in float64, which is not quite linear")


@pytest.mark.parametrize(("discount", "level"), [(0.0, "token"), (1.0, "sequence")])
def test_a_discount_of_0_is_the_token_level_and_1_the_sequence_level(discount, level):
    problems = degenerate_distillation.problems_of(degenerate_distillation.Regime(), 3, seed=0)
    logits = problems.start.clone().requires_grad_()
    loss = degenerate_distillation.discounted_loss(problems, problems.log_probs(logits), discount)
    (found,) = torch.autograd.grad(loss, logits)
    EXACT.check_vector(found.flatten(), exact_gradient(problems, level).flatten())


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [((9.0, 9.0), "holds"), ((2.0, 2.0), "contradicted"), ((3.0, 2.0), "undecided")],
    ids=["back", "short", "falling"],
)
def test_a_length_that_still_falls_at_the_end_decides_nothing(ends, verdict):
    path = lambda *tokens: [{"update": 6 * i, "tokens": x} for i, x in enumerate(tokens)]
    runs = [
        {"student": student, "level": level, "seed": seed, "path": path(*(ends if level == "sequence" else (9.0, 9.0)))}
        for student in degenerate_distillation.STUDENTS
        for level in degenerate_distillation.LM_LEVELS
        for seed in range(3)
    ]
    assert degenerate_distillation._of_sums(runs)[-1].verdict == verdict


@pytest.mark.parametrize("lag", [1, 2, 10])
def test_the_root_is_above_1_exactly_above_the_threshold(lag):
    for product in stale_k1.PRODUCTS:
        assert (stale_k1.root(product / lag, lag) > 1) == (product > 1)
    EXACT.check(torch.tensor(stale_k1.root(1 / lag, lag), dtype=torch.float64), 1.0)


def test_two_arms_grow_at_the_rate_of_the_root():
    logits = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    rate = 1.2 / 2 / stale_k1.largest_eigenvalue(logits)
    steps, _ = stale_k1.push(logits, rate, 2, 60, 1e-9, 0)
    measured = (steps[-1] / steps[30]).log() / 29
    GROWTH.check(measured, torch.tensor([math.log(stale_k1.root(0.6, 2))], dtype=torch.float64))


def test_a_queue_keeps_the_logits_less_the_policies_of_the_last_updates():
    """θ - ηβ (π_0 + ... + π_{L-1}) does not change: so the end depends on ηβL alone."""
    logits, rate = torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    ends = [stale_k1.push(logits, rate, 2, updates, 0.1, 0)[1] for updates in range(10, 15)]
    kept = [ends[i] - rate * (ends[i - 1].softmax(-1) + ends[i - 2].softmax(-1)) for i in (2, 3, 4)]
    for other in kept[1:]:
        EXACT.check_vector(other.flatten(), kept[0].flatten())


def test_without_a_spread_of_rewards_the_division_forgets_beta():
    generator = torch.Generator().manual_seed(0)
    ratio = torch.randn(1, 8, dtype=torch.float64, generator=generator)
    reward = torch.ones_like(ratio)
    size = lambda arm, beta: division.ADVANTAGES[arm](reward, ratio, beta, generator).norm()
    assert size("divided", 0.1) < 1.02 * size("divided", 0.01)
    for arm in (division.REMEDY, "in the advantage", "by the reward's deviation"):
        EXACT.check(size(arm, 0.1), 10 * size(arm, 0.01))


def test_the_sampler_s_cache_changes_nothing():
    torch.manual_seed(0)
    model = small_model.Transformer()
    made = small_model.sample(model, small_model.prompts(4, torch.Generator().manual_seed(0)), torch.Generator())
    with torch.no_grad():
        cache = {}
        parts = [model(made.ids[:, : small_model.PROMPT], cache)[:, -1:]]
        parts += [model(made.ids[:, i : i + 1], cache) for i in range(small_model.PROMPT, made.ids.shape[1] - 1)]
        SINGLE.check(torch.cat(parts, 1).log_softmax(-1), made.logp(model))


def test_texts_are_right_sums_and_others_are_not():
    shown = small_model.texts(32, torch.Generator().manual_seed(0))
    assert shown.right.all()
    last = shown.ids[:, small_model.PROMPT :].gather(1, shown.mask.sum(1, keepdim=True) - 1)
    assert (last == small_model.STOP).all(), "the full stop is a token of the completion"
    other = shown.ids.clone()
    other[:, small_model.PROMPT :] = small_model.LETTERS.index("7")
    assert not small_model.with_mask(other).right.any()


WEIGHTS = {
    "prefix": lambda rollout: tree.placements(rollout, to_go, prefix_ratio(rollout)),
    "prefix, without the present token": lambda rollout: tree.placements(
        rollout, to_go, prefix_ratio(rollout) / token_ratio(rollout)
    ),
    "prefix of the score's token": lambda rollout: {
        name: prefix_ratio(rollout) * c for name, c in tree.placements(rollout, to_go).items()
    },
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_prefix_ratio_is_exact_with_the_present_token_and_inside_the_sum(weight):
    generator = torch.Generator().manual_seed(5)
    chains = tree.random_chains(4, 5, generator)
    chains = replace(chains, behaviour=chains.policy + 0.7 * tree.random_logits(4, 5, generator))
    found = chains.moments(WEIGHTS[weight])
    for name in tree.SOUND:
        bias = found[name].bias(chains.kl_gradient)
        assert bool((bias < tree.EXACT).all() if weight == "prefix" else (bias > tree.BIASED).all()), (name, bias)

"""TRL's own trainers: their settings one by one, what is left out of the audit, the stage, and a language model."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
from language_model import (
    END,
    LIMIT,
    everything_in_float64,
    expected_gradient as expected_over_groups,
    forward_kl,
    gradient_of,
    loss_of,
    policies,
    reverse_kl,
    sequence_reverse_kl,
    token_level,
    trainer_of,
)
from some import first
from tolerances import EXACT, SINGLE

from klgrad.audit import audit
from klgrad.audit.advice import rows
from klgrad.audit.probes import ProbeInputs, from_problem
from klgrad.audit.subject import evaluate, expected_gradient
from klgrad.enumeration import autoregressive, every_group
from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.trl import distillation, grpo, rloo, subjects
from klgrad.frameworks.trl_stage import GivenLogProbs, build, completion, in_float64, prompt, saved_model, with_table

pytestmark = [
    pytest.mark.skipif(FRAMEWORKS["trl"].installed is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own affairs
    pytest.mark.slow,
]

SMALL = autoregressive(2, 3, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
"""Its ratios pass every bound that is tried here: tokens have 0.46 to 3.98, completions 0.48 to 4.59."""


def k3(rollout):
    away = rollout.ref_logp - rollout.logp
    return away.exp() - away - 1


def stale_ratio(rollout):
    return (rollout.logp - rollout.behavior_logp).exp()


def own_ratio(x):
    """1, differentiable: of the policy to itself, just before the update."""
    return (x.logp - x.logp.detach()).exp()


def batch_token_mean(rollout):
    per_token = stale_ratio(rollout) * k3(rollout)
    return (per_token * rollout.mask).sum() / rollout.mask.sum()


def completion_token_mean(rollout):
    per_token = stale_ratio(rollout) * k3(rollout)
    return ((per_token * rollout.mask).sum(-1) / rollout.mask.sum(-1)).mean()


DR_GRPO, VLLM = {"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo", "use_vllm": True}
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def expected(subject, problem, size=2):
    found = expected_gradient(subject, problem, size, torch.zeros(len(problem.space)).double())
    return found.mean[: problem.logits.numel()]


def test_rloo_with_another_sampler_descends_the_variance_of_the_log_ratio():
    """Its leave-one-out mean is no baseline where the policy did not sample: it turns the square into a variance."""
    logits = SMALL.logits.clone().requires_grad_()
    log_ratio = (SMALL.with_logits(logits).logp - SMALL.ref_logp).sum(-1)
    variance = SMALL.probability @ log_ratio.square() - (SMALL.probability @ log_ratio).square()
    (half,) = torch.autograd.grad(variance / 2, logits)
    EXACT.check_vector(expected(rloo(normalize_advantages=False, use_vllm=True), SMALL), half.flatten())


def every_pair():
    """All pairs of completions off-policy, as one batch, each completion with a reward of its own."""
    members, _ = every_group(SMALL, 2)
    return from_problem(SMALL, members, torch.tensor([0.3, -1.1, 0.7, 2.0]).double())


@pytest.mark.parametrize("mode", MODES)
def test_the_ratio_for_vllm_weighs_the_policy_and_not_the_kl(mode):
    """The whole loss, rewards and all, with a bound that bites."""
    cap, batch = 1.2, every_pair()
    reward = batch.advantages[:, 0].view(-1, 2)
    advantage = (reward - reward.mean(-1, keepdim=True)).flatten()[:, None]
    log_ratio = (batch.logp.detach() - batch.behavior_logp) * batch.mask
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    ratio = ratio.clamp(max=cap) if mode.endswith("truncate") else torch.where(ratio > cap, 0, ratio)
    assert bool((log_ratio.exp() > cap).any())
    per_token = own_ratio(batch) * (k3(batch) - advantage * ratio)
    formula = (per_token * batch.mask).sum() / batch.mask.numel()
    bound = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": cap}
    loss, (gradient, *_) = evaluate(grpo(**VLLM, scale_rewards="none", **bound), batch)
    EXACT.check(loss, formula)
    EXACT.check_vector(gradient, torch.autograd.grad(formula, batch.logp)[0])


PLAIN_K3 = {**DR_GRPO, "use_bias_correction_kl": False}
LEFT_OUT = {
    "epsilon": (DR_GRPO, {"epsilon": 0.05}),
    "epsilon_high": (DR_GRPO, {"epsilon_high": 2.5}),
    "delta": (DR_GRPO, {"delta": 1.3}),
    "off_policy_mask_threshold": (DR_GRPO, {"off_policy_mask_threshold": 0.1}),
    "top_entropy_quantile": (DR_GRPO, {"top_entropy_quantile": 0.5}),
    "scale_rewards none": (DR_GRPO, {"scale_rewards": "none"}),
    "scale_rewards batch": (DR_GRPO, {"scale_rewards": "batch"}),
    "sapo": ({"loss_type": "sapo"}, {"sapo_temperature_pos": 2.0}),
    "vespo": ({"loss_type": "vespo"}, {"vespo_k_pos": 1.0}),
    "vllm clip_max": (VLLM, {"vllm_importance_sampling_clip_max": 1.2}),
    "vllm clip_min": (VLLM, {"vllm_importance_sampling_clip_min": 0.8}),
    "vllm mode": (VLLM, {"vllm_importance_sampling_mode": "token_mask"}),
    "level without correction": (PLAIN_K3, {"importance_sampling_level": "sequence"}),
}


@pytest.mark.parametrize("setting", LEFT_OUT)
def test_a_setting_that_is_left_out_moves_the_policy_and_leaves_the_kl(setting):
    common, changed = LEFT_OUT[setting]
    batch = every_pair()
    total, added = [], []
    for subject in (grpo(**common), grpo(**common, **changed)):
        _, (whole, *_) = evaluate(subject, batch)
        _, (without, *_) = evaluate(subject, batch.at_reference().fresh())
        total.append(whole)
        added.append(whole - without)
    assert float((total[0] - total[1]).norm()) > 0.01 * float(total[0].norm()), "the setting does not bite"
    assert float(added[0].norm()) > 0.01 * float(total[0].norm()), "there is no KL to leave"
    EXACT.check_vector(added[1], added[0])


def test_rloo_clips_rewards_before_the_kl():
    batch = every_pair()
    plain, clipped = rloo(normalize_advantages=False), rloo(normalize_advantages=False, reward_clip_range=(-0.5, 0.5))
    loss, clipped_loss = (float(evaluate(s, batch)[0]) for s in (plain, clipped))
    assert abs(loss - clipped_loss) > 0.01
    EXACT.check_vector(expected(clipped, SMALL), expected(plain, SMALL))


def halves_of(formula):
    """The mean of what is computed of the first and the second half of a batch alone."""

    def both(batch):
        half = len(batch.mask) // 2
        first, second = (
            formula(replace(batch, **{name: x[rows] for name, x in vars(batch).items()}))
            for rows in (slice(half), slice(half, None))
        )
        return (first + second) / 2

    return both


def in_two(subject):
    return replace(subject, loss=subject.in_micro_batches)


def constant_length(rollout):
    return (stale_ratio(rollout) * k3(rollout) * rollout.mask).sum() / rollout.mask.numel()


IN_MICRO_BATCHES = {
    "dapo": ("mean over all tokens of the batch; micro-batches change nothing", batch_token_mean),
    "cispo": ("mean over all tokens of the batch; micro-batches change nothing", batch_token_mean),
    "vespo": ("mean over all tokens of the batch; micro-batches change nothing", batch_token_mean),
    "bnpo": (
        "mean over all tokens of the batch; micro-batches change it: each divides by its own tokens",
        halves_of(batch_token_mean),
    ),
    "dr_grpo": (
        "summed over the completion and divided by a constant length, averaged over completions; micro-batches change "
        "nothing",
        constant_length,
    ),
    "grpo": (
        "mean over each completion's tokens, averaged over completions: tokens of short completions weigh more; "
        "micro-batches change nothing",
        completion_token_mean,
    ),
}
"""By type of loss, the unit in words, and the loss in two micro-batches."""


@pytest.mark.parametrize("kind", IN_MICRO_BATCHES)
def test_the_loss_in_micro_batches_is_what_is_said(kind):
    said, formula = IN_MICRO_BATCHES[kind]
    subject = grpo(loss_type=kind)
    result = audit(subject)
    assert dict(rows(result))["unit"] == said
    assert result.to_dict()["anatomy"]["micro_batches"] is (kind == "bnpo")
    batch = ProbeInputs.at_random([5, 6, 2, 1], 8, 2, stale=0.1).batch()  # TRL pads them to 6
    whole = batch_token_mean if kind == "bnpo" else formula
    for some, right in ((in_two(subject), formula), (subject, whole)):
        EXACT.check_vector(evaluate(some, batch)[1].logp, torch.autograd.grad(right(batch), batch.logp)[0])


@pytest.mark.parametrize("subject", [rloo(normalize_advantages=True), distillation()], ids=lambda x: x.name)
def test_micro_batches_change_nothing_in_other_trainers(subject):
    """RLOO scores all completions before it cuts them up, and distillation divides by the tokens of all of them."""
    batch = ProbeInputs.at_random([5, 6, 2, 1], 8, 2, stale=0.1).batch()
    for cut, whole in zip(evaluate(in_two(subject), batch)[1], evaluate(subject, batch)[1], strict=True):
        EXACT.check_vector(cut, whole)


def test_a_model_is_saved_in_silence(capfd):
    saved_model.__wrapped__()
    assert capfd.readouterr() == ("", "")


def test_the_environment_is_as_before_an_audit(monkeypatch):
    """What comes after in the same process may well ask the hub."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    evaluate(subjects()[0], every_pair())
    assert not {"HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"} & set(os.environ)
    assert constants.HF_HUB_OFFLINE is False


# The model that says what it is told, read by TRL's own log-prob code; and the precision of that code.


@pytest.mark.parametrize("rows_at_once", [1, 3, 13])
def test_trl_reads_off_the_model_what_it_was_told(rows_at_once):
    """Thirteen rows, so that prompts are of two lengths and padded; chunks of any size; the gradient is the table's."""
    from trl.kernels import chunked_logprob

    trainer = build("grpo", 2, lambda **_: [])
    table = -torch.rand(13, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add(0.05)
    lengths = [1 + row % 3 for row in range(13)]
    with_table(trainer.model, GivenLogProbs()).logp = table.requires_grad_()
    tokens = trainer.processing_class([prompt(row) for row in range(13)], padding=True, padding_side="left")
    completions = [completion(n, ended=True) + [0] * (3 - n) for n in lengths]
    mask = torch.tensor([[1] * n + [0] * (3 - n) for n in lengths])
    ids = torch.cat([torch.tensor(tokens["input_ids"]), torch.tensor(completions)], 1)
    attended = torch.cat([torch.tensor(tokens["attention_mask"]), mask], 1)
    with in_float64(chunked_logprob):
        found, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attended, 3, batch_size=rows_at_once
        )
        (gradient,) = torch.autograd.grad((found * torch.arange(1.0, 40.0).view(13, 3)).sum(), table)
    EXACT.check(found, table * mask)
    EXACT.check(gradient, torch.arange(1.0, 40.0).view(13, 3) * mask)


def test_trls_own_head_is_float32_and_widening_leaves_no_trace():
    from trl.kernels import chunked_logprob

    head = chunked_logprob.ChunkedLogProbFunction.apply
    hidden = torch.tensor([[0.1, 0.7, -0.3]]).double()
    arguments = (hidden, torch.eye(3).double(), None, torch.tensor([1]), 1.0, 8)
    with in_float64(chunked_logprob):
        wide = head(*arguments)[0]
    narrow = head(*arguments)[0]
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    EXACT.check(wide, torch.log_softmax(hidden, -1)[:, 1])
    SINGLE.check(narrow, torch.log_softmax(hidden, -1)[:, 1])
    assert torch.get_default_dtype() == torch.float32
    assert hidden.float().dtype == torch.float32
    assert chunked_logprob.torch is torch


# `DistillationTrainer` against divergences written down here, summed over every pair of completions.

UNEQUAL = autoregressive(3, 2, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
EQUAL = autoregressive(3, 2, ends=False, seed=25, away_from_ref=1.0, off_policy=1.0)


def kl(p, q):
    return (p * (p.log() - q.log())).sum(-1)


def divergence(beta, logits, ref_logits):
    """KL(π‖ref) at β = 1 and KL(ref‖π) at β = 0; between them β KL(ref‖m) + (1-β) KL(π‖m), m = (1-β)π + β ref."""
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    mixture = (1 - beta) * p + beta * q
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def mean_over_pairs(problem, beta):
    """E of the gradient of the mean over the tokens of a pair, with both completions from the sampler."""
    logits = problem.logits.clone().requires_grad_()
    tokens = problem.at_tokens(divergence(beta, logits, problem.ref_logits)).sum(-1)
    lengths = problem.space.mask.sum(-1)
    pairs = [torch.tensor(pair) for pair in itertools.product(range(len(problem.space)), repeat=2)]
    losses = [problem.probability[pair].prod() * tokens[pair].sum() / lengths[pair].sum() for pair in pairs]
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), logits)
    return gradient.flatten()


@pytest.mark.parametrize("on_policy", first([False, True], 1))
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.2, 0.0])
def test_the_exact_gradient_is_that_of_the_divergence_written_down(beta, on_policy):
    problem = UNEQUAL.on_policy() if on_policy else UNEQUAL
    EXACT.check_vector(expected(distillation(beta=beta), problem), mean_over_pairs(problem, beta))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_at_equal_lengths_it_descends_the_divergence_with_the_visits_held_fixed(beta):
    """β = 0.5 has no record among the targets of the audit: it is the Jensen-Shannon divergence of each next token."""
    problem = EQUAL.on_policy()
    logits = problem.logits.clone().requires_grad_()
    visits = problem.prefix_probability(problem.logits)
    total = (visits * divergence(beta, logits, problem.ref_logits)).sum()
    (right,) = torch.autograd.grad(total, logits)
    EXACT.check_vector(expected(distillation(beta=beta), problem), right.flatten() / problem.space.mask.shape[1])


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_temperature_divides_the_logits_of_both_models(beta):
    members, _ = every_group(UNEQUAL, 2)
    batch = from_problem(UNEQUAL, members, torch.zeros(len(UNEQUAL.space)).double())
    formula = (divergence(beta, batch.logits / 2, batch.ref_logits / 2) * batch.mask).sum() / batch.mask.sum()
    loss, found = evaluate(distillation(beta=beta, temperature=2.0), batch)
    EXACT.check(loss, formula)
    EXACT.check_vector(found.logits, torch.autograd.grad(formula, batch.logits)[0])
    assert not bool(found.logp.any())


def test_reverse_kl_is_the_default():
    from trl import DistillationConfig

    assert DistillationConfig("nowhere", use_cpu=True, bf16=False).beta == 1.0


# A genuine language model: every group of its completions, down to its parameters.


@pytest.fixture
def all_in_float64():
    with everything_in_float64():
        yield


K3 = {"loss_type": "dr_grpo", "use_bias_correction_kl": False}
CORRECTED = {"loss_type": "dr_grpo", "use_bias_correction_kl": True}
CASES = {
    # Dr. GRPO divides by the longest completion that is allowed.
    "plain k3": ("grpo", K3, token_level(forward_kl), 1 / LIMIT),
    "bias corrected": ("grpo", CORRECTED, token_level(reverse_kl), 1 / LIMIT),
    "bias corrected, tempered": ("grpo", {**CORRECTED, "temperature": 0.6}, token_level(reverse_kl), 1 / LIMIT),
    "in the reward": ("rloo", {"normalize_advantages": False}, sequence_reverse_kl, 1.0),
    "in the reward, tempered": ("rloo", {"normalize_advantages": False, "temperature": 0.6}, sequence_reverse_kl, 1.0),
}


@pytest.mark.usefixtures("all_in_float64")
@pytest.mark.parametrize("case", first(CASES, ("bias corrected, tempered", "in the reward")))
def test_the_parameters_get_the_gradient_of_the_divergence(case):
    kind, settings, divergence, scale = CASES[case]
    trainer = trainer_of(kind, **settings)
    policy, ref = policies(trainer, settings.get("temperature", 1.0))
    EXACT.check_vector(expected_over_groups(trainer, policy), scale * gradient_of(trainer, divergence(policy, ref)))


@pytest.mark.usefixtures("all_in_float64")
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_neither_padding_nor_chunks_matter(kind):
    """Prompts of two lengths are padded on the left, and scored by the pair; the batch is the mean of its groups."""
    trainer = trainer_of(kind, **(CORRECTED if kind == "grpo" else {"normalize_advantages": False}))
    groups = [("a", [(END,), (2, 3)]), ("b a b", [(3, END), (0, 2)])]
    alone = [gradient_of(trainer, loss_of(trainer, [prompt] * 2, pair)) for prompt, pair in groups]
    together = loss_of(trainer, [p for p, _ in groups for _ in range(2)], [y for _, pair in groups for y in pair])
    assert float((alone[0] - alone[1]).norm()) > 0.1 * float(alone[0].norm())
    EXACT.check_vector(gradient_of(trainer, together), (alone[0] + alone[1]) / 2)

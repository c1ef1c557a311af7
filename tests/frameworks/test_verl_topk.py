"""verl's distillation on the teacher's top k tokens: its code and klgrad's on every completion of a small problem.

It is fed whole distributions, so that its gradient is taken towards the student's logits.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tolerances import EXACT, SINGLE

from klgrad.enumeration import autoregressive, target_gradients
from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.verl import actor

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(FRAMEWORKS["verl"].installed is None, reason="verl is not installed"),
]

VOCAB = 4
PROBLEM = autoregressive(VOCAB, 2, ends=True, seed=4, away_from_ref=0.8).on_policy()
"""The student is π, the teacher ref. No log-prob is below -10, no loss above 10, where verl cuts by default."""

UNCUT = {"loss_max_clamp": None, "log_prob_min_clamp": None}


def seen_by_a_worker(problem, n, logits, k):
    """Actor, logits, data and log-probs of a batch with completion n alone, after one prompt token."""
    from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]

    length = int(problem.space.mask[n].sum())
    prefix, tokens = problem.space.prefix[n, :length], problem.space.tokens[n, :length]
    # Logits at a position are for the token after it; what follows the last token is not looked at.
    student = torch.cat([logits[prefix], torch.zeros(1, VOCAB).double()])[None]
    teacher = torch.log_softmax(problem.ref_logits, -1)[prefix].topk(k)
    nested = lambda x: torch.nested.nested_tensor_from_jagged(
        torch.cat([x, torch.zeros_like(x[:1])]), torch.tensor([0, length + 1])
    )
    logp = torch.log_softmax(logits, -1)[prefix, tokens]
    ones = torch.ones(1, length, dtype=torch.long)
    tensors = {
        "prompts": ones[:, :1],
        "responses": ones,
        "attention_mask": torch.ones(1, length + 1, dtype=torch.long),
        "response_mask": ones.double(),
        "old_log_probs": logp.detach()[None],
        "advantages": torch.zeros(1, length).double(),
        "teacher_logprobs": nested(teacher.values),
        "teacher_ids": nested(teacher.indices),
    }
    whole = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
    return (
        actor(loss_agg_mode="seq-mean-token-sum"),
        student,
        tensordict_utils.get_tensordict(tensors, non_tensor_dict=whole),
        logp,
    )


def loss_of(problem, n, logits, k, policy_gradient, **settings):
    """The loss of verl, in the two calls of a worker."""
    from verl.trainer.distillation.losses import distillation_ppo_loss  # pyright: ignore[reportMissingImports]
    from verl.workers.config import DistillationConfig, DistillationLossConfig  # pyright: ignore[reportMissingImports]

    worker, student, data, logp = seen_by_a_worker(problem, n, logits, k)
    chosen = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=k, use_policy_gradient=policy_gradient, use_task_rewards=False, **settings
    )
    config = DistillationConfig(distillation_loss=chosen)
    by_token = distillation_ppo_loss(worker, config, data=data, student_logits=student)
    output = {"log_probs": torch.cat([logp, logp[:1] * 0])} | {name: x[0] for name, x in by_token.items()}
    return distillation_ppo_loss(worker, config, output, data)[0]


def declared_loss(problem, n, logits, k, **node):
    """The loss of klgrad in its place, in the same two calls; without rewards verl computes no log-probs."""
    from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]

    from klgrad.verl.declaration import term_of
    from klgrad.verl.loss import KLLoss

    worker, student, data, _ = seen_by_a_worker(problem, n, logits, k)
    node = {"coef": 1.0, "reference": "teacher", "estimator": "exact", "level": "token", **node}
    loss = KLLoss(partial(ppo_loss, config=worker), replace(term_of(node), task_rewards=False))
    by_token = loss(student_logits=student, data=data)
    return loss({name: x[0] for name, x in by_token.items()}, data)[0]


def expected_gradient(problem, k, policy_gradient=False, **settings):
    """E over completions of the student, and the size of one completion's gradient."""
    return mean_and_size(problem, lambda n, logits: loss_of(problem, n, logits, k, policy_gradient, **settings))


def mean_and_size(problem, loss):
    gradients = []
    for n in range(len(problem.space)):
        logits = problem.logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(n, logits), logits)
        gradients.append(gradient.flatten())
    gradients = torch.stack(gradients)
    return problem.probability @ gradients, float((problem.probability @ gradients.square().sum(-1)).sqrt())


def teacher_cut_to_its_top(problem, k):
    """(P, V) the teacher with all but its k likeliest tokens removed; and (P,) the mass that is left."""
    teacher = torch.softmax(problem.ref_logits, -1)
    kept = torch.zeros_like(teacher).scatter(-1, teacher.topk(k).indices, 1.0) * teacher
    return kept, kept.sum(-1)


def by_hand(problem, k):
    """Σ visits·mass·(student - cut teacher, renormalised) on the logits, but 0 where the value is negative."""
    kept, mass = teacher_cut_to_its_top(problem, k)
    student = torch.log_softmax(problem.logits, -1)
    value = (kept * (torch.where(kept > 0, kept, 1).log() - student)).sum(-1)
    visits = problem.prefix_probability(problem.logits)
    pulls = mass[:, None] * student.exp() - kept
    return (visits[:, None] * torch.where(value[:, None] < 0, 0, pulls)).flatten(), value


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_it_descends_the_forward_kl_from_the_teacher_cut_to_its_top_k(k):
    found, _ = expected_gradient(PROBLEM, k)
    expected, value = by_hand(PROBLEM, k)
    SINGLE.check_vector(found, expected)
    if k == 2:  # a prefix of either kind, or the formula's second half would not be tried
        assert (value < 0).any()
        assert (value > 0).any()


def test_over_the_whole_vocabulary_it_is_the_token_level_forward_kl():
    SINGLE.check_vector(expected_gradient(PROBLEM, VOCAB)[0], target_gradients(PROBLEM)["forward-kl-token"])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_is_off_by_at_most_twice_the_mass_that_the_teacher_has_elsewhere(k):
    """As verl logs it, 1 - distillation/teacher_mass; at every prefix whose value is not negative."""
    found, target = expected_gradient(PROBLEM, k)[0], target_gradients(PROBLEM)["forward-kl-token"]
    off = (found - target).reshape(-1, VOCAB).abs().sum(-1) / PROBLEM.prefix_probability(PROBLEM.logits)
    (_, mass), (_, value) = teacher_cut_to_its_top(PROBLEM, k), by_hand(PROBLEM, k)
    seen = value > 0
    assert (off <= 2 * (1 - mass) + SINGLE.rtol)[seen].all()
    assert (off > 0.1 * (1 - mass))[seen].all()  # and not by much less


def test_a_student_that_neglects_the_tail_is_not_pulled_back():
    """Verl cuts a negative value at 0, and there the gradient ends; the forward KL still pulls."""
    kept, _ = teacher_cut_to_its_top(PROBLEM, 2)
    neglecting = PROBLEM.with_logits(PROBLEM.ref_logits - 2.0 * (kept == 0)).on_policy()
    assert float(target_gradients(neglecting)["forward-kl-token"].norm()) > 0.1
    assert float(expected_gradient(neglecting, 2)[0].norm()) == 0


@pytest.mark.parametrize("k", [2, 4])
def test_as_a_policy_gradient_it_descends_nothing(k):
    """The loss of a token is that of its prefix, whatever the token: a baseline, and no more."""
    found, typical = expected_gradient(PROBLEM, k, policy_gradient=True)
    assert typical > 0.01
    assert float(found.norm()) < EXACT.rtol * typical


def test_the_default_cuts_take_the_gradient_from_tokens_that_the_student_has_all_but_lost():
    """Below a log-prob of -10 the student's is clamped: the teacher's favourite pulls no more."""
    favourite = PROBLEM.ref_logits.argmax(-1, keepdim=True)
    problem = PROBLEM.with_logits(PROBLEM.logits.scatter(-1, favourite, -14.0)).on_policy()
    (cut, _), (uncut, _) = expected_gradient(problem, 2), expected_gradient(problem, 2, **UNCUT)
    first = int(favourite[0])
    assert float(uncut[first]) < -0.1
    assert abs(float(cut[first])) < 1e-4


# klgrad's divergences in the place of verl's loss.


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jensen-shannon(0.1)", "0.3 forward + 0.7 reverse"])
@pytest.mark.parametrize("tail", ["lump", "none"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_declared_divergence_over_the_teachers_top_k(divergence, tail, k):
    """At each prefix as often as the student comes there, that of the entries and their tail."""
    found, _ = mean_and_size(PROBLEM, lambda n, x: declared_loss(PROBLEM, n, x, k, divergence=divergence, tail=tail))
    logits = PROBLEM.logits.clone().requires_grad_()
    log_p, log_q = logits.log_softmax(-1), PROBLEM.ref_logits.log_softmax(-1)
    ids = log_q.topk(k).indices
    inside = [x.gather(-1, ids) for x in (log_p, log_q)]
    if tail == "lump":
        inside = [torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in inside]
    p, q, u = *(x.exp() for x in inside), (inside[0] - inside[1]).exp()
    mixture = 0.1 * q + 0.9 * p
    value = {
        "reverse": q * (u * u.log() - u + 1),
        "forward": q * (u - 1 - u.log()),
        "jensen-shannon(0.1)": 0.1 * q * (q / mixture).log() + 0.9 * p * (p / mixture).log(),
    }
    value["0.3 forward + 0.7 reverse"] = 0.3 * value["forward"] + 0.7 * value["reverse"]
    visits = PROBLEM.prefix_probability(PROBLEM.logits)
    expected = torch.autograd.grad((visits * value[divergence].sum(-1)).sum(), logits)[0].flatten()
    EXACT.check_vector(found, expected)


def test_with_one_entry_in_the_tail_the_lump_is_the_whole_divergence():
    found, _ = mean_and_size(PROBLEM, lambda n, x: declared_loss(PROBLEM, n, x, VOCAB - 1))
    EXACT.check_vector(found, target_gradients(PROBLEM)["reverse-kl-token"])

"""verl's batches: its padding, its micro-batches, what is missing, and what is logged. The functions need no verl."""
# pyright: reportMissingImports=false

import math

import pytest
import torch
from on_verl.configuration import HAS_VERL
from oracle import mean_gradient_over_groups
from tolerances import EXACT, SINGLE

from klgrad import KLTerm
from klgrad.audit.probes import from_problem
from klgrad.audit.subject import expected_gradient
from klgrad.enumeration import autoregressive
from klgrad.errors import RolloutError
from klgrad.frameworks.verl import actor, declared
from klgrad.verl import loss as verl_loss
from klgrad.verl.declaration import term_of
from klgrad.verl.loss import BETA, KLLoss, kl_loss, lowered_advantages, rollout_of_step, step_kl, step_metrics

pytestmark = pytest.mark.filterwarnings("ignore")
needs_verl = pytest.mark.skipif(not HAS_VERL, reason="verl is not installed")


def step(rows=6, width=5, *, engine=True):
    random = torch.Generator().manual_seed(0)
    logp = lambda: -torch.rand(rows, width, generator=random).double() - 0.1
    length = torch.randint(1, width + 1, (rows,), generator=random)
    batch = {"old_log_probs": logp(), "ref_log_prob": logp(), "rollout_log_probs": logp()}
    if not engine:
        del batch["rollout_log_probs"]
    batch["response_mask"] = (torch.arange(width) < length[:, None]).long()
    return batch, [f"prompt {i // 3}" for i in range(rows)]


def with_padding_row(batch, uid):
    """verl's padding: a uid of its own, and no live token; its log-probs are those of a meaningless prompt."""
    row = {name: torch.full_like(x[:1], 0 if name == "response_mask" else -40) for name, x in batch.items()}
    return {name: torch.cat([batch[name], row[name]]) for name in batch}, [*uid, "pad0"]


LEAVE_ONE_OUT = KLTerm(baseline="leave_one_out")


def test_the_coefficient_is_subtracted_times_beta():
    batch, uid = step()
    rollout, given = rollout_of_step(batch, uid), torch.randn(6, 5).double()
    found = lowered_advantages(LEAVE_ONE_OUT, 0.3, rollout, given)
    EXACT.check(found, given - 0.3 * LEAVE_ONE_OUT(rollout).coefficient)
    assert float((found - given).abs().max()) > 0.01


def test_padding_rows_change_nothing_and_are_not_changed():
    batch, uid = step()
    padded, padded_uid = with_padding_row(batch, uid)
    given = torch.zeros(7, 5).double()
    found = lowered_advantages(LEAVE_ONE_OUT, 1.0, rollout_of_step(padded, padded_uid), given)
    EXACT.check(found[:6], lowered_advantages(LEAVE_ONE_OUT, 1.0, rollout_of_step(batch, uid), given[:6]))
    assert not found[6].any()
    declaration = term_of({"ratio": "prefix"})
    plain, more = (step_metrics(declaration, 0.1, rollout_of_step(*x)) for x in ((batch, uid), (padded, padded_uid)))
    assert plain == pytest.approx(more)


def test_a_batch_of_padding_alone_is_left_as_it_is():
    batch, uid = step(rows=2)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    rollout, given = rollout_of_step(batch, uid), torch.ones(2, 5).double()
    assert torch.equal(lowered_advantages(LEAVE_ONE_OUT, 1.0, rollout, given), given)
    assert step_metrics(term_of({}), 0.1, rollout) == {"kl/coef": 0.1}
    assert step_kl(term_of({}), rollout) is None


def test_several_rows_of_a_session_are_refused():
    verl_loss.check_one_row_per_session(["a_0_0", "a_1_0", "b_0_0"])
    with pytest.raises(RolloutError, match="several rows of session a_1"):
        verl_loss.check_one_row_per_session(["a_0_0", "a_1_0", "a_1_1"])


def test_the_sampler_is_the_engine_or_the_old_policy():
    batch, _ = step()
    live = batch["response_mask"].bool()
    for sampler, key in (("rollout", "rollout_log_probs"), ("old", "old_log_probs")):
        declaration = term_of({"ratio": "prefix", "sampler": sampler})
        found = verl_loss.rollout_of_micro_batch(declaration, batch["ref_log_prob"], batch["ref_log_prob"], batch)
        assert torch.equal(found.behavior_logp[live], batch[key][live])


def test_every_estimator_is_logged_with_its_error_and_the_mismatch():
    batch, uid = step()
    found = step_metrics(term_of({"ratio": "prefix", "ratio_bound": "clip:0.9:1.1"}), 0.2, rollout_of_step(batch, uid))
    for k in ("reverse/k1", "reverse/k2", "reverse/k3", "forward/k3", "mismatch/k3"):
        assert math.isfinite(found[f"kl/{k}/per_token/standard_error"])
    assert found["kl/coef"] == 0.2
    assert found["kl/clusters"] == 2
    assert 0 < found["ratio/share_bounded"] <= 1
    assert 0 < found["ratio/effective_sample_size"] <= 1
    without = step_metrics(term_of({}), 0.2, rollout_of_step(*step(engine=False)))
    assert not any(name.startswith("kl/mismatch") for name in without)


def test_the_ratios_of_a_step_are_those_of_the_declared_sampler():
    """With sampler=old they are 1 before the update; those to the rollout engine would not be those of the term."""
    rollout = rollout_of_step(*step())
    found = [step_metrics(term_of({"ratio": "prefix", "sampler": x}), 0.1, rollout) for x in ("rollout", "old")]
    assert ["ratio/max" in metrics for metrics in found] == [True, False]
    assert all("kl/mismatch/k3/per_token" in metrics for metrics in found)


def test_without_the_trainers_scores_no_ratio_and_no_mismatch_is_logged():
    """With bypass_mode verl's old log-probs are those of the rollout engine, and every ratio would be 1."""
    batch, uid = step()
    batch["old_log_probs"] = batch["rollout_log_probs"]
    rollout, declaration = rollout_of_step(batch, uid, scored=False), term_of({"ratio": "prefix", "target": 1.0})
    found = step_metrics(declaration, 0.1, rollout)
    assert not any("mismatch" in name or name.startswith("ratio/") for name in found)
    assert math.isfinite(found["kl/reverse/k3/per_token"])
    EXACT.check(step_kl(declaration, rollout), step_kl(term_of({"target": 1.0}), rollout))


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_kl_of_an_adaptive_beta(unit):
    batch, uid = step(engine=False)
    rollout = rollout_of_step(batch, uid)
    k3 = torch.where(rollout.mask, (-rollout.log_ratio).exp() - 1 + rollout.log_ratio, 0).sum()
    # The value of k1_k3 is that of k3: an unbiased estimate of the KL of each completion.
    found = step_kl(term_of({"target": 1.0, "target_unit": unit}), rollout)
    EXACT.check(found, k3 / (rollout.mask.sum() if unit == "token" else 6))


@needs_verl
def test_an_adaptive_beta_needs_the_one_of_the_driver():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    loss = KLLoss(lambda **_: (torch.zeros(()), {}), term_of({"target": 1.0}))
    data = TensorDict({}, batch_size=[])
    tensordict_utils.assign_non_tensor(data, **{BETA: 0.25})
    assert loss._beta(data) == 0.25


def on_micro_batch(declaration, batch, rows, leaf, mode="token-mean"):
    """`kl_loss` on some rows of a batch, as a worker calls it; verl passes the numbers of the whole mini-batch."""
    from verl.utils import tensordict_utils

    part = {name: x[rows] for name, x in batch.items()}
    ones = torch.ones_like(part["response_mask"])
    part |= {"prompts": ones[:, :1], "responses": ones, "attention_mask": torch.cat([ones[:, :1], ones], 1)}
    whole = {"dp_size": 1, "batch_num_tokens": int(batch["response_mask"].sum()), "global_batch_size": len(leaf)}
    data = tensordict_utils.get_tensordict(part, non_tensor_dict=whole)
    unpadded = torch.cat([leaf[rows], torch.zeros_like(leaf[rows, :1])], 1).flatten()
    return kl_loss(declaration, actor(loss_agg_mode=mode), {"log_probs": unpadded}, data)


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("reduction", ["policy", "sequence"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"])
def test_micro_batches_add_up_to_the_batch(mode, reduction):
    batch, _ = step(rows=6)
    declaration, leaf = term_of({"reduction": reduction}), batch["old_log_probs"].clone().requires_grad_()
    loss = lambda start, end: on_micro_batch(declaration, batch, slice(start, end), leaf, mode)[0]
    whole, parts = loss(0, 6), torch.stack([loss(i, i + 2) for i in (0, 2, 4)]).sum()
    SINGLE.check(whole.detach(), parts.detach())
    SINGLE.check_vector(*(torch.autograd.grad(x, leaf)[0] for x in (parts, whole)))


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("node", [{}, {"ratio": "prefix"}, {"level": "token", "ratio": "token"}])
def test_a_micro_batch_of_padding_alone_has_the_metrics_of_the_others(node):
    """verl raises if a worker has fewer values of a metric than another: see `Metric.aggregate_dp`."""
    from verl.utils.metric import Metric

    batch, _ = with_padding_row(*step(rows=2))
    leaf = batch["old_log_probs"].clone().requires_grad_()
    (_, live), (loss, empty) = (on_micro_batch(term_of(node), batch, rows, leaf) for rows in (slice(0, 2), slice(2, 3)))
    assert set(live) == set(empty)
    assert float(loss) == 0
    assert not torch.autograd.grad(loss, leaf)[0].any()
    for name, metric in empty.items():
        assert math.isfinite(Metric.aggregate_dp([live[name], metric]))


# verl's own loss code with the declared KL: the mean gradient over all completions is that of the term, in float64.

PROBLEM = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
UNBOUNDED, LOO = {"ratio": "prefix", "ratio_bound": "none"}, {"baseline": "leave_one_out"}
TEACHER, ADVANTAGE = {"reference": "teacher", **UNBOUNDED}, {"placement": "advantage"}
HALF, SAMPLED = {"discount": 0.5}, {"estimator": "sampled"}
NODES = {
    "sequence": {},
    "discount": HALF,
    "sequence, prefix": UNBOUNDED,
    "sequence, truncated": {"ratio": "prefix", "ratio_bound": "truncate:1.1"},
    "token, masked": {"level": "token", "ratio": "token", "ratio_bound": "mask:0.5:2"},
    "influence": {"level": "token", "influence_bound": 0.3},
    "k1_k3": {"estimator": "k1_k3"},
    "forward sequence": {"divergence": "forward", "estimator": "k3", "ratio": "sequence", "ratio_bound": "none"},
    "jensen-shannon, teacher": {**TEACHER, **SAMPLED, "divergence": "jensen-shannon(0.1)", "level": "token"},
    "a mixture with a future": {"divergence": "0.3 forward + 0.7 reverse", "level": "future", **SAMPLED, **HALF},
    "teacher": {**TEACHER, **HALF},
    "advantage": ADVANTAGE,
    "advantage, leave-one-out": {**ADVANTAGE, **LOO},
    "advantage, all": {**ADVANTAGE, **LOO, "discount": 0.7, "ratio": "prefix", "ratio_bound": "clip:0.7:1.4"},
}


def gradient_on_verl(subject, problem, advantage):
    return expected_gradient(subject, problem, 2, advantage).mean[: problem.logits.numel()]


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("case", NODES)
def test_it_is_that_of_the_term(case, on_policy):
    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    found = gradient_on_verl(declared(NODES[case]), problem, torch.zeros(len(problem.space)).double())
    term = term_of(NODES[case]).term
    expected = mean_gradient_over_groups(PROBLEM, 2, lambda rollout: term(rollout).loss, on_policy=on_policy)
    EXACT.check_vector(found, expected)


@pytest.mark.slow
@needs_verl
@pytest.mark.parametrize("placement", ["loss", "advantage"])
def test_it_is_added_to_the_policy_gradient(placement):
    """Sample by sample: on-policy nothing is clipped, so the gradient of the sum is the sum of the gradients."""
    problem = PROBLEM.on_policy()
    rewards = torch.randn(len(problem.space), generator=torch.Generator().manual_seed(0)).double()

    def gradient(coef, advantage):
        batch = from_problem(problem, torch.arange(len(problem.space))[None], advantage)
        return torch.autograd.grad(declared({"placement": placement, "coef": coef})(batch), batch.logp)[0]

    reward, kl = gradient(0.0, rewards), gradient(0.3, 0 * rewards)
    assert min(float(reward.norm()), float(kl.norm())) > 0.01
    EXACT.check_vector(gradient(0.3, rewards), reward + kl)


@pytest.mark.slow
@needs_verl
def test_a_missing_detach_or_a_wrong_sign_would_be_seen(monkeypatch):
    problem, none = PROBLEM.on_policy(), torch.zeros(len(PROBLEM.space)).double()
    right = gradient_on_verl(declared({"placement": "advantage"}), problem, none)
    lower = verl_loss.lowered_advantages
    monkeypatch.setattr(verl_loss, "lowered_advantages", lambda *a: 2 * a[3] - lower(*a))
    wrong = gradient_on_verl(declared({"placement": "advantage"}), problem, none)
    EXACT.check_vector(wrong, -right)
    with pytest.raises(AssertionError):
        EXACT.check_vector(wrong, right)

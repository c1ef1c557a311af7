r"""KL losses as found in the wild, sound or not, by name: for study and audit, not for training.

A cell is estimator x placement x level x weighting. *As loss* differentiates the estimator (path-wise).
*In the reward* puts its detached value on the score, where policy-gradient training would. *Both* does
both. Each docstring's Gradient line is held against the audit by a test.

Every cell takes a `Rollout` and returns a scalar: summed over the completion and averaged over
completions, unless its name says otherwise. Where a ratio is used it is π/μ. Exponentials are this
package's, which saturate; a trainer's own code may overflow where these do not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .core import credit
from .core.estimators import Estimator, exp_capped, k1, k2, k3, k_lambda
from .core.importance import Truncate, sequence_ratio, token_ratio
from .core.result import reduce
from .core.rollout import Rollout
from .errors import UnknownNameError
from .targets import Descends, Verdict

DISCOUNT = 0.9
"""Discount of the discounted cells."""

OUTPUT_CLAMP = 10.0
"""verl, SkyRL and OpenRLHF clamp a KL estimate's value to ±10, which also stops its gradient there."""

STD_EPSILON = 1e-4
"""Added to a group's standard deviation before dividing by it, as GRPO implementations do."""


@dataclass(frozen=True)
class Cell:
    """A named loss over a `Rollout`.

    Attributes:
        name: how to ask for it.
        loss: the function; its docstring states Estimates, Gradient and Requires.
        descends: which target's gradient it is, on-policy and off-policy.
        instead: the sound alternative, for advice; empty where the cell is sound on-policy.
        couples_groups: whether a batch statistic ties different groups together.
    """

    name: str
    loss: Callable[[Rollout], Tensor]
    descends: Descends
    instead: str
    couples_groups: bool

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.splitlines()[0] if self.doc else ""

    @property
    def doc(self) -> str:
        """The docstring of the loss."""
        return self.loss.__doc__ or ""

    def __call__(self, rollout: Rollout) -> Tensor:
        """The scalar loss."""
        return self.loss(rollout)


CELLS: dict[str, Cell] = {}


def get(name: str) -> Cell:
    """The cell of that name; an unknown one raises with near matches."""
    if name not in CELLS:
        raise UnknownNameError("cell", name, CELLS)
    return CELLS[name]


def _cell(on_policy: Verdict, off_policy: Verdict, *, instead: str = "", couples_groups: bool = False) -> Callable:
    """Register a loss under its name, with the targets that it descends."""

    def register(loss: Callable[[Rollout], Tensor]) -> Callable[[Rollout], Tensor]:
        name = loss.__name__.removeprefix("_").replace("_", "-")
        CELLS[name] = Cell(name, loss, Descends(on_policy, off_policy), instead, couples_groups)
        return loss

    return register


# --- the three placements, and the ratio; everything below is made of these ---


def _log_ratio(rollout: Rollout) -> Tensor:
    """l_t with its gradient, for estimators that are differentiated."""
    return rollout.logp - rollout.ref_logp


def _as_loss(estimator: Estimator | Callable[[Tensor], Tensor], rollout: Rollout) -> Tensor:
    return reduce(estimator(_log_ratio(rollout)), rollout, "sequence")


def _on_score(coefficient: Tensor, rollout: Rollout) -> Tensor:
    return reduce(coefficient.detach() * rollout.logp, rollout, "sequence")


def _in_reward(estimator: Estimator, rollout: Rollout) -> Tensor:
    return _on_score(credit.whole(estimator.value(rollout.log_ratio), rollout.mask), rollout)


def _live_ratio(rollout: Rollout) -> Tensor:
    """π/μ of each token with its gradient, as `exp(logp - old_logp)` has in a trainer."""
    ratio = token_ratio(rollout)
    return ratio + ratio * (rollout.logp - rollout.logp.detach())


# --- as loss ---


@_cell("nothing", "unknown", instead="k2-loss, or KLTerm(level='token')")
def k1_loss(rollout: Rollout) -> Tensor:
    """k1 differentiated.

    Estimates: KL(π‖ref).
    Gradient: `nothing` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(k1, rollout)


@_cell("reverse-kl-token", "unknown")
def k2_loss(rollout: Rollout) -> Tensor:
    """k2 differentiated, token by token.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(k2, rollout)


@_cell("forward-kl-token", "unknown", instead="k2-loss, or KLTerm(level='token')")
def k3_loss(rollout: Rollout) -> Tensor:
    """k3 differentiated, token by token: GRPO as published, and the default of several trainers.

    Estimates: KL(π‖ref).
    Gradient: `forward-kl-token` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(k3, rollout)


@_cell("forward-kl-token", "unknown", instead="k2-loss, or KLTerm(level='token')")
def k_half_loss(rollout: Rollout) -> Tensor:
    """k_lambda at λ = 1/2 differentiated: half the strength for the same value.

    Estimates: KL(π‖ref).
    Gradient: `forward-kl-token` on-policy, at scale 1/2; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(k_lambda(0.5), rollout)


@_cell("unknown", "unknown", instead="k2-loss, or KLTerm(level='token')")
def abs_loss(rollout: Rollout) -> Tensor:
    """|l| differentiated.

    Estimates: E|l|, a bound on the reverse KL.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(torch.abs, rollout)


@_cell("unknown", "unknown", instead="KLTerm(level='token', influence_bound=5.0): bounded, and never zero")
def k3_loss_clamped(rollout: Rollout) -> Tensor:
    """k3 with its value clamped at 10, differentiated: no gradient where log(ref/π) > 2.61.

    Estimates: KL(π‖ref), cut off.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(lambda x: k3(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@_cell("unknown", "unknown", instead="KLTerm(level='token', influence_bound=5.0): bounded, and never zero")
def k2_loss_clamped(rollout: Rollout) -> Tensor:
    """k2 with its value clamped at 10, differentiated: no gradient where |l| > 4.47.

    Estimates: KL(π‖ref), cut off.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(lambda x: k2(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@_cell("nothing", "nothing", instead="differentiate it: k2-loss, or KLTerm(level='token')")
def k3_no_grad(rollout: Rollout) -> Tensor:
    """k3 computed without gradient and added to the loss: logged, and nothing else.

    Estimates: KL(π‖ref).
    Gradient: `nothing` on-policy; `nothing` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(k3, rollout).detach()


@_cell("reverse-kl-token", "unknown")
def k3_straight_through(rollout: Rollout) -> Tensor:
    """The value of k3 with the slope of k2 (verl's `k3+`).

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _as_loss(Estimator(k3.value, k2.slope), rollout)


@_cell("unknown", "unknown", instead="KLTerm(level='token'), summed over the sequence")
def k2_loss_length_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and divided by each completion's own length.

    Estimates: KL(π‖ref) per token, completion by completion.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    share = 1 / rollout.lengths.clamp(min=1)
    return reduce(share[:, None] * k2(_log_ratio(rollout)), rollout, "sequence")


@_cell("unknown", "unknown", instead="KLTerm(level='token'), summed over the sequence", couples_groups=True)
def k2_loss_token_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and averaged over all tokens of the batch.

    Estimates: KL(π‖ref) per token.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return reduce(k2(_log_ratio(rollout)), rollout, "token")


@_cell("forward-kl-sequence", "unknown")
def k3_sequence_loss(rollout: Rollout) -> Tensor:
    """k3 of the whole completion's log-ratio, differentiated.

    Estimates: KL(π‖ref) of completions.
    Gradient: `forward-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return k3(_log_ratio(rollout).sum(-1)).mean()


# --- as loss, weighted by a ratio ---


@_cell(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead="KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None)): the same without cancellation",
)
def ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Ratio times k3, both differentiated: the "unbiased" k3 of DeepSeek-V3.2, TRL's default.

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`. In float32 exp cancels against exp beyond |l| of about 16.
    """
    return reduce(_live_ratio(rollout) * k3(_log_ratio(rollout)), rollout, "sequence")


@_cell(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead="KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None)): the same with less variance",
)
def ratio_k1_loss(rollout: Rollout) -> Tensor:
    """Ratio times k1, both differentiated: coefficient r (l + 1).

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`.
    """
    return reduce(_live_ratio(rollout) * k1(_log_ratio(rollout)), rollout, "sequence")


@_cell("unknown", "unknown", instead="detach the ratio: stopped-ratio-k2-loss")
def ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Ratio times k2, both differentiated: coefficient r (l + l²/2).

    Estimates: KL(π‖ref), biased.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    return reduce(_live_ratio(rollout) * k2(_log_ratio(rollout)), rollout, "sequence")


@_cell("reverse-kl-token", "reverse-kl-token-sampler")
def stopped_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k2.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `reverse-kl-token-sampler` off-policy.
    Requires: `behavior_logp`.
    """
    return reduce(token_ratio(rollout) * k2(_log_ratio(rollout)), rollout, "sequence")


@_cell("reverse-kl-token", "unknown")
def truncated_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio, truncated at 1.2, times k2.

    Estimates: KL(π‖ref), biased.
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`; the bound adds bias off-policy.
    """
    return reduce(Truncate(1.2)(token_ratio(rollout)) * k2(_log_ratio(rollout)), rollout, "sequence")


@_cell(
    "forward-kl-token",
    "unknown",
    instead="stopped-ratio-k2-loss, or KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))",
)
def stopped_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k3.

    Estimates: KL(π‖ref) on the sampler's prefixes.
    Gradient: `forward-kl-token` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    return reduce(token_ratio(rollout) * k3(_log_ratio(rollout)), rollout, "sequence")


@_cell(
    "unknown",
    "unknown",
    instead="the token ratio: KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))",
)
def mean_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """The completion's geometric-mean ratio (GSPO's), broadcast onto every token's k3, both differentiated.

    Estimates: KL(π‖ref).
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    log_mean = (rollout.logp - rollout.sampler_logp).sum(-1, keepdim=True) / rollout.lengths[:, None].clamp(min=1)
    return reduce(exp_capped(log_mean) * k3(_log_ratio(rollout)), rollout, "sequence")


# --- in the reward ---


@_cell("reverse-kl-sequence", "squared-sequence")
def k1_reward(rollout: Rollout) -> Tensor:
    """k1 summed over the completion, on every token's score: RLHF's classic penalty.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `squared-sequence` off-policy.
    Requires: y ~ π.
    """
    return _in_reward(k1, rollout)


@_cell("reverse-kl-sequence", "unknown")
def k1_reward_to_go(rollout: Rollout) -> Tensor:
    """k1 of this and all later tokens, on the token's score.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _on_score(credit.to_go(rollout.log_ratio, rollout.mask), rollout)


@_cell("reverse-kl-token", "unknown")
def k1_advantage(rollout: Rollout) -> Tensor:
    """k1 of this token alone, on its score: on-policy distillation as commonly run (discount 0).

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _on_score(rollout.log_ratio, rollout)


@_cell("unknown", "unknown", instead="k1-reward, or KLTerm()")
def k2_reward(rollout: Rollout) -> Tensor:
    """k2 in the reward.

    Estimates: KL(π‖ref), biased.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _in_reward(k2, rollout)


@_cell("unknown", "unknown", instead="k1-reward, or KLTerm(estimator='k1_k3') for k3's low variance")
def k3_reward(rollout: Rollout) -> Tensor:
    """k3 in the reward: reverse minus forward KL for one token, which cancel near ref.

    Estimates: KL(π‖ref) of completions.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _in_reward(k3, rollout)


@_cell("reverse-kl-sequence", "unknown")
def k1_reward_leave_one_out(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the others in the group (RLOO).

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    total = rollout.log_ratio.sum(-1)
    return _on_score((total - credit.leave_one_out(total, rollout.group))[:, None], rollout)


@_cell("reverse-kl-sequence", "unknown", instead="k1-reward-leave-one-out, or KLTerm(baseline='leave_one_out')")
def k1_reward_group_mean(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the whole group, itself included.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy, at scale 1 - 1/n; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    total = rollout.log_ratio.sum(-1)
    return _on_score(_centred(total, rollout)[:, None], rollout)


@_cell("unknown", "unknown", instead="subtract β x KLTerm's coefficient from the advantage after the division")
def k1_reward_group_std(rollout: Rollout) -> Tensor:
    """k1 in the reward, centred and divided by the group's standard deviation (GRPO's advantage).

    Estimates: KL(π‖ref) of completions.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π; groups of 2 or more.
    """
    centred = _centred(rollout.log_ratio.sum(-1), rollout)
    squares, size = credit.group_total(centred.square(), rollout.group)
    deviation = (squares / (size - 1)).sqrt()
    return _on_score((centred / (deviation + STD_EPSILON))[:, None], rollout)


@_cell("unknown", "unknown", instead="KLTerm(discount=0.9): nothing subtracted per token", couples_groups=True)
def k1_token_mean_discounted(rollout: Rollout) -> Tensor:
    """k1 minus the batch's mean per token, then discounted: the subtracted mean pays for length.

    Estimates: KL(π‖ref), discounted.
    Gradient: `unknown` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    mean = reduce(rollout.log_ratio, rollout, "token")
    return _on_score(credit.to_go(rollout.log_ratio - mean, rollout.mask, DISCOUNT), rollout)


@_cell("reverse-kl-sequence", "unknown", instead="KLTerm(weighting=ImportanceWeighting('prefix', bound=None))")
def stale_k1_reward(rollout: Rollout) -> Tensor:
    """k1 of the *sampler* against ref, in the reward, under the sequence ratio: frozen at the old policy.

    Estimates: KL(μ‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: `behavior_logp`.
    """
    frozen = (rollout.sampler_logp - rollout.ref_logp).sum(-1, keepdim=True)
    return _on_score(sequence_ratio(rollout) * frozen, rollout)


# --- both: in the reward and as loss ---


@_cell("reverse-kl-sequence", "unknown")
def k1_both(rollout: Rollout) -> Tensor:
    """k1 in the reward and as loss: the loss adds noise of mean zero.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _in_reward(k1, rollout) + _as_loss(k1, rollout)


@_cell("reverse-kl-sequence", "unknown")
def k3_both(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, full weight each.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _in_reward(k3, rollout) + _as_loss(k3, rollout)


@_cell("reverse-kl-sequence", "unknown")
def k3_both_half(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, half weight each: half the strength.

    Estimates: KL(π‖ref) of completions.
    Gradient: `reverse-kl-sequence` on-policy, at scale 1/2; `unknown` off-policy.
    Requires: y ~ π.
    """
    return k3_both(rollout) / 2


@_cell("reverse-kl-token", "unknown")
def k3_both_token(rollout: Rollout) -> Tensor:
    """k3 of this token alone on its score, and as loss: coefficient l, with exp cancelling exp.

    Estimates: KL(π‖ref).
    Gradient: `reverse-kl-token` on-policy; `unknown` off-policy.
    Requires: y ~ π.
    """
    return _on_score(k3.value(rollout.log_ratio), rollout) + _as_loss(k3, rollout)


def _centred(per_sequence: Tensor, rollout: Rollout) -> Tensor:
    """Values minus their group's mean, themselves included."""
    total, size = credit.group_total(per_sequence, rollout.group)
    return per_sequence - total / size

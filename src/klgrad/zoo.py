r"""KL losses as found in published code and papers, sound or not, by name: for study and audit.

The estimator is differentiated as a loss, with or without a ratio to the sampler, its detached value is put on the
score, where policy-gradient training would put it, or both. Every cell takes a `Rollout` and returns a scalar: summed
over the completion and averaged over completions, unless its name says otherwise. Where a ratio is used it is π/μ. The
exponentials saturate; a trainer's own code may overflow where these do not.

A cell is estimator x placement x level x weighting. A test compares the gradient that each declares with the audit.
"""

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .core import credit
from .core.estimators import Estimator, exp_capped, k1, k2, k3, k_lambda
from .core.importance import ImportanceWeighting, Truncate, sequence_ratio, token_ratio
from .core.result import reduce
from .core.rollout import Rollout
from .core.term import KLTerm, Remedy
from .errors import UnknownNameError
from .targets import Descends, Verdict

__all__ = ["CELLS", "Cell", "get"]

# `Cell`, a named loss over a `Rollout`, and the decorators that make one of a function.

Loss = Callable[[Rollout], Tensor]


@dataclass(frozen=True)
class Cell:
    """A named loss over a `Rollout`.

    Attributes:
        name: the name that `klgrad.zoo.get` takes.
        loss: the scalar loss; its docstring states Estimates, Gradient and Requires.
        descends: which target's gradient it is, on-policy and off-policy.
        instead: the sound alternative, for advice; None where the cell is sound on-policy.
        couples_groups: whether a statistic of the batch makes the loss of one group depend on the others.
        compares_completions: whether the completions of a prompt are compared, so that a batch must hold whole groups
            and `Rollout.group` is needed.
        per_token: the loss of each token, (B, T), 0 where masked. `loss` is its sum over each completion's tokens,
            averaged over completions, so that a trainer may reduce it as it reduces its policy loss instead. None
            where the reduction is part of the loss.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, zoo
        >>> cell = zoo.get("k3-loss")
        >>> cell.descends.on_policy
        'forward-kl-token'
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> rollout = Rollout(logp, ref_logp=torch.tensor([[-1.0, -1.0]]), mask=torch.ones(1, 2))
        >>> cell.per_token(rollout)
        tensor([[0.0000, 0.7183]], grad_fn=<WhereBackward0>)
        >>> cell(rollout)
        tensor(0.7183, grad_fn=<DivBackward0>)
    """

    name: str
    loss: Loss
    descends: Descends
    instead: Remedy | None
    couples_groups: bool = False
    compares_completions: bool = False
    per_token: Loss | None = None

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.splitlines()[0] if self.doc else ""

    @property
    def doc(self) -> str:
        """The docstring of the loss."""
        return self.loss.__doc__ or ""

    def __call__(self, rollout: Rollout) -> Tensor:
        """Compute the scalar loss of one batch."""
        return self.loss(rollout)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle a cell of the zoo by name: its functions are closures, and trainers pickle their arguments."""
        if CELLS.get(self.name) is self:
            return get, (self.name,)
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


COMPLETIONS, SAMPLERS = "KL(π‖ref) of completions", "KL(π‖ref) on the sampler's prefixes"


def token_loss(
    on_policy: Verdict = "unknown",
    off_policy: Verdict = "unknown",
    *,
    estimates: str = "KL(π‖ref)",
    requires: str = "y ~ π",
    note: str = "",
    instead: Remedy | None = None,
    couples_groups: bool = False,
    compares_completions: bool = False,
    is_scalar: bool = False,
) -> Callable[[Loss], Cell]:
    """Make a cell of a function that returns the loss of each token, (B, T), or the scalar if `is_scalar`.

    Its docstring is completed by Estimates, Gradient and Requires; `note` is said of the gradient on-policy.
    """

    def make(function: Loss) -> Cell:
        def per_token(rollout: Rollout) -> Tensor:
            return torch.where(rollout.mask, function(rollout), 0)

        def summed(rollout: Rollout) -> Tensor:
            return reduce(per_token(rollout), rollout, "sequence")

        loss = function if is_scalar else summed
        loss.__doc__ = (
            f"{function.__doc__}\n\nEstimates: {estimates}.\n"
            f"Gradient: `{on_policy}` on-policy{note}; `{off_policy}` off-policy.\n"
            f"Requires: {requires}{'; groups of 2 or more' if compares_completions else ''}.\n"
        )
        descends, of_token = Descends(on_policy, off_policy), None if is_scalar else per_token
        return Cell(
            function.__name__.replace("_", "-"), loss, descends, instead, couples_groups, compares_completions, of_token
        )

    return make


batch_loss = partial(token_loss, is_scalar=True)
"""Make a cell of a function that returns the scalar, because its reduction is part of the loss."""


# The placements of an estimator, as losses per token, (B, T); the cells are made of these.


def log_ratio(rollout: Rollout) -> Tensor:
    """l_t with its gradient, for estimators that are differentiated."""
    return rollout.logp - rollout.ref_logp


def as_loss(estimator: Estimator | Callable[[Tensor], Tensor], rollout: Rollout) -> Tensor:
    """The estimator differentiated."""
    return estimator(log_ratio(rollout))


def on_score(coefficient: Tensor, rollout: Rollout) -> Tensor:
    """A detached coefficient on the score of each token, as policy-gradient training puts it there."""
    return coefficient.detach() * rollout.logp


def in_reward(estimator: Estimator, rollout: Rollout) -> Tensor:
    """The estimator's sum over the completion on the score of each of its tokens."""
    return on_score(credit.whole(estimator.value(rollout.log_ratio), rollout.mask), rollout)


def in_reward_leave_one_out(estimator: Estimator, rollout: Rollout) -> Tensor:
    """`in_reward`, minus the mean of the other completions of the group."""
    total = estimator.value(rollout.log_ratio).sum(-1)
    return on_score((total - credit.leave_one_out(total, rollout.group))[:, None], rollout)


def live_ratio(rollout: Rollout) -> Tensor:
    """π/μ of each token with its gradient, as `exp(logp - old_logp)` has in a trainer."""
    ratio = token_ratio(rollout)
    return ratio + ratio * (rollout.logp - rollout.logp.detach())


# What to use instead of the unsound cells, where several cells have the same replacement.

TOKEN = KLTerm(level="token")
TOKEN_RATIO = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None))
K2_OR_TOKEN = Remedy("for the reverse KL of each token", ("k2-loss", TOKEN), "KLTerm() is that of whole completions")
BOUNDED = Remedy(
    use=(KLTerm(level="token", influence_bound=5.0),),
    why="the reverse KL of each token; beyond the bound that you choose its pull is constant, and not 0",
)
SUMMED = Remedy(use=(TOKEN,), why="it sums over the completion: divide β by the mean length")
AFTER_DIVISION = Remedy(
    "divide the reward alone by its spread, then subtract β times KLTerm()(rollout).coefficient from the advantage"
)
LEAVE_ONE_OUT = Remedy(use=("k1-reward-leave-one-out", KLTerm(baseline="leave_one_out")))


# Estimators used as a loss: differentiated path-wise.

OUTPUT_CLAMP = 10.0
"""verl, SkyRL and OpenRLHF clamp a KL estimate's value to ±10, which also stops its gradient there."""


@token_loss("nothing", "climbs forward-kl-sampler-sequence", instead=K2_OR_TOKEN)
def k1_loss(rollout: Rollout) -> Tensor:
    """k1 differentiated."""
    return as_loss(k1, rollout)


@token_loss("reverse-kl-token", "squared-token", estimates="KL(π‖ref), biased")
def k2_loss(rollout: Rollout) -> Tensor:
    """k2 differentiated, token by token."""
    return as_loss(k2, rollout)


@token_loss("forward-kl-token", "k3-token", instead=K2_OR_TOKEN)
def k3_loss(rollout: Rollout) -> Tensor:
    """k3 differentiated, token by token: the KL of GRPO, which divides by each length too, and of several trainers."""
    return as_loss(k3, rollout)


@token_loss("forward-kl-token", "sum-of-targets", instead=K2_OR_TOKEN, note=", at scale 1/2")
def k_half_loss(rollout: Rollout) -> Tensor:
    """k_lambda at λ = 1/2 differentiated: half the strength for the same value."""
    return as_loss(k_lambda(0.5), rollout)


@token_loss(instead=K2_OR_TOKEN, estimates="E|l|, a bound on the reverse KL")
def abs_loss(rollout: Rollout) -> Tensor:
    """|l| differentiated."""
    return as_loss(torch.abs, rollout)


@token_loss(instead=BOUNDED, estimates="KL(π‖ref), cut off")
def k3_loss_clamped(rollout: Rollout) -> Tensor:
    """k3 with its value clamped at 10, differentiated: no gradient where log π/ref is below -2.61."""
    return as_loss(lambda x: k3(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@token_loss(instead=BOUNDED, estimates="KL(π‖ref), cut off")
def k2_loss_clamped(rollout: Rollout) -> Tensor:
    """k2 with its value clamped at 10, differentiated: no gradient where |l| > 4.47."""
    return as_loss(lambda x: k2(x).clamp(-OUTPUT_CLAMP, OUTPUT_CLAMP), rollout)


@token_loss("nothing", "nothing", instead=Remedy("differentiate it", ("k2-loss", TOKEN)))
def k3_no_grad(rollout: Rollout) -> Tensor:
    """k3 computed without gradient and added to the loss: logged, and nothing else."""
    return as_loss(k3, rollout).detach()


@token_loss("reverse-kl-token", "squared-token")
def k3_straight_through(rollout: Rollout) -> Tensor:
    """The value of k3 with the slope of k2 (verl's `k3+`)."""
    return as_loss(Estimator(k3.value, k2.slope), rollout)


@batch_loss(instead=SUMMED, estimates="KL(π‖ref) per token, completion by completion")
def k2_loss_length_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and divided by each completion's own length."""
    share = 1 / rollout.lengths.clamp(min=1)
    return reduce(share[:, None] * k2(log_ratio(rollout)), rollout, "sequence")


@batch_loss(
    "reverse-kl-token",
    "squared-token",
    instead=SUMMED,
    couples_groups=True,
    estimates="KL(π‖ref) per token",
    note=" (in large batches)",
)
def k2_loss_token_mean(rollout: Rollout) -> Tensor:
    """k2 differentiated and averaged over all tokens of the batch."""
    return reduce(k2(log_ratio(rollout)), rollout, "token")


@batch_loss("forward-kl-sequence", "unknown", estimates=COMPLETIONS)
def k3_sequence_loss(rollout: Rollout) -> Tensor:
    """k3 of the whole completion's log-ratio, differentiated."""
    return k3(log_ratio(rollout).sum(-1)).mean()


# The same, weighted by the ratio π/μ to the sampler.

ratio_loss = partial(token_loss, requires="`behavior_logp`")


@ratio_loss(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead=Remedy(use=(TOKEN_RATIO,), why="the same gradient, without the float32 error"),
    estimates=SAMPLERS,
    requires="`behavior_logp`. In float32 exp cancels against exp beyond |l| of about 16",
)
def ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Ratio times k3, both differentiated: the "unbiased" k3 of DeepSeek-V3.2, TRL's default."""
    return live_ratio(rollout) * k3(log_ratio(rollout))


@ratio_loss(
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    instead=Remedy(use=(TOKEN_RATIO,), why="the same gradient with less variance"),
    estimates=SAMPLERS,
)
def ratio_k1_loss(rollout: Rollout) -> Tensor:
    """Ratio times k1, both differentiated: coefficient r (l + 1)."""
    return live_ratio(rollout) * k1(log_ratio(rollout))


@ratio_loss(instead=Remedy("detach the ratio", ("stopped-ratio-k2-loss",)), estimates="KL(π‖ref), biased")
def ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Ratio times k2, both differentiated: coefficient r (l + l²/2)."""
    return live_ratio(rollout) * k2(log_ratio(rollout))


@ratio_loss("reverse-kl-token", "reverse-kl-token-sampler", estimates="KL(π‖ref), biased")
def stopped_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k2."""
    return token_ratio(rollout) * k2(log_ratio(rollout))


@ratio_loss(
    "reverse-kl-token",
    "unknown",
    estimates="KL(π‖ref), biased",
    requires="`behavior_logp`; the bound adds bias off-policy",
)
def truncated_ratio_k2_loss(rollout: Rollout) -> Tensor:
    """Detached ratio, truncated at 1.2, times k2."""
    return Truncate(1.2)(token_ratio(rollout)) * k2(log_ratio(rollout))


@ratio_loss(
    "forward-kl-token",
    "forward-kl-token-sampler",
    instead=Remedy(use=("stopped-ratio-k2-loss", TOKEN_RATIO)),
    estimates=SAMPLERS,
)
def stopped_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """Detached ratio times k3."""
    return token_ratio(rollout) * k3(log_ratio(rollout))


@ratio_loss(instead=Remedy("weight by the token ratio", (TOKEN_RATIO,), "the reverse KL"))
def mean_ratio_k3_loss(rollout: Rollout) -> Tensor:
    """The completion's geometric-mean ratio (GSPO's), broadcast onto every token's k3, both differentiated."""
    log_mean = (rollout.logp - rollout.sampler_logp).sum(-1, keepdim=True) / rollout.lengths[:, None].clamp(min=1)
    return exp_capped(log_mean) * k3(log_ratio(rollout))


# Estimators in the reward: the detached value on the score, where policy-gradient training would put it.

DISCOUNT = 0.9
"""Discount of the discounted cells."""

STD_EPSILON = 1e-4
"""Added to a group's standard deviation before dividing by it, as GRPO implementations do."""


@token_loss("reverse-kl-sequence", "squared-sequence", estimates=COMPLETIONS)
def k1_reward(rollout: Rollout) -> Tensor:
    """k1 summed over the completion, on every token's score: RLHF's classic penalty."""
    return in_reward(k1, rollout)


@token_loss("reverse-kl-sequence", "unknown", estimates=COMPLETIONS)
def k1_reward_to_go(rollout: Rollout) -> Tensor:
    """k1 of this and all later tokens, on the token's score."""
    return on_score(credit.to_go(rollout.log_ratio, rollout.mask), rollout)


@token_loss("reverse-kl-token", "squared-token")
def k1_advantage(rollout: Rollout) -> Tensor:
    """k1 of this token alone, on its score: on-policy distillation as commonly run (discount 0)."""
    return on_score(rollout.log_ratio, rollout)


@token_loss(instead=Remedy(use=("k1-reward", KLTerm())), estimates="KL(π‖ref), biased")
def k2_reward(rollout: Rollout) -> Tensor:
    """k2 in the reward."""
    return in_reward(k2, rollout)


@token_loss(
    "sum-of-targets",
    "unknown",
    instead=Remedy(use=("k1-reward", KLTerm(estimator="k1_k3")), why="k1_k3 has the low variance of k3"),
    estimates=COMPLETIONS,
)
def k3_reward(rollout: Rollout) -> Tensor:
    """k3 in the reward: reverse minus forward KL for one token, which cancel near ref."""
    return in_reward(k3, rollout)


@token_loss("reverse-kl-sequence", "sum-of-targets", compares_completions=True, estimates=COMPLETIONS)
def k1_reward_leave_one_out(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the others in the group (RLOO)."""
    return in_reward_leave_one_out(k1, rollout)


@token_loss("sum-of-targets", "unknown", instead=LEAVE_ONE_OUT, compares_completions=True, estimates=COMPLETIONS)
def k3_reward_leave_one_out(rollout: Rollout) -> Tensor:
    """k3 in the reward, minus the mean of the others in the group (RLOO)."""
    return in_reward_leave_one_out(k3, rollout)


@token_loss(
    "reverse-kl-sequence",
    "sum-of-targets",
    instead=LEAVE_ONE_OUT,
    compares_completions=True,
    estimates=COMPLETIONS,
    note=", at scale 1 - 1/n",
)
def k1_reward_group_mean(rollout: Rollout) -> Tensor:
    """k1 in the reward, minus the mean of the whole group, itself included."""
    total = rollout.log_ratio.sum(-1)
    return on_score(minus_group_mean(total, rollout)[:, None], rollout)


@token_loss(instead=AFTER_DIVISION, compares_completions=True, estimates=COMPLETIONS)
def k1_reward_group_std(rollout: Rollout) -> Tensor:
    """k1 in the reward, centred and divided by the group's standard deviation (GRPO's advantage)."""
    centred = minus_group_mean(rollout.log_ratio.sum(-1), rollout)
    squares, size = credit.group_total(centred.square(), rollout.group)
    deviation = (squares / (size - 1)).sqrt()
    return on_score((centred / (deviation + STD_EPSILON))[:, None], rollout)


@token_loss(
    instead=Remedy(use=(KLTerm(discount=0.9),), why="it subtracts nothing per token"),
    couples_groups=True,
    estimates="KL(π‖ref), discounted",
)
def k1_token_mean_discounted(rollout: Rollout) -> Tensor:
    """k1 minus the batch's mean per token, then discounted: the subtracted mean pays for length."""
    mean = reduce(rollout.log_ratio, rollout, "token")
    return on_score(credit.to_go(rollout.log_ratio - mean, rollout.mask, DISCOUNT), rollout)


@token_loss(
    "reverse-kl-sequence",
    "sum-of-targets",
    instead=Remedy(
        "for samples of an older policy too",
        (KLTerm(weighting=ImportanceWeighting("prefix", bound=None)),),
        "it takes log π/ref at the policy that is trained",
    ),
    estimates="KL(μ‖ref) of completions",
    requires="`behavior_logp`",
)
def stale_k1_reward(rollout: Rollout) -> Tensor:
    """k1 of the *sampler* against ref, in the reward, under the sequence ratio: frozen at the old policy."""
    frozen = (rollout.sampler_logp - rollout.ref_logp).sum(-1, keepdim=True)
    return on_score(sequence_ratio(rollout) * frozen, rollout)


def minus_group_mean(per_sequence: Tensor, rollout: Rollout) -> Tensor:
    """Values minus their group's mean, themselves included."""
    total, size = credit.group_total(per_sequence, rollout.group)
    return per_sequence - total / size


# Estimators in both places: in the reward and as a loss.


@token_loss("reverse-kl-sequence", "sum-of-targets", estimates=COMPLETIONS)
def k1_both(rollout: Rollout) -> Tensor:
    """k1 in the reward and as loss: the loss adds noise of mean zero."""
    return in_reward(k1, rollout) + as_loss(k1, rollout)


@token_loss("reverse-kl-sequence", "unknown", estimates=COMPLETIONS)
def k3_both(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, full weight each."""
    return in_reward(k3, rollout) + as_loss(k3, rollout)


@token_loss("reverse-kl-sequence", "unknown", estimates=COMPLETIONS, note=", at scale 1/2")
def k3_both_half(rollout: Rollout) -> Tensor:
    """k3 in the reward and as loss, half weight each: half the strength."""
    return (in_reward(k3, rollout) + as_loss(k3, rollout)) / 2


@token_loss("reverse-kl-token", "squared-token")
def k3_both_token(rollout: Rollout) -> Tensor:
    """k3 of this token alone on its score, and as loss: coefficient l, with exp cancelling exp."""
    return on_score(k3.value(rollout.log_ratio), rollout) + as_loss(k3, rollout)


@token_loss("reverse-kl-sequence", "unknown", compares_completions=True, estimates=COMPLETIONS)
def k3_both_leave_one_out(rollout: Rollout) -> Tensor:
    """k3 in the reward, minus the mean of the others in the group (RLOO), and as loss."""
    return in_reward_leave_one_out(k3, rollout) + as_loss(k3, rollout)


# All cells by name.

CELLS: dict[str, Cell] = {cell.name: cell for cell in list(globals().values()) if isinstance(cell, Cell)}
"""In the order of this file."""


def get(name: str) -> Cell:
    """Look up a cell.

    Args:
        name: its name, such as `k3-loss`.

    Returns:
        The cell.

    Raises:
        UnknownNameError: with near matches.

    Examples:
        >>> from klgrad import zoo
        >>> zoo.get("k1-reward").summary
        "k1 summed over the completion, on every token's score: RLHF's classic penalty."
    """
    if name not in CELLS:
        raise UnknownNameError("cell", name, CELLS)
    return CELLS[name]

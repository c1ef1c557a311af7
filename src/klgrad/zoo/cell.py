"""A cell: one KL loss with its name, source and verdicts; where its estimator is placed, and what to use instead."""

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import credit
from ..core.estimators import Estimator
from ..core.importance import ImportanceWeighting, token_ratio
from ..core.result import reduce
from ..core.rollout import Rollout
from ..core.term import KLTerm, Remedy
from ..targets import Descends, Verdict

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a cell of the zoo by name: its functions are closures, and trainers pickle their arguments."""
        from . import CELLS, get  # which imports this file

        if CELLS.get(self.name) is self:
            return get, (self.name,)
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def token_loss(
    on_policy: Verdict,
    off_policy: Verdict,
    *,
    instead: Remedy | None = None,
    couples_groups: bool = False,
    compares_completions: bool = False,
) -> Callable[[Loss], Cell]:
    """Make a cell of a function that returns the loss of each token, (B, T)."""

    def make(function: Loss) -> Cell:
        def per_token(rollout: Rollout) -> Tensor:
            return torch.where(rollout.mask, function(rollout), 0)

        def loss(rollout: Rollout) -> Tensor:
            return reduce(per_token(rollout), rollout, "sequence")

        per_token.__doc__ = loss.__doc__ = function.__doc__
        descends = Descends(on_policy, off_policy)
        return Cell(_name(function), loss, descends, instead, couples_groups, compares_completions, per_token)

    return make


def batch_loss(
    on_policy: Verdict, off_policy: Verdict, *, instead: Remedy | None = None, couples_groups: bool = False
) -> Callable[[Loss], Cell]:
    """Make a cell of a function that returns the scalar, because its reduction is part of the loss."""
    return lambda function: Cell(_name(function), function, Descends(on_policy, off_policy), instead, couples_groups)


def _name(function: Loss) -> str:
    return function.__name__.replace("_", "-")


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
K2_OR_TOKEN = Remedy(use=("k2-loss", TOKEN))
BOUNDED = Remedy(use=(KLTerm(level="token", influence_bound=5.0),), why="its coefficient is bounded and never zero")
SUMMED = Remedy(use=(TOKEN,), why="it sums over the completion")
AFTER_DIVISION = Remedy("subtract β times the coefficient of a KLTerm from the advantage after the division")
LEAVE_ONE_OUT = Remedy(use=("k1-reward-leave-one-out", KLTerm(baseline="leave_one_out")))

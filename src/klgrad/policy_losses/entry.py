"""`PolicyLoss`, a published policy loss, and the decorator that makes one of a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..targets import Verdict

PolicyGradientName = Literal["policy-gradient", "policy-gradient-sampler-prefixes", "policy-gradient-uncorrected"]
"""The policy gradients that a loss may have: see `klgrad.audit.whole.table` for what they mean."""

WholeVerdict = (
    Verdict
    | PolicyGradientName
    | Literal[
        "climbs policy-gradient",
        "climbs policy-gradient-sampler-prefixes",
        "climbs policy-gradient-uncorrected",
    ]
)
"""A verdict on one part of the update of a whole loss."""


class Does(NamedTuple):
    """What the advantages do in a loss.

    Attributes:
        drift_positive: under the advantage 1 for all completions.
        drift_negative: under the advantage -1 for all completions.
        policy_gradient: under advantages that differ.

    Example:
        >>> from klgrad import policy_losses
        >>> policy_losses.get("rloo").off_policy.policy_gradient
        'policy-gradient-uncorrected'
    """

    drift_positive: WholeVerdict
    drift_negative: WholeVerdict
    policy_gradient: WholeVerdict


RIGHT = Does("nothing", "nothing", "policy-gradient")
"""A policy gradient without drift, which is right."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss as published.

    Attributes:
        name: the name that `klgrad.policy_losses.get` takes.
        loss: the function; its parameters are named as the tensors of `klgrad.audit`, and it returns a scalar.
        source: where it was published.
        on_policy: what it does with samples of π.
        off_policy: what it does with samples of another policy.

    Example:
        >>> import torch
        >>> from klgrad import policy_losses
        >>> entry = policy_losses.get("reinforce")
        >>> logp, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> entry.loss(logp=logp, mask=mask, advantages=torch.full((1, 2), 0.5))
        tensor(1.5000)
    """

    name: str
    loss: Callable[..., Tensor]
    source: str
    on_policy: Does
    off_policy: Does

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.loss.__doc__ or "").split("\n")[0]


def policy_loss(
    source: str, *, off_policy: Does, on_policy: Does = RIGHT
) -> Callable[[Callable[..., Tensor]], PolicyLoss]:
    """Make a `PolicyLoss` of a function.

    Args:
        source: where the loss was published.
        off_policy: what it does with samples of another policy.
        on_policy: what it does with samples of π.

    Returns:
        A decorator. The entry is named as the function, with `-` for `_`.
    """
    return lambda function: PolicyLoss(function.__name__.replace("_", "-"), function, source, on_policy, off_policy)

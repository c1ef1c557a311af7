"""What a whole loss does, on-policy and off-policy."""

from dataclasses import asdict, dataclass

from ...policy_losses import PolicyGradientName, WholeVerdict
from .weighting import Weighting


@dataclass(frozen=True)
class Drift:
    """The update under a constant advantage, for which a right policy gradient is zero.

    Attributes:
        verdict: the divergence to the sampler that is descended or climbed, `nothing` or `unknown`.
        size: its length relative to the drift of the same loss without any correction, averaged over the problems;
            None where that is zero, as on-policy.
        towards_sampler: the mean cosine of the gradient with that of KL(sampler‖π) between completions: 1 pulls π to
            the sampler, and -1 pushes it away. None where there is no drift.
    """

    verdict: WholeVerdict
    size: float | None
    towards_sampler: float | None


@dataclass(frozen=True)
class Update:
    """The update under advantages that differ between completions.

    Attributes:
        verdict: a policy gradient, `nothing` or `unknown`.
        weighting: how the loss weights the advantages; None if the weights are not those of the advantages.
        bias: the relative distance to each policy gradient.
        cosine: the mean cosine with each.
    """

    verdict: WholeVerdict
    weighting: Weighting | None
    bias: dict[PolicyGradientName, float]
    cosine: dict[PolicyGradientName, float]


@dataclass(frozen=True)
class Side:
    """What a whole loss does with samples of one kind.

    Attributes:
        kl: the divergence that it descends at zero advantages.
        kl_in_words: the same as a noun phrase, as in the report of `klgrad audit`.
        positive: the drift under the advantage 1.
        negative: the drift under the advantage -1.
        update: the update under advantages that differ.
    """

    kl: WholeVerdict
    kl_in_words: str
    positive: Drift
    negative: Drift
    update: Update

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON: the four verdicts, and everything else in `details`."""
        details = {name: asdict(getattr(self, name)) for name in ("positive", "negative", "update")}
        return {
            "kl": self.kl,
            "drift_positive": self.positive.verdict,
            "drift_negative": self.negative.verdict,
            "policy_gradient": self.update.verdict,
            "details": {
                "drift_positive": details["positive"],
                "drift_negative": details["negative"],
                "policy_gradient": details["update"],
            },
        }


@dataclass(frozen=True)
class WholeResult:
    """The audit of a whole loss.

    Attributes:
        name: of the loss.
        summary: one line about it.
        source: where it was published; empty for other losses.
        on_policy: with samples of π.
        off_policy: with samples of another policy.

    Example:
        >>> from klgrad.audit.whole import audit_whole
        >>> found = audit_whole(lambda logp, mask, advantages: (-advantages * logp * mask).sum(-1).mean())
        >>> found.off_policy.positive.verdict
        'forward-kl-sampler-sequence'
        >>> found.off_policy.negative.verdict
        'climbs forward-kl-sampler-sequence'
        >>> found.off_policy.update.verdict
        'policy-gradient-uncorrected'
    """

    name: str
    summary: str
    source: str
    on_policy: Side
    off_policy: Side

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        sides = {"on_policy": self.on_policy.to_dict(), "off_policy": self.off_policy.to_dict()}
        return {"name": self.name, "source": self.source, "whole": sides}

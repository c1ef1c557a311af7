"""One record for each policy gradient that a loss may have."""

from dataclasses import dataclass

from ...policy_losses import PolicyGradientName


@dataclass(frozen=True)
class PolicyGradient:
    """A policy gradient, for advantages A that differ between completions.

    Attributes:
        name: in JSON.
        short: for the cell of a table.
        sentence: what the verdict means.
        formula: the direction of the update, which is minus the gradient of the loss; s_t is the gradient of
            log π of token t, and r_t is π/μ of token t.

    Example:
        >>> from klgrad.audit.whole import POLICY_GRADIENTS
        >>> POLICY_GRADIENTS["policy-gradient"].formula
        'E_π[A Σ_t s_t]'
    """

    name: PolicyGradientName
    short: str
    sentence: str
    formula: str


POLICY_GRADIENTS: dict[PolicyGradientName, PolicyGradient] = {
    target.name: target
    for target in (
        PolicyGradient(
            "policy-gradient",
            "the policy gradient",
            "The gradient of the expected advantage of the completions of π.",
            "E_π[A Σ_t s_t]",
        ),
        PolicyGradient(
            "policy-gradient-sampler-prefixes",
            "the policy gradient, on the sampler's prefixes",
            "Each token is weighted by its own ratio. The tokens before and after it are still those of the sampler.",
            "E_μ[A Σ_t r_t s_t]",
        ),
        PolicyGradient(
            "policy-gradient-uncorrected",
            "the policy gradient, uncorrected",
            "The completions of the sampler are used as if they were those of π.",
            "E_μ[A Σ_t s_t]",
        ),
    )
}
"""By name, simplest first: on-policy all three are equal, and the audit reports the first."""

"""The forward KL, KL(ref‖π), between completions and between tokens."""

from torch import Tensor

from ...targets import Verdict
from .. import credit
from ..estimators import forward_k3, k3
from ..importance import Weights
from ..rollout import Rollout
from .choices import Declaration
from .family import Contributions, Family
from .formula import SCORE, weight_symbols
from .table import ALLOWED, NO_FUTURE_TO_DISCOUNT, NO_SCORE_TO_CENTRE, Refusal, Table

REVERSE_COEFFICIENT = Refusal(
    "for the forward KL estimator='k3' (coefficient 1 - exp(-l)), or 'exact' at level='token'",
    "{!r}, whose coefficient l is the gradient of the reverse KL",
    "write estimator='k3', or divergence='reverse'",
)

ONE_RATIO_PER_COMPLETION = Refusal(
    "the sequence ratio for the forward KL at level='sequence'",
    "ratio={!r}",
    "write ImportanceWeighting('sequence', ...)",
)


class ForwardToken(Family):
    """KL(ref‖π) between distributions over one token, with the visited prefixes held fixed."""

    divergence = "forward"
    level = "token"
    target = "forward-kl-token"
    symbol = "KL(ref‖π)"
    full_kl_field = "token_forward_kl"

    table = Table(
        estimators={"k1": REVERSE_COEFFICIENT, "k1_k3": REVERSE_COEFFICIENT, "k3": ALLOWED, "exact": ALLOWED},
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "a ratio that covers the prefix, for the forward KL",
                "ratio={!r}",
                "write ImportanceWeighting('prefix', ...)",
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": NO_SCORE_TO_CENTRE},
        partial_discount=NO_FUTURE_TO_DISCOUNT,
    )

    def uncorrected_target(self, term: Declaration) -> Verdict:
        """A sum over the vocabulary samples no token, and so needs no ratio on the sampler's prefixes."""
        if term.weighting is not None or term.baseline != "none":
            return "unknown"
        return "forward-kl-token-sampler" if term.estimator == "exact" else "k3-token"

    def contributions(self, term: Declaration, rollout: Rollout) -> Contributions:
        """The slope of k3 on the token's own score."""
        return Contributions(k3.slope(rollout.log_ratio), None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The forward estimate of each token, summed."""
        return (weights.own * forward_k3.value(rollout.log_ratio)).sum(-1)

    def body(self, term: Declaration) -> str:
        """The token's own part."""
        if term.estimator == "exact":
            return super().body(term)
        return f"{weight_symbols(term).own}(1 - exp(-l_t)) {SCORE}"


class ForwardSequence(Family):
    """KL(ref‖π) between distributions over completions: one coefficient for all tokens of a completion."""

    divergence = "forward"
    level = "sequence"
    target = "forward-kl-sequence"
    symbol = "KL(ref‖π)"
    full_kl_field = "token_forward_kl"

    table = Table(
        estimators={
            "k1": REVERSE_COEFFICIENT,
            "k1_k3": REVERSE_COEFFICIENT,
            "k3": ALLOWED,
            "exact": Refusal(
                "estimator='k3' for the forward KL at level='sequence': it is -E_ref[score], which no sum over "
                "one token's vocabulary gives",
                "{!r}",
                "write estimator='k3', or level='token'",
            ),
        },
        ratios={
            None: ALLOWED,
            "token": ONE_RATIO_PER_COMPLETION,
            "prefix": ONE_RATIO_PER_COMPLETION,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": ALLOWED},
        partial_discount=Refusal(
            "discount=1 for the forward KL at level='sequence', whose coefficient is one for all tokens",
            "discount={}",
            "drop the discount, or level='token'",
        ),
    )

    def contributions(self, term: Declaration, rollout: Rollout) -> Contributions:
        """The slope of k3 at the completion's log-ratio, on every token's score."""
        return Contributions(k3.slope(credit.whole(rollout.log_ratio, rollout.mask)), None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The forward estimate at the completion's log-ratio."""
        return weights.own[:, 0] * forward_k3.value(rollout.log_ratio.sum(-1))

    def body(self, term: Declaration) -> str:
        """The completion's part."""
        return f"{weight_symbols(term).own}(1 - exp(-Σ_s l_s)) {SCORE}"

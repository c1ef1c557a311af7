"""The reverse KL, KL(π‖ref), between completions and between tokens."""

from torch import Tensor

from ...targets import Verdict
from ..estimators import k3
from ..importance import Weights
from ..rollout import Rollout
from .choices import Declaration
from .family import Contributions, Family
from .formula import SCORE, weight_symbols
from .table import ALLOWED, NO_FUTURE_TO_DISCOUNT, NO_SCORE_TO_CENTRE, Refusal, Table

NOT_K3 = Refusal(
    "for the reverse KL estimator='k1', 'k1_k3' or 'exact'",
    "{!r}, whose slope 1 - exp(-l) is the gradient of the forward KL",
    "write estimator='k1_k3' for k3's low variance with the reverse gradient, or divergence='forward' "
    "if that was meant; GRPO's term, for study, is zoo.get('k3-loss')",
)


class ReverseSequence(Family):
    """KL(π‖ref) between distributions over completions.

    The score of a token is paired with its own log-ratio and with the estimates of all later tokens.
    """

    divergence = "reverse"
    level = "sequence"
    target = "reverse-kl-sequence"
    symbol = "KL(π‖ref)"
    full_kl_field = "token_reverse_kl"

    table = Table(
        estimators={"k1": ALLOWED, "k1_k3": ALLOWED, "k3": NOT_K3, "exact": ALLOWED},
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "a ratio that covers the prefix, for the reverse KL at level='sequence'",
                "ratio={!r}, which leaves the sampler's prefixes in the expectation",
                "write ImportanceWeighting('prefix', ...), or level='token' for the target on the sampler's prefixes",
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": ALLOWED},
        partial_discount=ALLOWED,
    )

    def contributions(self, term: Declaration, rollout: Rollout) -> Contributions:
        """The log-ratio on the token's own score; on earlier scores the log-ratio (k1) or k3 (k1_k3)."""
        own = rollout.log_ratio
        return Contributions(own, own if term.estimator == "k1" else k3.value(own))

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The sum of what the tokens put on earlier scores, which is an estimate of their KL."""
        return (weights.own * (found.own if found.later is None else found.later)).sum(-1)

    def body(self, term: Declaration) -> str:
        """The token's own part, then the future."""
        weight = weight_symbols(term)
        future = " + Σ_{s>t} " + ("" if term.discount == 1 else f"{term.discount:g}^(s-t) ")
        if term.estimator == "exact":
            return f"{super().body(term)}{future}{weight.before_later}KL_s {SCORE}"
        paid = "l_s" if term.estimator == "k1" else "k3(l_s)"
        return f"({weight.own}l_t{future}{weight.own_later}{paid}) {SCORE}"


class ReverseToken(Family):
    """KL(π‖ref) between distributions over one token, with the visited prefixes held fixed.

    It is `ReverseSequence` without the future: discount 0.
    """

    divergence = "reverse"
    level = "token"
    target = "reverse-kl-token"
    symbol = "KL(π‖ref)"
    full_kl_field = "token_reverse_kl"

    table = Table(
        estimators={
            "k1": ALLOWED,
            "k1_k3": Refusal(
                "estimator='k1' or 'exact' at level='token' (discount=0), which has no future to put k3 on",
                "{!r}",
                "write estimator='k1', or level='sequence' with a discount above 0",
            ),
            "k3": NOT_K3,
            "exact": ALLOWED,
        },
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "no token ratio for an exact token term: a sum over the vocabulary needs none, and on stale samples "
                "the term without a ratio is the target on the sampler's prefixes",
                "ratio={!r}",
                "write weighting=None, or ImportanceWeighting('prefix', ...) for π's own prefixes",
                only_exact=True,
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": NO_SCORE_TO_CENTRE},
        partial_discount=NO_FUTURE_TO_DISCOUNT,
    )

    def off_policy_target(self, term: Declaration) -> Verdict:
        """The token ratio corrects the token and leaves the sampler's prefixes."""
        on_sampled_prefixes = term.weighting is not None and term.weighting.ratio == "token"
        return "reverse-kl-token-sampler" if on_sampled_prefixes else self.target

    def uncorrected_target(self, term: Declaration) -> Verdict:
        """A sum over the vocabulary samples no token, and so needs no ratio on the sampler's prefixes."""
        if term.weighting is not None or term.baseline != "none":
            return "unknown"
        return "reverse-kl-token-sampler" if term.estimator == "exact" else "squared-token"

    def contributions(self, term: Declaration, rollout: Rollout) -> Contributions:
        """The log-ratio on the token's own score."""
        return Contributions(rollout.log_ratio, None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The sum of the log-ratios."""
        return (weights.own * found.own).sum(-1)

    def body(self, term: Declaration) -> str:
        """The token's own part."""
        if term.estimator == "exact":
            return super().body(term)
        return f"({weight_symbols(term).own}l_t) {SCORE}"

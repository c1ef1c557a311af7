"""The KL to a teacher of which only the likeliest entries are known."""

from torch import Tensor

from ..core.importance import token_ratio
from ..core.rollout import Rollout
from ..kernels import TokenStatistics, TopEntries, lumped_kl, sampled_tail_kl
from .objective import Objective


def with_top_k_kl(
    found: TokenStatistics, best: TopEntries, objective: Objective, mask: Tensor, behavior_logp: Tensor | None
) -> TokenStatistics:
    """Add the declared divergence, over the teacher's likeliest entries and a tail, to the policy's statistics.

    Args:
        found: the policy's statistics, with its log-probs at the entries.
        best: the teacher's likeliest entries.
        objective: the divergence, the kind of tail, and the bound of its ratio.
        mask: (B, T) 1 for live tokens.
        behavior_logp: (B, T) log-probs of what sampled the tokens; None if the policy did.

    Returns:
        The statistics with `ref_logp` and the divergence filled in.
    """
    term = objective.term
    assert term is not None  # a loss of the zoo has no top k
    assert found.entries_logp is not None  # the question named them
    divergence = term.divergence
    if objective.tail == "lump":
        kl = lumped_kl(found.entries_logp, best.logp, divergence)
    else:
        ratio = _tail_ratio(objective, Rollout(found.logp, best.token_logp, mask, behavior_logp=behavior_logp))
        kl = sampled_tail_kl(
            found.entries_logp,
            best.logp,
            found.logp,
            best.token_logp,
            best.has_token,
            ratio=ratio,
            divergence=divergence,
        )
    name = "reverse_kl" if divergence == "reverse" else "forward_kl"
    return found._replace(ref_logp=best.token_logp, **{name: kl})


def _tail_ratio(objective: Objective, rollout: Rollout) -> Tensor | None:
    """(B, T) the ratio of the sampled token alone; None if it needs none.

    The term's own ratio covers the tokens before it (or, for a sequence ratio, the token too). A term without a ratio
    is right for the entries, which are summed over, but the sampled tail still needs its ratio.
    """
    sampler = objective.term.weighting if objective.term is not None else None
    if rollout.behavior_logp is None or (sampler is not None and sampler.ratio == "sequence"):
        return None
    ratio = token_ratio(rollout)
    return ratio if objective.tail_bound is None else objective.tail_bound(ratio)

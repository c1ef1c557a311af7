"""The KL of a teacher of which only its likeliest entries are looked at."""

from torch import Tensor

from ..core.importance import token_ratio
from ..core.rollout import Rollout
from ..kernels import TokenStatistics, TopEntries, lumped_kl, sampled_tail_kl
from .objective import Objective


def with_top_k_kl(
    found: TokenStatistics, best: TopEntries, objective: Objective, mask: Tensor, behavior_logp: Tensor | None
) -> TokenStatistics:
    """The statistics with the declared divergence, over the entries and a tail."""
    term = objective.term
    assert term is not None  # cells have no top k
    assert found.entries_logp is not None  # they were asked for
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
    """Of the sampled token alone: the term weighs what leads up to it, or, by a sequence's ratio, all of it.

    The entries need no ratio, so that a term without one says nothing of the tail's, which needs it all the same.
    """
    sampler = objective.term.weighting if objective.term is not None else None
    if rollout.behavior_logp is None or (sampler is not None and sampler.ratio == "sequence"):
        return None
    ratio = token_ratio(rollout)
    return ratio if objective.tail_bound is None else objective.tail_bound(ratio)

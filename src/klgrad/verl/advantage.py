"""The KL in the advantages: β times the term's coefficient is subtracted after verl has normalised them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..errors import RolloutError


def lowered_advantages(term: KLTerm, beta: float, rollout: Rollout, advantages: Tensor) -> Tensor:
    r"""(B, T) the advantages minus β times the coefficient of the term.

    Estimates:
        nothing: these are coefficients.
    Gradient:
        verl's policy loss with these advantages descends that of the term, times β, beside that of the reward, on the
        first update on a batch. Its ratio π/π_old is then 1, and no token is clipped.
    Requires:
        `rollout.logp` of the policy that the update starts from.

    Args:
        term: the term; with a weighting, `rollout.behavior_logp` is the sampler's.
        beta: β.
        rollout: the batch of the step.
        advantages: (B, T) as verl has normalised them.
    """
    live = rollout.mask.any(-1)
    if not bool(live.any()):
        return advantages
    coefficient = torch.zeros_like(rollout.logp)
    coefficient[live] = term(rows(rollout, live)).coefficient  # rows without a token are verl's padding
    return advantages - (beta * coefficient).to(advantages.dtype)


def rows(rollout: Rollout, chosen: Tensor) -> Rollout:
    """Some of the rows of a batch."""
    optional = ("group", "behavior_logp")
    more = {name: x[chosen] for name in optional if (x := getattr(rollout, name)) is not None}
    return Rollout(rollout.logp[chosen], rollout.ref_logp[chosen], rollout.mask[chosen], **more)


def check_one_row_per_session(keys: Sequence[str]) -> None:
    """Raise if a session has more than one row: leave-one-out would compare a completion with parts of itself.

    Args:
        keys: verl's keys of the rows, `{uid}_{session}_{index}`.
    """
    sessions = [key.rsplit("_", 1)[0] for key in keys]
    if len(set(sessions)) < len(sessions):
        repeated = next(s for s in sessions if sessions.count(s) > 1)
        raise RolloutError(
            "one row per session with baseline=leave_one_out",
            f"several rows of session {repeated}",
            "write baseline=none: the agent loop returns several trajectories, which are not independent",
        )

"""What the driver logs of each batch: every estimator with its error, the mismatch to the sampler, the ratios."""

from dataclasses import replace

from ..core.importance import ImportanceWeighting
from ..core.rollout import Rollout
from ..reports.divergence import kl_report, mismatch_report
from ..trainer_parts.kl_values import total_reverse_kl
from .advantage import rows
from .declaration import Declaration


def step_metrics(declaration: Declaration, beta: float, rollout: Rollout) -> dict[str, float]:
    """Metrics by name, under the names that `KLTrainer` logs on TRL.

    Args:
        declaration: the term.
        beta: the β of this step.
        rollout: the batch of the step, with the policy before the update as π.
    """
    if not bool(rollout.mask.any()):
        return {"kl/coef": beta}
    seen = rows(rollout, rollout.mask.any(-1))
    found = {"kl/coef": beta, **kl_report(seen).metrics()}
    if seen.behavior_logp is not None:
        mismatch = mismatch_report(seen.logp, seen.behavior_logp, seen.mask, group=seen.group).metrics()
        found["mismatch/log_ratio/abs_max"] = mismatch.pop("log_ratio/abs_max")
        found |= mismatch
    if weighting_of_step(declaration, seen) is not None:
        term = replace(declaration.term, baseline="none")
        found |= {name: float(x) for name, x in term(seen).diagnostics.items()}
    return found


def weighting_of_step(declaration: Declaration, rollout: Rollout) -> ImportanceWeighting | None:
    """The declared importance weights of the policy before the update.

    None where they are all 1: with sampler=old, and where the rollout engine's log-probs stand for the policy's. The
    workers log how they move.
    """
    known = declaration.settings.sampler == "rollout" and rollout.behavior_logp is not None
    return declaration.term.weighting if known else None


def step_kl(declaration: Declaration, rollout: Rollout) -> float | None:
    """KL(π‖ref) in the unit of `target`, for an adaptive β; None if no token is live."""
    if not bool(rollout.mask.any()):
        return None
    seen = rows(rollout, rollout.mask.any(-1))
    total = float(total_reverse_kl(seen, weighting_of_step(declaration, seen), exact=False))
    return total / (float(seen.lengths.sum()) if declaration.settings.target_unit == "token" else len(seen.mask))

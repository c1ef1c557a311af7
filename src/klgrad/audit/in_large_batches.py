"""`audit_in_large_batches`: the verdict on one kind of samples, for a loss whose calls take long."""

from dataclasses import dataclass
from typing import cast

from ..targets import TargetName, Verdict
from .at_every_size import AtEverySize, Holds, bias_by_batch
from .decomposition import Decomposition
from .large_batches import BATCH_SIZES, at_batch_size, limit_cases
from .measuring import measure
from .subject import as_subject


@dataclass(frozen=True)
class LargeBatchResult:
    """What one loss descends on one kind of samples, in large batches.

    Attributes:
        name: the name of the loss.
        verdict: as in `AuditResult`.
        holds: `always`, `large-batches`, or None if the verdict is `unknown`.
        scale_varies: whether the multiple of the target depends on the data, as in `AuditResult`.
        nearest: the target with the least bias in the limit of large batches.
        bias: relative distance to it in the limit.
        bias_by_batch: the same in batches of 2 and of 3 completions and in the `limit`, over the two problems that are
            enumerated at every size; empty if the loss has no single target that it descends at one scale.
        decomposition: the two targets whose sum the gradient is, or is nearly; None if one is enough.

    Example:
        >>> from klgrad import KLTerm
        >>> from klgrad.audit import audit_in_large_batches
        >>> result = audit_in_large_batches(KLTerm(level="token", reduction="token"))
        >>> result.verdict, result.holds
        ('reverse-kl-token', 'large-batches')
    """

    name: str
    verdict: Verdict
    holds: Holds | None
    scale_varies: bool
    nearest: TargetName
    bias: float
    bias_by_batch: dict[str, float]
    decomposition: Decomposition | None


def audit_in_large_batches(loss: object, *, on_policy: bool = True) -> LargeBatchResult:
    """Find what a loss descends in the limit of large batches, and how far batches of 2 and 3 completions are off it.

    This is the part of `audit` that decides its verdict, with a tenth of the calls: small batches are enumerated on the
    two smallest problems only, and there are no numerical probes. A verdict that only fails at probabilities,
    log-ratios or ratios beyond those of the limit's problems, as that of a loss with a distant dead zone, is found by
    `audit` alone.

    Args:
        loss: as for `audit`.
        on_policy: whether the samples are the policy's own, or those of another policy.

    Returns:
        The verdict, for which batches it holds, and the bias of small batches.

    Example:
        >>> from klgrad.audit import audit_in_large_batches
        >>> def token_mean(logp, ref_logp, mask):
        ...     return ((logp - ref_logp) ** 2 / 2 * mask).sum() / mask.sum()
        >>> result = audit_in_large_batches(token_mean)
        >>> result.verdict, result.holds
        ('reverse-kl-token', 'large-batches')
    """
    subject = as_subject(loss)
    small = [case for size in BATCH_SIZES for case in at_batch_size(size, on_policy=on_policy)]
    in_small = measure(subject, small, on_policy=on_policy)
    in_limit = measure(subject, limit_cases(on_policy), on_policy=on_policy)
    # Small batches have problems of the limit only, so that none has more than the limit.
    found = AtEverySize(in_small, in_limit, lambda: in_small)
    at_own_scales = found.limit.match_at_own_scales if found.scale_varies else None
    nearest = cast(TargetName, found.limit.nearest if at_own_scales is None else at_own_scales.target)
    return LargeBatchResult(
        name=subject.name,
        verdict=found.verdict,
        holds=found.holds,
        scale_varies=found.scale_varies,
        nearest=nearest,
        bias=found.limit.bias[nearest],
        bias_by_batch=bias_by_batch(found, nearest, lambda n: found.small.only(lambda c: c.group_size == n)),
        decomposition=found.decomposition,
    )

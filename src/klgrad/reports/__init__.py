"""Reports about a run: all KL estimators with standard errors, from one batch or from a stream of batches."""

from .divergence import (
    KLSums as KLSums,
    MismatchSums as MismatchSums,
    Report as Report,
    kl_report as kl_report,
    mismatch_report as mismatch_report,
)

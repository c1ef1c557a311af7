"""Find which divergence a loss descends, by summing over every outcome of small problems."""

from .audit_result import (
    AuditResult as AuditResult,
    LargeBatchResult as LargeBatchResult,
    audit_in_large_batches as audit_in_large_batches,
)
from .procedure import audit as audit
from .subject import Subject as Subject, catalogue as catalogue, load as load, load_every as load_every

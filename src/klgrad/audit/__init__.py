"""Find which divergence a loss descends, by summing over every outcome of small problems."""

from .audit_result import AuditResult as AuditResult
from .auditing import audit as audit
from .every_loss import load_every as load_every
from .in_large_batches import LargeBatchResult as LargeBatchResult, audit_in_large_batches as audit_in_large_batches
from .known_losses import catalogue as catalogue
from .loading import load as load
from .subject import Subject as Subject

"""Take a loss apart, and find which divergence it descends."""

from .procedure import AuditResult as AuditResult, audit as audit
from .subject import Subject as Subject, catalogue as catalogue, load as load, load_every as load_every

"""What does this loss really descend? Answered by summing over every outcome of small problems."""

from .catalogue import catalogue as catalogue
from .load import load as load
from .result import AuditResult as AuditResult
from .run import audit as audit
from .subject import Subject as Subject

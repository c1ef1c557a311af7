"""The objectives whose gradient a KL loss may have: one record each."""

from .names import Descends, Role, TargetName, Verdict
from .table import TARGETS, TO_REFERENCE, UNCORRECTED, WITH_GRADIENT, signed
from .target import Target

__all__ = [
    "TARGETS",
    "TO_REFERENCE",
    "UNCORRECTED",
    "WITH_GRADIENT",
    "Descends",
    "Role",
    "Target",
    "TargetName",
    "Verdict",
    "signed",
]

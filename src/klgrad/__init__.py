"""klgrad: KL terms that say what they differentiate, and an audit that proves it.

The core needs torch alone. `klgrad.audit` says which divergence any loss descends.
"""

from . import (
    _torch as _torch,
    audit as audit,
    cells as cells,
    credit as credit,
    estimators as estimators,
    exact as exact,
    importance as importance,
)
from .errors import KlgradError as KlgradError
from .importance import Clip as Clip, Mask as Mask, Truncate as Truncate
from .monitor import kl_report as kl_report, mismatch_report as mismatch_report
from .offpolicy import consistency_loss as consistency_loss, squared_sequence as squared_sequence
from .optima import forward_optimum as forward_optimum, reverse_optimum as reverse_optimum
from .result import KLResult as KLResult
from .rollout import Rollout as Rollout
from .term import KLTerm as KLTerm, OffPolicy as OffPolicy

__version__ = "0.1.0"

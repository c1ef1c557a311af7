"""klgrad: KL terms that declare what they differentiate, and an audit that verifies it.

The names here need torch alone, and it is imported when the first of them is used. Subpackages likewise:

- `klgrad.audit`: find out which divergence a loss descends;
- `klgrad.zoo`: KL losses found in published code and papers, sound or not;
- `klgrad.policy_losses`: policy losses as published, and what they do on stale samples;
- `klgrad.reports`: KL estimates of a run with standard errors;
- `klgrad.enumeration`: problems small enough to sum over, and the gradients of the targets on them;
- `klgrad.kernels`: exact KLs from hidden states, without storing the logits;
- `klgrad.logs`: analysis of the logs of a run (needs `klgrad[logs]`);
- `klgrad.testing`: `assert_descends`, an audit as an assertion in your tests;
- `klgrad.trl`: training with TRL (needs `klgrad[train]`);
- `klgrad.verl`: training with verl, which loads it as a plug-in;
- `klgrad.divergences`, `klgrad.estimators`, `klgrad.credit`, `klgrad.importance`: the parts that terms are made of.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import KlgradError

if TYPE_CHECKING:
    from . import audit, enumeration, kernels, logs, policy_losses, reports, testing, trl, verl, zoo
    from .core import credit, divergences, estimators, importance
    from .core.divergences import optimum
    from .core.importance import Clip, ImportanceWeighting, Mask, Truncate
    from .core.regularizers import consistency_loss, forward_optimum, reverse_optimum, squared_sequence
    from .core.result import KLResult
    from .core.rollout import Rollout
    from .core.term import KLTerm
    from .reports import kl_report, mismatch_report


__version__ = "0.2.0"

# torch warns where NumPy is not installed; nothing that needs torch alone uses NumPy. This is the first module of the
# package to be imported, so the filter is there before torch. A NumPy that is installed and fails is still reported.
warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy", UserWarning)

_SUBPACKAGES = {
    "audit": ".audit",
    "credit": ".core.credit",
    "divergences": ".core.divergences",
    "enumeration": ".enumeration",
    "estimators": ".core.estimators",
    "importance": ".core.importance",
    "kernels": ".kernels",
    "logs": ".logs",
    "policy_losses": ".policy_losses",
    "reports": ".reports",
    "testing": ".testing",
    "trl": ".trl",
    "verl": ".verl",
    "zoo": ".zoo",
}
"""The public subpackages, and where each is imported from when it is first used."""

_NAMES = {
    "Clip": ".core.importance",
    "ImportanceWeighting": ".core.importance",
    "KLResult": ".core.result",
    "KLTerm": ".core.term",
    "Mask": ".core.importance",
    "Rollout": ".core.rollout",
    "Truncate": ".core.importance",
    "consistency_loss": ".core.regularizers",
    "forward_optimum": ".core.regularizers",
    "kl_report": ".reports",
    "mismatch_report": ".reports",
    "optimum": ".core.divergences",
    "reverse_optimum": ".core.regularizers",
    "squared_sequence": ".core.regularizers",
}
"""The other public names, and the module that each is imported from when it is first used."""

__all__ = [
    "Clip",
    "ImportanceWeighting",
    "KLResult",
    "KLTerm",
    "KlgradError",
    "Mask",
    "Rollout",
    "Truncate",
    "audit",
    "consistency_loss",
    "credit",
    "divergences",
    "enumeration",
    "estimators",
    "forward_optimum",
    "importance",
    "kernels",
    "kl_report",
    "logs",
    "mismatch_report",
    "optimum",
    "policy_losses",
    "reports",
    "reverse_optimum",
    "squared_sequence",
    "testing",
    "trl",
    "verl",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        value = import_module(_SUBPACKAGES[name], __name__)
    elif name in _NAMES:
        value = getattr(import_module(_NAMES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

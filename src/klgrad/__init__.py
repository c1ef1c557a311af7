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

_HOMES = {
    "": "audit enumeration kernels logs policy_losses reports testing trl verl zoo",
    ".core": "credit divergences estimators importance",
    ".core.divergences": "optimum",
    ".core.importance": "Clip ImportanceWeighting Mask Truncate",
    ".core.regularizers": "consistency_loss forward_optimum reverse_optimum squared_sequence",
    ".core.result": "KLResult",
    ".core.rollout": "Rollout",
    ".core.term": "KLTerm",
    ".reports": "kl_report mismatch_report",
}
"""The public modules and names, by the module that each is in; it is imported when the name is first used."""

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
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_module = home in ("", ".core")
    value = import_module(f"{home}.{name}", __name__) if is_module else getattr(import_module(home, __name__), name)
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

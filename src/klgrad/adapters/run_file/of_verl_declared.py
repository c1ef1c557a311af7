"""verl with klgrad: the settings under `klgrad` of a configuration file, as a KL to audit."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ...targets import Verdict
from .run import Change, Part, as_type

if TYPE_CHECKING:
    from ...audit import Subject

PREFIX = "klgrad."
NUMBERS = {"influence_bound": 1.0, "target": 1.0}
"""Settings that are absent by default, with a value of their type."""


def has_declared(given: dict[str, Any]) -> bool:
    """Whether the file declares a KL under `klgrad`."""
    return any(name.startswith(PREFIX) for name in given)


def declared_part(given: dict[str, Any], mode: str) -> tuple[Part, list[Change], Verdict]:
    """The declared KL; what to change; and the divergence that it declares.

    Args:
        given: the settings of the file.
        mode: `loss_agg_mode`.
    """
    from ...verl.declaration import term_of
    from ...verl.settings import Settings

    types = {**asdict(Settings()), **NUMBERS}
    named = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
    node = {
        name: value if value is None else as_type(f"{PREFIX}{name}", value, types.get(name))
        for name, value in named.items()
    }
    found = term_of(node)
    reduction = "seq-mean-token-sum" if found.settings.reduction == "sequence" else mode
    settings = {name: value for name, value in node.items() if name not in ("coef", "target", "target_unit", "horizon")}
    changes = []
    if found.term.weighting is None:
        why = "the rollout engine differs from the policy, and more so on later updates"
        changes.append(Change(f"{PREFIX}ratio", "prefix", "none", why, optional=True))
    written = " ".join(f"{name}={value}" for name, value in {"placement": "loss", **settings}.items())
    name = f"verl klgrad {written} loss_agg_mode={reduction}"
    caveat = "Audited at the first update on a batch." if found.in_advantage else ""
    part = Part(
        "advantage" if found.in_advantage else "loss",
        name,
        float(found.settings.coef),
        partial(_subject, settings, reduction),
        caveat,
    )
    return part, changes, found.term.descends.on_policy


def _subject(settings: dict[str, Any], reduction: str) -> "Subject":
    from ..verl_declared import declared

    return declared(settings, reduction)

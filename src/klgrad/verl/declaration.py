"""From verl's configuration to what is trained: a `KLTerm`, its placement, and β."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.importance import ImportanceWeighting
from ..core.term import KLTerm
from ..errors import MeaningError
from ..trainer_parts.adaptive_beta import AdaptiveCoefficient
from ..trainer_parts.bound_text import bound_of
from .config_checks import check
from .settings import NODE, Settings, settings_of


@dataclass(frozen=True)
class Declaration:
    """What the settings under `klgrad` declare. It is sent to the workers, and compares by value.

    Attributes:
        term: the KL term.
        settings: the settings that it was made of.
        task_rewards: whether the policy loss is trained beside the KL; False for distillation without rewards.
    """

    term: KLTerm
    settings: Settings
    task_rewards: bool = True

    @property
    def in_advantage(self) -> bool:
        """Whether the driver subtracts the coefficient from the advantages."""
        return self.settings.placement == "advantage"

    @property
    def from_teacher(self) -> bool:
        """Whether the reference is the teacher of verl's distillation."""
        return self.settings.reference == "teacher"

    def beta(self) -> AdaptiveCoefficient:
        """β as the run starts."""
        return AdaptiveCoefficient(self.settings.coef, self.settings.target, self.settings.horizon)

    def __str__(self) -> str:
        s = self.settings
        beta = (
            f"β={s.coef:g}" if s.target is None else f"β={s.coef:g} at first, for {s.target:g} nats per {s.target_unit}"
        )
        formula = self.term.formula
        if s.reduction == "policy":
            formula = replace(formula, unit="reduced as loss_agg_mode reduces the policy loss")
        return f"{self.term.name} in the {s.placement}, {beta}: {formula}"


def declared(config: Any) -> Declaration:
    """Check verl's configuration, and read what it declares.

    Args:
        config: verl's whole configuration, an OmegaConf node or nested mappings.

    Raises:
        MeaningError: where settings contradict each other, or verl would change what they mean.
    """
    found = term_of(_node(config))
    check(config, found.term, found.settings)
    if not found.from_teacher:
        return found
    return Declaration(
        found.term, found.settings, bool(config["distillation"]["distillation_loss"]["use_task_rewards"])
    )


def term_of(node: Mapping[str, Any]) -> Declaration:
    """Read the node `klgrad` alone, without the rest of the configuration."""
    s = settings_of(node)
    bound = bound_of(str(s.ratio_bound), f"{NODE}.ratio_bound")
    fields: dict[str, Any] = {
        name: getattr(s, name) for name in ("divergence", "level", "estimator", "baseline", "influence_bound")
    }
    weighting = None if s.ratio == "none" else ImportanceWeighting(s.ratio, bound)  # pyright: ignore[reportArgumentType]
    return Declaration(KLTerm(**fields, discount=float(s.discount), weighting=weighting), s)


def _node(config: Any) -> Mapping[str, Any]:
    node = config.get(NODE)
    if node is None:
        raise MeaningError(
            f"the KL declared under `{NODE}`, because trainer.v1.trainer_mode asks for it",
            "no such settings",
            f"add +{NODE}.coef=0.05, for example, or use trainer.v1.trainer_mode=sync for no KL",
        )
    return node

"""From the fields of a `KLConfig` to the objective: a `KLTerm` or a loss of the zoo, and where it is placed."""

from dataclasses import dataclass, replace
from typing import Any

from ..core.families.formula import Formula
from ..core.importance import Bound, ImportanceWeighting
from ..core.term import KLTerm
from ..errors import MeaningError
from ..trainer_parts.bound_text import bound_of, written
from ..zoo import Cell
from . import config_checks as checks


@dataclass(frozen=True)
class Objective:
    """What is trained beside the reward: β times a KL term or a loss of the zoo.

    Attributes:
        term: the KL term, or None.
        cell: a whole loss of `klgrad.zoo`, or None.
        placement: `loss`, `advantage` or `reward`.
        reduction: `policy`, as TRL reduces the policy loss, or `sequence`.
        top_k: how many of the reference's likeliest entries an exact term sums over; None for all.
        tail: how the other entries are treated, `sampled` or `lump`.
        tail_bound: of the sampled tail's ratio.
    """

    term: KLTerm | None
    cell: Cell | None
    placement: str
    reduction: str
    top_k: int | None = None
    tail: str = "sampled"
    tail_bound: Bound | None = None

    @property
    def exact(self) -> bool:
        """Whether the hidden states of both models are needed."""
        return self.term is not None and self.term.estimator == "exact"

    @property
    def leaves_one_out(self) -> bool:
        """Whether the term has a leave-one-out baseline."""
        return self.term is not None and self.term.baseline == "leave_one_out"

    @property
    def compares_completions(self) -> bool:
        """Whether a loss of the zoo compares the completions of a prompt, and needs all of them."""
        return self.cell is not None and self.cell.compares_completions

    @property
    def needs_groups(self) -> bool:
        """Whether it has to be known which completions share a prompt."""
        return self.leaves_one_out or self.compares_completions

    @property
    def is_weighted(self) -> bool:
        """Whether the term has importance weights."""
        return self.term is not None and self.term.weighting is not None

    @property
    def formula(self) -> Formula | None:
        """The term's gradient in parts; None for a loss of the zoo."""
        if self.term is None:
            return None
        found = self.term.formula
        if self.top_k is None:
            return found
        tail = "the rest by the sampled token" if self.tail == "sampled" else "the rest as one entry, a lower bound"
        entries = f"KL over the reference's {self.top_k} likeliest entries, {tail}"
        return replace(found, notes=(*found.notes, entries))


def objective_of(config: Any) -> Objective:
    """Check the fields of a `KLConfig` together, and build its objective."""
    if config.beta != 0.0:
        raise MeaningError(
            "`beta` = 0, TRL's own KL off", f"beta={config.beta}", "use `kl_coef` instead; two KL terms would add up"
        )
    checks.together(config)
    checks.reference(config)
    checks.truncation(config)
    if config.kl_cell is not None:
        return Objective(None, checks.cell_of(config), "loss", config.kl_reduction)
    term = KLTerm(
        divergence=config.kl_divergence,
        level=config.kl_level,
        estimator=config.kl_estimator,
        discount=config.kl_discount,
        baseline=config.kl_baseline,
        weighting=None
        if config.kl_ratio == "none"
        else ImportanceWeighting(config.kl_ratio, bound_of(config.kl_ratio_bound)),
        influence_bound=config.kl_influence_bound,
    )
    checks.placement(config, term)
    checks.top_k(config)
    top_k, tail, bound = config.kl_top_k, config.kl_tail, bound_of(config.kl_ratio_bound)
    return Objective(term, None, config.kl_placement, config.kl_reduction, top_k, tail, bound)


def fields_of(term: KLTerm) -> dict[str, Any]:
    """The fields of a `KLConfig` that declare a term: the inverse of `objective_of`."""
    weighting = term.weighting
    return {
        "kl_divergence": term.divergence,
        "kl_level": term.level,
        "kl_estimator": term.estimator,
        "kl_discount": term.discount,
        "kl_baseline": term.baseline,
        "kl_influence_bound": term.influence_bound,
        **({} if weighting is None else {"kl_ratio": weighting.ratio, "kl_ratio_bound": written(weighting.bound)}),
    }

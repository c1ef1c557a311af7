"""From the fields of a `KLConfig` to a `KLTerm` or a cell, with everything refused that could not mean it."""

from dataclasses import dataclass, replace
from typing import Any

from .. import zoo as cells
from ..core.families.formula import Formula
from ..core.importance import Bound, Clip, ImportanceWeighting, Mask, Truncate
from ..core.term import KLTerm
from ..errors import MeaningError
from ..zoo import Cell
from . import config_checks as checks


@dataclass(frozen=True)
class Objective:
    """What is maximised beside the reward: -β times a term (or a cell), at a place."""

    term: KLTerm | None
    cell: Cell | None
    placement: str
    reduction: str
    top_k: int | None = None
    tail: str = "sampled"
    tail_bound: Bound | None = None

    @property
    def exact(self) -> bool:
        """Whether hidden states of both models are needed."""
        return self.term is not None and self.term.estimator == "exact"

    @property
    def formula(self) -> Formula | None:
        """The term's gradient in parts; None for a cell, which is a whole loss."""
        if self.term is None:
            return None
        found = self.term.formula
        if self.top_k is None:
            return found
        tail = "the rest by the sampled token" if self.tail == "sampled" else "the rest as one entry, a lower bound"
        entries = f"KL over the reference's {self.top_k} likeliest entries, {tail}"
        return replace(found, notes=(*found.notes, entries))


def objective_of(config: Any) -> Objective:
    """Check the fields and build."""
    if config.beta != 0.0:
        raise MeaningError(
            "`beta` = 0, TRL's own KL off", f"beta={config.beta}", "say `kl_coef` instead; two KL terms would add up"
        )
    checks.together(config)
    checks.reference(config)
    checks.truncation(config)
    if config.kl_cell is not None:
        checks.cell(config)
        return Objective(None, cells.get(config.kl_cell), "loss", "sequence")
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


def bound_of(text: str) -> Bound | None:
    """`truncate:2`, `clip:0.5:2`, `mask:0.5:2` or `none`."""
    kind, *numbers = text.split(":")
    kinds = {"truncate": (Truncate, 1), "clip": (Clip, 2), "mask": (Mask, 2)}
    if text == "none":
        return None
    try:
        make, count = kinds[kind]
        values = [float(x) for x in numbers]
        if len(values) != count:
            raise ValueError
    except (KeyError, ValueError):
        raise MeaningError(
            "`kl_ratio_bound` as truncate:MAX, clip:LOW:HIGH, mask:LOW:HIGH or none",
            repr(text),
            "write truncate:2, say",
        ) from None
    return make(*values)

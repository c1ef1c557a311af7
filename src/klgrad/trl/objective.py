"""From the fields of a `KLConfig` to a `KLTerm` or a cell, with everything refused that could not mean it."""

from dataclasses import dataclass
from typing import Any

from .. import cells
from ..cells import Cell
from ..errors import MeaningError
from ..importance import Bound, Clip, Mask, Truncate
from ..term import KLTerm, OffPolicy

TAILS = ("sampled", "lump")


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
    def formula(self) -> str:
        """One line."""
        if self.cell is not None:
            return f"{self.cell.name} (a cell for study): {self.cell.doc.splitlines()[0]}"
        if self.top_k is None:
            return str(self.term)
        tail = "the rest by the sampled token" if self.tail == "sampled" else "the rest as one entry, a lower bound"
        return f"{self.term}; KL over the reference's {self.top_k} likeliest entries, {tail}"


def objective_of(config: Any) -> Objective:
    """Check the fields and build."""
    if config.beta != 0.0:
        raise MeaningError(
            "`beta` = 0, TRL's own KL off", f"beta={config.beta}", "say `kl_coef` instead; two KL terms would add up"
        )
    _check_numbers(config)
    if config.kl_cell is not None:
        if config.kl_placement != "loss":
            raise MeaningError("`kl_placement`='loss' for a cell", repr(config.kl_placement), "a cell is a whole loss")
        return Objective(None, cells.get(config.kl_cell), "loss", "sequence")
    term = KLTerm(
        divergence=config.kl_divergence,
        level=config.kl_level,
        estimator=config.kl_estimator,
        discount=config.kl_discount,
        baseline=config.kl_baseline,
        sampler=None if config.kl_ratio == "none" else OffPolicy(config.kl_ratio, bound_of(config.kl_ratio_bound)),
        influence_bound=config.kl_influence_bound,
    )
    _check_placement(config, term)
    _check_lag(config, term)
    _check_top_k(config)
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


def _check_numbers(config: Any) -> None:
    if not config.kl_coef >= 0:
        raise MeaningError(
            "`kl_coef` >= 0", f"{config.kl_coef}", "a negative β would reward distance from the reference"
        )
    if config.kl_target is not None and not config.kl_target > 0:
        raise MeaningError("`kl_target` > 0", f"{config.kl_target}", "name the KL to hold, or None for a constant β")
    if config.kl_target is not None and not config.kl_coef > 0:
        raise MeaningError("`kl_coef` > 0 with `kl_target`", "0", "β is adapted by factors, and 0 has none")
    if config.kl_horizon < 1:
        raise MeaningError("`kl_horizon` >= 1", f"{config.kl_horizon}", "50, say")
    if config.rollout_lag < 0:
        raise MeaningError("`rollout_lag` >= 0", f"{config.rollout_lag}", "0 trains on fresh completions")
    if config.kl_baseline == "leave_one_out" and config.num_generations < 2:
        raise MeaningError(
            "`num_generations` >= 2 for leave-one-out", f"{config.num_generations}", "or kl_baseline='none'"
        )


def _check_placement(config: Any, term: KLTerm) -> None:
    if config.kl_placement == "loss":
        return
    if config.kl_placement not in ("advantage", "reward"):
        raise MeaningError("`kl_placement` loss, advantage or reward", repr(config.kl_placement), "loss is the default")
    if term.sampler is not None:
        raise MeaningError(
            f"no `kl_ratio` with kl_placement={config.kl_placement!r}",
            f"kl_ratio={config.kl_ratio!r}",
            "TRL multiplies advantages by a ratio of its own; kl_placement='loss' weighs the KL once",
        )
    if config.kl_placement == "reward" and (term.divergence, term.level, term.estimator) != (
        "reverse",
        "sequence",
        "k1",
    ):
        raise MeaningError(
            "reverse KL, sequence level, k1 for kl_placement='reward'",
            f"{term.name}",
            "a reward carries one number per completion; any other term belongs in the loss or the advantage",
        )
    if config.kl_placement == "reward" and (term.discount != 1 or term.baseline != "none" or term.influence_bound):
        raise MeaningError(
            "no discount, baseline or influence bound with kl_placement='reward'",
            f"{term.name}",
            "the group's mean is the baseline there; use kl_placement='advantage' for the rest",
        )


def _check_lag(config: Any, term: KLTerm) -> None:
    if config.rollout_lag and term.sampler is None and not config.rollout_lag_uncorrected:
        raise MeaningError(
            "`kl_ratio` with `rollout_lag`",
            "none",
            "the completions' sampler is no longer the policy: kl_ratio='prefix' corrects for it; "
            "rollout_lag_uncorrected=True studies what happens if nothing does",
        )


def _check_top_k(config: Any) -> None:
    if config.kl_top_k is None:
        return
    if config.kl_top_k < 1:
        raise MeaningError("`kl_top_k` >= 1", f"{config.kl_top_k}", "64, say, or none for the full vocabulary")
    if config.kl_estimator != "exact":
        raise MeaningError(
            "`kl_estimator`='exact' with `kl_top_k`",
            f"kl_estimator={config.kl_estimator!r}",
            "a sampled estimator looks at the sampled token alone; drop one of the two",
        )
    if config.kl_tail not in TAILS:
        raise MeaningError("`kl_tail` sampled or lump", repr(config.kl_tail), "sampled is unbiased")

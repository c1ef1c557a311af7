"""The objective of a run in words: what it maximises, how tokens are weighted, and what rescales β."""

from dataclasses import replace

from ...trl.config_checks import needs_no_weights, stale
from ..settings.run_config import Settings

PER_COMPLETION = "summed over each completion"
TOKEN_WEIGHTS = {
    "grpo": "averaged over each completion's tokens (loss_type grpo)",
    "sapo": "averaged over each completion's tokens (loss_type sapo)",
    "bnpo": "divided by the tokens of one forward pass (loss_type bnpo)",
    "dr_grpo": "divided by max_completion_length (loss_type dr_grpo)",
    "dapo": "divided by all tokens of the update (loss_type dapo)",
    "cispo": "divided by all tokens of the update (loss_type cispo)",
    "vespo": "divided by all tokens of the update (loss_type vespo)",
    "luspo": f"{PER_COMPLETION} (loss_type luspo)",
}
"""How TRL's policy loss weights a token; with kl_reduction='policy' the KL has the same weights."""


def objective(settings: Settings) -> str:
    """One line such as `E[reward] - 0.02 KL(π‖ref)`."""
    training = settings.training
    reward = "E[reward] - " if settings.rewarded else "-"
    beta = "β" if training.kl_target is not None else f"{training.kl_coef:g}"
    if training.objective.cell is not None:
        return f"{reward}{beta} x {training.kl_cell}, a cell for study"
    sides = ("π", "ref") if training.kl_divergence == "reverse" else ("ref", "π")
    return f"{reward}{beta} KL({sides[0]}‖{sides[1]})"


def formula(settings: Settings) -> str:
    """The gradient of the KL term, with the weights of its tokens."""
    objective = settings.training.objective
    found, why = objective.formula, stale(settings.training)
    if found is None or objective.term is None:
        assert objective.cell is not None  # an objective has a term or a cell
        return f"{objective.cell.name} (a cell for study): {objective.cell.summary} {reduction(settings)}"
    found = replace(found, unit=reduction(settings))
    if why is not None and needs_no_weights(objective.term):
        found = replace(
            found,
            where=" of the next token, at the prefixes of μ",
            sampler="μ",
            sampling=f"μ is what sampled the completions ({why})",
        )
    return str(found)


def reduction(settings: Settings) -> str:
    """How the KLs of the tokens are combined."""
    training = settings.training
    if training.kl_placement == "reward" or training.objective.reduction == "sequence":
        return PER_COMPLETION
    return TOKEN_WEIGHTS.get(str(training.loss_type), f"weighted as the policy loss ({training.loss_type})")


def scaling(settings: Settings) -> str | None:
    """How TRL's normalisation of rewards rescales β; None if it does not. A KL in the reward has a note instead."""
    training = settings.training
    divisor = {"group": "their group's", "batch": "the batch's"}.get(str(training.scale_rewards))
    if training.multi_objective_aggregation == "normalize_then_sum":
        divisor = "first each its group's and then the batch's"
    if divisor is None or not settings.rewarded or training.kl_placement == "reward":
        return None
    return f"rewards are divided by {divisor} standard deviation (scale_rewards), which rescales β against them"

"""What a run maximises, in words: the objective, how tokens are weighed, and what rescales β."""

from dataclasses import replace

from ..trl.config_checks import needs_no_weights, stale
from .settings import Settings

PER_COMPLETION = "summed over each completion"
WEIGHED = {
    "grpo": "averaged over each completion's tokens (loss_type grpo)",
    "sapo": "averaged over each completion's tokens (loss_type sapo)",
    "bnpo": "divided by the tokens of the batch (loss_type bnpo)",
    "dr_grpo": "divided by max_completion_length (loss_type dr_grpo)",
    "dapo": "divided by all tokens of the update (loss_type dapo)",
    "cispo": "divided by all tokens of the update (loss_type cispo)",
    "vespo": "divided by all tokens of the update (loss_type vespo)",
    "luspo": f"{PER_COMPLETION} (loss_type luspo)",
}
"""How TRL's policy loss weighs a token, and with kl_reduction='policy' the KL with it."""


def objective(settings: Settings) -> str:
    """One line: E[reward] - β KL, where and how."""
    training = settings.training
    reward = "E[reward] - " if rewarded(settings) else "-"
    beta = "β" if training.kl_target is not None else f"{training.kl_coef:g}"
    if training.objective.cell is not None:
        return f"{reward}{beta} x {training.kl_cell}, a cell for study"
    sides = ("π", "ref") if training.kl_divergence == "reverse" else ("ref", "π")
    return f"{reward}{beta} KL({sides[0]}‖{sides[1]})"


def rewarded(settings: Settings) -> bool:
    """A distillation is, only if that was asked for."""
    return settings.command == "train" or settings.run.reward is not None


def formula(settings: Settings) -> str:
    """The term's gradient, with the weights that its tokens really have."""
    objective = settings.training.objective
    found, why = objective.formula, stale(settings.training)
    if found is None or objective.term is None:
        assert objective.cell is not None  # an objective is one of the two
        return f"{objective.cell.name} (a cell for study): {objective.cell.summary}"
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
    """How the tokens' KL becomes one number."""
    training = settings.training
    if training.kl_placement == "reward" or training.objective.reduction == "sequence":
        return PER_COMPLETION
    return WEIGHED.get(str(training.loss_type), f"weighed as the policy loss ({training.loss_type})")


def scaling(settings: Settings) -> str | None:
    """What TRL's normalisation does to β against the reward; None where it does nothing."""
    training = settings.training
    whose = {"group": "their group's", "batch": "the batch's"}.get(str(training.scale_rewards))
    inside = training.kl_placement == "reward"
    if training.multi_objective_aggregation == "normalize_then_sum":
        whose = "first each its group's and then the batch's"
    if whose is None or not (rewarded(settings) or inside):
        return None
    if inside:
        return (
            f"rewards, with the KL in them, are divided by {whose} standard deviation (scale_rewards), and β with them"
        )
    return f"rewards are divided by {whose} standard deviation (scale_rewards), which rescales β against them"

"""The KL as parts of a loss: per token, for TRL to reduce, or summed."""

from torch import Tensor

from ..core.result import KLResult
from ..core.rollout import Rollout
from ..trainer_parts.kl_values import token_values
from ..zoo import Cell
from .objective import Objective


def own_rows(x: Tensor, own: slice, like: Tensor) -> Tensor:
    """This process' rows, cut to the length that they had before all processes' were padded to one length."""
    return x[own, : like.shape[1]]


def per_token_loss(objective: Objective, rollout: Rollout, result: KLResult, own: slice, logp: Tensor) -> Tensor | None:
    """The KL in value and the declared term in gradient, for each token of this process.

    Args:
        objective: what is trained.
        rollout: all processes' completions.
        result: the term's, of the rollout.
        own: this process' rows of the rollout.
        logp: (B, T) this process' log-probs, with their gradient.

    Returns:
        (B, T), or None if the advantages carry the whole term.
    """
    per_token = own_rows(result.per_token, own, logp)
    if objective.placement == "advantage":
        if not objective.exact:
            return None
        return per_token - own_rows(result.coefficient, own, logp) * (logp - logp.detach())
    assert objective.term is not None  # whose result this is
    return per_token + own_rows(token_values(objective.term, rollout), own, logp)


def summed_loss(per_token: Tensor | None, accumulation: int) -> Tensor | float:
    """Summed over each completion, averaged over the completions of an update."""
    return 0.0 if per_token is None else per_token.sum() / (len(per_token) * accumulation)


def per_token_cell(cell: Cell, rollout: Rollout, own: slice, logp: Tensor) -> Tensor | None:
    """(B, T) a loss of the zoo for each token of this process; None if its reduction is part of the loss."""
    return None if cell.per_token is None else own_rows(cell.per_token(rollout), own, logp)


def whole_cell(cell: Cell, rollout: Rollout, accumulation: int, processes: int) -> Tensor:
    """A loss of the zoo with its own reduction, of all processes' completions.

    It is a mean over the completions of all processes, and only this process' rows carry a gradient. Gradients and
    logged losses are averaged over processes: so the gradient is multiplied by their number, and the value is not.
    """
    value = cell(rollout) / accumulation
    return value + (processes - 1) * (value - value.detach())

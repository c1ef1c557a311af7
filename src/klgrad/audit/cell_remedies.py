"""What to use instead of the unsound losses of `klgrad.zoo`."""

from ..core.term import ImportanceWeighting, KLTerm
from ..remedies import Remedy
from ..zoo import Cell

TOKEN = KLTerm(level="token")
TOKEN_RATIO = KLTerm(level="token", weighting=ImportanceWeighting("token", bound=None))
BOUNDED = Remedy(use=(KLTerm(level="token", influence_bound=5.0),), why="its coefficient is bounded and never zero")
SUMMED = Remedy(use=(TOKEN,), why="it sums over the completion")

BY_CELL: dict[str, Remedy] = {
    **dict.fromkeys(("k1-loss", "k3-loss", "k-half-loss", "abs-loss"), Remedy(use=("k2-loss", TOKEN))),
    **dict.fromkeys(("k2-loss-clamped", "k3-loss-clamped"), BOUNDED),
    **dict.fromkeys(("k2-loss-length-mean", "k2-loss-token-mean"), SUMMED),
    "k3-no-grad": Remedy("differentiate it", ("k2-loss", TOKEN)),
    "ratio-k3-loss": Remedy(use=(TOKEN_RATIO,), why="the same gradient without cancellation"),
    "ratio-k1-loss": Remedy(use=(TOKEN_RATIO,), why="the same gradient with less variance"),
    "ratio-k2-loss": Remedy("detach the ratio", ("stopped-ratio-k2-loss",)),
    "stopped-ratio-k3-loss": Remedy(use=("stopped-ratio-k2-loss", TOKEN_RATIO)),
    "mean-ratio-k3-loss": Remedy("weight by the token ratio", (TOKEN_RATIO,)),
    "k2-reward": Remedy(use=("k1-reward", KLTerm())),
    "k3-reward": Remedy(use=("k1-reward", KLTerm(estimator="k1_k3")), why="k1_k3 has the low variance of k3"),
    "k1-reward-group-mean": Remedy(use=("k1-reward-leave-one-out", KLTerm(baseline="leave_one_out"))),
    "k1-reward-group-std": Remedy("subtract β times the coefficient of a KLTerm from the advantage after the division"),
    "k1-token-mean-discounted": Remedy(use=(KLTerm(discount=0.9),), why="it subtracts nothing per token"),
    "stale-k1-reward": Remedy(use=(KLTerm(weighting=ImportanceWeighting("prefix", bound=None)),)),
}


def remedy_for(cell: Cell) -> Remedy | None:
    """The remedy for a cell, or None for a sound one; a cell without a record has the text of `Cell.instead`."""
    return BY_CELL.get(cell.name, Remedy(cell.instead)) if cell.instead else None

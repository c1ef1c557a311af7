r"""KL losses as found in published code and papers, sound or not, by name: for study and audit.

A cell is estimator x placement x level x weighting. There is one file per placement:

- `as_loss`: the estimator is differentiated (path-wise);
- `weighted_loss`: the same, weighted by a ratio to the sampler;
- `in_reward`: its detached value is put on the score, where policy-gradient training would;
- `in_both`: both.

Each docstring's Gradient line is compared with the audit by a test.

Every cell takes a `Rollout` and returns a scalar: summed over the completion and averaged over completions, unless its
name says otherwise. Where a ratio is used it is π/μ. The exponentials saturate; a trainer's own code may overflow where
these do not.
"""

from types import ModuleType

from ..errors import UnknownNameError
from . import as_loss, in_both, in_reward, weighted_loss
from .cell import Cell as Cell


def _cells_of(module: ModuleType) -> dict[str, Cell]:
    """The cells that the file defines, in its order."""
    return {cell.name: cell for cell in vars(module).values() if isinstance(cell, Cell)}


CELLS: dict[str, Cell] = {
    name: cell for module in (as_loss, weighted_loss, in_reward, in_both) for name, cell in _cells_of(module).items()
}
"""All cells by name."""


def get(name: str) -> Cell:
    """Look up a cell.

    Args:
        name: its name, such as `k3-loss`.

    Returns:
        The cell.

    Raises:
        UnknownNameError: with near matches.

    Examples:
        >>> from klgrad import zoo
        >>> zoo.get("k1-reward").summary
        "k1 summed over the completion, on every token's score: RLHF's classic penalty."
    """
    if name not in CELLS:
        raise UnknownNameError("cell", name, CELLS)
    return CELLS[name]

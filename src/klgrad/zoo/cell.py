"""`Cell`, a named loss over a `Rollout`, and the decorators that make one of a function."""

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.result import reduce
from ..core.rollout import Rollout
from ..remedies import Remedy
from ..targets import Descends, Verdict

Loss = Callable[[Rollout], Tensor]


@dataclass(frozen=True)
class Cell:
    """A named loss over a `Rollout`.

    Attributes:
        name: the name that `klgrad.zoo.get` takes.
        loss: the scalar loss; its docstring states Estimates, Gradient and Requires.
        descends: which target's gradient it is, on-policy and off-policy.
        instead: the sound alternative, for advice; None where the cell is sound on-policy.
        couples_groups: whether a statistic of the batch makes the loss of one group depend on the others.
        compares_completions: whether the completions of a prompt are compared, so that a batch must hold whole groups
            and `Rollout.group` is needed.
        per_token: the loss of each token, (B, T), 0 where masked. `loss` is its sum over each completion's tokens,
            averaged over completions, so that a trainer may reduce it as it reduces its policy loss instead. None
            where the reduction is part of the loss.

    Examples:
        >>> import torch
        >>> from klgrad import Rollout, zoo
        >>> cell = zoo.get("k3-loss")
        >>> cell.descends.on_policy
        'forward-kl-token'
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> rollout = Rollout(logp, ref_logp=torch.tensor([[-1.0, -1.0]]), mask=torch.ones(1, 2))
        >>> cell.per_token(rollout)
        tensor([[0.0000, 0.7183]], grad_fn=<WhereBackward0>)
        >>> cell(rollout)
        tensor(0.7183, grad_fn=<DivBackward0>)
    """

    name: str
    loss: Loss
    descends: Descends
    instead: Remedy | None
    couples_groups: bool = False
    compares_completions: bool = False
    per_token: Loss | None = None

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.splitlines()[0] if self.doc else ""

    @property
    def doc(self) -> str:
        """The docstring of the loss."""
        return self.loss.__doc__ or ""

    def __call__(self, rollout: Rollout) -> Tensor:
        """Compute the scalar loss of one batch."""
        return self.loss(rollout)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a cell of the zoo by name: its functions are closures, and trainers pickle their arguments."""
        from . import CELLS, get  # which imports this file

        if CELLS.get(self.name) is self:
            return get, (self.name,)
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]


def token_loss(
    on_policy: Verdict,
    off_policy: Verdict,
    *,
    instead: Remedy | None = None,
    couples_groups: bool = False,
    compares_completions: bool = False,
) -> Callable[[Loss], Cell]:
    """Make a cell of a function that returns the loss of each token, (B, T)."""

    def make(function: Loss) -> Cell:
        def per_token(rollout: Rollout) -> Tensor:
            return torch.where(rollout.mask, function(rollout), 0)

        def loss(rollout: Rollout) -> Tensor:
            return reduce(per_token(rollout), rollout, "sequence")

        per_token.__doc__ = loss.__doc__ = function.__doc__
        descends = Descends(on_policy, off_policy)
        return Cell(_name(function), loss, descends, instead, couples_groups, compares_completions, per_token)

    return make


def batch_loss(
    on_policy: Verdict, off_policy: Verdict, *, instead: Remedy | None = None, couples_groups: bool = False
) -> Callable[[Loss], Cell]:
    """Make a cell of a function that returns the scalar, because its reduction is part of the loss."""
    return lambda function: Cell(_name(function), function, Descends(on_policy, off_policy), instead, couples_groups)


def _name(function: Loss) -> str:
    return function.__name__.replace("_", "-")

"""Our term in the place of TRL's KL, so that TRL's own code weighs, reduces and accumulates it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Inserted:
    """What TRL takes for its β: it multiplies it with its own KL, token by token, and is given this instead."""

    def __init__(self, per_token: Tensor) -> None:
        self.per_token = per_token

    def __ne__(self, other: object) -> bool:
        """It is not 0, which would be no KL."""
        return True

    def __mul__(self, other: Tensor) -> Tensor:
        """(B, T); what TRL computed of its reference is dropped."""
        return self.per_token


@contextmanager
def inserted(trainer: Any, per_token: Tensor | None) -> Iterator[None]:
    """While TRL computes a loss, add this to it, per token and before it is reduced."""
    if per_token is None:
        yield
        return
    trainer.beta = Inserted(per_token)
    try:
        yield
    finally:
        trainer.beta = 0.0
        trainer._metrics["train" if trainer.model.training else "eval"].pop("kl", None)  # of the reference dropped

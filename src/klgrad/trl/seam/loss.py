"""Our term in the place of TRL's KL, so that TRL's own code reduces and accumulates it.

Touches `GRPOTrainer.beta` and `GRPOConfig.beta`, which stay 0 except inside the functions of this file, and
`GRPOTrainer._metrics`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from .state import current_mode
from .version import ContractError


class StandInBeta:
    """Stand-in for `beta`: `beta * per_token_kl` returns our term, and `beta != 0.0` is true."""

    def __init__(self, per_token: Tensor) -> None:
        self.per_token = per_token
        self.uses = 0

    def __ne__(self, other: object) -> bool:
        """True: TRL adds a KL unless `beta` is 0."""
        return True

    def __mul__(self, other: Tensor) -> Tensor:
        """(B, T) our term; `other`, TRL's own KL, is dropped."""
        self.uses += 1
        return self.per_token


@contextmanager
def add_to_loss(trainer: GRPOTrainer, per_token: Tensor | None) -> Iterator[None]:
    """While TRL computes a loss, add (B, T) `per_token` to it, before TRL reduces it; None adds nothing."""
    if per_token is None:
        yield
        return
    given: Any = StandInBeta(per_token)
    trainer.beta = given
    try:
        yield
    finally:
        trainer.beta = 0.0
        trainer._metrics[current_mode(trainer)].pop("kl", None)  # TRL's own KL, which was dropped
    if given.uses != 1:
        raise ContractError("one product `beta * per_token_kl` in TRL's loss", f"{given.uses}")


@contextmanager
def reference_is_built(args: GRPOConfig, wanted: bool) -> Iterator[None]:
    """While TRL sets up a trainer, make it load and prepare a reference model, as it does for `beta` > 0, or not."""
    args.beta = 1.0 if wanted else 0.0
    try:
        yield
    finally:
        args.beta = 0.0


@contextmanager
def reference_is_scored(trainer: GRPOTrainer, wanted: bool) -> Iterator[None]:
    """While TRL scores completions, make it compute their log-probs by the reference too, or not."""
    trainer.beta = 1.0 if wanted else 0.0
    try:
        yield
    finally:
        trainer.beta = 0.0

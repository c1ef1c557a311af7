"""How TRL's loss weighs each token, asked of TRL: no reduction is written here a second time."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

PLAIN = {
    "use_vllm": False,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "_entropy_bonus_enabled": False,
    "aux_loss_enabled": False,
    "epsilon_high": 1e6,
}
"""What must not touch the weights: corrections, bonuses and clips of the policy loss (CISPO's caps the ratio)."""


def weights(trainer: Any, model: Any, inputs: dict[str, Any], logp: Tensor) -> Tensor:
    """(B, T): what the loss is multiplied with per token, by loss type, lengths and gradient accumulation.

    At ratio 1 and advantage -1 every loss type has the slope +1 on each token's log-prob, before it is reduced. So
    the gradient of the loss towards the log-probs is the reduction's weights.
    """
    probe = logp.detach().clone().requires_grad_()
    ones = -torch.ones_like(probe)
    asked = {k: v for k, v in inputs.items() if k not in ("old_per_token_logps", "importance_sampling_ratio")}
    with torch.enable_grad(), _plain(trainer), trainer.answering(probe):
        loss = GRPOTrainer._compute_loss(trainer, model, {**asked, "advantages": ones})
        (found,) = torch.autograd.grad(loss, probe)
    return found


class Alone:
    """An accelerator that talks to nobody: what TRL gathers is for its metrics, and these are not wanted here."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, x: Tensor) -> Tensor:
        """This process' own."""
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """Likewise."""
        return x


@contextmanager
def _plain(trainer: Any) -> Iterator[None]:
    before = {name: getattr(trainer, name) for name in (*PLAIN, "_metrics", "beta", "accelerator")}
    for name, value in PLAIN.items():
        setattr(trainer, name, value)
    trainer.accelerator = Alone(trainer.accelerator)
    trainer._metrics, trainer.beta = {mode: defaultdict(list) for mode in ("train", "eval")}, 0.0
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)

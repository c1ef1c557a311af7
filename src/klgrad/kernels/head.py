"""An output head: what makes logits of hidden states, by whichever model."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError

MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names under which transformers' configs multiply the logits; `logits_scaling` divides them, but for one family."""


class Transform(NamedTuple):
    """What happens to a raw logit x, in this order: x·scale, then cap·tanh(x / cap), then x / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply(self, raw: Tensor) -> Tensor:
        """Logits, from what the matrix product and the bias give."""
        z = raw * self.scale if self.scale != 1 else raw
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature if self.temperature != 1 else z

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of `apply`, told from what it returned."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        return slope * (1 - (logits * (self.temperature / self.softcap)) ** 2)


def check_positive(**given: float | None) -> None:
    """Each is, where it was given at all."""
    for name, value in given.items():
        if value is not None and not value > 0:
            raise KernelInputError(f"`{name}` > 0", f"{value!r}", "greedy sampling has no distribution to compare")


@dataclass(frozen=True, eq=False)
class Head:
    """Logits are `softcap(scale · (hidden @ weight.T + bias)) / temperature`.

    Args:
        weight: (V, H), as `torch.nn.Linear` holds it.
        bias: (V,) or None.
        temperature: the one that the tokens were sampled at, for both models alike.
        softcap: cap·tanh(x / cap) on the logits, as Gemma has it; None for no cap.
        scale: what the raw logits are multiplied by, as Cohere and Granite have it.
    """

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise KernelInputError(
                "a head `weight` of shape (V, H)", f"shape {tuple(self.weight.shape)}", "pass `lm_head.weight`"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise KernelInputError(
                f"a head `bias` of shape ({self.weight.shape[0]},)", f"shape {tuple(self.bias.shape)}", "one per token"
            )
        check_positive(temperature=self.temperature, softcap=self.softcap)

    @property
    def transform(self) -> Transform:
        """The element-wise part."""
        return Transform(self.scale, self.softcap, self.temperature)

    @property
    def vocabulary(self) -> int:
        """How many tokens it scores."""
        return self.weight.shape[0]

    @classmethod
    def of(cls, model: Any, temperature: float = 1.0) -> "Head":
        """The head of a transformers model, with the soft-cap and the scale that its config names."""
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = math.prod(getattr(config, name, None) or 1.0 for name in MULTIPLIERS)
        divided = getattr(config, "logits_scaling", None) or 1.0
        scale = scale * divided if config.model_type == "hyperclovax" else scale / divided
        return cls(
            layer.weight,
            getattr(layer, "bias", None),
            temperature=temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=scale,
        )

"""An output head: what makes logits of hidden states, by whichever model."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError


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
        for name in ("temperature", "softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise KernelInputError(f"`{name}` > 0", f"{value!r}", "greedy sampling has no distribution to compare")

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
        layer = model.get_output_embeddings()
        config = model.config
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        divided = getattr(config, "logits_scaling", None)
        return cls(
            layer.weight,
            getattr(layer, "bias", None),
            temperature=temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=scale / float(divided or 1.0),
        )

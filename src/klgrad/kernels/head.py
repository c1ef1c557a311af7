"""An output head: what makes logits of hidden states, by whichever model."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError
from .model_families import numbers_of, output_layer


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


def check_transform(temperature: float, softcap: float | None = None, scale: float = 1.0) -> None:
    """Each is a positive, finite number; only the soft-cap may be None."""
    remedies = {
        "temperature": "pass the temperature that the tokens were sampled at; greedy sampling, at temperature 0, has "
        "no distribution to compare",
        "softcap": "pass the c of c·tanh(x / c), as the model's config has it, or None for no cap",
        "scale": "pass the factor of the raw logits, or 1 for none",
    }
    for name, value in (("temperature", temperature), ("softcap", softcap), ("scale", scale)):
        if value is not None and not 0 < value < math.inf:
            raise KernelInputError(f"`{name}` > 0 and finite", f"{value!r}", remedies[name])


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
        check_transform(self.temperature, self.softcap, self.scale)

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
        """The head of a transformers model, with the soft-cap and the scale that its family applies.

        A family that does something else with its logits is refused (`kernels/model_families.py`). One that this
        package does not know is taken to apply what its config names: `check_head` compares the result with the model's
        own logits.
        """
        layer, found = output_layer(model), numbers_of(model.config)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if found.vocabulary is not None and found.vocabulary < len(weight):
            weight, bias = weight[: found.vocabulary], None if bias is None else bias[: found.vocabulary]
        return cls(weight, bias, temperature=temperature, softcap=found.softcap, scale=found.scale)


LEAST_DIFFERENCE = 1e-3
"""How far logits may differ, relative to their size, in any dtype: what products in TF32 differ by."""


@torch.no_grad()
def check_head(head: Head, hidden: Tensor, logits: Tensor) -> None:
    """Raise an error if the head makes other log-probs than the model itself.

    A soft-cap far above the size of the logits changes them by less than their rounding, and cannot be seen.

    Args:
        head: the head to check, at any temperature.
        hidden: (..., H) last hidden states of a small batch, after the final norm.
        logits: (..., V) the model's own logits of the same positions, at temperature 1.
    """
    own = logits[..., : head.vocabulary].to(torch.promote_types(logits.dtype, torch.float32))
    wide = lambda x: x.to(own.dtype)
    raw = wide(hidden) @ wide(head.weight).T
    made = replace(head, temperature=1.0).transform.apply(raw if head.bias is None else raw + wide(head.bias))
    if made.shape != own.shape:
        raise KernelInputError(
            f"logits of shape {tuple(made.shape)}", f"shape {tuple(own.shape)}", "pass those of the same hidden states"
        )
    size = float(own.square().mean().sqrt())
    off = float((made.log_softmax(-1) - own.log_softmax(-1)).square().mean().sqrt())
    if not off <= max(torch.finfo(logits.dtype).eps, LEAST_DIFFERENCE) * max(size, 1e-3):
        raise KernelInputError(
            f"the head's log-probs to be those of the model's own logits (of size {size:.3g})",
            f"a root mean square difference of {off:.3g}",
            "the model scales, caps or transforms its logits in a way that this head does not: pass a Head with the "
            "right weight, scale and softcap, and hidden states after the final norm, or use a sampled estimator",
        )

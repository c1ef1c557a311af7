"""The output head of a model, which computes logits from hidden states."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError
from .model_families import numbers_of, output_layer


class Transform(NamedTuple):
    """The function of a raw logit x, in this order: x·scale, then cap·tanh(x / cap), then x / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply(self, raw: Tensor) -> Tensor:
        """Logits from raw logits, which are matrix product plus bias."""
        z = raw * self.scale if self.scale != 1 else raw
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature if self.temperature != 1 else z

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of `apply`, as a function of its result."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        return slope * (1 - (logits * (self.temperature / self.softcap)) ** 2)


def check_transform(temperature: float, softcap: float | None = None, scale: float = 1.0) -> None:
    """Check that each is a positive, finite number; only the soft-cap may be None."""
    remedies = {
        "temperature": "pass the temperature that the tokens were sampled at; greedy sampling, at temperature 0, has "
        "no distribution to compare",
        "softcap": "pass the c of c·tanh(x / c) from the model's config, or None for no cap",
        "scale": "pass the factor of the raw logits, or 1 for none",
    }
    for name, value in (("temperature", temperature), ("softcap", softcap), ("scale", scale)):
        if value is not None and not 0 < value < math.inf:
            raise KernelInputError(f"`{name}` > 0 and finite", f"{value!r}", remedies[name])


@dataclass(frozen=True, eq=False)
class Head:
    """An output head. Its logits are `softcap(scale · (hidden @ weight.T + bias)) / temperature`.

    Args:
        weight: (V, H), as in `torch.nn.Linear`.
        bias: (V,) or None.
        temperature: the sampling temperature; use the same for policy and reference.
        softcap: the cap of cap·tanh(x / cap), which Gemma applies to its logits; None for no cap.
        scale: the factor of the raw logits, as in Cohere and Granite.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head
        >>> head = Head(torch.zeros(5, 2), temperature=0.7)
        >>> head.vocabulary
        5
        >>> head.transform
        Transform(scale=1.0, softcap=None, temperature=0.7)
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
                f"a head `bias` of shape ({self.weight.shape[0]},)",
                f"shape {tuple(self.bias.shape)}",
                "pass `lm_head.bias`, with one number for each row of `weight`",
            )
        check_transform(self.temperature, self.softcap, self.scale)

    @property
    def transform(self) -> Transform:
        """The element-wise part: scale, soft-cap and temperature."""
        return Transform(self.scale, self.softcap, self.temperature)

    @property
    def vocabulary(self) -> int:
        """The number of vocabulary entries."""
        return self.weight.shape[0]

    @classmethod
    def of(cls, model: Any, temperature: float = 1.0) -> "Head":
        """The head of a transformers model, with the soft-cap and the scale that its family applies.

        A model family that transforms its logits in another way is refused (`kernels/model_families.py`). For a family
        that this package does not know, soft-cap and scale are read from the config: verify the result with
        `check_head`.

        Args:
            model: a causal language model of transformers.
            temperature: the sampling temperature.

        Returns:
            The head; its tensors are the model's own parameters.
        """
        layer, found = output_layer(model), numbers_of(model)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if found.vocabulary is not None and found.vocabulary < len(weight):
            weight, bias = weight[: found.vocabulary], None if bias is None else bias[: found.vocabulary]
        return cls(weight, bias, temperature=temperature, softcap=found.softcap, scale=found.scale)


LEAST_DIFFERENCE = 1e-3
"""The tolerance of `check_head`, relative to the size of the logits, in any dtype: the error of products in TF32."""


@torch.no_grad()
def check_head(head: Head, hidden: Tensor, logits: Tensor) -> None:
    """Raise an error if the log-probs of the head differ from those of the model.

    A missing soft-cap that is far above the size of the logits changes them by less than rounding, and is not detected.

    Args:
        head: the head to check, at any temperature.
        hidden: (..., H) last hidden states of a small batch, after the final norm.
        logits: (..., V) the model's own logits of the same positions, at temperature 1.

    Returns:
        None.

    Raises:
        KernelInputError: the log-probs differ by more than rounding.

    Example:
        >>> import torch
        >>> from klgrad.kernels import Head, check_head
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> check_head(Head(weight), hidden, logits=hidden @ weight.T)
        >>> try:
        ...     check_head(Head(weight), hidden, logits=2 * hidden @ weight.T)
        ... except ValueError as error:
        ...     print(error.received)
        a root mean square difference of 1.1
    """
    own = logits[..., : head.vocabulary].to(torch.promote_types(logits.dtype, torch.float32))
    wide = lambda x: x.to(own.dtype)
    raw = wide(hidden) @ wide(head.weight).T
    made = replace(head, temperature=1.0).transform.apply(raw if head.bias is None else raw + wide(head.bias))
    if made.shape != own.shape:
        raise KernelInputError(
            f"logits of shape {tuple(made.shape)}",
            f"shape {tuple(own.shape)}",
            "pass the logits of the same hidden states",
        )
    size = float(own.square().mean().sqrt())
    off = float((made.log_softmax(-1) - own.log_softmax(-1)).square().mean().sqrt())
    if not off <= max(torch.finfo(logits.dtype).eps, LEAST_DIFFERENCE) * max(size, 1e-3):
        raise KernelInputError(
            f"a head with the log-probs of the model's own logits (of size {size:.3g})",
            f"a root mean square difference of {off:.3g}",
            "the model scales, caps or transforms its logits in a way that this head does not: pass a Head with the "
            "right weight, scale and softcap, and hidden states after the final norm, or use a sampled estimator",
        )

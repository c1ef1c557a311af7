"""The output head of a model: how hidden states become logits, and how it is found in a model."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KernelInputError
from ..support import Model

# How each family of transformers models computes logits from its hidden states.

MULTIPLIED_BY = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVIDED_BY = ("logits_scaling", "logits_mup_width_multiplier")
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of numbers in a config that change the logits: factors, divisors, and caps as in cap·tanh(x / cap)."""

MULTIPLIED_BY_ITS_DIVISOR = {"hyperclovax"}
"""Text models whose `logits_scaling` multiplies."""

NOT_APPLIED = {"aya_vision", "cohere2_vision", "gemma3", "shieldgemma2", "mpt"}
"""Models whose config has one of these numbers, but whose forward pass does not use it."""

APPLIED_FROM_TEXT_CONFIG = {
    "cohere_compass", "gemma3n", "gemma4", "gemma4_unified", "granite4_vision", "hyperclovax_vision_v2",
    "inkling_mm_model", "mistral_large4", "muse_glimmer", "muse_spark",
}  # fmt: skip
"""Models with images or audio whose own forward pass applies the numbers of their text config. Others do not, or only
in some versions of transformers (Granite in LLaVA-NeXT, Granite Speech): they are refused if there is such a number."""

REFUSED = {
    "chameleon": "sets the logits of all image tokens to the lowest number",
    "electra": "transforms the hidden states before its output layer",
    "gemma4_assistant": "computes the logits of some entries only",
    "gemma4_unified_assistant": "computes the logits of some entries only",
    "modernbert-decoder": "transforms the hidden states before its output layer",
    "muse_glimmer_assistant": "computes its logits with the head of another model",
    "prophetnet": "predicts several tokens at each position",
}
"""Models whose logits are not a scaled and capped product of their last hidden states and one matrix."""


def numbers_of(model: Model) -> tuple[float, float | None, int | None]:
    """The factor and the soft-cap of the logits, and the number of entries without padding, if the config has it."""
    config, kind = model.config, getattr(model.config, "model_type", None)
    if kind in NOT_APPLIED:
        return 1.0, None, None
    text = config.get_text_config()
    numbers = lambda names: [value for name in names if (value := getattr(text, name, None))]
    divisor, caps = math.prod(numbers(DIVIDED_BY)), numbers(SOFT_CAPS)
    if text.model_type in MULTIPLIED_BY_ITS_DIVISOR:
        divisor = 1 / divisor
    scale = math.prod(numbers(MULTIPLIED_BY)) / divisor
    if text is not config and kind not in APPLIED_FROM_TEXT_CONFIG and (scale != 1 or caps):
        raise _refusal(model, f"`{kind}` around `{text.model_type}`, whose scale or cap of the logits it may not apply")
    return float(scale), caps[0] if caps else None, getattr(text, "unpadded_vocab_size", None)


def output_layer(model: Model) -> Any:
    """The layer that computes the model's logits; an error if it does not compute them alone."""
    kind, layer = getattr(model.config, "model_type", None), model.get_output_embeddings()
    if kind in REFUSED:
        raise _refusal(model, f"`{kind}`, which {REFUSED[kind]}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, "an encoder-decoder model; many of these scale or shift their logits")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise _refusal(model, f"an output layer {type(layer).__name__} without one floating-point weight")
    if _has_active_adapter(layer):
        raise _refusal(model, "an active adapter on the output layer, which the weight does not include")
    if not _is_applied_to_hidden_states(model, layer):
        raise _refusal(model, "an output layer inside another module, which transforms the hidden states first")
    return layer


def _refusal(model: Model, received: str) -> KernelInputError:
    return KernelInputError(
        f"a model whose logits are one matrix times its last hidden states ({type(model).__name__})",
        received,
        "use a sampled estimator, or pass klgrad.kernels.Head(weight, bias, ...) and the hidden states that it is "
        "applied to; klgrad.kernels.check_head compares such a head with the model's own logits",
    )


def _has_active_adapter(layer: Any) -> bool:
    """Whether a PEFT layer of any kind computes something else than its base weight alone does."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # without this import there is no such layer
    if peft is None or not isinstance(layer, peft.BaseTunerLayer) or layer.disable_adapters or layer.merged:
        return False
    adapters = [getattr(layer, name) for name in layer.adapter_layer_names]
    return any(name in adapter for adapter in adapters for name in layer.active_adapters)


def _is_applied_to_hidden_states(model: Model, layer: object) -> bool:
    """Whether the layer is a child of the language model itself, not of a prediction head with further layers."""
    if not hasattr(model, "modules"):
        return True
    holders = [module for module in model.modules() if any(child is layer for child in module.children())]
    return not holders or any(hasattr(holder, "get_output_embeddings") for holder in holders)


# The output head of a model, which computes logits from hidden states.


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

    def clone(self) -> "Head":
        """A copy with tensors of its own, for a model whose parameters change or are only gathered for now."""
        return replace(self, weight=self.weight.clone(), bias=None if self.bias is None else self.bias.clone())

    @classmethod
    def of(cls, model: Model, temperature: float = 1.0) -> "Head":
        """The head of a transformers model, whose parameters it has, with the soft-cap and the scale of its family.

        A model family that transforms its logits in another way is refused (`kernels/head.py`). For a family that this
        package does not know, soft-cap and scale are read from the config: verify the result with `check_head`.
        """
        layer = output_layer(model)
        scale, softcap, vocabulary = numbers_of(model)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if vocabulary is not None and vocabulary < len(weight):
            weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        return cls(weight, bias, temperature=temperature, softcap=softcap, scale=scale)


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
    expected = logits[..., : head.vocabulary].to(torch.promote_types(logits.dtype, torch.float32))
    wide = lambda x: x.to(expected.dtype)
    raw = wide(hidden) @ wide(head.weight).T
    made = replace(head, temperature=1.0).transform.apply(raw if head.bias is None else raw + wide(head.bias))
    if made.shape != expected.shape:
        raise KernelInputError(
            f"logits of shape {tuple(made.shape)}",
            f"shape {tuple(expected.shape)}",
            "pass the logits of the same hidden states",
        )
    size = float(expected.square().mean().sqrt())
    off = float((made.log_softmax(-1) - expected.log_softmax(-1)).square().mean().sqrt())
    if not off <= max(torch.finfo(logits.dtype).eps, LEAST_DIFFERENCE) * max(size, 1e-3):
        raise KernelInputError(
            f"a head with the log-probs of the model's own logits (of size {size:.3g})",
            f"a root mean square difference of {off:.3g}",
            "the model scales, caps or transforms its logits in a way that this head does not: pass a Head with the "
            "right weight, scale and softcap, and hidden states after the final norm, or use a sampled estimator",
        )


# Checks of what the heads are applied to.


def check_shapes(
    hidden: Tensor, targets: Tensor, ref_hidden: Tensor | None, mask: Tensor | None, entries: Tensor | None
) -> None:
    if not hidden.is_floating_point():
        raise KernelInputError(
            "`hidden` with a floating-point dtype", str(hidden.dtype), "pass hidden states, not token ids"
        )
    if targets.is_floating_point():
        raise KernelInputError("integer `targets`", str(targets.dtype), "pass token ids")
    for name, x in (("hidden", hidden), ("ref_hidden", ref_hidden), ("entries", entries)):
        if x is not None and (x.ndim != targets.ndim + 1 or x.shape[:-1] != targets.shape):
            raise KernelInputError(
                f"`{name}` of shape {(*targets.shape, 'H' if name != 'entries' else 'k')}, which begins as `targets`",
                f"shape {tuple(x.shape)}",
                "pass one row per predicted token: hidden states of positions 0..T-2 for tokens 1..T-1",
            )
    if mask is not None and mask.shape != targets.shape:
        raise KernelInputError(
            f"`mask` of shape {tuple(targets.shape)}", f"shape {tuple(mask.shape)}", "pass one value per target"
        )


def check_heads(head: Head, hidden: Tensor, ref_head: Head | None, ref_hidden: Tensor | None) -> None:
    """Check that each head fits its hidden states, and that both heads have the same vocabulary."""
    if (ref_head is None) != (ref_hidden is None):
        one, missing = ("ref_head", "ref_hidden") if ref_hidden is None else ("ref_hidden", "ref_head")
        raise KernelInputError(f"`{missing}` together with `{one}`", "none", "pass both for the KL, or neither")
    for name, h, x in (("hidden", head, hidden), ("ref_hidden", ref_head, ref_hidden)):
        if h is not None and x is not None and h.weight.shape[1] != x.shape[-1]:
            raise KernelInputError(
                f"`{name}` of width {h.weight.shape[1]}, as its head's weight (V, H)",
                f"width {x.shape[-1]}",
                "pass the last hidden states and `lm_head.weight` of one model",
            )
    if ref_head is not None:
        check_one_vocabulary(head.vocabulary, ref_head.vocabulary)


def check_one_vocabulary(entries: int, ref_entries: int) -> None:
    if entries != ref_entries:
        raise KernelInputError(
            "policy and reference over the same vocabulary",
            f"{entries} and {ref_entries} entries",
            "one may be padded: if the tokenizer is the same, cut both to its length "
            f"(at most {min(entries, ref_entries)}): Head(weight[:n], bias[:n]), or logits[..., :n]",
        )


def check_targets(wanted: Tensor, vocabulary: int) -> None:
    outside = wanted[(wanted < 0) | (wanted >= vocabulary)]
    if len(outside):
        raise KernelInputError(
            f"targets from 0 to {vocabulary - 1} where the mask is 1",
            f"{int(outside[0])}",
            "mask padding (such as -100), and use the tokenizer of this model",
        )

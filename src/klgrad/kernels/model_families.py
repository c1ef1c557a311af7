"""How each family of transformers models computes logits from its hidden states."""

import math
import sys
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import KernelInputError

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


class Numbers(NamedTuple):
    """The factor and the soft-cap of the logits, and the number of entries without padding, if the config has it."""

    scale: float
    softcap: float | None
    vocabulary: int | None


def numbers_of(model: Any) -> Numbers:
    """Read the numbers from the config of a transformers model."""
    config, kind = model.config, getattr(model.config, "model_type", None)
    if kind in NOT_APPLIED:
        return Numbers(1.0, None, None)
    text = config.get_text_config()
    given = lambda names: [value for name in names if (value := getattr(text, name, None))]
    divisor, caps = math.prod(given(DIVIDED_BY)), given(SOFT_CAPS)
    if text.model_type in MULTIPLIED_BY_ITS_DIVISOR:
        divisor = 1 / divisor
    scale = math.prod(given(MULTIPLIED_BY)) / divisor
    if text is not config and kind not in APPLIED_FROM_TEXT_CONFIG and (scale != 1 or caps):
        raise _refusal(model, f"`{kind}` around `{text.model_type}`, whose scale or cap of the logits it may not apply")
    return Numbers(float(scale), caps[0] if caps else None, getattr(text, "unpadded_vocab_size", None))


def output_layer(model: Any) -> Any:
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


def _refusal(model: Any, received: str) -> KernelInputError:
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
    return any(name in each for each in adapters for name in layer.active_adapters)


def _is_applied_to_hidden_states(model: Any, layer: Any) -> bool:
    """Whether the layer is a child of the language model itself, not of a prediction head with further layers."""
    if not hasattr(model, "modules"):
        return True
    holders = [module for module in model.modules() if any(child is layer for child in module.children())]
    return not holders or any(hasattr(holder, "get_output_embeddings") for holder in holders)

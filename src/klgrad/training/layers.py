"""A smaller student: a model that misses some of its layers."""

from pathlib import Path
from typing import Any

from .training_errors import ModelError


def kept_layers(total: int, wanted: int) -> list[int]:
    """Which ones stay: the first, the last, and the rest evenly spaced between them."""
    if not 1 <= wanted <= total:
        raise ModelError(f"1 to {total} layers", str(wanted), f"the model has {total}; ask for fewer than that")
    if wanted == 1:
        return [0]
    return [(i * (total - 1) + (wanted - 1) // 2) // (wanted - 1) for i in range(wanted)]


def keep_layers(source: str, wanted: int, folder: Path, **how: Any) -> None:
    """Write the model with `wanted` of its layers, and its tokenizer, to a folder."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    kept = kept_layers(AutoConfig.from_pretrained(source, **how).get_text_config().num_hidden_layers, wanted)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto", **how)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            "a model whose layers are one list, `layers`",
            type(model).__name__,
            "make the smaller student yourself, and give its folder",
        )
    config = model.config
    model.base_model.layers = nn.ModuleList([layers[i] for i in kept])
    config.num_hidden_layers = wanted
    if getattr(config, "layer_types", None) is not None:  # one entry per layer: full or sliding attention
        config.layer_types = [config.layer_types[i] for i in kept]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **how).save_pretrained(folder)

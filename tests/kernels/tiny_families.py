"""Tiny models of every family of transformers."""

import re
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "num_hidden_layers": 2,
    "num_layers": 2, "n_layer": 2, "n_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 48, "ffn_dim": 48, "decoder_ffn_dim": 48, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "embedding_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "is_decoder": True, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2,
    "encoder_attention_heads": 4, "attention_dropout": 0.0, "lru_width": 32, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "image_size": 28, "patch_size": 14, "depth": 2,
    "out_hidden_size": 32, "projection_dim": 32, "encoder_ffn_dim": 48, "sliding_window": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_ssm": 64, "d_ff": 48, "d_kv": 8, "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "n_inner": 48, "rotary_dim": 4, "laurel_rank": 8,
    "text_hidden_size": 32,
}  # fmt: skip
"""Set in every config, and in its parts, that has a field of the name."""

CHANGES_LOGITS = re.compile(r"logit(?!s_to_keep)|soft_?cap|multiplier|mup")
ELSEWHERE = re.compile(r"router|attn|attention|embedding|ssm|mlp|key|gate|residual|depthwise")
"""A number with a name of the first kind and not of the second may change the logits, and is set to 1.5."""

LARGEST = 30_000_000
"""Parameters of a model that is still built."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BY_CONFIG: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE}},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 4},
    },
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "depths": [1] * 4},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
}
"""Further settings, by class of config."""


class NotBuiltError(Exception):
    """No tiny model of the family could be built with these settings."""


def settings(kind: type) -> dict[str, Any]:
    """Small sizes, and a factor or a cap that would show, for a config and its parts."""
    base = kind()
    names = {*vars(base), *getattr(kind, "attribute_map", {})}
    made = {name: size for name, size in SIZES.items() if name in names}
    for name in sorted(names):
        if CHANGES_LOGITS.search(name) and not ELSEWHERE.search(name):
            value = vars(base).get(name)
            made |= {name: 1.5} if value is None or isinstance(value, float) else {}
    layers = vars(base).get("layer_types")
    if isinstance(layers, list):
        kinds = list(dict.fromkeys(layers))
        made["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        made["num_hidden_layers"] = len(made["layer_types"])
    for part in getattr(kind, "sub_configs", {}):
        given = getattr(base, part, None)
        if given is not None and type(given) is not transformers.PretrainedConfig:
            made[part] = {"model_type": given.model_type, **settings(type(given))}
    return made | BY_CONFIG.get(kind.__name__, {})


def build(name: str) -> Any:
    """The tiny model with random weights; `NotBuiltError` if that does not work or is not tiny."""
    kind = getattr(transformers, name)
    try:
        config = settings(kind.config_class)
        with torch.device("meta"):
            size = sum(x.numel() for x in kind(kind.config_class(**config)).parameters())
        if size > LARGEST:
            raise NotBuiltError(f"{size} parameters")
        torch.manual_seed(0)
        model = kind(kind.config_class(**config)).eval()
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model


@torch.no_grad()
def outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states of a small batch of text, and the model's own logits of them."""
    ids = torch.arange(3, 23).reshape(2, 10)
    try:
        given = {"input_ids": ids, "use_cache": False}
        try:
            logits = model(**given).logits
        except TypeError:  # a model without a cache
            given = {"input_ids": ids}
            logits = model(**given).logits
        return model.base_model(**given).last_hidden_state, logits
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error

"""What a run would take in memory, from the model's configuration alone: no weights are loaded."""

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import make_plan
from .build import Models

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Item:
    """One thing in memory."""

    name: str
    bytes: int
    note: str


def estimate(settings: Any, models: Models) -> list[Item]:
    """Of all processes together, each model once, as if sharded; activations come on top."""
    training, policy = settings.training, settings.policy
    shape, kind = _shape(models.path, models.how), DTYPES.get(str(policy.dtype), torch.float32)
    parameters = shape.parameters
    trained = _adapter_parameters(policy, shape) if policy.use_peft else parameters
    ratio = "adapters" if policy.use_peft else "weights"
    found = [
        Item("policy", parameters * kind.itemsize, f"{parameters / 1e6:.0f}M weights in {_name(kind)}"),
        Item("gradients", trained * kind.itemsize, f"of {trained / 1e6:.0f}M {ratio}"),
        Item("optimizer", 2 * trained * kind.itemsize, "AdamW keeps two numbers for each"),
    ]
    if policy.use_peft:
        found.append(Item("reference", 0, "the policy with its adapters off"))
    else:
        other = _shape(models.reference, models.reference_how)
        found.append(Item("reference", other.parameters * kind.itemsize, f"{other.parameters / 1e6:.0f}M weights"))
    return [*found, _cache(training, shape, kind), *_kernels(training, shape, kind)]


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    parameters: int
    layers: int
    keys: int
    """Numbers kept for a token in a layer's cache: keys and values."""
    vocabulary: int
    hidden: int


def _shape(model: str, how: dict[str, Any]) -> Shape:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, **how)
    text = config.get_text_config()
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=how.get("trust_remote_code", False))
    empty.tie_weights()  # or a shared head counts twice
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    parameters = sum(p.numel() for p in empty.parameters())
    return Shape(parameters, text.num_hidden_layers, 2 * heads * width, text.vocab_size, text.hidden_size)


def _adapter_parameters(policy: Any, shape: Shape) -> int:
    """Two thin matrices beside the query and the value projection of each layer, which is PEFT's choice for a Llama."""
    return shape.layers * policy.lora_r * (3 * shape.hidden + shape.keys // 2)


def _cache(training: Any, shape: Shape, kind: torch.dtype) -> Item:
    if training.use_vllm:
        return Item("sampling", 0, "vLLM has memory of its own")
    rows, tokens = training.generation_batch_size, training.max_completion_length
    size = rows * tokens * shape.layers * shape.keys * kind.itemsize
    return Item("sampling", size, f"keys and values of {rows} completions x {tokens} tokens, prompts not counted")


def _kernels(training: Any, shape: Shape, kind: torch.dtype) -> list[Item]:
    if not training.objective.exact:
        return []
    tokens = training.per_device_train_batch_size * training.max_completion_length
    plan = make_plan(tokens, shape.vocabulary, kind, paired=True, budget=training.kl_memory << 20)
    whole = 2 * tokens * shape.vocabulary * 4 * training.world_size
    taken = (plan.tile_bytes + plan.kept_bytes) * training.world_size
    saved = f"; all logits of both models would be {_size(whole)}" if whole > taken else ""
    return [Item("exact KL", taken, f"tiles of {plan.strip} x {plan.columns} logits{saved}")]


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


size = _size

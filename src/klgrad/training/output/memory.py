"""Estimate the memory of a run from the models' configurations, without loading weights.

`accelerate estimate-memory` covers one model of the hub; here are two, from folders too, with adapters, the cache of
sampling and the tiles of the exact KL.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import make_plan
from ..build import Models

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` that store two numbers of a weight's own type."""
LORA = ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
QUANTISED = ("load_in_4bit", "load_in_8bit")
"""Settings that change the memory, but not the estimate: its notes name those that are given."""


@dataclass(frozen=True)
class Item:
    """One entry of the estimate."""

    name: str
    bytes: int
    note: str


def estimate(settings: Any, models: Models) -> list[Item]:
    """Memory of all processes together, as if every model were sharded; activations are not included."""
    training, policy = settings.training, settings.policy
    shape, kind = _shape(models.path, models.load_options), DTYPES.get(str(policy.dtype), torch.float32)
    parameters = shape.parameters
    trained = _adapter_parameters(policy, shape) if policy.use_peft else parameters
    of_what = f"adapters of queries and values{_left_out(policy, LORA)}" if policy.use_peft else "weights"
    weights = f"{parameters / 1e6:.0f}M weights in {_name(kind)}{_left_out(policy, QUANTISED)}"
    found = [
        Item("policy", parameters * kind.itemsize, weights),
        Item("gradients", trained * kind.itemsize, f"of {trained / 1e6:.0f}M {of_what}"),
        Item("optimizer", 2 * trained * kind.itemsize, f"two numbers for each ({_optimizer(training)})"),
    ]
    if policy.use_peft:
        found.append(Item("reference", 0, "the policy with its adapters off"))
    else:
        other = _shape(models.reference, models.reference_options)
        found.append(Item("reference", other.parameters * kind.itemsize, f"{other.parameters / 1e6:.0f}M weights"))
    return [*found, _cache(training, shape, kind), *_kernels(training, shape, kind)]


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that memory depends on."""

    parameters: int
    layers: int
    keys: int
    """Numbers per token and layer in the cache: keys and values."""
    vocabulary: int
    hidden: int


def _shape(model: str, how: dict[str, Any]) -> ModelSize:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, **how)
    text = config.get_text_config()
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=how.get("trust_remote_code", False))
    empty.tie_weights()  # otherwise a shared head is counted twice
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    parameters = sum(p.numel() for p in empty.parameters())
    return ModelSize(parameters, text.num_hidden_layers, 2 * heads * width, text.vocab_size, text.hidden_size)


def _adapter_parameters(policy: Any, shape: ModelSize) -> int:
    """Two low-rank matrices for the query and the value projection of each layer, PEFT's default for a Llama."""
    return shape.layers * policy.lora_r * (3 * shape.hidden + shape.keys // 2)


def _left_out(policy: Any, names: tuple[str, ...]) -> str:
    """The end of a note, with those of the settings that are given."""
    given = [name for name in names if getattr(policy, name)]
    return f"; does not account for {', '.join(given)}" if given else ""


def _optimizer(training: Any) -> str:
    name = getattr(training.optim, "value", training.optim)
    return "AdamW" if name in ADAMW else f"AdamW assumed; does not account for optim={name}"


def _cache(training: Any, shape: ModelSize, kind: torch.dtype) -> Item:
    if training.use_vllm:
        return Item("sampling", 0, "vLLM allocates its own memory")
    rows, tokens = training.generation_batch_size, training.max_completion_length
    size = rows * tokens * shape.layers * shape.keys * kind.itemsize
    return Item("sampling", size, f"keys and values of {rows} completions x {tokens} tokens, prompts not included")


def _kernels(training: Any, shape: ModelSize, kind: torch.dtype) -> list[Item]:
    if not training.objective.exact:
        return []
    tokens = training.per_device_train_batch_size * training.max_completion_length
    plan = make_plan(tokens, shape.vocabulary, kind, paired=True, budget=training.kl_memory << 20)
    whole = 2 * tokens * shape.vocabulary * 4 * training.world_size
    taken = (plan.tile_bytes + plan.kept_bytes) * training.world_size
    saved = f"; all logits of both models would be {in_units(whole)}" if whole > taken else ""
    return [Item("exact KL", taken, f"tiles of {plan.strip} x {plan.columns} logits{saved}")]


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def in_units(count: float) -> str:
    """MiB, or GiB from one GiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

"""The policy and the reference as models: found, loaded and gathered by TRL's helpers.

Touches `trl.trainer.utils.use_adapter`, `create_model_from_path` and `maybe_gather_lm_head_ctx`, transformers'
`config._name_or_path` and `config._attn_implementation`, peft's `peft_config` and `get_base_model`, and DeepSpeed's
`ds_id` and `ds_shape`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import create_model_from_path, maybe_gather_lm_head_ctx, use_adapter


@contextmanager
def reference_model(trainer: GRPOTrainer) -> Iterator[Any]:
    """The reference: a model of its own, or the policy with its adapters switched off while the context lasts."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    with without_adapters(trainer.accelerator.unwrap_model(trainer.model)):
        yield trainer.model


def without_adapters(model: Any) -> AbstractContextManager[Any]:
    """While the context lasts, the adapters are switched off, or replaced by the copy `ref` that TRL made of them."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def base_of(model: Any) -> Any:
    """The language model without its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: Any) -> bool:
    """Whether the model has adapters of peft."""
    return hasattr(model, "peft_config")


def gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
    """While the context lasts, the parameters are whole, even where DeepSpeed has split them between processes."""
    return maybe_gather_lm_head_ctx(*parameters)


def is_split(parameter: Tensor) -> bool:
    """Whether DeepSpeed has split the parameter between processes."""
    return hasattr(parameter, "ds_id")


def model_name(model: Any) -> str:
    """The name or the folder that a model was loaded from."""
    return model.config._name_or_path


def attention_of(model: Any) -> str | None:
    """The name of the attention that the model uses, such as "sdpa"."""
    return getattr(model.config, "_attn_implementation", None)


@contextmanager
def reference_loaded_from(name: str, model: Any, args: GRPOConfig) -> Iterator[None]:
    """While TRL sets up a trainer with `model`, make it load its reference from `name`.

    TRL loads the reference by the name in the model's configuration, with `model_init_kwargs`. These belong to the
    model (for example a revision), and it is loaded already; TRL takes dtype and attention over from it.
    """
    before, how = model.config._name_or_path, args.model_init_kwargs
    model.config._name_or_path, args.model_init_kwargs = name, None
    try:
        yield
    finally:
        model.config._name_or_path, args.model_init_kwargs = before, how


def load_model(name: str, args: GRPOConfig, quantization: Any = None) -> Any:
    """Load a model as TRL loads one that is given by name."""
    given: Any = args.model_init_kwargs or {}
    how: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, **given}
    if quantization is not None:
        how["quantization_config"] = quantization
    state: Any = args.distributed_state
    if state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        how["device_map"] = None  # as TRL does: "auto" fails with several processes
    return create_model_from_path(name, **how)

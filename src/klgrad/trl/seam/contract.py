"""What `KLTrainer` relies on in TRL and transformers, checked when a trainer is built.

The KL is added inside TRL's own methods. If TRL changed, or another library replaced its methods, the KL could be left
out or scaled without an error; so everything that the seam relies on is compared first.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

from . import loss_source
from .generation import Sampled
from .version import ContractError, check_version

OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "_get_train_sampler": ("dataset",),
    "_prepare_inputs": ("generation_batch",),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss",
        "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
        "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "evaluation_loop": ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
    ),
}  # fmt: skip
"""Methods that `KLTrainer` and `RunTrainer` override, with their parameters."""

CALLED: Mapping[str, tuple[str, ...]] = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "_tokenize_prompts": ("prompts",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    "_get_output_dir": ("trial",),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
}
"""Methods that the seam calls, or that call the overridden ones, with their parameters."""

ON_THE_WAY_TO_THE_LOSS = (
    "compute_loss",
    "_compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "_generate",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
)
"""Methods that must be TRL's own code: a replacement could leave the KL out, and nothing would show it."""

FOLDERS = tuple(Path(str(package.__file__)).resolve().parent for package in (trl, transformers))


def check_contract(trainer: GRPOTrainer, owner: type[GRPOTrainer]) -> None:
    """Raise `ContractError` if TRL is not what the seam was written for.

    Args:
        trainer: the trainer that is being built; only its class is looked at.
        owner: the class of this package whose `super()` calls have to reach TRL.
    """
    check_class(type(trainer), owner)


def check_class(trainer: type[GRPOTrainer], owner: type[GRPOTrainer]) -> None:
    """The same for a class, where no trainer is built."""
    check_version()
    bases = trainer.__mro__
    for base in bases[bases.index(owner) + 1 :]:
        for name in ON_THE_WAY_TO_THE_LOSS:
            if name in vars(base):
                _check_origin(base, name)
    for name, parameters in {**OVERRIDES, **CALLED}.items():
        _check_signature(name, parameters)
    _check_beta()
    loss_source.check_loss(GRPOTrainer._compute_loss)
    loss_source.check_returned(GRPOTrainer._generate, Sampled._fields)
    if "shuffle_sequence_dict" not in _global_names(GRPOTrainer._prepare_inputs):
        raise ContractError("GRPOTrainer._prepare_inputs that calls shuffle_sequence_dict", "one that does not")


def _check_origin(base: type, name: str) -> None:
    """Refuse a method whose code, or whose wrapper's code, is not in the folders of TRL or transformers."""
    method = found = vars(base)[name]
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is None or not any(Path(code.co_filename).resolve().is_relative_to(folder) for folder in FOLDERS):
            raise ContractError(
                f"{base.__name__}.{name} of TRL or transformers themselves",
                f"one of {_home(found)}",
                "the KL is added inside TRL's own loss, and a replaced loss would leave it out: use KLTrainer without "
                "the library that replaces it (Unsloth does), or with its patches switched off",
            )
        method = getattr(method, "__wrapped__", None)  # a wrapper can copy the name, but not the code


def _home(method: Any) -> str:
    code = getattr(method, "__code__", None)
    return f"{getattr(method, '__module__', 'unknown')} ({code.co_filename})" if code else repr(method)


def _check_signature(name: str, parameters: tuple[str, ...]) -> None:
    method = getattr(GRPOTrainer, name, None)
    expected = f"GRPOTrainer.{name}({', '.join(parameters)})"
    if method is None:
        raise ContractError(expected, "no such method")
    found = tuple(inspect.signature(method).parameters)[1:]  # without `self`
    if found != parameters:
        raise ContractError(expected, f"parameters ({', '.join(found)})")


def _check_beta() -> None:
    """`beta` is lent a value in two methods: a third that reads it would see the lent value or 0."""
    expected = {"__init__", "_generate_and_score_completions", "_compute_loss"}
    bases = [base for base in GRPOTrainer.__mro__ if base.__module__.startswith("trl.")]
    found = {name for base in bases for name, x in vars(base).items() if "beta" in _global_names(x)}
    if found != expected:
        raise ContractError(f"`beta` used by {', '.join(sorted(expected))}", ", ".join(sorted(found)) or "none")
    scored = loss_source.uses_of_beta(GRPOTrainer._generate_and_score_completions)
    if scored != ["self.beta != 0.0"]:
        raise ContractError("one test `self.beta != 0.0` in _generate_and_score_completions", f"{scored}")


def _global_names(method: Any) -> tuple[str, ...]:
    """Globals and attributes that a method's code names."""
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    return () if code is None else code.co_names

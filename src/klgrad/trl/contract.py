"""What a `KLTrainer` cannot rely on: a TRL that differs or was changed, and an attention with wrong gradients."""

import inspect
from pathlib import Path

import torch
import transformers
import trl
from packaging.version import Version
from trl.trainer.grpo_trainer import GRPOTrainer

from .compat import FIRST, WINDOW, ContractError

# TRL's own methods.
#
# The KL is added around them. If another library replaced them, the KL could be left out without an error; so their
# origin is compared first. What TRL's loss does is looked at when it is computed (`compat.PassCapture`,
# `compat.token_weights`).

OVERRIDES = (
    "_get_train_sampler", "_prepare_inputs", "_generate", "_generate_and_score_completions", "_calculate_rewards",
    "_compute_loss", "_get_per_token_logps_and_entropies", "training_step", "evaluation_loop", "_save_checkpoint",
    "_load_optimizer_and_scheduler", "_maybe_log_save_evaluate",
)  # fmt: skip
"""Methods that `KLTrainer` and `RunTrainer` override: without one of them in TRL, an override would not be called."""

ON_THE_WAY_TO_THE_LOSS = (
    "compute_loss", "_compute_loss", "training_step", "prediction_step", "_prepare_inputs", "_generate",
    "_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies",
)  # fmt: skip
"""Methods that must be TRL's own code: a replacement could leave the KL out, and nothing would show it."""

FOLDERS = tuple(Path(str(package.__file__)).resolve().parent for package in (trl, transformers))


def check_contract(trainer: type[GRPOTrainer], owner: type[GRPOTrainer]) -> None:
    """Raise `ContractError` if TRL is not what the seam was written for.

    `trainer` is the class of the trainer that is built, `owner` the class of this package whose `super()` calls have to
    reach TRL.
    """
    if Version(trl.__version__).release < FIRST:  # a later one is judged by what it does
        raise ContractError(WINDOW, f"TRL {trl.__version__}")
    bases = trainer.__mro__
    for base in bases[bases.index(owner) + 1 :]:
        for name in ON_THE_WAY_TO_THE_LOSS:
            if name in vars(base):
                _check_origin(base, name)
    for name in OVERRIDES:
        if not hasattr(GRPOTrainer, name):
            raise ContractError(f"GRPOTrainer.{name}", "no such method")
    if "shuffle_sequence_dict" not in inspect.unwrap(GRPOTrainer._prepare_inputs).__code__.co_names:
        raise ContractError("GRPOTrainer._prepare_inputs that calls shuffle_sequence_dict", "one that does not")


def _check_origin(base: type, name: str) -> None:
    """Refuse a method whose code, or whose wrapper's code, is not in the folders of TRL or transformers."""
    method = vars(base)[name]
    code = getattr(method, "__code__", None)
    origin = f"{getattr(method, '__module__', 'unknown')} ({code.co_filename})" if code else repr(method)
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is None or not any(Path(code.co_filename).resolve().is_relative_to(folder) for folder in FOLDERS):
            raise ContractError(
                f"{base.__name__}.{name} of TRL or transformers themselves",
                f"one of {origin}",
                "the KL is added inside TRL's own loss, and a replaced loss would leave it out: use KLTrainer without "
                "the library that replaces it (Unsloth does), or with its patches switched off",
            )
        method = getattr(method, "__wrapped__", None)  # a wrapper can copy the name, but not the code


# cuDNN's attention on Hopper GPUs may return gradients that are not a number.
#
# From torch 2.11 on it is the default there for 16-bit attention with a mask, which every padded batch has. Its
# backward pass returns NaN for the queries if the length of the batch is 64 more than a multiple of 128 and a query's
# scores are all below about -88 (pytorch/pytorch issue 196678). The loss of that step is right, and the step makes
# every weight NaN.

FIRST_TORCH = (2, 11)
HOPPER = (9, 0)


def cudnn_gradients_may_be_nan(device: torch.device) -> bool:
    """Whether attention on this device may use cuDNN's backward pass that has the error."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return (
        device.type == "cuda"
        and version >= FIRST_TORCH
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(device) == HOPPER
    )


def avoid_cudnn_attention(device: torch.device) -> None:
    """Let this process use torch's other attention kernels where cuDNN's has the error."""
    if cudnn_gradients_may_be_nan(device):
        torch.backends.cuda.enable_cudnn_sdp(False)

"""What this package assumes of TRL, checked before it is used; and observation of any trainer from outside."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
import transformers
import trl
from transformers import Trainer, TrainerCallback, TrainerState
from trl.trainer import distillation_trainer as module
from trl.trainer.distillation_trainer import DistillationTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

from ..integrations import lend
from .compat import ContractError, check_version

# What `KLTrainer` relies on in TRL and transformers, checked when a trainer is built.
#
# The KL is added around TRL's own methods. If another library replaced them, the KL could be left out without an error;
# so names and origin are compared first. What TRL's loss does is looked at when it is computed
# (`compat.PassCapture`, `compat.token_weights`).

OVERRIDES = (
    "_get_train_sampler", "_prepare_inputs", "_generate", "_generate_and_score_completions", "_calculate_rewards",
    "_compute_loss", "_get_per_token_logps_and_entropies", "training_step", "evaluation_loop", "_save_checkpoint",
    "_load_optimizer_and_scheduler", "_maybe_log_save_evaluate",
)  # fmt: skip
"""Methods that `KLTrainer` and `RunTrainer` override: without one of them in TRL, an override would not be called."""

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


def check_contract(trainer: type[GRPOTrainer], owner: type[GRPOTrainer]) -> None:
    """Raise `ContractError` if TRL is not what the seam was written for.

    `trainer` is the class of the trainer that is built, `owner` the class of this package whose `super()` calls have to
    reach TRL.
    """
    check_version()
    bases = trainer.__mro__
    for base in bases[bases.index(owner) + 1 :]:
        for name in ON_THE_WAY_TO_THE_LOSS:
            if name in vars(base):
                _check_origin(base, name)
    for name in OVERRIDES:
        if not hasattr(GRPOTrainer, name):
            raise ContractError(f"GRPOTrainer.{name}", "no such method")
    code = getattr(inspect.unwrap(GRPOTrainer._prepare_inputs), "__code__", None)
    if code is None or "shuffle_sequence_dict" not in code.co_names:
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


# Observe a trainer of transformers or TRL from outside, while it trains.
#
# Touches `Trainer._prepare_inputs` and TRL's `_generate_and_score_completions`, which are replaced on the instance by
# functions that call them and look at what they return; the public `compute_loss` and `log` likewise.

PREPARE, GENERATE, LOSS, LOG = "_prepare_inputs", "_generate_and_score_completions", "compute_loss", "log"


def trainer_of(callback: TrainerCallback, state: TrainerState) -> Trainer:
    """The trainer that is calling this callback with this state.

    transformers does not give a callback its trainer, but one of the trainer's methods is on the call stack. The
    trainer is the one whose list of callbacks has this callback and whose state is this state; both are compared by
    identity, so that no other trainer can be taken for it. (A search among all objects, `gc.get_objects`, is no
    alternative: it breaks a tuple that another thread is building.)
    """
    frame = inspect.currentframe()
    while frame is not None:
        for x in frame.f_locals.values():
            # `type`, and not `isinstance`, which would run code of lazy modules and proxies.
            if issubclass(type(x), Trainer) and getattr(x, "state", None) is state:
                handler = getattr(x, "callback_handler", None)
                if any(each is callback for each in getattr(handler, "callbacks", ())):
                    return x
        frame = frame.f_back  # no further than needed: reading the variables of a frame keeps them alive
    raise ContractError(
        "a trainer that calls this callback",
        "none on the call stack",
        "attach it explicitly, before training: callback.attach(trainer)",
    )


class Observer:
    """Wraps methods of one trainer object, and restores them."""

    def __init__(self, trainer: object) -> None:
        self._trainer = trainer
        self._before: dict[str, object] = {}

    def wrap(self, name: str, around: Callable[..., object]) -> None:
        """Let `around(method, *args, **kwargs)` stand for `method(*args, **kwargs)`."""
        method = getattr(self._trainer, name)
        self._before[name] = vars(self._trainer).get(name)
        setattr(self._trainer, name, partial(around, method))

    def release(self, *names: str) -> None:
        """Restore these methods, or all."""
        for name in set(names or self._before) & self._before.keys():
            if (before := self._before.pop(name)) is not None:
                setattr(self._trainer, name, before)
            else:
                delattr(self._trainer, name)


# TRL's distillation loss, with its divergence replaced.
#
# Touches `trl.trainer.distillation_trainer._chunked_divergence_loss` and `DistillationTrainer._compute_loss`, which
# calls it by that global name; another function has the name while the loss is computed.

DIVERGENCE = "_chunked_divergence_loss"
DISTILLATION_PARAMETERS = (
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch",
)  # fmt: skip
"""The first of TRL's divergence, which its loss gives by position or by name."""


def check_distillation() -> None:
    """Raise `ContractError` if TRL's loss does not call its divergence as this file assumes."""
    check_version()
    names = tuple(inspect.signature(getattr(module, DIVERGENCE)).parameters)[: len(DISTILLATION_PARAMETERS)]
    code = DistillationTrainer._compute_loss.__code__
    if names != DISTILLATION_PARAMETERS or DIVERGENCE not in code.co_names:
        expected = f"DistillationTrainer._compute_loss that calls {DIVERGENCE}({', '.join(DISTILLATION_PARAMETERS)})"
        raise ContractError(expected, f"{DIVERGENCE}({', '.join(names)})")


def divergence_by(divergence: Callable[..., object]) -> AbstractContextManager[None]:
    """While the context lasts, TRL's distillation computes its divergence by this function."""
    return lend(module, **{DIVERGENCE: divergence})


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


def warn_of_cudnn_attention(device: torch.device, attention: str | None, *, half: bool) -> None:
    """Warn of a run that may use it: 16-bit training by torch's own attention."""
    if half and attention == "sdpa" and cudnn_gradients_may_be_nan(device):
        warnings.warn(
            f"expected attention with finite gradients; torch {torch.__version__} uses cuDNN's on this GPU, which may "
            "return NaN for padded batches (pytorch/pytorch issue 196678): call "
            "torch.backends.cuda.enable_cudnn_sdp(False) before training",
            stacklevel=3,
        )

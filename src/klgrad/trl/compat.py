"""The seam to TRL: private names of TRL, transformers and accelerate are used here and in `contract.py`.

Methods that have to be overridden are overridden in `kl_trainer.py`, `contract.py` and
`training/checkpoint.py`; `contract.OVERRIDES` lists them. A test searches `trl/` and `training/` for private names
outside these two files and that list.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import create_model_from_path, maybe_gather_lm_head_ctx, pad, use_adapter

from ..errors import KlgradError
from ..kernels import TokenStatistics

# The versions of TRL that this package was written for, and the error for a TRL that differs.

FIRST, END = (1, 16), (1, 17)
"""Tested from the first and below the second; `pyproject.toml` claims the same."""
WINDOW = f"trl>={FIRST[0]}.{FIRST[1]},<{END[0]}.{END[1]}"


class ContractError(KlgradError, RuntimeError):
    """The installed TRL is not one that the trainer can rely on: the KL might be left out or changed."""

    def __init__(self, expected: str, received: str, remedy: str | None = None) -> None:
        install = f"install the TRL that klgrad is tested with: pip install '{WINDOW}'"
        super().__init__(expected, received, remedy or install)


def check_version() -> None:
    """Refuse a version of TRL outside the window."""
    if not FIRST <= Version(trl.__version__).release[:2] < END:  # a pre-release counts as its release
        raise ContractError(f"TRL in the range {WINDOW}", f"TRL {trl.__version__}")


# TRL's metrics, and the state of TRL and transformers that their checkpoints leave out.
#
# Touches `GRPOTrainer._metrics`, `_step`, `_buffered_inputs`, `_total_train_tokens`, `entropy_coef` and
# `_last_world_entropy`, and `Trainer._tr_loss` and `_globalstep_last_logged`.

Mode = Literal["train", "eval"]


def current_mode(trainer: GRPOTrainer) -> Mode:
    """`train` or `eval`: under which of the two TRL logs now."""
    return "train" if trainer.model.training else "eval"  # pyright: ignore[reportOptionalMemberAccess]


def log_metrics(trainer: GRPOTrainer, mode: Mode, metrics: dict[str, float]) -> None:
    """Add numbers to those that TRL averages and logs next."""
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)


class GenerationState:
    """Where training is within a generation batch, that batch, and the metrics that are not logged yet."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The state between two updates; lists that change later are copied."""
        trainer = self._trainer
        adaptive = trainer.use_adaptive_entropy
        return {
            "step": trainer._step,
            "total_tokens": trainer._total_train_tokens,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "entropy": [trainer.entropy_coef, trainer._last_world_entropy] if adaptive else None,
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "buffer": None if self._generates_next() else trainer._buffered_inputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the state back, in this process or in another."""
        trainer = self._trainer
        trainer._step, trainer._total_train_tokens = state["step"], state["total_tokens"]
        trainer.state.num_input_tokens_seen = state["tokens_seen"]
        if state["entropy"] is not None:
            trainer.entropy_coef, trainer._last_world_entropy = state["entropy"]
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update({name: list(values) for name, values in state["metrics"].items()})
        trainer._buffered_inputs = state["buffer"]

    def _generates_next(self) -> bool:
        """Whether the next step samples a new batch, so that the last one is not needed."""
        trainer: Any = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        return trainer._buffered_inputs is None or trainer._step % every == 0


class LossSinceLog:
    """The loss since the last logged row. `Trainer` sets it to 0 after it has loaded a checkpoint."""

    NAMES = ("_tr_loss", "_globalstep_last_logged")

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Empty before training has begun. The loss is added to in place, so it is copied."""
        found = {name: getattr(self._trainer, name) for name in self.NAMES if hasattr(self._trainer, name)}
        return {name: _copied(value) for name, value in found.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the state back."""
        for name, value in state.items():
            setattr(self._trainer, name, _copied(value))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# The files of a checkpoint, where transformers has no public name for them.
#
# Touches `Trainer._save_checkpoint`, `_get_output_dir` and `_load_from_checkpoint`, and accelerate's `fsdp_plugin`.


def checkpoint_folder(trainer: GRPOTrainer, trial: Any) -> Path:
    """Where `Trainer` writes the checkpoint of this step."""
    return Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"


def save_checkpoint(trainer: GRPOTrainer) -> None:
    """Write a checkpoint now, by the trainer's own method."""
    model: Any = trainer.model_wrapped
    trainer._save_checkpoint(model, None)


def load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Load the model's weights, and nothing else, from a checkpoint."""
    trainer._load_from_checkpoint(str(checkpoint))


def save_in_one_piece(trainer: GRPOTrainer) -> None:
    """Under FSDP, save the model whole from now on, and not in shards."""
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")


# A scored batch of completions, under the keys that TRL's loss reads.
#
# Touches the keys `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask`, `tool_mask`, `advantages`,
# `ref_per_token_logps`, `old_per_token_logps` and `sampling_per_token_logps`.

Batch = dict[str, Any]

NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""The keys of prompts and completions, in the batches of all of TRL's trainers that sample."""

FACTOR = 6364136223846793005
"""An odd number, whose powers modulo 2^64 differ for all lengths that occur."""


@dataclass(frozen=True, eq=False)
class Completions:
    """Prompts and completions as one sequence; the last `keep` tokens are completion, live where `mask` is 1."""

    ids: Tensor
    attention: Tensor
    keep: int
    mask: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Completions":
        """Join the prompts and completions of a batch, as TRL's loss does."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        return cls(ids, attention, batch["completion_ids"].shape[1], batch["completion_mask"])

    @property
    def targets(self) -> Tensor:
        """(B, keep) the tokens of the completions."""
        return self.ids[:, -self.keep :]


def has_completions(batch: Any) -> bool:
    """Whether a batch of some trainer has prompts and completions under these keys."""
    return isinstance(batch, dict) and all(name in batch for name in NEEDED)


def prompt_keys(batch: Batch) -> Tensor:
    """(B,) a number for each prompt, the same for the same tokens, on every process and in every batch.

    A polynomial in the tokens, modulo 2^64. Prompts are padded on the left, so powers are counted from the right.
    """
    ids, mask = batch["prompt_ids"], batch["prompt_mask"]
    factor = torch.full((ids.shape[1],), FACTOR, dtype=torch.int64, device=ids.device)
    return ((ids + 1) * mask * factor.cumprod(0).flip(0)).sum(1)


def row_count(batch: Batch) -> int:
    """How many completions the batch has on this process."""
    return len(batch["completion_ids"])


def sampled_tokens(batch: Batch) -> Tensor:
    """(B, T) 1 where the policy sampled a token; 0 for padding and for text that a tool returned."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def reference_log_probs(batch: Batch) -> Tensor:
    """(B, T) log-probs by the reference, which TRL computed when it scored the batch."""
    return batch["ref_per_token_logps"]


def sampler_log_probs(batch: Batch, logp: Tensor) -> Tensor | None:
    """(B, T) log-probs by the model that sampled the tokens, or None where TRL kept none.

    vLLM's own come first, then those of the policy at the time of sampling. vLLM reports NaN for a token that it could
    not score; `logp`, the policy's, takes its place.
    """
    found = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
    return None if found is None else torch.where(found.isnan(), logp, found)


def has_sampler_log_probs(batch: Batch) -> bool:
    """Whether TRL kept vLLM's own log-probs."""
    return "sampling_per_token_logps" in batch


def has_reference_log_probs(batch: Batch) -> bool:
    """Whether TRL scored the batch by the reference."""
    return "ref_per_token_logps" in batch


def with_reference_log_probs(batch: Batch, ref_logp: Tensor) -> Batch:
    """The batch with these log-probs by the reference."""
    return {**batch, "ref_per_token_logps": ref_logp}


def has_old_log_probs(batch: Batch) -> bool:
    """Whether TRL kept the policy's log-probs at the time of sampling."""
    return "old_per_token_logps" in batch


def old_log_probs(batch: Batch) -> Tensor | None:
    """(B, T) the policy's log-probs at the time of sampling, or None where TRL kept none."""
    return batch.get("old_per_token_logps")


def keep_old_log_probs(batch: Batch, logp: Tensor) -> None:
    """Store the policy's log-probs at the time of sampling, so that TRL's loss computes its ratio from them."""
    batch["old_per_token_logps"] = logp


def with_lower_advantages(batch: Batch, by: Tensor) -> Batch:
    """The batch with (B, T) `by` subtracted from its advantages, which may be one number per completion."""
    advantages = batch["advantages"]
    return {**batch, "advantages": (advantages[:, None] if advantages.dim() == 1 else advantages) - by}


def with_any_reference(batch: Batch, logp: Tensor) -> Batch:
    """The batch with log-probs of some reference: TRL's loss computes a KL from them, which `compat.py` replaces."""
    return {**batch, "ref_per_token_logps": logp.detach()}


def has_images(batch: Batch) -> bool:
    """Whether the prompts have images."""
    return batch.get("pixel_values") is not None


# The policy and the reference as models: found, loaded and gathered by TRL's helpers.
#
# Touches `trl.trainer.utils.use_adapter`, `create_model_from_path` and `maybe_gather_lm_head_ctx`, transformers'
# `config._name_or_path` and `config._attn_implementation`, peft's `peft_config` and `get_base_model`, and DeepSpeed's
# `ds_id` and `ds_shape`.


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


# Completions: sampled, tokenized, padded and shuffled by TRL.
#
# Touches `GRPOTrainer._generate` (the order of what it returns), `_generate_single_turn`, `_tokenize_prompts` and
# `_tokenizer`, `trl.trainer.utils.pad`, and the global `shuffle_sequence_dict` of `trl.trainer.grpo_trainer`.

Rows = list[list[int]]


class Sampled(NamedTuple):
    """What `_generate` returns; `contract.py` checks the order of the fields."""

    prompt_ids: Rows
    completion_ids: Rows
    tool_mask: Rows | None
    completions: list[Any]
    logprobs: Any
    extra_fields: Any
    images: Any
    tool_images: Any

    @classmethod
    def of(cls, returned: tuple[Any, ...]) -> "Sampled":
        """By position."""
        if len(returned) != len(cls._fields):
            raise ContractError(f"{len(cls._fields)} values from GRPOTrainer._generate", f"{len(returned)}")
        return cls(*returned)


def tokenize_prompts(trainer: GRPOTrainer, prompts: list[Any]) -> Rows:
    """Token ids of prompts, as TRL makes them: chats by the chat template."""
    return trainer._tokenize_prompts(prompts)[0]


def generate(trainer: GRPOTrainer, prompt_ids: Rows) -> Rows:
    """One completion for each prompt, sampled by TRL's own generation, with vLLM or without."""
    return trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]


def decode(trainer: GRPOTrainer, completion_ids: Rows) -> list[str]:
    """The completions as text, without special tokens."""
    return trainer._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)


def padded(trainer: GRPOTrainer, prompt_ids: Rows, completion_ids: Rows) -> Batch:
    """Token ids and masks as TRL's batches have them: prompts padded on the left, completions on the right."""
    device, made = trainer.accelerator.device, {}
    padding: Any = trainer._tokenizer.pad_token_id
    for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
        ids = [torch.tensor(row) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        made[f"{name}_ids"] = pad(ids, padding_value=padding, padding_side=side).to(device)
        made[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(device)
    return made


def padded_mask(trainer: GRPOTrainer, mask: Rows) -> Tensor:
    """(B, T) one row of 0 and 1 per completion, 0 where it is padded."""
    rows = [torch.tensor(row) for row in mask]
    return pad(rows, padding_value=0, padding_side="right").to(trainer.accelerator.device)


@contextmanager
def shuffled_by(shuffle: Callable[[Batch], Batch]) -> Iterator[None]:
    """While TRL splits a generation batch into micro-batches, let `shuffle` order its rows instead of TRL."""
    module: Any = grpo_trainer
    before, module.shuffle_sequence_dict = module.shuffle_sequence_dict, shuffle
    try:
        yield
    finally:
        module.shuffle_sequence_dict = before


# Log-probs of completions by TRL's forward pass, and an answer that saves TRL's loss a second pass.
#
# Touches `GRPOTrainer._get_per_token_logps_and_entropies`, which `KLTrainer` also overrides.

MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What `_get_per_token_logps_and_entropies` takes beside text, by its key in the batch."""

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""(B, T) log-probs, (B, T) entropies, and the auxiliary loss of a mixture of experts."""


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """What one forward pass of the policy over a batch gave; `logp` carries the gradient."""

    logp: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    exact: TokenStatistics | None = None


def completion_log_probs(trainer: GRPOTrainer, model: Any, batch: Batch, **options: Any) -> Result:
    """Log-probs of a batch's completions by one of the models.

    Args:
        trainer: whose temperature and precision are used.
        model: the policy or the reference.
        batch: a scored batch.
        options: `batch_size`, `compute_entropy` and `compute_aux_loss`, as TRL takes them.
    """
    given = Completions.of(batch)
    extra = {name: batch.get(name) for name in MULTIMODAL if batch.get(name) is not None}
    ask = GRPOTrainer._get_per_token_logps_and_entropies  # TRL's own: `KLTrainer`'s might answer from a prepared pass
    return ask(trainer, model, given.ids, given.attention, given.keep, **extra, **options)


class PreparedAnswer:
    """Answers TRL's loss with a forward pass that was already made.

    The answer is given once, and only to a call with the arguments that the pass was made with. Any other call gets
    None, so that TRL makes a pass of its own. Values are compared when the loss is complete: a comparison in between
    would wait for the device.
    """

    def __init__(self) -> None:
        self._pending: _Answer | None = None

    @contextmanager
    def prepared(self, found: ForwardPass, model: Any, batch: Batch) -> Iterator[None]:
        """Hold the answer while TRL computes a loss; raise `ContractError` if the loss did not take it."""
        answer = self._pending = _Answer(found, model, batch)
        try:
            yield
        finally:
            self._pending = None
        answer.check()

    def take(self, model: Any, ids: Tensor, attention: Tensor, keep: int, extra: dict[str, Any]) -> Result | None:
        """The answer to one call of `_get_per_token_logps_and_entropies`, or None if there is none for it."""
        answer = self._pending
        if answer is None or not answer.fits(model, ids, attention, keep, extra):
            return None
        self._pending = None
        return answer.give(ids, attention)


class _Answer:
    def __init__(self, found: ForwardPass, model: Any, batch: Batch) -> None:
        self.found, self.model, self.batch = found, model, batch
        self.given = Completions.of(batch)
        self.same: Tensor | None = None

    def fits(self, model: Any, ids: Tensor, attention: Tensor, keep: int, extra: dict[str, Any]) -> bool:
        """Whether a call has the same model, shapes and images: what can be compared without reading values."""
        shapes = ids.shape == self.given.ids.shape and attention.shape == self.given.attention.shape
        images = all(extra.get(name) is self.batch.get(name) for name in MULTIMODAL)
        return model is self.model and keep == self.given.keep and shapes and images

    def give(self, ids: Tensor, attention: Tensor) -> Result:
        """The answer; the comparison of the values stays on the device."""
        self.same = torch.stack([(ids == self.given.ids).all(), (attention == self.given.attention).all()]).all()
        return self.found.logp, self.found.entropy, self.found.aux_loss

    def check(self) -> None:
        """After the loss: the answer was taken, by a call about the same tokens."""
        if self.same is None or not bool(self.same):
            raise ContractError(
                "one call of _get_per_token_logps_and_entropies in TRL's loss, with the policy and the batch's tokens",
                "no such call" if self.same is None else "a call with other tokens",
            )


# Our term in the place of TRL's KL, so that TRL's own code reduces and accumulates it.
#
# Touches `GRPOTrainer.beta` and `GRPOConfig.beta`, which stay 0 except inside the functions of this file, and
# `GRPOTrainer._metrics`.


class StandInBeta:
    """Stand-in for `beta`: `beta * per_token_kl` returns our term, and `beta != 0.0` is true."""

    def __init__(self, per_token: Tensor) -> None:
        self.per_token = per_token
        self.uses = 0

    def __ne__(self, other: object) -> bool:
        """True: TRL adds a KL unless `beta` is 0."""
        return True

    def __mul__(self, other: Tensor) -> Tensor:
        """(B, T) our term; `other`, TRL's own KL, is dropped."""
        self.uses += 1
        return self.per_token


@contextmanager
def add_to_loss(trainer: GRPOTrainer, per_token: Tensor | None) -> Iterator[None]:
    """While TRL computes a loss, add (B, T) `per_token` to it, before TRL reduces it; None adds nothing."""
    if per_token is None:
        yield
        return
    given: Any = StandInBeta(per_token)
    trainer.beta = given
    try:
        yield
    finally:
        trainer.beta = 0.0
        trainer._metrics[current_mode(trainer)].pop("kl", None)  # TRL's own KL, which was dropped
    if given.uses != 1:
        raise ContractError("one product `beta * per_token_kl` in TRL's loss", f"{given.uses}")


@contextmanager
def reference_is_built(args: GRPOConfig, wanted: bool) -> Iterator[None]:
    """While TRL sets up a trainer, make it load and prepare a reference model, as it does for `beta` > 0, or not."""
    args.beta = 1.0 if wanted else 0.0
    try:
        yield
    finally:
        args.beta = 0.0


@contextmanager
def reference_is_scored(trainer: GRPOTrainer, wanted: bool) -> Iterator[None]:
    """While TRL scores completions, make it compute their log-probs by the reference too, or not."""
    trainer.beta = 1.0 if wanted else 0.0
    try:
        yield
    finally:
        trainer.beta = 0.0

"""The seam to TRL: private names of TRL, transformers and accelerate are used here and in `contract.py`.

Methods that have to be overridden are listed in `contract.OVERRIDES`. A test searches `trl/` and `training/` for
private names outside these two files and that list.
"""

import copy
import inspect
import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import (
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    maybe_gather_lm_head_ctx,
    pad,
    use_adapter,
)

from ..errors import KlgradError, RunError
from ..integrations import lend
from ..kernels import TokenStatistics
from ..support import Json, Model, write_whole

if TYPE_CHECKING:
    from .kl_trainer import KLTrainer


FIRST = (1, 16)
"""The first version of TRL that this package was written for; `pyproject.toml` claims the same."""
WINDOW = f"trl>={FIRST[0]}.{FIRST[1]}"


class ContractError(KlgradError, RuntimeError):
    """The installed TRL is not one that the trainer can rely on: the KL might be left out or changed."""

    def __init__(self, expected: str, received: str, remedy: str | None = None) -> None:
        install = f"install a TRL that klgrad is tested with: pip install '{WINDOW}', or the version before this one"
        super().__init__(expected, received, remedy or install)


# TRL's metrics, and the state of TRL and transformers that their checkpoints leave out.

Mode = Literal["train", "eval"]


def current_mode(trainer: GRPOTrainer) -> Mode:
    """`train` or `eval`: under which of the two TRL logs now."""
    return "train" if trainer.model.training else "eval"  # pyright: ignore[reportOptionalMemberAccess]


def log_metrics(trainer: GRPOTrainer, mode: Mode, metrics: dict[str, float]) -> None:
    """Add numbers to those that TRL averages and logs next."""
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)


class UnsavedState:
    """What checkpoints of TRL and transformers leave out.

    It is the place within a generation batch, that batch, the metrics that are not logged yet, an entropy bonus that is
    adapted, and the loss since the last logged row.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> Json:
        """The state between two updates."""
        trainer: Any = self._trainer
        names = ["_step", "_total_train_tokens", "_tr_loss", "_globalstep_last_logged"]
        names += ["entropy_coef", "_last_world_entropy"] if trainer.use_adaptive_entropy else []
        every = trainer.args.steps_per_generation * trainer.num_iterations
        is_used_up = trainer._buffered_inputs is None or trainer._step % every == 0  # the next step samples a new batch
        return {
            "attributes": {name: getattr(trainer, name) for name in names},
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "metrics": dict(trainer._metrics["train"]),
            "buffer": None if is_used_up else trainer._buffered_inputs,
        }

    def load_state_dict(self, state: Json) -> None:
        """Continue from it; `Trainer` sets some of it to 0 between loading a checkpoint and the first step."""
        trainer = self._trainer
        for name, value in state["attributes"].items():
            setattr(trainer, name, value)
        trainer.state.num_input_tokens_seen = state["tokens_seen"]
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(state["metrics"])
        trainer._buffered_inputs = state["buffer"]


# State that TRL's checkpoints leave out, in one file per process beside the checkpoint.
#
# transformers' `ExportableState` does not fit: it makes new objects from JSON of the first process, and these parts
# hold tensors, differ between processes, and are in use.

STATE = "klgrad_state_{}.pt"
"""The file of a process."""

Parts = Mapping[str, Any]
"""Parts of a trainer by name, with `state_dict` and `load_state_dict`; a state is plain data and tensors."""


def save_parts(trainer: "KLTrainer", folder: Path) -> None:
    """Write the state of `trainer.checkpointed` to a checkpoint."""
    state = {name: plain(part.state_dict()) for name, part in trainer.checkpointed.items()}
    content = io.BytesIO()
    torch.save({"processes": trainer.accelerator.num_processes, "state": state}, content)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / STATE.format(trainer.accelerator.process_index), content.getvalue())


def load_parts(trainer: "KLTrainer", folder: Path) -> Json:
    """The state that `save_parts` wrote, by as many processes. No code in the file is executed."""
    accelerator = trainer.accelerator
    path = folder / STATE.format(accelerator.process_index)
    saved: Json = {"processes": "fewer"}
    if path.is_file():
        saved = torch.load(path, map_location=accelerator.device, weights_only=True)
    if saved["processes"] != accelerator.num_processes:
        expected, received = f"a checkpoint of {accelerator.num_processes} processes", saved["processes"]
        raise RunError(expected, f"{folder.name}, of {received}", "resume with the number that wrote it")
    return saved["state"]


def plain(x: object) -> object:
    """Nested data with Python's numbers in the place of NumPy's, which `torch.load` refuses.

    Example:
        >>> plain({"step": 3, "rewards": [numpy.float64(0.5), None]})
        {'step': 3, 'rewards': [0.5, None]}
    """
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return x.item() if isinstance(x, numpy.generic) else x


def checkpoint_folder(trainer: GRPOTrainer, trial: object) -> Path:
    """Where `Trainer` writes the checkpoint of this step."""
    return Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"


def load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Load the model's weights, and nothing else, from a checkpoint."""
    trainer._load_from_checkpoint(str(checkpoint))


# A scored batch of completions, under the keys that TRL's loss reads.

Batch = Json

REF_LOGP, OLD_LOGP, SAMPLER_LOGP = "ref_per_token_logps", "old_per_token_logps", "sampling_per_token_logps"
"""Keys of (B, T) log-probs: by the reference, which TRL computes when it scores the batch; by the policy at the time of
sampling, from which TRL's loss computes its ratio; and vLLM's own."""

NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""The keys of prompts and completions, in the batches of all of TRL's trainers that sample."""


@dataclass(frozen=True, eq=False)
class CompletionRows:
    """Prompts and completions as one sequence; the last `keep` tokens are completion, live where `mask` is 1."""

    ids: Tensor
    attention: Tensor
    keep: int
    mask: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "CompletionRows":
        """Join the prompts and completions of a batch, as TRL's loss does."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        return cls(ids, attention, batch["completion_ids"].shape[1], batch["completion_mask"])

    def of_rows(self, rows: Tensor) -> "CompletionRows":
        return CompletionRows(self.ids[rows], self.attention[rows], self.keep, self.mask[rows])

    @property
    def targets(self) -> Tensor:
        """(B, keep) the tokens of the completions."""
        return self.ids[:, -self.keep :]


FACTOR = 6364136223846793005
"""An odd number, whose powers modulo 2^64 differ for all lengths that occur."""


def prompt_keys(batch: Batch) -> Tensor:
    """(B,) a number for each prompt, the same for the same tokens, on every process and in every batch.

    A polynomial in the tokens, modulo 2^64. Prompts are padded on the left, so powers are counted from the right.
    """
    ids, mask = batch["prompt_ids"], batch["prompt_mask"]
    factor = torch.full((ids.shape[1],), FACTOR, dtype=torch.int64, device=ids.device)
    return ((ids + 1) * mask * factor.cumprod(0).flip(0)).sum(1)


TEACHER_PROMPT = ("teacher_prompt_ids", "teacher_prompt_mask")
"""Keys of this package: the prompts that the teacher sees, if they are others."""


def teacher_view(batch: Batch) -> Batch:
    """The batch with the teacher's prompts in the place of the policy's, if it has any."""
    if TEACHER_PROMPT[0] not in batch:
        return batch
    return {**batch, "prompt_ids": batch[TEACHER_PROMPT[0]], "prompt_mask": batch[TEACHER_PROMPT[1]]}


def keep_teacher_prompts(batch: Batch, trainer: GRPOTrainer, prompts: list[object]) -> None:
    batch |= dict(zip(TEACHER_PROMPT, _ids_and_mask(trainer, tokenize_prompts(trainer, prompts), "left"), strict=True))


def sampled_tokens(batch: Batch) -> Tensor:
    """(B, T) 1 where the policy sampled a token; 0 for padding and for text that a tool returned."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def sampler_log_probs(batch: Batch, logp: Tensor) -> Tensor | None:
    """(B, T) log-probs by the model that sampled the tokens, or None where TRL kept none.

    vLLM's own come first, then those of the policy at the time of sampling. vLLM reports NaN for a token that it could
    not score; `logp`, the policy's, takes its place.
    """
    sampler = batch.get(SAMPLER_LOGP, batch.get(OLD_LOGP))
    return None if sampler is None else torch.where(sampler.isnan(), logp, sampler)


# The policy and the reference as models: found, loaded and gathered by TRL's helpers.


@contextmanager
def reference_model(trainer: GRPOTrainer) -> Iterator[Model]:
    """The reference: a model of its own, or the policy with its adapters switched off while the context lasts."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    with without_adapters(trainer.accelerator.unwrap_model(trainer.model)):
        yield trainer.model


def without_adapters(model: Model) -> AbstractContextManager[object]:
    """While the context lasts, the adapters are switched off, or replaced by the copy `ref` that TRL made of them."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def base_of(model: Model) -> Model:
    """The language model without its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: Model) -> bool:
    return hasattr(model, "peft_config")


def gathered(*parameters: torch.nn.Parameter | None) -> AbstractContextManager[object]:
    """While the context lasts, the parameters are whole, even where DeepSpeed has split them between processes."""
    return maybe_gather_lm_head_ctx(*(p for p in parameters if p is not None))


def load_reference(trainer: GRPOTrainer, name: str, args: GRPOConfig) -> Model:
    """Load a reference, and prepare it as TRL prepares its own."""
    policy: Model = trainer.model
    how: Json = {"trust_remote_code": args.trust_remote_code, "dtype": policy.dtype}
    how["attn_implementation"] = policy.config._attn_implementation
    if trainer.accelerator.num_processes > 1:
        how["device_map"] = None  # as TRL does: "auto" fails with several processes
    model = create_model_from_path(name, **how)
    disable_dropout_in_model(model)
    add_fused_lm_head(model, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


# CompletionRows: sampled, tokenized, padded and shuffled by TRL.

Rows = list[list[int]]


class Sampled(NamedTuple):
    """What `_generate` returns first."""

    prompt_ids: Rows
    completion_ids: Rows
    tool_mask: Rows | None
    completions: list[object]
    logprobs: object
    extra_fields: object
    images: object


def tokenize_prompts(trainer: GRPOTrainer, prompts: list[object]) -> Rows:
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
    batch: Batch = {}
    for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
        batch[f"{name}_ids"], batch[f"{name}_mask"] = _ids_and_mask(trainer, rows, side)
    return batch


def _ids_and_mask(trainer: GRPOTrainer, rows: Rows, side: str) -> tuple[Tensor, Tensor]:
    padding: Any = trainer._tokenizer.pad_token_id
    return padded_rows(trainer, rows, side, padding), padded_rows(trainer, [[1] * len(row) for row in rows], side, 0)


def padded_rows(trainer: GRPOTrainer, rows: Rows, side: str, value: int) -> Tensor:
    """(B, T) the rows, padded with a value on one side."""
    tensors = [torch.tensor(row) for row in rows]
    return pad(tensors, padding_value=value, padding_side=side).to(trainer.accelerator.device)


# Log-probs of completions by TRL's forward pass, and TRL's loss, with the forward pass that it asks for captured.

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""(B, T) log-probs, (B, T) entropies, and the auxiliary loss of a mixture of experts."""

Pass = Callable[[], Result]
"""A forward pass that TRL asked for, when it is called."""

CHANGED_BY_A_LOSS = ("_metrics", "_entropy_window_stats", "entropy_coef", "_last_world_entropy")


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """What one forward pass of the policy over a batch gave; `logp` carries the gradient."""

    logp: Tensor
    entropy: Tensor | None
    aux_loss: Tensor | None
    exact: TokenStatistics | None = None


def completion_log_probs(trainer: GRPOTrainer, model: Model, batch: Batch, **options: object) -> Result:
    """Log-probs of a batch's completions by one of the models, at the trainer's temperature and precision.

    Images and whatever else the pass takes have their names as keys of the batch. `options` are `batch_size`,
    `compute_entropy` and `compute_aux_loss`, as TRL takes them.
    """
    ask, text = GRPOTrainer._get_per_token_logps_and_entropies, CompletionRows.of(batch)
    extra = {name: batch[name] for name in inspect.signature(ask).parameters if batch.get(name) is not None}
    return ask(trainer, model, text.ids, text.attention, text.keep, **extra, **options)


class PassCapture:
    """Gives an answer of this package to the forward pass of the policy that TRL's loss asks for."""

    def __init__(self) -> None:
        self._model: Model = None
        self._answer: Callable[[Pass], Result] | None = None

    @contextmanager
    def answer(self, model: Model, answer: Callable[[Pass], Result]) -> Iterator[None]:
        """While TRL computes a loss, answer its first pass by `model`; raise `ContractError` if it asked for none."""
        self._model, self._answer = model, answer
        try:
            yield
            if self._answer is not None:
                raise ContractError("a call of _get_per_token_logps_and_entropies in TRL's loss", "no such call")
        finally:
            self._model = self._answer = None

    def __call__(self, model: Model, own: Pass) -> Result:
        """The answer, or TRL's own pass where there is none."""
        if self._answer is None or model is not self._model:
            return own()
        answer, self._answer = self._answer, None
        return answer(own)


def loss_leaves_no_trace(trainer: object) -> AbstractContextManager[None]:
    """Lend a loss of TRL copies of what it changes beside its value: metrics, and the adaptive entropy's state."""
    changing = [name for name in CHANGED_BY_A_LOSS if hasattr(trainer, name)]
    return lend(trainer, **{name: copy.deepcopy(getattr(trainer, name)) for name in changing})


def token_weights(trainer: GRPOTrainer, capture: PassCapture, model: Model, batch: Batch, like: Tensor) -> Tensor:
    """(B, T) by how much TRL's loss multiplies a KL of each token, by its mask, means and accumulation.

    TRL adds beta times k3 = e^d - d - 1 of each token to its loss, where d is ref_logp - logp. At d = log 2 its slope
    is 1, so that there the derivative of TRL's own loss by ref_logp is the weight. All else is neutral: advantages and
    entropies are 0, and ratios are 1. No model is called. A loss that does not add its KL in this way is a
    `ContractError`. The weights are on the device and of the precision of `like`.
    """
    zeros = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32), requires_grad=False)
    ref_logp = torch.full_like(zeros, math.log(2.0)).requires_grad_()
    neutral: Batch = {"advantages": zeros[:, 0], OLD_LOGP: None, REF_LOGP: ref_logp}
    if "importance_sampling_ratio" in batch:
        neutral["importance_sampling_ratio"] = torch.ones_like(batch["importance_sampling_ratio"])
    with (
        torch.enable_grad(),  # an evaluation has none
        loss_leaves_no_trace(trainer),
        lend(trainer, beta=1.0),
        capture.answer(model, lambda own: (zeros, zeros, zeros.new_zeros(()))),
    ):
        loss = GRPOTrainer._compute_loss(trainer, model, {**batch, **neutral})
        weight = torch.autograd.grad(loss, ref_logp, allow_unused=True)[0] if loss.requires_grad else None
    value = 0.0 if weight is None else float((1.0 - math.log(2.0)) * weight.sum())
    if weight is None or not math.isclose(float(loss.detach()), value, rel_tol=1e-3, abs_tol=1e-12):
        raise ContractError(
            "a loss of TRL's that adds beta * (e^d - d - 1) for each token, d = ref_logp - logp",
            "one that does not depend on the reference"
            if weight is None
            else f"{float(loss):g} in the place of {value:g}",
        )
    return weight

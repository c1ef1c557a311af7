"""`KLCallback`: reports the KL of a run of any TRL trainer, and whether its β acts."""

import inspect
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.rollout import Rollout
from ..errors import KlgradError, MeaningError, MissingExtraError, RunError
from ..support import Json, Model, ensure_folder, write_whole
from . import compat
from .compat import NEEDED, REF_LOGP, SAMPLER_LOGP, Batch, ContractError
from .metrics import Window
from .reference import Columns, Passes, Reference, StartWeights
from .scorer import gather_rows

# Per-token log-probs of a run as Parquet, one file per measured step; `klgrad logs FOLDER` reads them.

PER_TOKEN = {
    **dict.fromkeys(("logp", "ref_logp", "old_logp", "behavior_logp"), torch.float32),
    "token_id": torch.int32,
}
"""The columns of lists, each with one entry per live token; a role that a run does not have has no column."""


class RolloutFiles:
    """Writes a file per step into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int) -> None:
        """Prepare the folder before training from `step` on; a new run is not mixed with another one's files."""
        _pyarrow()
        if step == 0 and any(self.folder.glob("step-*.parquet")):
            raise RunError("a folder without files of another run", f"{self.folder}", "name another folder")
        ensure_folder(self.folder)

    def write(self, step: int, batches: list[Columns]) -> None:
        """Write the completions of one step: the columns of its micro-batches, of all processes."""
        pa, pq = _pyarrow()
        rows: Json = {"group": [key for batch in batches for key in batch["group"].tolist()]}
        for name, dtype in PER_TOKEN.items():
            if all(batch.get(name) is not None for batch in batches):
                lists = [row for batch in batches for row in _live(batch[name], batch["mask"], dtype)]
                rows[name] = pa.array(lists, pa.list_(pa.from_numpy_dtype(lists[0].dtype)))
        rows["step"] = [step] * len(rows["group"])
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(rows), sink, compression="zstd")
        write_whole(self.folder / f"step-{step:08d}.parquet", sink.getvalue().to_pybytes())


def _live(x: Tensor, mask: Tensor, dtype: torch.dtype) -> list[Any]:
    """One array per completion, of its live tokens."""
    x, mask = x.to("cpu", dtype), mask.bool().cpu()
    return [row[live].numpy() for row, live in zip(x, mask, strict=True)]


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow, to write Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    return pyarrow, pyarrow.parquet


# Does β move the gradient? With beta > 0 a trainer loads a reference and scores every completion by it. A subclass
# whose loss leaves the KL out trains without an error, and without a KL.

PROBES, LARGEST = 8, 2**20
"""The gradient is looked at for a few of the last parameters, each of at most this many elements."""
SHIFT = 1.0
"""Nats by which the reference's log-probs are moved: as they are they would not do, since the KL's gradient is 0 where
π = ref."""
NOISE = 10.0
"""A change of the gradient is one if it exceeds this multiple of the difference between two equal evaluations."""


def gradient_moves(trainer: GRPOTrainer, loss: Callable[[Batch], Tensor], model: Model, batch: Batch) -> bool:
    """Whether ∂L/∂θ is another with another reference. It costs three forward passes, with graphs of their own.

    A graph is not used twice: some layers, such as Liger's, overwrite in a backward pass what another pass needs.
    """
    if REF_LOGP not in batch:
        return False  # the loss has nothing to compute a KL from
    accelerator, trained = trainer.accelerator, [p for p in model.parameters() if p.requires_grad]
    probes = [p for p in trained if 0 < p.numel() <= LARGEST][-PROBES:] or trained[-1:]
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []

    def gradient(shift: float) -> list[Tensor | None]:
        moved = {**batch, REF_LOGP: batch[REF_LOGP] - shift}
        # Each has the same random numbers, for dropout.
        with compat.loss_leaves_no_trace(trainer), accelerator.no_sync(model), torch.random.fork_rng(devices):
            return list(torch.autograd.grad(loss(moved), probes, allow_unused=True))

    def distance(a: list[Tensor | None], b: list[Tensor | None]) -> float:
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        return max((float((x - y).abs().max()) for x, y in pairs), default=0.0)

    here, again, away = gradient(0.0), gradient(0.0), gradient(SHIFT)
    return distance(here, away) > NOISE * distance(here, again)


# Observe a trainer of transformers or TRL from outside, while it trains: `_prepare_inputs`, TRL's
# `_generate_and_score_completions`, `compute_loss` and `log` are replaced on the instance by functions that call them.

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
        "give it to the trainer: callbacks=[KLCallback()]",
    )


# `KLCallback`: reports the KL to the reference in any run of TRL or transformers, and changes nothing in it.

ROLES = ("logp", "ref_logp", "mask", "behavior_logp", "token_reverse_kl", "token_forward_kl")
"""The columns that make a `Rollout`."""


class CallbackWarning(UserWarning):
    """`KLCallback` reports nothing, or not everything, or found a loss that leaves the KL out."""


class KLCallback(TrainerCallback):
    """Reports the KL to the reference every `every` updates, on the completions of that update.

    It works with every trainer whose batches have prompts and completions: TRL's GRPO, RLOO and distillation, their
    subclasses, and `KLTrainer`; with beta = 0 too, where TRL loads no reference and reports no KL. The numbers go into
    the trainer's own log, and have the names of `klgrad.reports`: `kl/reverse/k3/per_token`, with its standard error
    beside it, `length/mean`, `ratio/sequence/effective_sample_size` and, if vLLM's log-probs are there, `kl/mismatch/`.

    A step is measured only if its completions were sampled by the policy as it is before the update; with several
    updates per generation this is the first of them. The training is not affected: not one bit of the weights differs.
    A failure is reported as a `CallbackWarning`, and training goes on.

    Args:
        every: measure the first update, and then one of this many.
        exact: report the exact KLs over the vocabulary too, from hidden states. Needs a model whose head is known.
        reference: a model. By default it is the trainer's own (`ref_model`, or the teacher of a distillation); with
            PEFT, the policy without its adapters; else the weights at the start, of which a copy is kept on the CPU.
        log_rollouts: a folder for the log-probs of each measured step, as Parquet: `klgrad logs FOLDER` reads it. If it
            has the files of another run, none are written, with a warning.
        check_beta: with beta > 0, warn at the first update if the gradient does not depend on the reference.

    Attributes:
        beta_moves_gradient: the result of that check; None while there is none.

    Example:
        >>> from klgrad.trl import KLCallback
        >>> trainer = GRPOTrainer(..., callbacks=[KLCallback(log_rollouts="rollouts")])  # doctest: +SKIP
        >>> KLCallback(every=0)
        Traceback (most recent call last):
            ...
        klgrad.errors.MeaningError: expected every >= 1; received 0; remedy: write every=1 for each update
    """

    def __init__(
        self,
        every: int = 100,
        *,
        exact: bool = False,
        reference: Model = None,
        log_rollouts: str | Path | None = None,
        check_beta: bool = True,
    ) -> None:
        if every < 1:
            raise MeaningError("every >= 1", f"{every}", "write every=1 for each update")
        self.every, self.exact, self.reference, self.check_beta = every, exact, reference, check_beta
        self.beta_moves_gradient: bool | None = None
        self.files = None if log_rollouts is None else RolloutFiles(Path(log_rollouts))
        self._trainer: Any = None
        self._before: dict[str, object] = {}
        self._start: StartWeights | None = None
        self._passes: Passes | None = None
        self._window = Window()
        self._pending: dict[str, float] = {}
        self._is_checked = False
        self._held: list[Batch] = []
        self._generated_at: int | None = None
        self._is_due = self._generates = False
        self._told: set[str] = set()

    # Events of the trainer

    def on_init_end(self, args: object, state: TrainerState, control: object, model: Model = None, **_: object) -> None:
        """Keep the start weights: when training begins, a checkpoint may have been loaded over them."""
        if self.reference is None and model is not None and not compat.has_adapters(model):
            self._start = StartWeights(model)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        self._stop()
        self._told = set()
        if self.files is not None and state.is_world_process_zero:
            try:
                self.files.begin(state.global_step)
            except Exception as error:  # no pyarrow, or a folder that cannot be written to: the training goes on
                self.files = None
                self._warn(f"no log-probs are written in this run: {type(error).__name__}: {error}")
        try:
            self._begin(state)
        except KlgradError as error:
            self._stop()
            self._warn(f"nothing is reported in this run: {error}")

    def _begin(self, state: TrainerState) -> None:
        trainer = self._trainer = trainer_of(self, state)
        reference = Reference(trainer, self.reference, self._start)
        if not reference.needs_start_weights:
            self._start = None  # frees the copy
        elif self._start is None:
            self._keep_late(reference, state)
        if self._start is not None and trainer.accelerator.device.type == "cuda":
            self._start.pin()
        self._passes = Passes(trainer, reference, self.exact)
        self._window, self._generated_at, self._is_due = Window(), None, False
        self._wrap(PREPARE, self._on_batch)
        self._wrap(LOG, self._on_log)
        self._generates = hasattr(trainer, GENERATE)  # as TRL's trainers
        if self._generates:
            self._wrap(GENERATE, self._on_generation)
        if self.check_beta and isinstance(trainer, GRPOTrainer) and trainer.beta > 0:
            self._is_checked = False
            self._wrap(LOSS, self._on_loss)
        if state.global_step == 0 and 1 < state.max_steps <= self.every:
            self._warn(
                f"expected a run of more than every={self.every} updates; received {state.max_steps}, of which only "
                "the first is measured, before the weights have changed; remedy: write a smaller every"
            )

    def _keep_late(self, reference: Reference, state: TrainerState) -> None:
        """Keep the weights now, for a callback that was added to a trainer that existed already."""
        self._start = reference.start = StartWeights(self._trainer.accelerator.unwrap_model(self._trainer.model))
        if state.global_step > 0:
            self._warn(
                f"the reference is the policy at step {state.global_step}, from which the run continues, and not at its"
                " start: give KLCallback to the trainer when it is made, or give a model as reference"
            )

    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """An update begins; it is measured if one is due and its completions are new."""
        self._held = []
        self._is_due = self._is_due or state.global_step % self.every == 0

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self._stop()

    def _wrap(self, name: str, around: Callable[..., object]) -> None:
        """Let `around(method, *args, **kwargs)` stand for a method of the trainer."""
        self._before[name] = vars(self._trainer).get(name)
        setattr(self._trainer, name, partial(around, getattr(self._trainer, name)))

    def _stop(self) -> None:
        """Restore the methods of the trainer."""
        for name, before in self._before.items():
            delattr(self._trainer, name)
            if before is not None:
                setattr(self._trainer, name, before)
        self._before, self._held = {}, []

    # What the trainer does

    def _on_generation(self, generate: Callable[..., object], *args: object, **kwargs: object) -> object:
        batch = generate(*args, **kwargs)
        if self._trainer.model.training:
            self._generated_at = self._trainer.state.global_step
        return batch

    def _on_batch(self, prepare: Callable[..., object], *args: object, **kwargs: object) -> object:
        batch = prepare(*args, **kwargs)
        if self._trainer.model.training and self._is_due:
            self._see_batch(batch)
        return batch

    def _see_batch(self, batch: object) -> None:
        """Hold a micro-batch of an update that is measured, and measure all of them with the last."""
        if not isinstance(batch, dict) or any(name not in batch for name in NEEDED):
            names = ", ".join(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
            self._warn(
                f"nothing is reported in this run: expected batches with {', '.join(NEEDED)}; received {names}; "
                "remedy: use KLCallback with a trainer that samples completions (GRPO, RLOO, distillation)"
            )
            self._stop()
            return
        if not self._generates or self._generated_at == self._trainer.state.global_step:
            self._held.append(batch)
        if self._trainer.accelerator.sync_gradients and self._held:
            held, self._held, self._is_due = self._held, [], False
            self._measure(self._trainer.state.global_step + 1, held)

    def _on_loss(
        self, loss: Callable[..., Tensor], model: Model, batch: Batch, *args: object, **kwargs: object
    ) -> Tensor:
        # Each process must have a token to train on. All look, or none: the loss exchanges metrics.
        is_next = not self._is_checked and self._trainer.model.training
        if is_next and self._of_all(bool(compat.sampled_tokens(batch).any()))[0]:
            self._is_checked = True
            self._check_beta(lambda batch: loss(model, batch, *args, **kwargs), model, batch)
        return loss(model, batch, *args, **kwargs)

    def _check_beta(self, loss: Callable[[Batch], Tensor], model: Model, batch: Batch) -> None:
        try:
            moves = gradient_moves(self._trainer, loss, model, batch)
        except Exception as error:  # too little memory, for example: the training goes on
            if self._trainer.accelerator.num_processes > 1:
                raise  # the others wait for this process within the loss
            self._warn(f"whether beta moves the gradient is not known: {type(error).__name__}: {error}")
            return
        self.beta_moves_gradient = self._of_all(moves)[1]  # one process that sees a dependence is enough
        self._pending["kl/beta_moves_gradient"] = float(self.beta_moves_gradient)
        if not self.beta_moves_gradient:
            self._warn(
                f"expected a loss whose gradient depends on the reference, as beta={self._trainer.beta:g} declares; "
                f"received the same gradient for another reference, from {type(self._trainer).__name__}.compute_loss; "
                "remedy: the KL is left out of the loss although the reference is loaded and scored: add beta * "
                "per_token_kl to the loss, or set beta=0, which saves the reference's memory and time. "
                "KLCallback(check_beta=False) silences this"
            )

    def _of_all(self, x: bool) -> tuple[bool, bool]:
        """Whether it holds on all processes, and whether on any."""
        accelerator = self._trainer.accelerator
        each = accelerator.gather(torch.tensor([int(x)], device=accelerator.device))
        return bool(each.min()), bool(each.max())

    def _on_log(self, log: Callable[..., None], logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Add what is new since the last row to a row of training; a number of the trainer's own keeps its value."""
        if not any(name.startswith("eval_") for name in logs):
            numbers, self._pending = self._pending, {}
            if not self._window.is_empty:
                numbers, self._window = {**numbers, **self._window.metrics()}, Window()
            logs.update({name: value for name, value in numbers.items() if name not in logs})
        log(logs, *args, **kwargs)

    # Measure

    def _measure(self, step: int, batches: list[Batch]) -> None:
        """Score the completions of one update, on all processes at once, and add them to the window."""
        assert self._passes is not None  # since training began
        local, failure = list[Columns](), None
        try:
            local = self._passes(batches)
        except Exception as error:  # whatever it is, the training goes on
            failure = error
        if not self._of_all(failure is None)[0]:
            self._warn_of(step, failure)  # one process that failed must not leave the others waiting for its numbers
            return
        try:
            of_the_sampler = all(SAMPLER_LOGP in batch for batch in batches)
            self._record(step, [gather_rows(self._trainer.accelerator, each)[0] for each in local], of_the_sampler)
        except Exception as error:  # the same on all processes, which have the same numbers
            self._warn_of(step, error)

    def _record(self, step: int, batches: list[Columns], of_the_sampler: bool) -> None:
        # All are checked before the first is added.
        rollouts = [Rollout(**{role: columns.get(role) for role in ROLES}) for columns in batches]  # pyright: ignore[reportArgumentType]
        for each, rollout in zip(batches, rollouts, strict=True):
            self._window.add(step, rollout, each["group"], of_the_sampler=of_the_sampler)
        if self.files is not None and self._trainer.accelerator.is_main_process:
            # The policy's own log-probs before an update are not those of a sampler.
            self.files.write(step, batches if of_the_sampler else [{**each, "behavior_logp": None} for each in batches])

    def _warn_of(self, step: int, error: Exception | None) -> None:
        if error is None:
            self._warn(f"no KL of step {step} is reported: another process failed")
            return
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        if text not in self._told:  # once, and not at every measurement
            self._told.add(text)
            self._warn(f"no KL of step {step} is reported, nor of later ones that fail like it: {text}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"KLCallback: {text}", CallbackWarning, stacklevel=3)

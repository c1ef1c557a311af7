"""`KLCallback`: reports the KL to the reference in any run of TRL or transformers, and changes nothing in it."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ...core.rollout import Rollout
from ...errors import KlgradError, MeaningError
from ..gather import everywhere
from ..seam import batch as scored
from ..seam.batch import NEEDED, Batch
from ..seam.models import has_adapters
from ..seam.observe import GENERATE, LOSS, PREPARE, Observer, trainer_of
from .beta_check import BetaCheck
from .passes import Columns, Passes
from .reference import Reference, StartWeights
from .rollout_files import RolloutFiles
from .window import Window

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
            has the files of another run, a numbered folder inside it is used, with a warning.
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
        reference: Any = None,
        log_rollouts: str | Path | None = None,
        check_beta: bool = True,
    ) -> None:
        if every < 1:
            raise MeaningError("every >= 1", f"{every}", "write every=1 for each update")
        self.every, self.exact, self.reference, self.check_beta = every, exact, reference, check_beta
        self.files = None if log_rollouts is None else RolloutFiles(Path(log_rollouts))
        self.beta_moves_gradient: bool | None = None
        self._trainer: Any = None
        self._observer: Observer | None = None
        self._start: StartWeights | None = None
        self._passes: Passes | None = None
        self._window = Window()
        self._found: dict[str, float] = {}
        self._held: list[Batch] = []
        self._generated_at: int | None = None
        self._is_due = False
        self._told: set[str] = set()

    def attach(self, trainer: Any) -> "KLCallback":
        """Name the trainer explicitly, where it cannot be found by itself; also adds the callback to it."""
        self._trainer = trainer
        if all(each is not self for each in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        return self

    # Events of the trainer

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Keep the start weights: when training begins, a checkpoint may have been loaded over them."""
        if self.reference is None and model is not None and not has_adapters(model):
            self._start = StartWeights(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Find the trainer, and begin to observe it."""
        self._stop()
        self._told = set()
        try:
            if self.files is not None and state.is_world_process_zero:
                self._begin_files(self.files, args, state)
            self._begin(state)
        except KlgradError as error:
            self._stop()
            self._warn(f"nothing is reported in this run: {error}")

    def _begin_files(self, files: RolloutFiles, args: Any, state: Any) -> None:
        given = files.folder
        try:
            if files.begin(state.global_step, str(Path(args.output_dir).resolve())):
                self._warn(f"{given} has the log-probs of another run: those of this one are written to {files.folder}")
        except Exception as error:  # no pyarrow, or a folder that cannot be written to: the training goes on
            self.files = None
            self._warn(f"no log-probs are written in this run: {type(error).__name__}: {error}")

    def _begin(self, state: Any) -> None:
        trainer = self._trainer = self._trainer or trainer_of(self, state)
        reference = Reference(trainer, self.reference, self._start)
        if not reference.needs_start_weights:
            self._start = None  # frees the copy
        elif self._start is None:
            self._keep_late(reference, state)
        if self._start is not None and trainer.accelerator.device.type == "cuda":
            self._start.pin()
        self._passes = Passes(trainer, reference, self.exact)
        self._window, self._generated_at, self._is_due = Window(), None, False
        observer = self._observer = Observer(trainer)
        observer.on_batch(self._see_batch)
        observer.on_generation(self._see_generation)
        observer.on_log(self._numbers)
        check = BetaCheck(trainer)
        if self.check_beta and check.is_due:
            observer.on_loss(lambda *given: self._checked(check, *given))
        if state.global_step == 0 and 1 < state.max_steps <= self.every:
            self._warn(
                f"expected a run of more than every={self.every} updates; received {state.max_steps}, of which only "
                "the first is measured, before the weights have changed; remedy: write a smaller every"
            )

    def _keep_late(self, reference: Reference, state: Any) -> None:
        """Keep the weights now, for a callback that was added to a trainer that existed already."""
        self._start = reference.start = StartWeights(self._trainer.accelerator.unwrap_model(self._trainer.model))
        if state.global_step > 0:
            self._warn(
                f"the reference is the policy at step {state.global_step}, from which the run continues, and not at its"
                " start: give KLCallback to the trainer when it is made, or give a model as reference"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An update begins; it is measured if one is due and its completions are new."""
        self._held = []
        self._is_due = self._is_due or state.global_step % self.every == 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop to observe the trainer."""
        self._stop()

    def _stop(self) -> None:
        if self._observer is not None:
            self._observer.release()
        self._observer, self._held = None, []

    # What the trainer does

    def _see_generation(self) -> None:
        self._generated_at = self._trainer.state.global_step

    def _see_batch(self, batch: Any) -> None:
        """Hold a micro-batch of an update that is measured, and measure all of them with the last."""
        if self._observer is None or not self._is_due:
            return
        if not scored.has_completions(batch):
            self._give_up(batch)
            return
        if not self._observer.generates or self._generated_at == self._trainer.state.global_step:
            self._held.append(batch)
        if self._trainer.accelerator.sync_gradients and self._held:
            held, self._held, self._is_due = self._held, [], False
            self._measure(self._trainer.state.global_step + 1, held)

    def _give_up(self, batch: Any) -> None:
        names = ", ".join(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        self._warn(
            f"nothing is reported in this run: expected batches with {', '.join(NEEDED)}; received {names}; remedy: "
            "use KLCallback with a trainer that samples completions (GRPO, RLOO, distillation)"
        )
        self._release(PREPARE, GENERATE)

    def _checked(self, check: BetaCheck, loss: Callable[..., Any], model: Any, batch: Any) -> Any:
        value = check(loss, model, batch)
        if check.verdict is not None:
            self._release(LOSS)
            if check.verdict != "unknown":
                self.beta_moves_gradient = check.verdict == "moves"
                self._found["kl/beta_moves_gradient"] = float(self.beta_moves_gradient)
            if check.verdict == "does not move":
                self._warn(check.message())
        return value

    def _numbers(self) -> dict[str, float]:
        """What is new since the last logged row."""
        found, self._found = self._found, {}
        if not self._window.is_empty:
            found, self._window = {**found, **self._window.metrics()}, Window()
        return found

    def _release(self, *names: str) -> None:
        if self._observer is not None:
            self._observer.release(*names)

    # Measure

    def _measure(self, step: int, batches: list[Batch]) -> None:
        """Score the completions of one update, on all processes at once, and add them to the window."""
        assert self._passes is not None  # since training began
        local, failure = None, None
        try:
            local = self._passes(batches)
        except Exception as error:  # whatever it is, the training goes on
            failure = error
        if not self._all_succeeded(failure is None):
            self._warn_of(step, failure)
            return
        assert local is not None
        try:
            of_the_sampler = all(map(scored.has_sampler_log_probs, batches))
            self._record(step, [everywhere(self._trainer.accelerator, each)[0] for each in local], of_the_sampler)
        except Exception as error:  # the same on all processes, which have the same numbers
            self._warn_of(step, error)

    def _record(self, step: int, found: list[Columns], of_the_sampler: bool) -> None:
        # All are checked before the first is added.
        made: list[dict[str, Any]] = [{role: each.get(role) for role in ROLES} for each in found]
        rollouts = [Rollout(**each) for each in made]
        for each, rollout in zip(found, rollouts, strict=True):
            self._window.add(step, rollout, each["group"], of_the_sampler=of_the_sampler)
        if self.files is not None and self._trainer.accelerator.is_main_process:
            # The policy's own log-probs before an update are not those of a sampler.
            self.files.write(step, found if of_the_sampler else [{**each, "behavior_logp": None} for each in found])

    def _all_succeeded(self, own: bool) -> bool:
        """Whether no process failed: one that failed must not leave the others waiting for its numbers."""
        accelerator = self._trainer.accelerator
        found: Any = accelerator.gather(torch.tensor([int(own)], device=accelerator.device))
        return bool(found.min())

    def _warn_of(self, step: int, error: Exception | None) -> None:
        if error is None:
            self._warn(f"no KL of step {step} is reported: another process failed")
            return
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        if said not in self._told:  # once, and not at every measurement
            self._told.add(said)
            self._warn(f"no KL of step {step} is reported, nor of later ones that fail like it: {said}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"KLCallback: {text}", CallbackWarning, stacklevel=3)

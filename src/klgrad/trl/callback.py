"""`KLCallback`: reports the KL of a run of any TRL trainer, and whether its β acts."""

import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..core.rollout import Rollout
from ..errors import KlgradError, MeaningError, MissingExtraError
from ..support import ensure_folder, write_whole
from . import compat
from .compat import NEEDED, Batch, has_adapters, loss_leaves_no_trace
from .contract import GENERATE, LOSS, PREPARE, Observer, scores_a_reference, trainer_of
from .metrics import Window
from .reference import Columns, Passes, Reference, StartWeights
from .scorer import everywhere

# Per-token log-probs of a run as Parquet, one file per measured step; `klgrad logs FOLDER` reads them.

PER_TOKEN = {
    "logp": torch.float32,
    "ref_logp": torch.float32,
    "old_logp": torch.float32,
    "behavior_logp": torch.float32,
    "token_id": torch.int32,
}
"""The columns of lists, each with one entry per live token; a role that a run does not have has no column."""


RUN = b"klgrad.run"
"""The key in a file's metadata for the output folder of its run."""


class RolloutFiles:
    """Writes a file per step into a folder, or into a numbered folder inside it if it has the files of another run.

    Args:
        folder: made if it is missing.

    Attributes:
        folder: where the files of this run are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._given = folder
        self._run = ""

    def begin(self, step: int, run: str) -> bool:
        """Choose the folder before training from `step` on.

        A run that continues removes its files of later steps: it makes these steps again.

        Args:
            step: the updates that were made already.
            run: what tells the run from others: its output folder.

        Returns:
            Whether the given folder has the files of another run.
        """
        _pyarrow()
        self._run = run
        numbered = (self._given if n == 1 else self._given / f"run-{n}" for n in itertools.count(1))
        mine = lambda files: not files or (step > 0 and _run_of(files[0]) == run)
        self.folder = next(folder for folder in numbered if mine(_files(folder)))
        ensure_folder(self.folder)
        for path in _files(self.folder):
            if (step_of(path) or 0) > step:
                path.unlink()
        return self.folder != self._given

    def write(self, step: int, batches: list[Columns]) -> None:
        """Write the completions of one step.

        Args:
            step: the number of the update.
            batches: the columns of its micro-batches, of all processes.
        """
        pa, pq = _pyarrow()
        rows: dict[str, Any] = {"group": [key for batch in batches for key in batch["group"].tolist()]}
        for name, dtype in PER_TOKEN.items():
            if all(batch.get(name) is not None for batch in batches):
                lists = [row for batch in batches for row in _live(batch[name], batch["mask"], dtype)]
                rows[name] = pa.array(lists, pa.list_(pa.from_numpy_dtype(lists[0].dtype)))
        rows["step"] = [step] * len(rows["group"])
        sink = pa.BufferOutputStream()
        table = pa.table(rows).replace_schema_metadata({RUN: self._run})
        pq.write_table(table, sink, compression="zstd")
        write_whole(self.folder / f"step-{step:08d}.parquet", sink.getvalue().to_pybytes())


def step_of(path: Path) -> int | None:
    """The step in a file's name, or None."""
    found = re.fullmatch(r"step-(\d+)\.parquet", path.name)
    return None if found is None else int(found[1])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.parquet"))


def _run_of(path: Path) -> str:
    """The output folder of the run that wrote a file; empty if it does not say."""
    return ((_pyarrow()[1].read_schema(path).metadata or {}).get(RUN) or b"").decode()


def _live(x: Tensor, mask: Tensor, dtype: torch.dtype) -> list[Any]:
    """One array per completion, of its live tokens."""
    x, mask = x.to("cpu", dtype), mask.bool().cpu()
    return [row[live].numpy() for row, live in zip(x, mask, strict=True)]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow, to write Parquet", "no such package", "pip install 'klgrad[logs]'") from error
    return pyarrow, pyarrow.parquet


# Does β move the gradient? Looks once whether the gradient of the training loss depends on the reference.
#
# With beta > 0 a trainer loads a reference and scores every completion by it. A subclass whose loss leaves the KL out
# trains without an error, and without a KL.

Verdict = Literal["moves", "does not move", "unknown"]
Loss = Callable[[Any, Batch], Tensor]

PROBES, LARGEST = 8, 2**20
"""The gradient is looked at for a few of the last parameters, each of at most this many elements."""

SHIFT = 1.0
"""Nats by which the reference's log-probs are moved for the second look."""

NOISE = 10.0
"""A change of the gradient is one if it exceeds this multiple of the difference between two equal evaluations."""


class BetaCheck:
    """Wraps the training loss until there is a verdict.

    The first look costs one forward pass: the reference's log-probs r are given to the loss as a leaf of the graph, and
    ∂²L/∂r∂θ is computed, which is zero if and only if ∂L/∂θ does not depend on r near its values. (∂L/∂θ itself would
    not do: where π = ref the KL has the gradient 0.) A loss that detaches r has no such derivative; so before a verdict
    against it, on the next micro-batch, ∂L/∂θ is computed with r and with r - 1.

    The training has a graph of its own: some layers, such as Liger's, overwrite in a backward pass what another pass of
    the same graph needs.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._looks = 0
        beta = getattr(trainer, "beta", 0.0)
        self.beta = float(beta) if isinstance(beta, int | float) else 0.0
        self.verdict: Verdict | None = None

    @property
    def is_due(self) -> bool:
        """Whether there is something to look at: β is set, and the loss is one that reads the reference's log-probs."""
        return self.beta > 0 and self.verdict is None and scores_a_reference(self._trainer)

    def __call__(self, loss: Loss, model: Any, batch: Batch) -> Tensor:
        """The training loss of a micro-batch, after or before a look at it."""
        if not self.is_due or not self._has_tokens_everywhere(batch):
            return loss(model, batch)
        if not compat.has_reference_log_probs(batch):
            self.verdict = "does not move"  # the loss has nothing to compute a KL from
            return loss(model, batch)
        self._looks += 1
        look = self._first_look if self._looks == 1 else self._second_look
        try:
            found = look(loss, model, batch)
        except Exception:  # too little memory, for example: the training goes on
            if self._trainer.accelerator.num_processes > 1:
                raise  # the others wait for this process within the loss
            found = "unknown"
        found = self._agreed(found)
        if self._looks > 1 or found == "moves":
            self.verdict = found
        return loss(model, batch)

    def message(self) -> str:
        """The warning for a verdict against the loss."""
        name = type(self._trainer).__name__
        return (
            f"expected a loss whose gradient depends on the reference, as beta={self.beta:g} declares; received the "
            f"same gradient for another reference, from {name}.compute_loss; remedy: the KL is left out of the loss "
            "although the reference is loaded and scored: add beta * per_token_kl to the loss, or set beta=0, which "
            "saves the reference's memory and time. KLCallback(check_beta=False) silences this"
        )

    def _first_look(self, loss: Loss, model: Any, batch: Batch) -> Verdict:
        ref_logp = compat.reference_log_probs(batch).detach().clone().requires_grad_()
        with self._apart(model):
            return _depends(loss(model, compat.with_reference_log_probs(batch, ref_logp)), ref_logp, probes(model))

    def _second_look(self, loss: Loss, model: Any, batch: Batch) -> Verdict:
        ref_logp, parameters = compat.reference_log_probs(batch), probes(model)

        def gradient(shift: float) -> list[Tensor | None]:
            moved = compat.with_reference_log_probs(batch, ref_logp - shift)
            with self._apart(model):
                return list(torch.autograd.grad(loss(model, moved), parameters, allow_unused=True))

        here, again, away = gradient(0.0), gradient(0.0), gradient(SHIFT)
        return "moves" if _distance(here, away) > NOISE * _distance(here, again) else "does not move"

    @contextmanager
    def _apart(self, model: Any) -> Iterator[None]:
        """For a loss that is not trained on: it leaves no trace, and each has the same random numbers, for dropout."""
        accelerator = self._trainer.accelerator
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        with loss_leaves_no_trace(self._trainer), accelerator.no_sync(model), torch.random.fork_rng(devices=devices):
            yield

    def _has_tokens_everywhere(self, batch: Batch) -> bool:
        """Whether each process has a token to train on. All must look, or none: the loss exchanges metrics."""
        return bool(self._of_all(int(compat.sampled_tokens(batch).any())).min())

    def _agreed(self, own: Verdict) -> Verdict:
        """The verdict of all processes, which must take the same way: one that sees a dependence is enough."""
        order: tuple[Verdict, ...] = ("unknown", "does not move", "moves")
        return order[int(self._of_all(order.index(own)).max())]

    def _of_all(self, own: int) -> Tensor:
        accelerator = self._trainer.accelerator
        found: Any = accelerator.gather(torch.tensor([own], device=accelerator.device))
        return found


def probes(model: Any) -> list[Tensor]:
    """The last small parameters that are trained: their gradient needs the least of a backward pass."""
    trained = [p for p in model.parameters() if p.requires_grad]
    small = [p for p in trained if 0 < p.numel() <= LARGEST]
    return (small or sorted(trained, key=lambda p: p.numel())[:1])[-PROBES:]


def _depends(loss: Tensor, ref_logp: Tensor, parameters: list[Tensor]) -> Verdict:
    """Whether ∂²L/∂r∂θ is not zero, summed over tokens with weights that do not cancel by chance."""
    try:
        (slope,) = torch.autograd.grad(loss, ref_logp, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            return "does not move"
        weights = 1.5 + torch.arange(slope.numel(), device=slope.device, dtype=slope.dtype).cos().view_as(slope)
        mixed = torch.autograd.grad((weights * slope).sum(), parameters, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a fused loss without a second derivative, or reentrant checkpointing
        return "unknown"
    return "moves" if any(x is not None and bool(x.count_nonzero()) for x in mixed) else "does not move"


def _distance(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0)


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
        if not compat.has_completions(batch):
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
            of_the_sampler = all(map(compat.has_sampler_log_probs, batches))
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

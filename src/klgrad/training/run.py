"""A run from its settings to its summary: messages of other libraries, signals, progress, evaluations on schedule."""

import logging
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..errors import KlgradError, RunError, SettingError
from ..support import Json
from . import report, run_folder
from .build import Models, build, models_of
from .checkpoint import RunTrainer, checkpoints, is_over, last_complete, step_of
from .evaluate import Evaluator
from .figures import RunHistory, draw
from .run_folder import History, evaluations, in_updates, kl_of, length_of, lock_folder
from .settings import RunSettings, resume_command

# Errors and messages of the libraries underneath.

PACKAGE = Path(__file__).parents[1]
SHOW_TRACEBACK = "KLGRAD_TRACEBACK"
"""Environment variable that turns the one-line form of `refusal` off."""


def refusal(error: Exception) -> SettingError | None:
    """One line for an error of another library; None for one of this package, or if `KLGRAD_TRACEBACK` is set."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    known = [path for path in frames if "site-packages" in path.parts or path.is_relative_to(PACKAGE)]
    ours = isinstance(error, KlgradError) or not known or known[-1].is_relative_to(PACKAGE)
    if ours or os.environ.get(SHOW_TRACEBACK):
        return None
    return SettingError(
        "settings, a model and data that the libraries underneath accept",
        f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
        f"change what the message names; {SHOW_TRACEBACK}=1 shows the traceback",
    )


LIBRARIES = ("transformers", "trl", "accelerate", "torch", "datasets", "huggingface_hub", "peft")
NOT_FOR_USERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Python hides these by default: they concern a library's code, and not a run."""
KNOWN = (
    "The tokenizer has new PAD/BOS/EOS tokens",  # transformers aligns the model with the tokenizer, as intended
    "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",  # tied to the embeddings, not saved
    "`use_cache=True` is incompatible with gradient checkpointing",  # transformers switches the cache off itself
)
"""Beginnings of texts that every run produces, and that need no action by the user."""


@contextmanager
def messages_once(say: Callable[[str], None]) -> Iterator[None]:
    """Pass each distinct warning or log line (from level WARNING on) to `say` once, and show no progress bars."""
    import datasets
    from transformers.utils import logging as transformers_logging

    shown: set[str] = set()

    def once(text: str) -> None:
        text = " ".join(text.split())
        if text not in shown and not text.startswith(KNOWN):
            shown.add(text)
            say(text)

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: once(record.getMessage())
    with warnings.catch_warnings(), ExitStack() as restore:
        warnings.simplefilter("always")
        for category in NOT_FOR_USERS:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, *_, **__: once(str(message))
        for logger in map(logging.getLogger, LIBRARIES):
            restore.callback(logger.__dict__.update, handlers=logger.handlers, propagate=logger.propagate)
            logger.handlers, logger.propagate = [handler], False
        restore.callback(transformers_logging.enable_progress_bar)
        restore.callback(datasets.enable_progress_bars)
        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
        yield


# What happens between updates: signals, progress, and scheduled evaluations.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 1.0
"""Seconds within which a second signal is ignored: launchers send on what their processes have received already."""


class Stopping(TrainerCallback):
    """After Ctrl-C or SIGTERM, finish the update, save, and stop; a second signal stops at once."""

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.received: int | None = None
        self._when = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._when > SAME_SIGNAL:
                raise KeyboardInterrupt
            return
        self.received, self._when = number, time.monotonic()
        self.say("Stopping after this update; press Ctrl-C again to stop at once.")

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        stop, accelerator = self.received is not None, self.trainer.accelerator
        if accelerator.num_processes > 1:  # they receive signals at different moments, and stop at the same update
            stop = bool(accelerator.reduce(torch.tensor(float(stop), device=accelerator.device)) > 0)  # pyright: ignore
        if stop:
            control.should_save = control.should_training_stop = True


EVALUATED = "evaluation"
WINDOW = 24 * 3600
"""Seconds over which the speed is estimated. With rich's 30 s there is no estimate where an update takes longer."""


def progress_bar(console: Console, *, shown: bool) -> Progress:
    """A bar with the time that is left, also where an update takes minutes."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=WINDOW)


class Recorder(TrainerCallback):
    """Writes every logged row to the history, evaluates on schedule, and updates the progress bar."""

    def __init__(
        self, trainer: RunTrainer, history: History, evaluator: Evaluator, every: int, console: Console
    ) -> None:
        """`every`: updates between evaluations."""
        self.trainer, self.history, self.evaluator, self.every = trainer, history, evaluator, every
        self.rewards, self.console = trainer.task_rewards, console
        self.main = trainer.accelerator.is_main_process
        self.bar = progress_bar(console, shown=self.main)
        self.task = self.bar.add_task("Training", total=None)
        self._started = time.monotonic()
        self._evaluated = self._last_evaluated()
        self.has_trained = False

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Evaluate before training, unless a resumed run has that evaluation."""
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
        self.evaluate_on_schedule()
        self._say(f"training: {state.global_step} of {in_updates(state.max_steps)} made")

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.has_trained = True
        self.bar.update(self.task, completed=state.global_step)

    def evaluate_on_schedule(self) -> None:
        state = self.trainer.state
        self.evaluate_if_due(state.global_step, is_last=state.global_step >= state.max_steps)

    def evaluate_if_due(self, step: int, *, is_last: bool) -> None:
        """Evaluate if it is due after this step and has not been done, as after an evaluation that failed."""
        due = step == 0 or is_last or (self.every > 0 and step % self.every == 0)
        if not due or self._evaluated == step or not self.evaluator.sets:
            return
        task = self.bar.add_task("Evaluating", total=self.evaluator.count)
        try:
            self._say(f"evaluating {self.evaluator.count} held-out prompts")
            evaluation = self.evaluator(self.trainer, lambda prompts: self.bar.advance(task, prompts))
        finally:
            self.bar.remove_task(task)
        self._evaluated = step
        if self.main:
            self.history.append({"step": step, EVALUATED: evaluation})
            self.console.print(Text.assemble((f"after {in_updates(step)}", "bold"), f"  {evaluation_line(evaluation)}"))

    def on_log(self, args: object, state: TrainerState, control: object, logs: Json | None = None, **_: object) -> None:
        """Append a row to the history; print a line where the console shows no bar."""
        if not self.main or not logs or "train_runtime" in logs:  # the last log concerns the whole run
            return
        row = {"step": state.global_step, "seconds": round(time.monotonic() - self._started, 3), **logs}
        if self.rewards:
            means = {name: logs.get(f"rewards/{name}/mean") or 0.0 for name in self.rewards}
            row["task_reward"] = sum(weight * means[name] for name, weight in self.rewards.items())
        self.history.append(row)
        line = update_line(row)
        self.bar.update(self.task, description=line)
        self._say(f"{state.global_step}/{state.max_steps}  {line}")

    def _last_evaluated(self) -> int | None:
        """The last evaluated step in the history, as the main process reads it, so that all processes agree."""
        steps = [row["step"] for row in evaluations(self.history.rows())] if self.main else []
        last = [max(steps, default=None)]
        return (broadcast_object_list(last) if self.trainer.accelerator.num_processes > 1 else last)[0]

    def _say(self, line: str) -> None:
        if self.main and not self.console.is_terminal:
            self.console.print(Text(line))


def update_line(row: Json) -> str:
    parts = []
    if row.get("task_reward") is not None:
        parts.append(f"reward {row['task_reward']:.3f}")
    if kl_of(row) is not None:
        parts.append(f"KL {kl_of(row):.3g} nats per completion")
    if length_of(row) is not None:
        parts.append(f"length {length_of(row):.1f}")
    return "  ".join(parts)


def evaluation_line(evaluation: Json) -> str:
    names = {"in": "in-domain", "out": "out-of-domain"}
    parts = [f"{names[d]} {report.score(x)}" for d, x in evaluation["domains"].items()]
    return "  ".join([*parts, f"KL {report.format_estimate(evaluation['kl']['per_token'])} nats per token"])


# The run itself.


def run(settings: RunSettings, out: Console, err: Console) -> int:
    """Train, or describe the training with `--dry-run`: results go to `out`, progress and warnings to `err`.

    Returns:
        The exit status: 0, or 128 + the number of the signal that stopped the run.
    """

    def warn(text: str) -> None:
        err.print(Text(text, style="yellow"))

    with messages_once(warn):
        models = models_of(settings)
        if not settings.run.dry_run:
            return _Run(settings, models, out, err, warn).go()
        with err.status("Auditing the trainer's loss on small problems (a few seconds)"):
            description = report.describe(settings, models)
        if settings.training.process_index == 0:
            out.print(description)
        return 0


class _Run:
    def __init__(
        self, settings: RunSettings, models: Models, out: Console, err: Console, warn: Callable[[str], None]
    ) -> None:
        self.settings, self.models, self.out, self.err, self.warn = settings, models, out, err, warn
        self.folder = Path(str(settings.training.output_dir))
        self.history = History(self.folder)
        self.main = settings.training.process_index == 0

    def go(self) -> int:
        """Train; the main process holds the folder's lock on behalf of all processes."""
        training, resume = self.settings.training, self.settings.run.resume
        with lock_folder(self.folder) if self.main else nullcontext():
            epochs = training.num_train_epochs
            if resume and (updates := run_folder.updates_if_finished(self.folder, training.max_steps, epochs)):
                if self.main:
                    self.out.print(Text(report.finished_message(self.folder, updates)))
                return 0
            checkpoint = last_complete(self.folder) if resume else None
            if self.main:
                if checkpoint is None:
                    self._check_folder()
                if resume and checkpoints(self.folder)[:1] != ([] if checkpoint is None else [checkpoint]):
                    self.warn("The newest checkpoint is not complete; one before it is used, if there is one.")
                if not self.err.is_terminal:
                    self.err.print(Text(f"loading {self.models.name} and its reference", style="dim"))
            self.recorder: Recorder | None = None
            try:
                return self._train(*build(self.settings, self.models), checkpoint)
            except Exception as error:
                has_trained = self.recorder is not None and self.recorder.has_trained
                if has_trained or (refused := refusal(error)) is None:
                    raise
                raise refused from error

    def _check_folder(self) -> None:
        """Before anything is loaded, refuse to delete results without `--overwrite`."""
        run, results = self.settings.run, run_folder.results_of_a_run(self.folder)
        if results and not run.overwrite:
            expected, remedy = "an output folder without a run", "--resume continues it, --overwrite replaces it"
            if run.resume:
                expected = "a run with a complete checkpoint to continue from, or one that has made no update"
                again = resume_command(self.settings.command, self.folder, self.settings.given, "--overwrite")
                remedy = f"copy what you need, then start the run again from the beginning: {again}"
            raise RunError(
                expected, f"{self.folder}, which has {', '.join(results)}", f"{remedy}; or give another --output_dir"
            )
        names = self.settings.policy.model_name_or_path, self.settings.training.teacher
        run_folder.check_not_replaced(self.folder, [*names, self.models.path, *self.models.teachers.values()])
        if run.resume:
            self.warn(f"There is no complete checkpoint in {self.folder}; the run starts again with the same settings.")

    def _begin(self, checkpoint: Path | None) -> None:
        """Write down the settings, and delete what the run makes again: all of it, or what follows the checkpoint."""
        if checkpoint is None:
            run_folder.delete_run(self.folder)
        else:
            self.history.cut(step_of(checkpoint))
        lines = {"objective": report.objective, "term": report.formula, "scaling": report.scaling}
        described = {name: line for name, of in lines.items() if (line := of(self.settings)) is not None}
        run_folder.write_run(self.folder, self.settings.command, self.settings.given, described)
        where = "" if checkpoint is None else f", continuing from {checkpoint.name}"
        first, *more = report.objective_lines(self.settings)
        text = f"{self.settings.command} {self.models.name}{where}: maximises {first}"
        self.err.print(Text(text, style="bold"))
        for line in more:
            self.err.print(Text(line, style="dim"))

    def _train(self, trainer: RunTrainer, evaluator: Evaluator, checkpoint: Path | None) -> int:
        trainer.card = report.model_card(self.settings, self.models)
        if self.main:
            self._begin(checkpoint)
        self.recorder = Recorder(trainer, self.history, evaluator, self.settings.run.eval_every, self.err)
        args = self.settings.training
        if checkpoint is not None and is_over(checkpoint, args.max_steps, args.num_train_epochs):
            # The run was killed between its last update and its summary.
            trainer.load_ended(checkpoint)
            self.recorder.evaluate_if_due(step_of(checkpoint), is_last=True)
            return self._finish(trainer, 0.0)
        stopping = Stopping(trainer, self.warn)
        trainer.add_callback(self.recorder)
        trainer.add_callback(stopping)
        trainer.after_update = [self.recorder.evaluate_on_schedule]  # after saving: one that fails loses no training
        started = time.monotonic()
        try:
            with stopping.listening(), self.recorder.bar:
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt:
            return self._stopped(stopping.received or 2)
        if stopping.received is not None and trainer.state.global_step < trainer.state.max_steps:
            return self._stopped(stopping.received)
        return self._finish(trainer, time.monotonic() - started)

    def _stopped(self, number: int) -> int:
        if self.main:
            self.warn(f"Stopped. {report.how_to_continue(self.settings, self.folder)}")
        return 128 + number

    def _finish(self, trainer: RunTrainer, seconds: float) -> int:
        folder, updates = self.folder, trainer.state.global_step
        trainer.save_whole_model(folder / run_folder.MODEL)
        if not self.main:
            return 0
        summary = {**report.summarise(self.history.rows()), "updates": updates, "seconds": round(seconds, 1)}
        if self.settings.training.max_steps <= 0:
            summary["num_train_epochs"] = self.settings.training.num_train_epochs
        run_folder.write_json(folder / run_folder.SUMMARY, summary)
        if self.settings.run.weights_only:  # after the summary, without which the run is not finished
            for path in checkpoints(folder):
                shutil.rmtree(path, ignore_errors=True)
        draw([RunHistory(folder.name, self.history.rows())], folder)
        self.out.print(report.table_of(summary))
        took = f"Trained in {seconds:.0f} s." if seconds else "All updates had been made before."
        self.out.print(Text(f"{took} {report.finished_message(folder, updates)}"))
        return 0

"""What happens between updates: progress, evaluation, signals and crash checkpoints."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..support import Json
from ..trl.compat import save_checkpoint
from ..trl.state_files import load_state, state_of
from . import libraries, run_folder
from .checkpoint import RunTrainer, is_complete, step_of
from .evaluate import Evaluator
from .report import format_estimate, formula, objective, scaling, score
from .run_folder import History, evaluations, in_updates, kl_of, length_of
from .settings import RunSettings

# Stop a run by Ctrl-C or SIGTERM after the current update, with a checkpoint.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 1.0
"""Seconds within which a second signal is ignored: launchers send on what their processes have received already."""


class Stopping(TrainerCallback):
    """After a signal, finish the update, save, and stop; a second signal stops at once."""

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


# Take over new settings only after the first update of a new process.
#
# Until then a setting, a model or a reward function may turn out to be unusable. A run that is resumed must then be
# unchanged, and a new one must leave nothing.


class RunCommit(TrainerCallback):
    """Main process only: after the first update, write `run.json` and cut the history."""

    def __init__(self, settings: RunSettings, history: History, checkpoint: Path | None) -> None:
        self.settings, self.history, self.checkpoint = settings, history, checkpoint
        self.folder = history.path.parent
        self._is_new = self._done = False

    def begin(self) -> None:
        """Before training, if it starts from the beginning: delete what `--overwrite` replaces, write `run.json`."""
        if self.checkpoint is not None:
            return
        run_folder.delete_run(self.folder, keep=(run_folder.RUN,) if self.settings.run.resume else ())
        if not (self.folder / run_folder.RUN).exists():  # so that --resume works after a kill before the first update
            self._write_run()
            self._is_new = True

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """After the first update, before it is logged or saved."""
        if not self._done:
            self._done = True
            self.cut_history()
            self._write_run()

    def cut_history(self) -> None:
        self.history.cut(0 if self.checkpoint is None else step_of(self.checkpoint))

    def rollback(self) -> None:
        """After a failure before the first update: a new run leaves nothing."""
        if self._is_new and not self._done:
            run_folder.delete_run(self.folder)

    def _write_run(self) -> None:
        lines = {"objective": objective, "term": formula, "scaling": scaling}
        described = {name: line for name, of in lines.items() if (line := of(self.settings)) is not None}
        run_folder.write_run(self.folder, self.settings.command, self.settings.given, described)


# After a failure within a step, save the run as it was after the last complete update.


class CrashCheckpoint(TrainerCallback):
    """Takes a snapshot between updates, from which a checkpoint can be written after a failure."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.began = False
        self._snapshot: Json | None = None

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.began = True
        self.trainer.restore_logged()
        self.note()

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Discard the snapshot: until the step ends, the weights match neither the old nor the new state."""
        self._snapshot = None

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Take the next one. `note` is called again after logging, so that no metric is logged twice."""
        self.note()

    def note(self) -> None:
        """Take a snapshot of everything but weights and optimizer, which change only at the end of the next step."""
        self._snapshot = {"rng": libraries.rng_states(), "state": state_of(self.trainer.checkpointed)}

    def save(self) -> bool:
        """Write a checkpoint from the snapshot, and say whether there is one of the last complete update."""
        t, snapshot = self.trainer, self._snapshot
        if snapshot is None or t.accelerator.num_processes > 1 or t.state.global_step == 0:
            return False
        folder = t.folder / f"checkpoint-{t.state.global_step}"
        if is_complete(folder):
            return True
        load_state(t.checkpointed, snapshot["state"])
        libraries.set_rng_states(snapshot["rng"])
        save_checkpoint(t)
        return True


# Progress bar, history and scheduled evaluations of a run.

EVALUATED = "evaluation"
WINDOW = 24 * 3600
"""Seconds over which the speed is estimated. With rich's 30 s there is no estimate where an update takes longer."""


SILENCE = 30.0
"""Seconds after which an evaluation says how far it is where the console shows no bar."""


def progress_bar(console: Console, *, shown: bool) -> Progress:
    """A bar with the time that is left, also where an update takes minutes."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=WINDOW)


class Recorder(TrainerCallback):
    """Writes every logged row to the history, evaluates on schedule, and updates the progress bar."""

    def __init__(
        self, trainer: RunTrainer, history: History, evaluator: Evaluator, every: int, console: Console, since: int = 0
    ) -> None:
        """`every`: updates between evaluations. `since`: the update that the run is resumed from."""
        self.trainer, self.history, self.evaluator, self.every = trainer, history, evaluator, every
        self.rewards, self.console = trainer.task_rewards, console
        self.main = trainer.accelerator.is_main_process
        self.bar = progress_bar(console, shown=self.main)
        self.task = self.bar.add_task("Training", total=None)
        self._started = self._said = time.monotonic()
        self._evaluated = self._last_evaluated(since)

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Evaluate before training, unless a resumed run has that evaluation."""
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
        self.evaluate_if_due(state.global_step, is_last=state.global_step >= state.max_steps)
        self._say(f"training: {state.global_step} of {in_updates(state.max_steps)} made")

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def evaluate_on_schedule(self) -> None:
        state = self.trainer.state
        self.evaluate_if_due(state.global_step, is_last=state.global_step >= state.max_steps)

    def evaluate_if_due(self, step: int, *, is_last: bool) -> None:
        """Evaluate if it is due after this step and has not been done, as after an evaluation that failed."""
        due = step == 0 or is_last or (self.every > 0 and step % self.every == 0)
        if due and self._evaluated != step:
            self._evaluate(step)

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

    def _last_evaluated(self, since: int) -> int | None:
        """The last evaluated step in the history, as the main process reads it, so that all processes agree."""
        steps = [row["step"] for row in evaluations(self.history.rows()) if row["step"] <= since] if self.main else []
        last = [max(steps, default=None)]
        return (broadcast_object_list(last) if self.trainer.accelerator.num_processes > 1 else last)[0]

    def _say(self, line: str) -> None:
        if self.main and not self.console.is_terminal:
            self._said = time.monotonic()
            self.console.print(Text(line))

    def _advance(self, task: TaskID, prompts: int) -> None:
        self.bar.advance(task, prompts)
        if time.monotonic() - self._said > SILENCE:
            shown = next(bar for bar in self.bar.tasks if bar.id == task)
            self._say(f"evaluated {shown.completed:.0f} of {shown.total:.0f} held-out prompts")

    def _evaluate(self, step: int) -> None:
        if not self.evaluator.sets:
            return
        task = self.bar.add_task("Evaluating", total=self.evaluator.count)
        try:
            self._say(f"evaluating {self.evaluator.count} held-out prompts")
            evaluation = self.evaluator(self.trainer, lambda prompts: self._advance(task, prompts))
        finally:
            self.bar.remove_task(task)
        self._evaluated = step
        if self.main:
            self.history.append({"step": step, EVALUATED: evaluation})
            self.console.print(Text.assemble((f"after {in_updates(step)}", "bold"), f"  {evaluation_line(evaluation)}"))


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
    parts = [f"{names[d]} {score(x)}" for d, x in evaluation["domains"].items()]
    if evaluation["kl"] is not None:
        parts.append(f"KL {format_estimate(evaluation['kl']['per_token'])} nats per token")
    return "  ".join(parts)

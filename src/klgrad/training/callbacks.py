"""What happens between updates: signals, progress, and scheduled evaluations."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..support import Json
from .checkpoint import RunTrainer
from .evaluate import Evaluator
from .report import format_estimate, score
from .run_folder import History, evaluations, in_updates, kl_of, length_of

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
        if due and self._evaluated != step and self.evaluator.sets:
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

    def _last_evaluated(self) -> int | None:
        """The last evaluated step in the history, as the main process reads it, so that all processes agree."""
        steps = [row["step"] for row in evaluations(self.history.rows())] if self.main else []
        last = [max(steps, default=None)]
        return (broadcast_object_list(last) if self.trainer.accelerator.num_processes > 1 else last)[0]

    def _say(self, line: str) -> None:
        if self.main and not self.console.is_terminal:
            self.console.print(Text(line))

    def _evaluate(self, step: int) -> None:
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

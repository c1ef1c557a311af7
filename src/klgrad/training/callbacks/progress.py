"""Progress bar, history and scheduled evaluations of a run."""

import time
from typing import Any

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
from transformers import TrainerCallback

from ..checkpoint.run_trainer import RunTrainer
from ..evaluate import Evaluator
from ..output.summary import estimate, score
from ..run_folder.history import History, evaluations, in_updates, kl_of, length_of

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate before training, unless a resumed run has that evaluation."""
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
        self.catch_up(state.global_step, is_last=state.global_step >= state.max_steps)
        self._say(f"training: {state.global_step} of {in_updates(state.max_steps)} made")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Update the bar."""
        self.bar.update(self.task, completed=state.global_step)

    def evaluate_on_schedule(self) -> None:
        """Evaluate if it is due after the current update."""
        state = self.trainer.state
        self.catch_up(state.global_step, is_last=state.global_step >= state.max_steps)

    def catch_up(self, step: int, *, is_last: bool) -> None:
        """Evaluate if it is due after this step and has not been done, as after an evaluation that failed."""
        due = step == 0 or is_last or (self.every > 0 and step % self.every == 0)
        if due and self._evaluated != step:
            self._evaluate(step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
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
        found: list[Any] = [max(steps, default=None)]
        return (broadcast_object_list(found) if self.trainer.accelerator.num_processes > 1 else found)[0]

    def _say(self, line: str) -> None:
        """Print a line where the console shows no bar."""
        if self.main and not self.console.is_terminal:
            self._said = time.monotonic()
            self.console.print(Text(line))

    def _advance(self, task: TaskID, prompts: int) -> None:
        self.bar.advance(task, prompts)
        if time.monotonic() - self._said > SILENCE:
            shown = next(each for each in self.bar.tasks if each.id == task)
            self._say(f"evaluated {shown.completed:.0f} of {shown.total:.0f} held-out prompts")

    def _evaluate(self, step: int) -> None:
        if not self.evaluator.sets:
            return
        task = self.bar.add_task("Evaluating", total=self.evaluator.count)
        try:
            self._say(f"evaluating {self.evaluator.count} held-out prompts")
            found = self.evaluator(self.trainer, lambda prompts: self._advance(task, prompts))
        finally:
            self.bar.remove_task(task)
        self._evaluated = step
        if self.main:
            self.history.append({"step": step, EVALUATED: found})
            self.console.print(Text.assemble((f"after {in_updates(step)}", "bold"), f"  {evaluation_line(found)}"))


def update_line(row: dict[str, Any]) -> str:
    """An update in one line: reward, KL and length."""
    parts = []
    if row.get("task_reward") is not None:
        parts.append(f"reward {row['task_reward']:.3f}")
    if kl_of(row) is not None:
        parts.append(f"KL {kl_of(row):.3g} nats per completion")
    if length_of(row) is not None:
        parts.append(f"length {length_of(row):.1f}")
    return "  ".join(parts)


def evaluation_line(found: dict[str, Any]) -> str:
    """An evaluation in one line: rewards by domain, and the KL."""
    names = {"in": "in-domain", "out": "out-of-domain"}
    parts = [f"{names[d]} {score(x)}" for d, x in found["domains"].items()]
    if found["kl"] is not None:
        parts.append(f"KL {estimate(found['kl']['per_token'])} nats per token")
    return "  ".join(parts)

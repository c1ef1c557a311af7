"""What a run shows while it runs, and what it writes down: one row per update."""

import time
from typing import Any

from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback

from .evaluate import Evaluator
from .history import History, evaluations, kl_of
from .run_trainer import RunTrainer
from .summary import score

EVALUATED = "evaluation"


class Recorder(TrainerCallback):
    """Writes every logged row to the history, evaluates on schedule, and moves the bar."""

    def __init__(
        self, trainer: RunTrainer, history: History, evaluator: Evaluator, every: int, console: Console, since: int = 0
    ) -> None:
        """`since`: the update that the run goes on from; what the history has of later ones happens again."""
        self.trainer, self.history, self.evaluator, self.every = trainer, history, evaluator, every
        self.rewards, self.console = trainer.task_rewards, console
        self.main = trainer.accelerator.is_main_process
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.main)
        self.task = self.bar.add_task("Training", total=None)
        self._started = time.monotonic()
        self._evaluated = self._last_evaluated(since)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """How good it is before; a run that is gone on with knows that already."""
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
        self.catch_up(state.global_step, is_last=state.global_step >= state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=state.global_step)

    def evaluate_on_schedule(self) -> None:
        """Now and then, and at the end, once for a step."""
        state = self.trainer.state
        self.catch_up(state.global_step, is_last=state.global_step >= state.max_steps)

    def catch_up(self, step: int, *, is_last: bool) -> None:
        """Evaluate if that is due after this step and was not done, as when an evaluation failed."""
        due = step == 0 or is_last or (self.every > 0 and step % self.every == 0)
        if due and self._evaluated != step:
            self._evaluate(step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """A row of the history, and a line where there is no bar to look at."""
        if not self.main or not logs or "train_runtime" in logs:  # that one is of the whole run
            return
        row = {"step": state.global_step, "seconds": round(time.monotonic() - self._started, 3), **logs}
        if self.rewards:
            means = {name: logs.get(f"rewards/{name}/mean") or 0.0 for name in self.rewards}
            row["task_reward"] = sum(weight * means[name] for name, weight in self.rewards.items())
        self.history.append(row)
        said = described(row)
        self.bar.update(self.task, description=said)
        if not self.console.is_terminal:
            self.console.print(Text(f"{state.global_step}/{state.max_steps}  {said}"))

    def _last_evaluated(self, since: int) -> int | None:
        """The step, as the main process reads it: all must agree, and the others may see the file as it was."""
        steps = [row["step"] for row in evaluations(self.history.rows()) if row["step"] <= since] if self.main else []
        found: list[Any] = [max(steps, default=None)]
        return (broadcast_object_list(found) if self.trainer.accelerator.num_processes > 1 else found)[0]

    def _evaluate(self, step: int) -> None:
        if not self.evaluator.sets:
            return
        self.bar.update(self.task, description="Evaluating")
        found = self.evaluator(self.trainer)
        self._evaluated = step
        if self.main:
            self.history.append({"step": step, EVALUATED: found})
            self.console.print(Text.assemble((f"after {step} updates", "bold"), f"  {evaluated(found)}"))


def described(row: dict[str, Any]) -> str:
    """An update in a few words."""
    parts = []
    if row.get("task_reward") is not None:
        parts.append(f"reward {row['task_reward']:.3f}")
    if kl_of(row) is not None:
        parts.append(f"KL {kl_of(row):.3g} nats per completion")
    length = row.get("length/mean", row.get("completions/mean_length"))
    if length is not None:
        parts.append(f"length {length:.1f}")
    return "  ".join(parts)


def evaluated(found: dict[str, Any]) -> str:
    """An evaluation in a few words."""
    names = {"in": "in-domain", "out": "out-of-domain"}
    parts = [f"{names[d]} {score(x)}" for d, x in found["domains"].items()]
    if found["kl"] is not None:
        kl = found["kl"]["per_token"]
        parts.append(f"KL {kl['mean']:.3g} ± {kl['standard_error']:.2g} nats per token")
    return "  ".join(parts)

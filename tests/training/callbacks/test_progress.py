"""The progress bars of a run."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from klgrad.training.callbacks import Recorder, progress_bar
from klgrad.training.run_folder import History


def test_the_remaining_time_is_known_where_an_update_takes_a_minute():
    bar, now = progress_bar(Console(file=io.StringIO()), shown=True), [0.0]
    bar.get_time = lambda: now[0]
    task = bar.add_task("Training", total=10)
    for step in range(1, 4):
        now[0] += 60
        bar.update(task, completed=step)
    assert bar.tasks[0].time_remaining == 7 * 60


class Watched:
    """Stands for an evaluator of six prompts in two batches; notes the bars that are shown."""

    sets, count = ("some",), 6

    def __init__(self):
        self.recorder: Any = None
        self.seen = []

    def __call__(self, trainer, advanced):
        for _ in range(2):
            advanced(3)
            self.seen.append([(task.description, task.completed, task.total) for task in self.recorder.bar.tasks])
        return {"sets": {}, "domains": {}, "kl": None, "length": 1.0}


def test_an_evaluation_has_a_bar_of_its_own(tmp_path):
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    trainer: Any = SimpleNamespace(task_rewards={}, accelerator=accelerator)
    evaluator: Any = Watched()
    evaluator.recorder = Recorder(trainer, History(tmp_path), evaluator, 5, Console(file=io.StringIO()))
    evaluator.recorder.evaluate_if_due(5, is_last=False)
    assert [tasks[1] for tasks in evaluator.seen] == [("Evaluating", 3, 6), ("Evaluating", 6, 6)]
    assert [task.description for task in evaluator.recorder.bar.tasks] == ["Training"]


def test_without_a_terminal_an_evaluation_says_what_it_does(tmp_path, monkeypatch):
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    trainer: Any = SimpleNamespace(task_rewards={}, accelerator=accelerator)
    evaluator: Any = Watched()
    said = io.StringIO()
    now = [0.0]
    monkeypatch.setattr("klgrad.training.callbacks.time.monotonic", lambda: now[0])
    evaluator.recorder = Recorder(trainer, History(tmp_path), evaluator, 5, Console(file=said))
    seen = evaluator.seen.append
    monkeypatch.setattr(evaluator, "seen", SimpleNamespace(append=lambda x: (seen(x), now.__setitem__(0, now[0] + 60))))
    evaluator.recorder.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=1), None)
    assert said.getvalue().splitlines() == [
        "evaluating 6 held-out prompts",
        "evaluated 6 of 6 held-out prompts",
        "after 0 updates  ",
        "training: 0 of 1 update made",
    ]
    evaluator.recorder.evaluate_if_due(1, is_last=True)
    assert "after 1 update " in said.getvalue()

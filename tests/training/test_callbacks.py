"""What happens between updates: progress, and settings that are taken over by the first."""

import io
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from klgrad.training.run import Recorder, progress_bar
from rich.console import Console
from training.test_checkpoint import unseal

from klgrad.errors import SettingError
from klgrad.training.checkpoint import last_complete
from klgrad.training.run_folder import History

pytestmark = [pytest.mark.filterwarnings("ignore")]

# The progress bars of a run.


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


def test_without_a_terminal_an_evaluation_is_announced(tmp_path):
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    trainer: Any = SimpleNamespace(
        task_rewards={}, accelerator=accelerator, state=SimpleNamespace(global_step=0, max_steps=1)
    )
    evaluator: Any = Watched()
    said = io.StringIO()
    evaluator.recorder = Recorder(trainer, History(tmp_path), evaluator, 5, Console(file=said))
    evaluator.recorder.on_train_begin(None, trainer.state, None)
    assert said.getvalue().splitlines() == [
        "evaluating 6 held-out prompts",
        "after 0 updates  ",
        "training: 0 of 1 update made",
    ]


# A run that fails before its first update.


REWARD = '''
"""Fails when it is called for training, and not when it is only tried."""
calls = 0

def late(completion_ids, **_):
    global calls
    calls += 1
    if calls > 1:
        raise ValueError("out of order")
    return [0.0] * len(completion_ids)
'''


@pytest.fixture
def failing(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(REWARD)
    return f"{path}:late"


def settings(folder):
    return json.loads((folder / "run.json").read_text())["settings"]


@pytest.mark.slow
def test_a_resumption_that_fails_can_be_resumed(failing, run, parts, finished, weights):
    shutil.rmtree(parts / "model")
    unseal(parts / "checkpoint-4")
    with pytest.raises(ValueError, match="out of order"):
        run("train", parts, resume=True, reward=failing)
    assert run("train", parts, resume=True, reward="klgrad.training.data:correct")[0] == 0
    assert all(torch.equal(x, weights(parts)[name]) for name, x in weights(finished).items())


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"student_layers": 2}, {"optim": "sgd"}])
def test_settings_that_do_not_fit_the_checkpoint_are_refused(change, run, parts):
    with pytest.raises(SettingError, match="settings, a model and data that the libraries underneath accept"):
        run("train", parts, resume=True, max_steps=6, **change)
    assert last_complete(parts) == parts / "checkpoint-4"


@pytest.mark.slow
def test_a_run_that_made_no_update_begins_again(failing, run, tmp_path):
    """Neither `--resume` nor a new run needs `--overwrite`: nothing was trained."""
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="out of order"):
        run("train", folder, reward=failing, learning_rate=0.5)
    status, text = run("train", folder, resume=True, reward="klgrad.training.data:correct", max_steps=1)
    assert status == 0
    assert "the run starts again" in text
    assert settings(folder)["learning_rate"] == 0.5
    with pytest.raises(ValueError, match="out of order"):
        run("train", tmp_path / "new", reward=failing)
    assert run("train", tmp_path / "new", max_steps=1)[0] == 0


def test_secrets_are_not_written_down(tmp_path):
    from klgrad.training.run_folder import write_run

    write_run(tmp_path, "train", {"hub_token": "abc", "seed": 1}, {})
    assert settings(tmp_path) == {"seed": 1}

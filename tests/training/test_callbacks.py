"""What happens between updates: progress, and settings that are taken over by the first."""

import io
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from training.conftest import contents

from klgrad.errors import RewardError, RunError
from klgrad.training.callbacks import Recorder, progress_bar
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


# A run's folder takes on new settings only when an update worked with them.


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
def test_a_resumption_that_fails_leaves_the_run_as_it_was(failing, run, parts, finished, weights):
    """Not even the history is cut that a later resumption would cut."""
    shutil.rmtree(parts / "model")
    (parts / "checkpoint-4" / "optimizer.pt").unlink()
    before = contents(parts)
    with pytest.raises(RewardError, match="out of order"):
        run("train", parts, resume=True, reward=failing, learning_rate=0.5)
    assert contents(parts) == before
    assert run("train", parts, resume=True)[0] == 0
    assert all(torch.equal(x, weights(parts)[name]) for name, x in weights(finished).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"student_layers": 2}, r"layers\.2\..* has shape .* a model in which it is missing"),
        ({"optim": "sgd", "sync_ref_model": True}, "a checkpoint that these settings can continue from"),
    ],
)
@pytest.mark.parametrize("over", [False, True])
def test_settings_that_do_not_fit_the_checkpoint_change_nothing(change, said, over, run, parts):
    shutil.rmtree(parts / "model")
    before = contents(parts)
    with pytest.raises(RunError, match=said):
        run("train", parts, resume=True, max_steps=4 if over else 6, **change)
    assert contents(parts) == before


@pytest.mark.slow
def test_new_settings_are_written_down_after_an_update(run, parts):
    assert settings(parts)["learning_rate"] == 0.01
    assert run("train", parts, resume=True, max_steps=5, learning_rate=0.5)[0] == 0
    assert settings(parts)["learning_rate"] == 0.5


@pytest.mark.slow
def test_a_new_run_that_fails_before_its_first_update_leaves_nothing(failing, run, tmp_path):
    with pytest.raises(RewardError, match="out of order"):
        run("train", tmp_path / "run", reward=failing, eval_size=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_first_update_begins_again(failing, run, tmp_path, monkeypatch):
    def killed(self, *_, **__):
        raise SystemExit

    monkeypatch.setattr("klgrad.training.checkpoint.RunTrainer.training_step", killed)
    with pytest.raises(SystemExit):
        run("train", tmp_path / "run", learning_rate=0.5)
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json", "history.jsonl"}
    with pytest.raises(RewardError):  # which does not spoil it
        run("train", tmp_path / "run", resume=True, reward=failing, learning_rate=0.1)
    monkeypatch.setattr("klgrad.training.run.draw", lambda *_: None)
    status, text = run("train", tmp_path / "run", resume=True)
    assert status == 0
    assert "the run starts again" in text
    assert settings(tmp_path / "run")["learning_rate"] == 0.5
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 2, 3, 4, 4]


def test_a_run_without_updates_is_an_error_and_leaves_nothing(run, tmp_path, monkeypatch):
    """Whatever lets a training end at once: too few prompts for a generation is only one way."""
    from klgrad.training.checkpoint import RunTrainer

    monkeypatch.setattr(RunTrainer, "train", lambda self, **_: None)
    with pytest.raises(RunError, match=r"at least one update; received none, after 0, of .* prompts"):
        run("train", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_secrets_are_not_written_down(tmp_path):
    from klgrad.training.run_folder import write_run

    write_run(tmp_path, "train", {"hub_token": "abc", "seed": 1}, {})
    assert settings(tmp_path) == {"seed": 1}

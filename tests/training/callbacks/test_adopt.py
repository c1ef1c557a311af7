"""A run's folder takes on new settings only when an update worked with them."""

import json
import shutil

import pytest
import torch
from training.conftest import contents

from klgrad.errors import RewardError, RunError

pytestmark = [pytest.mark.filterwarnings("ignore")]

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
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
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

"""Checkpoints: a run that was stopped continues as if it had not been."""

import os
import shutil
import signal
import subprocess
import sys
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from some import first
from training.conftest import read, same_weights
from training.small import SMALL, arguments

from klgrad.errors import RunError, SettingError
from klgrad.training.checkpoint import SEAL, checkpoints, is_complete, is_over, last_complete, rotate
from klgrad.training.run_folder import in_updates
from klgrad.trl.compat import load_parts

pytestmark = [pytest.mark.filterwarnings("ignore")]

# A run that was killed and resumed ends with the same weights, to the last bit, as one that was not.

REWARD = '''
"""Counts its calls; at the requested one, sends the signal that the file `instruction` names."""
import os
from pathlib import Path

calls = 0

def counted(completion_ids, **_):
    global calls
    calls += 1
    instruction = Path(__file__).with_name("instruction")
    at, what = instruction.read_text().split() if instruction.exists() else (0, "")
    if calls == int(at):
        os.kill(os.getpid(), int(what))
    return [float(len(set(ids))) for ids in completion_ids]
'''
BEFORE = 1
"""Calls before the first update, where nothing is evaluated: the one that tries it."""
QUIET = {"eval_size": 0, "save_steps": 50}
MOVING = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.5}
TWICE = {"num_iterations": 2, "gradient_accumulation_steps": 2, "kl_ratio": "prefix"}
CASES = {
    "plain": ({}, 2),
    "in the middle of a generation batch": ({**TWICE, "kl_target": 0.5, "kl_horizon": 2}, 1),
    "old completions": ({"rollout_lag": 2, "kl_ratio": "prefix"}, 3),
    "within the second epoch": ({"train_size": 6, "max_steps": 7}, 4),
    "between two epochs": ({"train_size": 4, "max_steps": 5}, 4),
    "a reference that moves": ({**MOVING, "ref_model_sync_steps": 2}, 3),
    "between the generations of one update": (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "max_steps": 3},
        1,
    ),
    "a row that is logged of several updates": ({"logging_steps": 3, "max_steps": 6}, 2),
    "an entropy that is adapted": ({"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 1.0}, 2),
}
KEPT = ("plain", "in the middle of a generation batch", "between the generations of one update")


@pytest.fixture
def reward(tmp_path):
    path, instruction = tmp_path / "reward.py", tmp_path / "instruction"
    path.write_text(REWARD)

    def tell(call=None, what=""):
        instruction.write_text(f"{BEFORE + call} {what}" if call is not None else "0 0")
        return f"{path}:counted"

    return tell


def history(folder):
    passing = ("seconds", "step_time")  # what another clock would tell otherwise
    return [{k: v for k, v in row.items() if k not in passing} for row in read(folder / "history.jsonl")]


def assert_same(a, b):
    """Equal weights, to the last bit, and equal histories."""
    assert same_weights(a, b)
    assert history(a) == history(b)


@pytest.mark.slow
@pytest.mark.parametrize("case", first(CASES, KEPT))
def test_stopped_by_ctrl_c(case, run, reward, tmp_path):
    settings, updates = CASES[case]
    settings = {**settings, **QUIET}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", whole, reward=reward(), **settings)
    # The first update waits for completions of two more batches, from the same policy.
    call = updates + (2 if case == "old completions" else 0)
    text = run("train", parts, reward=reward(call, signal.SIGINT.value), ends=130, **settings)
    assert f"saved after {in_updates(updates)} in" in text
    assert f"klgrad train --output_dir {parts} --resume" in text
    assert f"continuing from checkpoint-{updates}" in run("train", parts, resume=True, reward=reward())
    assert_same(whole, parts)


TERM = """
from klgrad import KLTerm, divergences
term = KLTerm(divergence=divergences.from_slope("cubic", lambda l: l + l**3, "l + l^3"), level="token")
"""


@pytest.mark.slow
def test_a_run_with_a_term_of_ones_own(run, reward, tmp_path):
    whole, parts, term = tmp_path / "whole", tmp_path / "parts", tmp_path / "my.py"
    term.write_text(TERM)
    mine = {"kl": f"{term}:term", **QUIET}
    assert "E[reward] - 0.05 cubic" in run("train", whole, reward=reward(), **mine)
    run("train", parts, reward=reward(2, signal.SIGINT.value), ends=130, **mine)
    with pytest.raises(RunError, match="code that is given again"):
        run("train", parts, resume=True, reward=reward())
    text = run("train", parts, resume=True, reward=reward(), kl=f"{term}:term")
    assert "continuing from checkpoint-2" in text
    assert_same(whole, parts)


@pytest.mark.slow
def test_killed_outright(model, run, reward, tmp_path):
    """SIGKILL in the middle of an evaluation, in a process of its own: no handler, no goodbye."""
    settings = {"max_steps": 2, "eval_every": 1, "eval_size": 2, "save_steps": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", whole, reward=reward(), **settings)
    evaluated = 5 + 1 + 3  # all tasks before, an update, and three of the tasks after it
    killing = reward(evaluated, signal.SIGKILL.value)
    given = arguments(**{**SMALL, **settings, "model": model, "output_dir": parts, "reward": killing})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "klgrad", "train", *given]
    assert subprocess.run(words, env=environment, timeout=120, check=False).returncode == -signal.SIGKILL
    assert last_complete(parts).name == "checkpoint-1"
    run("train", parts, resume=True, reward=reward())
    assert_same(whole, parts)


# Checkpoints that a kill has cut off


def unseal(checkpoint):
    (checkpoint / SEAL).unlink()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(finished, run, parts):
    shutil.rmtree(parts / "model")
    unseal(parts / "checkpoint-4")
    unseal(parts / "checkpoint-3")
    text = run("train", parts, resume=True)
    assert "The newest checkpoint is not complete; one before it is used" in text
    assert "continuing from checkpoint-2" in text
    assert_same(finished, parts)
    assert is_complete(parts / "checkpoint-4")


@pytest.mark.slow
def test_older_checkpoints_go_only_when_the_newest_is_sealed(run, tmp_path, monkeypatch):
    """Killed between writing and sealing, with room for one checkpoint, the one before is still there."""
    from klgrad.training import checkpoint

    real = checkpoint.write_whole

    def dies(path, content):
        if path.name == SEAL and path.parent.name == "checkpoint-2":
            raise SystemExit
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", dies)
    with pytest.raises(SystemExit):
        run("train", tmp_path / "run", save_total_limit=1)
    assert last_complete(tmp_path / "run").name == "checkpoint-1"
    assert checkpoints(tmp_path / "run")[0].name == "checkpoint-2"


def test_a_run_that_is_over_is_not_trained_further(finished, run, parts):
    shutil.rmtree(parts / "model")
    assert "All updates had been made before." in run("train", parts, resume=True)
    assert_same(finished, parts)


@pytest.mark.parametrize(
    ("planned", "epoch", "max_steps", "over"),
    [
        (4, 0.06, 4, True),
        (4, 0.06, 5, False),
        (4, 0.06, -1, False),  # it was planned by max_steps, and an epoch is wanted now
        (4, 0.99, -1, True),  # less than one update is left
        (8, 0.5, -1, False),
    ],
)
def test_when_a_run_is_over(planned, epoch, max_steps, over, tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(f'{{"max_steps": {planned}, "epoch": {epoch}}}')
    assert is_over(checkpoint, max_steps, 1.0) is over


@pytest.mark.slow
def test_another_number_of_processes_is_refused(run, parts):
    path = parts / "checkpoint-4" / "klgrad_state_0.pt"
    torch.save({**torch.load(path, weights_only=True), "processes": 2}, path)
    with pytest.raises(RunError, match="a checkpoint of 1 processes; received checkpoint-4, of 2"):
        run("train", parts, resume=True, max_steps=5)


@pytest.mark.slow
def test_a_damaged_checkpoint_does_not_push_out_a_sound_one(run, parts):
    """With room for one, the one that was just sealed must not go because a damaged one has a higher number."""
    unseal(parts / "checkpoint-4")
    rotate(parts, 1)
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-4", "checkpoint-3"]
    shutil.copytree(parts / "checkpoint-4", parts / "checkpoint-9")
    shutil.rmtree(parts / "model")
    run("train", parts, resume=True, save_total_limit=1)
    assert is_complete(parts / "checkpoint-4")
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-9", "checkpoint-4"]
    assert "is finished, after 4 updates" in run("train", parts, resume=True)


class Opens:
    """Code that a file could contain."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_no_code_of_a_state_is_executed(tmp_path):
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1, device="cpu")
    trainer: Any = SimpleNamespace(accelerator=accelerator, checkpointed={})
    torch.save({"processes": 1, "state": {}, "more": Opens(tmp_path / "made")}, tmp_path / "klgrad_state_0.pt")
    with pytest.raises(UnpicklingError):
        load_parts(trainer, tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_reference_that_moved_is_that_of_the_checkpoint_when_a_run_is_over(run, tmp_path):
    """Killed between its last checkpoint and its last evaluation, whose KL is to the reference as it is by then."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", whole, learning_rate=0.05, **MOVING, ref_model_sync_steps=1, eval_every=0)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "model")
    rows = (parts / "history.jsonl").read_text().splitlines(keepends=True)
    assert "evaluation" in rows[-1]
    (parts / "history.jsonl").write_text("".join(rows[:-1]))
    run("train", parts, resume=True)
    assert history(whole) == history(parts)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"kl_target": 1.0}], ids=["constant", "adapted"])
def test_a_constant_beta_is_a_setting_and_an_adapted_one_is_state(more, run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, max_steps=2, eval_size=0, **more)
    run("train", folder, resume=True, max_steps=3, kl_coef=0.7)
    *_, before, after = (row["kl/coef"] for row in read(folder / "history.jsonl"))
    if more:  # moved by one update, by at most 20% of 1 / kl_horizon
        assert after == pytest.approx(before, rel=0.01)
        assert after != 0.7
    else:
        assert after == 0.7


# A run that fails before its first update.

FAILING = '''
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
    path.write_text(FAILING)
    return f"{path}:late"


@pytest.mark.slow
def test_a_resumption_that_fails_can_be_resumed(failing, run, parts, finished):
    shutil.rmtree(parts / "model")
    unseal(parts / "checkpoint-4")
    with pytest.raises(ValueError, match="out of order"):
        run("train", parts, resume=True, reward=failing)
    run("train", parts, resume=True, reward="klgrad.training.data:correct")
    assert same_weights(finished, parts)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"model": "{model}:2"}, {"optim": "sgd"}])
def test_settings_that_do_not_fit_the_checkpoint_are_refused(change, run, parts, model):
    with pytest.raises(SettingError, match="settings, a model and data that the libraries underneath accept"):
        run("train", parts, resume=True, max_steps=6, **{k: v.format(model=model) for k, v in change.items()})
    assert last_complete(parts) == parts / "checkpoint-4"


@pytest.mark.slow
def test_a_run_that_made_no_update_begins_again(failing, run, tmp_path):
    """Neither `--resume` nor a new run needs `--overwrite`: nothing was trained."""
    folder = tmp_path / "run"
    for output in (folder, tmp_path / "new"):
        with pytest.raises(ValueError, match="out of order"):
            run("train", output, reward=failing, learning_rate=0.5)
    text = run("train", folder, resume=True, reward="klgrad.training.data:correct", max_steps=1)
    assert "the run starts again" in text
    assert read(folder / "run.json")["settings"]["learning_rate"] == 0.5
    run("train", tmp_path / "new", max_steps=1)

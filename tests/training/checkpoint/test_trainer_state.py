"""What a checkpoint keeps beside weights, optimizer and random numbers: one list, for disk and for memory."""

import json
import shutil

import pytest
import torch
from some import first

from klgrad.training import checkpoint
from klgrad.trl.state_files import plain, read_state, state_of

pytestmark = [pytest.mark.filterwarnings("ignore")]

PASSING = ("seconds", "step_time")
"""Columns that depend on the clock."""


def history(folder):
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in PASSING} for row in rows]


def stopped_and_resumed(run, folder, after, monkeypatch, **settings):
    """By Ctrl-C right after an update."""
    from klgrad.training.callbacks import Stopping

    real = Stopping.on_step_end

    def on_step_end(self, args, training, control, **more):
        if training.global_step == after:
            self.received = 2
        return real(self, args, training, control, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "on_step_end", on_step_end)
        assert run("train", folder, **settings)[0] == 130
    assert run("train", folder, resume=True)[0] == 0


CASES = {
    "generations within one update are distinguished": (
        {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "max_steps": 3},
        1,
    ),
    "a row that is logged of several updates": ({"logging_steps": 3, "max_steps": 6}, 2),
    "an entropy that is adapted": ({"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 1.0}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", first(CASES, 1))
def test_the_history_of_a_run_that_was_stopped_is_that_of_one_that_was_not(case, run, tmp_path, monkeypatch):
    settings, after = CASES[case]
    settings = {**settings, "eval_size": 0, "save_steps": 50}
    assert run("train", tmp_path / "whole", **settings)[0] == 0
    stopped_and_resumed(run, tmp_path / "parts", after, monkeypatch, **settings)
    assert history(tmp_path / "whole") == history(tmp_path / "parts")


def test_what_a_failed_step_changed_is_undone(run, tmp_path, monkeypatch):
    """All of the list, since it is the one that checkpoints are written from."""
    seen = {}

    def fails(self):
        trainer = self.trainer
        if trainer.state.global_step != 2:
            return
        seen["before"] = str(plain(state_of(trainer.checkpointed), "state"))
        trainer._step, trainer.prompt_numbers._generations = 100, 100
        trainer.kl_metrics.lengths.first, trainer.kl_metrics.lengths.warned = (1.0, 1.0), True
        trainer.entropy_coef, trainer._last_world_entropy = 5.0, 5.0
        trainer.coefficient.value, trainer.state.num_input_tokens_seen = 5.0, 10**9
        trainer._metrics["train"]["late"] = [1.0]
        trainer._tr_loss += 5.0
        trainer.lag_queue._waiting.clear()
        raise ValueError("out of order")

    monkeypatch.setattr("klgrad.training.callbacks.Recorder.evaluate_on_schedule", fails)
    adaptive = {"use_adaptive_entropy": True, "kl_target": 1.0, "rollout_lag": 1, "kl_ratio": "prefix"}
    with pytest.raises(ValueError, match="out of order"):
        run("train", tmp_path / "run", save_steps=50, eval_size=0, logging_steps=3, **adaptive)
    parts = read_state(tmp_path / "run" / "checkpoint-2", 0)["state"]
    assert str(parts) == seen["before"]
    assert set(parts) == {"generation", "loss", "beta", "lengths", "prompts", "lag"}
    assert parts["generation"]["entropy"] is not None


@pytest.mark.slow
def test_a_reference_that_moved_is_that_of_the_checkpoint_when_a_run_is_over(run, tmp_path):
    """Killed between its last checkpoint and its last evaluation, whose KL is to the reference as it is by then."""
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "eval_every": 0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("train", whole, learning_rate=0.05, **moving)[0] == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "model")
    rows = (parts / "history.jsonl").read_text().splitlines(keepends=True)
    assert "evaluation" in rows[-1]
    (parts / "history.jsonl").write_text("".join(rows[:-1]))
    assert run("train", parts, resume=True)[0] == 0
    assert history(whole) == history(parts)


@pytest.mark.slow
@pytest.mark.parametrize(("more", "expected"), [({}, 0.7), ({"kl_target": 1.0}, None)])
def test_a_constant_beta_is_a_setting_and_an_adapted_one_is_state(more, expected, run, tmp_path):
    folder = tmp_path / "run"
    assert run("train", folder, max_steps=2, eval_size=0, **more)[0] == 0
    before = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])["kl/coef"]
    assert run("train", folder, resume=True, max_steps=3, kl_coef=0.7)[0] == 0
    after = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])["kl/coef"]
    if expected is None:  # moved by one update, by at most 20% of 1 / kl_horizon
        assert after == pytest.approx(before, rel=0.01)
        assert after != 0.7
    else:
        assert after == expected


def test_shapes_are_those_of_all_parameters():
    layer = torch.nn.Linear(3, 2)
    assert checkpoint.shapes(layer) == {"weight": [2, 3], "bias": [2]}

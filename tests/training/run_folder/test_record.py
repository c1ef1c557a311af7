"""`--resume` deletes nothing that took training to make."""

import json
import shutil

import pytest
import torch
from training.conftest import contents

from klgrad.errors import RunError
from klgrad.training.settings import parse

pytestmark = [pytest.mark.filterwarnings("ignore")]


def without_checkpoints(folder):
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)


def with_damaged_checkpoints(folder):
    for path in folder.glob("checkpoint-*"):
        (path / "klgrad_manifest.json").unlink()


@pytest.mark.parametrize("damage", [without_checkpoints, with_damaged_checkpoints, lambda _: None])
@pytest.mark.parametrize("more", [{}, {"max_steps": 2}])
def test_a_finished_run_is_left_as_it_is(damage, more, run, parts):
    damage(parts)
    before = contents(parts)
    status, text = run("train", parts, resume=True, **more)
    assert status == 0
    said = " ".join(text.split())
    assert "is finished, after 4 updates; nothing was changed." in said
    is_whole = damage not in (without_checkpoints, with_damaged_checkpoints)
    assert ("To make it longer, give a larger --max_steps" in said) == is_whole  # else it would be refused
    assert contents(parts) == before


@pytest.mark.slow
def test_a_finished_run_without_checkpoints_of_epochs(run, tmp_path):
    """Its length is not in its settings, but a longer one is not the one that is finished."""
    folder = tmp_path / "run"
    epochs = {"max_steps": None, "num_train_epochs": 1, "train_size": 4, "save_strategy": "no", "eval_size": 0}
    assert run("train", folder, **epochs)[0] == 0
    before = contents(folder)
    assert run("train", folder, resume=True)[0] == 0
    with pytest.raises(RunError, match=r"would delete history\.jsonl, summary\.json, model"):
        run("train", folder, resume=True, num_train_epochs=2)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_run_of_epochs_can_be_made_longer(run, tmp_path):
    epochs = {"max_steps": None, "num_train_epochs": 1, "train_size": 4, "eval_size": 0}
    assert "2 updates in" in run("train", tmp_path / "run", **epochs)[1]
    assert "4 updates in" in run("train", tmp_path / "run", resume=True, num_train_epochs=2)[1]


LEFT = {
    "history.jsonl": lambda parts: shutil.rmtree(parts / "model"),
    "model": lambda parts: (parts / "history.jsonl").unlink() or (parts / "summary.json").unlink(),
}


@pytest.mark.parametrize("left", LEFT)
def test_what_would_be_lost_is_named_and_kept(left, run, parts):
    LEFT[left](parts)
    without_checkpoints(parts)
    before = contents(parts)
    with pytest.raises(RunError, match=left) as refused:
        run("train", parts, resume=True, max_steps=6)
    assert f"klgrad train --output_dir {parts} --resume --overwrite" in str(refused.value)
    assert contents(parts) == before


@pytest.mark.slow
def test_it_begins_again_where_that_is_asked_for(run, parts, finished, weights):
    shutil.rmtree(parts / "model")
    with_damaged_checkpoints(parts)
    status, text = run("train", parts, resume=True, overwrite=True)
    assert status == 0
    assert "starts again" in text
    assert all(torch.equal(x, weights(parts)[name]) for name, x in weights(finished).items())


@pytest.mark.slow
def test_a_lost_summary_is_made_up_for_from_the_last_checkpoint(run, parts, weights, finished):
    (parts / "summary.json").unlink()
    (parts / "history.jsonl").unlink()
    status, text = run("train", parts, resume=True)
    assert status == 0
    assert "4 updates, completed before" in text
    summary = json.loads((parts / "summary.json").read_text())
    assert summary["updates"] == summary["after_updates"] == 4
    assert summary["before"] is None  # nobody knows any more
    assert all(torch.equal(x, weights(parts)[name]) for name, x in weights(finished).items())


@pytest.mark.parametrize("settings", [None, [1], 5])
def test_settings_that_are_none(settings, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"command": "train", "settings": settings}))
    with pytest.raises(RunError, match="the settings of a run, by name"):
        parse("train", ["--output_dir", str(tmp_path), "--resume", "--use_cpu"])

"""A run that is replaced is kept until the new one has made an update; what that starts from is never deleted."""

import json

import pytest
from training.conftest import contents

from klgrad.errors import RunError
from klgrad.training import run_folder

pytestmark = [pytest.mark.filterwarnings("ignore")]
QUIET = {"eval_size": 0, "max_steps": 1}


@pytest.mark.slow
def test_a_failed_overwrite_leaves_the_old_run_as_it_was(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, **QUIET)
    before = contents(folder)
    (tmp_path / "reward.py").write_text(
        "calls = 0\n\ndef fail(completions, **_):\n    global calls\n    calls += 1\n"
        "    if calls > 1:\n        raise ValueError('out of order')\n    return [0.0] * len(completions)\n"
    )
    with pytest.raises(Exception, match="out of order"):
        run("train", folder, overwrite=True, reward=f"{tmp_path / 'reward.py'}:fail", **QUIET)
    assert contents(folder) == before
    assert run("train", folder, overwrite=True, seed=5, **QUIET)[0] == 0
    assert not (folder / run_folder.REPLACED).exists()


@pytest.mark.slow
def test_a_kill_before_the_first_update_leaves_the_old_run(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, **QUIET)
    before = contents(folder)
    run_folder.set_aside(folder)
    run_folder.write_run(folder, "train", {}, {})  # as the new run has it when it is killed
    with pytest.raises(RunError, match="an output folder without a run"):
        run("train", folder, **QUIET)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_model_inside_the_run_is_not_overwritten(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, **QUIET)
    before = contents(folder)
    for name in (folder / "model", f"{folder / 'model'}:2"):
        with pytest.raises(RunError, match="which is a part of it"):
            run("train", folder, model=name, overwrite=True, **QUIET)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_run_that_was_to_be_longer_is_not_called_finished(run, tmp_path):
    folder = tmp_path / "run"
    epochs = {"eval_size": 0, "max_steps": None, "train_size": 8, "save_steps": 1}
    run("train", folder, num_train_epochs=1, **epochs)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_train_epochs"] == 1
    # As after a kill between the first update of `--resume --num_train_epochs 3` and its first checkpoint.
    recorded = json.loads((folder / "run.json").read_text())
    recorded["settings"]["num_train_epochs"] = 3
    (folder / "run.json").write_text(json.dumps(recorded))
    assert run("train", folder, resume=True)[0] == 0
    assert json.loads((folder / "summary.json").read_text())["updates"] == 3 * summary["updates"]


@pytest.mark.slow
def test_steps_recorded_and_epochs_asked_for(run, tmp_path):
    folder = tmp_path / "run"
    run("train", folder, eval_size=0, max_steps=1, train_size=8, save_steps=1)
    assert run("train", folder, resume=True, max_steps=-1, num_train_epochs=2)[0] == 0
    assert json.loads((folder / "summary.json").read_text())["updates"] > 1
